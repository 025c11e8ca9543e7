"""The loops of `HostLoops` over 8-bit moments and split master weights. See the notes in `ftkit/engine/optim/coding.py`.

A loop takes group after group. The first part reads codes, updates, and keeps the new moments of the group in scratch memory
of the L1 cache, with the bits of their largest magnitude. The second part writes codes.

[Note: codes without a table]

    With F, the bits of fp32(n), n = 2..256, the bits of the value of n are 4 * F - 135 * 2^25 + bits(1.0) modulo 2^32: the
    exponent of n, times 4, counts groups of 4 octaves, and the upper bits of its fraction count octaves and then linear
    steps. Signed codes, n = 2..128, have 134 in place of 135. The inverse gives n as a fraction, which is rounded.
    Unsigned integers wrap as wanted.

Floating-point operations are fp32, rounded once, without fused multiply-adds: plain PyTorch gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ftkit.engine.kernels.numba_loops import F32, I16, I32, compiled, intrinsic, narrow, widen
from ftkit.spec.state_forms import GROUP_NUMEL

I8 = ir.IntType(8)
SMALLEST_SCALE = np.float32(2.0**-98)
ONE, SIGN = 0x3F800000, 0x80000000  # bits of 1.0 and -0.0
_LAST = {True: 134, False: 135}
_REBIAS = 112 << 10
"""Difference of the exponents' biases of fp32 and fp16, in the place of fp16's exponent."""
_BELOW_FP16 = 113 << 23
"""Bits of 2^-14, the smallest normal fp16 number."""


def _emit_size(builder: Any, value: Any) -> Any:
    """Return the bits of |value|."""
    return builder.and_(builder.bitcast(value, I32), I32(SIGN - 1))


def _emit_max(builder: Any, a: Any, b: Any, order: str = ">") -> Any:
    return builder.select(builder.icmp_signed(order, a, b), a, b)


@intrinsic
def larger(typing: Any, size: Any, value: Any) -> Any:
    """Return the larger of `size`, the bits of a magnitude, and the bits of |value|. NaN is larger than inf."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _emit_max(builder, _emit_size(builder, arguments[1]), arguments[0])

    return types.int32(types.int32, types.float32), emit


@intrinsic
def as_float(typing: Any, bits: Any) -> Any:
    """Return the fp32 number of int32 bits."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.int32), emit


def _decoder(signed: bool) -> Any:
    @intrinsic
    def decoded(typing: Any, code: Any, scale: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = builder.zext(arguments[0], I32)
            place = builder.and_(code, I32(0x7F)) if signed else code
            number = builder.sitofp(builder.add(place, I32(1)), F32)
            bits = builder.shl(builder.bitcast(number, I32), I32(2))
            bits = builder.add(bits, I32((ONE - (_LAST[signed] << 25)) % 2**32))
            if signed:
                bits = builder.or_(bits, builder.shl(builder.and_(code, I32(0x80)), I32(24)))
            bits = builder.select(builder.icmp_unsigned("==", code, I32(0)), I32(0), bits)
            return builder.fmul(builder.bitcast(bits, F32), arguments[1])

        return types.float32(types.uint8, types.float32), emit

    return decoded


def _encoder(signed: bool) -> Any:
    @intrinsic
    def encoded(typing: Any, value: Any, inverse: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            size = builder.bitcast(_emit_size(builder, arguments[0]), F32)
            ratio = builder.bitcast(builder.fmul(size, arguments[1]), I32)
            number = builder.add(builder.lshr(ratio, I32(2)), I32((_LAST[signed] << 23) - (ONE >> 2)))
            number = builder.fptosi(builder.fadd(builder.bitcast(number, F32), F32(0.5)), I32)
            place = _emit_max(builder, builder.sub(number, I32(1)), I32(0))
            if signed:
                sign = builder.and_(builder.lshr(builder.bitcast(arguments[0], I32), I32(24)), I32(0x80))
                zero = builder.icmp_unsigned("==", place, I32(0))
                place = builder.select(zero, place, builder.or_(place, sign))
            return builder.trunc(place, I8)

        return types.uint8(types.float32, types.float32), emit

    return encoded


decoded, encoded = _decoder(signed=True), _encoder(signed=True)
decoded_root, encoded_root = _decoder(signed=False), _encoder(signed=False)


@intrinsic
def joined(typing: Any, weight: Any, residual: Any) -> Any:
    """Return the fp32 master weight of an element of a 16-bit weight and its residual."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, left = builder.zext(arguments[0], I32), builder.sext(arguments[1], I32)
        place = builder.and_(wide, I32(0x7FFF))
        bits = builder.add(builder.shl(place, I32(16)), left)  # bf16, and the steps of a subnormal fp16 number
        if weight == types.uint16:
            small = builder.fmul(builder.sitofp(bits, F32), F32(2.0**-40))
            power = builder.icmp_unsigned("==", builder.and_(wide, I32(0x3FF)), I32(0))
            below = builder.and_(power, builder.icmp_signed("<", left, I32(0)))
            left = builder.select(below, builder.ashr(left, I32(2)), builder.ashr(left, I32(3)))
            bits = builder.add(builder.shl(builder.add(place, I32(_REBIAS)), I32(13)), left)
            subnormal = builder.icmp_unsigned("<=", place, I32(0x400))
            bits = builder.select(subnormal, builder.bitcast(small, I32), bits)
        sign = builder.shl(builder.and_(wide, I32(0x8000)), I32(16))
        return builder.bitcast(builder.or_(bits, sign), F32)

    return types.float32(weight, types.int16), emit


