"""The rows of a batch: how many there are, how many labels count, and a batch of some of them.

A batch is a mapping of tensors, lists and further mappings. Every tensor whose first dimension is the number of rows is
selected with the rows. A tensor without dimensions, or with a first dimension of 1 beside several rows, belongs to the
whole batch. A batch with any other tensor (the images of a vision model) cannot be split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label that no loss of transformers counts."""


def rows_of(batch: Any, label_names: Sequence[str] = ("labels",)) -> int:
    """Return the number of rows of a batch: of its labels, else of its first tensor; 0 if it has none."""
    if not isinstance(batch, Mapping):
        return 0
    first = [batch[name] for name in label_names if name in batch]
    return next((len(each) for each in _tensors([*first, *batch.values()]) if each.dim()), 0)


def can_split(batch: Any, rows: int) -> bool:
    """Return whether a part of the rows makes a batch."""
    return rows > 0 and isinstance(batch, Mapping) and bool(_tensors(batch)) and _fits(batch, rows)


def selected(batch: Any, numbers: Sequence[int], rows: int) -> Any:
    """Return the batch with the rows of these numbers, in their order.

    Args:
        batch: anything inside a batch.
        numbers: row numbers; one may come twice.
        rows: number of rows of the batch.
    """
    if torch.is_tensor(batch):
        if batch.dim() == 0 or len(batch) != rows:
            return batch
        return batch.index_select(0, torch.tensor(numbers, device=batch.device))
    if isinstance(batch, Mapping):
        return {key: selected(value, numbers, rows) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if _one_a_row(batch, rows):
            return type(batch)([batch[number] for number in numbers])
        return type(batch)([selected(each, numbers, rows) for each in batch])
    return batch


def token_labels(batch: Any) -> Tensor | None:
    """Return the integer labels of a batch, with at least one dimension; None if it has no such labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not torch.is_tensor(labels) or labels.dim() == 0 or labels.is_floating_point() or labels.is_complex():
        return None
    return labels


def counted_labels(batch: Any, *, shifted: bool) -> int:
    """Return how many labels count; shifted: without the first label of each row, which nothing predicts."""
    labels = token_labels(batch)
    if labels is None:
        return 0
    return int((labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(IGNORED).sum())


def with_labels(batch: Mapping[str, Any], labels: Tensor) -> dict[str, Any]:
    """Return the batch with other labels."""
    return {**batch, "labels": labels}


def only_last_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with one counted label a row, the last."""
    labels = batch["labels"]
    counted = labels.ne(IGNORED)
    last = counted.flip(-1).cumsum(-1).flip(-1).eq(1) & counted
    return with_labels(batch, labels.masked_fill(~last, IGNORED))


def _fits(tree: Any, rows: int) -> bool:
    """Return whether every tensor has a row of the batch at each place of its first dimension, or none."""
    if torch.is_tensor(tree):
        return tree.dim() == 0 or len(tree) in (1, rows)
    if isinstance(tree, Mapping):
        return all(_fits(value, rows) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return not hasattr(tree, "_fields") and (_one_a_row(tree, rows) or all(_fits(each, rows) for each in tree))
    return True


def _one_a_row(items: Sequence[Any], rows: int) -> bool:
    """Return whether a list has one item for each row (texts, annotations), not the batch in several tensors."""
    return len(items) == rows and not all(torch.is_tensor(each) and each.dim() and len(each) == rows for each in items)


def _tensors(tree: Any) -> list[Tensor]:
    if torch.is_tensor(tree):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in _tensors(value)]
    if isinstance(tree, (list, tuple)):
        return [tensor for value in tree for tensor in _tensors(value)]
    return []
