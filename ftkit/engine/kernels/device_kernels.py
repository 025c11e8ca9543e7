"""What may be done to flat shards on a device in one pass each. Whoever has kernels brings them: the engine knows torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Adam = Callable[..., None]
"""(master, gradient, exp_avg, exp_avg_sq, weight or None; factor, lr, beta1, beta2, eps, weight_decay, step), in place."""


@dataclass(frozen=True)
class FlatKernels:
    """Kernels over flat shards (n,) on the device of compute.

    Args:
        adamw: unscales, clips, updates and writes the 16-bit weight; see `Adam` and `HostLoops.adamw`.
        square: (n,) to its sum of squares, a scalar there; inf or nan where an element is not finite.
    """

    adamw: Adam
    square: Callable[[Tensor], Tensor]
