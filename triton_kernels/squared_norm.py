"""The sum of squares of a flat gradient and whether all of it is finite, in one reading.

    squares = sum of x_i^2          finite = no x_i is inf or nan

Each program sums a range in fp32, ranges are added in fp64, always in the same order. Whether numbers are finite is looked
at apart from the sum: squares of numbers beyond 1.8e19 are not, in fp32. Bytes moved, of elements of b bytes: b an element;
PyTorch's norm and its check in fp32 move 10b of a 16-bit gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FLOATS, KernelError, options, use_triton

BLOCK = 2048
ROUNDS = 8
"""Blocks that a program sums, so that partial sums are few."""
WARPS = 8


def squared_norm_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return squares and finite in plain PyTorch; arguments as `squared_norm`."""
    return x.double().square().sum(), torch.isfinite(x).all()


@triton.jit
def _sum(x, sums, strange, numel, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (ROUNDS * BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for turn in range(ROUNDS):
        at = start + turn * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < numel, other=0.0).to(tl.float32)
        squares += value * value
        bad |= (tl.abs(value) <= 3.4028234663852886e38).to(tl.int32) ^ 1  # a nan is not below anything
    tl.store(sums + tl.program_id(0), tl.sum(squares, 0))
    tl.store(strange + tl.program_id(0), tl.max(bad, 0))


def squared_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of x, fp64 (), and whether all of it is finite, bool (), both where x lies.

    Args:
        x: (S,), fp32, fp16 or bf16, contiguous.

    Raises:
        KernelError: if it is not.

    Cost: on a GPU one launch, two sums over partial results, no wait; elsewhere the reference.
    """
    if x.dim() != 1 or x.dtype not in FLOATS or not x.is_contiguous():
        raise KernelError(f"squared_norm: {tuple(x.shape)} of {x.dtype}; (S,) of fp32, fp16 or bf16, contiguous, is needed")
    if not use_triton(x):
        return squared_norm_reference(x)
    programs = triton.cdiv(x.numel(), BLOCK * ROUNDS)
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)
    strange = torch.empty(programs, dtype=torch.int32, device=x.device)
    if programs:
        _sum[(programs,)](x, sums, strange, x.numel(), ROUNDS=ROUNDS, BLOCK=BLOCK, **options(WARPS))
    return sums.sum(dtype=torch.float64), ~strange.any()
