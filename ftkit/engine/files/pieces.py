"""The bytes of checkpoint files in pieces, each with a checksum: written by ranges, behind the back of who fills them.

The pieces of a file cover it from the first byte of its header to the last of its data. Each is at most `PIECE_BYTES` and
begins at a multiple of 4096, so both ways can go past the page cache (O_DIRECT), of which training wants nothing. A piece
belongs to one rank, the one that wrote it; how they are read is told in piece_reader.py.

What it costs: two buffers of 8 MiB, of which one is filled while a thread sums and writes the other.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftkit.engine.arena import PAGE_BYTES, Arena
from ftkit.engine.files.flat_file import word_sum
from ftkit.engine.files.sealed_files import BrokenCheckpoint, checksum

PIECE_BYTES = 8 << 20


class Piece(NamedTuple):
    """Bytes [start, stop) of a file, and their checksum."""

    start: int
    stop: int
    checksum: str


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file past the page cache where its file system can; return the handle, and whether it does."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags), False


class WriteBehind:
    """Room for two pieces, and a thread that does one thing after another: it writes one piece while the other is filled.

    Shared by files that are written one after the other; a second thread makes each durable when it is whole, while the
    next is written. What failed in a thread is raised by `hand_over` or `settle`.

    Attributes:
        room: (PIECE_BYTES,) of uint8, on a page boundary: the piece to be filled now.
    """

    def __init__(self) -> None:
        memory = Arena(2 * PIECE_BYTES, torch.device("cpu"))
        self.room, self._other = (memory.take(PIECE_BYTES, torch.uint8) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ftkit-pieces")
        self._ender = ThreadPoolExecutor(1, thread_name_prefix="ftkit-ends")
        self._asked: deque[Future[None]] = deque()
        self._ends: deque[Future[None]] = deque()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()
        self._ender.shutdown()

    def hand_over(self, act: Callable[[], None]) -> None:
        """Let the thread do `act`, which reads `room`; from now on that is the other one.

        Raises:
            OSError: as `settle`; `act` is not done then.
        """
        self._written()
        self._asked.append(self._thread.submit(act))
        self.room, self._other = self._other, self.room

    def end(self, act: Callable[[], None]) -> None:
        """Let the second thread do `act` after all that was handed over before, whether that failed or not."""
        last = self._asked[-1] if self._asked else None

        def after() -> None:
            try:
                if last is not None:
                    last.result()
            finally:
                act()

        self._ends.append(self._ender.submit(after))

    def settle(self) -> None:
        """Wait until all is done, or something failed.

        Raises:
            OSError: of the drive, or whatever else failed first; `give_up` waits for the rest.
        """
        self._written()
        while self._ends:
            self._ends.popleft().result()

    def _written(self) -> None:
        while self._asked:
            self._asked.popleft().result()

    def give_up(self) -> None:
        """Wait until the threads do nothing any more, whatever failed."""
        wait([*self._asked, *self._ends])
        self._asked.clear()
        self._ends.clear()


class PieceWriter:
    """Writes one range of an existing file, in order, and notes its pieces.

    Args:
        path: path of the file.
        start: first byte of the range, a multiple of 4096.
        behind: writes the pieces; nobody else uses its `room` until this writer is closed.

    Attributes:
        pieces: the pieces of the range; the list is whole once `behind` has settled.
    """

    def __init__(self, path: Path, start: int, behind: WriteBehind) -> None:
        self.path, self.at, self.behind = path, start, behind
        self.handle, self.direct = open_direct(path, os.O_WRONLY)
        self.filled = 0
        self.pieces: list[Piece] = []

    def write(self, values: Tensor) -> None:
        """Append `values` (n,), any dtype and device. Cost: a copy; a wait where the drive is slower than that."""
        size = values.dtype.itemsize
        done = 0
        while done < values.numel():
            count = min((PIECE_BYTES - self.filled) // size, values.numel() - done)
            place = self.behind.room[self.filled : self.filled + count * size].view(values.dtype)
            place.copy_(values[done : done + count].detach())
            done, self.filled = done + count, self.filled + count * size
            if PIECE_BYTES - self.filled < size:
                self._flush()

    def room(self, dtype: torch.dtype) -> Tensor:
        """Return the whole room (PIECE_BYTES / itemsize,), to be filled from its beginning; nothing may be in it."""
        assert not self.filled
        return self.behind.room.view(dtype)

    def fill(self, size: int) -> None:
        """Append the first `size` bytes of the room, which `room` gave. Cost: a wait where the drive is slower."""
        self.filled = size
        self._flush()

    def close(self) -> list[Piece]:
        """Take in the last piece; the threads write it, make all durable and end the file. Return `pieces`.

        Raises:
            OSError: of what was written before; the file is open still, to be abandoned.
        """
        self._flush()
        self.behind.end(self._end)
        return self.pieces

    def abandon(self) -> None:
        """Close the file as it is."""
        self.behind.give_up()
        os.close(self.handle)

    def _flush(self) -> None:
        if self.filled:
            data, at = self.behind.room[: self.filled].numpy(), self.at
            self.behind.hand_over(lambda: self._put(data, at))
            self.at, self.filled = self.at + self.filled, 0

    # --- the thread

    def _put(self, data: Any, at: int) -> None:
        whole = data.nbytes // PAGE_BYTES * PAGE_BYTES if self.direct else data.nbytes
        self._transfer(self.handle, data[:whole], at)
        if whole < data.nbytes:  # the end of the file: less than a page
            handle = os.open(self.path, os.O_WRONLY)
            try:
                self._transfer(handle, data[whole:], at + whole)
                os.fsync(handle)
            finally:
                os.close(handle)
        self.pieces.append(Piece(at, at + data.nbytes, checksum(data)))

    def _end(self) -> None:
        try:
            os.fsync(self.handle)
        finally:
            os.close(self.handle)

    @staticmethod
    def _transfer(handle: int, data: Any, at: int) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(handle, data[done:], at + done)


def read_back(
    path: Path,
    start: int,
    sums: Sequence[int],
    piece_bytes: int,
    room: Tensor,
    look: Callable[[int, Tensor], None] = lambda done, data: None,
) -> list[Piece]:
    """Return the pieces of a range that another file gave by reference, compared with that file's sums, and durable.

    Args:
        path: path of the file.
        start: first byte of the range.
        sums: the other file's sums of words (`word_sum`) of each `piece_bytes` of the range, one after the other.
        piece_bytes: bytes of which each sum was made.
        room: (PIECE_BYTES,) of uint8, to read into.
        look: called with the number of bytes that came before and with those read (n,) of uint8; may raise.

    Raises:
        BrokenCheckpoint: if what is read is not what the other file was given. OSError: of the drive.
    """
    found: list[Piece] = []
    handle, _ = open_direct(path, os.O_RDWR)
    try:
        os.fsync(handle)
        together = PIECE_BYTES // piece_bytes
        for first in range(0, len(sums), together):
            own = sums[first : first + together]
            data: Any = room[: len(own) * piece_bytes].numpy()
            at, got = start + first * piece_bytes, 0
            while got < data.nbytes and (more := os.preadv(handle, [data[got:]], at + got)):
                got += more
            for number, expected in enumerate(own):
                if word_sum(data[number * piece_bytes : (number + 1) * piece_bytes]) != expected:
                    low = at + number * piece_bytes
                    raise BrokenCheckpoint(f"{path}: bytes {low} to {low + piece_bytes} are not those written to NVMe")
            look(first * piece_bytes, room[: data.nbytes])
            found.append(Piece(at, at + data.nbytes, checksum(data)))
    finally:
        os.close(handle)
    return found
