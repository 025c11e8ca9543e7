"""Adagrad over shards: it divides by the root of the sum of all squared gradients."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import ADAGRAD


class ShardedAdagrad(ShardedOptimizer):
    """Adagrad over shards, as `torch.optim.Adagrad` with sums that begin at zero.

    Settings: lr=1e-2, lr_decay=0.0, eps=1e-10, weight_decay=0.0.
    Source: Duchi et al., JMLR 12, 2011.
    """

    kind = ADAGRAD

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`."""
        numbers = factor, group["weight_decay"], group["eps"], _rate(group, step)
        self.host.update("adagrad", (at.master, at.gradient, at.moments["sum"], at.weight), numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        if group["weight_decay"]:
            gradient = gradient.add(at.master, alpha=group["weight_decay"])
        total = at.moments["sum"].addcmul_(gradient, gradient)
        at.master.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-_rate(group, step))


def _rate(group: Hyperparameters, step: int) -> float:
    rate: float = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return rate
