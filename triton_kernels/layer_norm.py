"""LayerNorm, with the residual addition before it.

    s = x + residual                     (where there is a residual; rounded to the dtype of x, as the models add it)
    n = (s - mean(s)) / sqrt(var(s) + eps)               (over the last dimension, in fp32; the variance divides by N)
    y = n * weight + bias                                (in fp32, rounded once)

Backward, with g = dy * weight and r = 1 / sqrt(var(s) + eps):

    ds = (g - mean(g) - n * mean(g * n)) * r + what came for s itself
    dweight = sum over rows of dy * n,    dbias = sum over rows of dy

Ba, Kiros and Hinton, arXiv:1607.06450. Mean and variance are taken of the row in registers, one after the other: the square
of the mean is never subtracted. Bytes moved, of a row of N elements of b bytes: forward 2Nb (4Nb with a residual), backward
3Nb (4Nb); PyTorch's own moves as many, and 3Nb more each way for the residual.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import as_rows, check_rows, options, programs_of, row_block, use_triton


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y and s in plain PyTorch; arguments as `layer_norm`. An fp64 x is computed in fp64."""
    total = x if residual is None else x + residual
    return torch.nn.functional.layer_norm(total, x.shape[-1:], weight, bias, eps), total


@triton.jit
def _forward(
    x, residual, weight, bias, y, total, mean, scale, columns, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, inside, other=0.0)
    if ADD:
        other = tl.load(residual + row * columns + at, inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * columns + at, value, inside)
    wide = value.to(tl.float32)
    middle = tl.sum(wide, 0) / columns
    apart = tl.where(inside, wide - middle, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(apart * apart, 0) / columns + eps)
    tl.store(mean + row, middle)
    tl.store(scale + row, r)
    out = apart * r * tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias + at, inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + at, out.to(y.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy, dtotal, total, weight, mean, scale, dx, dweight, dbias, rows, columns,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factor = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)  # sums over this program's rows
    of_bias = tl.zeros((BLOCK,), tl.float32)
    while row < rows:
        r = tl.load(scale + row)
        value = tl.load(total + row * columns + at, inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (value - tl.load(mean + row)) * r, 0.0)
        gradient = tl.load(dy + row * columns + at, inside, other=0.0).to(tl.float32)
        of_weight += gradient * normal
        if BIAS:
            of_bias += gradient
        g = gradient * factor
        out = (g - tl.sum(g, 0) / columns - normal * (tl.sum(g * normal, 0) / columns)) * r
        if ADD:
            out += tl.load(dtotal + row * columns + at, inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + at, out.to(dx.dtype.element_ty), inside)
        row += tl.num_programs(0)
    place = tl.program_id(0).to(tl.int64) * columns + at
    tl.store(dweight + place, of_weight, inside)
    if BIAS:
        tl.store(dbias + place, of_bias, inside)


class _LayerNorm(torch.autograd.Function):
    """(x, weight, bias or None, residual or None) -> y, or (y, s) where there is a residual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        flat = as_rows(x.contiguous())
        rows, columns = flat.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = flat if residual is None else torch.empty_like(flat)
        mean, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        block, warps = row_block(columns)
        if flat.numel():
            _forward[(rows,)](
                flat, residual if residual is None else residual.contiguous(), weight.contiguous(),
                bias if bias is None else bias.contiguous(), y, total, mean, scale, columns, eps,
                ADD=residual is not None, BIAS=bias is not None, BLOCK=block, **options(warps),
            )  # fmt: skip
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        return y if residual is None else (y, total.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale = ctx.saved_tensors
        rows, columns = total.shape
        dx = torch.empty_like(total)
        programs = programs_of(rows, total.device)
        has_bias = ctx.bias_dtype is not None
        sums = torch.zeros(1 + has_bias, programs, columns, dtype=torch.float32, device=total.device)
        block, warps = row_block(columns)
        if total.numel():
            _backward[(programs,)](
                dy.contiguous(), dtotal if dtotal is None else dtotal.contiguous(), total, weight.contiguous(), mean, scale,
                dx, sums[0], sums[1] if has_bias else None, rows, columns,
                ADD=dtotal is not None, BIAS=has_bias, BLOCK=block, **options(warps),
            )  # fmt: skip
        dx = dx.view(ctx.shape)
        dweight, *dbias = sums.sum(1)
        own_bias = dbias[0].to(ctx.bias_dtype) if has_bias else None
        return dx, dweight.to(weight.dtype), own_bias, dx if ctx.needs_input_grad[3] else None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = LayerNorm(x + residual), and the sum s itself (x where there is no residual).

    Args:
        x: (..., N), fp32, fp16 or bf16.
        weight: (N,), of x's dtype.
        bias: (N,), of x's dtype; None adds none.
        eps: added to the variance.
        residual: of x's shape and dtype; None adds none.

    Raises:
        KernelError: if shapes, dtypes or devices do not fit together, or a row is too long.

    Cost: on a GPU one launch each way and, for the gradients of weight and bias, fp32 (2, programs, N); elsewhere the
        reference.
    """
    check_rows("layer_norm", x, weight=weight, bias=bias, residual=residual)
    if not use_triton(x):
        return layer_norm_reference(x, weight, bias, eps, residual=residual)
    found = _LayerNorm.apply(x, weight, bias, residual, eps)
    return (found, x) if residual is None else found
