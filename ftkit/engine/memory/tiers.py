"""The three places where a rank's shards may lie: on the device, in host memory, in files on NVMe.

[Note: what lies where]   S elements a line and rank (flat_parameter.py); each kind has a tier of its own

    parameters   (S,)   compute dtype    device | host | nvme   stage 3 only below the device
    gradients    (S,)   gradient dtype   device | host | nvme   stage 2 and 3 only below the device
    state        (S,)   fp32 each        device | host | nvme   master weight and moments
    kept         inputs of blocks        device | host | nvme   from forward to backward (activation_offload.py)

A `Store` is one shard of one kind. In memory it is a tensor and is read and written in place. In a file it is read and
written in pieces, whose checksums are compared; nobody holds all of it. Whoever walks a store asks for its `pieces` and
gets the same code for all three tiers.

On a CPU rank device and host are the same memory; the host tier then still has arenas of exact size. This file knows
bytes and places, nothing of training.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ftkit.engine import threads
from ftkit.engine.arena import Arena, arena_bytes
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.files.flat_file import PIECE_NUMEL, FlatFile, Request
from ftkit.engine.memory.disk import BLOCK_BYTES, DEPTHS, Disk
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, Tier

WORTH_MEASURING_BYTES = 1 << 30
"""Less than this on NVMe is there and back in a second, whatever the block size and depth."""


class Store(Protocol):
    """One shard of one kind (S,), wherever it lies."""

    tier: Tier
    numel: int
    dtype: torch.dtype

    @property
    def tensor(self) -> Tensor | None:
        """The whole shard, where it is in memory."""

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges [start, stop) in which it is read and written."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return one of the `pieces`: a view of the shard, or a copy of its own."""

    def blank(self, start: int, stop: int) -> Tensor:
        """Return room for one of the `pieces`, to be overwritten whole: what `read` returns, without reading."""

    def write(self, start: int, piece: Tensor) -> None:
        """Put a piece that `read` or `blank` returned, and that was changed, where it belongs."""

    def send(self, start: int, piece: Tensor) -> Request | None:
        """Start to `write`; return what to wait for, None where the piece is there."""


class MemoryStore:
    """A shard in memory: on the device, or in an arena of the host."""

    def __init__(self, tensor: Tensor, tier: Tier) -> None:
        self.tensor: Tensor = tensor
        self.tier: Tier = tier
        self.numel, self.dtype = tensor.numel(), tensor.dtype

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the one range that there is."""
        yield 0, self.numel

    def read(self, start: int, stop: int) -> Tensor:
        """Return a view."""
        return self.tensor[start:stop]

    def blank(self, start: int, stop: int) -> Tensor:
        """Return a view, whatever is in it."""
        return self.tensor[start:stop]

    def write(self, start: int, piece: Tensor) -> None:
        """Do nothing: the piece is the shard."""

    def send(self, start: int, piece: Tensor) -> None:
        """Do nothing."""


class FileStore:
    """A shard in a file of the NVMe tier."""

    tier: Tier = NVME
    tensor = None

    def __init__(self, file: FlatFile) -> None:
        self.file = file
        self.numel, self.dtype = file.numel, file.dtype

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of `PIECE_NUMEL` elements, the last one shorter."""
        for start in range(0, self.numel, PIECE_NUMEL):
            yield start, min(start + PIECE_NUMEL, self.numel)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy in host memory. Cost: waits for the disk."""
        piece = aligned_empty(stop - start, self.dtype)
        self.file.read(start, piece).wait()
        return piece

    def blank(self, start: int, stop: int) -> Tensor:
        """Return uninitialised host memory."""
        return aligned_empty(stop - start, self.dtype)

    def write(self, start: int, piece: Tensor) -> None:
        """Write the piece. Cost: waits for the disk."""
        self.send(start, piece).wait()

    def send(self, start: int, piece: Tensor) -> Request:
        """Start writing the piece, which must not change until that is done."""
        return self.file.write(start, piece)


def aligned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor (n,) at a multiple of 4096 bytes, as direct reads and writes need."""
    raw = torch.empty(numel * dtype.itemsize + 4096, dtype=torch.uint8)
    skip = -raw.data_ptr() % 4096
    return raw[skip : skip + numel * dtype.itemsize].view(dtype)


