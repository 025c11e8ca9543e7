"""Gated activations: SwiGLU, and GeGLU in both its forms.

    y = act(gate) * up

With the activations of activation.py: SwiGLU (Llama, Mistral, Qwen, Phi-3) has silu, GeGLU gelu or gelu_tanh (Gemma, T5
v1.1).

    dgate = dy * up * act'(gate)        dup = dy * act(gate)

All in fp32, rounded once. Shazeer, arXiv:2002.05202. The activation is made again in backward: nothing but the two inputs is
kept. Bytes moved, of elements of b bytes: forward 3b, backward 5b; PyTorch moves 5b and 11b, and keeps act(gate) as well.

`gate` and `up` may be halves of one tensor (a fused projection): rows of any stride are read as they lie.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activation import ACTIVATIONS, Activation, act, act_reference
from .launch import KernelError, as_rows, check_rows, options, use_triton

BLOCK = 2048
WARPS = 8


def gated_reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return y in plain PyTorch; arguments as `gated`."""
    return act_reference(gate, activation) * up


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
        if y.numel():
            grid = (rows, triton.cdiv(columns, BLOCK))
            strides = own_gate.stride(0), own_up.stride(0)
            _forward[grid](own_gate, own_up, y, *strides, columns, KIND=kind, BLOCK=BLOCK, **options(WARPS))
        ctx.save_for_backward(own_gate, own_up)
        ctx.kind, ctx.shape = kind, gate.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        rows, columns = gate.shape
        dgate, dup = (torch.empty(ctx.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        if dgate.numel():
            grid = (rows, triton.cdiv(columns, BLOCK))
            strides = gate.stride(0), up.stride(0)
            _backward[grid](
                dy.contiguous(), gate, up, dgate, dup, *strides, columns, KIND=ctx.kind, BLOCK=BLOCK, **options(WARPS)
            )
        return dgate, dup, None


def gated(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return act(gate) * up.

    Args:
        gate: (..., N), fp32, fp16 or bf16.
        up: of the gate's shape and dtype.
        activation: name of the activation, one of `ACTIVATIONS`; see above.

    Raises:
        KernelError: if shapes, dtypes or devices differ, or the activation is another.

    Cost: on a GPU one launch each way, and nothing kept but the inputs; elsewhere the reference.
    """
    check_rows("gated", gate, up=up)
    if up.dtype != gate.dtype:
        raise KernelError(f"gated: up is {up.dtype}, gate is {gate.dtype}")
    if activation not in ACTIVATIONS:
        raise KernelError(f"gated: activation is {activation!r}, one of {', '.join(ACTIVATIONS)} is needed")
    if not use_triton(gate):
        return gated_reference(gate, up, activation)
    return _Gated.apply(gate, up, ACTIVATIONS.index(activation))
