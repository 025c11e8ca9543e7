"""The bytes of checkpoint files in pieces, each with a checksum: written by ranges, read back compared.

The pieces of a file cover it from the first byte of its header to the last of its data. Each is at most `PIECE_BYTES` and
begins at a multiple of 4096, so both ways can go past the page cache (O_DIRECT), of which training wants nothing. A piece
belongs to one rank, the one that wrote it; whoever reads a part of it reads all of it, and not one byte is handed out
before the piece was compared. What a reader of another world size reads twice is two pieces a file.

It refuses a file that is missing, of another size, or changed, by name and bytes. What it costs: a buffer of 8 MiB.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftkit.engine.arena import PAGE_BYTES, Arena
from ftkit.engine.flatfile import word_sum
from ftkit.engine.seal import BrokenCheckpoint, check_size, checksum

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


class PieceBuffer:
    """Room for one piece on a page boundary, shared by files that are read or written one after the other.

    Attributes:
        memory: (PIECE_BYTES,) of uint8. holds: what a reader has left in it.
    """

    def __init__(self) -> None:
        self.memory = Arena(PIECE_BYTES, torch.device("cpu")).take(PIECE_BYTES, torch.uint8)
        self.holds: tuple[PieceReader, int] | None = None


class PieceWriter:
    """Writes one range of an existing file, in order, and notes its pieces.

    Args:
        path: the file. start: first byte of the range, a multiple of 4096.
        buffer: nobody else uses it until this writer is closed.
    """

    def __init__(self, path: Path, start: int, buffer: PieceBuffer) -> None:
        self.path, self.at, self.buffer = path, start, buffer.memory
        buffer.holds = None
        self.handle, self.direct = open_direct(path, os.O_WRONLY)
        self.filled = 0
        self.pieces: list[Piece] = []

    def write(self, values: Tensor) -> None:
        """Append `values` (n,), any dtype and device. Cost: a copy, and the write of each piece that is full."""
        size = values.dtype.itemsize
        done = 0
        while done < values.numel():
            count = min((PIECE_BYTES - self.filled) // size, values.numel() - done)
            place = self.buffer[self.filled : self.filled + count * size].view(values.dtype)
            place.copy_(values[done : done + count].detach())
            done, self.filled = done + count, self.filled + count * size
            if PIECE_BYTES - self.filled < size:
                self._flush()

    def close(self) -> list[Piece]:
        """Write the rest, make all of it durable, and return the pieces."""
        try:
            self._flush()
            os.fsync(self.handle)
        finally:
            os.close(self.handle)
        return self.pieces

    def abandon(self) -> None:
        """Close the file as it is."""
        os.close(self.handle)

    def _flush(self) -> None:
        if not self.filled:
            return
        data = self.buffer[: self.filled].numpy()
        whole = self.filled // PAGE_BYTES * PAGE_BYTES if self.direct else self.filled
        self._transfer(self.handle, data[:whole], self.at)
        if whole < self.filled:  # the end of the file: less than a page
            handle = os.open(self.path, os.O_WRONLY)
            try:
                self._transfer(handle, data[whole:], self.at + whole)
                os.fsync(handle)
            finally:
                os.close(handle)
        self.pieces.append(Piece(self.at, self.at + self.filled, checksum(data)))
        self.at, self.filled = self.at + self.filled, 0

    @staticmethod
    def _transfer(handle: int, data: Any, at: int) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(handle, data[done:], at + done)


def read_back(path: Path, start: int, sums: Sequence[int], piece_bytes: int, buffer: PieceBuffer) -> list[Piece]:
    """Return the pieces of a range that another file gave by reference, compared with that file's sums, and durable.

    Args:
        start: first byte of the range. sums: of the words of each `piece_bytes` of it, one after the other.

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
            data: Any = buffer.memory[: len(own) * piece_bytes].numpy()
            at, got = start + first * piece_bytes, 0
            while got < data.nbytes and (more := os.preadv(handle, [data[got:]], at + got)):
                got += more
            for number, expected in enumerate(own):
                if word_sum(data[number * piece_bytes : (number + 1) * piece_bytes]) != expected:
                    low = at + number * piece_bytes
                    raise BrokenCheckpoint(f"{path}: bytes {low} to {low + piece_bytes} are not what was written to NVMe")
            found.append(Piece(at, at + data.nbytes, checksum(data)))
    finally:
        os.close(handle)
    return found


