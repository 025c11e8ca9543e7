"""SGD over shards, with optional momentum and Nesterov momentum."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import SGD


class ShardedSGD(ShardedOptimizer):
    """SGD over shards. Settings as in `torch.optim.SGD`, without dampening."""

    kind = SGD

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`."""
        numbers = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
        nesterov = group.get("nesterov", False)  # checkpoints of earlier versions have none
        buffer = at.moments.get("momentum_buffer")
        self.host.sgd(at.master, at.gradient, buffer, at.weight, factor=factor, nesterov=nesterov, **numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        if group["weight_decay"]:
            gradient = gradient.add(at.master, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = at.moments["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group.get("nesterov") else buffer
        at.master.add_(gradient, alpha=-group["lr"])
