"""Gradient offload: reduced gradients are summed in host memory or on NVMe.

A reduced gradient (S,) is copied to one of two staging buffers in host memory, on the stream that reduced it. A thread
waits for the copy, adds it to the gradient's store (host arena or file) piece by piece, and computes the squared norm of
the sum in the same pass. It does so at every use, so it need not know which use is the last of a step. Gradient clipping
calls `finish`, which waits for the thread and raises its errors.

A CPU rank whose gradients stay in host memory adds them at once, without staging and thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import store_bytes
from ftkit.engine.core.gradient import Measure, ReducedGradient
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import arena_bytes
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.spec.tiers import NVME

BUFFERS = 2
"""Staging buffers, each as wide as the widest gradient shard."""


class OffloadedGradient(ReducedGradient):
    """A gradient that leaves the device after each reduction. Arguments as `Gradient`'s; `connect` completes it."""

    offload: GradientOffload
    total: Store
    squared = 0.0  # the squared norm of `total`

    def connect(self, offload: GradientOffload, total: Store) -> None:
        """Set the offload, and the store (S,) on host or NVMe of the sum."""
        self.offload, self.total, self.memory = offload, total, total.tensor

    def _destination(self, full: Tensor) -> Tensor:
        return self.flat.own_part(full)

    def _sum(self, part: Tensor) -> None:
        self.offload.send(self, part, add=self.there)

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
    """Moves one model's reduced gradients off the device. `host` computes their sums."""

    def __init__(self, gradients: Sequence[OffloadedGradient], tiers: Tiers, host: HostLoops) -> None:
        self.device = tiers.device
        self.host = host
        self.buffers: list[Tensor] = []
        self.jobs: list[Future[None] | None] = [None] * BUFFERS
        self.turn = 0
        if gradients and (self.device.type != "cpu" or tiers.tier("gradients") == NVME):
            widest = max(each.flat.layout.shard_numel * each.slot_dtype.itemsize for each in gradients)
            arena = tiers.arena(arena_bytes([(widest, torch.uint8)] * BUFFERS))
            self.buffers = [arena.take(widest, torch.uint8) for _ in range(BUFFERS)]
            self.thread = tiers.worker("ftkit-gradients")

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def send(self, gradient: OffloadedGradient, part: Tensor, *, add: bool) -> None:
        """Put a reduced gradient into its store, or add it there. Waits if both staging buffers are in use.

        Args:
            gradient: The gradient. Its `squared` is set, on the thread.
            part: Its reduced part (S,). It may be overwritten on the current stream after this call.
            add: Add to the content of the store.
        """
        if not self.buffers:
            self._add(gradient, part, add=add)
            return
        self._collect(self.turn)
        staging = self.buffers[self.turn][: part.numel() * part.dtype.itemsize].view(part.dtype)
        staging.copy_(part, non_blocking=True)
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

        def work() -> None:
            if copied is not None:
                copied.synchronize()
            self._add(gradient, staging, add=add)

        self.jobs[self.turn] = self.thread.submit(work)
        self.turn = (self.turn + 1) % BUFFERS

    def finish(self) -> None:
        """Wait until every gradient is in its store, and raise an error of the thread."""
        for number in range(BUFFERS):
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
