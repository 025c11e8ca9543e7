"""What came of a run: summary.json, and the same for the eye.

Cost: one exchange of two numbers between the ranks, at the end.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
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
from ftkit.engine.memory.disk import Disk
from ftkit.output.run_folder import RunFolder
from ftkit.plan.choice import Plan
from ftkit.plan.memory import DEVICE_RUNTIME
from ftkit.report.text import literal
from ftkit.spec.tiers import DEVICE, HOST
from ftkit.train.callbacks import GIB, peak_device_bytes, peak_host_bytes
from ftkit.train.divergence_callback import diverged_steps
from ftkit.train.held_out import read_before, write_rows
from ftkit.train.trainer import RecipeTrainer

PACKAGES = ("ftkit", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors")


def summarise(
    trainer: RecipeTrainer, folder: RunFolder, seconds: float, dtype: str, plan: Plan, before: TrainerState | None = None
) -> dict[str, Any]:
    """Return what summary.json holds, and write the loss of each held-out row; all ranks take part.

    Args:
        trainer: The Trainer, after the last evaluation.
        folder: The run's folder.
        seconds: Seconds of training, the evaluations in between included.
        dtype: Compute dtype: fp32, bf16 or fp16.
        plan: The run's plan; its peaks stand beside those measured.
        before: Trainer state of the checkpoint that the run was continued from; the seconds of its steps are not in
            `seconds`.
    """
    peaks = trainer.all_ranks({"device_bytes": peak_device_bytes(), "host_bytes": peak_host_bytes()})
    units = trainer.units
    assert units is not None
    cores = trainer.all_ranks(str(units.affinity) if units.affinity else f"{counted(torch.get_num_threads(), 'thread')}")
    tokens = int(trainer.state.num_input_tokens_seen)
    noted = trainer.held_out
    first = noted[0] if noted and noted[0].step == 0 else read_before(folder.per_example)
    after = noted[-1] if noted else None
    if trainer.is_world_process_zero() and after is not None:
        write_rows(folder.per_example, first, after)
    tokens_before = int(before.num_input_tokens_seen) if before else 0
    return {
        "world_size": trainer.args.world_size,
        "steps": trainer.state.global_step,
        "steps_before": before.global_step if before else 0,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": (tokens - tokens_before) / seconds if seconds else None,
        "divergences": diverged_steps(folder.divergences),
        "train_loss": _mean_loss(trainer.state.log_history),
        "train_losses": len(_losses(trainer.state.log_history)),
        "train_losses_left_out": sum(not math.isfinite(loss) for loss in _losses(trainer.state.log_history)),
        "eval_loss_before": first.loss if first else None,
        "eval_loss_after": after.loss if after else None,
        "eval_before": first.summary() if first else None,
        "eval_after": after.summary() if after else None,
        "eval_metrics": list(trainer.wanted_metrics),
        "best": _best(trainer),
        "evaluations": [each.summary() for each in noted],
        "peaks_per_rank": peaks,
        "planned_per_rank": planned(plan),
        "cores_per_rank": cores,
        "nvme_per_rank": trainer.all_ranks(nvme_traffic(units.tiers.disk)),
        "fused": asdict(units.fused),
        "fp16": _fp16(trainer),
        "plan": plan.as_dict(),
        "dtype": dtype,
        "device": device_name(),
        "versions": versions(),
    }


def state_of(checkpoint: str | None) -> TrainerState | None:
    """Return what a checkpoint says of the run until it; to be asked before training, which may remove it."""
    return None if checkpoint is None else TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))


def planned(plan: Plan) -> dict[str, int]:
    """Return the peaks of a rank as the plan has them: on a device those of torch's allocator, which is what is measured."""
    device = plan.memory.peak(DEVICE)
    return {"device_bytes": max(device - DEVICE_RUNTIME, 0), "host_bytes": plan.memory.peak(HOST)}


def nvme_traffic(disk: Disk | None) -> dict[str, Any] | None:
    """Return the bytes that a rank has moved to and from its NVMe tier, and the file system; None without one."""
    if disk is None:
        return None
    moved = {"bytes_written": disk.threads.moved["writing"], "bytes_read": disk.threads.moved["reading"]}
    return {**moved, "direct": disk.direct, "filesystem": disk.filesystem}


