"""Causal attention over packed samples, each as if it were alone. Memory and time grow with the lengths of the samples.

    loop        one sample after the other by `scaled_dot_product_attention`: the reference, for every device
    efficient   launches of the memory-efficient kernel that `scaled_dot_product_attention` uses on GPUs, from sm_50 on;
                fp16 uses a V100's tensor cores if the head size is a multiple of 8
    flash       torch's variable-length flash attention, from sm_80 on

torch has no public name for the memory-efficient kernel with boundaries. This file alone calls the private operators, which
are the same in all supported versions. Rabe and Staats, arXiv:2112.05682; Dao et al., arXiv:2205.14135.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers.utils.import_utils import is_fake_tensor

from ftkit.plan.attention import launch_tokens, most_launch_tokens

ATTENTION = "ftkit"
"""Name of the attention that takes boundaries in transformers (`ftkit.hf.kernels.attention`)."""
Kernel = Literal["loop", "efficient", "flash"]
HALVES = (torch.float16, torch.bfloat16)
CAUSAL = 1


def _flash_attention() -> Any:
    """Return torch's variable-length flash attention; None before it took grouped keys (torch 2.13)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


FLASH = _flash_attention()


class _Efficient(torch.autograd.Function):
    """(N, H, D), (N, H, D), (N, H, E) -> (N, H, E). torch's own derivative ignores the window in backward.

    The workspace of a launch counts each sample as long as the longest (`ftkit.plan.attention`).
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
        for first, last in launches(cuts, row_tokens):
            start, stop = cuts[first], cuts[last]
            ends = on_device([cut - start for cut in cuts[first : last + 1]], query.device)
            longest = max(b - a for a, b in pairwise(cuts[first : last + 1]))
            part, normaliser, seed, offset, most, others = torch.ops.aten._efficient_attention_forward(
                *(each[None, start:stop] for each in (query, key, value)), None, ends, ends, longest, longest, dropout,
                CAUSAL, any(ctx.needs_input_grad), scale=scale, window_size=window,
            )  # fmt: skip
            out = _into(out, part[0], start, len(query))
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
        whole = gradient.contiguous(), query, key, value, out
        found: list[Tensor | None] = [None] * 3
        for number, (start, stop, most, others) in enumerate(ctx.launches):
            ends, normaliser, seed, offset = saved[4 * number : 4 * number + 4]
            grad, q, k, v, result = (each[None, start:stop] for each in whole)
            parts = torch.ops.aten._efficient_attention_backward(
                grad, q, k, v, None, result, ends, ends, most, others, normaliser, dropout, seed, offset, CAUSAL, False,
                scale=scale, window_size=window,
            )[:3]  # fmt: skip
            found = [_into(each, part[0], start, len(query)) for each, part in zip(found, parts)]
        return *found, None, None, None, None, None


def launches(cuts: Sequence[int], row_tokens: int) -> list[tuple[int, int]]:
    """Divide packed samples into launches, none of which exceeds `most_launch_tokens`.

    Args:
        cuts: Starts of samples and the end of the last one, ascending from 0 to the number of tokens.
        row_tokens: Tokens of a row. No sample has more.

    Returns:
        Ranges of samples [first, last), in order. Sample s has the tokens [cuts[s], cuts[s + 1]).
    """
    limit = most_launch_tokens(max(cuts[-1] // row_tokens, 1), row_tokens)
    found, first, longest = [], 0, 0
    for number, (start, stop) in enumerate(pairwise(cuts)):
        widest = max(longest, stop - start)
        if number > first and launch_tokens(number + 1 - first, widest) > limit:
            found.append((first, number))
            first, widest = number, stop - start
        longest = widest
    return [*found, (first, len(cuts) - 1)]


def _into(whole: Tensor | None, part: Tensor, start: int, tokens: int) -> Tensor:
    """Write one launch's result into that of all `tokens`, so that not all of both exist at once."""
    if len(part) == tokens:
        return part
    whole = part.new_empty(tokens, *part.shape[1:]) if whole is None else whole
    whole[start : start + len(part)] = part
    return whole


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return numbers as int32 on a device, without a wait for the device."""
    made = torch.tensor(numbers, dtype=torch.int32)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def kernel_for(query: Tensor, value: Tensor, dropout: float) -> Kernel:
    """Return the fastest kernel for these queries and values. On meta it is that of the oldest GPUs."""
    if query.device.type == "cpu":
        return "loop"
    new = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)
    flash = FLASH is not None and new and not dropout and query.dtype in HALVES and query.shape[-1] == value.shape[-1]
    return "flash" if flash else "efficient"


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
        kernel: The kernel; None takes the fastest.

    Cost: memory of the result, and for backward fp32 (N, H). The efficient kernel adds (S, H, longest of a launch) and the
        workspace of `ftkit.plan.attention`. The loop adds the scores of a sample if there is a window.
    """
    groups = query.shape[1] // key.shape[1]
    kernel = kernel or kernel_for(query, value, dropout)
    if is_fake_tensor(boundaries):  # of a fake run: each row is one sample
        cuts = tuple(range(0, len(query) + 1, longest))
    else:
        cuts = tuple(sorted(set(boundaries.tolist())))  # without empty samples
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
    parts = []
    for start, end in pairwise(cuts):
        q, k, v = (each[start:end].transpose(0, 1) for each in (query, key, value))
        seen = None
        if window is not None and window < end - start:
            seen = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        part = scaled_dot_product_attention(q, k, v, seen, dropout, is_causal=seen is None, scale=scale)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)
