"""Shared memory through which CPU ranks of one machine exchange tensors; the process group carries the barriers.

Each rank owns two buffers of `STAGE_BYTES`. For one piece of a tensor it writes its own buffer, waits for all ranks at a
barrier, and reads the others' buffers. The next piece uses the other buffer. A rank that writes a buffer again has passed
the barrier of the piece in between, and so has every reader of the earlier content: one barrier per piece is enough.

Tensors in memory from `share` need no stage: after one barrier, each rank reads the other ranks' tensors directly. The ranks
may still read when an operation returns. The next barrier waits for them, so code that writes such a tensor (the step, a
load, a block's backward) calls `Communicator.await_readers` first.

Shapes: W ranks, S elements per shard.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.engine.comm.shared_memory import machine, map_shared
from ftkit.engine.kernels.host_loops import carried
from ftkit.spec.sizes import STAGE_BYTES

if TYPE_CHECKING:
    from ftkit.engine.comm.communicator import Communicator


class SharedStage:
    """Collectives of the ranks of `group` over `memory`: 2 * W * STAGE_BYTES bytes that all of them have mapped."""

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        self.buffers = torch.frombuffer(memory, dtype=torch.uint8).view(2, world_size, STAGE_BYTES)
        # Shared memory by the address of this rank's part. Tensors keep their mapping, and it ends with the last one.
        self.shared: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
        self.turn = 0
        self.reading = False  # whether ranks may still read tensors from `share`

    def share(self, comm: Communicator, size_bytes: int) -> Tensor | None:
        """See `Communicator.share`."""
        memory = map_shared(comm, self.world_size * size_bytes)
        if memory is None:
            return None
        own = torch.frombuffer(memory, dtype=torch.uint8, offset=self.rank * size_bytes, count=size_bytes)
        self.shared[own.data_ptr()] = memory
        return own

    def _in_place(self, tensor: Tensor) -> Tensor | None:
        """Return the tensors (W, n) of all ranks if `tensor` (n,) is in memory from `share`, else None."""
        for address, memory in self.shared.items():
            start = tensor.data_ptr() - address
            if 0 <= start < len(memory) // self.world_size:
                rows = torch.frombuffer(memory, dtype=torch.uint8).view(self.world_size, -1)
                return rows[:, start : start + tensor.nbytes].view(tensor.dtype)
        return None

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """See `Communicator.all_gather`."""
        rows = full.view(self.world_size, -1)
        own = rows[self.rank].data_ptr() == shard.data_ptr()
        shared = self._in_place(full if own else shard)
        if shared is not None:
            self.meet()
            self.reading = True
            for other in range(self.world_size):
                if not (own and other == self.rank):
                    rows[other].copy_(shared[other].view(self.world_size, -1)[other] if own else shared[other])
            return
        if not own:
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
        """See `Communicator.reduce_scatter_mean`. The sum is made in rank order, in fp32, and rounded once."""
        from ftkit.engine.kernels import numba_loops  # imported late: it takes a second, and many runs reduce nothing here

        rank, world = self.rank, self.world_size
        shared = self._in_place(full)
        if shared is not None:
            self.meet()
            self.reading = True
            numba_loops.mean(carried(shard), tuple(carried(each.view(world, -1)[rank]) for each in shared))
            return
        rows = full.view(world, -1)
        step = STAGE_BYTES // full.element_size() // (world - 1)  # a buffer has the pieces of the other ranks
        for start in range(0, shard.numel(), step):
            stop = min(start + step, shard.numel())
            stage = self._next(full.dtype)
            for other in range(world):
                if other != rank:
                    first = (other - (other > rank)) * step
                    stage[rank, first : first + stop - start].copy_(rows[other, start:stop])
            self.meet()
            firsts = [(rank - (rank > r)) * step for r in range(world)]
            parts = [rows[rank, start:stop] if r == rank else stage[r, firsts[r] :][: stop - start] for r in range(world)]
            numba_loops.mean(carried(shard[start:stop]), tuple(map(carried, parts)))

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
        """Wait until every rank has come here: it has written its piece, and has read the shared tensors."""
        dist.barrier(group=self.group)
        self.reading = False

    def _next(self, dtype: torch.dtype) -> Tensor:
        """Return the buffers of the next piece, shape (W, elements)."""
        self.turn ^= 1
        return self.buffers[self.turn].view(dtype)


def open_stage(comm: Communicator) -> SharedStage | None:
    """Return a stage on all ranks, or None on all if they run on several machines or cannot share memory. A collective."""
    if len(set(comm.all(machine()))) > 1:
        return None
    memory = map_shared(comm, 2 * comm.world_size * STAGE_BYTES)
    return None if memory is None else SharedStage(memory, comm.rank, comm.world_size, comm.group)
