"""SGD over shards, with optional momentum and Nesterov momentum."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import SGD


class ShardedSGD(ShardedOptimizer):
    """SGD over shards, as `torch.optim.SGD` without dampening.

    Settings: lr=1e-3, momentum=0.0, nesterov=False, weight_decay=0.0.
    """

    kind = SGD

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`."""
        numbers = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
        buffer = at.moments["momentum_buffer"] if group["momentum"] else None
        self.host.sgd(at.master, at.gradient, buffer, at.weight, factor=factor, nesterov=group["nesterov"], **numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        if group["weight_decay"]:
            gradient = gradient.add(at.master, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = at.moments["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        at.master.add_(gradient, alpha=-group["lr"])
