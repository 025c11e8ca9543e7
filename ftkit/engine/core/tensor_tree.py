"""Tensors inside the arguments and results of a block: taken out, and put back.

Blocks are called with tensors, tuples of tensors (rotary tables), dicts, and things that are not ours (caches, flags).
autograd functions see only a flat list of tensors, so a call is split into that list and a tree with numbered holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Hole:
    """The place of tensor `number` in a tree."""

    number: int


def take_tensors(tree: Any, found: list[Tensor]) -> Any:
    """Return `tree` with a `Hole` for each tensor, which is appended to `found`. Tuples, lists and dicts are entered."""
    if isinstance(tree, Tensor):
        found.append(tree)
        return Hole(len(found) - 1)
    if isinstance(tree, dict):
        return _like(tree, {key: take_tensors(value, found) for key, value in tree.items()})
    if isinstance(tree, (tuple, list)):
        return _like(tree, [take_tensors(value, found) for value in tree])
    return tree


def put_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Return `tree` with its holes filled from `tensors`: the inverse of `take_tensors`."""
    if isinstance(tree, Hole):
        return tensors[tree.number]
    if isinstance(tree, dict):
        return _like(tree, {key: put_tensors(value, tensors) for key, value in tree.items()})
    if isinstance(tree, (tuple, list)):
        return _like(tree, [put_tensors(value, tensors) for value in tree])
    return tree


def _like(original: Any, content: Any) -> Any:
    """Return `content` in a container of `original`'s type (a ModelOutput is a dict made from keywords)."""
    kind = type(original)
    if kind in (dict, list, tuple):
        return kind(content)
    if isinstance(original, dict):
        return kind(**content)
    return kind(*content) if hasattr(original, "_fields") else kind(content)
