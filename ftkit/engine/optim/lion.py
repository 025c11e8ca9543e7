"""Lion over shards: the sign of an interpolated gradient. It keeps one moment, 8 bytes of state with the master weight."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import LION


class ShardedLion(ShardedOptimizer):
    """Lion over shards. Weight decay is multiplied by `lr`, as AdamW's.

    Settings: lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0.
    Source: Chen et al., arXiv:2302.06675.
    """

    kind = LION

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        numbers = factor, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, lr
        self.host.update("lion", (at.master, at.gradient, at.moments["exp_avg"], at.weight), numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        lr, (beta1, beta2), average = group["lr"], group["betas"], at.moments["exp_avg"]
        direction = average.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        at.master.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        average.mul_(beta2).add_(gradient, alpha=1 - beta2)
