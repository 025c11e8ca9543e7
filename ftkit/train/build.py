"""The parts of a run, built from its recipe and checked.

A run and a dry run both call `make_parts`, so a dry run refuses what the run would refuse, before a GPU is touched.

Cost: the module tree, the headers of the weights, and the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PrinterCallback

from ftkit.config.recipe import Model, Recipe, steps_of
from ftkit.config.wording import counted
from ftkit.data.batches import Collator
from ftkit.data.prepare import Prepared, prepare
from ftkit.data.report import stops_of
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.dtypes import check_dtype
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.load.config import reading
from ftkit.plan.plan import Plan
from ftkit.spec.strategy import decided
from ftkit.train.answers import Question, questions
from ftkit.train.arguments import check_report_to, compute_dtype
from ftkit.train.groups import check_groups
from ftkit.train.planning import ask_here, model_of
from ftkit.train.resume import Start, choose, noted
from ftkit.train.schedule import MANY_STEPS, check_schedule, warmup_steps
from ftkit.train.trainer import RecipeTrainer, WholeSteps


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Args:
        tokenizer: The model's tokenizer.
        model: The model, whose weights are not read yet.
        plan: How memory is used.
        start: Where the run begins.
        rows: Rows to train on, and held-out rows.
        questions: Sample prompts.
    """

    tokenizer: Any
    model: Any
    plan: Plan
    start: Start
    rows: Prepared
    questions: list[Question]


def make_parts(
    recipe: Recipe, ranks: int, checkpoints: Sequence[str], comm: Communicator | None, say: Callable[[str], None]
) -> Parts:
    """Make the parts of a run. With `comm` a collective.

    Args:
        recipe: The recipe.
        ranks: Number of processes of the whole run.
        checkpoints: Folders to resume from, in the order in which they are tried.
        comm: The ranks. None for a dry run, which is one process.
        say: Shows a line to the user.

    Raises:
        UserError: The run cannot begin.
    """
    check_report_to(recipe.output.report_to)
    check_schedule(recipe.optimizer, recipe.train.max_steps or MANY_STEPS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_dtype(DTYPES[compute_dtype(recipe.train.dtype)], device)
    tokenizer = load_tokenizer(recipe.model)
    model = model_of(recipe, weights=True)
    check_fit(model, tokenizer, recipe.data.sequence_tokens)
    check_groups(model, recipe.optimizer.groups)
    asked = questions(recipe.show) if recipe.show else []
    plan = ask_here(recipe, model, ranks, comm).plan()
    start = choose(checkpoints, recipe, comm, say)  # before the rows, which belong to its day
    rows = prepare_rows(recipe, tokenizer, start.day)
    start.check_rows(rows.report.digest)
    check_schedule(recipe.optimizer, steps_in(recipe, whole_steps(recipe, rows)))
    return Parts(tokenizer, model, plan, start, rows, asked)


def load_tokenizer(model: Model) -> Any:
    """Load the tokenizer of a recipe.

    Raises:
        UserError: There is no tokenizer of that name, or it needs its own code.
    """
    name = str(model.tokenizer or model.name)
    revision = model.revision if model.tokenizer is None else None
    needed = "needed: a folder with tokenizer.json, or a hub id; set model.name or model.tokenizer"
    with reading(name, "no tokenizer could be loaded from it", advice=needed):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)


def prepare_rows(recipe: Recipe, tokenizer: Any, day: str | None = None) -> Prepared:
    """Prepare the rows to train on and those held out; see `ftkit.data.prepare.prepare`."""
    return prepare(recipe.data, tokenizer, task=recipe.task, seed=recipe.train.seed, held_out=recipe.eval, day=day)


def whole_steps(recipe: Recipe, rows: Prepared) -> WholeSteps:
    """Return the order of the rows to train on, cut to whole steps."""
    return WholeSteps(rows.order(recipe.train.seed), recipe.train.batch_tokens // recipe.data.sequence_tokens)


def steps_in(recipe: Recipe, order: WholeSteps) -> int:
    """Return the optimizer steps of a run."""
    return steps_of(recipe, len(order.order), order.step_sequences)


def check_fit(model: Any, tokenizer: Any, sequence_tokens: int) -> None:
    """Raise UserError if the model has no embeddings for some tokens, or for some learned positions."""
    config = model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeddings for {config.vocab_size}; set "
            "model.tokenizer to the one that belongs to the model"
        )
    positions = positions_of(model)
    if positions and sequence_tokens > positions and getattr(config, "rope_parameters", None) is None:
        raise UserError(
            f"data.sequence_tokens is {sequence_tokens} and the model has {positions} positions; set it to at most that"
        )


