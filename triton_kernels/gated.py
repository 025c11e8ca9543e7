"""Gated activations: SwiGLU, GeGLU and their relatives.

    y = act(gate) * up

    silu        act(z) = z * sigmoid(z)                                               (SwiGLU: Llama, Mistral, Qwen, Phi-3)
    gelu        act(z) = z * (1 + erf(z / sqrt(2))) / 2                               (GeGLU)
    gelu_tanh   act(z) = z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))) / 2        (GeGLU of Gemma, T5 v1.1)

    dgate = dy * up * act'(gate)        dup = dy * act(gate)

Everything is fp32 and rounded once. Backward computes the activation again, so only the two inputs are saved. `gate` and
`up` may be halves of one tensor (a fused projection): rows may have any stride.

Cost, for an element of b bytes: 3b moved forward and 5b backward. PyTorch moves 5b and 11b, and saves act(gate) too.

Source: Shazeer, arXiv:2002.05202.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .launch import KernelError, as_rows, check_fits, launch, use_triton

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")

BLOCK = 2048
WARPS = 8


def gated_reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return y in plain PyTorch. Arguments are those of `gated`."""
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


@triton.jit
def act(g, KIND: tl.constexpr):
    """Return the activation of g and its derivative there, in fp32. KIND is an index of `ACTIVATIONS`."""
    if KIND == 0:
        s = tl.sigmoid(g)
        return g * s, s * (1.0 + g * tl.sigmoid(-g))  # sigmoid(-g) is 1 - s without cancellation
    if KIND == 1:
        half = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        return g * half, half + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    half = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
    slope = 2.0 * half * tl.sigmoid(-2.0 * inner)  # 2 half (1 - half)
    return g * half, half + g * slope * 0.7978845608028654 * (1.0 + 0.134145 * g * g)


@triton.jit
def _forward(gate, up, y, gate_stride, up_stride, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    g = tl.load(gate + row * gate_stride + at, inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, inside, other=0.0).to(tl.float32)
    value, _ = act(g, KIND)
    tl.store(y + row * columns + at, (value * u).to(y.dtype.element_ty), inside)


@triton.jit
def _backward(dy, gate, up, dgate, dup, gate_stride, up_stride, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    g = tl.load(gate + row * gate_stride + at, inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row * columns + at, inside, other=0.0).to(tl.float32)
    value, slope = act(g, KIND)
    tl.store(dgate + row * columns + at, (gradient * u * slope).to(dgate.dtype.element_ty), inside)
    tl.store(dup + row * columns + at, (gradient * value).to(dup.dtype.element_ty), inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        own_gate, own_up = as_rows(gate), as_rows(up)
        rows, columns = own_gate.shape
        grid, strides = (rows, triton.cdiv(columns, BLOCK)), (own_gate.stride(0), own_up.stride(0))
        launch(_forward, grid, own_gate, own_up, y, *strides, columns, warps=WARPS, KIND=kind, BLOCK=BLOCK)
        ctx.save_for_backward(own_gate, own_up)
        ctx.kind, ctx.shape = kind, gate.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        rows, columns = gate.shape
        dgate, dup = (torch.empty(ctx.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        grid, strides = (rows, triton.cdiv(columns, BLOCK)), (gate.stride(0), up.stride(0))
        launch(
            _backward, grid, dy.contiguous(), gate, up, dgate, dup, *strides, columns,
            warps=WARPS, KIND=ctx.kind, BLOCK=BLOCK,
        )  # fmt: skip
        return dgate, dup, None


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return act(gate) * up.

    Args:
        gate: (..., N), fp32, fp16 or bf16.
        up: Shape and dtype of `gate`.
        activation: Name of the activation, one of `ACTIVATIONS`; see the module.

    Raises:
        KernelError: Shapes, dtypes or devices differ.
        ValueError: The activation is unknown.

    Cost: on a GPU one launch each forward and backward. Only the inputs are saved.
    """
    check_fits("gated", "gate", gate, gate.shape, gate.device)
    check_fits("gated", "up", up, gate.shape, gate.device)
    if up.dtype != gate.dtype:
        raise KernelError(f"gated: up is {up.dtype}, gate is {gate.dtype}; one dtype for both is needed")
    kind = ACTIVATIONS.index(activation)
    if not use_triton(gate):
        return gated_reference(gate, up, activation)
    found: Tensor = _Gated.apply(gate, up, kind)
    return found
