"""How a loss scales with its batch, found once by evaluating it on a batch and on parts of it.

The gradient of W ranks is the mean of the ranks' gradients. A loss that is a mean over rows or label tokens must therefore
be weighted by what each rank has of them, a sum by W, and a loss that is divided by the count of the global batch (the
Trainer's `num_items_in_batch`) by nothing that the Trainer does not do itself:

| kind | the loss of two batches A and B together |
|---|---|
| counted | depends on `num_items_in_batch` |
| sum | L(A) + L(B) |
| mean-rows | the mean of L(A) and L(B), weighted by their rows |
| mean-tokens | the mean, weighted by their label tokens |
| mean-ranks | neither (negatives from the batch, class weights): ranks are averaged, as DDP does |

Every rank evaluates its own batch, without gradients and without dropout, and all ranks agree on one verdict. Rows and
label tokens are the same where each row has as many labels; the labels of some rows are then masked, if the batch shows that
its model takes masked labels. Where nothing tells them apart, the verdict waits for a later batch.

Cost: up to eight forwards of a batch, once; none for a causal model whose head and loss ftkit computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ftkit.engine.comm.communicator import Communicator
from ftkit.hf.trainer.row_parts import IGNORED, can_split, counted_labels, only_last_labels, rows_of, selected, token_labels

COUNTED, SUM, ROWS, TOKENS, RANKS = "counted", "sum", "mean-rows", "mean-tokens", "mean-ranks"
SHIFTED = "mean-tokens, shifted"
FACTOR = 1009
"""The trial's count is this multiple of the true one: a loss that depends on the count changes, and not by W."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
COARSE = 2e-2
"""Relative tolerance in 16 bits."""

Loss = Callable[..., float]
"""From a batch, `num_items_in_batch` and a number of ranks that the accelerator tells (default: the true one) to the loss;
NaN where it cannot be computed."""


@dataclass(frozen=True)
class Scaling:
    """How a loss scales.

    Args:
        kind: one of `loss_reduction` in `ftkit.spec.strategy.Strategy`, but "auto".
        shifted: whether label tokens are counted without the first of each row.
        multiplied: whether a rank's loss comes multiplied by the number of ranks already.
        certain: whether no later batch can change the verdict.
        partly: whether a part of a counted loss does not depend on the count (the balance of a router, a penalty). Such a
            loss is computed as if this rank were alone, with its share of the count, and ranks are averaged.
    """

    kind: str
    shifted: bool = False
    multiplied: bool = False
    certain: bool = True
    partly: bool = False

    def count(self, batch: Any, label_names: Sequence[str]) -> int:
        """Return what the loss of a batch is a mean over: rows, or label tokens."""
        if self.kind == TOKENS:
            return counted_labels(batch, shifted=self.shifted)
        return rows_of(batch, label_names)

    @property
    def is_mean(self) -> bool:
        """Whether ranks and micro-batches are weighted by a count."""
        return self.kind in (ROWS, TOKENS)


