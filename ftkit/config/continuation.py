"""Whether a recipe may continue the run of another: what changed between them, and what that means.

A checkpoint notes how many steps were done. What decides which samples those were, or which tensors they trained, must
not change: the run would go on with rows skipped or seen twice, and nobody would be told. Learning rate and moments'
coefficients lie in the checkpoint with the optimizer's state, so changing them does nothing; that is said.

It refuses a changed model, data set, task, adapter, seed or step; what the rows hold is compared later, by their tokens
(`resume.check_noted`). Where the earlier recipe cannot be read, that is said. What it costs: reading recipe.yaml.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftkit.config.recipe import Recipe
from ftkit.config.yaml_lines import read
from ftkit.errors import UserError

FREE_SECTIONS = ("output", "memory", "engine", "ranks", "box", "eval", "show")
FREE_KEYS = ("data.cache_dir", "data.workers", "model.trust_remote_code")
FIXED_SECTIONS = ("model", "data", "task", "adapter")
FIXED_KEYS = ("train.seed", "train.batch_tokens", "eval.share", "optimizer.name", "optimizer.momentum")
FROM_CHECKPOINT = ("optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay")
IGNORED = "ignored: it comes from the checkpoint"

Change = tuple[str, Any, Any]


def check_resumed(recipe: Recipe, earlier: Path) -> str | None:
    """Compare a recipe with that of the run it continues.

    Args:
        recipe: The recipe of this run.
        earlier: recipe.yaml of the run to continue; may be missing.

    Returns:
        A line about what changed and is allowed to, or that it is not known, or None.

    Raises:
        UserError: What a step is has changed.
    """
    try:
        document = read(earlier.read_text(encoding="utf-8"), str(earlier))
        problem = "" if document.readable else str(document.problems[0])
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{earlier}: {error.strerror if isinstance(error, OSError) else 'not text'}"
    if not problem and not document.values:
        problem = f"{earlier}: is empty"
    if problem:
        return f"the changes since the run began are unknown ({problem})"
    return compare(recipe, document.values, str(earlier))


def compare(recipe: Recipe, before: dict[str, Any], where: str) -> str | None:
    """Compare a recipe with the values of an earlier one, which stands in `where`; as `check_resumed`."""
    changes = list(_changes(before, recipe.model_dump(mode="json")))
    fixed = [each for each in changes if each[0] in FIXED_KEYS or each[0].partition(".")[0] in FIXED_SECTIONS]
    if fixed:
        told = "\n".join(f"  {key}: {_short(old)} in {where}, now {_short(new)}" for key, old, new in fixed)
        raise UserError(
            f"--resume: the recipe has changed in keys that define a step:\n{told}\nset it back to continue that run, or "
            "start a new one: without --resume, with --set output.dir=PATH"
        )
    others = [each for each in changes if each[0].partition(".")[0] not in FREE_SECTIONS]
    if not others:
        return None
    changed = [
        f"{key} {_short(old)} -> {_short(new)} ({IGNORED if key in FROM_CHECKPOINT else 'in effect from here on'})"
        for key, old, new in others
    ]
    return f"changed since the run began: {', '.join(changed)}"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
    """Yield the keys whose values differ; keys that the earlier version of ftkit did not know are passed over."""
    for section, new in now.items():
        if section not in before:
            continue
        old = before[section]
        if section == "eval":  # its rows are free to change; those it holds out of the training data are not
            old, new = ({"share": each.get("share") if isinstance(each, dict) else None} for each in (old, new))
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(f"{section}.{key}", old[key], value) for key, value in new.items() if key in old]
        else:
            pairs = [(section, old, new)]
        yield from (each for each in pairs if each[0] not in FREE_KEYS and not _same(each[1], each[2]))


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, str) and isinstance(new, str) and os.path.exists(new):
        return os.path.realpath(old) == os.path.realpath(new)
    return old == new


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
