"""Shared memory through which CPU ranks of one machine exchange tensors; the process group carries the barriers.

Each rank owns two buffers of `STAGE_BYTES`. For one piece of a tensor it writes its own buffer, waits for all ranks at a
barrier, and reads the others' buffers. The next piece uses the other buffer. A rank that writes a buffer again has passed
the barrier of the piece in between, and so has every reader of the earlier content: one barrier per piece is enough.

Shapes: W ranks, S elements per shard.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ftkit.engine.comm.communicator import Communicator

STAGE_BYTES = 4 << 20
"""Bytes of one buffer: large enough that a barrier costs little beside the copy, small enough for the L3 cache."""


class SharedStage:
    """Collectives of the ranks of `group` over `memory`: 2 * W * STAGE_BYTES bytes that all of them have mapped."""

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        self.buffers = torch.frombuffer(memory, dtype=torch.uint8).view(2, world_size, STAGE_BYTES)
        # Every sum uses this memory: page faults of new memory would take half as long as the sum.
        self.total = torch.empty(STAGE_BYTES // 2 // world_size, dtype=torch.float32)
        self.turn = 0

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """See `Communicator.all_gather`."""
        rows = full.view(self.world_size, -1)
        if rows[self.rank].data_ptr() != shard.data_ptr():
            rows[self.rank].copy_(shard)
        step = STAGE_BYTES // full.element_size()
        for start in range(0, shard.numel(), step):
            stop = min(start + step, shard.numel())
            stage = self._next(full.dtype)
            stage[self.rank, : stop - start].copy_(shard[start:stop])
            self.meet()
            for other in range(self.world_size):
                if other != self.rank:
                    rows[other, start:stop].copy_(stage[other, : stop - start])

    def reduce_scatter_mean(self, shard: Tensor, full: Tensor) -> None:
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
            self.meet()
            parts = [rows[rank, start:stop] if r == rank else stage[r, rank, : stop - start] for r in range(world)]
            total = self.total[: stop - start].copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
            torch.div(total, world, out=total)
            shard[start:stop].copy_(total)

    def all_reduce_mean(self, full: Tensor) -> None:
        """See `Communicator.all_reduce_mean`. The sum is made in rank order, in fp32."""
        shard_numel = full.numel() // self.world_size
        even, rest = full[: shard_numel * self.world_size], full[shard_numel * self.world_size :]
        if shard_numel:
            shard = even[self.rank * shard_numel : (self.rank + 1) * shard_numel]
            self.reduce_scatter_mean(shard, even)
            self.all_gather(even, shard)
        if rest.numel():
            total = rest.float()
            self.sum(total)
            rest.copy_(total.div_(self.world_size))

    def sum(self, numbers: Tensor) -> None:
        """Replace `numbers` (n,) by their sums over ranks, made in rank order."""
        step = STAGE_BYTES // numbers.element_size()
        for piece in numbers.view(-1).split(step):
            stage = self._next(piece.dtype)[:, : piece.numel()]
            stage[self.rank].copy_(piece)
            self.meet()
            piece.copy_(stage[0])
            for other in range(1, self.world_size):
                piece.add_(stage[other])

    def meet(self) -> None:
        """Wait until every rank has written its piece."""
        dist.barrier(group=self.group)

    def _next(self, dtype: torch.dtype) -> Tensor:
        """Return the buffers of the next piece, shape (W, elements)."""
        self.turn ^= 1
        return self.buffers[self.turn].view(dtype)


def open_stage(comm: Communicator) -> SharedStage | None:
    """Return a stage on all ranks, or None on all if they run on several machines or /dev/shm is full. A collective."""
    size = 2 * comm.world_size * STAGE_BYTES
    one_machine = len(set(comm.all(machine()))) == 1
    path, memory = None, None
    with ExitStack() as until_mapped:  # removes the file; the mappings keep its memory
        if comm.rank == 0 and one_machine:
            with suppress(OSError):
                file = until_mapped.enter_context(tempfile.NamedTemporaryFile(prefix="ftkit-", dir="/dev/shm"))
                os.posix_fallocate(file.fileno(), 0, size)  # a write to a full tmpfs would raise SIGBUS
                path = file.name
        path = comm.same(path)
        if path is not None:
            with suppress(OSError), open(path, "r+b") as shared:
                memory = mmap.mmap(shared.fileno(), size)
        everywhere = all(comm.all(memory is not None))
    return SharedStage(memory, comm.rank, comm.world_size, comm.group) if memory is not None and everywhere else None


def machine() -> tuple[str, str]:
    """Return an identity that ranks share if they can share memory: the booted kernel and its network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        return str(os.getpid()), ""
