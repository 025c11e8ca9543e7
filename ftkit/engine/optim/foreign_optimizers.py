"""Refuse the step of an ordinary optimizer on a sharded model.

The gradients of a sharded model are in shards and every `parameter.grad` is None, so an optimizer of torch or bitsandbytes
would skip all parameters without an error. torch calls a registered hook before each step of every optimizer.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError


def refuse_foreign_optimizers(units: ShardedModel) -> None:
    """Let the step of any other optimizer over parameters of this model raise, as long as the model exists."""
    known = weakref.ref(units)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = known()
        if own is None or isinstance(optimizer, ShardedOptimizer):
            return
        if any(id(parameter) in own.places for group in optimizer.param_groups for parameter in group["params"]):
            raise UserError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} would train nothing: the gradients of a sharded "
                "model are in shards. Use ftkit.ShardedAdamW(units) or another Sharded optimizer of ftkit, the one that "
                "ftkit.Accelerator.prepare() returned, or optim='adamw_torch' in the Trainer"
            )

    weakref.finalize(units, register_optimizer_step_pre_hook(check).remove)
