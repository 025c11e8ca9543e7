"""Arithmetic of 8-bit moments and of the split master weight, in plain PyTorch.

The loops of the host (`ftkit/engine/kernels/numba_coded.py`) and the kernels (`triton_kernels/adamw_8bit.py`) give the same
bits. They compute with the bits of fp32 numbers; this file uses a table and float64, so that each checks the other.

[Note: the 8-bit code]

    A group is 128 values x. Its scale is max |x|, and a code stands for a value in [0, 1] times the scale. Values are finest
    near 1: of 256 steps, numbered n = 2..256, half cover the 4 octaves below 1, a quarter the next 4 octaves, and so on.

        n           | 2..3           | 4..7           | ... | 128..255   | 256
        value       | [2^-28, 2^-24) | [2^-24, 2^-20) | ... | [2^-4, 1)  | 1
        code        | n - 1, and code 0 is 0

    A signed code has a sign in bit 7, and n = 2..128 with values in [2^-24, 1]. `_at` gives the value at n, between integers
    too. x is rounded to the nearest n, halves up. From n = 4 up that gives the nearest value. The values of 2, 3 and 4 are
    two octaves apart, and x is rounded in the logarithm: to 0 if it is below 2^-30 of the scale (signed: 2^-26).

    Groups whose scale is below 2^-98 become 0. So all decoded values are normal fp32 numbers, and encoding decoded values
    gives the same codes and the same scale.

    Source: dynamic quantization with another set of values: Dettmers, arXiv:1511.04561; groups: Dettmers et al.,
    arXiv:2110.02861.

[Note: the split master weight]

    An fp32 master weight is stored as the 16-bit weight w of the forward pass and an int16 residual r. With u, the distance
    of 16-bit numbers at w, the master is

        |p| = |w| + r * u / 2^16          with the sign of w

    w is |p| rounded, halves up: r * u / 2^16 is in [-u/2, u/2). If w is a power of two and p is below it, u is the distance
    below w for bf16, and the distance above w for fp16. Before that, fp16 rounds |p| to a multiple of 2^-40.
    bf16 is exact. fp16 is exact for |p| >= 2^-17 = 7.6e-6, else the error is at most 2^-41 = 4.5e-13.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ftkit.spec.state_forms import GROUP_NUMEL

SMALLEST_SCALE = 2.0**-98
"""Groups with a smaller scale become 0."""


def _at(n: float, last: int) -> float:
    """Return the value at n in [1, last]; see [Note: the 8-bit code]."""
    part = math.floor(math.log2(n))  # 4 octaves with 2^part steps
    octaves = 4 * (n / 2**part - 1)
    octave = math.floor(octaves)
    return float(16.0 ** (part - math.log2(last)) * 2**octave * (1 + octaves - octave))


@cache
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of all codes without a sign, and the limits between them, both fp32."""
    last = 128 if signed else 256
    values = torch.tensor([0.0, *(_at(n, last) for n in range(2, last + 1))], device=device)
    return values, torch.tensor([_at(n + 0.5, last) for n in range(1, last)], device=device)


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes (n,), uint8, and scales (n/128,), fp32, of `values` (n,), fp32, not negative if not `signed`."""
    groups = values.view(-1, GROUP_NUMEL)
    scales = groups.abs().amax(1)
    scales = torch.where(scales < SMALLEST_SCALE, 0, scales)
    inverses = torch.where(scales == 0, 0, 1 / scales)
    _, limits = _table(signed, values.device)
    codes = torch.bucketize(groups.abs() * inverses[:, None], limits, right=True)
    if signed:
        codes += 128 * ((codes > 0) & (groups < 0))
    return codes.view(-1).to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the values (n,), fp32, of codes (n,) and scales (n/128,)."""
    table, _ = _table(signed, codes.device)
    if signed:
        table = torch.cat([table, -table])
    return (table[codes.long()].view(-1, GROUP_NUMEL) * scales[:, None]).view(-1)


