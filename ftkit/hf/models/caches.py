"""Key/value caches in calls that a backward follows: refused where somebody would train on them.

A block that is recomputed may not fill a cache: it would be filled twice. So in such a call blocks see no cache, and the one
that the model returns is empty. A Trainer never looks at it (`config.use_cache` is on by default). But a call that is given
a cache would silently be computed without what the cache should hold; that call raises.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError


def refuse_caches(units: ShardedModel) -> None:
    """Let calls of the model raise that would train through a cache, or would read one that was left empty.

    Args:
        units: the sharded model. Its own calls are looked at, not those of the models inside it.
    """
    empty: weakref.WeakSet[Any] = weakref.WeakSet()
    trains = any(flat.trainable for flat in units.flats)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if units.running.depth > 1:
            return
        for given in _caches((*args, *kwargs.values())):
            if given in empty:
                raise UserError(
                    "this key/value cache is empty: it comes from a call with gradients, in which blocks are recomputed and "
                    "fill no cache. Make the first call under torch.no_grad(), or give prompt and answer in one call"
                )
            if trains and torch.is_grad_enabled():
                raise UserError(
                    "a key/value cache was given to a sharded model while gradients are on: its blocks are recomputed, and "
                    "training through a cache is not supported. Give prompt and answer in one call, or call under "
                    "torch.no_grad()"
                )

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if units.running.depth > 1 or not (trains and torch.is_grad_enabled()):
            return
        values = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else ()
        empty.update(_caches(values))

    for module in {id(each): each for each in (units.model, *_inner(units.model))}.values():
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)


def _inner(model: nn.Module) -> list[nn.Module]:
    """Return the model that a PEFT model, or another wrapper, holds: it may be called by itself."""
    found = getattr(model, "get_base_model", None)
    return [found()] if callable(found) else []


def _caches(values: Any) -> list[Any]:
    return [value for value in values if isinstance(value, (Cache, EncoderDecoderCache))]
