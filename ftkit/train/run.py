"""The job of one rank: rows, model, training, and what is left of it in the run's folder.

`run` is what the launcher calls in every rank; a `Job` is the same for ranks that live on. It prepares the data before the
ranks wait for each other, loads the model without a whole copy anywhere, evaluates and answers the recipe's questions,
trains, does both again, and writes the folder (`run_folder`). Rank 0 alone writes and speaks. A run that was asked to end,
by the user or by the memory guard (`memory_stop`), saves a checkpoint and returns; it exports no model, because it is not
done.

It refuses what the recipe, the data and the loader refuse, before the first step. What it costs: two evaluations that
a bare training would not make.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
from accelerate.state import GradientState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainerState

from ftkit.config.recipe import Recipe, steps_of
from ftkit.config.wording import counted
from ftkit.data.faults import stops_of
from ftkit.data.prepare import Collator, check_isolation
from ftkit.engine.checkpoint.finite import NotFinite
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import Diverged, UserError
from ftkit.hf.generate.generation import generate
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.memory.shape import common_limits
from ftkit.launch.ranks import Stop
from ftkit.output.run_folder import RunFolder, write_json
from ftkit.plan.choice import Plan
from ftkit.report.live import RunReport, simulated
from ftkit.report.plan_text import show_plan
from ftkit.report.text import literal
from ftkit.spec.strategy import decided
from ftkit.train.arguments import compute_dtype, engine_settings, training_arguments
from ftkit.train.build import decoder_inputs, make_parts, positions_of
from ftkit.train.callbacks import Bar, EndOnRequest, FindOverflows, MetricsLog, ProgressBar, Question, ShowFused
from ftkit.train.divergence import DivergenceWatch
from ftkit.train.memory_guard import MemoryStop
from ftkit.train.notices import notices
from ftkit.train.planning import ask_here, ask_model, box_here, disk_room
from ftkit.train.resume import check_noted, first_whole, noted
from ftkit.train.run_rows import Rows
from ftkit.train.summary import device_name, show_answers, show_summary, state_of, summarise, versions
from ftkit.train.trainer import RecipeTrainer, WholeSteps


def run(stop: Stop, recipe: Recipe, checkpoints: list[str], ranks: int) -> dict[str, Any]:
    """Fine-tune as a recipe says, as one of the ranks of the run, and leave the ranks' process group.

    Args:
        stop: Says whether the user asked this rank to end.
        recipe: The facts.
        checkpoints: Folders to continue from, in the order in which they are tried; none to start from the beginning.
        ranks: Processes of the whole run.

    Returns:
        What summary.json holds; `stopped`, with a sentence, if the run was ended on request.

    Raises:
        UserError: The recipe, the data or the model cannot be used. Where host memory runs out the process ends with
            `MemoryShort` and does not return.
    """
    job = Job(stop, recipe, ranks)
    summary = job.run(checkpoints, unless_over=True)
    job.trainer.end()
    if not summary.pop("saved", True):
        raise UserError(summary["stopped"])
    return summary


class Job:
    """One run of a recipe, as one of its ranks; what it made stays at hand for whoever lives on after it.

    Args:
        stop: Says whether the user asked this rank to end.
        recipe: The facts.
        ranks: Processes of the whole run.
        bar: Makes what shows the steps, from the console that it may write to.

    Attributes:
        trainer: The run's Trainer, which holds the model; None until it is made.
        tokenizer: The model's tokenizer; None until it is made.
        rows: The prepared rows; None until they are made.
        plan: How memory is used; None until it is made.
    """

    def __init__(self, stop: Stop, recipe: Recipe, ranks: int, bar: Callable[[Console], Bar] = ProgressBar) -> None:
        self.stop, self.recipe, self.ranks, self.bar = stop, recipe, ranks, bar
        self.folder = RunFolder(Path(recipe.output.dir))
        self.trainer: Any = None
        self.tokenizer: Any = None
        self.rows: Rows | None = None
        self.plan: Plan | None = None
        self.asked: list[Question] = []
        self.checkpoint: str | None = None  # that it goes on from
        self.before: TrainerState | None = None  # of that checkpoint

    def run(self, checkpoints: list[str], *, unless_over: bool = False) -> dict[str, Any]:
        """Train, and leave the run's folder; all ranks take part.

        Args:
            checkpoints: See `run` of this module.
            unless_over: Do not train where an earlier run with the same recipe made all its steps and left its model. No
                weights are loaded then.

        Returns:
            As `run`; where it was ended on request also `saved`: whether there is a checkpoint of its last step.

        Raises:
            UserError: As `run`.
        """
        with MemoryStop(self.stop.rank, self.stop.leave) as memory, ExitStack() as stack:
            plan = self._build(checkpoints)
            if unless_over and (summary := self._summary_if_over()) is not None:
                return summary
            return self._train(plan, memory, stack)

    def restore(self, checkpoints: list[str]) -> int:
        """Bring the first whole one of some checkpoints into memory, train nothing and write nothing; returns its step.

        Raises:
            UserError: As `run`.
        """
        with MemoryStop(self.stop.rank, self.stop.leave) as memory:
            plan = self._build(checkpoints)
            memory.attach(self.trainer)
            self.trainer.add_callback(FindOverflows(self.trainer, plan))
            self.trainer.args.eval_on_start = False
            self.trainer.restore(self.checkpoint)
            return self.trainer.state.global_step

    def _build(self, checkpoints: list[str]) -> Plan:
        """Make the model, the rows and the Trainer, and find what to go on from."""
        recipe = self.recipe
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()  # a bar in a log file is a line a tick
        GradientState().dataloader_references = [None]  # of a run of this process that was cut off
        arguments = training_arguments(recipe, self.ranks)
        parts = make_parts(recipe, self.ranks, lambda model: follow_plan(recipe, model, arguments, self.ranks))
        tokenizer, plan, rows = self.tokenizer, self.plan, self.rows = parts.tokenizer, parts.plan, parts.rows
        self.asked = parts.asked
        quiet = arguments.process_index > 0
        say = self.say = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, quiet=quiet)
        [checkpoints] = broadcast_object_list([checkpoints])  # ranks of an outer job have each looked for themselves
        comm = Communicator(arguments.device)
        checkpoint = self.checkpoint = first_whole(checkpoints, comm, lambda line: say.print(literal(line)))
        if checkpoint is not None:
            check_noted(checkpoint, recipe, rows.prepared.report.digest)
            say.print(literal(f"resuming from {checkpoint}"))
        arguments.eval_on_start = rows.held_out is not None and checkpoint is None
        say.print(literal(str(rows.prepared.report)))
        batches = decided(plan.strategy.accumulation)
        say.print(literal(f"plan: {plan.strategy}, {batches} a step" if batches > 1 else f"plan: {plan.strategy}"))
        self.trainer = make_trainer(recipe, rows, tokenizer, parts.model, arguments, plan)
        return plan

    def _summary_if_over(self) -> dict[str, Any] | None:
        """Return what a run left that has nothing more to do, and say so; None for one that goes on. A collective."""
        folder, order = self.folder, self.trainer.order
        steps = steps_of(self.recipe, len(order.order), order.step_sequences)
        last = folder.path / f"checkpoint-{steps}"
        found = folder.read_summary(self.recipe.dump()) if self.checkpoint else {}
        whole = bool(found) and found.get("problem") is None and found.get("steps") == steps
        over = whole and Path(self.checkpoint or "").resolve() == last.resolve()
        [summary] = broadcast_object_list([found if over else None])
        if summary is not None:
            said = f"{folder.path}: this run is over: {counted(steps, 'step')} were made, and its model is there"
            self.say.print(literal(f"{said}. With more train.epochs or train.max_steps it goes on; --overwrite begins anew"))
        return summary

    def _train(self, plan: Plan, memory: MemoryStop, stack: ExitStack) -> dict[str, Any]:
        """Do the work of `run`, once everything is made; what is to be told of an error's end is entered into `stack`."""
        recipe, trainer, say, folder = self.recipe, self.trainer, self.say, self.folder
        self._say_notices()
        if trainer.is_world_process_zero():
            folder.write_recipe(recipe.dump())
        shown = ShowAnswers(self.asked, self.tokenizer, recipe.show.max_new_tokens if recipe.show else 0)
        memory.attach(trainer)
        first: list[TrainerCallback] = [FindOverflows(trainer, plan)]
        first += [shown] if self.asked and self.checkpoint is None else []
        watch = DivergenceWatch(trainer, folder, recipe.train.on_divergence, say)
        end = add_callbacks(
            trainer, recipe, folder, lambda: self.stop.asked or memory.asked, say, first, watch, self.bar(say)
        )
        report = RunReport(
            folder,
            trainer.is_world_process_zero(),
            report_facts(recipe, plan, self.checkpoint),
            lambda: trainer.units,
            shown.known,
            lambda: len(watch.found),
            say,
        )
        trainer.add_callback(report)
        stack.enter_context(report)
        if trainer.is_world_process_zero():
            folder.summary.unlink(missing_ok=True)  # a summary belongs to the model beside it
        self.before = state_of(self.checkpoint)  # now: training may remove it
        began = time.perf_counter()
        self._make_steps(watch, plan, began)
        if end.ended_at_step is not None:
            memory.leave_if_asked()
            return self._stopped(end.ended_at_step, report)
        return self._finish(watch, plan, time.perf_counter() - began, shown, report)

    def _say_notices(self) -> None:
        """Say what a user should know before the first step."""
        trainer, rows = self.trainer, self.rows
        assert rows is not None
        stops = stops_of(getattr(trainer.model, "generation_config", None))
        faults = [] if self.say.quiet else rows.faults(self.tokenizer, stops)
        order, step_sequences = trainer.order.order, trainer.order.step_sequences
        known, left_out, report = positions_of(trainer.model), rows.left_out(order), rows.prepared.report
        longest = self.tokenizer.model_max_length
        for line in notices(self.recipe, report, len(order), step_sequences, faults, known, longest, self.asked, left_out):
            self.say.print(literal(line))

    def _make_steps(self, watch: DivergenceWatch, plan: Plan, began: float) -> None:
        """Train until the steps are made, or the run is ended.

        Raises:
            Diverged: A step diverged and the recipe says stop. The summary is written before.
        """
        trainer, folder = self.trainer, self.folder
        trainer.train(resume_from_checkpoint=self.checkpoint)
        if watch.ended_by is None:
            return
        last = next(iter(folder.newest_first()), None)
        advice = "there is no checkpoint to resume from" if last is None else f"--resume auto continues from {last.name}"
        problem = f"{watch.ended_by}\n{advice}; train.on_divergence: skip would go past that step"
        summary = self._summary(plan, time.perf_counter() - began)
        if trainer.is_world_process_zero():
            write_json(folder.summary, {**summary, "problem": problem, "answers": []})
        raise Diverged(problem)

    def _stopped(self, step: int, report: RunReport) -> dict[str, Any]:
        """Return what is left of a run that was asked to end after `step`."""
        problem = self.trainer.checkpoints.problem
        report.end(f"ended at step {step}, because it was asked to" if problem is None else f"ended at step {step}")
        if problem is not None:
            return {"stopped": f"ended at step {step}, without a checkpoint of it: {problem}", "saved": False}
        return {"stopped": f"ended at step {step} with a checkpoint; --resume auto continues from it", "saved": True}

    def _finish(
        self, watch: DivergenceWatch, plan: Plan, seconds: float, shown: ShowAnswers, report: RunReport
    ) -> dict[str, Any]:
        """Evaluate, judge, write the model and answer the questions of a run that made its steps; return its summary.

        Raises:
            Diverged: for a run that failed, once its summary is written.
        """
        trainer, say, folder = self.trainer, self.say, self.folder
        problem = self._judged(watch)
        refused = self._write_model()
        if refused is not None:
            problem = f"{problem or 'training failed'}: {refused}"
        after = [""] * len(self.asked)
        if self.asked and refused is None:
            try:
                after = shown.answers(trainer.model)
            except UserError as error:  # of weights that 16 bits do not hold: the run has a model and a summary all the same
                problem = problem or f"the questions of show could not be answered: {error}"
        summary = self._summary(plan, seconds) | {"problem": problem, "model_written": refused is None}
        if trainer.is_world_process_zero():
            write_json(folder.summary, {**summary, "answers": shown.records(after)})
            report.end()
            show_answers(say, shown.records(after))
            show_summary(say, summary, folder)
        if problem is not None:
            raise Diverged(f"{problem}. {self._advice()}")
        return summary

    def _judged(self, watch: DivergenceWatch) -> str | None:
        """Return the problem if the loss of the last step, or of the held-out rows at the end, is not finite."""
        assert self.rows is not None
        held_out = self.trainer.evaluate()["eval_loss"] if self.rows.held_out is not None else 0.0
        if (last := watch.broken_loss(self.trainer.state.global_step)) is not None:
            return f"training failed: the loss of the last step is {last}"
        if not math.isfinite(held_out):
            return f"training failed: the loss of the held-out rows at the end is {held_out}"
        return None

    def _write_model(self) -> str | None:
        """Write the model. If its weights are not finite, write none and return the reason. A collective."""
        trainer, folder = self.trainer, self.folder
        refused = None
        try:
            trainer.save_model(str(folder.model))
        except UserError as error:
            # The rank that met such a weight has the class of the error, others only its text.
            if not trainer.any_rank(isinstance(error, NotFinite)):
                raise
            refused = str(error)
        if trainer.is_world_process_zero() and refused is not None:
            with suppress(OSError):  # it holds files, or was not made
                folder.model.rmdir()
        return refused

    def _summary(self, plan: Plan, seconds: float) -> dict[str, Any]:
        dtype = compute_dtype(self.recipe.train.dtype)
        return summarise(self.trainer, self.folder, seconds, dtype, plan, self.before)

    def _advice(self) -> str:
        """Return what to do about a run that failed."""
        last, divergences = next(iter(self.folder.newest_first()), None), self.folder.divergences
        told = [f"{divergences} names the steps."] if divergences.exists() else []
        told += ["There is no checkpoint to go back to." if last is None else f"The last checkpoint is {last.name}."]
        ways = ["Lower optimizer.lr"]
        ways += ["set train.on_divergence to skip"] if self.recipe.train.on_divergence == "continue" else []
        return " ".join([*told, f"{', '.join(ways)}, or look at the data of the last steps"])


