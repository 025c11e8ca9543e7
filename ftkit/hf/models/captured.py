"""Hooks of the user's inside blocks that are recomputed or sharded: what they keep there carries no gradient.

Such a block computes first without a graph, and again in backward. A hook inside that looks, or changes what passes, does
so both times and is right. A loss on what it kept, or on a weight of the block, would teach nothing, and PyTorch would not
say so. Nobody can see what a hook is for; so it is told which ones there are, once, before the first step.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ftkit.engine.model import ShardedModel
from ftkit.hf.models.hooks import hooks_on, name_of

logger = logging.getLogger(__name__)

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")


def tell_hooks(units: ShardedModel, instead: str) -> None:
    """Warn of hooks inside blocks at the first call of the model with gradients on; hooks may come until then.

    Args:
        units: the sharded model; its rank 0 warns.
        instead: advice at the end of the warning, with the settings under which such losses train.
    """

    def before(module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        found = hooks_inside(units)
        if found and units.comm.rank == 0:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            logger.warning(
                "%s has the forward hook %s%s. Blocks are recomputed or sharded here: a tensor that the hook keeps from "
                "inside a block carries no gradient, and a loss on it, or on a weight of the block, trains nothing. A hook "
                "may look at activations or change them. For such a loss %s",
                *found[0],
                more,
                instead,
            )

    handle = units.model.register_forward_pre_hook(before)


def hooks_inside(units: ShardedModel) -> list[tuple[str, str]]:
    """Return (module, hook) of the forward hooks inside blocks that do not run by plain autograd, by their names.

    A block's own hooks are none: they are given what leaves it, with its gradient.
    """
    cutting = [unit for unit in units.units if unit.is_cut_out]
    return [
        (f"{unit.name}.{name}", name_of(hook))
        for unit in cutting
        for name, module in unit.module.named_modules()
        if name
        for hook in hooks_on(module, HOOK_TABLES)
    ]
