"""The parts of a run, built from its recipe and checked.

A run and a dry run both call `make_parts`, so a dry run refuses what the run would refuse, before a GPU is touched.

Cost: the module tree, the headers of the weights, and the rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, PrinterCallback

from ftkit.config.recipe import Model, Recipe, split_batch, steps_of
from ftkit.config.wording import counted
from ftkit.data.batches import Collator
from ftkit.data.prepare import Prepared, prepare
from ftkit.data.report import stops_of
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.adapters import base_of
from ftkit.hf.dtypes import check_dtype
from ftkit.hf.generate.generation import prompt_ids, unanswerable
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.load.config import reading
from ftkit.plan.choice import Plan
from ftkit.spec.strategy import decided
from ftkit.train.arguments import check_report_to, compute_dtype
from ftkit.train.callbacks import Question, questions
from ftkit.train.planning import model_of
from ftkit.train.resume import Start, noted
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
        questions: Questions that the model answers before and after training.
    """

    tokenizer: Any
    model: Any
    plan: Plan
    start: Start
    rows: Prepared
    questions: list[Question]


def make_parts(recipe: Recipe, ranks: int, plan: Callable[[Any], Plan], start: Callable[[], Start]) -> Parts:
    """Make the parts of a run.

    Args:
        recipe: The recipe.
        ranks: Number of processes of the whole run.
        plan: Returns the plan for a model, the same on all ranks.
        start: Returns where the run begins. It is called before the rows are prepared, which belong to its day.

    Raises:
        UserError: The run cannot begin.
    """
    split_batch(recipe, ranks)
    check_report_to(recipe.output.report_to)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_dtype(DTYPES[compute_dtype(recipe.train.dtype)], device)
    tokenizer = load_tokenizer(recipe.model)
    model = build_model(recipe)
    check_fit(model, tokenizer, recipe.data.sequence_tokens)
    asked = make_questions(recipe, model, tokenizer)
    chosen = plan(model)
    if chosen.strategy.uses_nvme:
        check_nvme(recipe.memory.nvme_dir)
    begin = start()
    rows = prepare_rows(recipe, tokenizer, begin.day)
    begin.check_rows(rows.report.digest)
    return Parts(tokenizer, model, chosen, begin, rows, asked)


def load_tokenizer(model: Model) -> Any:
    """Load the tokenizer of a recipe.

    Raises:
        UserError: There is no tokenizer of that name, or it needs its own code.
    """
    name = model.tokenizer_name
    revision = model.revision if model.tokenizer is None else None
    needed = "needed: a folder with tokenizer.json, or a hub id; set model.name or model.tokenizer"
    with reading(name, "no tokenizer could be loaded from it", advice=needed):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)


def prepare_rows(recipe: Recipe, tokenizer: Any, day: str | None = None) -> Prepared:
    """Prepare the rows to train on and those held out; see `ftkit.data.prepare.prepare`."""
    return prepare(recipe.data, tokenizer, task=recipe.task, seed=recipe.train.seed, held_out=recipe.eval, day=day)


def build_model(recipe: Recipe) -> Any:
    """Build the model. An adapter is drawn with the recipe's seed, the same on all ranks.

    Raises:
        UserError: See `ftkit.hf.load.model.load_model`.
    """
    torch.manual_seed(recipe.train.seed)
    return model_of(recipe, weights=True)


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


def make_questions(recipe: Recipe, model: Any, tokenizer: Any) -> list[Question]:
    """Return the questions of the recipe.

    Raises:
        UserError: A question has no tokens, or is too long for the model. The text has its number.
    """
    if recipe.show is None:
        return []
    asked = questions(recipe.show)
    base = base_of(model)
    seq2seq = base.config.is_encoder_decoder
    ids = [prompt_ids(tokenizer, each.turns, seq2seq=seq2seq, separator=each.separator) for each in asked]
    if (problem := unanswerable(base, ids, recipe.show.max_new_tokens)) is not None:
        raise UserError(f"show: {problem}")
    return asked


def check_nvme(folder: str | None) -> None:
    """Raise UserError if the folder of the NVMe tier cannot be written."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"memory.nvme_dir: {folder} cannot be written ({error.strerror}), and the plan uses it; name another folder"
        ) from None


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
        step_sequences=arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size,
        metrics=recipe.eval.metrics if recipe.eval else (),
        seq2seq=recipe.task == "seq2seq",
        noted=noted(recipe, rows.report.digest, rows.report.day),
        plan=plan,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def notices(recipe: Recipe, parts: Parts, steps: WholeSteps) -> list[str]:
    """Return the lines to show before the first step."""
    rows, report = parts.rows, parts.rows.report
    found = rows.warnings(parts.tokenizer, stops_of(getattr(parts.model, "generation_config", None)))
    lines = [f"warning: {each}" for each in found if each.kind != "unusable"]  # the report has those
    if report.rendering == "plain" and recipe.task == "causal-lm" and {each.format for each in report.sources} != {"text"}:
        lines.append("no chat template: questions and answers are plain text")
    sequences, step_sequences = len(steps.order), steps.step_sequences
    if rest := sequences - len(steps):
        lines.append(f"{rest} of {counted(sequences, 'sequence')} left over in each epoch: a step takes {step_sequences}")
    lines += rows.left_out(steps.order)
    made, warmup = steps_of(recipe, sequences, step_sequences), recipe.optimizer.warmup_steps
    if warmup >= made:
        lines.append(f"warning: optimizer.warmup_steps is {warmup} and the run has {counted(made, 'step')}")
    length, positions, longest = recipe.data.sequence_tokens, positions_of(parts.model), parts.tokenizer.model_max_length
    if positions and length > positions:
        lines.append(f"warning: data.sequence_tokens is {length} and the model was trained with {positions} positions")
    if (most := min(report.lengths.most, length)) > longest:
        lines.append(f"warning: samples have up to {most} tokens and the tokenizer's model_max_length is {longest}")
    if recipe.output.save_every_steps is None:
        lines.append("no checkpoints will be saved (output.save_every_steps is not set)")
    return lines
