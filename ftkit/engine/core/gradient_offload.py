"""Where gradients leave the device: one copy off it, then added up and measured behind the computation's back.

A reduced gradient (S,) is copied to one of two staging buffers in host memory, on the stream that reduced it; a thread
waits for the copy, adds it to the line's store (host arena or file) piece by piece, and takes the squared norm of the sum
while it passes. The norm is taken anew at every contribution, so nobody needs to know which one is a step's last. The
step's clipping asks `finish`, which waits for the thread and raises what went wrong in it.

A CPU rank whose gradients stay in host memory needs no staging and no thread: the sum is made at once.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from ftkit.engine.arena import Arena, arena_bytes
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.spec.tiers import NVME

BUFFERS = 2


class Drain:
    """Moves one model's gradients below the device.

    Args:
        flats: the lines whose gradients leave it.
        tiers: says to which tier they go, and on which device they are reduced.
        host: makes the sums.
    """

    def __init__(self, flats: list[FlatParameter], tiers: Tiers, host: HostLoops) -> None:
        self.device = device = tiers.device
        self.host = host
        staged = device.type != "cpu" or tiers.tier("gradients") == NVME
        sizes = [(flat.layout.shard_numel, flat.slot_dtype) for flat in flats if staged]
        self.buffers: list[Tensor] = []
        self.arena: Arena | None = None
        self.jobs: list[Future[None] | None] = [None] * BUFFERS
        self.turn = 0
        if sizes:
            widest = max(numel * dtype.itemsize for numel, dtype in sizes)
            self.arena = tiers.arena(arena_bytes([(widest, torch.uint8)] * BUFFERS))
            self.buffers = [self.arena.take(widest, torch.uint8) for _ in range(BUFFERS)]
            self.thread = tiers.worker("ftkit-drain")

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def take(self, flat: FlatParameter, part: Tensor, *, add: bool) -> None:
        """Add a reduced gradient `part` (S,) to the line's store, or put it there; `part` is free when its stream is.

        Cost: a copy off the device; waits if both staging buffers are still in use.
        """
        store = flat.gradient
        assert store is not None
        if not self.buffers:
            flat.square = self._add(store, part, flat.own_numel, add=add)
            return
        self._collect(self.turn)
        staging = self.buffers[self.turn][: part.numel() * part.dtype.itemsize].view(part.dtype)
        staging.copy_(part, non_blocking=True)
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

        def work() -> None:
            if copied is not None:
                copied.synchronize()
            flat.square = self._add(store, staging, flat.own_numel, add=add)

        self.jobs[self.turn] = self.thread.submit(work)
        self.turn = (self.turn + 1) % BUFFERS

    def finish(self) -> None:
        """Wait until every gradient is where it belongs.

        Raises:
            Exception: what went wrong on the way, e.g. a full disk.
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
