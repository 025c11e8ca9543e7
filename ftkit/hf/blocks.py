"""The blocks of a Hugging Face model: where they are, which arguments they take, and models that have none.

transformers marks every block that may be recomputed as a `GradientCheckpointingLayer`; each instance that is not inside
another one is a unit. Models that mark none name block classes in `_no_split_modules`, which any module may have. A model
with neither is replicated: every rank keeps its weights, and the ranks share the optimizer state (ZeRO stage 1).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ftkit.engine.core.tensor_tree import take_tensors
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import DEVICE

logger = logging.getLogger(__name__)

BATCH_ARGUMENTS = frozenset(
    {
        "hidden_states",
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "position_embeddings_global",
        "position_embeddings_local",
        "position_bias",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "encoder_decoder_position_bias",
        "causal_mask",
        "alibi",
    }
)
"""Arguments of transformers' blocks whose tensors have the batch (or 1, for all of it) in their first dimension."""
OTHER_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cross_attn_layer_head_mask",
        "head_mask",
        "layer_head_mask",
        "layer_past",
        "output_attentions",
        "output_hidden_states",
        "past_key_value",
        "past_key_values",
        "return_dict",
        "use_cache",
    }
)
"""Arguments whose tensors, if they hold any in training, are the same for every sample."""
NAME_THEM = (
    "name the class of the modules that repeat in the model's _no_split_modules, or pass the modules to "
    "ftkit.shard(blocks=...)"
)

Blocks = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module) -> Blocks:
    """Return (name, module) of the blocks in order of execution; none where the model marks none."""
    named: set[str] = set()
    for module in model.modules():
        listed = getattr(module, "_no_split_modules", None) or ()
        named |= {listed} if isinstance(listed, str) else set(listed)
    found = _outermost(model, lambda module: isinstance(module, GradientCheckpointingLayer))
    return found or _outermost(model, lambda module: type(module).__name__ in named)


def _outermost(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> Blocks:
    found: Blocks = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if is_block(module) and id(module) not in inside:
            found.append((name, module))
            inside.update(map(id, module.modules()))
    return found


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments for a forward with gradients: each cache is None, and the loss's item count is left out.

    A cache that is filled again in recomputation would give wrong gradients. Models pass `num_items_in_batch` on to their
    blocks among the other keywords; no block reads it.

    Raises:
        RuntimeError: A cache holds something: training on top of a prompt's cache is not supported.
    """
    return tuple(map(_no_cache, args)), {
        key: _no_cache(value) for key, value in kwargs.items() if key != "num_items_in_batch"
    }


def _no_cache(value: Any) -> Any:
    if not isinstance(value, (Cache, EncoderDecoderCache)):
        return value
    if value.get_seq_length() > 0:
        raise RuntimeError(
            "a block was given a filled key/value cache while gradients are on; use torch.no_grad() for generation, or "
            "pass no past_key_values in training"
        )
    return None


def batch_rows(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
    """Return for each tensor among a block's arguments, in order, whether its rows are the batch and may be divided.

    Raises:
        RuntimeError: An argument with tensors is not known.
    """
    bound = inspect.signature(type(block).forward).bind_partial(block, *args, **kwargs)
    names = list(bound.signature.parameters)[1:]
    named = [*zip(names, args), *kwargs.items()]
    rows = next((len(value) for name, value in named if name == "hidden_states"), None)
    if rows is None:
        raise RuntimeError(f"{type(block).__name__} takes no hidden_states: its batch cannot be divided inside blocks")
    flags: list[bool] = []
    for name, value in named:
        found: list[torch.Tensor] = []
        take_tensors(value, found)
        for tensor in found:
            if name not in BATCH_ARGUMENTS | OTHER_ARGUMENTS:
                raise RuntimeError(
                    f"{type(block).__name__}: whether {name!r} holds the batch is not known: set engine.accumulate_in: step"
                )
            flags.append(name in BATCH_ARGUMENTS and tensor.dim() > 0 and len(tensor) == rows > 1)
    return flags


def divisible(blocks: Blocks) -> bool:
    """Return whether every argument that these blocks take is known, so that a batch can be divided inside them.

    Blocks that pass on a bias of positions return it with one row for the whole batch, so it cannot be divided again.
    """
    for _, block in blocks:
        arguments = list(inspect.signature(type(block).forward).parameters.values())[1:]
        names = {each.name for each in arguments if each.kind != each.VAR_KEYWORD}
        if not names <= BATCH_ARGUMENTS | OTHER_ARGUMENTS or "position_bias" in names:
            return False
    return True


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return which parameters a family keeps in fp32 when it computes in `dtype`, as transformers does on loading."""
    patterns = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            names = set(module._keep_in_fp32_modules_strict or ()) if dtype.itemsize < 4 else set()
            if dtype == torch.float16:
                names |= set(module._keep_in_fp32_modules or ())
            patterns += [re.compile(rf"(^|\.){name}($|\.)") for name in names]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def replicated(strategy: Strategy, model: nn.Module, *, say: bool) -> Strategy:
    """Return the strategy of a model without blocks: stage 1 unless the user chose 0 or 2.

    Args:
        strategy: The user's strategy.
        model: A model without blocks.
        say: Whether the notice is logged; on one rank.

    Raises:
        UserError: The strategy needs blocks: stage 3, or parameters or gradients below the device.
    """
    kind = f"{type(model).__name__} has no blocks"
    for name, fits in {"stage": ("auto", 0, 1, 2), "parameters": ("auto", DEVICE), "gradients": ("auto", DEVICE)}.items():
        if getattr(strategy, name) not in fits:
            raise UserError(f"{name}={getattr(strategy, name)!r} works block by block, and {kind}: {NAME_THEM}")
    if say:
        logger.warning(
            "%s: every rank keeps all weights, nothing is recomputed, and the memory plan does not count its "
            "activations. To shard the weights, %s.",
            kind,
            NAME_THEM,
        )
    return replace(strategy, stage=1) if strategy.stage == "auto" else strategy