@intrinsic
def split_weight(typing: Any, value: Any, array: Any) -> Any:
    """Return fp32 `value` as an element of `array`, 16 bits, rounded halves up in magnitude."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, _ = _emit_split(builder, arguments[0], array.dtype)
        sign = builder.and_(builder.lshr(builder.bitcast(arguments[0], I32), I32(16)), I32(0x8000))
        return builder.trunc(builder.or_(place, sign), I16)

    return array.dtype(types.float32, array), emit


@intrinsic
def split_residual(typing: Any, value: Any, array: Any) -> Any:
    """Return the residual of fp32 `value`, int16, over its weight in `array`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.trunc(_emit_split(builder, arguments[0], array.dtype)[1], I16)

    return types.int16(types.float32, array), emit


def _emit_split(builder: Any, value: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the bits of the weight's magnitude, and the residual. LLVM computes common parts once."""
    size = _emit_size(builder, value)
    if dtype == types.int16:
        place = builder.lshr(builder.add(size, I32(0x8000)), I32(16))
        place = _emit_max(builder, place, I32(0x7FC0), "<")  # a NaN whose bits would overflow
        return place, builder.sub(size, builder.shl(place, I32(16)))
    upper = builder.lshr(builder.add(size, I32(0x1000)), I32(13))
    left = builder.sub(size, builder.shl(upper, I32(13)))
    power = builder.icmp_unsigned("==", builder.and_(upper, I32(0x3FF)), I32(0))
    below = builder.and_(power, builder.icmp_signed("<", left, I32(0)))
    left = builder.select(below, builder.shl(left, I32(2)), builder.shl(left, I32(3)))
    largest = builder.select(builder.icmp_unsigned(">", size, I32(0x7F800000)), I32(0x7E00), I32(0x7C00))  # NaN, inf
    place = _emit_max(builder, builder.sub(upper, I32(_REBIAS)), largest, "<")
    steps = _emit_steps(builder, builder.bitcast(size, F32))
    small = builder.lshr(builder.add(steps, I32(0x8000)), I32(16))
    subnormal = builder.icmp_unsigned("<", size, I32(_BELOW_FP16))
    rest = builder.sub(steps, builder.shl(small, I32(16)))
    return builder.select(subnormal, small, place), builder.select(subnormal, rest, left)


def _emit_steps(builder: Any, size: Any) -> Any:
    """Return a magnitude below 2^-14 in steps of 2^-40, rounded halves up."""
    scaled = builder.fmul(size, F32(2.0**40))
    whole = builder.fptosi(scaled, I32)
    part = builder.fsub(scaled, builder.sitofp(whole, F32))
    return builder.add(whole, builder.zext(builder.fcmp_ordered(">=", part, F32(0.5)), I32))


@compiled()
def inverse_of(size: Any) -> Any:
    """Return the scale of a group and its inverse, both 0 if the group becomes 0. `size`: bits of its largest magnitude."""
    scale = as_float(size)
    if scale < SMALLEST_SCALE:
        return np.float32(0), np.float32(0)
    return scale, np.float32(1) / scale


# numba leaves out the branch of an argument that is None, and only that one: both conditions below are needed.


@compiled()
def read(master: Any, weight: Any, residual: Any, i: Any) -> Any:
    """Return the master weight of element i."""
    p = np.float32(0)
    if master is not None:
        p = master[i]
    if residual is not None:
        p = joined(weight[i], residual[i])
    return p


@compiled()
def write(p: Any, master: Any, weight: Any, residual: Any, i: Any) -> None:
    """Write the master weight p of element i, and its weight."""
    if master is not None:
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)
    if residual is not None:
        weight[i] = split_weight(p, weight)
        residual[i] = split_residual(p, weight)


