"""RMSNorm, with the residual addition before it.

    s = x + residual                     (where there is a residual; rounded to the dtype of x, as the models add it)
    n = s / sqrt(mean(s^2) + eps)        (mean over the last dimension, in fp32)
    y = (offset + weight) * n

What is rounded where differs between models, and with it the last bits (`casting`):

    llama   n is rounded to the dtype of x, then multiplied by the weight in the wider dtype (Llama, Mistral, Qwen)
    gemma   all in fp32, rounded once, at the end, to the dtype of x (Gemma with offset 1, OLMo-2 with offset 0)
    t5      n is rounded to the dtype of the weight, and so is y (T5, whose sums of residuals may be fp32)

Backward, with g = dy * (offset + weight):

    ds = (g - n * mean(g * n)) / sqrt(mean(s^2) + eps) + what came for s itself
    dweight = sum over rows of dy * n

Zhang and Sennrich, arXiv:1910.07467. Bytes moved, of a row of N elements of b bytes: forward 2Nb (4Nb with a residual),
backward 3Nb (4Nb). The chain of PyTorch operations moves four times that.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import KernelError, as_rows, check_rows, options, programs_of, row_block, use_triton

Casting = Literal["llama", "gemma", "t5"]
CASTINGS: tuple[Casting, ...] = ("llama", "gemma", "t5")
LLAMA, T5 = (tl.constexpr(CASTINGS.index(name)) for name in ("llama", "t5"))


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: Casting = "llama", residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y and s in plain PyTorch; arguments as `rms_norm`. An fp64 x is computed in fp64."""
    total = x if residual is None else x + residual
    wide = total if total.dtype == torch.float64 else total.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (normal * (weight.to(normal.dtype) + offset)).to(x.dtype), total
    factor = weight + offset if offset else weight
    return factor * normal.to(weight.dtype if casting == "t5" else x.dtype), total


@triton.jit
def _forward(
    x, residual, weight, y, total, scale, columns, eps, offset,
    ADD: tl.constexpr, CASTING: tl.constexpr, BLOCK: tl.constexpr,
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
    r = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(scale + row, r)
    normal = wide * r
    if CASTING == LLAMA:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    if CASTING == T5:
        normal = normal.to(y.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + at, inside, other=0.0).to(tl.float32) + offset
    tl.store(y + row * columns + at, (normal * factor).to(y.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy, dtotal, total, weight, scale, dx, dweight, rows, columns, offset,
    ADD: tl.constexpr, CASTING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factor = tl.load(weight + at, inside, other=0.0).to(tl.float32) + offset
    own = tl.zeros((BLOCK,), tl.float32)  # of dweight: the sum over this program's rows
    while row < rows:
        r = tl.load(scale + row)
        normal = tl.load(total + row * columns + at, inside, other=0.0).to(tl.float32) * r
        gradient = tl.load(dy + row * columns + at, inside, other=0.0).to(tl.float32)
        rounded = normal
        if CASTING == LLAMA:
            rounded = normal.to(total.dtype.element_ty).to(tl.float32)
        if CASTING == T5:
            rounded = normal.to(dy.dtype.element_ty).to(tl.float32)
        own += gradient * rounded
        g = gradient * factor
        out = (g - normal * (tl.sum(g * normal, 0) / columns)) * r
        if ADD:
            out += tl.load(dtotal + row * columns + at, inside, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + at, out.to(dx.dtype.element_ty), inside)
        row += tl.num_programs(0)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * columns + at, own, inside)


class _RmsNorm(torch.autograd.Function):
    """(x, weight, residual or None) -> y, or (y, s) where there is a residual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, offset: float, casting: Casting
    ) -> Tensor | tuple[Tensor, Tensor]:
        columns = x.shape[-1]
        flat = as_rows(x.contiguous())
        rows = flat.shape[0]
        dtype = {"gemma": x.dtype, "t5": weight.dtype, "llama": torch.promote_types(x.dtype, weight.dtype)}[casting]
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        total = flat if residual is None else torch.empty_like(flat)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        block, warps = row_block(columns)
        if flat.numel():
            _forward[(rows,)](
                flat, residual if residual is None else residual.contiguous(), weight.contiguous(), y, total, scale, columns,
                eps, offset, ADD=residual is not None, CASTING=CASTINGS.index(casting), BLOCK=block, **options(warps),
            )  # fmt: skip
        ctx.save_for_backward(total, weight, scale)
        ctx.offset, ctx.casting, ctx.shape = offset, CASTINGS.index(casting), x.shape
        return y if residual is None else (y, total.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        rows, columns = total.shape
        dx = torch.empty_like(total)
        programs = programs_of(rows, total.device)
        partial = torch.zeros(programs, columns, dtype=torch.float32, device=total.device)
        block, warps = row_block(columns)
        if total.numel():
            _backward[(programs,)](
                dy.contiguous(), dtotal if dtotal is None else dtotal.contiguous(), total, weight.contiguous(), scale, dx,
                partial, rows, columns, ctx.offset,
                ADD=dtotal is not None, CASTING=ctx.casting, BLOCK=block, **options(warps),
            )  # fmt: skip
        dx = dx.view(ctx.shape)
        return dx, partial.sum(0).to(weight.dtype), dx if ctx.needs_input_grad[2] else None, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: Casting = "llama", residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = RMSNorm(x + residual), and the sum s itself (x where there is no residual).

    Args:
        x: (..., N), fp32, fp16 or bf16.
        weight: (N,), fp32, fp16 or bf16.
        eps: added to the mean of the squares.
        offset: added to the weight.
        casting: what is rounded where, one of `CASTINGS`; see above.
        residual: of x's shape and dtype; None adds none.

    Raises:
        KernelError: if shapes, dtypes or devices do not fit together, or a row is too long.

    Cost: on a GPU one launch each way and, for the weight's gradient, fp32 (programs, N); elsewhere the reference.
    """
    check_rows("rms_norm", x, weight=weight, residual=residual)
    if casting not in CASTINGS:
        raise KernelError(f"rms_norm: casting is {casting!r}, one of {', '.join(CASTINGS)} is needed")
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps, offset=offset, casting=casting, residual=residual)
    found = _RmsNorm.apply(x, weight, residual, eps, offset, casting)
    return (found, x) if residual is None else found