def follow_plan(recipe: Recipe, model: Any, arguments: Any, ranks: int) -> Plan:
    """Plan the run, the same on all ranks, and put its micro-batches into the Trainer's arguments.

    Raises:
        DoesNotFit: With numbers and ways out, before anything is allocated.
    """
    comm = Communicator(arguments.device)
    limits = common_limits(engine_settings(recipe), comm)
    limits = replace(limits, disk_bytes=disk_room(recipe))
    box = comm.same(box_here(recipe))  # boxes of several kinds choose by the first one's rates, all of them
    plan = ask_model(recipe, model, ranks, limits, box).plan()
    arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = decided(plan.strategy.micro_batch)
    arguments.gradient_accumulation_steps = decided(plan.strategy.accumulation)
    return plan


def report_facts(recipe: Recipe, plan: Plan, checkpoint: str | None) -> dict[str, Any]:
    """Return what the report tells of a run before its first step."""
    return {
        "resumed_from": None if checkpoint is None else Path(checkpoint).name,
        "device": device_name(),
        "dtype": compute_dtype(recipe.train.dtype),
        "versions": versions(),
        "plan": plan.as_dict(),
        "simulated": simulated(plan.speed),
    }


def make_trainer(
    recipe: Recipe,
    rows: Rows,
    tokenizer: Any,
    model: Any,
    arguments: Any,
    plan: Plan | None,
    *,
    kind: type[RecipeTrainer] = RecipeTrainer,
) -> Any:
    """Put the model, the rows, the plan and the recipe's wishes into a Trainer of some kind; None: a stock model's."""
    micro_batch, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    boundaries = recipe.data.packing and arguments.ftkit is not None and use_packed_attention(model)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=rows.train,
        eval_dataset=rows.held_out,
        processing_class=tokenizer,
        data_collator=Collator.of(tokenizer, decoder_inputs=decoder_inputs(recipe, model), boundaries=boundaries),
        order=rows.prepared.order(recipe.train.seed),
        step_sequences=micro_batch * accumulation * arguments.world_size,
        metrics=recipe.eval.metrics if recipe.eval else (),
        seq2seq=recipe.task == "seq2seq",
        per_example=RunFolder(Path(recipe.output.dir)).per_example,
        noted=noted(recipe, rows.prepared.report.digest),
        plan=plan,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def add_callbacks(
    trainer: RecipeTrainer,
    recipe: Recipe,
    folder: RunFolder,
    end_asked: Callable[[], bool],
    say: Console,
    first: list[TrainerCallback],
    watch: DivergenceWatch,
    bar: Bar,
) -> EndOnRequest:
    """Add what a run tells while it trains; returns the one that knows whether it was ended on request."""
    end = EndOnRequest(end_asked, trainer.any_rank, trainer.checkpoints.finish)
    if recipe.data.packing:
        trainer.add_callback(CheckPacking())
    log = MetricsLog(folder, trainer.loss_scale, bar.show, bar.show_evaluation, lambda: len(watch.found))
    for callback in (ShowFused(say), *first, bar, log, end, watch):  # the last may take back that others want to save
        trainer.add_callback(callback)
    return end


