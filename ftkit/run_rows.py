"""The rows of a run: the recipe's tokenizer, what is trained on, what is held out, and what is wrong with either.

Every rank prepares them, before the ranks wait for each other; one of a machine does the work, the others find it done.
It refuses what `ftkit.hf.data` refuses, and a tokenizer that cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer

from ftkit.errors import UserError
from ftkit.hf.data import Prepared, prepare, prepare_section, split
from ftkit.hf.faults import Fault
from ftkit.recipe import Model, Recipe


@dataclass(frozen=True)
class Rows:
    """The prepared rows of a run.

    Args:
        train: Data set to train on: input_ids, labels, position_ids if packed.
        held_out: Data set to evaluate on, or None.
        prepared: What `train` was made of, with its report and its order.
        prepared_held_out: What `held_out` was made of, where that is another file.
    """

    train: Any
    held_out: Any
    prepared: Prepared
    prepared_held_out: Prepared | None = None

    def faults(self, tokenizer: Any, stops: Collection[int]) -> list[Fault]:
        """Return what is wrong with them, though they can be trained on; see `Prepared.faults`.

        Cost: sorts the checksums of all samples where a file is held out.
        """
        apart = self.prepared_held_out
        found = self.prepared.faults(tokenizer, stops, shared=self.held_out is not None and apart is None)
        if apart is not None:
            found += [each.of("held out") for each in apart.faults(tokenizer, stops)]
            overlap = self.prepared.overlap(apart)
            found += [overlap] if overlap is not None else []
        return found


def load_tokenizer(model: Model) -> Any:
    """Load the tokenizer of a recipe.

    Raises:
        UserError: There is none of that name, or it would need its own code.
    """
    revision = model.revision if model.tokenizer is None else None
    try:
        return AutoTokenizer.from_pretrained(
            model.tokenizer_name, revision=revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"no tokenizer could be loaded from {model.tokenizer_name}: {reason}; needed: a folder with "
            "tokenizer.json, or a hub id; set model.name or model.tokenizer"
        ) from error


def prepare_rows(recipe: Recipe, tokenizer: Any) -> Rows:
    """Prepare the rows to train on and those held out; one rank of a machine does the work.

    Raises:
        UserError: See `ftkit.hf.data.prepare`.
    """
    data, held_out, seed = recipe.data, recipe.eval, recipe.train.seed
    prepared = prepare_section(data, tokenizer, seed=seed, task=recipe.task)
    train, evaluation, apart = prepared.dataset, None, None
    if held_out is not None and held_out.share is not None:
        train, evaluation = split(train, held_out.share, seed)
    elif held_out is not None:
        apart = prepare(
            held_out.path,
            tokenizer,
            sequence_tokens=data.sequence_tokens,
            loss_on=data.loss_on,
            on_bad_row=data.on_bad_row,
            task=recipe.task,
            cache_dir=data.cache_dir,
            workers=data.workers,
        )
        evaluation = apart.dataset
    if held_out is not None and held_out.max_rows is not None:
        evaluation = evaluation.select(range(min(held_out.max_rows, len(evaluation))))
    return Rows(train, evaluation, replace(prepared, dataset=train), apart)
