"""Writing checkpoint files in pieces with checksums.

The pieces of a file cover it from the first byte of its header to the last byte of its data. A piece has at most
`PIECE_BYTES`. Where pieces begin at multiples of 4096 bytes, they bypass the page cache (O_DIRECT) if the file system
supports it. Only small files, of scales and plain moments, have others. The rank that writes a piece computes its checksum.
`reader.py` reads them.

Cost: two buffers of 8 MiB. The caller fills one while a thread writes the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftkit.engine.checkpoint.safetensors import write_all
from ftkit.engine.checkpoint.sealed import checksum
from ftkit.engine.memory.arena import PAGE_BYTES, Arena, Window
from ftkit.engine.memory.flat_file import open_direct
from ftkit.spec.sizes import PIECE_BYTES


class Piece(NamedTuple):
    """Bytes [start, stop) of a file, and their checksum."""

    start: int
    stop: int
    checksum: str


class PieceWriter:
    """Writes ranges of existing files, one range after the other.

    `open` begins a range, `write` appends to it, `close` ends it. The thread writes pieces in this order. The next call that
    passes it work, or `settle`, raises its OSError.

    Args:
        pin: Pins the buffers for the device of the values, as in `Arena`.

    Attributes:
        pieces: File name to the pieces written to that file. Complete after `settle`.
    """

    _transfer = staticmethod(write_all)

    def __init__(self, pin: Callable[[Window], int] | None = None) -> None:
        memory = Arena(2 * PIECE_BYTES, pin)
        self._buffer, self._other = (memory.take(PIECE_BYTES, torch.uint8) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ftkit-pieces")
        self._running: Future[None] | None = None
        self._handle: int | None = None
        self._filled = 0  # bytes
        self.pieces: dict[str, list[Piece]] = {}

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()
        if self._handle is not None:  # an error ended the range
            os.close(self._handle)

    def open(self, path: Path, start: int) -> None:
        """Begin a range of file `path` at byte `start`."""
        self._path, self._at = path, start
        aligned = start % PAGE_BYTES == 0
        self._handle, self._direct = open_direct(path, os.O_WRONLY) if aligned else (os.open(path, os.O_WRONLY), False)
        self.pieces.setdefault(path.name, [])

    def write(self, values: Tensor) -> None:
        """Append `values` (n,), any dtype and device. Cost: one copy; waits where the drive is slower."""
        size = values.dtype.itemsize
        done = 0
        while done < values.numel():
            count = min((PIECE_BYTES - self._filled) // size, values.numel() - done)
            place = self._buffer[self._filled : self._filled + count * size].view(values.dtype)
            place.copy_(values[done : done + count].detach())
            done, self._filled = done + count, self._filled + count * size
            if PIECE_BYTES - self._filled < size:
                self._write_buffer()

    def close(self) -> None:
        """End the range. The thread writes the last piece and makes the file durable."""
        self._write_buffer(last=True)
        self._handle = None

    def settle(self) -> None:
        """Wait until everything is written and durable."""
        if self._running is not None:
            self._running.result()

    def _write_buffer(self, *, last: bool = False) -> None:
        """Pass the buffer to the thread, and go on with the other one."""
        handle, data, at, size = self._handle, self._buffer.numpy(), self._at, self._filled
        assert handle is not None
        self.settle()
        self._running = self._thread.submit(self._write, handle, self._path, self._direct, data[:size], at, last)
        self._buffer, self._other = self._other, self._buffer
        self._at, self._filled = self._at + size, 0

    def _write(self, handle: int, path: Path, direct: bool, data: Any, at: int, last: bool) -> None:
        """Write one piece; on the thread."""
        try:
            whole = data.nbytes // PAGE_BYTES * PAGE_BYTES if direct else data.nbytes
            self._transfer(handle, data[:whole], at)
            if whole < data.nbytes:  # the end of the range is shorter than a page
                end = os.open(path, os.O_WRONLY)  # not for reading: another node may write the rest of the page
                try:
                    self._transfer(end, data[whole:], at + whole)
                    os.fsync(end)
                finally:
                    os.close(end)
            if data.nbytes:
                self.pieces[path.name].append(Piece(at, at + data.nbytes, checksum(data)))
            if last:
                os.fsync(handle)
        finally:
            if last:
                os.close(handle)
