"""SGD with optional momentum over shards: a compiled loop on the host, torch's operations on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import MOMENTUM, SGD


class ShardedSGD(ShardedOptimizer):
    """SGD with optional momentum over shards. Arguments as in `torch.optim.SGD`."""

    def __init__(
        self,
        units: ShardedModel,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.rule = MOMENTUM if momentum else SGD
        super().__init__(units, params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, loss_scale)

    def update_piece(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.update_piece`."""
        if at.master.device.type != "cpu":
            super().update_piece(at, group, step, factor)
            return
        numbers = {key: group[key] for key in ("lr", "momentum", "weight_decay")}
        momentum_buffer = at.moments.get("momentum_buffer")
        self.host.sgd(at.master, at.gradient, momentum_buffer, at.weight, factor=factor, **numbers)

    def update(self, at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        if group["weight_decay"]:
            gradient = gradient.add(at.master, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = at.moments["momentum_buffer"]
            gradient = buffer.mul_(group["momentum"]).add_(gradient)
        at.master.add_(gradient, alpha=-group["lr"])
