"""AdamW over shards: a compiled loop on the host, a kernel on the device, else torch's fused AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import ADAMW


class ShardedAdamW(ShardedOptimizer):
    """AdamW over shards, as `torch.optim.AdamW`; `units` and `params` as in `ShardedOptimizer`.

    Settings: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2.
    Source: Loshchilov and Hutter, arXiv:1711.05101.
    """

    kind = ADAMW

    def update_piece(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.update_piece`."""
        if (loops := self.loops_for(at.master)) is None:
            self.reference_update(at, group, step, factor)
            return
        tensors = at.master, at.gradient, at.moments["exp_avg"], at.moments["exp_avg_sq"], at.weight
        loops.adamw(*tensors, factor=factor, step=step, **numbers_of(group))

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        adamw(
            [at.master],
            [gradient],
            [at.moments["exp_avg"]],
            [at.moments["exp_avg_sq"]],
            [],
            [torch.full((), step - 1, dtype=torch.float32, device=at.master.device)],  # on the device: no copy, no wait
            fused=True,
            amsgrad=False,
            maximize=False,
            **numbers_of(group),
        )


def numbers_of(group: Hyperparameters) -> dict[str, Any]:
    """Return the settings of a group as arguments of a loop."""
    beta1, beta2 = group["betas"]
    return {"beta1": beta1, "beta2": beta2} | {key: group[key] for key in ("lr", "eps", "weight_decay")}
