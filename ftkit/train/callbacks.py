"""Callbacks of a run: metrics.jsonl, a progress bar, and ending on request.

metrics.jsonl has one line per logging step and one per evaluation, with `eval_loss` in place of `loss`. Losses are in nats
per label token; `loss` is the mean since the last line. `tokens` counts those of all ranks since the beginning, without
padding. `divergences` counts the diverged steps of this process, and the peaks of memory are those of rank 0.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.hf.fp16.search import widens_inputs
from ftkit.output.run_folder import RunFolder, append_line
from ftkit.report.text import GIB, literal

PLAIN_LINES = 20
NUMBERS = {
    "loss": ("loss", ".4f"),
    "eval_loss": ("held-out loss", ".4f"),
    "eval_perplexity": ("perplexity", ".4f"),
    "eval_accuracy": ("accuracy", ".4f"),
    "grad_norm": ("grad norm", ".3f"),
    "learning_rate": ("lr", ".2e"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "loss_scale": ("scale", ".0f"),
}
"""Keys of metrics.jsonl that are shown, their names and formats."""


def peak_device_bytes() -> int:
    """Return the peak of GPU memory that this process allocated; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def peak_host_bytes() -> int:
    """Return the peak of resident host memory of this process, without the shards of other ranks that it maps."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes - of_other_ranks()


class MetricsLog(TrainerCallback):
    """Write metrics.jsonl and show each line.

    Args:
        trainer: Trainer of the run.
        folder: Folder of the run.
        show: Called with each line, on rank 0.
        divergences: Returns the number of diverged steps of this process.
    """

    def __init__(
        self, trainer: Any, folder: RunFolder, show: Callable[[dict[str, Any]], None], divergences: Callable[[], int]
    ):
        self.trainer, self.folder, self.show, self.divergences = trainer, folder, show, divergences
        self.evaluated_at: int | None = None
        self.since: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the lines of steps that this run repeats; if it starts at the beginning, all lines."""
        if state.is_world_process_zero:
            last = self.folder.keep_metrics_until(state.global_step or -1)
            self.evaluated_at = last["step"] if "eval_loss" in last else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of tokens per second, which leaves evaluations out."""
        if self.since is None:
            self.since = (time.perf_counter(), state.num_input_tokens_seen)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Write the line of an evaluation, once per step: the run evaluates once more at its end."""
        self.since = None
        if not state.is_world_process_zero or self.evaluated_at == state.global_step or not metrics:
            return
        self.evaluated_at = state.global_step
        others = {name: metrics[name] for name in ("eval_perplexity", "eval_accuracy") if name in metrics}
        # The mean over label tokens; `eval_loss` of the Trainer is the mean over batches.
        self._write({"step": state.global_step, "epoch": state.epoch, "eval_loss": metrics["eval_token_loss"], **others})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line of a training step. Logs of evaluations and of the end have no `loss`."""
        if not state.is_world_process_zero or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), int(state.num_input_tokens_seen)
        before, tokens_before = self.since or (now, tokens)
        self.since = (now, tokens)
        scale = self.trainer.engine_optimizer.loss_scale
        record = {
            "step": state.global_step,
            "epoch": state.epoch,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens": tokens,
            "tokens_per_second": (tokens - tokens_before) / (now - before) if now > before else None,
            "loss_scale": scale.value if scale.dynamic else None,
            "divergences": self.divergences(),
            "peak_device_bytes": peak_device_bytes(),
            "peak_host_bytes": peak_host_bytes(),
        }
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        append_line(self.folder.metrics, record)
        self.show(record)


class LookAtModel(TrainerCallback):
    """Print which parts of the sharded model use fused kernels, and find what overflows in fp16 on the first batches."""

    def __init__(self, trainer: Any, console: Console):
        self.trainer, self.console = trainer, console

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the model, and refuse a run in which the modules that need fp32 do not fit."""
        units = self.trainer.engine
        where = "" if units.comm.device.type == "cuda" else "off without a GPU; on one, "
        self.console.print(literal(f"fused kernels: {where}{units.fused.summary()}"))
        self.trainer.overflow_scan.look(self.trainer.first_batches())
        if widens_inputs(units):
            self.trainer.plan.check_wide_inputs()


class Bar(TrainerCallback):
    """Show no steps; `ProgressBar` does."""

    def show(self, record: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl. Called on rank 0 alone."""


class ProgressBar(Bar):
    """Show the steps on rank 0's console: a bar on a terminal, otherwise about twenty lines."""

    def __init__(self, console: Console):
        self.console = console
        self.bar: Progress | None = None
        self.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the bar."""
        self.steps = state.max_steps
        if state.is_world_process_zero and self.console.is_terminal:
            columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
            self.bar = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=self.console)
            self.bar.add_task("training", total=state.max_steps, completed=state.global_step, numbers="")
            self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(self, record: dict[str, Any]) -> None:
        """Show a logging step in the bar, an evaluation above it. Without a bar, print some of the steps."""
        step, evaluated = record["step"], "eval_loss" in record
        if self.bar is not None and not evaluated:
            self.bar.update(self.bar.task_ids[0], numbers=describe(record))
        elif evaluated or step in (1, self.steps) or step % max(1, self.steps // PLAIN_LINES) == 0:
            self.console.print(f"step {step}/{self.steps}  {describe(record)}")


def describe(record: dict[str, Any]) -> str:
    """Return the numbers of a line of metrics.jsonl as text."""
    parts = [f"{name} {record[key]:{form}}" for key, (name, form) in NUMBERS.items() if record.get(key) is not None]
    for key, name in (("peak_device_bytes", "GPU"), ("peak_host_bytes", "host")):
        if record.get(key):
            parts.append(f"{name} {record[key] / GIB:.1f} GiB")
    return "  ".join(parts)


class EndOnRequest(TrainerCallback):
    """Save and end after the same step on all ranks, once `asked` is true on one. Cost: one small all-reduce per step."""

    def __init__(self, trainer: Any, asked: Callable[[], bool]):
        self.trainer, self.asked = trainer, asked
        self.ended_at_step: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask all ranks, and save and end if one was asked. The last step ends anyway."""
        if self.trainer.engine.comm.any(self.asked()) and state.global_step < state.max_steps:
            self.ended_at_step = state.global_step
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # there may be little time
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Complete the checkpoint at once, without an evaluation."""
        if self.ended_at_step is not None:
            control.should_evaluate = False
            self.trainer.checkpoints.finish()
        return control
