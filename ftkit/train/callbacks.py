"""What a run tells while it trains: metrics.jsonl, a progress bar, and whether the user asked it to end.

`TellFused` says what runs as fused kernels. All are callbacks of the HF Trainer. `MetricsLog` writes one JSON object a
logging step, the same keys in each, and one an evaluation, which has `eval_loss` in place of `loss`. `ProgressBar` shows the
same numbers; on a terminal as a bar, otherwise as some twenty lines. `EndOnRequest` lets all ranks agree, once a step, to
save and end: a rank that heard the signal later must not enter another step alone.

Cost: one all-reduce of a single number a step, and a file opened a logging step.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.hf.fp16.search import widens_inputs
from ftkit.hf.sharding import units_of
from ftkit.output.run_folder import RunFolder, append_line
from ftkit.plan.choice import Plan
from ftkit.report.text import literal

GIB = 1 << 30
PLAIN_LINES = 20


def peak_device_bytes() -> int:
    """Return the most bytes of GPU memory that this process ever held; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def peak_host_bytes() -> int:
    """Return the most bytes of host memory that this process had resident.

    CPU ranks read each other's parameters in place. The other ranks' part of that memory, as it is now, is subtracted.
    """
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes - of_other_ranks()


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Args:
        step: Optimizer steps done.
        epoch: Passes over the data done.
        loss: Mean training loss since the last line, nats a label token.
        grad_norm: Global norm before clipping.
        learning_rate: Learning rate of the last step.
        tokens: Tokens seen since the beginning, all ranks together, without padding.
        tokens_per_second: Tokens per second since the last line.
        loss_scale: The loss scale of fp16, else None.
        divergences: Steps of this process so far whose loss went wrong.
        peak_device_bytes: Most device memory that rank 0 used.
        peak_host_bytes: Most host memory that rank 0 used.
    """

    step: int
    epoch: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens: int
    tokens_per_second: float | None
    loss_scale: float | None
    divergences: int
    peak_device_bytes: int
    peak_host_bytes: int


class MetricsLog(TrainerCallback):
    """Write metrics.jsonl and hand each line on.

    Args:
        folder: The run's folder.
        loss_scale: Returns the loss scale of fp16, or None.
        show: Called with each line of a training step.
        show_evaluation: Called with the step and the numbers of each evaluation.
        divergences: Returns how many steps went wrong so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        loss_scale: Callable[[], float | None],
        show: Callable[[StepMetrics], None] = lambda metrics: None,
        show_evaluation: Callable[[int, dict[str, float]], None] = lambda step, numbers: None,
        divergences: Callable[[], int] = lambda: 0,
    ):
        self.folder, self.loss_scale, self.show, self.show_evaluation = folder, loss_scale, show, show_evaluation
        self.divergences = divergences
        self.evaluated_at: int | None = None
        self.since: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the lines that this run is about to write again; after a rollback that is said once more, too."""
        self.since = self.evaluated_at = None
        if state.is_world_process_zero:
            self.folder.keep_metrics_until(state.global_step or -1)  # of a run that begins, also the losses before it

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock at the first step: evaluation before it is not training time."""
        if self.since is None:
            self.since = (time.perf_counter(), state.num_input_tokens_seen)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Write a line for an evaluation, once a step, and leave its time out of the tokens a second."""
        self.since = None
        if not state.is_world_process_zero or self.evaluated_at == state.global_step or not metrics:
            return
        self.evaluated_at = state.global_step
        names = ("token_loss", "perplexity", "accuracy")
        numbers = {name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics}
        numbers["loss"] = numbers.pop("token_loss", metrics.get("eval_loss"))  # of all label tokens alike, not of batches
        self._write({"step": state.global_step, "epoch": state.epoch, **{f"eval_{k}": v for k, v in numbers.items()}})
        self.show_evaluation(state.global_step, numbers)

    def _write(self, record: dict[str, Any]) -> None:
        append_line(self.folder.metrics, record)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a line for a training step; other logs (evaluation, the end) are not such lines."""
        if not state.is_world_process_zero or "loss" not in logs:
            return
        now, tokens = time.perf_counter(), int(state.num_input_tokens_seen)
        before, tokens_before = self.since or (now, tokens)
        self.since = (now, tokens)
        metrics = StepMetrics(
            step=state.global_step,
            epoch=state.epoch,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            learning_rate=logs.get("learning_rate"),
            tokens=tokens,
            tokens_per_second=(tokens - tokens_before) / (now - before) if now > before else None,
            loss_scale=self.loss_scale(),
            divergences=self.divergences(),
            peak_device_bytes=peak_device_bytes(),
            peak_host_bytes=peak_host_bytes(),
        )
        self._write(vars(metrics))
        self.show(metrics)


