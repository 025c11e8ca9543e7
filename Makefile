# Two commands matter: `make demo` does the main job, `make test` proves it. Both set up what they need.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv with the tested stack
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $(STAMP)

demo: setup  ## fine-tune the bundled model on two CPU ranks, and show what it learned
	$(BIN)/ftkit finetune recipes/tiny-cpu.yaml --overwrite

demo-control: setup  ## the same with shuffled answers: must come out worse, or nothing was learned from the questions
	test -f runs/demo/summary.json || $(MAKE) demo
	$(BIN)/python data/shuffle_answers.py data/python-docs.jsonl runs/shuffled.jsonl
	$(BIN)/ftkit finetune recipes/tiny-cpu.yaml --overwrite \
		--set data.path=runs/shuffled.jsonl --set output.dir=runs/demo-control
	$(BIN)/python data/compare_runs.py runs/demo runs/demo-control

test: setup  ## the tests, about ten minutes on two cores (FTKIT_TEST_PATIENCE=3 multiplies all time limits)
	$(BIN)/python -m tests.run

test-all: setup  ## the slow tests: full products and long fault tests, about half an hour
	$(BIN)/python -m tests.run --slow

mutants: setup  ## plant the committed faults whose file differs from SINCE=REF (without it: all); each must turn a test red
	$(BIN)/python -m tests.mutants $(if $(SINCE),--since $(SINCE))

kills: setup  ## kill a tiny run at 20 seeded times, resume it on the same and on other ranks, compare the weights (20 minutes)
	$(BIN)/python -m tests.kills

ci:  ## run .ci/run on a fresh clone of HEAD with a new environment (LOAD=2: beside two busy processes); writes runs/ci-passed
	@LOAD=$(LOAD) bash .ci/fresh

# PYTHON=... runs the checks without set-up. Without it .venv runs them, and is set up first if there is a GPU.
GIVEN := $(if $(filter command,$(origin PYTHON)),$(PYTHON))
HAS_GPU := $(wildcard /dev/nvidiactl)
gpu: $(if $(GIVEN),,$(if $(HAS_GPU),setup))  ## run the checks that need a GPU, report which claims they confirm (PYTHON=..., PARTS=..., OUT=...)
	$(or $(GIVEN),$(if $(HAS_GPU),$(BIN)/python),$(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu $(PARTS) $(if $(OUT),--out $(OUT))

browser: setup  ## the demo's report, and a notebook in JupyterLab, in Chromium, light and dark; writes docs/{report,notebook}-*.png
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[browser]'
	test -f runs/demo/summary.json || $(MAKE) demo
	$(BIN)/ftkit report runs/demo
	$(BIN)/python -m pytest -m browser tests/browser

notebooks: setup  ## execute all notebooks on two CPU ranks; fails when one is broken (WRITE=--write puts the outputs in)
	$(BIN)/python -m notebooks.run $(WRITE)

check: setup  ## lint, types, import contracts, the documentation
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

census: setup  ## count the house: files, import chains, quoted tier names, long functions (WORD=... lists the places of a row)
	$(BIN)/python -m benchmarks.census $(if $(WORD),--list '$(WORD)')

docs: setup  ## write the generated pages anew, and build the documentation in site/
	$(BIN)/python -m docs.recipe_keys
	$(BIN)/python -m docs.plan_figure
	$(BIN)/python -m docs.cli_reference
	$(BIN)/mkdocs build --strict

docs-serve: setup  ## the documentation at http://127.0.0.1:8000, built anew as it is written
	$(BIN)/mkdocs serve --strict

compatibility: setup  ## write docs/compatibility.md: what is the same as in transformers and accelerate, what differs, what is refused
	$(BIN)/python -m tests.compat

bench: setup  ## step time, start-up and memory of ftkit, DDP, FSDP2 and DeepSpeed ZeRO-3, in turns
	$(BIN)/python -m benchmarks.run

OFFLOAD := ftkit-host,ftkit-host-deferred,ftkit-nvme,ftkit-nvme-now,ftkit-nvme-all,deepspeed-host,deepspeed-nvme
bench-offload: setup  ## a step with the state in RAM, in host arenas and on NVMe, deferred or not, beside DeepSpeed
	$(BIN)/python -m benchmarks.run --models 134m --engines $(OFFLOAD)
	$(BIN)/python -m benchmarks.run --models 134m --engines $(OFFLOAD) --batch 4

bench-host: setup  ## the host's AdamW against a stream with the same reads and writes, torch, DeepSpeed
	$(BIN)/python -m benchmarks.host_adam

bench-disk: setup  ## the NVMe tier against raw O_DIRECT, DeepSpeed's aio, fio
	$(BIN)/python -m benchmarks.disk

bench-collectives: setup  ## collectives between CPU ranks, compared with a plain copy
	$(BIN)/python -m benchmarks.collectives

bench-checkpoints: setup  ## saves and loads beside FSDP2 with DCP and DeepSpeed ZeRO-3, their memory, export of 3B in 3 GiB (40 GB)
	$(BIN)/python -m benchmarks.checkpoints

kernels: setup  ## what each fused kernel becomes on four generations of GPUs: registers, shared memory, spills
	$(BIN)/python -m benchmarks.kernel_table

bench-kernels: setup  ## fused kernels on a GPU beside eager PyTorch, torch.compile and Liger-Kernel
	$(BIN)/python -m benchmarks.kernels

bench-generate: setup  ## tokens per second of answers: sharded models, gathered and streamed, and the whole model
	$(BIN)/python -m benchmarks.generation

bench-head: setup  ## the memory of a head and its loss, by chunks beside all logits at once (16 GB)
	$(BIN)/python -m benchmarks.head

bench-cap: setup  ## full fine-tuning of a 2B Llama by two ranks within 6 GiB, state and weights on NVMe (needs root, 45 GB)
	$(BIN)/python -m benchmarks.cap --peers

recipes: setup  ## write the packaged recipes, docs/models.md and the table of the README, as planned (some minutes)
	$(BIN)/python -m benchmarks.recipes
	$(BIN)/python -m docs.models_table

ablation: setup  ## write docs/ablation.md: how large a model fits 8xV100-16GB with each technique off
	$(BIN)/python -m benchmarks.ablation

dry-runs: setup  ## every full-size recipe for 8xV100-16GB executed with tensors that hold nothing, beside its plan
	$(BIN)/python -m benchmarks.dry_runs

published: setup  ## write docs/published.md: the plan's seconds beside what others published for V100s
	$(BIN)/python -m benchmarks.published

bench-plan: setup  ## the plan of ten runs against the peaks that they reach, on a CPU
	$(BIN)/python -m benchmarks.plan_against_runs

bench-seconds: setup  ## the plan's seconds of five runs, on this machine's own measured profile, beside those they take
	$(BIN)/python -m benchmarks.seconds_against_runs

.PHONY: kills census compatibility notebooks help setup demo demo-control test test-all mutants ci gpu browser check docs docs-serve bench bench-host bench-disk bench-collectives bench-checkpoints bench-cap bench-offload \
	recipes ablation dry-runs published bench-plan bench-seconds bench-head bench-kernels bench-generate kernels
