"""RMSNorm.

    n = x / sqrt(mean(x^2) + eps)        (mean over the last dimension, in fp32)
    y = (offset + weight) * n

Models round at different places, which changes the last bits (`casting`):

    llama   n is rounded to the dtype of x, then multiplied by the weight in the wider dtype (Llama, Mistral, Qwen)
    gemma   everything is fp32 and rounded once, at the end, to the dtype of x (Gemma with offset 1, OLMo-2 with offset 0)
    t5      n and y are rounded to the dtype of the weight (T5, whose residual stream may be fp32)

Backward, with g = dy * (offset + weight):

    dx = (g - n * mean(g * n)) / sqrt(mean(x^2) + eps)
    dweight = sum over rows of dy * n

Cost, for a row of N elements of b bytes: 2Nb moved forward and 3Nb backward. PyTorch's chain of operations moves four times
as much.

Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import as_rows, check_fits, launch, row_block, use_triton

Casting = Literal["llama", "gemma", "t5"]
CASTINGS: tuple[Casting, ...] = ("llama", "gemma", "t5")
LLAMA, T5 = (tl.constexpr(CASTINGS.index(name)) for name in ("llama", "t5"))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: Casting = "llama") -> Tensor:
    """Return y in plain PyTorch. Arguments are those of `rms_norm`; an fp64 x is computed in fp64."""
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (normal * (weight.to(normal.dtype) + offset)).to(x.dtype)
    factor = weight + offset if offset else weight
    return factor * normal.to({"t5": weight.dtype, "llama": x.dtype}[casting])


@triton.jit
def _forward(x, weight, y, scale, columns, eps, offset, CASTING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    wide = tl.load(x + row * columns + at, inside, other=0.0).to(tl.float32)
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
def _backward(dy, x, weight, scale, dx, dweight, rows, columns, offset, CASTING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    factor = tl.load(weight + at, inside, other=0.0).to(tl.float32) + offset
    own = tl.zeros((BLOCK,), tl.float32)  # dweight, summed over this program's rows
    while row < rows:
        r = tl.load(scale + row)
        normal = tl.load(x + row * columns + at, inside, other=0.0).to(tl.float32) * r
        gradient = tl.load(dy + row * columns + at, inside, other=0.0).to(tl.float32)
        rounded = normal
        if CASTING == LLAMA:
            rounded = normal.to(x.dtype.element_ty).to(tl.float32)
        if CASTING == T5:
            rounded = normal.to(dy.dtype.element_ty).to(tl.float32)
        own += gradient * rounded
        g = gradient * factor
        out = (g - normal * (tl.sum(g * normal, 0) / columns)) * r
        tl.store(dx + row * columns + at, out.to(dx.dtype.element_ty), inside)
        row += tl.num_programs(0)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * columns + at, own, inside)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, casting: Casting) -> Tensor:
        flat = as_rows(x.contiguous())
        rows, columns = flat.shape
        dtype = {"gemma": x.dtype, "t5": weight.dtype, "llama": torch.promote_types(x.dtype, weight.dtype)}[casting]
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        block, warps = row_block(columns)
        launch(
            _forward, (rows,), flat, weight.contiguous(), y, scale, columns, eps, offset,
            warps=warps, CASTING=CASTINGS.index(casting), BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(flat, weight, scale)
        ctx.offset, ctx.casting, ctx.shape = offset, CASTINGS.index(casting), x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        rows, columns = x.shape
        dx = torch.empty_like(x)
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        programs = min(rows, 4 * processors)  # each sums dweight over its own rows
        partial = torch.zeros(programs, columns, dtype=torch.float32, device=x.device)
        block, warps = row_block(columns)
        launch(
            _backward, (programs,), dy.contiguous(), x, weight.contiguous(), scale, dx, partial, rows, columns, ctx.offset,
            warps=warps, CASTING=ctx.casting, BLOCK=block,
        )  # fmt: skip
        return dx.view(ctx.shape), partial.sum(0).to(weight.dtype), None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, casting: Casting = "llama") -> Tensor:
    """Return RMSNorm(x), of x's shape.

    Args:
        x: (..., N), fp32, fp16 or bf16.
        weight: (N,), fp32, fp16 or bf16.
        eps: Added to the mean of the squares.
        offset: Added to the weight.
        casting: Where values are rounded, one of `CASTINGS`; see the module.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit together, or a row has more than `LARGEST_ROW` elements.

    Cost: on a GPU one launch each forward and backward, and fp32 (programs, N) for the gradient of the weight.
    """
    check_fits("rms_norm", "x", x, x.shape, x.device)
    check_fits("rms_norm", "weight", weight, x.shape[-1:], x.device)
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps, offset=offset, casting=casting)
    found: Tensor = _RmsNorm.apply(x, weight, eps, offset, casting)
    return found
