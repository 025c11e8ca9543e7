"""Cross-entropy of a linear head's outputs, with only a chunk of the logits in memory.

    x = scale * (hidden @ weight.T + bias),    loss = sum over rows of cross_entropy(x)      (cross_entropy.py)

Forward walks the rows: a chunk's logits give its losses and normalisers and are freed. Backward walks the vocabulary: the
logits of a chunk of classes are computed again for all rows, become their gradient in place, and are multiplied at once into
the gradient of those classes' weights (then complete) and into the fp32 sum of the hidden states' gradients. So neither the
(R, V) logits exist nor a second copy of the weight's gradient. The incoming gradient (a loss scale) is applied before
anything is rounded, as in the model's own loss.

Cost: four matrix products instead of three, for `CHUNK_BYTES` of logits instead of all.

Source: Hsu et al., arXiv:2410.10989; Wijmans et al., arXiv:2411.09009.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from .cross_entropy import gradients_into, losses_of
from .launch import FLOATS, KernelError, as_on_gpu

CHUNK_BYTES = 128 << 20
"""Logits in memory at once: enough for matrix products at full rate (8192 rows by 8192 classes in 16 bits)."""


def part_of(hidden: Tensor, length: int, other: int, chunk_bytes: int) -> int:
    """Return how many of `length` rows (or classes) fit in a chunk if each has `other` logits."""
    itemsize = hidden.dtype.itemsize if as_on_gpu(hidden) else 4  # the reference computes in fp32
    return max(1, min(length, chunk_bytes // (max(other, 1) * itemsize)))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    logits = linear(hidden, weight, bias)
    return logits.mul_(scale) if scale != 1.0 else logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, both fp32 or both 16-bit, to the fp32 matrix `total` in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        # 16-bit factors with an fp32 sum need torch 2.10: older versions take no `out_dtype` together with `out`.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif not left.is_meta:
        total.addmm_(left.float(), right.float())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        cap: float,
        scale: float,
        chunk_bytes: int,
    ) -> Tensor:
        rows, classes = hidden.shape[0], weight.shape[0]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        normalisers = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        step = part_of(hidden, rows, classes, chunk_bytes)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            loss, normalisers[part] = losses_of(_logits(hidden[part], weight, bias, scale), labels[part], ignore_index, cap)
            total += loss.sum()
        ctx.save_for_backward(hidden, weight, bias, labels, normalisers)
        ctx.how = ignore_index, cap, scale, chunk_bytes
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalisers = ctx.saved_tensors
        ignore_index, cap, scale, chunk_bytes = ctx.how
        wanted = ctx.needs_input_grad
        rows, classes = hidden.shape[0], weight.shape[0]
        dloss = (dtotal * scale).to(torch.float32).expand(rows).contiguous()
        dhidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wanted[0] else None
        dweight = torch.empty_like(weight) if wanted[1] else None
        dbias = torch.empty_like(bias) if bias is not None and wanted[2] else None
        step = part_of(hidden, classes, rows, chunk_bytes)
        for start in range(0, classes, step):
            part = slice(start, start + step)
            logits = _logits(hidden, weight[part], None if bias is None else bias[part], scale)
            gradients_into(logits, labels, normalisers, dloss, ignore_index, cap, first=start)
            if dhidden is not None:
                _add_product(dhidden, logits, weight[part])
            if dweight is not None:
                torch.mm(logits.T, hidden, out=dweight[part])
            if dbias is not None:
                dbias[part] = logits.sum(0, dtype=torch.float32)
            del logits
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias, *(None,) * 5


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    cap: float = 0.0,
    scale: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return the sum over rows of the cross-entropy of `scale * (hidden @ weight.T + bias)`, fp32.

    Args:
        hidden: (R, H), fp32, fp16 or bf16.
        weight: (V, H), dtype of `hidden`.
        labels: (R,) int64.
        bias: (V,), dtype of `hidden`; None for none.
        ignore_index: Label of rows that do not count.
        cap: Soft cap of the logits, after the scale; 0 for none.
        scale: Factor on the logits.
        chunk_bytes: Bytes of logits in memory at once.

    Raises:
        KernelError: Shapes or dtypes do not fit together.

    Cost: four matrix products instead of three; `chunk_bytes` of logits (four times that on a CPU, whose reference computes
        in fp32), and fp32 (R, H) in backward.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
        raise KernelError(f"linear_cross_entropy: {shapes} do not fit together: (R, H) and (V, H) are needed")
    if hidden.dtype not in FLOATS or {weight.dtype, *({bias.dtype} if bias is not None else ())} != {hidden.dtype}:
        dtypes = f"hidden is {hidden.dtype}, weight {weight.dtype}"
        raise KernelError(f"linear_cross_entropy: {dtypes}; one of fp32, fp16 and bf16 for all is needed")
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        found = f"labels are {tuple(labels.shape)} of {labels.dtype}"
        raise KernelError(f"linear_cross_entropy: {found}; ({hidden.shape[0]},) of int64 is needed")
    total: Tensor = _LinearCrossEntropy.apply(
        hidden.contiguous(), weight, bias, labels.contiguous(), ignore_index, cap, scale, chunk_bytes
    )
    return total
