"""Optimizers of others on a sharded model: their step raises, where it would do nothing.

Gradients of a sharded model are in shards, so every `parameter.grad` is None, and an optimizer of torch or of a library
built on it (8-bit, paged, Adafactor) would skip all parameters in silence. torch calls registered hooks before the step of
every optimizer; ours refuses those that update parameters of a sharded model and are no `ShardedOptimizer`. It does not keep
the model alive, and goes with it. Cost: one look-up a parameter at each step of a foreign optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftkit.engine.core.shard import Units
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError


def refuse_foreign_optimizers(units: Units) -> None:
    """Let every optimizer raise whose step would update parameters of this model, unless it is sharded.

    Args:
        units: units of the model; its parameters are refused, and those on meta that sharding has replaced.
    """
    known = weakref.ref(units)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = known()
        if own is None or isinstance(optimizer, ShardedOptimizer):
            return
        refused = own.places.keys() | {id(former) for each in own.replaced if (former := each()) is not None}
        if any(id(parameter) in refused for group in optimizer.param_groups for parameter in group["params"]):
            raise UserError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} was asked to step on a sharded model: the "
                "gradients are in shards, where this optimizer finds none, so that it would train nothing. Use "
                "ftkit.ShardedAdamW(units) or ftkit.ShardedSGD in a loop, the optimizer that ftkit.Accelerator.prepare() "
                "returned, and with the Trainer optim='adamw_torch' or 'sgd'"
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(units, handle.remove)
