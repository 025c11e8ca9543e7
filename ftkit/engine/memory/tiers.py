"""Tiers: where a rank's shards are stored. Device memory, host memory, or files on NVMe.

[Note: the tiers of a flat parameter]   S elements per flat parameter and rank; each kind has a tier of its own

    parameters   (S,)   compute dtype    device | host | nvme   host and nvme need stage 3
    gradients    (S,)   gradient dtype   device | host | nvme   host and nvme need stage 2 or 3
    state        (S,)   fp32 each        device | host | nvme   master weight and moments
    inputs of recomputed blocks          device | host | nvme   from forward to backward (activation_offload.py)

A `Store` is one shard of one kind. In memory it is a tensor, read and written in place. In a file it is read and written
in pieces. Code that iterates over `pieces` works for all tiers.

On a CPU rank device and host are the same memory. Parameters on the device tier are in memory that the ranks of a machine
share (`Communicator.share`), so that a gather reads them in place. "full parameters" are the full copies of resident ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory.arena import PAGE_BYTES, Arena, arena_bytes
from ftkit.engine.memory.disk import Disk
from ftkit.engine.memory.flat_file import FlatFile
from ftkit.engine.streams import Streams, streams_of
from ftkit.errors import UserError
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.strategy import Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, Tier

SHARED = ("parameters", "full parameters")
"""Kinds that CPU ranks of a machine read in place from each other, on the device tier."""


class MemoryStore:
    """A shard (S,) in device memory, or in an arena on the host. Its one piece is the tensor itself."""

    def __init__(self, tensor: Tensor, *, on_host: bool = False) -> None:
        self.tensor, self.on_host = tensor, on_host
        self.numel, self.dtype = tensor.numel(), tensor.dtype

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges [start, stop) in which the shard is read and written."""
        yield 0, self.numel

    def read(self, start: int, stop: int) -> Tensor:
        """Return a piece: a view of the shard."""
        return self.tensor[start:stop]

    def blank(self, start: int, stop: int) -> Tensor:
        """Return memory for a piece that will be overwritten: as `read`, without reading."""
        return self.tensor[start:stop]

    def write(self, start: int, piece: Tensor) -> None:
        """Store a piece that came from `read` or `blank`. In memory it is stored already."""


