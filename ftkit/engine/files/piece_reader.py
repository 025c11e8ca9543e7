"""Reads checkpoint files in the pieces in which they were written (pieces.py), and not one byte of a piece unseen.

Whoever reads a part of a piece reads all of it, and nothing is handed out before the piece was compared with its checksum.
What a reader of another world size reads twice is two pieces a file. Who knows what it will want announces it: a
few threads then read and compare ahead, while the piece before is put where it belongs.

It refuses a file that is missing, of another size, or changed, by name and bytes. What it costs: `SLOTS` pieces of 8 MiB.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.arena import PAGE_BYTES, Arena
from ftkit.engine.files.pieces import PIECE_BYTES, Piece, open_direct
from ftkit.engine.files.sealed_files import BrokenCheckpoint, check_size, checksum

AHEAD = 2
"""Pieces read ahead, each by a thread of its own."""
SLOTS = AHEAD + 1

Key = tuple["PieceReader", int]


class PieceBuffers:
    """Room for pieces, shared by the files of a checkpoint, and the threads that read ahead into it.

    A piece that was handed out stays as it is until the next one is asked for.
    """

    def __init__(self) -> None:
        memory = Arena(SLOTS * PIECE_BYTES, torch.device("cpu"))
        self._free = [memory.take(PIECE_BYTES, torch.uint8) for _ in range(SLOTS)]
        self._held: tuple[Key, Tensor] | None = None  # handed out, and in whose room it lies
        self._expected: deque[Key] = deque()
        self._coming: deque[tuple[Key, Tensor, Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="ftkit-pieces")

    def __enter__(self) -> PieceBuffers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.expect(())
        self._threads.shutdown()

    def expect(self, keys: Iterable[Key]) -> None:
        """Announce (reader, piece number) as they will be asked for, in place of what was announced before."""
        wait([future for _, _, future in self._coming])
        self._free += [room for _, room, _ in self._coming]
        self._coming.clear()
        self._expected = deque(keys)
        self._start()

    def piece(self, reader: PieceReader, number: int) -> Tensor:
        """Return the bytes (n,) of a piece, compared.

        Raises:
            BrokenCheckpoint: if they are not what was written.
        """
        key, size = (reader, number), reader.size_of(number)
        if self._held is not None:
            if self._held[0] == key:
                return self._held[1][:size]
            self._free.append(self._held[1])
            self._held = None
        self._skip_to(key)
        if self._coming:
            _, room, future = self._coming.popleft()
        else:
            room = self._free.pop()
            future = self._threads.submit(reader.load, number, room)
        try:
            future.result()
        except BaseException:
            wait([future])  # or it would still write there
            self._free.append(room)
            raise
        self._held = key, room
        self._start()
        return room[:size]

    def _skip_to(self, key: Key) -> None:
        """Forget what was announced before `key` and not asked for; all that is coming, if `key` was never announced."""
        announced = [each for each, _, _ in self._coming]
        if key in announced:
            while self._coming[0][0] != key:
                _, room, future = self._coming.popleft()
                wait([future])
                self._free.append(room)
        elif self._coming:
            left = deque(self._expected)
            while left and left[0] != key:
                left.popleft()
            self.expect(())
            self._expected = deque(list(left)[1:]) if left else deque()

    def _start(self) -> None:
        """Read ahead: a third piece is the one that was handed out."""
        while self._expected and len(self._coming) < AHEAD:
            reader, number = key = self._expected.popleft()
            room = self._free.pop()
            self._coming.append((key, room, self._threads.submit(reader.load, number, room)))


class PieceReader:
    """Reads ranges of a file, in whole pieces that are compared first.

    Args:
        path: path of the file.
        size_bytes: the size that the file must have.
        pieces: the pieces of the whole file, as a manifest has them.
        buffers: the buffers to read into.

    Raises:
        BrokenCheckpoint: if the file is missing or has another size, or the pieces do not cover it.
    """

    def __init__(self, path: Path, size_bytes: Any, pieces: Any, buffers: PieceBuffers) -> None:
        self.path = path
        self.pieces = _valid(path, size_bytes, pieces)
        check_size(path, path.parent, size_bytes)
        self.buffers = buffers
        try:
            self.handle, self.direct = open_direct(path, os.O_RDONLY)
        except OSError as error:
            raise BrokenCheckpoint(f"{path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; what was announced is forgotten."""
        self.buffers.expect(())
        os.close(self.handle)

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on; raises as `views`."""
        done = 0
        for view in self.views(start, len(out)):
            out[done : done + view.numel()] = memoryview(view.numpy())  # type: ignore[arg-type]  # numpy has the buffer protocol, its stubs do not say so
            done += view.numel()

    def views(self, start: int, size: int) -> Iterator[Tensor]:
        """Yield bytes [start, start + size) as views (n,) of uint8 into pieces, each good until the next is asked for.

        Raises:
            BrokenCheckpoint: if a piece is not what was written, or the range lies outside the file.
        """
        done = 0
        for number in self.numbers(start, size):
            if number >= len(self.pieces):
                raise BrokenCheckpoint(f"{self.path}: ends before byte {start + size}")
            low = start + done - self.pieces[number].start
            count = min(self.size_of(number) - low, size - done)
            yield self.buffers.piece(self, number)[low : low + count]
            done += count

    def numbers(self, start: int, size: int) -> range:
        """Return the numbers of the pieces that have bytes [start, start + size), one too many if the file ends before."""
        if size < 1:
            return range(0)
        return range(self._number(start), self._number(start + size - 1) + 1)

    def size_of(self, number: int) -> int:
        """Return the bytes of a piece."""
        piece = self.pieces[number]
        return piece.stop - piece.start

    def load(self, number: int, room: Tensor) -> None:
        """Read a piece to the beginning of `room`, and compare it; on any thread.

        Raises:
            BrokenCheckpoint: if it is not what was written.
        """
        piece, size = self.pieces[number], self.size_of(number)
        wanted = -(-size // PAGE_BYTES) * PAGE_BYTES if self.direct else size
        data: Any = room[:wanted].numpy()
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

    def _number(self, position: int) -> int:
        return bisect_right(self.pieces, position, key=attrgetter("stop"))


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
