"""The loops of `HostLoops`, compiled by numba to vector code. The only file that imports numba.

numba compiles a loop at its first call with a new combination of dtypes (one to two seconds each), and caches the result on
disk for later processes.

numba has no bf16 and, on a CPU, no fp16. The loops see bf16 as int16 and fp16 as uint16, so the element type says how to
convert. `widen`, `narrow` and `_multiply_add` are intrinsics: each returns its signature and a function that emits LLVM
code.

[Note: which bits]
    Every operation is IEEE fp32, rounded once, in the order of torch's fused AdamW or of torch's SGD, with fused
    multiply-adds where torch's x86 build has them: whole vectors give the same bits as torch. The other rules are compared
    with their formulas in float64 (tests/engine/test_update_rules.py). Nothing is reassociated,
    and NaN and infinity are not assumed away. So the result does not depend on the number of threads, on a tensor's
    address, or on the CPU. A sum of squares has the same bits for any number of threads on one CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import types

intrinsic: Any = extending.intrinsic  # its type hints ask the caller for the typing context

BLOCK_NUMEL = 1 << 14
"""Elements whose squares are summed together, so that a sum does not depend on the number of threads."""

SUM_NUMEL = 1 << 8
"""Elements that `mean` sums together: their partial sum stays in the L1 cache."""

F32, F16, I32, I16 = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)


def compiled(*fastmath: str) -> Callable[[Any], Any]:
    """Return a decorator that compiles a loop on demand, and caches it on disk if a folder is writable.

    `error_model` is NumPy's: a division by zero gives inf. An exception would prevent vector code.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath) or False}

    def decorate(loop: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(loop)
        except RuntimeError:  # no folder is writable: compile in each process
            return numba.njit(**options)(loop)

    return decorate


@intrinsic
def widen(typing: Any, carried: Any) -> Any:
    """Return an element as fp32. bf16 is the upper half of fp32. The CPU has an instruction to convert fp16."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if carried == types.uint16:
            return builder.fpext(builder.bitcast(arguments[0], F16), F32)
        if carried == types.int16:
            return builder.bitcast(builder.shl(builder.zext(arguments[0], I32), I32(16)), F32)
        return arguments[0]

    return types.float32(carried), emit


@intrinsic
def narrow(typing: Any, value: Any, array: Any) -> Any:
    """Return fp32 `value` as an element of `array`, rounded to nearest even. The inverse of `widen`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype == types.uint16:
            return builder.bitcast(builder.fptrunc(arguments[0], F16), I16)
        if array.dtype == types.int16:
            return _emit_bf16(builder, arguments[0])
        return arguments[0]

    return array.dtype(types.float32, array), emit


def _emit_bf16(builder: Any, value: Any) -> Any:
    """Round to nearest even. A NaN keeps its sign and becomes quiet."""
    bits = builder.bitcast(value, I32)
    upper = builder.lshr(bits, I32(16))
    half = builder.add(I32(0x7FFF), builder.and_(upper, I32(1)))
    rounded = builder.lshr(builder.add(bits, half), I32(16))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, builder.or_(upper, I32(0x40)), rounded), I16)


@intrinsic
def _multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in fp32, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), emit


@compiled()
def adamw(master: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, weight: Any, numbers: Any) -> None:
    """Update arrays (n,); see `HostLoops.adamw`.

    Args:
        numbers: factor, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, sqrt(1 - beta2^step), eps,
            lr / (1 - beta1^step), all fp32.
    """
    factor, keep, toward, beta2, fresh, root, eps, rate = numbers
    near = toward < np.float32(0.5)  # interpolate from the nearer end, as torch's lerp does
    blend = toward if near else toward - np.float32(1)
    for i in range(master.size):
        g = widen(gradient[i]) * factor
        m = exp_avg[i]
        m = _multiply_add(blend, g - m, m if near else g)
        v = _multiply_add(fresh * g, g, exp_avg_sq[i] * beta2)
        p = master[i] * keep - rate * m / (math.sqrt(v) / root + eps)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)


@compiled()
def sgd(master: Any, gradient: Any, buffer: Any, weight: Any, numbers: Any) -> None:
    """Update arrays (n,); see `HostLoops.sgd`. `numbers`: factor, -lr, momentum, weight_decay, nesterov, all fp32."""
    factor, back, momentum, decay, nesterov = numbers
    for i in range(master.size):
        g = widen(gradient[i]) * factor
        p = master[i]
        if decay != 0:
            g = _multiply_add(decay, p, g)
        if buffer is not None:
            moved = buffer[i] * momentum + g
            buffer[i] = moved
            g = _multiply_add(momentum, moved, g) if nesterov != 0 else moved
        p = _multiply_add(back, g, p)
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)


@compiled()
def lion(master: Any, gradient: Any, exp_avg: Any, weight: Any, numbers: Any) -> None:
    """Update arrays (n,); see `ShardedLion`.

    Args:
        numbers: factor, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr, all fp32.
    """
    factor, keep, beta1, fresh1, beta2, fresh2, rate = numbers
    zero = np.float32(0)
    for i in range(master.size):
        g = widen(gradient[i]) * factor
        m = exp_avg[i]
        c = _multiply_add(fresh1, g, m * beta1)
        p = master[i] * keep
        p = p - rate if c > zero else p + rate if c < zero else p
        exp_avg[i] = _multiply_add(fresh2, g, m * beta2)
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)


