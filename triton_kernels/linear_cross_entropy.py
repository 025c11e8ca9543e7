"""The head and its loss together: cross-entropy of a linear layer's outputs, of which only a few rows exist at a time.

    x = hidden @ weight.T + bias,    loss = sum over rows of cross_entropy(x)      (cross_entropy.py)

Rows are taken in chunks. For each, the logits are made by a matrix product, become their gradient in place, and go at once
into the gradients of hidden, weight and bias: forward and backward of the head are one walk, with three matrix products, as
many as the plain path has. So the (R, V) logits never exist, only `CHUNK_BYTES` of them (Hsu et al., arXiv:2410.10989).

The gradients are those of the sum; backward multiplies them by what came for it, a single number. That of a 16-bit weight is
the sum in fp32 of 16-bit matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cross_entropy import cross_entropy_reference, gradients_into, losses_of
from .launch import FLOATS, KernelError

CHUNK_BYTES = 128 << 20
"""Of logits that exist at once: enough rows for matrix products at full rate (1024 at a vocabulary of 64K in 16 bits)."""


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    cap: float = 0.0,
    z_weight: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Return the sum of the losses in plain PyTorch, with all logits; arguments as `linear_cross_entropy`."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    settings = {"ignore_index": ignore_index, "smoothing": smoothing, "cap": cap, "z_weight": z_weight}
    return cross_entropy_reference(logits, labels, **settings).sum()  # type: ignore[arg-type]  # two kinds of numbers


def rows_of(columns: int, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many rows of so many logits exist at once."""
    return max(1, chunk_bytes // (columns * dtype.itemsize))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows: int,
        scale: float,
        how: tuple[Any, ...],
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        dhidden = torch.empty_like(hidden) if wanted[0] else None
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted[1] else None
        dbias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if wanted[2] else None
        for start in range(0, hidden.shape[0], rows):
            own, label = hidden[start : start + rows], labels[start : start + rows]
            logits = torch.nn.functional.linear(own, weight, bias)
            if scale != 1.0:
                logits.mul_(scale)
            loss, normalisers = losses_of(logits, label, *how)
            total += loss.sum()
            if not any(wanted):
                continue
            gradients_into(logits, label, normalisers, torch.full_like(loss, scale), *how)
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[start : start + rows])
            if dweight is not None:
                dweight += logits.T @ own
            if dbias is not None:
                dbias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(dhidden, dweight, dbias)
        ctx.dtypes = weight.dtype, weight.dtype if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if dhidden is None else dhidden * dloss.to(dhidden.dtype),
            None if dweight is None else (dweight * dloss).to(weight_dtype),
            None if dbias is None else (dbias * dloss).to(bias_dtype),
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    cap: float = 0.0,
    z_weight: float = 0.0,
    scale: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return the sum over rows of the cross-entropy of `scale * (hidden @ weight.T + bias)`, fp32.

    Args:
        hidden: (R, H). weight: (V, H). bias: (V,). All of one dtype: fp32, fp16 or bf16. labels: (R,) int64.
        ignore_index, smoothing, cap, z_weight: as of `cross_entropy`. scale: of the logits, as some models have it.
        chunk_bytes: of logits that exist at once.

    Raises:
        KernelError: if shapes, dtypes or devices do not fit together.

    Cost: three matrix products, as without it; `chunk_bytes` (on a CPU four times that: its losses are made in fp32), and an
    fp32 copy of the weight's gradient.
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
    how = (ignore_index, smoothing, cap, z_weight)
    rows = rows_of(weight.shape[0], hidden.dtype, chunk_bytes)
    return _LinearCrossEntropy.apply(hidden.contiguous(), weight, bias, labels.contiguous(), rows, scale, how)
