"""Activations, with the bias addition before them, and what the gated ones share with them.

    y = act(x + bias)

    silu        act(z) = z * sigmoid(z)
    gelu        act(z) = z * (1 + erf(z / sqrt(2))) / 2
    gelu_tanh   act(z) = z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))) / 2
    gelu_quick  act(z) = z * sigmoid(1.702 z)
    relu        act(z) = max(z, 0)

    dx = dy * act'(x + bias)        dbias = sum over rows of dx

All in fp32, rounded once. Hendrycks and Gimpel, arXiv:1606.08415. z is made again in backward: nothing but the input is
kept. Bytes moved, of elements of b bytes: 2b forward, 3b backward; the tanh form, written out as models have it, moves 16b
and 30b, and keeps seven tensors.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .launch import KernelError, as_rows, check_rows, options, programs_of, use_triton

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu")

BLOCK = 2048
WARPS = 8


def act_reference(x: Tensor, activation: Activation) -> Tensor:
    """Return act(x) in plain PyTorch."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "relu":
        return functional.relu(x)
    if activation == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def activation_reference(x: Tensor, activation: Activation = "gelu", bias: Tensor | None = None) -> Tensor:
    """Return y in plain PyTorch; arguments as `activation`."""
    return act_reference(x if bias is None else x + bias, activation)


@triton.jit
def act(g, KIND: tl.constexpr):
    """Return the activation of g and its slope there, in fp32; KIND is a place in `ACTIVATIONS`."""
    if KIND == 0:
        s = tl.sigmoid(g)
        return g * s, s * (1.0 + g * tl.sigmoid(-g))  # 1 - s, without the cancellation
    if KIND == 1:
        half = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        return g * half, half + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    if KIND == 2:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        half = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        slope = 2.0 * half * tl.sigmoid(-2.0 * inner)  # 2 half (1 - half)
        return g * half, half + g * slope * 0.7978845608028654 * (1.0 + 0.134145 * g * g)
    if KIND == 3:
        s = tl.sigmoid(1.702 * g)
        return g * s, s * (1.0 + 1.702 * g * tl.sigmoid(-1.702 * g))
    return tl.where(g <= 0.0, 0.0, g), tl.where(g > 0.0, 1.0, 0.0)  # what is no number stays none


@triton.jit
def _forward(x, bias, y, stride, columns, KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    z = tl.load(x + row * stride + at, inside, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + at, inside, other=0.0).to(tl.float32)
    value, _ = act(z, KIND)
    tl.store(y + row * columns + at, value.to(y.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy, x, bias, dx, dbias, stride, rows, columns,
    KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    if BIAS:
        own = tl.load(bias + at, inside, other=0.0).to(tl.float32)
        of_bias = tl.zeros((BLOCK,), tl.float32)  # the sum over this program's rows
    while row < rows:
        z = tl.load(x + row * stride + at, inside, other=0.0).to(tl.float32)
        if BIAS:
            z += own
        _, slope = act(z, KIND)
        out = tl.load(dy + row * columns + at, inside, other=0.0).to(tl.float32) * slope
        if BIAS:
            of_bias += out
        tl.store(dx + row * columns + at, out.to(dx.dtype.element_ty), inside)
        row += tl.num_programs(0)
    if BIAS:
        tl.store(dbias + tl.program_id(0).to(tl.int64) * columns + at, of_bias, inside)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat = as_rows(x)
        own_bias = bias if bias is None else bias.contiguous()
        rows, columns = flat.shape
        if y.numel():
            _forward[(rows, triton.cdiv(columns, BLOCK))](
                flat, own_bias, y, flat.stride(0), columns, KIND=kind, BIAS=bias is not None, BLOCK=BLOCK, **options(WARPS)
            )
        ctx.save_for_backward(flat, own_bias)
        ctx.kind, ctx.shape = kind, x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        rows, columns = x.shape
        dx = torch.empty(ctx.shape, dtype=x.dtype, device=x.device)
        programs = rows if bias is None else programs_of(rows, x.device)
        sums = None if bias is None else torch.zeros(programs, columns, dtype=torch.float32, device=x.device)
        if dx.numel():
            _backward[(programs, triton.cdiv(columns, BLOCK))](
                dy.contiguous(), x, bias, dx, sums, x.stride(0), rows, columns,
                KIND=ctx.kind, BIAS=bias is not None, BLOCK=BLOCK, **options(WARPS),
            )  # fmt: skip
        return dx, None if sums is None else sums.sum(0).to(bias.dtype), None


def activation(x: Tensor, activation: Activation = "gelu", bias: Tensor | None = None) -> Tensor:
    """Return act(x + bias).

    Args:
        x: (..., N), fp32, fp16 or bf16.
        activation: name of the activation, one of `ACTIVATIONS`; see above.
        bias: (N,), of x's dtype.

    Raises:
        KernelError: if shapes, dtypes or devices do not fit together, or the activation is another.

    Cost: on a GPU one launch each way, and nothing kept but the input; elsewhere the reference.
    """
    check_rows("activation", x, bias=bias)
    if activation not in ACTIVATIONS:
        raise KernelError(f"activation: activation is {activation!r}, one of {', '.join(ACTIVATIONS)} is needed")
    if bias is not None and bias.dtype != x.dtype:
        raise KernelError(f"activation: bias is {bias.dtype}, x is {x.dtype}")
    if not use_triton(x):
        return activation_reference(x, activation, bias)
    return _Activation.apply(x, bias, ACTIVATIONS.index(activation))
