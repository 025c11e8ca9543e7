"""ftkit's attention, registered with transformers under the name "ftkit": packed samples without a quadratic mask.

A packed batch says (`ftkit.data.packing.boundaries_of`) where its samples end: `attention_mask` is then (B, 1, 1, S + 1)
int32, for each row the boundaries of its samples, 0 first, filled up with T. transformers hands a mask of four dimensions to
every layer as it is, and the batch is its first dimension, so the engine may divide it. Any other mask means what it always
means, and is left to transformers' own sdpa: evaluation, generation and padded batches go on as before.

Packed positions without boundaries are no leak either: transformers then builds its quadratic mask, as for sdpa.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ftkit.hf.models.fake import CudaAttention
from ftkit.hf.models.varlen import ATTENTION, attend

REPEATED = "ftkit-sdpa"
"""transformers' sdpa, with grouped keys repeated where PyTorch has no kernel for them."""

KNOWN = frozenset({"position_ids", "cache_position", "position_bias", "position_embeddings", "num_items_in_batch"})
"""Tensors that layers hand down and attention has no use for, or that sdpa takes."""


def is_packed(attention_mask: Any) -> bool:
    """Return whether what stands for a mask are boundaries."""
    return torch.is_tensor(attention_mask) and attention_mask.dtype == torch.int32 and attention_mask.dim() == 4


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention's result (B, T, H, E), and no weights; arguments as transformers gives them.

    Args:
        module: the attention module that calls.
        query: (B, H, T, D).
        key: (B, G, T, D), where G divides H.
        value: (B, G, T, E).
        attention_mask: boundaries of packed samples, (B, 1, 1, S + 1) int32, or a mask that sdpa takes.
        dropout: share of the attention weights that are dropped.
        scaling: factor on the scores; None: 1 / sqrt(D).
        sliding_window: a token of packed samples sees itself and sliding_window - 1 before it; None takes the
            configuration's.
        softcap: scores become softcap * tanh(scores / softcap).
        kwargs: further arguments of transformers; an unknown one that holds a tensor raises.

    Raises:
        ValueError: for what would be lost: arguments that are not known here (sinks, indices), and, where samples are
            packed, a bias of positions, chunks, attention that is not causal.
    """
    lost = sorted(name for name, given in kwargs.items() if torch.is_tensor(given) and name not in KNOWN)
    if lost:
        raise ValueError(f"{type(module).__name__} gives its attention {', '.join(lost)}, which ftkit's does not know")
    if is_packed(attention_mask):
        assert attention_mask is not None
        window = _window(module, sliding_window)
        if kwargs.get("position_bias") is not None or not getattr(module, "is_causal", True):
            raise ValueError(f"{type(module).__name__}: packed samples need causal attention without a bias of positions")
        batch, _, tokens, _ = query.shape
        rows = torch.arange(batch, device=attention_mask.device, dtype=torch.int32)[:, None] * tokens
        ends = (attention_mask.view(batch, -1) + rows).reshape(-1)
        q, k, v = (each.transpose(1, 2).reshape(batch * tokens, each.shape[1], -1) for each in (query, key, value))
        found = attend(q, k, v, ends, tokens, scale=scaling, dropout=dropout, window=window, softcap=softcap)
        return found.view(batch, tokens, found.shape[1], -1), None
    if softcap is not None:
        return _capped(module, query, key, value, attention_mask, dropout, scaling, softcap), None
    return repeated_sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def repeated_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return transformers' sdpa; where no fused kernel takes grouped keys, they are repeated first.

    Without that, PyTorch computes grouped keys without a mask by its math kernel: scores of (B, H, T, T), in fp32.

    Args:
        module: the attention module of transformers that calls.
        query: (B, H, T, D).
        key: (B, G, T, D), where G divides H.
        value: (B, G, T, E).
        attention_mask: mask that sdpa takes.
        dropout: share of the attention weights that are dropped.
        scaling: factor on the scores; None: 1 / sqrt(D).
        kwargs: further arguments of transformers.
    """
    groups = query.shape[1] // key.shape[1]
    stand_in: Any = module
    if groups > 1 and attention_mask is None and query.shape[2] > 1 and not takes_groups(query, key, value, dropout):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        stand_in = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # it would ask the module for its groups
    with CudaAttention() if query.device.type == "meta" else nullcontext():  # a fake run: the memory of the GPU's kernel
        found, _ = sdpa_attention_forward(stand_in, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return found, None


def takes_groups(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether a fused kernel computes causal attention of grouped keys here; on a CPU scores are not whole anyway.

    Args:
        query: (B, H, T, D).
        key: (B, G, T, D).
        value: (B, G, T, E).
        dropout: share of the attention weights that are dropped.
    """
    if query.device.type == "cuda":  # PyTorch answers for this card and this version
        asked = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, True, True)
        kernels = torch.backends.cuda
        fused = kernels.can_use_flash_attention, kernels.can_use_efficient_attention, kernels.can_use_cudnn_attention
        return any(can(asked) for can in fused)
    return query.device.type != "meta"  # a fake run counts what the oldest cards take


def repeat_grouped_keys(model: Any, device: torch.device) -> bool:
    """Let a model that uses transformers' sdpa repeat grouped keys where PyTorch has no kernel for them; say if it does.

    Args:
        model: a model of transformers; others are left as they are.
        device: device on which the model computes.
    """
    config: Any = getattr(model, "config", None)
    if device.type != "cuda" or getattr(config, "_attn_implementation", None) != "sdpa":
        return False
    if not hasattr(model, "set_attn_implementation"):  # a user's module with a configuration
        return False
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    groups = heads // (getattr(text, "num_key_value_heads", None) or heads)
    if groups == 1:
        return False
    probe = torch.empty(1, groups, 2, 8, device=device, dtype=torch.float16)
    if takes_groups(probe, probe[:, :1], probe[:, :1], 0.0):
        return False
    model.set_attn_implementation(REPEATED)
    return True


def _window(module: nn.Module, given: int | None) -> int | None:
    """Return how many tokens a layer sees; some families say so in their masks alone, where boundaries now stand.

    Raises:
        ValueError: for layers that attend within chunks.
    """
    config, place = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[place] if kinds and isinstance(place, int) else None
    if kind == "chunked_attention" or (kind is None and getattr(config, "attention_chunk_size", None)):
        raise ValueError(f"{type(module).__name__} attends within chunks: it cannot be packed with ftkit's attention")
    if given is not None or kind not in (None, "sliding_attention"):
        return given
    return getattr(config, "sliding_window", None)


def _capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Return attention with soft-capped scores, which no kernel has, (B, T, H, D)."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)) * (scaling or query.shape[-1] ** -0.5) / softcap)
    length, present = query.shape[2], key.shape[2]
    if mask is None and length > 1:  # sdpa's masks are left out where attention is plainly causal
        mask = torch.ones(length, present, dtype=torch.bool, device=query.device).tril(present - length)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (nn.functional.dropout(weights, dropout, module.training) @ value).transpose(1, 2)


def use_packed_attention(model: Any) -> bool:
    """Let a model of transformers use ftkit's attention; return whether it does.

    Those that transformers itself would not run by sdpa keep their own, but for the ones with capped scores.
    """
    capped = getattr(getattr(model, "config", None), "attn_logit_softcapping", None)
    if not hasattr(model, "set_attn_implementation") or not (getattr(model, "_supports_sdpa", False) or capped):
        return False
    model.set_attn_implementation(ATTENTION)
    return bool(model.config._attn_implementation == ATTENTION)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
AttentionInterface.register(REPEATED, repeated_sdpa)
AttentionMaskInterface.register(REPEATED, sdpa_mask)
