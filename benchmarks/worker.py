"""One rank of one benchmark run: build a Llama, train a few steps through the Trainer, write what was measured as JSON.

Started by `benchmarks.run`. All engines get the same model, data, dtype, batch and optimizer; only `engines.py` differs.
Memory is the process's peak resident size. A page of shared memory counts in equal parts for the ranks that use it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

STARTED = float(os.environ["BENCH_STARTED"])
SPEC = json.loads(os.environ["BENCH_SPEC"])

from benchmarks.engines import ENGINES  # noqa: E402  (the clock must start first)

ENGINE = ENGINES[SPEC["engine"]]
os.environ.update(ENGINE.environment)

import torch  # noqa: E402  (as above)
import transformers  # noqa: E402  (as above)
from transformers import LlamaForCausalLM, TrainerCallback  # noqa: E402  (as above)

from benchmarks.shapes import VOCABULARY, llama  # noqa: E402  (as above)


def peak_bytes() -> int:
    """Return this process's peak resident size, without the other ranks' part of shared memory at the end."""
    lines = [line for file in ("status", "smaps_rollup") for line in Path("/proc/self", file).read_text().splitlines()]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.endswith("kB")}
    return 1024 * (kib["VmHWM"] - kib["RssShmem"] + kib["Pss_Shmem"])


class Clock(TrainerCallback):
    """Notes when steps begin and end, and the loss of each."""

    def __init__(self) -> None:
        self.first_step_begins: float | None = None
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.first_step_begins is None:
            self.first_step_begins = time.time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.ends.append(time.time())

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def random_tokens(rows: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens, the same for every engine and rank."""
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1234))
    return [{"input_ids": row, "labels": row} for row in ids]


def floor() -> None:
    """Run forward and backward alone, as often as the engines do: no collectives, no optimizer."""
    torch.manual_seed(42)
    model = LlamaForCausalLM(llama(SPEC["model"]))
    steps, began, losses = [], time.time(), []
    for row in random_tokens(SPEC["warmup"] + SPEC["steps"], SPEC["tokens"]):
        start = time.time()
        batch = {name: tensor.expand(SPEC["batch"], -1) for name, tensor in row.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=SPEC["dtype"] == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        steps.append(time.time() - start)
        losses.append(loss.item())
    write({"startup_s": began - STARTED, "steps_s": steps[SPEC["warmup"] :], "losses": losses, "wrapped": "none"})


def write(result: dict) -> None:
    """Write this rank's results to `rank<r>.json`."""
    result["peak_bytes"] = peak_bytes()
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    Path(SPEC["folder"], f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


def main() -> None:
    """Train through the Trainer, and write the results."""
    if ENGINE.ours:
        from ftkit import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments
    keywords = {
        "output_dir": SPEC["folder"],
        "per_device_train_batch_size": SPEC["batch"],
        "max_steps": SPEC["warmup"] + SPEC["steps"],
        "use_cpu": not torch.cuda.is_available(),
        "bf16": SPEC["dtype"] == "bf16",
        "ddp_backend": None if torch.cuda.is_available() else "gloo",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **ENGINE.arguments(SPEC["folder"]),
    }
    arguments = TrainingArguments(**keywords)
    torch.manual_seed(42)
    model = LlamaForCausalLM(llama(SPEC["model"]))
    rows = max(64, (SPEC["warmup"] + SPEC["steps"]) * SPEC["batch"] * SPEC["world"])
    clock = Clock()
    trainer = Trainer(model=model, args=arguments, train_dataset=random_tokens(rows, SPEC["tokens"]), callbacks=[clock])
    trainer.train()
    steps = [end - begin for begin, end in zip([clock.first_step_begins, *clock.ends], clock.ends)]
    write({
        "startup_s": clock.first_step_begins - STARTED,
        "first_step_s": steps[0],
        "steps_s": steps[SPEC["warmup"] :],
        "losses": clock.losses,
        "wrapped": type(trainer.model_wrapped).__name__,
    })
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    floor() if SPEC["engine"] == "floor" else main()
    sys.stdout.flush()
