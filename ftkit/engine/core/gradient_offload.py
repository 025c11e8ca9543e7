"""Gradient offload: reduced gradients are summed in host memory or on NVMe.

On a GPU a reduction writes its part (S,) to a small device buffer, so that the gradient slot is free when the collective
ends. From there the part is copied to one of two staging buffers in host memory, on the stream `down`. A thread
waits for the copy, adds it to the gradient's store (host arena or file) piece by piece, and computes the squared norm of
the sum in the same pass. It does so at every use, so it need not know which use is the last of a step. Gradient clipping
calls `finish`, which waits for the thread and raises its errors.

On a CPU the part stays in the slot until it is copied. If gradients stay in host memory, they are added at once, without
staging and thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import store_bytes
from ftkit.engine.core.gradient import Measure, ReducedGradient
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import arena_bytes
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.engine.streams import DONE, Event
from ftkit.spec.sizes import OFFLOAD_BUFFERS
from ftkit.spec.tiers import NVME


class OffloadedGradient(ReducedGradient):
    """A gradient that leaves the device after each reduction. Arguments as `Gradient`'s; `connect` completes it."""

    offload: GradientOffload
    total: Store
    squared = 0.0  # the squared norm of `total`
    _part: Tensor | None = None  # (S,), between `reduce` and `leave`

    def connect(self, offload: GradientOffload, total: Store) -> None:
        """Set the offload, and the store (S,) on host or NVMe of the sum."""
        self.offload, self.total, self.memory = offload, total, total.tensor

    @property
    def free(self) -> Event:
        """See `ReducedGradient.free`."""
        return self.offload.left

    def reduce(self, full: Tensor) -> None:
        """See `ReducedGradient.reduce`."""
        self._change()
        self._part = self.offload.place(self, full.dtype) if self.offload.streams.separate else self.flat.own_part(full)
        self.flat.comm.reduce_scatter_mean(self._part, full, self.flat.name)

    def leave(self, reduced: Event) -> None:
        """See `ReducedGradient.leave`."""
        assert self._part is not None
        self.offload.send(self, self._part, reduced, add=self.there)
        self._part, self.there = None, True

    def store(self) -> Store | None:
        """See `Gradient.store`."""
        return self.total if self.there else None

    def square(self, measure: Measure) -> Tensor | float | None:
        """See `Gradient.square`. The thread has computed it."""
        return self._shared(self.squared) if self.there else None

    @property
    def size_bytes(self) -> int:
        """Bytes of the store on any tier."""
        return store_bytes(self.total)


class GradientOffload:
    """Moves one model's reduced gradients off the device.

    Args:
        groups: The gradients of each unit, and of each root parameter.
        tiers: Tiers of this rank.
        host: Computes the sums.
    """

    def __init__(self, groups: Sequence[Sequence[OffloadedGradient]], tiers: Tiers, host: HostLoops) -> None:
        self.device, self.host, self.streams = tiers.device, host, tiers.streams
        self.left: Event = DONE  # after the last copy from the device buffer
        self._starts: dict[OffloadedGradient, int] = {}  # the byte at which a gradient's part begins in the device buffer
        self._buffer: Tensor | None = None
        self.buffer_bytes = 0  # of the device buffer; there is none on a CPU
        for group in groups:
            ends = list(accumulate((arena_bytes([(e.flat.layout.shard_numel, e.slot_dtype)]) for e in group), initial=0))
            self._starts |= dict(zip(group, ends))
            self.buffer_bytes = max(self.buffer_bytes, ends[-1]) if self.streams.separate else 0
        gradients = list(self._starts)
        self.buffers: list[Tensor] = []
        self.jobs: list[Future[None] | None] = [None] * OFFLOAD_BUFFERS
        self.turn = 0
        if gradients and (self.streams.separate or tiers.tier("gradients") == NVME):
            widest = max(each.flat.layout.shard_numel * each.slot_dtype.itemsize for each in gradients)
            arena = tiers.arena(arena_bytes([(widest, torch.uint8)] * OFFLOAD_BUFFERS))
            self.buffers = [arena.take(widest, torch.uint8) for _ in range(OFFLOAD_BUFFERS)]
            self.thread = tiers.worker("ftkit-gradients")

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def device_buffer(self) -> Tensor:
        """Return the device buffer. Allocates it at the first call: evaluation needs none."""
        if self._buffer is None:
            self._buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def place(self, gradient: OffloadedGradient, dtype: torch.dtype) -> Tensor:
        """Return the part (S,) of the device buffer for a gradient."""
        start = self._starts[gradient]
        return self.device_buffer()[start : start + gradient.flat.layout.shard_numel * dtype.itemsize].view(dtype)

    def send(self, gradient: OffloadedGradient, part: Tensor, reduced: Event, *, add: bool) -> None:
        """Put a reduced gradient into its store, or add it there. Waits if both staging buffers are in use.

        Args:
            gradient: The gradient. Its `squared` is set, on the thread.
            part: Its reduced part (S,). On a GPU it may be overwritten after `left`, on a CPU after this call.
            reduced: The event after which the part is complete.
            add: Add to the content of the store.
        """
        if not self.buffers:
            self._add(gradient, part, add=add)
            return
        self._collect(self.turn)
        staging = self.buffers[self.turn][: part.numel() * part.dtype.itemsize].view(part.dtype)
        with self.streams.down.run(reduced, span=f"offload {gradient.flat.name}"):
            staging.copy_(part, non_blocking=True)
        self.left = copied = self.streams.down.mark()

        def work() -> None:
            copied.synchronize()
            self._add(gradient, staging, add=add)

        self.jobs[self.turn] = self.thread.submit(work)
        self.turn = (self.turn + 1) % OFFLOAD_BUFFERS

    def finish(self) -> None:
        """Wait until every gradient is in its store, and raise an error of the thread."""
        for number in range(OFFLOAD_BUFFERS):
            self._collect(number)

    def _collect(self, number: int) -> None:
        job, self.jobs[number] = self.jobs[number], None
        if job is not None:
            job.result()

    def _add(self, gradient: OffloadedGradient, part: Tensor, *, add: bool) -> None:
        store, square = gradient.total, 0.0
        for start, stop in store.pieces():
            piece = store.read(start, stop) if add else store.blank(start, stop)
            if add:
                self.host.add_(piece, part[start:stop])
            else:
                piece.copy_(part[start:stop])
            square += self.host.square_sum(piece[: max(gradient.flat.own_numel - start, 0)])
            store.write(start, piece)
        gradient.squared = square