class TellFused(TrainerCallback):
    """Say once, when the model is in place, which of its parts run as fused kernels.

    Args:
        console: Where the line is shown.
    """

    def __init__(self, console: Console):
        self.console = console
        self.told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Say it."""
        units = units_of(model)
        if units is None or self.told:
            return
        self.told = True
        where = "" if units.comm.device.type == "cuda" else " (computed by PyTorch: there is no GPU)"
        self.console.print(literal(f"fused{where}: {units.fused.summary()}"))


class LookAtFp16(TrainerCallback):
    """Look, before anything is computed, at what overflows in fp16 on the run's first batches.

    Args:
        trainer: The run's Trainer.
        plan: The run's plan, made before it was known what overflows.
    """

    def __init__(self, trainer: Any, plan: Plan):
        self.trainer, self.plan = trainer, plan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look; refuse where what must be fp32 does not fit."""
        self.trainer.overflow_scan.look(self.trainer.first_batches())
        if widens_inputs(self.trainer.units):
            self.plan.check_wide_inputs()


class Bar(TrainerCallback):
    """What shows the steps of a run; called on rank 0 alone, but for the Trainer's own calls."""

    def show(self, metrics: StepMetrics) -> None:
        """Show the numbers of a logging step."""
        raise NotImplementedError

    def show_evaluation(self, step: int, numbers: dict[str, float]) -> None:
        """Show what the held-out rows gave: loss, and of perplexity and accuracy those that were asked for."""
        raise NotImplementedError


class ProgressBar(Bar):
    """Show the steps on rank 0's terminal.

    Args:
        console: Where the bar is shown.
    """

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
        """Move the bar on."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(self, metrics: StepMetrics) -> None:
        """Show the numbers of a logging step."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], numbers=line_of(metrics))
        elif metrics.step in (1, self.steps) or metrics.step % max(1, self.steps // PLAIN_LINES) == 0:
            self.console.print(f"step {metrics.step}/{self.steps}  {line_of(metrics)}")

    def show_evaluation(self, step: int, numbers: dict[str, float]) -> None:
        """Show what the held-out rows gave, above the bar if there is one."""
        rest = "".join(f"  {name} {numbers[name]:.4f}" for name in ("perplexity", "accuracy") if name in numbers)
        self.console.print(f"step {step}/{self.steps}  held-out loss {numbers['loss']:.4f}{rest}")


def line_of(metrics: StepMetrics) -> str:
    """Return the numbers of a step as a person reads them."""
    parts = [
        _named("loss", metrics.loss, ".4f"),
        _named("grad norm", metrics.grad_norm, ".3f"),
        _named("lr", metrics.learning_rate, ".2e"),
        _named("tokens/s", metrics.tokens_per_second, ",.0f"),
        _named("scale", metrics.loss_scale, ".0f"),
        f"GPU {metrics.peak_device_bytes / GIB:.1f} GiB" if metrics.peak_device_bytes else "",
        f"host {metrics.peak_host_bytes / GIB:.1f} GiB",
    ]
    return "  ".join(part for part in parts if part)


def _named(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}"


class EndOnRequest(TrainerCallback):
    """Save and end after a step, on all ranks alike, once any of them was asked to.

    Args:
        asked: Whether this rank was asked.
        any_rank: Returns whether a flag is true on any rank; a collective.
        finish_save: Waits for the checkpoint that is being written; a collective.
    """

    def __init__(self, asked: Callable[[], bool], any_rank: Callable[[bool], bool], finish_save: Callable[[], None]):
        self.asked, self.any_rank, self.finish_save = asked, any_rank, finish_save
        self.ended_at_step: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask all ranks; if one was asked, save and end here."""
        if self.any_rank(self.asked()) and state.global_step < state.max_steps:
            self.ended_at_step = state.global_step
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Finish the checkpoint at once and evaluate nothing: who asked may not wait for long."""
        if self.ended_at_step is not None:
            control.should_evaluate = False
            self.finish_save()
        return control
