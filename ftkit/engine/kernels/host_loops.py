"""The loops of update rules on the host: one pass over memory, compiled from Python, for state that does not fit the card.

A step of AdamW is a few operations an element, so on a CPU it costs what memory costs. This pass reads the 16-bit gradient,
reads and writes the fp32 master and moments, and writes the 16-bit weight: 28 bytes a parameter, nothing twice, no fp32
copy of the gradient. (The CPU itself also fetches the weight's lines before it writes them: 2 bytes more.) torch's fused
AdamW wants gradient and weight in fp32, which makes two more passes of it. SGD is the same with one fp32 moment, or none.

[Note: how it is compiled]
    numba turns the loops at the end of this file into vector code for the CPU it runs on, at the first call with a new
    combination of dtypes (one to two seconds each), and keeps it beside this file, or in the user's cache folder, for all
    later processes. numba is imported when the first `HostLoops` is made: `import ftkit` does not pay for it.

    numba knows neither bf16 nor, on a CPU, fp16. bf16 travels as int16 and fp16 as uint16, so that an element's type says
    how it is read, and three words are added to its language (`_teach`): `_widen`, `_narrow`, `_multiply_add`.

[Note: which bits]
    Every operation of an update is IEEE fp32, rounded once, in the order of torch's fused AdamW (arXiv:1711.05101), or of
    torch's SGD, with fused multiply-adds where torch's x86 build has them: whole vectors come out in the same bits as
    there. Nothing is reassociated, no NaN or infinity is assumed away. So the result depends neither on the number of
    threads, nor on where a tensor starts, nor on the make of the CPU. A sum of squares has the same bits for any number of
    threads on one CPU.

What it refuses: tensors that are not contiguous, on the CPU and of the same length; fp16 on x86 CPUs older than 2012, which
have no instruction for it; and to run without numba: a silent fallback would be several times slower. What it costs: numba
and llvmlite (210 MB installed), and under a second at first use.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBA = "numba>=0.64"
"""What to install where it is missing."""

CARRIERS = {torch.float32: torch.float32, torch.bfloat16: torch.int16, torch.float16: torch.uint16}
"""As which dtype the compiled loops see a tensor's elements. See [Note: how it is compiled]."""

RANGE_NUMEL = 1 << 16
"""Elements. A thread gets a multiple of this: handing over costs tens of microseconds, as long as about this much work."""

BLOCK_NUMEL = 1 << 14
"""Elements whose squares are summed on their own, so that a sum does not depend on the number of threads."""