class Tiers:
    """Where one rank's bytes lie.

    Args:
        device: where the rank computes.
        strategy: says the tier of each kind.
        disk: disk of the NVMe tier, where anything is placed there.
    """

    def __init__(self, device: torch.device, strategy: Strategy, disk: Disk | None = None) -> None:
        if strategy.uses_nvme and disk is None:
            raise ValueError("something is placed on NVMe and no folder is given")
        self.device = device
        self.strategy = strategy
        self.disk = disk
        self.arenas: dict[str, Arena] = {}

    @classmethod
    def open(
        cls,
        comm: Communicator,
        strategy: Strategy,
        nvme_dir: str | Path | None = None,
        expected_bytes: int | None = None,
    ) -> Tiers:
        """Open the tiers that a strategy names; every rank calls this.

        Args:
            comm: the ranks.
            strategy: says the tier of each kind.
            nvme_dir: folder of the NVMe tier.
            expected_bytes: roughly the bytes that this rank will keep there; the drive is measured only where that is worth
                its two seconds. None always measures.

        Raises:
            UserError: if something is placed on NVMe and the folder is missing or cannot be written.
        """
        if not strategy.uses_nvme:
            return cls(comm.device, strategy)
        if nvme_dir is None:
            raise UserError("something is placed on the NVMe tier and no folder is named: set memory.nvme_dir")
        run = comm.same(secrets.token_hex(5))  # not torch's random numbers: two runs of one seed must not meet
        little = expected_bytes is not None and expected_bytes < WORTH_MEASURING_BYTES
        likely = {"depth": DEPTHS[0], "block_bytes": BLOCK_BYTES[0]} if little else {}
        disk = Disk(Path(nvme_dir), f"{run}-rank{comm.rank}", **likely)
        return cls(comm.device, strategy, disk)

    def arena(self, size_bytes: int, *, huge: bool = True) -> Arena:
        """Return new host memory; all that the engine's shards and staging have of it comes through here. See `Arena`."""
        return Arena(size_bytes, self.device, huge=huge)

    def worker(self, name: str) -> Executor:
        """Return a new thread for transfers behind the computation. It begins on this rank's device."""
        return threads.worker(name, self.device)

    def tier(self, kind: str) -> Tier:
        """Return the tier of a kind of tensor."""
        return self.strategy.tier(kind)

    def state_tiers(self, sizes: Sequence[int]) -> list[Tier]:
        """Return the tier of each line's state: of a state on NVMe, lines stay in host memory as far as they fit.

        The first come first, because they are wanted first: the drive has the whole forward for the others.

        Args:
            sizes: bytes of each line's state on this rank, in the order in which they are updated.
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
        """Take the room for all stores of a kind, exactly: one arena, or bytes of the disk.

        Args:
            kind: one of `ftkit.spec.tiers.KINDS`.
            sizes: (elements, dtype) of each store that will be made.
            tier: the tier that gives the room; None takes the one where the strategy has the kind.

        Raises:
            UserError: if the disk has less room.
        """
        if not sizes:
            return
        tier = tier or self.tier(kind)
        if tier == HOST:
            self.arenas[kind] = self.arena(arena_bytes(sizes))
        elif tier == NVME:
            assert self.disk is not None
            self.disk.reserve(sum(numel * dtype.itemsize for numel, dtype in sizes))

    def make(self, kind: str, name: str, numel: int, dtype: torch.dtype, tier: Tier | None = None) -> Store:
        """Return a new store of zeros; its room was reserved.

        Args:
            kind: one of `ftkit.spec.tiers.KINDS`.
            name: name of the store, unique on this rank.
            numel: elements of the store.
            dtype: dtype of the store.
            tier: the tier on which its room was reserved; None takes the one where the strategy has the kind.
        """
        tier = tier or self.tier(kind)
        if tier == HOST:
            return MemoryStore(self.arenas[kind].take(numel, dtype), HOST)
        if tier == NVME:
            assert self.disk is not None
            return FileStore(self.disk.file(name, numel, dtype))
        if kind == "state" and self.device.type == "cpu":  # large, and not touched before somebody writes there
            own = self.arena(arena_bytes([(numel, dtype)]), huge=False)
            return MemoryStore(own.take(numel, dtype), DEVICE)
        return MemoryStore(torch.zeros(numel, dtype=dtype, device=self.device), DEVICE)

    def host_bytes(self) -> dict[str, int]:
        """Return the bytes of each arena."""
        return {kind: arena.requested_bytes for kind, arena in self.arenas.items()}

    def close(self) -> None:
        """End the disk's threads and remove its files."""
        if self.disk is not None:
            self.disk.close()
