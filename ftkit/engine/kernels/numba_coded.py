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

from ftkit.engine.kernels.numba_loops import F16, F32, I16, I32, compiled, intrinsic, narrow, widen
from ftkit.spec.state_forms import GROUP_NUMEL

I8 = ir.IntType(8)
SMALLEST_SCALE = np.float32(2.0**-98)
ONE, SIGN = 0x3F800000, 0x80000000  # bits of 1.0 and -0.0
_LAST = {True: 134, False: 135}


def _emit_size(builder: Any, value: Any) -> Any:
    """Return the bits of |value|."""
    return builder.and_(builder.bitcast(value, I32), I32(SIGN - 1))


@intrinsic
def larger(typing: Any, size: Any, value: Any) -> Any:
    """Return the larger of `size`, the bits of a magnitude, and the bits of |value|. NaN is larger than inf."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _emit_size(builder, arguments[1])
        return builder.select(builder.icmp_signed(">", found, arguments[0]), found, arguments[0])

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
            # n + 1/2 rounded down, minus 1. The difference is exact; of numbers below 1/2 it is rounded to 0.
            place = builder.fptosi(builder.fsub(builder.bitcast(number, F32), F32(0.5)), I32)
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
        if weight == types.int16:
            wide = builder.zext(arguments[0], I32)
            size = builder.shl(builder.and_(wide, I32(0x7FFF)), I32(16))
            size = builder.add(size, builder.sext(arguments[1], I32))
            sign = builder.shl(builder.and_(wide, I32(0x8000)), I32(16))
            return builder.bitcast(builder.or_(size, sign), F32)
        wide = builder.bitcast(builder.fpext(builder.bitcast(arguments[0], F16), F32), I32)
        size = builder.and_(wide, I32(SIGN - 1))
        step = builder.bitcast(builder.sub(_emit_power(builder, size), I32(26 << 23)), F32)
        size = builder.fadd(builder.bitcast(size, F32), builder.fmul(builder.sitofp(arguments[1], F32), step))
        return builder.bitcast(builder.or_(builder.bitcast(size, I32), builder.and_(wide, I32(SIGN))), F32)

    return types.float32(weight, types.int16), emit


@intrinsic
def split_one(typing: Any, value: Any, array: Any) -> Any:
    """Return fp32 `value` as an element of `array`, 16 bits, and its residual, int16."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], I32)
        emit_one = _emit_split_bf16 if array.dtype == types.int16 else _emit_split_fp16
        pair = emit_one(builder, builder.and_(bits, I32(SIGN - 1)), builder.and_(bits, I32(SIGN)))
        return context.make_tuple(builder, signature.return_type, pair)

    return types.Tuple((array.dtype, types.int16))(types.float32, array), emit


def _emit_split_bf16(builder: Any, size: Any, sign: Any) -> tuple[Any, Any]:
    upper = builder.lshr(builder.add(size, I32(0x8000)), I32(16))
    upper = builder.select(builder.icmp_signed("<", upper, I32(0x7FC0)), upper, I32(0x7FC0))  # bits of a NaN may overflow
    residual = builder.sub(size, builder.shl(upper, I32(16)))
    return builder.trunc(builder.or_(upper, builder.lshr(sign, I32(16))), I16), builder.trunc(residual, I16)


def _emit_split_fp16(builder: Any, size: Any, sign: Any) -> tuple[Any, Any]:
    """Convert to fp16 and back. The lowest bit is set, so that halves are rounded up."""
    value, least = builder.bitcast(size, F32), F32(2.0**-17)
    fine = builder.fsub(builder.fadd(value, least), least)  # a multiple of 2^-40
    value = builder.select(builder.fcmp_ordered("<", value, least), fine, value)
    odd = builder.bitcast(builder.or_(builder.bitcast(value, I32), I32(1)), F32)
    weight = builder.fptrunc(odd, F16)
    back = builder.bitcast(builder.fpext(weight, F32), I32)
    steps = builder.bitcast(builder.sub(I32((2 * 127 + 26) << 23), _emit_power(builder, back)), F32)
    residual = builder.fmul(builder.fsub(value, builder.bitcast(back, F32)), steps)
    weight = builder.or_(builder.bitcast(weight, I16), builder.trunc(builder.lshr(sign, I32(16)), I16))
    return weight, builder.trunc(builder.fptosi(residual, I32), I16)


def _emit_power(builder: Any, size: Any) -> Any:
    """Return the bits of the power of two at or below a number, at least of fp16's smallest normal number, 2^-14."""
    larger = builder.select(builder.icmp_signed(">", size, I32(113 << 23)), size, I32(113 << 23))
    return builder.and_(larger, I32(0xFF << 23))


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
        weight[i], residual[i] = split_one(p, weight)


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


@compiled()
def encode(scales: Any, values: Any, codes: Any, numbers: Any) -> None:
    """Encode `values` (n,) in `codes` (n,) and `scales` (n/128,). `numbers`: signed."""
    (signed,) = numbers
    for k in range(scales.size):
        at, top = k * GROUP_NUMEL, np.int32(0)
        for i in range(GROUP_NUMEL):
            top = larger(top, values[at + i])
        scales[k], inverse = inverse_of(top)
        for i in range(GROUP_NUMEL):
            x = values[at + i]
            codes[at + i] = encoded(x, inverse) if signed != 0 else encoded_root(x, inverse)


@compiled()
def decode(scales: Any, values: Any, codes: Any, numbers: Any) -> None:
    """Decode `codes` (n,) and `scales` (n/128,) into `values` (n,). `numbers`: signed."""
    (signed,) = numbers
    for k in range(scales.size):
        at, scale = k * GROUP_NUMEL, scales[k]
        for i in range(GROUP_NUMEL):
            code = codes[at + i]
            values[at + i] = decoded(code, scale) if signed != 0 else decoded_root(code, scale)


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
