"""Callbacks of a run: metrics.jsonl, a progress bar, ending on request, and the sample prompts.

`MetricsLog` writes one line per logging step, always with the same keys, and one line per evaluation, with `eval_loss` in
place of `loss`. `ProgressBar` shows the same numbers: a bar on a terminal, otherwise about twenty lines. With `EndOnRequest`
all ranks save and end after the same step. `ShowFused` prints which parts of the model use fused kernels. `FindOverflows`
finds modules that overflow in fp16. `questions` returns the prompts of the recipe's `show`.

Cost: one all-reduce of one number per step.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ftkit.config.recipe import Show, Source
from ftkit.data.formats import BadRowError, Conversation, detect, parse_record, read_row
from ftkit.data.sources import rows
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.errors import UserError
from ftkit.hf.fp16.search import widens_inputs
from ftkit.hf.sharding import units_of
from ftkit.output.run_folder import RunFolder, append_line
from ftkit.plan.choice import Plan
from ftkit.report.text import literal

GIB = 1 << 30
PLAIN_LINES = 20
"""Lines of a run whose output is not a terminal."""
QUESTION_ROWS = 50
"""First rows of `show.path` in which questions are looked for."""


def peak_device_bytes() -> int:
    """Return the peak of GPU memory that this process allocated; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def peak_host_bytes() -> int:
    """Return the peak of resident host memory of this process, without the shards of other ranks that it maps."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes - of_other_ranks()


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    Args:
        step: Optimizer steps done.
        epoch: Passes over the data done.
        loss: Mean training loss since the last line, nats per label token.
        grad_norm: Global norm before clipping.
        learning_rate: Learning rate of the last step.
        tokens: Tokens of all ranks since the beginning, without padding.
        tokens_per_second: Tokens per second since the last line.
        loss_scale: Loss scale of fp16, else None.
        divergences: Diverged steps of this process.
        peak_device_bytes: Peak device memory of rank 0.
        peak_host_bytes: Peak host memory of rank 0.
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
    """Write metrics.jsonl and show each line.

    Args:
        folder: Folder of the run.
        loss_scale: Returns the loss scale of fp16, or None.
        show: Called with each line of a training step.
        show_evaluation: Called with the step and the numbers of each evaluation.
        divergences: Returns the number of diverged steps.
    """

    def __init__(
        self,
        folder: RunFolder,
        loss_scale: Callable[[], float | None],
        show: Callable[[StepMetrics], None],
        show_evaluation: Callable[[int, dict[str, float]], None],
        divergences: Callable[[], int],
    ):
        self.folder, self.loss_scale, self.show, self.show_evaluation = folder, loss_scale, show, show_evaluation
        self.divergences = divergences
        self.evaluated_at: int | None = None
        self.since: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the lines of steps that this run repeats; if it starts at the beginning, all lines."""
        if state.is_world_process_zero:
            self.folder.keep_metrics_until(state.global_step or -1)

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
        names = ("token_loss", "perplexity", "accuracy")
        numbers = {name: metrics[f"eval_{name}"] for name in names if f"eval_{name}" in metrics}
        numbers["loss"] = numbers.pop("token_loss")  # the mean over label tokens; `eval_loss` is the mean over batches
        record = {"step": state.global_step, "epoch": state.epoch, **{f"eval_{k}": v for k, v in numbers.items()}}
        append_line(self.folder.metrics, record)
        self.show_evaluation(state.global_step, numbers)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line of a training step. Logs of evaluations and of the end have no `loss`."""
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
        append_line(self.folder.metrics, vars(metrics))
        self.show(metrics)


class ShowFused(TrainerCallback):
    """Print which parts of the model use fused kernels, once it is sharded.

    Args:
        console: Console for the user.
    """

    def __init__(self, console: Console):
        self.console = console

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Print the parts."""
        units = units_of(model)
        if units is not None:
            where = "" if units.comm.device.type == "cuda" else " (computed by PyTorch: there is no GPU)"
            self.console.print(literal(f"fused{where}: {units.fused.summary()}"))