@compiled()
def adamw_8bit(
    m_scales: Any, s_scales: Any, master: Any, gradient: Any, m: Any, s: Any, weight: Any, residual: Any, numbers: Any
) -> None:
    """Update arrays (n,) and scales (n/128,); see `HostLoops.adamw_8bit`.

    Args:
        numbers: factor, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2^step), eps,
            lr / (1 - beta1^step), all fp32.
    """
    factor, keep, beta1, fresh1, beta2, fresh2, root, eps, rate = numbers
    first, size = np.empty(GROUP_NUMEL, np.float32), np.empty(GROUP_NUMEL, np.float32)
    for k in range(m_scales.size):
        at = k * GROUP_NUMEL
        first_scale, size_scale = m_scales[k], s_scales[k]
        first_top = size_top = np.int32(0)
        for i in range(GROUP_NUMEL):
            g = widen(gradient[at + i]) * factor
            a = decoded(m[at + i], first_scale) * beta1 + fresh1 * g
            r = decoded_root(s[at + i], size_scale)
            r = math.sqrt(beta2 * (r * r) + fresh2 * (g * g))
            p = read(master, weight, residual, at + i)
            p = p * keep - rate * a / (r / root + eps)
            first[i] = a
            size[i] = r
            first_top = larger(first_top, a)
            size_top = larger(size_top, r)
            write(p, master, weight, residual, at + i)
        m_scales[k], first_inverse = inverse_of(first_top)
        s_scales[k], size_inverse = inverse_of(size_top)
        for i in range(GROUP_NUMEL):
            m[at + i] = encoded(first[i], first_inverse)
            s[at + i] = encoded_root(size[i], size_inverse)


@compiled()
def lion_8bit(
    m_scales: Any, master: Any, gradient: Any, m: Any, weight: Any, residual: Any, numbers: Any
) -> None:
    """Update arrays (n,) and scales (n/128,); see `HostLoops.lion_8bit`. `numbers` as in `numba_loops.lion`."""
    factor, keep, beta1, fresh1, beta2, fresh2, rate = numbers
    zero = np.float32(0)
    first = np.empty(GROUP_NUMEL, np.float32)
    for k in range(m_scales.size):
        at = k * GROUP_NUMEL
        scale, top = m_scales[k], np.int32(0)
        for i in range(GROUP_NUMEL):
            g = widen(gradient[at + i]) * factor
            a = decoded(m[at + i], scale)
            c = a * beta1 + fresh1 * g
            a = a * beta2 + fresh2 * g
            p = read(master, weight, residual, at + i)
            p = p * keep
            p = p - rate if c > zero else p + rate if c < zero else p
            first[i] = a
            top = larger(top, a)
            write(p, master, weight, residual, at + i)
        m_scales[k], inverse = inverse_of(top)
        for i in range(GROUP_NUMEL):
            m[at + i] = encoded(first[i], inverse)


def _encode(encoded: Any) -> Any:
    @compiled()
    def encode(scales: Any, values: Any, codes: Any) -> None:
        for k in range(scales.size):
            at, top = k * GROUP_NUMEL, np.int32(0)
            for i in range(GROUP_NUMEL):
                top = larger(top, values[at + i])
            scales[k], inverse = inverse_of(top)
            for i in range(GROUP_NUMEL):
                codes[at + i] = encoded(values[at + i], inverse)

    return encode


def _decode(decoded: Any) -> Any:
    @compiled()
    def decode(scales: Any, values: Any, codes: Any) -> None:
        for k in range(scales.size):
            at, scale = k * GROUP_NUMEL, scales[k]
            for i in range(GROUP_NUMEL):
                values[at + i] = decoded(codes[at + i], scale)

    return decode


encode, encode_roots = _encode(encoded), _encode(encoded_root)
decode, decode_roots = _decode(decoded), _decode(decoded_root)


@compiled()
def split(master: Any, weight: Any, residual: Any) -> None:
    """Split `master` (n,) into `weight` and `residual` (n,); see `ftkit/engine/optim/coding.py`."""
    for i in range(master.size):
        write(master[i], None, weight, residual, i)


@compiled()
def join(master: Any, weight: Any, residual: Any) -> None:
    """Join `weight` and `residual` (n,) in `master` (n,)."""
    for i in range(master.size):
        master[i] = read(None, weight, residual, i)
