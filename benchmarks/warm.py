"""Brings a machine to rest before something is timed: memory that the host has never given, files that it must fetch first.

A virtual machine's memory is often given by its host at first use, once, at a hundredth of the speed of memory; what was
just written to its drive may come back at a tenth of the drive's rate the first time that it is read. Neither belongs to
what is measured, and whoever comes first would pay for all.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch

from ftkit.engine.memory.arena import Arena

MIB = 1 << 20
PROBE_BYTES = 512 * MIB
BLOCK_BYTES = 8 * MIB
MOST = 0.85
NEARLY = 0.85
"""Of the rate that it can: the drive is at rest."""
PATIENCE_S = 60.0


def warm_memory(size: int | None = None) -> float:
    """Touch so many bytes of memory once, most of what is free for None, and give them back; return GB.

    A guest that reports free pages to its host loses them again within seconds: before what is timed, not once a day.
    """
    size = int(psutil.virtual_memory().available * MOST) if size is None else size
    size = size // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages
    return size / 1e9


def settle(folder: Path, rate: float) -> None:
    """Sync everything, and wait until a file of `folder` is written at nearly `rate` bytes a second."""
    os.sync()
    path, began = folder / f"probe-{os.getpid()}", time.perf_counter()
    with mmap.mmap(-1, BLOCK_BYTES) as memory:
        memory.write(os.urandom(BLOCK_BYTES))
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            while time.perf_counter() - began < PATIENCE_S:
                start = time.perf_counter()
                for at in range(0, PROBE_BYTES, BLOCK_BYTES):
                    os.pwritev(handle, [memory], at)
                if PROBE_BYTES / (time.perf_counter() - start) >= NEARLY * rate:
                    break
        finally:
            os.close(handle)
            path.unlink()


def read_rate(folder: Path) -> float:
    """Return the bytes a second at which a plain O_DIRECT loop reads all files of `folder`, two threads, blocks of 8 MiB.

    Its buffers lie on 2 MiB pages, as ours do: on small ones a drive gives a third of its rate.
    """
    files = [(path, path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()]

    def run(part: int) -> None:
        memory = Arena(BLOCK_BYTES).take(BLOCK_BYTES, torch.uint8).numpy()
        memory[:] = 1
        for path, size in files[part::2]:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
            for at in range(0, size, BLOCK_BYTES):
                os.preadv(handle, [memory], at)
            os.close(handle)

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    return sum(size for _, size in files) / (time.perf_counter() - began)