class FileStore:
    """A shard (S,) in a file of the NVMe tier, in pieces of `PIECE_NUMEL` elements."""

    tensor = None
    on_host = True

    def __init__(self, file: FlatFile) -> None:
        self.file = file
        self.numel, self.dtype = file.numel, file.dtype

    def pieces(self) -> Iterator[tuple[int, int]]:
        """See `MemoryStore.pieces`."""
        for start in range(0, self.numel, PIECE_NUMEL):
            yield start, min(start + PIECE_NUMEL, self.numel)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of a piece."""
        piece = self.blank(start, stop)
        self.file.read(start, piece).wait()
        return piece

    def blank(self, start: int, stop: int) -> Tensor:
        """See `MemoryStore.blank`. O_DIRECT needs memory that begins at a page."""
        size = (stop - start) * self.dtype.itemsize
        raw = torch.empty(size + PAGE_BYTES, dtype=torch.uint8)
        skip = -raw.data_ptr() % PAGE_BYTES
        return raw[skip : skip + size].view(self.dtype)

    def write(self, start: int, piece: Tensor) -> None:
        """Store a piece, and wait for the drive."""
        self.file.write(start, piece).wait()


Store = MemoryStore | FileStore
"""One shard of one kind, on any tier."""


class Pieces(Protocol):
    """A shard (S,) that is read and written in pieces: a `Store`, or state of another form that is seen as fp32."""

    numel: int
    dtype: torch.dtype

    def pieces(self) -> Iterator[tuple[int, int]]:
        """See `MemoryStore.pieces`."""

    def read(self, start: int, stop: int) -> Tensor:
        """See `MemoryStore.read`."""

    def blank(self, start: int, stop: int) -> Tensor:
        """See `MemoryStore.blank`."""

    def write(self, start: int, piece: Tensor) -> None:
        """See `MemoryStore.write`."""


class Tiers:
    """The tiers of one rank.

    Args:
        device: Device that the rank computes on.
        strategy: Names the tier of each kind.
        disk: Disk of the NVMe tier if the strategy uses it.
        comm: The ranks with which CPU ranks share their parameters. None: no ranks.
        streams: The rank's streams. None: new ones.
    """

    def __init__(
        self,
        device: torch.device,
        strategy: Strategy,
        disk: Disk | None = None,
        comm: Communicator | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.device = device
        self.streams = streams or streams_of(device)
        self.strategy = strategy
        self.disk = disk
        self.comm = comm
        self.arenas: dict[str, Arena] = {}

    @classmethod
    def open(
        cls, comm: Communicator, strategy: Strategy, nvme_dir: str | Path | None = None, streams: Streams | None = None
    ) -> Tiers:
        """Open the tiers that a strategy uses. A collective."""
        if not strategy.uses_nvme:
            return cls(comm.device, strategy, comm=comm, streams=streams)
        if nvme_dir is None:
            raise UserError("the NVMe tier needs a folder: set memory.nvme_dir")
        run = comm.same(secrets.token_hex(5))  # not torch's random numbers: two runs may have the same seed
        return cls(comm.device, strategy, Disk(Path(nvme_dir), f"{run}-rank{comm.rank}"), comm, streams)

    def arena(self, size_bytes: int) -> Arena:
        """Return new host memory for shards or staging; see `Arena`."""
        return Arena(size_bytes, self.streams.pin)

    def worker(self, name: str) -> Executor:
        """Return a new thread, on this rank's device, for transfers behind the computation."""
        return self.streams.worker(name)

    def tier(self, kind: str) -> Tier:
        """Return the tier of a kind of tensor."""
        return self.strategy.tier(kind)

    def state_tiers(self, sizes: Sequence[int]) -> list[Tier]:
        """Return the tier of each flat parameter's optimizer state.

        A state on NVMe stays in host memory as far as it fits. The first flat parameters come first: they are needed first,
        and the drive has the whole forward pass for the others. `sizes` has the bytes of each state on this rank.
        """
        tier = self.tier("state")
        if tier != NVME:
            return [tier] * len(sizes)
        left = decided(self.strategy.state_host_bytes)
        tiers: list[Tier] = []
        for size in sizes:
            tiers.append(HOST if size <= left else NVME)
            left -= size if size <= left else 0
        return tiers

    def reserve(self, kind: str, sizes: Sequence[tuple[int, torch.dtype]], tier: Tier | None = None) -> None:
        """Reserve one arena for all stores of a kind, if they are in host memory or are parameters that CPU ranks share.

        A collective for parameters.

        Args:
            kind: One of `ftkit.spec.tiers.KINDS`, or "full parameters": resident ones, on the device tier.
            sizes: (elements, dtype) of each store.
            tier: Tier of the stores; None takes the strategy's. Other stores reserve nothing.
        """
        tier = tier or self.tier(kind)
        if sizes and tier == HOST:
            self.arenas[kind] = self.arena(arena_bytes(sizes))
        if sizes and tier == DEVICE and kind in SHARED and self.comm is not None:
            shared = self.comm.share(arena_bytes(sizes))
            if shared is not None:
                self.arenas[kind] = Arena(len(shared), memory=shared)

    def make(self, kind: str, name: str, numel: int, dtype: torch.dtype, tier: Tier | None = None) -> Store:
        """Return a new store (numel,) of zeros. Its memory was reserved. Its name is unique on this rank."""
        tier = tier or self.tier(kind)
        if tier == NVME:
            assert self.disk is not None
            return FileStore(self.disk.file(name, numel, dtype))
        if kind in self.arenas:
            return MemoryStore(self.arenas[kind].take(numel, dtype), on_host=tier == HOST)
        if kind == "state" and not self.streams.separate:  # an arena takes no memory before the first step
            return MemoryStore(self.arena(arena_bytes([(numel, dtype)])).take(numel, dtype))
        return MemoryStore(torch.zeros(numel, dtype=dtype, device=self.device))

    def close(self) -> None:
        """End the disk's threads and remove its files."""
        if self.disk is not None:
            self.disk.close()
