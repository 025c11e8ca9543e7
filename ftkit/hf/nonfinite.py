"""Losses that are not finite: counted without waiting for the device, and judged when training ends.

A run that ends with a NaN, or of which most steps were NaN, has failed, even where every step was logged as it was. In fp16
a step whose gradients overflow is skipped and is no failure; it is the loss itself that is looked at here.
"""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.comm import Communicator
from ftkit.words import counted


class LossRecord:
    """The steps of one call of `train`, and those of them whose loss was not finite on this rank."""

    def __init__(self) -> None:
        self.steps = 0
        self._step: int | None = None
        self._broken: Tensor | None = None  # steps, all but the last
        self._last: Tensor | None = None  # whether the last one is

    def note(self, step: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch of a step. Cost: two small operations on the device."""
        broken = ~loss.detach().isfinite().all()
        if step != self._step:
            if self._last is not None:
                self._broken = self._last.long() if self._broken is None else self._broken + self._last
            self.steps, self._step, self._last = self.steps + 1, step, broken
        else:
            assert self._last is not None
            self._last = self._last | broken

    def ended(self, comm: Communicator, *, skips: bool) -> str | None:
        """Return what is wrong with how the steps ended, alike on all ranks; None if nothing is. A collective.

        Args:
            skips: the last step was skipped, because its gradients were not finite (fp16's loss scale).
        """
        last = self._last is not None and bool(self._last)
        broken = int(last) + (int(self._broken) if self._broken is not None else 0)
        return verdict(max(comm.all(broken)), self.steps, last=comm.any(last) and not skips)


def verdict(broken: int, steps: int, *, last: bool) -> str | None:
    """Return what is wrong with a run of so many steps, or None.

    Args:
        broken: steps whose loss was not finite. last: whether the last one is among them, and counts.
    """
    if not last and 2 * broken <= steps:
        return None
    when = "at the last step, " if last else ""
    return f"training failed: the loss was not finite {when}in {broken} of {counted(steps, 'step')}"
