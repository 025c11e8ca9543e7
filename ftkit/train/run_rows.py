"""The rows of a run, prepared by one process of each machine before the ranks wait for each other."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from ftkit.config.recipe import Model, Recipe
from ftkit.data.prepare import Prepared, prepare
from ftkit.hf.load.config import reading


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
    seed = recipe.train.seed
    return prepare(recipe.data, tokenizer, task=recipe.task, seed=seed, held_out=recipe.eval, day=day)