def split(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Write `master` (n,), fp32, as `weight` (n,), bf16 or fp16, and `residual` (n,), int16.

    A master that is not finite, or whose weight is not, gives an infinite or NaN weight and any residual.
    """
    if weight.dtype == torch.bfloat16:
        size = master.abs().view(torch.int32).long()
        rounded = torch.where(master.isnan(), 0x7FC0, (size + 0x8000) >> 16)
        left = size - (rounded << 16)
        magnitude = rounded.to(torch.int16).view(torch.bfloat16)
    else:
        size = master.abs().double()
        exponent = _exponent(size)
        steps = torch.round(torch.ldexp(size, 26 - exponent)).where(size.isfinite(), 0).long()
        rounded = (steps + 0x8000) >> 16
        left = steps - (rounded << 16)
        left = torch.where(rounded == 2048, left // 2, left)  # the distance of 16-bit numbers doubles there
        magnitude = torch.ldexp(rounded.double(), exponent - 10).where(size.isfinite(), size).half()
    weight.copy_(torch.copysign(magnitude, master))
    residual.copy_(left)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the master weight (n,), fp32, of `weight` (n,), bf16 or fp16, and `residual` (n,), int16."""
    if weight.dtype == torch.bfloat16:
        bits = (weight.abs().view(torch.int16).int() << 16) + residual
        return torch.copysign(bits.view(torch.float32), weight.float())
    size = weight.double().abs()
    return torch.copysign(size + torch.ldexp(residual.double(), _exponent(size) - 26), weight.double()).float()


def _exponent(size: Tensor) -> Tensor:
    """Return the exponent of fp16 numbers of a size, that of subnormals for smaller ones."""
    return torch.frexp(size.clamp(min=2.0**-14)).exponent - 1


def adamw_8bit(
    master: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    m_scales: Tensor,
    s: Tensor,
    s_scales: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    *,
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Make one step of AdamW with 8-bit moments in place, and write the new weight.

    Each operation is fp32 and rounded once, without fused multiply-adds.

    Args:
        master: Master weight (n,), fp32, updated. None with `residual`: then it is `join(weight, residual)`.
        gradient: Gradient (n,), fp32, fp16 or bf16.
        m: Codes of the first moment (n,), uint8, with sign, updated. n is a multiple of 128.
        m_scales: Its scales (n/128,), fp32, updated.
        s: Codes of the root of the second moment (n,), uint8, without sign, updated.
        s_scales: Its scales (n/128,), fp32, updated.
        weight: Receives the master rounded to nearest even, shape (n,), or None. With `residual` it is updated.
        residual: Residual of the master weight (n,), int16, updated, or None.
        factor: Multiplies the gradient in fp32: clip over loss scale.
        lr: Learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by `lr`.
        step: Number of the step, 1 at the first.

    Source: Loshchilov and Hutter, arXiv:1711.05101; Dettmers et al., arXiv:2110.02861.
    """
    p = _read(master, weight, residual)
    g = gradient.float() * factor
    first = decode(m, m_scales, signed=True) * beta1 + g * (1 - beta1)
    second = decode(s, s_scales, signed=False)
    second = (second * second) * beta2 + (g * g) * (1 - beta2)
    size = second.double().sqrt().float()  # rounded once; sqrt in fp32 is not on all CPUs
    root = size.new_full((), math.sqrt(1 - beta2**step))  # a GPU multiplies by the inverse of a number of Python
    p = p * (1 - lr * weight_decay) - (first * (lr / (1 - beta1**step))) / (size / root + eps)
    _store(encode(first, signed=True), (m, m_scales))
    _store(encode(size, signed=False), (s, s_scales))
    _write(p, master, weight, residual)


def lion_8bit(
    master: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    m_scales: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    *,
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Make one step of Lion with an 8-bit moment in place, and write the new weight. Arguments as in `adamw_8bit`.

    Source: Chen et al., arXiv:2302.06675.
    """
    p = _read(master, weight, residual)
    g = gradient.float() * factor
    before = decode(m, m_scales, signed=True)
    direction = before * beta1 + g * (1 - beta1)
    p = p * (1 - lr * weight_decay) - torch.sign(direction) * lr
    _store(encode(before * beta2 + g * (1 - beta2), signed=True), (m, m_scales))
    _write(p, master, weight, residual)


def _read(master: Tensor | None, weight: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is None:
        assert master is not None
        return master
    assert weight is not None
    return join(weight, residual)


def _write(p: Tensor, master: Tensor | None, weight: Tensor | None, residual: Tensor | None) -> None:
    if residual is not None:
        assert weight is not None
        split(p, weight, residual)
        return
    assert master is not None
    master.copy_(p)
    if weight is not None:
        weight.copy_(p)


def _store(found: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
    for value, target in zip(found, into):
        target.copy_(value)
