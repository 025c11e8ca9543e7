"""Flat files: shards on an NVMe drive, read and written asynchronously.

A file contains one shard without a header: element i is at byte i * itemsize. A request is cut into blocks of 16 MiB. Two
threads move the blocks with preadv and pwritev, which release the interpreter lock, and O_DIRECT bypasses the page cache.
From buffers on 2 MiB pages (`arena.py`) this is as fast as plain O_DIRECT loops (`make bench-disk`).

The files are scratch: they are not synced, and have no checksums. A failed request raises `DiskError` from `wait`.

O_DIRECT needs tensors that begin at a page, and ranges that begin and end at multiples of 4096 bytes. Shards, arenas and
`ftkit.spec.sizes.PIECE_NUMEL` satisfy this.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftkit.errors import UserError

BLOCK_BYTES = 16 << 20
"""Bytes of one system call."""

THREADS = 2
"""System calls in flight."""

ADVICE = "Check that memory.nvme_dir is a writable folder on a local drive with free space, and look for errors in dmesg"

Bytes = npt.NDArray[np.uint8]


class DiskError(UserError):
    """The NVMe tier could not store or return data. The message names the file."""


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DiskError` that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"NVMe tier: cannot {doing} {path}: {error.strerror or error}. {ADVICE}") from error


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file with O_DIRECT where its file system supports it; return the handle, and whether it is direct."""
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, flags), False


class DiskThreads(ThreadPoolExecutor):
    """The threads that move blocks of one rank's files.

    Attributes:
        moved: Bytes moved so far, by "reading" and by "writing". Change it under the lock `counting`.
    """

    def __init__(self) -> None:
        super().__init__(THREADS, "ftkit-disk")
        self.moved = {"reading": 0, "writing": 0}
        self.counting = threading.Lock()


class Request:
    """A read or write in flight. Its tensor must not be used, or changed, before `wait` returns."""

    def __init__(self, blocks: Sequence[Future[None]]) -> None:
        self._blocks = blocks

    def wait(self) -> None:
        """Wait for all blocks.

        Raises:
            DiskError: A block was not moved.
        """
        wait(self._blocks)  # before an error leaves: other blocks may still use the tensor
        for block in self._blocks:
            block.result()


@dataclass(eq=False)
class FlatFile:
    """One shard on disk, shape (numel,). Made by `Disk.file`.

    Requests on disjoint ranges run in any order. A range must not be written while it is read or written.
    """

    path: Path
    numel: int
    dtype: torch.dtype
    handle: int
    threads: DiskThreads

    def read(self, start: int, out: Tensor) -> Request:
        """Start reading elements [start, start + n) into `out` (n,): contiguous, on the CPU, at a page."""
        return self._request(os.preadv, start, out, "reading")

    def write(self, start: int, values: Tensor) -> Request:
        """Start writing `values` (n,), as `out` in `read`, to elements [start, start + n)."""
        return self._request(os.pwritev, start, values, "writing")

    def _request(self, call: Callable[..., int], start: int, tensor: Tensor, doing: str) -> Request:
        data: Bytes = tensor.detach().view(torch.uint8).numpy()
        first = start * self.dtype.itemsize
        blocks = [(data[low : low + BLOCK_BYTES], first + low) for low in range(0, data.nbytes, BLOCK_BYTES)]
        return Request([self.threads.submit(self._transfer, call, block, at, doing) for block, at in blocks])

    def _transfer(self, call: Callable[[int, Sequence[Any], int], int], data: Bytes, start: int, doing: str) -> None:
        """Move all of `data` from or to byte `start` on. The system may move less per call than was asked."""
        done = 0
        while done < data.nbytes:
            with explained(f"finish {doing}", self.path):
                moved = call(self.handle, [data[done:]], start + done)
            if moved == 0:
                raise DiskError(f"NVMe tier: {doing} {self.path}: the file ends at byte {start + done}. {ADVICE}")
            done += moved
        with self.threads.counting:
            self.threads.moved[doing] += done
