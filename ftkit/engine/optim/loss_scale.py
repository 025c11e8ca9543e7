"""The loss scale: a factor on the loss that keeps small fp16 gradients from becoming zero.

An overflow skips the step and never ends the run. Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SCALE = 2.0**-24
"""The smallest loss scale: gradients that are not finite under it did not overflow."""
FP16_LIMIT = 2.0**15
"""The largest power of two by which an fp16 loss can be multiplied."""


@dataclass
class LossScale:
    """The factor `value` on the loss.

    If `dynamic`, an overflow halves it, and `growth_steps` clean steps double it, up to `limit`. `clean_steps` are those
    since the last overflow or doubling, `skipped_steps` are all with an overflow.
    """

    value: float = 1.0
    dynamic: bool = False
    growth_steps: int = 1000
    clean_steps: int = 0
    skipped_steps: int = 0
    limit: float = 2.0**40

    @classmethod
    def for_dtype(cls, dtype: torch.dtype | None) -> LossScale:
        """Return the initial scale for weights of `dtype`: dynamic from 2^16 for fp16, constant 1 for others."""
        return cls(2.0**16, dynamic=True) if dtype == torch.float16 else cls()

    def update(self, *, overflow: bool) -> None:
        """Count one step, and change the value if it is dynamic."""
        self.skipped_steps += overflow
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.value = max(self.value / 2, LEAST_SCALE)
        elif self.clean_steps >= self.growth_steps:
            self.value, self.clean_steps = min(self.value * 2, self.limit), 0

    def fit(self, loss: Tensor) -> None:
        """Lower the value and its limit so that a loss of this dtype can be multiplied by them."""
        if self.dynamic and loss.dtype == torch.float16:
            self.limit = FP16_LIMIT
            self.value = min(self.value, self.limit)
