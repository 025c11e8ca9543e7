"""Brings a machine to rest before something is timed: memory that the host has never given, a drive that still writes.

A virtual machine's memory is often given by its host at first use, once, at a hundredth of the speed of memory; a drive
that has just been written to may read at a tenth of its rate for half a minute. Neither belongs to what is measured, and
whoever comes first would pay for all.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import psutil

MIB = 1 << 20
PROBE_BYTES = 512 * MIB
BLOCK_BYTES = 8 * MIB
NEARLY = 0.85
"""Of the best rate that a probe has shown: the drive is at rest."""
PATIENCE_S = 60.0


def warm_memory(share: float = 0.85) -> float:
    """Touch `share` of the free memory once, and give it back; return GB."""
    size = int(psutil.virtual_memory().available * share) // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages
    return size / 1e9


class Drive:
    """Asks a drive whether it is at rest, by reading a file of its own.

    Args:
        folder: on the drive; the file is removed by `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"probe-{os.getpid()}"
        self.memory = mmap.mmap(-1, BLOCK_BYTES)
        self.memory.write(os.urandom(BLOCK_BYTES))
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        for at in range(0, PROBE_BYTES, BLOCK_BYTES):
            os.pwritev(self.handle, [self.memory], at)
        os.fsync(self.handle)
        self.best = 0.0

    def rest(self) -> float:
        """Sync everything and wait until the drive reads as it can; return the seconds that took."""
        os.sync()
        began = time.perf_counter()
        steady = 0
        while steady < 2 and time.perf_counter() - began < PATIENCE_S:
            start = time.perf_counter()
            for at in range(0, PROBE_BYTES, BLOCK_BYTES):
                os.preadv(self.handle, [self.memory], at)
            rate = PROBE_BYTES / (time.perf_counter() - start)
            self.best = max(self.best, rate)
            steady = steady + 1 if rate >= NEARLY * self.best else 0
        return time.perf_counter() - began

    def close(self) -> None:
        """Remove the file."""
        os.close(self.handle)
        self.path.unlink()
