"""Causal attention over packed samples, each as if it were alone. Memory and time grow with the lengths of the samples.

    loop        one sample after the other in plain PyTorch: the reference, for every device; the only one with a soft cap
    efficient   launches of the memory-efficient kernel that `scaled_dot_product_attention` uses on GPUs, from sm_50 on;
                fp16 uses a V100's tensor cores if the head size is a multiple of 8
    flash       torch's variable-length flash attention, from sm_80 on

torch has no public name for the memory-efficient kernel with boundaries. This file alone calls the private operators, after
a comparison of their argument names with those of the tested versions. Rabe and Staats, arXiv:2112.05682; Dao et al.,
arXiv:2205.14135.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as dropped
from torch.nn.functional import scaled_dot_product_attention
from transformers.utils.import_utils import is_fake_tensor

from ftkit.errors import UserError
from ftkit.plan.attention import launches

ATTENTION = "ftkit"
"""Name of the attention that takes boundaries in transformers (`ftkit.hf.kernels.attention`)."""
Kernel = Literal["loop", "efficient", "flash"]
HALVES = (torch.float16, torch.bfloat16)
CAUSAL = 1

ARGUMENTS = {
    "_efficient_attention_forward": "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "custom_mask_type compute_log_sumexp scale seqlen_k window_size",
    "_efficient_attention_backward": "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad scale num_splits_key "
    "window_size shared_storage_dqdkdv",
}
"""Names of the arguments of the private operators, in order."""
FLASH_ARGUMENTS = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"}


def _knows_efficient() -> bool:
    """Return whether this torch's private operators take the arguments that this file passes."""
    found = {name: getattr(torch.ops.aten, name, None) for name in ARGUMENTS}
    return all(
        operator is not None and [each.name for each in operator.default._schema.arguments] == ARGUMENTS[name].split()
        for name, operator in found.items()
    )


def _flash_attention() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return None if FLASH_ARGUMENTS - inspect.signature(varlen_attn).parameters.keys() else varlen_attn


EFFICIENT = _knows_efficient()
FLASH = _flash_attention()


class _Efficient(torch.autograd.Function):
    """(N, H, D), (N, H, D), (N, H, E) -> (N, H, E). torch's own derivative ignores the window in backward.

    `cuts` are on the host. Every launch therefore gets the length of its own longest sample and no empty sample: the
    workspace of a launch counts each sample as long as the longest (`ftkit.plan.attention`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cuts: tuple[int, ...],
        row_tokens: int,
        scale: float | None,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        ctx.how = dropout, scale, window
        ctx.launches, saved, out = [], [], None
        parts = launches(cuts, row_tokens)
        for first, last in parts:
            start, stop = cuts[first], cuts[last]
            ends = on_device([cut - start for cut in cuts[first : last + 1]], query.device)
            longest = max(b - a for a, b in pairwise(cuts[first : last + 1]))
            part, normaliser, seed, offset, most, others = torch.ops.aten._efficient_attention_forward(
                *(each[None, start:stop] for each in (query, key, value)), None, ends, ends, longest, longest, dropout,
                CAUSAL, any(ctx.needs_input_grad), scale=scale, window_size=window,
            )  # fmt: skip
            if len(parts) == 1:
                out = part[0]
            else:
                out = query.new_empty(*query.shape[:2], value.shape[2]) if out is None else out
                out[start:stop] = part[0]
            ctx.launches.append((start, stop, most, others))
            saved += [ends, normaliser, seed, offset]
        assert out is not None
        ctx.save_for_backward(query, key, value, out, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dropout, scale, window = ctx.how
        query, key, value, out, *saved = ctx.saved_tensors
        gradient = gradient.contiguous()
        found: list[Tensor] = []
        for number, (start, stop, most, others) in enumerate(ctx.launches):
            ends, normaliser, seed, offset = saved[4 * number : 4 * number + 4]
            whole = gradient, query, key, value, out
            grad, q, k, v, result = (each[None, start:stop] for each in whole)
            parts = torch.ops.aten._efficient_attention_backward(
                grad, q, k, v, None, result, ends, ends, most, others, normaliser, dropout, seed, offset, CAUSAL, False,
                scale=scale, window_size=window,
            )[:3]  # fmt: skip
            if len(ctx.launches) == 1:
                found = [part[0] for part in parts]
                break
            found = found or [torch.empty_like(each) for each in (query, key, value)]
            for into, part in zip(found, parts):
                into[start:stop] = part[0]
        return *found, None, None, None, None, None


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return numbers as int32 on a device, without a wait for the device."""
    made = torch.tensor(numbers, dtype=torch.int32)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def kernel_for(query: Tensor, value: Tensor, *, dropout: float, softcap: float | None) -> Kernel:
    """Return the fastest kernel for these queries and values. On meta it is that of the oldest GPUs.

    Raises:
        UserError: The memory-efficient attention of this torch has other arguments than the tested versions.
    """
    if query.device.type == "cpu" or softcap is not None:
        return "loop"
    new = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)
    if FLASH is not None and new and not dropout and query.dtype in HALVES and query.shape[-1] == value.shape[-1]:
        return "flash"
    if not EFFICIENT:
        raise UserError(
            f"torch {torch.__version__}: its memory-efficient attention takes other arguments than in torch 2.10 to 2.14. "
            "Install one of those, or set data.packing: false"
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
    kernel: Kernel | None = None,
) -> Tensor:
    """Return the attention of each sample to itself, (N, H, E).

    Args:
        query: (N, H, D), tokens of all samples, one after the other.
        key: (N, G, D). G divides H.
        value: (N, G, E).
        boundaries: (S + 1,) int32 in ascending order, from 0 to N: sample s is [boundaries[s], boundaries[s + 1]). On a
            GPU they cost a wait.
        longest: Upper bound of a sample's tokens: the tokens of a row.
        scale: Factor on the scores; None for 1 / sqrt(D).
        dropout: Probability of dropping an attention weight.
        window: A token sees itself and window - 1 tokens before it; None for all.
        softcap: Scores become softcap * tanh(scores / softcap).
        kernel: The kernel; None takes the fastest.

    Cost: memory of the result, and for backward fp32 (N, H). The efficient kernel adds (S, H, longest of a launch) and the
        workspace of `ftkit.plan.attention`. The loop adds the scores of a sample if there is a cap or a window.
    """
    groups = query.shape[1] // key.shape[1]
    kernel = kernel or kernel_for(query, value, dropout=dropout, softcap=softcap)
    if is_fake_tensor(boundaries):  # of a fake run: each row is one sample
        cuts = tuple(range(0, len(query) + 1, longest))
    else:
        cuts = tuple(sorted(set(boundaries.tolist())))  # without empty samples
    if len(cuts) < 2:
        return value.repeat_interleave(groups, 1)
    if kernel == "flash":
        ends = on_device(list(cuts), query.device)
        most = max(b - a for a, b in pairwise(cuts))
        found: Tensor = FLASH(
            query, key, value, ends, ends, most, most,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=groups > 1,
        )  # fmt: skip
        return found
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    if kernel == "efficient":
        result: Tensor = _Efficient.apply(query, key, value, cuts, longest, scale, dropout, window)
        return result
    parts = [
        _alone(query[start:end], key[start:end], value[start:end], scale, dropout, window, softcap)
        for start, end in pairwise(cuts)
    ]
    return torch.cat(parts)


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