class FindOverflows(TrainerCallback):
    """Find what overflows in fp16 on the first batches, before the first step.

    Args:
        trainer: Trainer of the run.
        plan: Plan of the run, made before it was known what overflows.
    """

    def __init__(self, trainer: Any, plan: Plan):
        self.trainer, self.plan = trainer, plan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find them, and refuse a run in which the modules that need fp32 do not fit."""
        self.trainer.overflow_scan.look(self.trainer.first_batches())
        if widens_inputs(self.trainer.units):
            self.plan.check_wide_inputs()


class Bar(TrainerCallback):
    """Shows the steps of a run. `show` and `show_evaluation` are called on rank 0 alone."""

    def show(self, metrics: StepMetrics) -> None:
        """Show the numbers of a logging step."""
        raise NotImplementedError

    def show_evaluation(self, step: int, numbers: dict[str, float]) -> None:
        """Show the loss of the held-out rows, and perplexity and accuracy if they were wanted."""
        raise NotImplementedError


class ProgressBar(Bar):
    """Show the steps on rank 0's console.

    Args:
        console: Console for the user.
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
        """Advance the bar."""
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
            self.bar.update(self.bar.task_ids[0], numbers=describe(metrics))
        elif metrics.step in (1, self.steps) or metrics.step % max(1, self.steps // PLAIN_LINES) == 0:
            self.console.print(f"step {metrics.step}/{self.steps}  {describe(metrics)}")

    def show_evaluation(self, step: int, numbers: dict[str, float]) -> None:
        """Show an evaluation, above the bar if there is one."""
        rest = "".join(f"  {name} {numbers[name]:.4f}" for name in ("perplexity", "accuracy") if name in numbers)
        self.console.print(f"step {step}/{self.steps}  held-out loss {numbers['loss']:.4f}{rest}")


def describe(metrics: StepMetrics) -> str:
    """Return the numbers of a step as one line of text."""
    numbers = {
        "loss": (metrics.loss, ".4f"),
        "grad norm": (metrics.grad_norm, ".3f"),
        "lr": (metrics.learning_rate, ".2e"),
        "tokens/s": (metrics.tokens_per_second, ",.0f"),
        "scale": (metrics.loss_scale, ".0f"),
    }
    parts = [f"{name} {value:{form}}" for name, (value, form) in numbers.items() if value is not None]
    if metrics.peak_device_bytes:
        parts.append(f"GPU {metrics.peak_device_bytes / GIB:.1f} GiB")
    return "  ".join([*parts, f"host {metrics.peak_host_bytes / GIB:.1f} GiB"])


class EndOnRequest(TrainerCallback):
    """Save and end after the same step on all ranks, once one rank was asked to.

    Args:
        asked: Whether this rank was asked.
        any_rank: Returns whether a flag is true on any rank; a collective.
        finish_save: Waits for the checkpoint that is being written; a collective.
    """

    def __init__(self, asked: Callable[[], bool], any_rank: Callable[[bool], bool], finish_save: Callable[[], None]):
        self.asked, self.any_rank, self.finish_save = asked, any_rank, finish_save
        self.ended_at_step: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask all ranks, and save and end if one was asked. The last step ends anyway."""
        if self.any_rank(self.asked()) and state.global_step < state.max_steps:
            self.ended_at_step = state.global_step
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Complete the checkpoint at once, without an evaluation: there may be little time."""
        if self.ended_at_step is not None:
            control.should_evaluate = False
            self.finish_save()
        return control


@dataclass(frozen=True)
class Question:
    """A sample prompt, and the answer that the data have for it.

    Args:
        turns: Chat messages with role and content. The model answers the last one.
        expected: The answer in the data, or "".
        separator: Text between question and answer if the tokenizer has no chat template.
    """

    turns: tuple[dict, ...]
    expected: str = ""
    separator: str = "\n"

    @property
    def text(self) -> str:
        """The content of the last message."""
        return self.turns[-1]["content"]


def questions(show: Show) -> list[Question]:
    """Return the sample prompts of a recipe.

    Args:
        show: Section of the recipe, with prompts, or with a file whose first rows are taken.

    Raises:
        UserError: The file has no row with a question and an answer.
    """
    if show.path is None:
        return [Question(({"role": "user", "content": prompt},)) for prompt in show.prompts]
    found = list(islice(_of_file(show.path), show.count))
    if not found:
        raise UserError(f"show.path: {show.path} has no row with a question and an answer; write show.prompts instead")
    return found


def _of_file(path: str) -> Iterator[Question]:
    """Yield each conversation of the first rows up to its last answer. Rows that cannot be used are passed over."""
    records = []
    for row in islice(rows(Source(path=path)), QUESTION_ROWS):
        with suppress(BadRowError):
            records.append(parse_record(row.record))
    kind = detect(records, path)
    for record in records:
        with suppress(BadRowError):
            conversation = read_row(record, kind)
            if isinstance(conversation, Conversation) and (question := _question(conversation)):
                yield question


def _question(conversation: Conversation) -> Question | None:
    turns = conversation.turns
    last = max(number for number, turn in enumerate(turns) if turn["role"] == "assistant")
    return Question(turns[:last], turns[last]["content"], conversation.separator) if last else None