@dataclass(frozen=True)
class Trial:
    """One rank's way to find out how a loss scales.

    Args:
        loss: evaluates the loss, changing nothing; see `Loss`.
        comm: the ranks.
        label_names: names of the batch's labels.
        shifts: whether the model's loss leaves the first label of each row out.
        counting: whether the Trainer counts labels for this loss.
        dtype: compute dtype.
    """

    loss: Loss
    comm: Communicator
    label_names: Sequence[str]
    shifts: bool
    counting: bool
    dtype: torch.dtype

    def counts(self, batch: Mapping[str, Any]) -> tuple[bool, bool, bool]:
        """Return `counted`, `multiplied` and `partly` (see `Scaling`) of a loss that may be counted. A collective.

        Args:
            batch: this rank's batch, on its device.
        """
        labels = counted_labels(batch, shifted=self.shifts)
        with_count, without, overstated, parted = math.nan, math.nan, math.nan, math.nan
        if all(self.comm.all(self.counting and torch.is_tensor(batch.get("labels")))):
            device = batch["labels"].device
            count = torch.tensor(FACTOR * max(labels, 1), device=device)
            with_count = self.loss(batch, count)
            if self.comm.world_size > 1:
                overstated = self.loss(batch, count, 2 * self.comm.world_size)
            parted = FACTOR * with_count - self.loss(batch, count // FACTOR)
            without = self.loss(batch, None)
            if all(self.comm.all(math.isnan(without))):  # it must have a count
                without = self.loss(batch, torch.tensor(max(labels, 1), device=device))
        ratios = [one / two for one, two in self.comm.all((with_count, without)) if two and math.isfinite(one / two)]
        ratio = sorted(ratios)[len(ratios) // 2] if ratios else 1.0
        ranks, near = self.comm.world_size, 10 * self.tolerance
        counted = abs(ratio - 1) > near and abs(ratio - ranks) > near * ranks
        changes = abs(overstated - with_count) > near * abs(with_count)  # with the accelerator's number of ranks
        partly = counted and any(self.comm.all(abs(parted) > near * abs(FACTOR * with_count)))
        if counted and any(self.comm.all(changes)):
            return True, not partly, partly  # a part's loss is computed where one rank is told
        if counted:
            ratio *= FACTOR
        return counted, ranks > 1 and abs(ratio - ranks) <= max(near, 0.05) * ranks, partly

    def kind(self, batch: Mapping[str, Any]) -> Scaling:
        """Return how a loss scales that does not depend on a count. A collective.

        Args:
            batch: this rank's batch, on its device.
        """
        rows = rows_of(batch, self.label_names)
        if not all(self.comm.all(can_split(batch, rows))):
            return Scaling(RANKS)
        one, two = ([0], [0]) if rows == 1 else (list(range(rows // 2)), list(range(rows // 2, rows)))
        parts = [selected(batch, numbers, rows) for numbers in (one, two, one + two)]
        found = self._common(self._agreeing(*parts))
        labels = token_labels(batch)
        masked = labels is not None and labels.dim() == 2 and bool(labels.eq(IGNORED).any())
        if found is not None and len(found) > 1 and any(self.comm.all(masked)):
            parts[0] = only_last_labels(parts[0]) if masked else parts[0]
            if masked:
                parts[2] = {**parts[2], "labels": torch.cat([parts[0]["labels"], parts[1]["labels"]])}
            more = self._common(self._agreeing(*parts))
            found = found if more is None else [each for each in found if each in more]
        if found is None:  # no rank has a finite loss
            return self._guess(batch, certain=False)
        if not found:
            return Scaling(RANKS)
        if len(found) > 1:
            return self._guess(batch, certain=False, among=found)
        return _named(found[0])

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding may make."""
        return TOLERANCES.get(self.dtype, COARSE)

    def _agreeing(self, one: Any, two: Any, both: Any) -> list[str] | None:
        """Return the kinds that explain the loss of both parts together; None where the losses say nothing."""
        first, second, whole = (self.loss(part, None) for part in (one, two, both))
        largest = max(abs(first), abs(second), abs(whole))
        if not all(map(math.isfinite, (first, second, whole))) or largest < 1e-6:
            return None
        counts: dict[str, tuple[int, int]] = {ROWS: (rows_of(one, self.label_names), rows_of(two, self.label_names))}
        if token_labels(one) is not None:
            for name, shifted in ((TOKENS, False), (SHIFTED, True)):
                counts[name] = (counted_labels(one, shifted=shifted), counted_labels(two, shifted=shifted))
        told = {SUM: first + second}
        told |= {name: (a * first + b * second) / (a + b) for name, (a, b) in counts.items() if a + b}
        return [name for name, loss in told.items() if abs(loss - whole) <= self.tolerance * largest]

    def _common(self, agreeing: list[str] | None) -> list[str] | None:
        """Return the kinds that explain the losses of every rank; None where no rank's losses say anything."""
        known = [each for each in self.comm.all(agreeing) if each is not None]
        return [name for name in (SUM, ROWS, TOKENS, SHIFTED) if all(name in each for each in known)] if known else None

    def _guess(self, batch: Any, *, certain: bool, among: Sequence[str] = (ROWS, TOKENS, SHIFTED)) -> Scaling:
        """Return the likeliest kind: labels of tokens make a mean over tokens."""
        labels = token_labels(batch)
        of_tokens = any(self.comm.all(labels is not None and labels.dim() > 1))
        preferred = (SHIFTED, TOKENS, ROWS) if self.shifts else (TOKENS, SHIFTED, ROWS)
        name = next(each for each in (*(preferred if of_tokens else (ROWS, *preferred)), SUM) if each in among)
        return _named(name, certain=certain)


def _named(name: str, *, certain: bool = True) -> Scaling:
    return Scaling(TOKENS if name == SHIFTED else name, shifted=name == SHIFTED, certain=certain)
