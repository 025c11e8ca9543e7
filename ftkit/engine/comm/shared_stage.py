"""Shared memory through which CPU ranks of one machine pass tensors.

gloo moves about 1 GB/s between two ranks of a machine where a copy moves 25. The process group only carries the barriers.
"""

from __future__ import annotations

import mmap
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from ftkit.engine.comm.ledger import HEADER_BYTES, Ledger

STAGE_BYTES = 4 << 20
"""Bytes of one of the two halves of a rank's shared-memory stage: larger than a barrier is worth, small enough for L3."""


class Ranks(Protocol):
    """The ranks that share a stage: a `Communicator`."""

    @property
    def ledger(self) -> Ledger:
        """The collectives that this rank has entered."""

    def meet(self) -> None:
        """Wait until every rank has come here."""

    def differs(self) -> NoReturn:
        """Raise that the ranks have come to different collectives."""


def stage_bytes(world_size: int) -> int:
    """Return the bytes that a stage needs."""
    return 2 * world_size * (HEADER_BYTES + STAGE_BYTES)


class SharedStage:
    """A window of shared memory through which the CPU ranks of one machine pass large tensors, piece by piece.

    Each rank owns two halves of `STAGE_BYTES`. For one piece it writes its own half, meets the others at a barrier, and
    reads theirs. The next piece uses the other half: a rank that writes a half again has passed the barrier of the piece
    in between, and so has every reader of the old content. One barrier a piece is therefore enough.

    With its first piece each rank shows the number and the name of its collective, in a place that changes with the halves.

    Args:
        rank: this rank among those that share the memory.
        world_size: number of ranks that share it.
        memory: memory that all of them have mapped; headers begin at byte `start`, and the halves follow.
        start: first byte of the headers in `memory`.
    """

    def __init__(self, rank: int, world_size: int, memory: mmap.mmap, start: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.memory, self.headers = memory, start
        size = 2 * world_size
        window = torch.frombuffer(memory, dtype=torch.uint8, count=size * STAGE_BYTES, offset=start + size * HEADER_BYTES)
        self.halves = window.view(2, world_size, STAGE_BYTES)
        self.turn = 0
        self.compared = 0

    def all_gather(self, comm: Ranks, full: Tensor, shard: Tensor) -> None:
        """See `Communicator.all_gather`."""
        rank, world = self.rank, self.world_size
        rows = full.view(world, -1)
        if rows[rank].data_ptr() != shard.data_ptr():
            rows[rank].copy_(shard)
        step = STAGE_BYTES // full.element_size()
        for start in range(0, shard.numel(), step):
            stop = min(start + step, shard.numel())
            stage = self._next(full.dtype)
            stage[rank, : stop - start].copy_(shard[start:stop])
            self.meet(comm)
            for other in range(world):
                if other != rank:
                    rows[other, start:stop].copy_(stage[other, : stop - start])

    def reduce_scatter_mean(self, comm: Ranks, shard: Tensor, full: Tensor) -> None:
        """See `Communicator.reduce_scatter_mean`. The sum is made in rank order, in fp32."""
        rank, world = self.rank, self.world_size
        rows = full.view(world, -1)
        step = STAGE_BYTES // full.element_size() // world
        for start in range(0, shard.numel(), step):
            stop = min(start + step, shard.numel())
            stage = self._next(full.dtype)[:, : step * world].view(world, world, step)
            for other in range(world):
                if other != rank:
                    stage[rank, other, : stop - start].copy_(rows[other, start:stop])
            self.meet(comm)
            parts = [rows[rank, start:stop] if r == rank else stage[r, rank, : stop - start] for r in range(world)]
            total = parts[0].float()
            if total.data_ptr() == parts[0].data_ptr():
                total = total.clone()
            for part in parts[1:]:
                total.add_(part)
            torch.div(total, world, out=total)
            shard[start:stop].copy_(total)

    def sum(self, comm: Ranks, numbers: Tensor) -> None:
        """Replace `numbers` by their sum over ranks, made in rank order."""
        width, flat = STAGE_BYTES // numbers.element_size(), numbers.reshape(-1)
        for start in range(0, flat.numel(), width):
            piece = flat[start : start + width]
            stage = self._next(piece.dtype)
            stage[self.rank, : piece.numel()].copy_(piece)
            self.meet(comm)
            piece.copy_(stage[0, : piece.numel()])
            for other in range(1, self.world_size):
                piece.add_(stage[other, : piece.numel()])
        if flat.data_ptr() != numbers.data_ptr():
            numbers.copy_(flat.view_as(numbers))

    def barrier(self, comm: Ranks) -> None:
        """Wait until every rank has come here."""
        self._next(torch.uint8)
        self.meet(comm)

    def meet(self, comm: Ranks) -> None:
        """Wait until every rank has written its piece, and see that it is of the same collective.

        Raises:
            UserError: if it is not.
        """
        ledger = comm.ledger
        if self.compared == ledger.entered:
            comm.meet()
        else:
            self.compared = ledger.entered
            header = ledger.header()
            self._write_header(header)
            comm.meet()
            base = self.headers + self.turn * self.world_size * HEADER_BYTES
            if self.memory[base : base + self.world_size * HEADER_BYTES] != header * self.world_size:
                comm.differs()

    def _write_header(self, header: bytes) -> None:
        at = self.headers + (self.turn * self.world_size + self.rank) * HEADER_BYTES
        self.memory[at : at + HEADER_BYTES] = header

    def _next(self, dtype: torch.dtype) -> Tensor:
        """Return the half to use now, (W, elements) of `dtype`."""
        self.turn ^= 1
        return self.halves[self.turn].view(dtype)
