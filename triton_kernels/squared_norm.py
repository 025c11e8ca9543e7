"""Sum of squares of a flat gradient, and whether all of it is finite, in one pass.

    squares = sum of x_i^2          finite = no x_i is inf or NaN

Each program sums a range in fp32. The ranges are added in fp64, always in the same order. The finite check does not use the
sum: in fp32 the square of a number beyond 1.8e19 is not finite.

Cost: b bytes moved for an element of b bytes. PyTorch's norm and check in fp32 move 10b for a 16-bit gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import KernelError, check_fits, launch, use_triton

BLOCK = 2048
ROUNDS = 8
"""Blocks that a program sums, which keeps the partial sums few."""
WARPS = 8


def squared_norm_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return squares and finite in plain PyTorch. Arguments are those of `squared_norm`."""
    return x.double().square().sum(), torch.isfinite(x).all()


@triton.jit
def _sum(x, sums, strange, numel, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (ROUNDS * BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for number in range(ROUNDS):
        at = start + number * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < numel, other=0.0).to(tl.float32)
        squares += value * value
        bad |= (tl.abs(value) <= 3.4028234663852886e38).to(tl.int32) ^ 1  # NaN compares false
    tl.store(sums + tl.program_id(0), tl.sum(squares, 0))
    tl.store(strange + tl.program_id(0), tl.max(bad, 0))


def squared_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of squares, fp64 (), and whether all values are finite, bool (), on the device of x.

    Args:
        x: (S,), fp32, fp16 or bf16, contiguous.

    Raises:
        KernelError: x has another shape, dtype or stride.

    Cost: on a GPU one launch and two sums over partial results, without a wait for the device.
    """
    check_fits("squared_norm", "x", x, (x.numel(),), x.device)
    if not x.is_contiguous():
        raise KernelError(f"squared_norm: x has stride {x.stride(0)}; contiguous is needed")
    if not use_triton(x):
        return squared_norm_reference(x)
    programs = triton.cdiv(x.numel(), BLOCK * ROUNDS)
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)
    strange = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(_sum, (programs,), x, sums, strange, x.numel(), warps=WARPS, ROUNDS=ROUNDS, BLOCK=BLOCK)
    return sums.sum(dtype=torch.float64), ~strange.any()
