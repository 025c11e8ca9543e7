"""Causal attention over samples laid end to end, each as if it were alone, in memory and time of the samples' own lengths.

    loop        one sample after the other, in plain PyTorch: the reference, everywhere; the only one with a soft cap
    efficient   one launch of the memory-efficient kernel that `scaled_dot_product_attention` uses on GPUs since sm_50: fp16
                runs on a V100's tensor cores where a head's size is a multiple of 8
    flash       torch's variable-length flash attention, from sm_80 on

torch has no public name for the second one, so it stands here alone, and what torch says of its arguments is compared with
what this file gives it when it is imported: another torch is told from a wrong result. Rabe and Staats, arXiv:2112.05682;
Dao et al., arXiv:2205.14135.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped
from torch.nn.functional import scaled_dot_product_attention

from ftkit.errors import UserError

Way = Literal["loop", "efficient", "flash"]

ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, int custom_mask_type, "
    "bool compute_log_sumexp=False, *, float? scale=None, Tensor? seqlen_k=None, int? window_size=None"
)
CAUSAL = 1
FLASH_ARGUMENTS = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa")


def _efficient_as_expected() -> bool:
    operation = getattr(torch.ops.aten, "_efficient_attention_forward", None)
    return operation is not None and f"({ARGUMENTS})" in str(operation.default._schema)


def _flash_attention() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if set(FLASH_ARGUMENTS) <= inspect.signature(varlen_attn).parameters.keys() else None


EFFICIENT = _efficient_as_expected()
FLASH = _flash_attention()


def way_for(query: Tensor, *, dropout: float, softcap: float | None) -> Way:
    """Return the quickest way for these queries.

    Raises:
        UserError: if this torch's memory-efficient attention is another than the one that is known here.
    """
    if not query.is_cuda or softcap is not None:
        return "loop"
    new = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if FLASH is not None and new and not dropout and query.dtype in (torch.float16, torch.bfloat16):
        return "flash"
    if not EFFICIENT:
        raise UserError(
            f"torch {torch.__version__} has another memory-efficient attention than ftkit knows (2.10 to 2.14): "
            "install one of those, or set data.packing: false"
        )
    return "efficient"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    way: Way | None = None,
) -> Tensor:
    """Return the attention of each sample to itself, (N, H, D).

    Args:
        query: (N, H, D), tokens of all samples end to end. key, value: (N, G, D), where G divides H.
        boundaries: (S + 1,) int32, from 0 to N, never falling: sample s is [boundaries[s], boundaries[s + 1]).
        longest: no sample has more tokens. scale: of the scores; None: 1 / sqrt(D).
        dropout: share of the weights that are dropped. window: a token sees itself and window - 1 before it; None: all.
        softcap: scores become softcap * tanh(scores / softcap). way: None takes the quickest.

    Cost: memory of the result; by the loop also the scores of a sample, if there is a cap, window or dropout.
    """
    groups = query.shape[1] // key.shape[1]
    way = way or way_for(query, dropout=dropout, softcap=softcap)
    if way == "flash":
        found: Tensor = FLASH(
            query, key, value, boundaries, boundaries, longest, longest,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=groups > 1,
        )  # fmt: skip
        return found
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    if way == "efficient":
        result: Tensor = torch.ops.aten._efficient_attention_forward(
            query[None], key[None], value[None], None, boundaries, boundaries, longest, longest, dropout, CAUSAL,
            query.requires_grad or key.requires_grad or value.requires_grad, scale=scale, window_size=window,
        )[0][0]  # fmt: skip
        return result
    ends = boundaries.tolist()
    parts = [
        _alone(*(each[start:end] for each in (query, key, value)), scale, dropout, window, softcap)
        for start, end in pairwise(ends)
        if end > start
    ]
    return torch.cat(parts) if parts else torch.zeros_like(query)


def _alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the attention of one sample (T, H, D) to itself."""
    q, k, v = (each.transpose(0, 1) for each in (query, key, value))
    tokens = q.shape[1]
    if softcap is None and (window is None or window >= tokens):
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale).transpose(0, 1)
    scores = (q @ k.transpose(1, 2)) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(tokens, device=q.device)
    apart = places[:, None] - places[None, :]
    seen = (apart >= 0) & (apart < (window or tokens))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return (dropped(weights, dropout) @ v).transpose(0, 1)
