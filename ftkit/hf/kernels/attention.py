"""Attention over packed samples without a quadratic mask, registered with transformers as "ftkit".

A packed batch (`ftkit.data.packing.boundaries_of`) says where its samples end. Its `attention_mask` is (B, 1, 1, S + 1)
int32: for each row the boundaries of its samples, 0 first, padded with T. transformers passes a mask of four dimensions to
every layer as it is, and its first dimension is the batch, so the engine may divide it. All other masks go to transformers'
sdpa: evaluation, generation and padded batches compute as before. Packed positions without boundaries do not leak either:
transformers builds its quadratic mask for them, as for sdpa.
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

from ftkit.hf.kernels.varlen import ATTENTION, attend
from ftkit.hf.memory.fake import CudaAttention

REPEATED = "ftkit-sdpa"
"""Name of the same attention for models that do not pack: sdpa, with grouped keys repeated where no kernel takes them."""


def is_packed(attention_mask: Any) -> bool:
    """Return whether a mask holds the boundaries of packed samples."""
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the result (B, T, H, E), and no weights. transformers calls this in every attention layer.

    Grouped keys are repeated where no fused kernel takes them: PyTorch would compute them without a mask by its math kernel,
    with fp32 scores of (B, H, T, T).

    Args:
        module: The attention module.
        query: (B, H, T, D).
        key: (B, G, S, D). G divides H.
        value: (B, G, S, E).
        attention_mask: Boundaries of packed samples, (B, 1, 1, samples + 1) int32, or a mask for sdpa.
        dropout: Probability of dropping an attention weight.
        scaling: Factor on the scores; None for 1 / sqrt(D).
        sliding_window: A token of a packed sample sees itself and sliding_window - 1 tokens before it; None takes the
            configuration's.
        kwargs: Further arguments for sdpa.

    Raises:
        ValueError: The samples are packed, and the layer has a position bias, attends within chunks or is not causal.
    """
    if is_packed(attention_mask):
        assert attention_mask is not None
        window = _window(module, sliding_window)
        if kwargs.get("position_bias") is not None or not getattr(module, "is_causal", True):
            raise ValueError(f"{type(module).__name__}: packed samples need causal attention without a position bias")
        batch, _, tokens, _ = query.shape
        rows = torch.arange(batch, device=attention_mask.device, dtype=torch.int32)[:, None] * tokens
        ends = (attention_mask.view(batch, -1) + rows).reshape(-1)
        q, k, v = (each.transpose(1, 2).reshape(batch * tokens, each.shape[1], -1) for each in (query, key, value))
        found = attend(q, k, v, ends, tokens, scale=scaling, dropout=dropout, window=window)
        return found.view(batch, tokens, found.shape[1], -1), None
    groups, owner = query.shape[1] // key.shape[1], module
    if groups > 1 and attention_mask is None and query.shape[2] > 1 and not takes_groups(query, key, value, dropout):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        owner = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # type: ignore[assignment]  # has no groups
    with CudaAttention() if query.device.type == "meta" else nullcontext():  # fake runs count the GPU's memory
        found, _ = sdpa_attention_forward(owner, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return found, None


def takes_groups(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether a fused kernel computes causal attention with grouped keys. On a CPU scores are never whole.

    The arguments are those of `attention`.
    """
    if query.device.type == "cuda":  # PyTorch answers for this GPU and this version
        asked = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, True, True)
        kernels = torch.backends.cuda
        fused = kernels.can_use_flash_attention, kernels.can_use_efficient_attention, kernels.can_use_cudnn_attention
        return any(can(asked) for can in fused)
    return query.device.type != "meta"  # a fake run counts the kernels of the oldest GPUs


def repeat_grouped_keys(model: Any, device: torch.device) -> bool:
    """Let a model with transformers' sdpa repeat grouped keys if PyTorch has no kernel for them.

    Args:
        model: Any model. Only models of transformers change.
        device: Compute device.

    Returns:
        Whether it repeats them.
    """
    config: Any = getattr(model, "config", None)
    is_sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
    if device.type != "cuda" or not is_sdpa or not hasattr(model, "set_attn_implementation"):  # which a wrapper has not
        return False
    text = config.get_text_config()
    if getattr(text, "num_key_value_heads", None) in (None, getattr(text, "num_attention_heads", None)):
        return False
    probe = torch.empty(1, 2, 2, 8, device=device, dtype=torch.float16)
    if takes_groups(probe, probe[:, :1], probe[:, :1], 0.0):
        return False
    model.set_attn_implementation(REPEATED)
    return True


def _window(module: nn.Module, given: int | None) -> int | None:
    """Return how many tokens a layer sees. Some families say so only in their masks, which boundaries replace.

    Raises:
        ValueError: The layer attends within chunks.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else "sliding_attention"
    if kind == "chunked_attention":
        raise ValueError(f"{type(module).__name__} attends within chunks: it cannot be packed with ftkit's attention")
    return getattr(config, "sliding_window", None) if given is None and kind == "sliding_attention" else given


def use_packed_attention(model: Any) -> bool:
    """Let a model use ftkit's attention, and return whether it does. Families without sdpa keep their own attention."""
    if not hasattr(model, "set_attn_implementation") or not getattr(model, "_supports_sdpa", False):
        return False
    model.set_attn_implementation(ATTENTION)
    return bool(model.config._attn_implementation == ATTENTION)


for _name in (ATTENTION, REPEATED):
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, sdpa_mask)
