"""Update rules on the host: one pass over memory, on several threads.

On a CPU an optimizer step runs at the speed of memory. AdamW reads the 16-bit gradient, reads and writes the fp32 master
weight and moments, and writes the 16-bit weight: 28 bytes per parameter, nothing twice, and no fp32 copy of the gradient.
torch's fused AdamW needs gradient and weight in fp32, which takes two more passes. SGD has one fp32 moment or none.

`numba_loops.py` has the loops and says which bits they give, and `numba_coded.py` those over 8-bit moments. `FlatKernels`
has the same functions for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftkit.spec.state_forms import GROUP_NUMEL

CARRIERS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
    torch.int16: torch.int16,
    torch.uint8: torch.uint8,
}
"""The dtype in which the loops see a tensor's elements. numba has no bf16 and fp16."""

RANGE_NUMEL = 1 << 16
"""Elements. A thread gets a multiple of this, because starting it takes as long as this much work."""


class HostLoops:
    """Update rules, sums of squares and sums of gradients over CPU tensors.

    Tensors are contiguous, of the same length, and fp32, bf16 or fp16. Methods may be called from any thread and release
    the interpreter lock. Two calls must not overlap on the same tensors.

    Args:
        threads: Threads per call, the caller's included.
    """

    def __init__(self, threads: int) -> None:
        from ftkit.engine.kernels import numba_coded, numba_loops  # imported late: many runs need no numba

        self.threads = threads
        self._loops, self._coded = numba_loops, numba_coded
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
        """Make one step of AdamW in place, and write the new weight.

        Args:
            master: Master weight (n,), fp32, updated.
            gradient: Gradient (n,).
            exp_avg: First moment (n,), fp32, updated.
            exp_avg_sq: Second moment (n,), fp32, updated.
            weight: Receives `master` rounded to nearest even, shape (n,). None if the master is the weight.
            factor: Multiplies the gradient in fp32: clip over loss scale.
            lr: Learning rate.
            beta1: Decay of the first moment, in [0, 1).
            beta2: Decay of the second moment, in [0, 1).
            eps: Added to the root of the second moment.
            weight_decay: Decoupled weight decay, multiplied by `lr`.
            step: Number of the step, 1 at the first.

        Cost: 28 bytes of memory traffic per element with 16-bit gradient and weight.
        Source: Loshchilov and Hutter, arXiv:1711.05101.
        """
        keep, root, rate = 1 - lr * weight_decay, math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
        numbers = factor, keep, 1 - beta1, beta2, 1 - beta2, root, eps, rate
        self._each(self._loops.adamw, (master, gradient, exp_avg, exp_avg_sq, weight), *numbers)

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
        nesterov: bool = False,
    ) -> None:
        """Make one step of SGD in place, and write the new weight. Arguments as in `adamw`, and:

        Args:
            momentum_buffer: Moment (n,), fp32, updated, zeros before the first step. None for SGD without momentum.
            momentum: Multiplies the moment.
            weight_decay: Multiplies the weight, and is added to the gradient.
            nesterov: Whether the step looks ahead by one more moment.

        Cost: 20 bytes of memory traffic per element with momentum and 16-bit gradient and weight, 12 without momentum.
        Source: torch.optim.SGD, without dampening.
        """
        numbers = factor, -lr, momentum, weight_decay, float(nesterov)
        self._each(self._loops.sgd, (master, gradient, momentum_buffer, weight), *numbers)

    def adamw_8bit(
        self,
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
        """Make one step of AdamW with 8-bit moments in place, as `ftkit.engine.optim.coding.adamw_8bit` bit for bit.

        Cost: 16.1 bytes of memory traffic per element with 16-bit gradient and weight, 14.1 with a split master weight.
        """
        keep, root, rate = 1 - lr * weight_decay, math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
        numbers = factor, keep, beta1, 1 - beta1, beta2, 1 - beta2, root, eps, rate
        self._each(self._coded.adamw_8bit, (m_scales, s_scales, master, gradient, m, s, weight, residual), *numbers)

    def lion_8bit(
        self,
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
        """Make one step of Lion with an 8-bit moment in place, as `ftkit.engine.optim.coding.lion_8bit` bit for bit."""
        numbers = factor, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr
        self._each(self._coded.lion_8bit, (m_scales, master, gradient, m, weight, residual), *numbers)

    def encode(self, values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        """Return codes (n,) and scales (n/128,) of `values` (n,), fp32, as `ftkit.engine.optim.coding.encode`."""
        codes = torch.empty_like(values, dtype=torch.uint8)
        scales = values.new_empty(values.numel() // GROUP_NUMEL)
        self._each(self._coded.encode, (scales, values, codes), float(signed))
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        """Return the values (n,), fp32, of codes (n,) and scales (n/128,)."""
        values = torch.empty_like(codes, dtype=torch.float32)
        self._each(self._coded.decode, (scales, values, codes), float(signed))
        return values

    def split(self, master: Tensor, weight: Tensor, residual: Tensor) -> None:
        """Write `master` (n,), fp32, as `weight` (n,), bf16 or fp16, and `residual` (n,), int16.

        See [Note: the split master weight] in `ftkit/engine/optim/coding.py`.
        """
        self._each(self._coded.split, (master, weight, residual))

    def join(self, weight: Tensor, residual: Tensor) -> Tensor:
        """Return the master weight (n,), fp32, of `weight` (n,), bf16 or fp16, and `residual` (n,), int16."""
        master = torch.empty_like(weight, dtype=torch.float32)
        self._each(self._coded.join, (master, weight, residual))
        return master

    def update(self, loop: str, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
        """Make one step of another rule in place, and write the new weight.

        Args:
            loop: Name of the loop in `numba_loops`.
            tensors: Its arrays (n,), in its order.
            numbers: Its numbers.
        """
        self._each(getattr(self._loops, loop), tensors, *numbers)

    def square_sum(self, gradient: Tensor) -> float:
        """Return the sum of squares of `gradient` (n,) in float64. It is inf or nan if an element is.

        Cost: one read of the tensor.
        """
        return self._sum(self._loops.square_sums, (gradient,))

    def ratio_square_sum(self, gradient: Tensor, square: Tensor, *, factor: float, fresh: float, least: float) -> float:
        """Return the sum of g^2 / max(v, least) in float64, with v = (1 - fresh) * square + fresh * g^2.

        Args:
            gradient: Gradient (n,).
            square: Second moment (n,), fp32.
            factor: Multiplies the gradient: g.
            fresh: Weight of g^2 in the second moment.
            least: The second moment counts at least so much.

        Cost: one read of both tensors.
        """
        return self._sum(self._loops.ratio_squares, (gradient, square), factor, 1 - fresh, fresh, least)

    def add_(self, into: Tensor, other: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times `other` (n,) to `into` (n,) in place, in fp32, and round to the dtype of `into`.

        torch's `add_` is as fast for equal dtypes. For others it first widens all of `other`.

        Cost: one read of both tensors, and one write.
        """
        self._each(self._loops.add, (into, other), scale)

    def _sum(self, loop: Callable[..., None], tensors: tuple[Tensor, ...], *numbers: float) -> float:
        """Call a loop that sums blocks of tensors (n,), with the numbers in fp32, and return the sum of all blocks."""
        arrays, narrow = [carried(tensor) for tensor in tensors], tuple(map(np.float32, numbers))
        block = self._loops.BLOCK_NUMEL
        sums = np.zeros(-(-arrays[0].size // block))

        def work(start: int, stop: int) -> None:
            parts = (array[start * block : stop * block] for array in arrays)
            loop(*parts, *([narrow] if narrow else []), sums[start:stop])

        self._share(work, len(sums), 4 * RANGE_NUMEL // block)
        return math.fsum(sums)

    def _each(self, loop: Callable[..., None], tensors: tuple[Tensor | None, ...], *numbers: float) -> None:
        """Call a loop on ranges of tensors (n,), of scales (n/128,), some of them None, and with the numbers in fp32."""
        arrays: list[Any] = [None if tensor is None else carried(tensor) for tensor in tensors]
        narrow = [tuple(map(np.float32, numbers))] if numbers else []
        n = max(array.size for array in arrays if array is not None)

        def part(array: Any, start: int, stop: int) -> Any:
            return None if array is None else array[start * array.size // n : stop * array.size // n]

        def work(start: int, stop: int) -> None:
            loop(*(part(array, start, stop) for array in arrays), *narrow)

        self._share(work, n, RANGE_NUMEL)

    def _share(self, work: Callable[[int, int], None], n: int, grain: int) -> None:
        """Call `work(start, stop)` on ranges that cover [0, n), the first on this thread. Return when all have ended."""
        size = max(1, -(-n // (self.threads * grain))) * grain
        ranges = [(start, min(start + size, n)) for start in range(0, n, size)]
        others = [self._pool.submit(work, start, stop) for start, stop in ranges[1:]]
        for start, stop in ranges[:1]:
            work(start, stop)
        for other in others:
            other.result()


@dataclass(frozen=True)
class FlatKernels:
    """Functions over shards (n,) on the device. The engine depends on torch only, and works without them.

    Args:
        adamw: As `HostLoops.adamw`.
        square_sum: Sum of squares of (n,), a scalar on the device; inf or nan if an element is not finite.
        adamw_8bit: As `HostLoops.adamw_8bit`.
        lion_8bit: As `HostLoops.lion_8bit`.
    """

    adamw: Callable[..., None]
    square_sum: Callable[[Tensor], Tensor]
    adamw_8bit: Callable[..., None]
    lion_8bit: Callable[..., None]


def carried(tensor: Tensor) -> Any:
    """Return a NumPy view (n,) of a tensor in its carrier dtype."""
    return tensor.detach().view(-1).view(CARRIERS[tensor.dtype]).numpy()