@compiled()
def adagrad(master: Any, gradient: Any, total: Any, weight: Any, numbers: Any) -> None:
    """Update arrays (n,); see `ShardedAdagrad`. `numbers`: factor, weight_decay, eps, decayed lr, all fp32."""
    factor, decay, eps, rate = numbers
    for i in range(master.size):
        p = master[i]
        g = widen(gradient[i]) * factor
        if decay != 0:
            g = _multiply_add(decay, p, g)
        s = _multiply_add(g, g, total[i])
        p = p - rate * g / (math.sqrt(s) + eps)
        total[i] = s
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)


@compiled()
def rmsprop(master: Any, gradient: Any, square: Any, buffer: Any, mean: Any, weight: Any, numbers: Any) -> None:
    """Update arrays (n,); see `ShardedRMSprop`. Without momentum `buffer` is None, without centering `mean`.

    Args:
        numbers: factor, weight_decay, alpha, 1 - alpha, eps, momentum, lr, all fp32.
    """
    factor, decay, alpha, fresh, eps, momentum, rate = numbers
    for i in range(master.size):
        p = master[i]
        g = widen(gradient[i]) * factor
        if decay != 0:
            g = _multiply_add(decay, p, g)
        v = _multiply_add(fresh * g, g, square[i] * alpha)
        square[i] = v
        if mean is not None:
            m = _multiply_add(fresh, g - mean[i], mean[i])
            mean[i] = m
            v = _multiply_add(-m, m, v)
        step = g / (math.sqrt(v) + eps)
        if buffer is not None:
            step = buffer[i] * momentum + step
            buffer[i] = step
        p = _multiply_add(-rate, step, p)
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)


@compiled()
def ademamix(master: Any, gradient: Any, fast: Any, slow: Any, square: Any, weight: Any, numbers: Any) -> None:
    """Update arrays (n,); see `ShardedAdEMAMix`.

    Args:
        numbers: factor, 1 - lr * weight_decay, beta1, 1 - beta1, beta3, 1 - beta3, beta2, 1 - beta2, 1 - beta1^step,
            sqrt(1 - beta2^step), eps, alpha, lr, all fp32.
    """
    factor, keep, beta1, fresh1, beta3, fresh3, beta2, fresh2, bias, root, eps, alpha, rate = numbers
    for i in range(master.size):
        g = widen(gradient[i]) * factor
        m1 = _multiply_add(fresh1, g, fast[i] * beta1)
        m2 = _multiply_add(fresh3, g, slow[i] * beta3)
        v = _multiply_add(fresh2 * g, g, square[i] * beta2)
        p = master[i] * keep - rate * _multiply_add(alpha, m2, m1 / bias) / (math.sqrt(v) / root + eps)
        fast[i] = m1
        slow[i] = m2
        square[i] = v
        master[i] = p
        if weight is not None:
            weight[i] = narrow(p, weight)


@compiled("reassoc", "contract")
def square_sums(values: Any, sums: Any) -> None:
    """Set sums[k] to the sum of squares of the k-th `BLOCK_NUMEL` of `values` (n,), in float64."""
    for k in range(sums.size):
        block = values[k * BLOCK_NUMEL : (k + 1) * BLOCK_NUMEL]
        total = 0.0
        for i in range(block.size):  # an iteration over elements would not be vectorized
            wide = np.float64(widen(block[i]))
            total += wide * wide
        sums[k] = total


@compiled("reassoc", "contract")
def ratio_squares(gradient: Any, square: Any, numbers: Any, sums: Any) -> None:
    """Set sums[k] to the sum over the k-th `BLOCK_NUMEL` elements in float64; see `HostLoops.ratio_square_sum`.

    Args:
        numbers: factor, 1 - fresh, fresh, least, all fp32.
    """
    factor, keep, fresh, least = numbers
    for k in range(sums.size):
        gradients = gradient[k * BLOCK_NUMEL : (k + 1) * BLOCK_NUMEL]
        squares = square[k * BLOCK_NUMEL : (k + 1) * BLOCK_NUMEL]
        total = 0.0
        for i in range(gradients.size):
            g = widen(gradients[i]) * factor
            g = g * g
            total += np.float64(g / max(squares[i] * keep + fresh * g, least))
        sums[k] = total


@compiled()
def add(into: Any, other: Any, numbers: Any) -> None:
    """Add to array `into` (n,); see `HostLoops.add_`. `numbers`: scale, fp32."""
    (scale,) = numbers
    for i in range(into.size):
        into[i] = narrow(_multiply_add(scale, widen(other[i]), widen(into[i])), into)


@compiled()
def mean(out: Any, parts: Any) -> None:
    """Set `out` (n,) to the mean of a tuple of arrays (n,): the fp32 sum in their order, divided, and rounded once.

    `out` may be one of the parts. See `SUM_NUMEL`.
    """
    total = np.empty(SUM_NUMEL, np.float32)
    world = np.float32(len(parts))
    for start in range(0, out.size, SUM_NUMEL):
        n = min(SUM_NUMEL, out.size - start)
        for k in range(len(parts)):
            part = parts[k][start : start + n]
            if k == 0:
                for i in range(n):
                    total[i] = widen(part[i])
            else:
                for i in range(n):
                    total[i] += widen(part[i])
        into = out[start : start + n]
        for i in range(n):
            into[i] = narrow(total[i] / world, into)
