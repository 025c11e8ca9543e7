"""The run of one rank: make the parts, train, evaluate, and write the run's folder.

`ftkit finetune` calls `run` in every rank. A notebook makes a `Job`, whose model stays in memory. Rank 0 alone prints and
writes. A run that is asked to end, by the user or by the memory guard, saves a checkpoint and writes no model.

From the command to `trainer.train()`: cli/training.py -> config/recipe.py -> this file -> train/build.py ->
train/arguments.py.

Cost: an evaluation before the first step and one after the last, where the recipe has held-out rows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
from accelerate.state import GradientState
from rich.console import Console
from transformers import TrainerCallback

from ftkit.config.recipe import Recipe
from ftkit.config.wording import counted
from ftkit.data.packing import check_isolation
from ftkit.engine.checkpoint.finite import NotFinite
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import Diverged, UserError
from ftkit.launch.ranks import Stop
from ftkit.output.run_folder import RunFolder, write_json
from ftkit.report.live import RunReport, simulated
from ftkit.report.plan_view import show_plan
from ftkit.report.text import literal
from ftkit.spec.strategy import decided
from ftkit.train.answers import ShowAnswers
from ftkit.train.arguments import compute_dtype, training_arguments
from ftkit.train.build import Parts, make_parts, make_trainer, notices, steps_in
from ftkit.train.callbacks import Bar, EndOnRequest, LookAtModel, MetricsLog, ProgressBar
from ftkit.train.divergence import DivergenceWatch
from ftkit.train.early_stopping import EarlyStopping, evaluations, stays_stopped
from ftkit.train.memory_guard import MemoryStop
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
    return summary


def dry_run(recipe: Recipe, ranks: int, checkpoints: Sequence[Path] = ()) -> None:
    """Make the parts of a run in one process, and print them. Arguments and errors are those of `run`."""
    say = Console(soft_wrap=True, highlight=False, emoji=False)

    def tell(text: object) -> None:
        say.print(literal(str(text)))

    parts = make_parts(recipe, ranks, [str(each) for each in checkpoints], None, tell)
    lines, rows, strategy = notices(recipe, parts), parts.rows, parts.plan.strategy
    micro_batch, accumulation = decided(strategy.micro_batch), decided(strategy.accumulation)
    if parts.start.checkpoint is not None:
        tell(f"would resume from {parts.start.checkpoint}")
    tell(recipe.dump())
    tell(rows.report)
    tell(f"held out: {counted(0 if rows.held_out is None else len(rows.held_out), 'row')}")
    show_plan(say, parts.plan)
    tell(
        f"step: {recipe.train.batch_tokens:,} tokens = {counted(ranks, 'rank')} x {counted(micro_batch, 'sequence')} x "
        f"{accumulation} micro-batch{'' if accumulation == 1 else 'es'} x {recipe.data.sequence_tokens:,} tokens"
    )
    for line in lines:
        tell(line)
    tell("nothing was trained (--dry-run)")


class Job:
    """One run of a recipe, as one of its ranks.

    Args:
        stop: Says whether the user asked this rank to end.
        recipe: The recipe.
        ranks: Number of processes of the whole run.
        bar: Makes the progress bar for a console.

    Attributes:
        trainer: The Trainer, which has the model. None until it is made.
        parts: The parts of the run. None until they are made.
    """

    def __init__(self, stop: Stop, recipe: Recipe, ranks: int, bar: Callable[[Console], Bar] = ProgressBar) -> None:
        self.stop, self.recipe, self.ranks, self.bar = stop, recipe, ranks, bar
        self.folder = RunFolder(Path(recipe.output.dir))
        self.trainer: Any = None
        self.parts: Parts | None = None

    def run(self, checkpoints: list[str], *, unless_over: bool = False) -> dict[str, Any]:
        """Train and write the run's folder. A collective. Arguments, result and errors are those of `run`.

        Args:
            checkpoints: As for `run`.
            unless_over: Return the summary of an earlier run that is over and wrote its model, and read no weights.
        """
        with MemoryStop(self.stop.rank, self.stop.leave) as memory:
            parts = self._build(checkpoints)
            summary = self._summary_if_over(parts) if unless_over else None
            return summary or self._train(parts, memory)

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
        parts = make_parts(recipe, self.ranks, checkpoints, Communicator(arguments.device), self._tell)
        if parts.start.checkpoint is not None:
            self._tell(f"resuming from {parts.start.checkpoint}")
        self._tell(parts.rows.report)
        strategy = parts.plan.strategy
        self._tell(f"plan: {strategy}; micro-batches of a step: {decided(strategy.accumulation)}")
        self.trainer = make_trainer(recipe, parts.rows, parts.tokenizer, parts.model, arguments, parts.plan)
        self.trainer.args.eval_on_start = self._begins_with_evaluation(parts.start.checkpoint)
        self.parts = parts
        return parts

    def _begins_with_evaluation(self, checkpoint: str | None) -> bool:
        """Return whether to evaluate before the first step, or at the checkpoint because the run that saved it did not yet.

        A run that is asked to end skips the evaluation. At the end of an epoch, the checkpoint comes before the evaluation.
        """
        held_out, state, order = self.recipe.eval, state_of(checkpoint), self.trainer.order
        if held_out is None or state is None:
            return held_out is not None
        every = held_out.every_steps or (len(order) // order.step_sequences if held_out.every_epoch else 0)
        due = every > 0 and state.global_step % every == 0
        return due and state.global_step not in evaluations(state.log_history, "loss")

    def _summary_if_over(self, parts: Parts) -> dict[str, Any] | None:
        """Return the summary of an earlier run that has nothing more to do, or None. A collective."""
        folder, state = self.folder, state_of(parts.start.checkpoint)
        steps = steps_in(self.recipe, self.trainer.order)
        found, how = folder.read_summary(), f"{counted(steps, 'step')} were made"
        more = "more train.epochs or train.max_steps"
        stopped = found.get("stopped_early") or {}
        if stays_stopped(stopped, self.recipe.eval):
            steps, how, more = stopped["step"], f"it {stopped['text']}", "a larger eval.patience or none"
        reached = state is not None and state.global_step >= steps
        over = reached and found.get("steps") == steps and found.get("problem") is None and folder.model.is_dir()
        summary = Communicator(self.trainer.args.device).same(found if over else None)
        if summary is not None:
            self._tell(f"{folder.path}: this run is over: {how}, and its model is there")
            self._tell(f"With {more} it continues; --overwrite begins anew")
        return summary

    def _train(self, parts: Parts, memory: MemoryStop) -> dict[str, Any]:
        """Train with the parts, and finish the run."""
        recipe, trainer, folder, say = self.recipe, self.trainer, self.folder, self.say
        checkpoint, writes = parts.start.checkpoint, trainer.is_world_process_zero()

        # --- the folder and the notices
        for line in notices(recipe, parts):
            self._tell(line)
        if writes:
            folder.write_recipe(recipe.dump())
            folder.summary.unlink(missing_ok=True)  # it belongs to the model beside it
        self.before = state_of(checkpoint)  # retention may remove the checkpoint

        # --- the callbacks
        watch = DivergenceWatch(trainer, folder, recipe.train.on_divergence, say)
        end = EndOnRequest(trainer, lambda: self.stop.asked or memory.asked)
        early = EarlyStopping(recipe.eval)
        shown = ShowAnswers(trainer, parts.questions, recipe.show.max_new_tokens if recipe.show else 0)
        facts = {
            "resumed_from": None if checkpoint is None else Path(checkpoint).name,
            "device": device_name(),
            "dtype": compute_dtype(recipe.train.dtype),
            "optimizer": recipe.optimizer.described,
            "versions": versions(),
            "plan": parts.plan.as_dict(),
            "simulated": simulated(parts.plan.speed),
        }
        report = RunReport(folder, writes, facts, lambda: trainer.units, lambda: shown.records, lambda: watch.count, say)
        bar = self.bar(say)
        log = MetricsLog(trainer, folder, bar.show, lambda: watch.count)
        memory.attach(trainer)
        if recipe.data.packing:
            trainer.add_callback(CheckPacking(trainer.data_collator))
        for callback in (LookAtModel(trainer, say), shown, bar, log, end, early, watch, report):
            trainer.add_callback(callback)  # `watch` after `end`: it may take back a save

        # --- training
        with report:
            began = time.perf_counter()
            trainer.train(resume_from_checkpoint=checkpoint)
            if (step := end.ended_at_step) is not None and watch.ended_by is None:
                memory.leave_if_asked()
                report.end(f"ended at step {step}, because it was asked to")
                if problem := trainer.checkpoints.problem:
                    raise UserError(f"ended at step {step} without a checkpoint of it: {problem}")
                return {"stopped": f"ended at step {step} with a checkpoint; --resume auto continues from it"}
            return self._finish(watch, early, shown, report, time.perf_counter() - began)

    def _finish(
        self, watch: DivergenceWatch, early: EarlyStopping, shown: ShowAnswers, report: RunReport, seconds: float
    ) -> dict[str, Any]:
        """Evaluate, write the model, answer the questions, and write and return the summary.

        Raises:
            Diverged: The run failed. The summary has the reason.
        """
        trainer, folder = self.trainer, self.folder
        problem, written = self._outcome(watch)
        if written:
            shown.finish(trainer.model, trainer.state.global_step)
        dtype = compute_dtype(self.recipe.train.dtype)
        summary = summarise(trainer, trainer.plan, folder, seconds, dtype, self.before)
        summary |= {"best": early.best, "stopped_early": early.stopped, "answers": shown.records}
        summary |= {"optimizer": self.recipe.optimizer.described, "problem": problem, "model_written": written}
        if trainer.is_world_process_zero():
            write_json(folder.summary, summary)
            show_answers(self.say, shown.records)
            show_summary(self.say, summary, folder)
        if problem is not None:
            saved = folder.checkpoints()
            resume = f"--resume auto continues from {saved[-1].name}. " if saved else ""
            advice = "Lower optimizer.lr, set train.on_divergence to skip, or look at the data of the last steps"
            raise Diverged(f"{problem}. {resume}{advice}")
        report.end()
        return summary

    def _outcome(self, watch: DivergenceWatch) -> tuple[str | None, bool]:
        """Evaluate, and write the model. Return the problem, if there is one, and whether the model was written."""
        if watch.ended_by is not None:
            return str(watch.ended_by), False
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


class CheckPacking(TrainerCallback):
    """Check, with the model in place, that packed samples do not see each other."""

    def __init__(self, collate: Callable[[list[dict]], dict[str, Any]]):
        self.collate = collate

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Raise UserError if they do."""
        check_isolation(model, self.collate)