class PieceReader:
    """Reads ranges of a file, in whole pieces that are compared first.

    Args:
        path: the file. size_bytes: that it must have. pieces: of all of it, as a manifest has them. buffer: to read into.

    Raises:
        BrokenCheckpoint: if the file is missing or has another size, or the pieces do not cover it.
    """

    def __init__(self, path: Path, size_bytes: Any, pieces: Any, buffer: PieceBuffer) -> None:
        self.path = path
        self.pieces = _valid(path, size_bytes, pieces)
        check_size(path, path.parent, size_bytes)
        self.buffer = buffer
        try:
            self.handle, self.direct = open_direct(path, os.O_RDONLY)
        except OSError as error:
            raise BrokenCheckpoint(f"{path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on.

        Raises:
            BrokenCheckpoint: if a piece is not what was written, or the range lies outside the file.
        """
        done = 0
        number = self._find(start)
        while done < len(out):
            if number >= len(self.pieces):
                raise BrokenCheckpoint(f"{self.path}: ends before byte {start + len(out)}")
            piece = self._load(number)
            low = start + done - piece.start
            count = min(piece.stop - piece.start - low, len(out) - done)
            out[done : done + count] = memoryview(self._memory)[low : low + count]
            done, number = done + count, number + 1

    @property
    def _memory(self) -> Any:
        return self.buffer.memory.numpy()

    def check(self, numbers: Sequence[int] | None = None) -> None:
        """Read pieces, all or some, and compare them.

        Raises:
            BrokenCheckpoint: if one is not what was written.
        """
        for number in range(len(self.pieces)) if numbers is None else numbers:
            self._load(number)

    def _find(self, position: int) -> int:
        low, high = 0, len(self.pieces)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.pieces[middle].stop <= position else (low, middle)
        return low

    def _load(self, number: int) -> Piece:
        piece = self.pieces[number]
        if self.buffer.holds == (self, number):
            return piece
        self.buffer.holds = None
        size = piece.stop - piece.start
        wanted = -(-size // PAGE_BYTES) * PAGE_BYTES if self.direct else size
        data = self._memory[:wanted]
        got = 0
        try:
            while got < size:
                before = got
                got += os.preadv(self.handle, [data[got:]], piece.start + got)
                if self.direct and got < size:
                    got -= got % PAGE_BYTES  # a started page is read again
                if got == before:  # cut short meanwhile
                    break
        except OSError as error:
            raise BrokenCheckpoint(f"{self.path}: {error.strerror} between bytes {piece.start} and {piece.stop}") from error
        if got < size or checksum(data[:size]) != piece.checksum:
            raise BrokenCheckpoint(f"{self.path}: bytes {piece.start} to {piece.stop} changed since they were written")
        self.buffer.holds = (self, number)
        return piece


def _valid(path: Path, size_bytes: Any, pieces: Any) -> list[Piece]:
    """Return the pieces of a manifest, which may be anybody's."""
    found: list[Piece] = []
    end = 0
    listed = pieces if isinstance(pieces, list) else []
    for each in listed:
        if not isinstance(each, list) or [type(value) for value in each] != [int, int, str]:
            break
        piece = Piece(*each)
        if piece.start != end or not 0 < piece.stop - piece.start <= PIECE_BYTES or piece.start % PAGE_BYTES:
            break
        found.append(piece)
        end = piece.stop
    if type(size_bytes) is not int or end != size_bytes or not found or len(found) != len(listed):
        raise BrokenCheckpoint(f"{path}: its pieces in the manifest do not cover it")
    return found
