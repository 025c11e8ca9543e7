"""Where numbers stopped being finite: which module a forward overflows in, and which units' gradients a step lost.

A step in fp16 that overflows is skipped and the loss scale backs off; that much is routine. Which module it was is worth
knowing: one that overflows in the forward does so at any loss scale. The optimizer says of which units the gradients were
not finite (`ShardedOptimizer.overflowed`); backward goes from the last unit to the first, so it went wrong at the last of
them. If that is all of them, the forward is run once more on the batch at hand, with a look at what each module makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ftkit.engine.core.tensor_tree import take_tensors
from ftkit.hf.models.head import only_loss


@torch.no_grad()
def first_overflow(model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """Return the name of the first module that makes what is not finite of what is; None if none does.

    Args:
        model: the model, sharded or not; with a sharded one this is a collective.
        inputs: keyword arguments of the model's forward, on its device.

    Cost: a forward without gradients, and a host wait for each module.
    """
    found: list[str] = []
    handles = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not found and not _finite(output) and _finite((args, kwargs)):
                found.append(name)

        return hook

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(look(name), with_kwargs=True))
    try:
        with only_loss(model, wanted="labels" in inputs):
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _finite(tree: Any) -> bool:
    tensors: list[torch.Tensor] = []
    take_tensors(tree, tensors)
    return all(bool(torch.isfinite(each).all()) for each in tensors if each.is_floating_point())


def began_in(overflowed: Sequence[str], lines: Sequence[str]) -> str | None:
    """Return the unit in whose backward it went wrong: the last of those that are not finite; None if all are not.

    Args:
        overflowed: names of the flat parameters whose gradients are not finite.
        lines: names of all flat parameters with a gradient, in forward order.
    """
    if not overflowed or set(overflowed) >= set(lines):
        return None
    return max(overflowed, key=lines.index)
