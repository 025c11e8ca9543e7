"""AdamW and Lion over a shard with 8-bit moments, and with an fp32 or a split master weight, in one pass.

A group of 128 elements has one fp32 scale for each moment, and a byte for each element and moment. `adamw_8bit_` computes

    g = gradient * factor
    m = beta1 * m + (1 - beta1) * g
    s = sqrt(beta2 * s^2 + (1 - beta2) * g^2)
    p = p * (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (s / sqrt(1 - beta2^t) + eps)

and stores m and s as codes. A split master weight p is a 16-bit weight and a 16-bit residual. The notes in
`ftkit/engine/optim/coding.py` define both, and its functions are the reference. Everything is fp32, rounded once, with no
fused multiply-add: the kernels give the bits of the reference.

Cost: 16.1 bytes moved per element with a 16-bit gradient and weight, 14.1 with a split master weight.

Source: Loshchilov and Hutter, arXiv:1711.05101; Chen et al., arXiv:2302.06675; Dettmers et al., arXiv:2110.02861.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from .launch import KernelError, launch

GROUP = 128
"""Elements that share a scale."""
GROUPS = 8
"""Groups of a program."""
WARPS = 4

# Bits of fp32 numbers, as int32. See [Note: codes without a table] in ftkit/engine/kernels/numba_coded.py.
_SIGN, _SIZE = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)
_NAN = tl.constexpr(0x7FC00000)
_DECODE, _ENCODE = tl.constexpr(830472192), tl.constexpr(866123776)  # signed: 2^25 more, 2^23 less
_FP16_LEAST = tl.constexpr(113 << 23)  # 2^-14, the smallest normal number


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _decoded(code, scale, SIGNED: tl.constexpr):
    code = code.to(tl.int32)
    if SIGNED:
        bits = (_bits(((code & 0x7F) + 1).to(tl.float32)) << 2) + (_DECODE + (1 << 25))
        bits |= (code & 0x80) << 24
    else:
        bits = (_bits((code + 1).to(tl.float32)) << 2) + _DECODE
    return _float(tl.where(code == 0, 0, bits)) * scale


@triton.jit
def _store_encoded(x, codes, scales, at, row, here, SIGNED: tl.constexpr):
    size = _bits(x) & _SIZE
    scale = _float(tl.max(size, 1))  # NaN is the largest
    small = scale < 2.0**-98
    inverse = tl.where(small, 0.0, tl.div_rn(1.0, tl.where(small, 1.0, scale)))
    ratio = _bits(_float(size) * inverse[:, None]) >> 2
    if SIGNED:
        place = (_float(ratio + (_ENCODE - (1 << 23))) - 0.5).to(tl.int32)
        place = tl.where(place == 0, 0, place | ((_bits(x) >> 24) & 0x80))
    else:
        place = (_float(ratio + _ENCODE) - 0.5).to(tl.int32)
    tl.store(codes + at, place.to(tl.uint8), here[:, None])
    tl.store(scales + row, tl.where(small, 0.0, scale), here)


@triton.jit
def _power(size):
    return tl.maximum(size, _FP16_LEAST) & 0x7F800000


@triton.jit
def _read(master, weight, residual, at, here, SPLIT: tl.constexpr):
    if SPLIT:
        wide = _bits(tl.load(weight + at, here, other=0.0).to(tl.float32))
        size, left = wide & _SIZE, tl.load(residual + at, here, other=0).to(tl.int32)
        if weight.dtype.element_ty == tl.bfloat16:
            size += left
        else:
            size = _bits(_float(size) + left.to(tl.float32) * _float(_power(size) - (26 << 23)))
        p = _float(size | (wide & _SIGN))
    else:
        p = tl.load(master + at, here, other=0.0)
    return p


@triton.jit
def _write(p, master, weight, residual, at, here, SPLIT: tl.constexpr, WEIGHT: tl.constexpr):
    if SPLIT:
        size, sign = _bits(p) & _SIZE, _bits(p) & _SIGN
        if weight.dtype.element_ty == tl.bfloat16:
            size = tl.minimum(size, _NAN)  # bits of a NaN may overflow
            upper = (size + 0x8000) & 0x7FFF0000
            w, left = _float(upper | sign).to(tl.bfloat16), size - upper
        else:
            value = _float(size)
            value = tl.where(value < 2.0**-17, (value + 2.0**-17) - 2.0**-17, value)  # a multiple of 2^-40
            w = _float(_bits(value) | 1 | sign).to(tl.float16)  # halves are rounded up
            back = _bits(w.to(tl.float32)) & _SIZE
            left = ((value - _float(back)) * _float((140 << 23) - (_power(back) - (140 << 23)))).to(tl.int32)
        tl.store(weight + at, w, here)
        tl.store(residual + at, left.to(tl.int16), here)
    else:
        tl.store(master + at, p, here)
        if WEIGHT:
            tl.store(weight + at, p.to(weight.dtype.element_ty), here)


@triton.jit
def _adamw(
    gradient, master, m, m_scales, s, s_scales, weight, residual, groups,
    factor, keep, beta1, rest1, beta2, rest2, root, eps, rate,
    SPLIT: tl.constexpr, WEIGHT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    here = row < groups
    at, inside = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :], here[:, None]
    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32) * factor
    first = _decoded(tl.load(m + at, inside, other=0), tl.load(m_scales + row, here, other=0.0)[:, None], True)
    first = first * beta1 + g * rest1
    size = _decoded(tl.load(s + at, inside, other=0), tl.load(s_scales + row, here, other=0.0)[:, None], False)
    size = tl.sqrt_rn((size * size) * beta2 + (g * g) * rest2)
    p = _read(master, weight, residual, at, inside, SPLIT)
    p = p * keep - tl.div_rn(first * rate, tl.div_rn(size, root) + eps)
    _store_encoded(first, m, m_scales, at, row, here, True)
    _store_encoded(size, s, s_scales, at, row, here, False)
    _write(p, master, weight, residual, at, inside, SPLIT, WEIGHT)


@triton.jit
def _lion(
    gradient, master, m, m_scales, weight, residual, groups, factor, keep, beta1, rest1, beta2, rest2, rate,
    SPLIT: tl.constexpr, WEIGHT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    here = row < groups
    at, inside = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :], here[:, None]
    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32) * factor
    before = _decoded(tl.load(m + at, inside, other=0), tl.load(m_scales + row, here, other=0.0)[:, None], True)
    direction = before * beta1 + g * rest1
    p = _read(master, weight, residual, at, inside, SPLIT) * keep
    p = tl.where(direction > 0, p - rate, tl.where(direction < 0, p + rate, p))
    _store_encoded(before * beta2 + g * rest2, m, m_scales, at, row, here, True)
    _write(p, master, weight, residual, at, inside, SPLIT, WEIGHT)


def adamw_8bit_(
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
    """Make one step of AdamW in place, on a GPU or interpreted.

    Args:
        master: Master weights (S,), fp32, updated. None with `residual`. S is a multiple of 128.
        gradient: (S,), fp32, fp16 or bf16.
        m: Codes of the first moment (S,), uint8, updated.
        m_scales: Its scales (S/128,), fp32, updated.
        s: Codes of the root of the second moment (S,), uint8, updated.
        s_scales: Its scales (S/128,), fp32, updated.
        weight: (S,), fp32, fp16 or bf16; receives the rounded master, or None. With `residual` it is updated.
        residual: Residuals of the master weights (S,), int16, updated, or None.
        factor: Multiplies the gradient: clip factor over loss scale.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Multiplied by `lr`.
        step: Number of the update, from 1.

    Raises:
        KernelError: Shapes do not fit together, or a tensor is not contiguous.
    """
    root, rate = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    _launch(
        _adamw, gradient, (master, m, m_scales, s, s_scales), weight, residual,
        (factor, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, root, eps, rate),
    )  # fmt: skip


def lion_8bit_(
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
    """Make one step of Lion in place, on a GPU or interpreted. Arguments as in `adamw_8bit_`.

    Raises:
        KernelError: Shapes do not fit together, or a tensor is not contiguous.
    """
    numbers = factor, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr
    _launch(_lion, gradient, (master, m, m_scales), weight, residual, numbers)


def _launch(
    kernel: object,
    gradient: Tensor,
    state: tuple[Tensor | None, ...],
    weight: Tensor | None,
    residual: Tensor | None,
    numbers: tuple[float, ...],
) -> None:
    numel = gradient.numel()
    for tensor in (gradient, weight, residual, *state):
        if tensor is not None and not (tensor.is_contiguous() and tensor.numel() in (numel, numel / GROUP)):
            found = f"a gradient of {numel} elements with a tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()}"
            raise KernelError(f"8-bit moments: {found}; contiguous, n elements or n / {GROUP} is needed")
    groups = numel // GROUP
    launch(
        kernel, (triton.cdiv(groups, GROUPS),), gradient, *state, weight, residual, groups, *numbers,
        warps=WARPS, fused=False, SPLIT=residual is not None, WEIGHT=weight is not None, GROUPS=GROUPS, GROUP=GROUP,
    )  # fmt: skip
