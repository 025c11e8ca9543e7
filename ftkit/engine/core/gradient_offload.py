"""Gradient offload: reduced gradients are summed in host memory or on NVMe.

A reduced gradient (S,) is copied to one of two staging buffers in host memory, on the stream that reduced it. A thread
waits for the copy, adds it to the gradient's store (host arena or file) piece by piece, and computes the squared norm of
the sum in the same pass. It does so at every use, so it need not know which use is the last of a step. Gradient clipping
calls `finish`, which waits for the thread and raises its errors.

A CPU rank whose gradients stay in host memory adds them at once, without staging and thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    _offload: GradientOffload
    _store: Store

    def connect(self, offload: GradientOffload, store: Store) -> None:
        """Set the offload, and the store (S,) on host or NVMe of the sum."""
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
        """See `Gradient.square`. The thread has computed it."""
        return self._shared(self._square) if self._there and self._square is not None else None

    def tensors(self) -> list[Tensor]:
        """Return the store if it is in host memory."""
        return [] if self._store.tensor is None else [self._store.tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of the store on any tier."""
        return store_bytes(self._store)


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

    def send(self, part: Tensor, store: Store, own_numel: int, measured: Callable[[float], None], *, add: bool) -> None:
        """Put a reduced gradient into a store, or add it there. Waits if both staging buffers are in use.

        Args:
            part: Reduced gradient (S,). It may be overwritten on the current stream after this call.
            store: Receives the gradient, shape (S,).
            own_numel: Elements of the shard without padding.
            measured: Receives the squared norm of the sum, on the thread.
            add: Add to the content of the store.
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
        """Wait until every gradient is in its store, and raise an error of the thread."""
        for number in range(BUFFERS):
            self._collect(number)

    def _collect(self, number: int) -> None:
        job, self.jobs[number] = self.jobs[number], None
        if job is not None:
            job.result()

    def _add(self, store: Store, part: Tensor, own_numel: int, *, add: bool) -> float:
        """Add `part` (S,) to `store`, or put it there. Return the squared norm of the first `own_numel` elements."""
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