class HostLoops:
    """Update rules over CPU tensors, the sum of squares that clipping needs and the sum of gradients, on `threads` threads.

    Its methods may be called from any thread and let others run meanwhile (the loops hold no interpreter lock), but two
    calls on the same tensors must not overlap. The caller's own thread works too; `threads - 1` more are started at need.

    Args:
        threads: how many threads share one call.

    Raises:
        ImportError: if numba is missing or cannot be imported; says what to install.
        ValueError: if `threads` is below 1.

    Cost: the import of numba, about half a second, for the first of a process.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads must be 1 or more, not {threads}")
        self.threads = threads
        self._loops = _compiled()
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="ftkit-host-loops")

    def adamw(
        self,
        master: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        weight: Tensor | None,
        *,
        factor: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Make one step of AdamW in place and write the new weight.

        Args:
            master: (n,) fp32, read and written.
            gradient: (n,) fp32, bf16 or fp16, read.
            exp_avg: (n,) fp32, the first moment, read and written.
            exp_avg_sq: (n,) fp32, the second moment, read and written.
            weight: (n,) fp32, bf16 or fp16, receives `master` rounded to nearest even; None where the master is the weight.
            factor: what the gradient is multiplied by, in fp32: clip over loss scale.
            lr: learning rate.
            beta1: decay of the first moment, in [0, 1).
            beta2: decay of the second moment, in [0, 1).
            eps: added to the root of the second moment.
            weight_decay: decoupled weight decay, which `lr` multiplies.
            step: 1 at the first update.

        Raises:
            ValueError: if a tensor has another dtype, device or length, or is not contiguous; if `step` is below 1 or a
                beta not in [0, 1).
            ImportError: if numba cannot compile here; says what to install.

        Cost: 28 bytes of memory traffic an element with 16-bit gradient and weight; allocates nothing.
        Source: Loshchilov and Hutter, arXiv:1711.05101; the order of operations is torch's fused AdamW's.
        """
        states = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name, tensor in states.items():
            _check(name, tensor, master.numel(), (torch.float32,))
        _check("gradient", gradient, master.numel(), self._loops.dtypes)
        if weight is not None:
            _check("weight", weight, master.numel(), self._loops.dtypes)
        if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"step must be 1 or more and betas in [0, 1), not step={step}, betas=({beta1}, {beta2})")
        numbers = (
            factor,
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            eps,
            lr / (1 - beta1**step),
        )
        arrays = [_array(t) for t in (master, gradient, exp_avg, exp_avg_sq)]
        out = None if weight is None else _array(weight)

        def work(start: int, stop: int) -> None:
            piece = slice(start, stop)
            _call(self._loops.adamw, *(a[piece] for a in arrays), None if out is None else out[piece], *numbers)

        self._share(work, master.numel(), RANGE_NUMEL)

    def sgd(
        self,
        master: Tensor,
        gradient: Tensor,
        momentum_buffer: Tensor | None,
        weight: Tensor | None,
        *,
        factor: float,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        """Make one step of SGD in place and write the new weight.

        Args:
            master: (n,) fp32, read and written.
            gradient: (n,) fp32, bf16 or fp16, read.
            momentum_buffer: (n,) fp32, read and written, zeros before the first step; None for SGD without momentum.
            weight: (n,) fp32, bf16 or fp16, receives `master` rounded to nearest even; None where the master is the weight.
            factor: what the gradient is multiplied by, in fp32: clip over loss scale.
            lr: learning rate.
            momentum: what the buffer is multiplied by; of no meaning without one.
            weight_decay: times the weight, added to the gradient.

        Raises:
            ValueError: if a tensor has another dtype, device or length, or is not contiguous.
            ImportError: if numba cannot compile here; says what to install.

        Cost: 20 bytes of memory traffic an element with momentum and 16-bit gradient and weight, 12 without momentum;
        allocates nothing.
        Source: torch.optim.SGD without dampening and Nesterov's form.
        """
        _check("master", master, master.numel(), (torch.float32,))
        if momentum_buffer is not None:
            _check("momentum_buffer", momentum_buffer, master.numel(), (torch.float32,))
        _check("gradient", gradient, master.numel(), self._loops.dtypes)
        if weight is not None:
            _check("weight", weight, master.numel(), self._loops.dtypes)
        arrays = [None if t is None else _array(t) for t in (master, gradient, momentum_buffer, weight)]

        def work(start: int, stop: int) -> None:
            pieces = (None if array is None else array[start:stop] for array in arrays)
            _call(self._loops.sgd, *pieces, factor, lr, momentum, weight_decay)

        self._share(work, master.numel(), RANGE_NUMEL)

    def square_sum(self, gradient: Tensor) -> float:
        """Return the sum of squares of `gradient` (n,) fp32, bf16 or fp16, in float64; inf and nan come through.

        The same tensor gives the same bits for any number of threads.

        Raises:
            ValueError: if `gradient` has another dtype or device, or is not contiguous.
            ImportError: if numba cannot compile here; says what to install.

        Cost: one read of the tensor.
        """
        _check("gradient", gradient, gradient.numel(), self._loops.dtypes)
        array = _array(gradient)
        sums = np.zeros(-(-gradient.numel() // BLOCK_NUMEL))

        def work(start: int, stop: int) -> None:
            _call(self._loops.square_sums, array[start * BLOCK_NUMEL : stop * BLOCK_NUMEL], sums[start:stop])

        self._share(work, len(sums), max(1, 4 * RANGE_NUMEL // BLOCK_NUMEL))
        return math.fsum(sums)

    def add_(self, into: Tensor, other: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times `other` to `into` in place, in fp32, rounded once more where `into` is 16-bit.

        torch's own `add_` is as fast where both have one dtype; where they differ it widens all of `other` first.

        Args:
            into: (n,) fp32, bf16 or fp16, read and written.
            other: (n,) of any of these dtypes, read.
            scale: what `other` is multiplied by.

        Raises:
            ValueError: if a tensor has another dtype, device or length, or is not contiguous.
            ImportError: if numba cannot compile here; says what to install.

        Cost: one read of both and one write; allocates nothing.
        """
        for name, tensor in (("into", into), ("other", other)):
            _check(name, tensor, into.numel(), self._loops.dtypes)
        target, source = _array(into), _array(other)

        def work(start: int, stop: int) -> None:
            _call(self._loops.add, target[start:stop], source[start:stop], scale)

        self._share(work, into.numel(), RANGE_NUMEL)

    def close(self) -> None:
        """End the threads; no call may follow. Without it they end when this object is collected."""
        self._pool.shutdown()

    def _share(self, work: Callable[[int, int], None], n: int, grain: int) -> None:
        """Call `work(start, stop)` on ranges that cover [0, n), one on this thread; return when all have ended.

        Raises:
            Whatever `work` raises, once no thread touches the tensors any more.
        """
        size = -(-n // (self.threads * grain)) * grain
        ranges = [(start, min(start + size, n)) for start in range(0, n, size or 1)]
        others = [self._pool.submit(work, start, stop) for start, stop in ranges[1:]]
        try:
            for start, stop in ranges[:1]:
                work(start, stop)
        finally:
            wait(others)
        for other in others:
            other.result()


def _check(name: str, tensor: Tensor, numel: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless `tensor` is a contiguous CPU tensor of `numel` elements and one of `dtypes`."""
    if tensor.dtype not in dtypes:
        without = " (fp16 needs a CPU with F16C)" if tensor.dtype == torch.float16 and len(dtypes) > 1 else ""
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(str(d) for d in dtypes)}{without}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on the CPU, not on {tensor.device}, strides {tensor.stride()}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, not {numel} as the tensor before it")


def _array(tensor: Tensor) -> Any:
    """Return a NumPy view (n,) of `tensor` in the dtype that carries it."""
    return tensor.detach().reshape(-1).view(CARRIERS[tensor.dtype]).numpy()


# --- the loops: Python that numba compiles; element types stand in [Note: how it is compiled]


def _adamw_loop(
    master: Any,
    gradient: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    weight: Any,
    factor: float,
    keep: float,
    toward: float,
    beta2: float,
    fresh: float,
    root: float,
    eps: float,
    rate: float,
) -> None:
    """Update arrays (n,); see `HostLoops.adamw`.

    Args:
        keep: 1 - lr * weight_decay.
        toward: 1 - beta1.
        fresh: 1 - beta2.
        root: sqrt(1 - beta2^step).
        rate: lr / (1 - beta1^step).
    """
    factor_, keep_, toward_, beta2_ = np.float32(factor), np.float32(keep), np.float32(toward), np.float32(beta2)
    fresh_, root_, eps_, rate_ = np.float32(fresh), np.float32(root), np.float32(eps), np.float32(rate)
    near = toward_ < np.float32(0.5)  # the interpolation starts from the nearer end, as torch's lerp does
    blend = toward_ if near else toward_ - np.float32(1)
    for i in range(master.size):
        g = _widen(gradient[i]) * factor_
        m = exp_avg[i]
        m = _multiply_add(blend, g - m, m if near else g)
        v = _multiply_add(fresh_ * g, g, exp_avg_sq[i] * beta2_)
        p = master[i] * keep_ - rate_ * m / (math.sqrt(v) / root_ + eps_)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = p
        if weight is not None:
            weight[i] = _narrow(p, weight)


def _sgd_loop(
    master: Any,
    gradient: Any,
    buffer: Any,
    weight: Any,
    factor: float,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Update arrays (n,); see `HostLoops.sgd`."""
    factor_, back, momentum_, decay = np.float32(factor), np.float32(-lr), np.float32(momentum), np.float32(weight_decay)
    for i in range(master.size):
        g = _widen(gradient[i]) * factor_
        p = master[i]
        if decay != 0:
            g = _multiply_add(decay, p, g)
        if buffer is not None:
            g = buffer[i] * momentum_ + g
            buffer[i] = g
        p = _multiply_add(back, g, p)
        master[i] = p
        if weight is not None:
            weight[i] = _narrow(p, weight)


def _square_loop(values: Any, sums: Any) -> None:
    """Put the sum of squares of the k-th `BLOCK_NUMEL` of `values` (n,) into sums[k], float64."""
    for k in range(sums.size):
        block = values[k * BLOCK_NUMEL : (k + 1) * BLOCK_NUMEL]
        total = 0.0
        for i in range(block.size):  # over the elements themselves it would not become vector code
            wide = np.float64(_widen(block[i]))
            total += wide * wide
        sums[k] = total


def _add_loop(into: Any, other: Any, scale: float) -> None:
    """Add to array `into` (n,); see `HostLoops.add_`."""
    scale_ = np.float32(scale)
    for i in range(into.size):
        into[i] = _narrow(_multiply_add(scale_, _widen(other[i]), _widen(into[i])), into)


def _widen(carried: Any) -> Any:
    """Return an element as fp32: fp32 as it is, int16 as the bf16 whose bits it has, uint16 as the fp16."""
    raise NotImplementedError("compiled code only")


def _narrow(value: Any, array: Any) -> Any:
    """Return fp32 `value` as an element of `array`, rounded to nearest even; the inverse of `_widen`."""
    raise NotImplementedError("compiled code only")


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in fp32, rounded once."""
    raise NotImplementedError("compiled code only")


# --- compilation


@dataclass(frozen=True)
class Loops:
    """The loops above, compiled at the first call with each combination of dtypes; and which dtypes this CPU can read."""

    adamw: Callable[..., None]
    sgd: Callable[..., None]
    square_sums: Callable[..., None]
    add: Callable[..., None]
    dtypes: tuple[torch.dtype, ...] = tuple(CARRIERS)


def _compiled() -> Loops:
    """Return the loops; made once a process.

    Raises:
        ImportError: if numba cannot be imported; says what to install.
    """
    try:
        lock = importlib.import_module("numba.core.compiler_lock").global_compiler_lock
    except ImportError as error:
        raise ImportError(
            f"optimizer state on the host is updated by code that numba compiles, and numba cannot be imported ({error}): "
            f"pip install '{NUMBA}'"
        ) from error
    with lock:  # functools.cache alone would let two threads build
        return _build()


@functools.cache
def _build() -> Loops:
    numba = importlib.import_module("numba")
    _teach(importlib.import_module("numba.extending"), numba.types, importlib.import_module("llvmlite.ir"))
    features = importlib.import_module("llvmlite.binding").get_host_cpu_features()
    lacking = {torch.float16} if features.get("f16c") is False else set()  # it would call a function that nobody linked
    dtypes = tuple(dtype for dtype in CARRIERS if dtype not in lacking)
    return Loops(
        adamw=_jit(numba, _adamw_loop, set()),
        sgd=_jit(numba, _sgd_loop, set()),
        square_sums=_jit(numba, _square_loop, {"reassoc", "contract"}),
        add=_jit(numba, _add_loop, set()),
        dtypes=dtypes,
    )


def _jit(numba: ModuleType, loop: Callable[..., None], fastmath: set[str]) -> Callable[..., None]:
    """Return `loop` compiled on demand, and kept on disk where a folder can be written.

    `error_model` is NumPy's: a division by zero gives inf, not an exception, which would also forbid vector code.
    """
    options: dict[str, Any] = {"nopython": True, "nogil": True, "error_model": "numpy", "fastmath": fastmath or False}
    try:
        return numba.jit(cache=True, **options)(loop)
    except RuntimeError:  # no folder to keep it in: compile in each process
        return numba.jit(**options)(loop)


def _call(loop: Callable[..., None], *arguments: Any) -> None:
    """Call a compiled loop.

    Raises:
        ImportError: if numba cannot compile it: a version that does not know this code, Python or CPU.
    """
    try:
        loop(*arguments)
    except importlib.import_module("numba").errors.NumbaError as error:
        raise ImportError(f"numba cannot compile ftkit's host loops here: pip install '{NUMBA}'\n{error}") from error


def _teach(extending: ModuleType, types: Any, ir: Any) -> None:
    """Teach numba `_widen`, `_narrow` and `_multiply_add`: their types, and the LLVM code of each.

    fp16 is converted by the CPU's own instruction; bf16 is the upper half of fp32.
    """
    f32, f16, i32, i16 = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)

    @extending.type_callable(_widen)
    def type_widen(context: Any) -> Any:
        return lambda carried: types.float32 if carried in (types.float32, types.int16, types.uint16) else None

    @extending.type_callable(_narrow)
    def type_narrow(context: Any) -> Any:
        return lambda value, array: array.dtype if value == types.float32 else None

    @extending.type_callable(_multiply_add)
    def type_multiply_add(context: Any) -> Any:
        return lambda a, b, c: types.float32 if a == b == c == types.float32 else None

    @extending.lower_builtin(_widen, types.float32)
    def widen_fp32(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    @extending.lower_builtin(_widen, types.uint16)
    def widen_fp16(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], f16), f32)

    @extending.lower_builtin(_widen, types.int16)
    def widen_bf16(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(arguments[0], i32), i32(16)), f32)

    @extending.lower_builtin(_narrow, types.float32, types.Array)
    def narrow(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, target = arguments[0], signature.args[1].dtype
        if target == types.float32:
            return value
        if target == types.uint16:
            return builder.bitcast(builder.fptrunc(value, f16), i16)
        return narrow_bf16(builder, value)

    def narrow_bf16(builder: Any, value: Any) -> Any:
        """Add half of the last place, and one less where that bit is even; a NaN keeps its sign and is made quiet."""
        bits = builder.bitcast(value, i32)
        upper = builder.lshr(bits, i32(16))
        half = builder.add(i32(0x7FFF), builder.and_(upper, i32(1)))
        rounded = builder.lshr(builder.add(bits, half), i32(16))
        nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.select(nan, builder.or_(upper, i32(0x40)), rounded), i16)

    @extending.lower_builtin(_multiply_add, types.float32, types.float32, types.float32)
    def multiply_add(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)
