"""Rotary position embedding: the first R elements of each head are rotated in pairs, the others are copied.

    (x1, x2) = the two halves of x[..., :R],   (c1, c2), (s1, s2) = the halves of cos, sin

    y1 = x1 c1 - x2 s1          y2 = x2 c2 + x1 s2          y[..., R:] = x[..., R:]

This is the layout of Llama, Mistral, Qwen and Gemma (R is the whole head) and of GPT-NeoX, Phi-3 and StableLM (partial
rotary). Backward is the transposed map: dx1 = dy1 c1 + dy2 s2, dx2 = dy2 c2 - dy1 s1. Everything is fp32 and rounded once.

Heads (B, H, T, D) are read in the layout of the projections: any strides but the last, which is 1. Results have the memory
layout (B, T, H, D).

Cost, for an element of b bytes: 2b moved forward and 2b backward. PyTorch's slices, negation, concatenation, products and
sum move 11b.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import KernelError, check_fits, launch, use_triton

ELEMENTS = 1024
"""Pairs that a program of 4 warps rotates at once: some heads of one token."""


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, in plain PyTorch. Arguments are those of `rotary`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated_reference(q, cos, sin), _rotated_reference(k, cos, sin)


def _rotated_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    own, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = own.chunk(2, -1)
    rotated = own * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated.to(x.dtype), rest), -1)


@triton.jit
def _rotate(
    x, cos, sin, y, heads, tokens, half, rest,
    x_batch, x_head, x_token, y_batch, y_head, y_token, angle_batch, angle_token,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    angle = batch * angle_batch + token * angle_token + pair
    c1 = tl.load(cos + angle, pair < half, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, pair < half, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + half, pair < half, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + half, pair < half, other=0.0).to(tl.float32)
    source = x + batch * x_batch + token * x_token + head * x_head
    target = y + batch * y_batch + token * y_token + head * y_head
    x1 = tl.load(source + pair, inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + half + pair, inside, other=0.0).to(tl.float32)
    if BACK:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    tl.store(target + pair, y1.to(y.dtype.element_ty), inside)
    tl.store(target + half + pair, y2.to(y.dtype.element_ty), inside)
    if REST:
        other = tl.arange(0, REST)[None, :]
        present = (head < heads) & (other < rest)
        tl.store(target + 2 * half + other, tl.load(source + 2 * half + other, present, other=0.0), present)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Return x (B, H, T, D) rotated, or rotated back by the transposed map."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, width = x.shape
    y = torch.empty(batch, tokens, heads, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    half = cos.shape[-1] // 2
    rest = width - 2 * half
    columns = triton.next_power_of_2(max(half, 1))
    together = max(1, min(ELEMENTS // columns, triton.next_power_of_2(max(heads, 1))))
    launch(
        _rotate, (batch * tokens, triton.cdiv(heads, together)),
        x, cos, sin, y, heads, tokens, half, rest, *x.stride()[:3], *y.stride()[:3],
        cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
        warps=4, BACK=back, HEADS=together, HALF=columns, REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(q, cos, sin, back=False), _rotated(k, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dq, cos, sin, back=True), _rotated(dk, cos, sin, back=True), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k rotated by the angles of their positions, each in its own dtype.

    Args:
        q: (B, H, T, D), fp32, fp16 or bf16.
        k: (B, G, T, D), fp32, fp16 or bf16.
        cos: (B, T, R) or (1, T, R), R even and at most D. It gets no gradient.
        sin: Shape of `cos`. It gets no gradient.

    Raises:
        KernelError: Shapes, dtypes or devices do not fit together.

    Cost: on a GPU one launch for each of q and k, forward and backward.
    """
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise KernelError(f"rotary: q {tuple(q.shape)} and k {tuple(k.shape)} do not fit together: (B, H, T, D) is needed")
    batch, _, tokens, width = q.shape
    fits = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    if not fits or cos.shape[2] % 2 or cos.shape[2] > width:
        needed = f"({batch} or 1, {tokens}, R) is needed, R even and at most {width}"
        raise KernelError(f"rotary: cos {tuple(cos.shape)} does not fit q {tuple(q.shape)}: {needed}")
    for name, tensor, shape in (("q", q, q.shape), ("k", k, k.shape), ("cos", cos, cos.shape), ("sin", sin, cos.shape)):
        check_fits("rotary", name, tensor, shape, q.device)
    if not use_triton(q):
        return rotary_reference(q, k, cos, sin)
    found: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())
    return found
