"""The result of a run: summary.json, and the same as a table.

Cost: a few exchanges of numbers between ranks, at the end of the run.
"""

from __future__ import annotations

import math
import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ftkit.config.wording import counted
from ftkit.output.run_folder import RunFolder
from ftkit.plan.memory import DEVICE_RUNTIME
from ftkit.plan.plan import Plan
from ftkit.report.text import GIB, literal
from ftkit.spec.tiers import DEVICE, HOST
from ftkit.train.callbacks import peak_device_bytes, peak_host_bytes
from ftkit.train.divergence import diverged_steps
from ftkit.train.held_out import NAMES, read_before, write_rows
from ftkit.train.trainer import RecipeTrainer

PACKAGES = ("ftkit", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors")


def summarise(
    trainer: RecipeTrainer, plan: Plan, folder: RunFolder, seconds: float, dtype: str, before: TrainerState | None = None
) -> dict[str, Any]:
    """Return the content of summary.json, and write the loss of each held-out row. A collective.

    Args:
        trainer: The Trainer, after the last evaluation.
        plan: Plan of the run.
        folder: Folder of the run.
        seconds: Seconds of training, evaluations included, without the steps of `before`.
        dtype: Compute dtype.
        before: Trainer state of the checkpoint that was resumed.
    """
    units, comm, state, evaluations = trainer.engine, trainer.engine.comm, trainer.state, trainer.held_out
    first = evaluations[0] if evaluations and evaluations[0].step == 0 else read_before(folder.per_example)
    last = evaluations[-1] if evaluations else None
    if first is not None and (last is None or not np.array_equal(first.tokens, last.tokens)):
        first = None  # other held-out rows than before the resume
    if trainer.is_world_process_zero() and last is not None:
        write_rows(folder.per_example, first, last)
    eval_before, eval_after = (None if each is None else each.summary() for each in (first, last))
    losses = [line["loss"] for line in state.log_history if "loss" in line and math.isfinite(line["loss"])]
    tokens = int(state.num_input_tokens_seen)
    own_tokens = tokens - int(before.num_input_tokens_seen if before else 0)
    cores = str(units.affinity) if units.affinity else counted(torch.get_num_threads(), "thread")
    return {
        "world_size": trainer.args.world_size,
        "steps": state.global_step,
        "steps_before": before.global_step if before else 0,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": own_tokens / seconds if seconds else None,
        "divergences": diverged_steps(folder.divergences),
        "train_loss": statistics.fmean(losses) if losses else None,
        "eval_loss_before": eval_before["loss"] if eval_before else None,
        "eval_loss_after": eval_after["loss"] if eval_after else None,
        "eval_before": eval_before,
        "eval_after": eval_after,
        "peaks_per_rank": comm.all({"device_bytes": peak_device_bytes(), "host_bytes": peak_host_bytes()}),
        # Measured device bytes are those of torch's allocator, without the runtime.
        "planned_per_rank": {
            "device_bytes": max(plan.memory.peak(DEVICE) - DEVICE_RUNTIME, 0),
            "host_bytes": plan.memory.peak(HOST),
        },
        "cores_per_rank": comm.all(cores),
        "fp16": _fp16(trainer),
        "plan": plan.as_dict(),
        "dtype": dtype,
        "device": device_name(),
        "versions": versions(),
    }


def state_of(checkpoint: str | None) -> TrainerState | None:
    """Return the Trainer state of a checkpoint. Training may remove the checkpoint, so read it before."""
    return None if checkpoint is None else TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


def device_name() -> str:
    """Return the name of the device that this process computes on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def _fp16(trainer: RecipeTrainer) -> dict[str, Any] | None:
    if trainer.engine.compute_dtype != torch.float16:
        return None
    modules, skipped = trainer.engine.fp32_modules, trainer.engine_optimizer.loss_scale.skipped_steps
    text = f"fp32 modules: {modules.describe()}; {counted(skipped, 'step')} skipped"
    return {"fp32_modules": modules.found, "text": text}


def show_answers(console: Console, records: list[dict[str, Any]]) -> None:
    """Show each sample prompt with the answers before and after training, and the one in the data."""
    for record in records:
        console.print(f"\n[bold]{literal(record['question'])}[/]")
        for name in ("before", "after", "expected"):
            if record[name]:
                console.print(f"  [dim]{name:>8}:[/] {literal(record[name])}")


def show_summary(console: Console, summary: dict[str, Any], folder: RunFolder) -> None:
    """Show the summary as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _lines(summary, folder):
        table.add_row(f"[bold]{name}[/]", literal(value))
    console.print()
    console.print(table)


def _lines(summary: dict[str, Any], folder: RunFolder) -> list[tuple[str, str]]:
    lines = [("FAILED", summary["problem"])] if summary.get("problem") is not None else []
    steps, before, speed = summary["steps"], summary["steps_before"], summary["tokens_per_second"]
    made = f"{steps - before} on {counted(summary['world_size'], 'rank')}, {summary['seconds']:.1f} s"
    made += f", {speed:,.0f} tokens/s" if speed else ""
    lines.append(("steps", f"{steps}: {before} before this start; {made}" if before else made))
    if summary["stopped_early"]:
        lines.append(("early stopping", summary["stopped_early"]["text"]))
    if summary["divergences"]:
        lines.append(("diverged", f"{counted(summary['divergences'], 'step')}: {folder.divergences}"))
    loss = summary["train_loss"]
    lines.append(("mean train loss", "none is finite" if loss is None else f"{loss:.4f}"))
    lines += _evaluated(summary)
    for name, key in (("GPU", "device_bytes"), ("host", "host_bytes")):
        peak, planned = max(each[key] for each in summary["peaks_per_rank"]), summary["planned_per_rank"][key]
        if peak:
            lines.append((f"{name} peak", f"{peak / GIB:.2f} GiB per rank ({planned / GIB:.2f} planned)"))
    if summary["fp16"] is not None:
        lines.append(("fp16", summary["fp16"]["text"]))
    model = str(folder.model) if summary.get("model_written", True) else "none was written"
    return [*lines, ("model", model), ("results", str(folder.path))]


def _evaluated(summary: dict[str, Any]) -> list[tuple[str, str]]:
    before, after, best = summary["eval_before"], summary["eval_after"], summary["best"]
    if after is None:
        return []
    lines = []
    for key, name in NAMES.items():
        lines.append((name, (f"{before[key]:.4f} before, " if before else "") + f"{after[key]:.4f} after"))
    if best is not None and best["step"] < summary["steps"]:
        value = f"{NAMES[best['metric']]} {best['value']:.4f}"
        lines.append(("best", f"{value} after step {best['step']}; model/ is of the last step"))
    return lines