def device_name() -> str:
    """Return what this process computes on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def _best(trainer: RecipeTrainer) -> dict[str, Any] | None:
    """Return the trained step with the lowest held-out loss, of this start and those before it; None without any."""
    known = {step: loss for step, loss in trainer.evaluated.items() if 0 < step <= trainer.state.global_step}
    finite = {step: loss for step, loss in known.items() if math.isfinite(loss)}
    step = min(finite, key=lambda each: finite[each], default=None)
    return None if step is None else {"step": step, "loss": finite[step]}


def _mean_loss(history: list[dict[str, Any]]) -> float | None:
    losses = [loss for loss in _losses(history) if math.isfinite(loss)]
    return float(np.mean(losses)) if losses else None


def _losses(history: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in history if "loss" in line]


def _fp16(trainer: RecipeTrainer) -> dict[str, Any] | None:
    """Return what computing in fp16 took: fp32 modules, steps skipped; None for other dtypes."""
    if trainer.engine.compute_dtype != torch.float16:
        return None
    upcast, skipped = trainer.engine.fp32_modules, trainer.engine_optimizer.loss_scale.skipped_steps
    told = f"fp32 modules: {upcast.describe()}; {counted(skipped, 'step')} skipped"
    overflows = [{"step": step, "where": where} for step, where in trainer.overflow_scan.overflows]
    return {"fp32_modules": {"found": upcast.found}, "skipped": skipped, "overflows": overflows, "told": told}


def _nvme_line(ranks: list[dict[str, Any]], seconds: float) -> str:
    written, read = (sum(each[key] for each in ranks) for key in ("bytes_written", "bytes_read"))
    line = f"{written / GIB:.1f} GiB written, {read / GIB:.1f} GiB read"
    if seconds:
        line += f"; a day at this speed writes {written / seconds * 86400 / 1e12:.2f} TB"
    return line + ("" if ranks[0]["direct"] else f" (through the page cache: {ranks[0]['filesystem']} takes no O_DIRECT)")


def show_answers(console: Console, records: list[dict[str, str]]) -> None:
    """Show each question with the answers before and after, and the one that stands in the data."""
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
    seconds, speed = summary["seconds"], summary["tokens_per_second"]
    ranks = f"{summary['world_size']} rank{'s' * (summary['world_size'] > 1)}"
    steps, done = summary["steps"], summary["steps_before"]
    made = f"{steps - done} on {ranks}, {seconds:.1f} s" + (f", {speed:,.0f} tokens/s" if speed else "")
    lines = [("steps", f"{steps}: {done} before this start; {made}" if done else made)]
    if summary["divergences"]:
        lines.append(("gone wrong", f"{counted(summary['divergences'], 'step')}: {folder.divergences}"))
    out, logged = summary.get("train_losses_left_out", 0), summary.get("train_losses", 0)
    if summary["train_loss"] is not None:
        told = f" (the mean without {out} of {logged} logged losses, which were not finite)" if out else ""
        lines.append(("train loss", f"{summary['train_loss']:.4f}{told}"))
    elif out:
        lines.append(("train loss", f"none of the {logged} logged losses was finite"))
    before, after = summary["eval_loss_before"], summary["eval_loss_after"]
    if before is not None and after is not None:
        change = 100 * (after / before - 1)
        rows = summary["eval_after"]["rows"]
        lines.append(("held-out loss", f"{before:.4f} before, {after:.4f} after ({change:+.1f} %), {counted(rows, 'row')}"))
    elif after is not None:
        lines.append(("held-out loss", f"{after:.4f}"))
    best = summary["best"]
    if best is not None and best["step"] < steps:
        lines.append(("best", f"held-out loss {best['loss']:.4f} after step {best['step']}; model/ is of the last step"))
    for name in ("perplexity", "accuracy"):
        if name in summary["eval_metrics"] and summary["eval_after"]:
            began = f"{summary['eval_before'][name]:.4f} before, " if summary["eval_before"] else ""
            lines.append((name, f"{began}{summary['eval_after'][name]:.4f} after"))
    peaks: list[str] = []
    for name, key in (("GPU", "device_bytes"), ("host", "host_bytes")):
        peak, plan = max(each[key] for each in summary["peaks_per_rank"]), summary["planned_per_rank"][key]
        if peak:
            peaks.append(f"{name} {peak / GIB:.2f} GiB ({plan / GIB:.2f} planned)")
    lines.append(("peak a rank", ", ".join(peaks)))
    cores = summary["cores_per_rank"]
    lines.append(("cores a rank", cores[0] if len(set(cores)) == 1 else "; ".join(f"{n}: {c}" for n, c in enumerate(cores))))
    if summary["fp16"] is not None:
        lines.append(("fp16", summary["fp16"]["told"]))
    if moved := [each for each in summary["nvme_per_rank"] if each is not None]:
        lines.append(("NVMe", _nvme_line(moved, seconds)))
    if summary.get("problem") is not None:
        lines.insert(0, ("FAILED", summary["problem"]))
    earlier = f"; {folder.model} is of an earlier run" if folder.model.exists() else ""
    model = str(folder.model) if summary.get("model_written", True) else f"none was written{earlier}"
    return [*lines, ("model", model), ("results", str(folder.path))]
