"""The parts of a run, made of its recipe and checked: tokenizer, model, plan, rows and questions.

A run and its dry run come through `make_parts`, so that what would stop the run stops the dry run, with the same words and
before a GPU is touched: the headers of weights, the packages of reporters, an adapter's targets, memory and disk, folders
that cannot be written, rows, questions that no model could answer, and models that cannot be sharded as planned.

What it costs: the module tree, the headers of the weights, and the rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ftkit.config.recipe import Recipe, split_batch
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.adapters import base_of
from ftkit.hf.dtypes import check_dtype
from ftkit.hf.generate.generation import prompt_ids, unanswerable
from ftkit.hf.sharding import check_shardable
from ftkit.plan.choice import Plan
from ftkit.spec.strategy import decided
from ftkit.train.arguments import check_report_to, compute_dtype
from ftkit.train.callbacks import Question, questions
from ftkit.train.planning import build
from ftkit.train.run_rows import Rows, load_tokenizer, prepare_rows


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Args:
        tokenizer: the model's tokenizer.
        model: the model, whose weights are not read yet.
        plan: how memory is used.
        rows: the rows to train on, and those held out.
        asked: questions that the model answers before and after training.
    """

    tokenizer: Any
    model: Any
    plan: Plan
    rows: Rows
    asked: list[Question]


def make_parts(recipe: Recipe, ranks: int, planned: Callable[[Any], Plan]) -> Parts:
    """Make the parts of a run.

    Args:
        recipe: the facts.
        ranks: processes of the whole run.
        planned: returns the plan for a model, the same on all ranks.

    Raises:
        UserError: for whatever would stop the run before its first step and can be seen without its ranks.
    """
    split_batch(recipe, ranks)
    check_report_to(recipe.output.report_to)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_dtype(DTYPES[compute_dtype(recipe.train.dtype)] or torch.float32, device)
    tokenizer = load_tokenizer(recipe.model)
    model = build_model(recipe)
    check_fit(model, tokenizer, recipe.data.sequence_tokens)
    decoder_inputs(recipe, model)  # refuses, as the Trainer's collator will
    asked = questions(recipe.show) if recipe.show else []
    check_questions(recipe, model, tokenizer, asked)
    plan = planned(model)
    strategy = plan.strategy
    check_shardable(model, ranks, cuts_gradients=decided(strategy.stage) >= 2 or strategy.activations != "keep")
    if strategy.uses_nvme:
        check_nvme(recipe.memory.nvme_dir)
    return Parts(tokenizer, model, plan, prepare_rows(recipe, tokenizer), asked)


def build_model(recipe: Recipe) -> Any:
    """Build the model, adapter included; its weights are streamed in when it is sharded.

    An adapter is drawn with the recipe's seed, the same on all ranks.

    Raises:
        UserError: See `ftkit.hf.load.model.load_model`.
    """
    torch.manual_seed(recipe.train.seed)
    return build(recipe, recipe.model.name, recipe.model.config)


def check_fit(model: Any, tokenizer: Any, sequence_tokens: int) -> None:
    """Refuse a tokenizer or sequences that the model has no embeddings for.

    Raises:
        UserError: More tokens than the vocabulary, or longer sequences than learned positions.
    """
    config = model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeddings for {config.vocab_size}; set "
            "model.tokenizer to the one that belongs to the model"
        )
    positions = positions_of(model)
    rotary = getattr(config, "rope_parameters", None) is not None
    if positions and sequence_tokens > positions and not rotary:
        raise UserError(
            f"data.sequence_tokens is {sequence_tokens} and the model has {positions} positions; set it to at most that"
        )


def positions_of(model: Any) -> int | None:
    """Return for how many positions a model was made, as its configuration says; None where it stretches them."""
    config = model.config.get_text_config()
    positions, rotary = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    return positions if isinstance(positions, int) and "factor" not in rotary else None


def decoder_inputs(recipe: Recipe, model: Any) -> Callable[[Any], Any] | None:
    """Return what makes decoder_input_ids from labels, where the Trainer keeps the labels from an encoder-decoder.

    With label smoothing it computes the loss itself and calls the model without them.

    Raises:
        UserError: The model does not say how its decoder's input follows from labels.
    """
    if recipe.task != "seq2seq" or not recipe.train.label_smoothing:
        return None
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None:
        raise UserError(
            f"train.label_smoothing: the model ({model.config.model_type}) does not say how its decoder's input follows "
            "from the labels; set it to 0"
        )
    return make


def check_questions(recipe: Recipe, model: Any, tokenizer: Any, asked: list[Question]) -> None:
    """Refuse questions that the template refuses, that have no tokens, or that are too long for the model.

    Raises:
        UserError: naming the question by its number.
    """
    if recipe.show is None:
        return
    base = base_of(model)
    seq2seq = base.config.is_encoder_decoder
    ids = [prompt_ids(tokenizer, each.turns, seq2seq=seq2seq, separator=each.separator) for each in asked]
    problem = unanswerable(base, ids, recipe.show.max_new_tokens)
    if problem is not None:
        raise UserError(f"show: {problem}")


def check_nvme(folder: str | None) -> None:
    """Refuse a folder for the drive that cannot be written, where the plan puts something there.

    Raises:
        UserError: naming it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"memory.nvme_dir: {folder} cannot be written ({error.strerror}), and the plan puts a part of the run there; "
            "name another folder"
        ) from None
