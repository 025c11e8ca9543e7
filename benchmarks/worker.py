"""One rank of one benchmark run: train a Llama for a few steps through the Trainer, write the figures as JSON.

Started by `benchmarks.run`. All engines get the same model, data, dtype, batch and optimizer; only `engines.py` differs.
With `save` the Trainer also writes a checkpoint and trains `STEPS_AFTER` further steps, which a second run repeats from it.
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
STEPS_AFTER = 2
"""Steps after a save. The second one depends on the restored moments."""
os.environ.update(ENGINE.environment)

import torch  # noqa: E402  (as above)
from transformers import LlamaForCausalLM, TrainerCallback  # noqa: E402  (as above)

from benchmarks.shapes import llama  # noqa: E402  (as above)


def peak_bytes() -> int:
    """Return this process's peak resident size. A shared page counts in equal parts for the ranks that use it."""
    lines = [line for file in ("status", "smaps_rollup") for line in Path("/proc/self", file).read_text().splitlines()]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.endswith("kB")}
    return 1024 * (kib["VmHWM"] - kib["RssShmem"] + kib["Pss_Shmem"])


class Clock(TrainerCallback):
    """Notes the start of the first step, the end of each step, and the losses."""

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


def random_tokens(rows: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens, the same for every engine and rank."""
    vocabulary = llama(SPEC["model"]).vocab_size
    ids = torch.randint(0, vocabulary, (rows, SPEC["tokens"]), generator=torch.Generator().manual_seed(1234))
    return [{"input_ids": row, "labels": row} for row in ids]


def floor() -> None:
    """Run only forward and backward: no collectives, no optimizer."""
    torch.manual_seed(42)
    model = LlamaForCausalLM(llama(SPEC["model"]))
    steps, began, losses = [], time.time(), []
    for row in random_tokens(SPEC["warmup"] + SPEC["steps"]):
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
    if torch.cuda.is_available():
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    Path(SPEC["folder"], f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


def main() -> None:
    """Train through the Trainer, and write the results."""
    if ENGINE.ours:
        from ftkit import Trainer, TrainingArguments
    else:
        from transformers import Trainer, TrainingArguments
    last = SPEC["warmup"] + SPEC["steps"]
    keywords = {
        "output_dir": SPEC["folder"],
        "per_device_train_batch_size": SPEC["batch"],
        "max_steps": last + (STEPS_AFTER if SPEC["save"] else 0),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": SPEC["dtype"] == "bf16",
        "ddp_backend": None if torch.cuda.is_available() else "gloo",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "steps" if SPEC["save"] and not SPEC["resume"] else "no",
        "save_steps": last,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **ENGINE.arguments(SPEC["folder"]),
    }
    arguments = TrainingArguments(**keywords)
    torch.manual_seed(42)
    model = LlamaForCausalLM(llama(SPEC["model"]))
    rows = max(64, (last + STEPS_AFTER) * SPEC["batch"] * SPEC["world"])
    clock = Clock()
    trainer = Trainer(model=model, args=arguments, train_dataset=random_tokens(rows), callbacks=[clock])
    trainer.train(resume_from_checkpoint=SPEC["resume"])
    steps = [end - begin for begin, end in zip([clock.first_step_begins, *clock.ends], clock.ends)]
    write(
        {
            "startup_s": clock.first_step_begins - STARTED,
            "steps_s": steps if SPEC["resume"] else steps[SPEC["warmup"] : last],
            "after_s": steps[last:],
            "losses": clock.losses,
            "wrapped": type(trainer.model_wrapped).__name__,
        }
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    floor() if SPEC["engine"] == "floor" else main()
    sys.stdout.flush()