ISOLATION_NUMEL = 1 << 30
"""Parameters of a model that a dry run still asks, on the CPU, whether packed samples stay apart."""


class CheckPacking(TrainerCallback):
    """Ask the model, once it is in place, whether packed samples stay apart."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse a family whose samples see each other."""
        check_isolation(model)


@dataclass
class ShowAnswers(TrainerCallback):
    """Answer the questions before the first step, and keep the answers.

    Args:
        asked: The questions.
        tokenizer: The model's tokenizer.
        max_new_tokens: Most tokens of an answer.
        before: The answers of the model as it came; filled when training begins.
    """

    asked: list[Question]
    tokenizer: Any
    max_new_tokens: int
    before: list[str] = field(default_factory=list)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Answer with the model as it came; after a rollback it is no longer that."""
        self.before = self.before or self.answers(model)

    def answers(self, model: Any) -> list[str]:
        """Answer every question; all ranks of a sharded model take part."""
        return generate(
            model,
            self.tokenizer,
            [each.turns for each in self.asked],
            max_new_tokens=self.max_new_tokens,
            separator=[each.separator for each in self.asked],
        )

    def known(self) -> list[dict[str, str]]:
        """Return what is known while the run goes on: `records` without the answers after it."""
        return self.records([""] * len(self.asked))

    def records(self, after: list[str]) -> list[dict[str, str]]:
        """Return question, expected answer, and the answers before and after, one dictionary a question."""
        before = self.before or [""] * len(self.asked)
        return [
            {"question": each.text, "expected": each.expected, "before": first, "after": last}
            for each, first, last in zip(self.asked, before, after)
        ]


def dry_run(recipe: Recipe, ranks: int, checkpoints: Sequence[Path] = ()) -> None:
    """Do everything up to the first step that needs no ranks, and say what would be run.

    Args:
        recipe: The facts.
        ranks: Processes of the whole run.
        checkpoints: Checkpoints that the run would try to go on from, in this order.

    Raises:
        UserError: As `run` would.
    """
    say = Console(soft_wrap=True, highlight=False, emoji=False)
    parts = make_parts(recipe, ranks, lambda model: ask_here(recipe, model, ranks).plan())
    tokenizer, model, plan, rows = parts.tokenizer, parts.model, parts.plan, parts.rows
    micro_batch, accumulation = decided(plan.strategy.micro_batch), decided(plan.strategy.accumulation)
    step_sequences = micro_batch * accumulation * ranks
    order = rows.prepared.order(recipe.train.seed)
    epoch_steps = len(WholeSteps(order, step_sequences)) // step_sequences
    steps = steps_of(recipe, len(order), step_sequences)
    checkpoint = first_whole([str(each) for each in checkpoints], None, lambda line: say.print(literal(line)))
    if checkpoint is not None:
        check_noted(checkpoint, recipe, rows.prepared.report.digest)
        say.print(literal(f"would resume from {checkpoint}"))
    numel = sum(each.numel() for each in model.parameters())
    if recipe.data.packing and recipe.model.name is not None and numel <= ISOLATION_NUMEL:
        use_packed_attention(model)
        check_isolation(model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    dtype = compute_dtype(recipe.train.dtype)
    say.print(literal(recipe.dump()))
    say.print(literal(str(rows.prepared.report)))
    say.print(f"held out: {counted(len(rows.held_out) if rows.held_out is not None else 0, 'row')}")
    say.print(f"model: {numel:,} parameters, {trained:,} of them trained, {dtype}")
    show_plan(say, plan)
    say.print(
        f"step: {recipe.train.batch_tokens:,} tokens = {counted(ranks, 'rank')} x {counted(micro_batch, 'sequence')} x "
        f"{accumulation} micro-batch{'' if accumulation == 1 else 'es'} x {recipe.data.sequence_tokens:,} tokens"
    )
    say.print(f"steps: {steps:,}, {epoch_steps:,} an epoch of {len(rows.train):,} sequences")
    faults = rows.faults(tokenizer, stops_of(getattr(model, "generation_config", None)))
    positions, longest = positions_of(model), tokenizer.model_max_length
    left_out, report = rows.left_out(order), rows.prepared.report
    for line in notices(recipe, report, len(order), step_sequences, faults, positions, longest, parts.asked, left_out):
        say.print(literal(line))
    say.print("nothing was trained (--dry-run)")
