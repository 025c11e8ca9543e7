"""The interface of device kernels over shards. The engine has none itself: it depends on torch only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FlatKernels:
    """Device functions over flat shards (n,). The engine works without them, in plain PyTorch.

    Args:
        adamw: AdamW in place, as `HostLoops.adamw`: (master, gradient, exp_avg, exp_avg_sq, weight or None; factor, lr,
            beta1, beta2, eps, weight_decay, step).
        square: Sum of squares of (n,), a scalar on the device; inf or nan if an element is not finite.
    """

    adamw: Callable[..., None]
    square: Callable[[Tensor], Tensor]
