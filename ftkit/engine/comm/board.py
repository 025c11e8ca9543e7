"""Where ranks read each other's signs of life: shared memory on one machine, a store of rank 0 on several.

Neither needs the process group, so it can be read while collectives stand still, and by any launcher's ranks. A rank
publishes about once a second, from a thread; nobody waits for anybody. The contents are JSON and integers, never pickles.

Cost: `SLOT_BYTES` of shared memory a rank; or one port on rank 0's machine, and some hundred bytes a second a rank.
"""

from __future__ import annotations

import atexit
import mmap
import struct
import threading
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store

SLOT_BYTES = 32 << 10
"""Room of one rank's record: its course takes 16 KiB."""

LINGER_BEATS = 4
"""Beats for which a server's end is put off: each rank looks at rank 0's record once a beat."""

_HEAD = struct.Struct("<QII")


class Board(Protocol):
    """What all ranks write to and read.

    Attributes:
        served: rank 0 serves the records, so that none can be read once it has ended.
    """

    served: bool

    def publish(self, data: bytes) -> None:
        """Show `data` to the others as this rank's newest record."""

    def read(self) -> list[tuple[int, bytes] | None]:
        """Return of each rank how often it has published, and the newest record; None where there is none to read."""

    def entered(self, rank: int) -> int | None:
        """Return how many collectives a rank has entered by now, where that can be seen."""

    def close(self) -> None:
        """Let go of what it uses."""


class SharedBoard:
    """Records in shared memory.

    Args:
        memory: memory that all ranks have mapped; at least `SLOT_BYTES` a rank, from its start.
        rank: this rank in the group.
        world_size: number of ranks.
    """

    served = False

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int) -> None:
        self.memory = memory
        self.rank, self.world_size = rank, world_size
        self.beats = 0

    def publish(self, data: bytes) -> None:
        """See `Board`."""
        data = data[: SLOT_BYTES - _HEAD.size - 8]
        start = self.rank * SLOT_BYTES
        self.beats += 1
        head = _HEAD.pack(self.beats, len(data), zlib.crc32(data))
        self.memory[start : start + _HEAD.size + len(data)] = head + data

    def read(self) -> list[tuple[int, bytes] | None]:
        """See `Board`. A record that is being written is None this time."""
        return [self._read(rank * SLOT_BYTES) for rank in range(self.world_size)]

    def _read(self, start: int) -> tuple[int, bytes] | None:
        slot = self.memory[start : start + SLOT_BYTES]
        beats, size, checksum = _HEAD.unpack_from(slot)
        data = slot[_HEAD.size : _HEAD.size + size]
        return (beats, data) if beats and zlib.crc32(data) == checksum else None

    def counter(self) -> memoryview:
        """Return the place (1,) where this rank counts its collectives."""
        end = (self.rank + 1) * SLOT_BYTES
        return memoryview(self.memory)[end - 8 : end].cast("Q")

    def entered(self, rank: int) -> int | None:
        """See `Board`."""
        end = (rank + 1) * SLOT_BYTES
        return int.from_bytes(self.memory[end - 8 : end], "little")

    def close(self) -> None:
        """See `Board`: the memory goes with its last user."""


class StoreBoard:
    """Records in a store that rank 0 serves. A thread talks to it: a stopped server would block whoever asks.

    Rank 0 serves on when its model goes, and at its process's end until the others know of that: a few beats at most.

    Args:
        store: a connection that nothing else uses.
        rank: this rank in the group.
        world_size: number of ranks.
        beat_s: seconds between two exchanges.
    """

    served = True

    def __init__(self, store: Store, rank: int, world_size: int, beat_s: float) -> None:
        self.rank = rank
        self._shared = _Exchange(store, rank, world_size, beat_s)
        threading.Thread(target=self._shared.run, name="ftkit-board", daemon=True).start()
        if rank == 0:
            atexit.register(self._shared.linger)  # which keeps the store until then

    def publish(self, data: bytes) -> None:
        """See `Board`. It is sent within a beat."""
        self._shared.own = data
        self._shared.soon.set()

    def read(self) -> list[tuple[int, bytes] | None]:
        """See `Board`: as of the last exchange."""
        self._shared.wanted = time.monotonic()
        return list(self._shared.seen)

    def entered(self, rank: int) -> int | None:
        """See `Board`: nobody can see that elsewhere."""
        return None

    def close(self) -> None:
        """See `Board`: the thread ends after its next exchange, which sends the last record."""
        self._shared.closed = time.monotonic()
        self._shared.over = True
        self._shared.soon.set()


class _Exchange:
    """What the thread of a `StoreBoard` shares with it."""

    def __init__(self, store: Store, rank: int, world_size: int, beat_s: float) -> None:
        self.store, self.rank, self.beat_s = store, rank, beat_s
        self.seen: list[tuple[int, bytes] | None] = [None] * world_size
        self.own = b""
        self.over = False
        self.closed = 0.0
        self.wanted = 0.0
        self.soon = threading.Event()

    def run(self) -> None:
        beats = 0
        self.store.set_timeout(timedelta(seconds=10))
        while True:
            self.soon.wait()
            self.soon.clear()
            over = self.over
            beats += 1
            try:
                self.store.set(str(self.rank), _HEAD.pack(beats, over, 0) + self.own)  # type: ignore[arg-type]  # takes bytes
                wanted = range(len(self.seen)) if time.monotonic() - self.wanted < 5 * self.beat_s else (0,)
                for rank in () if over else wanted:  # rank 0's always: once it ends nobody has long to look at it
                    if (told := self._look_up(rank)) is not None:
                        self.seen[rank] = _HEAD.unpack_from(told)[0], told[_HEAD.size :]
            except RuntimeError:  # the server is gone or stopped; whoever reads `seen` finds it silent
                pass
            if over:
                return

    def _look_up(self, rank: int) -> bytes | None:
        """Return what the store has of a rank: beats, whether it is the last record, nothing, and the record."""
        return self.store.get(str(rank)) if self.store.check([str(rank)]) else None

    def linger(self) -> None:
        """Wait until all others have had time to look up rank 0's last record, or have sent their own last one."""
        while self.over and time.monotonic() < self.closed + LINGER_BEATS * self.beat_s:
            with suppress(RuntimeError):
                found = [self._look_up(rank) for rank in range(len(self.seen))]
                if all(told is not None and _HEAD.unpack_from(told)[1] for told in found):
                    return
            time.sleep(self.beat_s / 10)
