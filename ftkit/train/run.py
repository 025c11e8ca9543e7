"""The run of one rank: make the parts, train, evaluate, and write the run's folder.

`ftkit finetune` calls `run` in every rank. A notebook makes a `Job`, whose model stays in memory. Rank 0 alone prints and
writes. A run that is asked to end, by the user or by the memory guard, saves a checkpoint and writes no model.

Cost: an evaluation before the first step and one after the last, where the recipe has held-out rows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from accelerate.state import GradientState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers import TrainerCallback

from ftkit.config.recipe import Recipe, steps_of
from ftkit.config.wording import counted
from ftkit.data.packing import check_isolation
from ftkit.data.prepare import Prepared
from ftkit.engine.checkpoint.finite import NotFinite
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import Diverged, UserError
from ftkit.hf.generate.generation import generate
from ftkit.launch.ranks import Stop
from ftkit.output.run_folder import RunFolder, write_json
from ftkit.plan.choice import Plan
from ftkit.report.live import RunReport, simulated
from ftkit.report.text import literal
from ftkit.spec.strategy import decided
from ftkit.train.arguments import compute_dtype, training_arguments
from ftkit.train.build import Parts, make_parts, make_trainer, notices
from ftkit.train.callbacks import Bar, EndOnRequest, LookAtModel, MetricsLog, ProgressBar, Question
from ftkit.train.divergence import DivergenceWatch
from ftkit.train.memory_guard import MemoryStop
from ftkit.train.planning import ask_here
from ftkit.train.resume import choose
from ftkit.train.summary import device_name, show_answers, show_summary, state_of, summarise, versions


def run(stop: Stop, recipe: Recipe, checkpoints: list[str], ranks: int) -> dict[str, Any]:
    """Fine-tune as one of the ranks, and leave the process group.

    Args:
        stop: Says whether the user asked this rank to end.
        recipe: The recipe.
        checkpoints: Folders to resume from, in the order in which they are tried. None begins at the first step.
        ranks: Number of processes of the whole run.

    Returns:
        The content of summary.json, or `stopped` with a sentence if the run was asked to end.

    Raises:
        UserError: The run cannot begin, or it could not save the checkpoint that it was asked for.
        Diverged: The loss or the weights are not finite.
    """
    job = Job(stop, recipe, ranks)
    summary = job.run(checkpoints, unless_over=True)
    job.trainer.end()
    if not summary.pop("saved", True):
        raise UserError(summary["stopped"])
    return summary


class Job:
    """One run of a recipe, as one of its ranks.

    Args:
        stop: Says whether the user asked this rank to end.
        recipe: The recipe.
        ranks: Number of processes of the whole run.
        bar: Makes the progress bar for a console.

    Attributes:
        trainer: The Trainer, which has the model. None until it is made.
        tokenizer: The model's tokenizer. None until it is made.
        rows: The prepared rows. None until they are made.
        plan: How memory is used. None until it is made.
    """

    def __init__(self, stop: Stop, recipe: Recipe, ranks: int, bar: Callable[[Console], Bar] = ProgressBar) -> None:
        self.stop, self.recipe, self.ranks, self.bar = stop, recipe, ranks, bar
        self.folder = RunFolder(Path(recipe.output.dir))
        self.trainer: Any = None
        self.tokenizer: Any = None
        self.rows: Prepared | None = None
        self.plan: Plan | None = None

    def run(self, checkpoints: list[str], *, unless_over: bool = False) -> dict[str, Any]:
        """Train and write the run's folder. A collective. Arguments, result and errors are those of `run`.

        Args:
            checkpoints: As for `run`.
            unless_over: Return the summary of an earlier run with this recipe that made all steps, and read no weights.

        Returns:
            As `run`. With `stopped` also `saved`: whether the last step has a checkpoint.
        """
        with MemoryStop(self.stop.rank, self.stop.leave) as memory:
            parts = self._build(checkpoints)
            if unless_over and (summary := self._summary_if_over(parts)) is not None:
                return summary
            return self._train(parts, memory)

    def restore(self, checkpoints: list[str]) -> int:
        """Load the first whole checkpoint, train nothing, write nothing, and return its step. A collective."""
        with MemoryStop(self.stop.rank, self.stop.leave) as memory:
            parts = self._build(checkpoints)
            memory.attach(self.trainer)
            self.trainer.add_callback(LookAtModel(self.trainer, self.say))
            self.trainer.args.eval_on_start = False
            self.trainer.restore(parts.start.checkpoint)
            return self.trainer.state.global_step

    def _build(self, checkpoints: list[str]) -> Parts:
        """Make the parts and the Trainer."""
        recipe = self.recipe
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()  # in a log file each tick would be a line
        GradientState().dataloader_references = [None]  # an interrupted run of this process leaves its own
        arguments = training_arguments(recipe, self.ranks)
        self.say = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, quiet=arguments.process_index > 0)
        comm, tell = Communicator(arguments.device), self._tell
        parts = make_parts(
            recipe,
            self.ranks,
            lambda model: ask_here(recipe, model, self.ranks, comm).plan(),
            lambda: choose(checkpoints, recipe, comm, tell),
        )
        self.tokenizer, self.plan, self.rows = parts.tokenizer, parts.plan, parts.rows
        arguments.eval_on_start = parts.rows.held_out is not None and parts.start.checkpoint is None
        if parts.start.checkpoint is not None:
            tell(f"resuming from {parts.start.checkpoint}")
        tell(parts.rows.report)
        tell(f"plan: {parts.plan.strategy}; micro-batches of a step: {decided(parts.plan.strategy.accumulation)}")
        self.trainer = make_trainer(recipe, parts.rows, parts.tokenizer, parts.model, arguments, parts.plan)
        return parts

    def _summary_if_over(self, parts: Parts) -> dict[str, Any] | None:
        """Return the summary of an earlier run that has nothing more to do, or None. A collective."""
        folder, order, checkpoint = self.folder, self.trainer.order, parts.start.checkpoint
        steps = steps_of(self.recipe, len(order.order), order.step_sequences)
        found = folder.read_summary(self.recipe.dump())
        last = checkpoint is not None and Path(checkpoint).resolve() == (folder.path / f"checkpoint-{steps}").resolve()
        over = last and found.get("steps") == steps and found.get("problem") is None
        [summary] = broadcast_object_list([found if over else None])
        if summary is not None:
            text = f"{folder.path}: this run is over: {counted(steps, 'step')} were made, and its model is there"
            self._tell(f"{text}. With more train.epochs or train.max_steps it goes on; --overwrite begins anew")
        return summary

    def _train(self, parts: Parts, memory: MemoryStop) -> dict[str, Any]:
        """Train with the parts, and finish the run."""
        recipe, trainer, folder, say = self.recipe, self.trainer, self.folder, self.say
        checkpoint = parts.start.checkpoint
        if trainer.is_world_process_zero():
            for line in notices(recipe, parts, trainer.order):
                self._tell(line)
            folder.write_recipe(recipe.dump())
            folder.summary.unlink(missing_ok=True)  # it belongs to the model beside it
        self.before = state_of(checkpoint)  # retention may remove the checkpoint
        shown = ShowAnswers(parts.questions, parts.tokenizer, recipe.show.max_new_tokens if recipe.show else 0)
        watch = DivergenceWatch(trainer, folder, recipe.train.on_divergence, say)
        end = EndOnRequest(trainer, lambda: self.stop.asked or memory.asked)
        facts = {
            "resumed_from": None if checkpoint is None else Path(checkpoint).name,
            "device": device_name(),
            "dtype": compute_dtype(recipe.train.dtype),
            "versions": versions(),
            "plan": parts.plan.as_dict(),
            "simulated": simulated(parts.plan.speed),
        }
        writes, events = trainer.is_world_process_zero(), lambda: watch.count
        report = RunReport(folder, writes, facts, lambda: trainer.units, shown.records, events, say)
        bar = self.bar(say)
        log = MetricsLog(trainer, folder, bar.show, events)
        memory.attach(trainer)
        first: list[TrainerCallback] = [CheckPacking(trainer.data_collator)] if recipe.data.packing else []
        first += [LookAtModel(trainer, say)]
        first += [shown] if parts.questions and checkpoint is None else []
        for callback in (*first, bar, log, end, watch, report):  # `watch` may take back the saves that others ask for
            trainer.add_callback(callback)
        with report:
            began = time.perf_counter()
            trainer.train(resume_from_checkpoint=checkpoint)
            if end.ended_at_step is not None:
                memory.leave_if_asked()
                return self._stopped(end.ended_at_step, report)
            return self._finish(watch, shown, report, time.perf_counter() - began)

    def _stopped(self, step: int, report: RunReport) -> dict[str, Any]:
        """Return the result of a run that was asked to end after `step`."""
        problem = self.trainer.checkpoints.problem
        saved = "with a checkpoint; --resume auto continues from it"
        report.end(f"ended at step {step}, because it was asked to")
        how = saved if problem is None else f"without a checkpoint of it: {problem}"
        return {"stopped": f"ended at step {step} {how}", "saved": problem is None}

    def _finish(self, watch: DivergenceWatch, shown: ShowAnswers, report: RunReport, seconds: float) -> dict[str, Any]:
        """Evaluate, write the model, answer the questions, and write and return the summary.

        Raises:
            Diverged: The run failed. The summary has the reason.
        """
        trainer, folder = self.trainer, self.folder
        problem, written = (watch.ended_by, False) if watch.ended_by else self._outcome(watch)
        answers = shown.records(shown.answers(trainer.model) if written and shown.asked else None)
        dtype = compute_dtype(self.recipe.train.dtype)
        summary = summarise(trainer, trainer.plan, folder, seconds, dtype, self.before)
        summary |= {"problem": problem, "model_written": written, "answers": answers}
        if trainer.is_world_process_zero():
            write_json(folder.summary, summary)
            show_answers(self.say, answers)
            show_summary(self.say, summary, folder)
        if problem is not None:
            raise Diverged(f"{problem}. {self._advice()}")
        report.end()
        return summary

    def _outcome(self, watch: DivergenceWatch) -> tuple[str | None, bool]:
        """Evaluate, and write the model. Return the problem, if there is one, and whether the model was written."""
        trainer, problem = self.trainer, None
        held_out = trainer.evaluate()["eval_loss"] if trainer.eval_dataset is not None else 0.0
        if not math.isfinite(watch.last_loss):
            problem = f"training failed: the loss of the last step is {watch.last_loss}"
        elif not math.isfinite(held_out):
            problem = f"training failed: the loss of the held-out rows at the end is {held_out}"
        try:
            trainer.save_model(str(self.folder.model))
        except UserError as error:
            # The rank with a weight that is not finite raises NotFinite, the others an error with its text.
            if not trainer.engine.comm.any(isinstance(error, NotFinite)):
                raise
            with suppress(OSError):  # another rank was faster
                self.folder.model.rmdir()
            return f"{problem or 'training failed'}: {error}", False
        return problem, True

    def _tell(self, text: object) -> None:
        """Print text without markup, on rank 0."""
        self.say.print(literal(str(text)))

    def _advice(self) -> str:
        """Return the advice for a run that failed."""
        last, divergences = next(iter(self.folder.newest_first()), None), self.folder.divergences
        advice = f"{divergences} names the steps. " if divergences.exists() else ""
        advice += f"--resume auto continues from {last.name}. " if last else "There is no checkpoint to resume from. "
        return f"{advice}Lower optimizer.lr, set train.on_divergence to skip, or look at the data of the last steps"


@dataclass
class CheckPacking(TrainerCallback):
    """Check, with the model in place, that packed samples do not see each other.

    Args:
        collate: The run's collator.
    """

    collate: Callable[[list[dict]], dict[str, Any]]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Raise UserError if they do."""
        check_isolation(model, self.collate)


@dataclass
class ShowAnswers(TrainerCallback):
    """Answer the questions before the first step, and keep the answers.

    Args:
        asked: The questions.
        tokenizer: The model's tokenizer.
        max_new_tokens: Most tokens of an answer.
        before: The answers before the first step. Filled when training begins.
    """

    asked: list[Question]
    tokenizer: Any
    max_new_tokens: int
    before: list[str] = field(default_factory=list)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Answer with the model as it was loaded."""
        self.before = self.answers(model)

    def answers(self, model: Any) -> list[str]:
        """Answer every question. A collective."""
        turns, separators = [each.turns for each in self.asked], [each.separator for each in self.asked]
        return generate(model, self.tokenizer, turns, max_new_tokens=self.max_new_tokens, separator=separators)

    def records(self, after: list[str] | None = None) -> list[dict[str, str]]:
        """Return question, expected answer, and the answers before and after, one dictionary per question."""
        none = [""] * len(self.asked)
        return [
            {"question": each.text, "expected": each.expected, "before": first, "after": last}
            for each, first, last in zip(self.asked, self.before or none, after or none)
        ]