def positions_of(model: Any) -> int | None:
    """Return the number of positions that a model was trained with. None if unknown, or if it scales positions."""
    config = model.config.get_text_config()
    positions, rotary = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    return positions if isinstance(positions, int) and "factor" not in rotary else None


def make_trainer(
    recipe: Recipe,
    rows: Prepared,
    tokenizer: Any,
    model: Any,
    arguments: Any,
    plan: Plan | None,
    *,
    kind: type[RecipeTrainer] = RecipeTrainer,
) -> Any:
    """Make the Trainer of a run.

    Args:
        recipe: The recipe.
        rows: The prepared rows.
        tokenizer: The model's tokenizer.
        model: The model.
        arguments: The `TrainingArguments`.
        plan: How memory is used; it decides the micro-batches. None trains without the engine.
        kind: Class of the Trainer.
    """
    if plan is not None:
        arguments.per_device_train_batch_size = arguments.per_device_eval_batch_size = decided(plan.strategy.micro_batch)
        arguments.gradient_accumulation_steps = decided(plan.strategy.accumulation)
    smoothed = recipe.task == "seq2seq" and recipe.train.label_smoothing  # the Trainer then keeps the labels from the model
    decoder_inputs = getattr(model, "prepare_decoder_input_ids_from_labels", None) if smoothed else None
    boundaries = recipe.data.packing and arguments.ftkit is not None and use_packed_attention(model)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=rows.train,
        eval_dataset=rows.held_out,
        processing_class=tokenizer,
        data_collator=Collator.of(tokenizer, decoder_inputs=decoder_inputs, boundaries=boundaries),
        order=rows.order(recipe.train.seed),
        step_sequences=recipe.train.batch_tokens // recipe.data.sequence_tokens,
        metrics=(*recipe.eval.metrics, recipe.eval.best) if recipe.eval else (),
        seq2seq=recipe.task == "seq2seq",
        groups=recipe.optimizer.groups,
        noted=noted(recipe, rows.report.digest, rows.report.day),
        plan=plan,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def notices(recipe: Recipe, parts: Parts) -> list[str]:
    """Return the lines to show before the first step."""
    rows, report = parts.rows, parts.rows.report
    found = rows.warnings(parts.tokenizer, stops_of(getattr(parts.model, "generation_config", None)))
    lines = [f"warning: {each}" for each in found if each.kind != "unusable"]  # the report has those
    if report.rendering == "plain" and recipe.task == "causal-lm" and {each.format for each in report.sources} != {"text"}:
        lines.append("no chat template: questions and answers are plain text")
    order = whole_steps(recipe, rows)
    sequences, step_sequences, steps = len(order.order), order.step_sequences, steps_in(recipe, order)
    warmup = warmup_steps(recipe.optimizer, steps)
    lines.append(f"steps: {steps:,} in all, {sequences // step_sequences:,} per epoch of {sequences:,} sequences")
    if rest := sequences - len(order):
        lines.append(f"{rest} of {counted(sequences, 'sequence')} left over in each epoch: a step takes {step_sequences}")
    if warmup >= steps:
        key = "warmup_ratio" if recipe.optimizer.warmup_ratio else "warmup_steps"
        given = getattr(recipe.optimizer, key)
        lines.append(f"warning: optimizer.{key} is {given} and the run has {counted(steps, 'step')}")
    lines.append(f"optimizer: {recipe.optimizer.described}")
    lines += check_groups(parts.model, recipe.optimizer.groups)
    length, positions = recipe.data.sequence_tokens, positions_of(parts.model)
    if positions and length > positions:
        lines.append(f"warning: data.sequence_tokens is {length} and the model was trained with {positions} positions")
    if recipe.output.save_every_steps is None:
        lines.append("no checkpoints will be saved (output.save_every_steps is not set)")
    return lines
