"""RMSprop over shards, with optional momentum and centering."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import RMSPROP


class ShardedRMSprop(ShardedOptimizer):
    """RMSprop over shards, as `torch.optim.RMSprop`.

    Settings: lr=1e-2, alpha=0.99, eps=1e-8, momentum=0.0, centered=False, weight_decay=0.0.
    Source: Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning, 2012; Graves, arXiv:1308.0850.
    """

    kind = RMSPROP

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`."""
        alpha = group["alpha"]
        buffer = at.moments["momentum_buffer"] if group["momentum"] else None
        mean = at.moments["grad_avg"] if group["centered"] else None
        tensors = at.master, at.gradient, at.moments["square_avg"], buffer, mean, at.weight
        numbers = factor, group["weight_decay"], alpha, 1 - alpha, group["eps"], group["momentum"], group["lr"]
        self.host.update("rmsprop", tensors, numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        alpha = group["alpha"]
        if group["weight_decay"]:
            gradient = gradient.add(at.master, alpha=group["weight_decay"])
        variance = at.moments["square_avg"].mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        if group["centered"]:
            mean = at.moments["grad_avg"].lerp_(gradient, 1 - alpha)
            variance = variance.addcmul(mean, mean, value=-1)
        root = variance.sqrt().add_(group["eps"])
        if group["momentum"]:
            buffer = at.moments["momentum_buffer"].mul_(group["momentum"]).addcdiv_(gradient, root)
            at.master.add_(buffer, alpha=-group["lr"])
        else:
            at.master.addcdiv_(gradient, root, value=-group["lr"])
