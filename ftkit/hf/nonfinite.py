"""Losses that are not finite: counted without waiting for the device, and judged when training ends.

A run that ends with a NaN, or of which most steps were NaN, has failed, even where every step was logged as it was. In fp16
a step whose gradients overflow is skipped and is no failure; it is the loss itself that is looked at here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.comm import Communicator
from ftkit.words import counted

FIRST_ROOM = 1024
"""Steps that a record has room for at first; it doubles."""


class LossRecord:
    """The steps of one call of `train`, and which of them had a loss on this rank that was not finite."""

    def __init__(self) -> None:
        self.steps = 0
        self._step: int | None = None
        self._broken: Tensor | None = None  # a bool a step, on the device

    def note(self, step: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch of a step. Cost: two small operations on the device, and a byte a step."""
        broken = ~loss.detach().isfinite().all()
        if self._broken is None:
            self._broken = torch.zeros(FIRST_ROOM, dtype=torch.bool, device=broken.device)
        if step != self._step:
            self.steps, self._step = self.steps + 1, step
            if self.steps > len(self._broken):
                self._broken = torch.cat([self._broken, torch.zeros_like(self._broken)])
        self._broken[self.steps - 1] |= broken

    def ended(self, comm: Communicator, *, skips: bool) -> str | None:
        """Return what is wrong with how the steps ended, alike on all ranks; None if nothing is. A collective.

        A step counts if the loss of any rank was not finite: what is logged is their mean.

        Args:
            skips: the last step was skipped, because its gradients were not finite (fp16's loss scale).
        """
        own = b"" if self._broken is None else bytes(self._broken[: self.steps].tolist())
        broken = [any(ranks) for ranks in zip(*comm.all(own))]
        return verdict(sum(broken), self.steps, last=bool(broken) and broken[-1] and not skips)


def last_logged(history: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with a run that has no step left to make, by its log; None if nothing is."""
    losses = [line["loss"] for line in history if "loss" in line]
    if not losses or (losses[-1] is not None and math.isfinite(losses[-1])):
        return None
    return "training failed: the last loss in the log is not finite, and no step was left to make"


def verdict(broken: int, steps: int, *, last: bool) -> str | None:
    """Return what is wrong with a run of so many steps, or None.

    Args:
        broken: steps whose loss was not finite. last: whether the last one is among them, and counts.
    """
    if not last and 2 * broken <= steps:
        return None
    when = "at the last step, " if last else ""
    return f"training failed: the loss was not finite {when}in {broken} of {counted(steps, 'step')}"
