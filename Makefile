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

docs: setup  ## write the generated pages anew, and build the documentation in site/
	$(BIN)/python -m docs.recipe_keys
	$(BIN)/python -m docs.plan_figure
	$(BIN)/python -m docs.convergence_figure
	$(BIN)/python -m docs.cli_reference
	$(BIN)/mkdocs build --strict

docs-serve: setup  ## the documentation at http://127.0.0.1:8000, built anew as it is written
	$(BIN)/mkdocs serve --strict

compatibility: setup  ## write docs/compatibility.md: what is the same as in transformers and accelerate, what differs, what is refused
	$(BIN)/python -m tests.compat

bench: setup  ## step time, start-up and memory of ftkit, DDP, FSDP2 and DeepSpeed ZeRO-3, in turns
	$(BIN)/python -m benchmarks.run

OFFLOAD := ftkit-host,ftkit-host-deferred,ftkit-nvme,ftkit-nvme-now,ftkit-nvme-all,deepspeed-host,deepspeed-nvme
FORMS := ftkit-host-deferred,ftkit-nvme-all,ftkit-host-8bit,ftkit-nvme-all-8bit,ftkit-host-8bit-split,ftkit-nvme-all-8bit-split
bench-offload: setup  ## a step with the state in RAM and on NVMe, deferred or not, in each form, beside DeepSpeed
	$(BIN)/python -m benchmarks.run --models 134m --engines $(OFFLOAD)
	$(BIN)/python -m benchmarks.run --models 134m --engines $(OFFLOAD) --batch 4
	$(BIN)/python -m benchmarks.run --models 374m --engines $(FORMS) --tokens 64

bench-checkpoints: setup  ## save and resume through the Trainer beside FSDP2 and DeepSpeed ZeRO-3 (20 GB of disk)
	$(BIN)/python -m benchmarks.run --save --models 374m --tokens 64 --engines ftkit,ftkit-nvme-all,fsdp2,deepspeed-zero3,deepspeed-nvme

bench-memory: setup  ## host memory of load_model, save_model and ftkit export, against their bounds
	$(BIN)/python -m benchmarks.memory

bench-host: setup  ## the host's AdamW beside a stream with the same reads and writes, and torch
	$(BIN)/python -m benchmarks.host adam

bench-disk: setup  ## the NVMe tier beside plain O_DIRECT loops
	$(BIN)/python -m benchmarks.host disk

bench-kernels: setup  ## fused kernels on a GPU beside eager PyTorch, torch.compile and Liger-Kernel
	$(BIN)/python -m benchmarks.kernels

bench-cap: setup  ## full fine-tuning of a 2B Llama within 6 GiB, and the largest models of peers (needs root, 45 GB)
	$(BIN)/python -m benchmarks.cap --peers

bench-plan: setup  ## memory and seconds of small CPU runs beside their plan
	$(BIN)/python -m benchmarks.plan_against_runs

bench-convergence: setup  ## held-out loss with each form of optimizer state (half an hour on two idle cores)
	$(BIN)/python -m benchmarks.convergence
	$(BIN)/python -m benchmarks.convergence --model 134m --seeds 1 --steps 100 --lr 3e-4 --evaluations 5

kernels: setup  ## compile each fused kernel for four generations of GPUs: registers, shared memory, spills
	$(BIN)/python -m benchmarks.specimens

dry-runs: setup  ## every full-size recipe for 8xV100-16GB run with fake tensors, beside its plan
	$(BIN)/python -m benchmarks.fake_run

recipes: setup  ## write the packaged recipes, docs/models.md and the table of the README, as planned (some minutes)
	$(BIN)/python -m benchmarks.recipes
	$(BIN)/python -m docs.models_table

ablation: setup  ## write into docs/benchmarks.md how large a model fits 8xV100-16GB with each technique off
	$(BIN)/python -m benchmarks.ablation

published: setup  ## write into docs/benchmarks.md the plan's simulation of published V100 results
	$(BIN)/python -m benchmarks.published

.PHONY: kills compatibility notebooks help setup demo demo-control test test-all mutants ci gpu browser check docs docs-serve \
	bench bench-offload bench-checkpoints bench-memory bench-host bench-disk bench-kernels bench-cap bench-plan \
	bench-convergence \
	kernels dry-runs recipes ablation published
