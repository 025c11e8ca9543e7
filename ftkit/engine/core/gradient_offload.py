"""Gradient offload: reduced gradients go to host memory or NVMe, and are added up there.

A reduced gradient (S,) is copied to one of two staging buffers in host memory, on the stream that reduced it. A thread waits
for the copy, adds it to the gradient's store (host arena or file) piece by piece, and takes the squared norm of the sum
while it passes. It does so at every use, so nobody needs to know which use is a step's last. The step's clipping calls
`finish`, which waits for the thread and raises its errors.

A CPU rank whose gradients stay in host memory needs no staging and no thread: the sum is made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from ftkit.engine.arena import Arena, arena_bytes
from ftkit.engine.core.flat_parameter import store_bytes
from ftkit.engine.core.gradient import Measure, ReducedGradient
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.spec.tiers import NVME

BUFFERS = 2


class OffloadedGradient(ReducedGradient):
    """A gradient that leaves the device after each reduction. Arguments as `Gradient`'s; `connect` comes after them."""

    _offload: GradientOffload
    _store: Store

    def connect(self, offload: GradientOffload, store: Store) -> None:
        """Take the way off the device, and the store (S,) on host or NVMe in which the sum is made."""
        self._offload, self._store = offload, store
        self._square: float | None = None

    def _add_reduced(self, full: Tensor) -> None:
        flat, numel = self.flat, self.flat.layout.shard_numel
        part = full[flat.rank * numel : (flat.rank + 1) * numel]
        flat.comm.reduce_scatter_mean(part, full, flat.name)
        self._offload.send(part, self._store, flat.own_numel, self._measured, add=self._there)

    def _measured(self, square: float) -> None:
        self._square = square

    def zero(self) -> None:
        """See `Gradient.zero`."""
        super().zero()
        self._square = None

    def store(self) -> Store | None:
        """See `Gradient.store`."""
        return self._store if self._there else None

    def square(self, measure: Measure) -> Tensor | float | None:
        """See `Gradient.square`; it was taken on the way."""
        return None if self._square is None else self._shared(self._square)

    def tensors(self) -> list[Tensor]:
        """Return the store in host memory; none where it is a file."""
        return [] if self._store.tensor is None else [self._store.tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of the store, wherever it lies."""
        return store_bytes(self._store)


class GradientOffload:
    """The way of one model's gradients off the device.

    Args:
        gradients: the gradients that leave it.
        tiers: says to which tier they go, and on which device they are reduced.
        host: makes the sums.
    """

    def __init__(self, gradients: Sequence[OffloadedGradient], tiers: Tiers, host: HostLoops) -> None:
        self.device = device = tiers.device
        self.host = host
        staged = device.type != "cpu" or tiers.tier("gradients") == NVME
        sizes = [(each.flat.layout.shard_numel, each.slot_dtype) for each in gradients if staged]
        self.buffers: list[Tensor] = []
        self.arena: Arena | None = None
        self.jobs: list[Future[None] | None] = [None] * BUFFERS
        self.turn = 0
        if sizes:
            widest = max(numel * dtype.itemsize for numel, dtype in sizes)
            self.arena = tiers.arena(arena_bytes([(widest, torch.uint8)] * BUFFERS))
            self.buffers = [self.arena.take(widest, torch.uint8) for _ in range(BUFFERS)]
            self.thread = tiers.worker("ftkit-gradients")

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def send(
        self, part: Tensor, store: Store, own_numel: int, measured: Callable[[float], None], *, add: bool
    ) -> None:
        """Add a reduced gradient to a store, or put it there.

        Args:
            part: the reduced gradient (S,); it may be written again once the current stream has got so far.
            store: receives it (S,).
            own_numel: elements of it that are no padding.
            measured: is given the squared norm of the sum, by the thread.
            add: add to what the store holds.

        Cost: a copy off the device; waits if both staging buffers are still in use.
        """
        if not self.buffers:
            measured(self._add(store, part, own_numel, add=add))
            return
        self._collect(self.turn)
        staging = self.buffers[self.turn][: part.numel() * part.dtype.itemsize].view(part.dtype)
        staging.copy_(part, non_blocking=True)
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

        def work() -> None:
            if copied is not None:
                copied.synchronize()
            measured(self._add(store, staging, own_numel, add=add))

        self.jobs[self.turn] = self.thread.submit(work)
        self.turn = (self.turn + 1) % BUFFERS

    def finish(self) -> None:
        """Wait until every gradient is in its store.

        Raises:
            Exception: that of the thread, e.g. of a full disk.
        """
        for number in range(BUFFERS):
            self._collect(number)

    def _collect(self, number: int) -> None:
        job, self.jobs[number] = self.jobs[number], None
        if job is not None:
            job.result()

    def _add(self, store: Store, part: Tensor, own_numel: int, *, add: bool) -> float:
        """Add `part` (S,) to `store` (S,), or put it there; return the squared norm of its first `own_numel` elements."""
        square = 0.0
        for start, stop in store.pieces():
            piece = store.read(start, stop) if add else store.blank(start, stop)
            if add:
                self.host.add_(piece, part[start:stop])
            else:
                piece.copy_(part[start:stop])
            square += self.host.square_sum(piece[: max(own_numel - start, 0)])
            store.write(start, piece)
        return square
