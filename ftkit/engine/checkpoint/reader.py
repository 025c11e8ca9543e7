"""Reading checkpoint files in the pieces in which they were written. No byte is used before its piece is verified.

A range is read in whole pieces, so resharding rereads at most two pieces per file. A reader that knows its order announces
it; two threads then read and verify ahead, while the caller copies the piece before.

Cost: `AHEAD` + 1 buffers of 8 MiB.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.checkpoint.manifest import SUFFIX
from ftkit.engine.checkpoint.pieces import Piece
from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint, check_size, checksum
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import PAGE_BYTES, Arena
from ftkit.engine.memory.flat_file import open_direct
from ftkit.spec.sizes import PIECE_BYTES
from ftkit.spec.state_forms import GROUP_NUMEL

AHEAD = 2
"""Pieces that are read ahead, each by its own thread."""

Key = tuple["CheckedFile", int]
"""A file, and the number of a piece."""
Places = dict[tuple[str, str], "CheckedFile"]
"""Kind and tensor name to the file that has the tensor."""


class PieceBuffers:
    """Buffers for pieces, shared by the files of a checkpoint, and the threads that read ahead. A context manager."""

    def __init__(self) -> None:
        memory = Arena((AHEAD + 1) * PIECE_BYTES)
        self._current, *self._free = (memory.take(PIECE_BYTES, torch.uint8) for _ in range(AHEAD + 1))
        self._key: Key | None = None  # of the piece in `_current`
        self._expected: deque[Key] = deque()
        self._coming: deque[tuple[Key, Tensor, Future[None]]] = deque()
        self._threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="ftkit-pieces")

    def __enter__(self) -> PieceBuffers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.expect(())
        self._threads.shutdown()

    def expect(self, keys: Iterable[Key]) -> None:
        """Announce pieces in the order of use. This replaces earlier announcements."""
        wait([future for _, _, future in self._coming])
        self._free += [buffer for _, buffer, _ in self._coming]
        self._coming.clear()
        self._expected = deque(keys)
        self._read_ahead()

    def piece(self, file: CheckedFile, number: int) -> Tensor:
        """Return the verified bytes (n,) of a piece, valid until the next call. A piece out of turn is read at once."""
        key = file, number
        if self._key != key:
            self._key = None
            if self._coming and self._coming[0][0] == key:
                _, buffer, future = self._coming.popleft()
                self._free.append(self._current)
                self._current = buffer
                wait([future])
                self._read_ahead()
                future.result()
            else:
                file.load(number, self._current)
            self._key = key
        piece = file.pieces[number]
        return self._current[: piece.stop - piece.start]

    def _read_ahead(self) -> None:
        while self._expected and self._free:
            file, number = key = self._expected.popleft()
            buffer = self._free.pop()
            self._coming.append((key, buffer, self._threads.submit(file.load, number, buffer)))


class CheckedFile(TensorFile):
    """A safetensors file of a checkpoint, open for reading. Reading raises BrokenCheckpoint if a piece was changed.

    Args:
        path: Path of the file.
        size_bytes: Size that the file must have.
        pieces: Its pieces in the manifest.
        buffers: Buffers to read into. They stay open longer than the file.

    Raises:
        BrokenCheckpoint: The file is missing or has another size, or the pieces do not cover it.
    """

    def __init__(self, path: Path, size_bytes: Any, pieces: Any, buffers: PieceBuffers) -> None:
        self.pieces = _valid(path, size_bytes, pieces)
        self.buffers = buffers
        check_size(path, path.parent, size_bytes)
        super().__init__(path)

    def _open(self, flags: int) -> int:
        aligned = all(piece.start % PAGE_BYTES == 0 for piece in self.pieces)
        handle, self.direct = open_direct(self.path, flags) if aligned else (os.open(self.path, flags), False)
        return handle

    def close(self) -> None:
        """Close the file, and forget announcements."""
        self.buffers.expect(())
        super().close()

    def chunks(self, start: int, size: int, itemsize: int) -> Iterator[Tensor]:
        """Yield bytes as `TensorFile.chunks` does: views of pieces, each valid until the next one."""
        if size and start % itemsize:  # the file of buffers has several dtypes: torch views no element that begins there
            yield torch.cat([chunk.clone() for chunk in self.chunks(start, size, 1)])
            return
        end = start + size
        while start < end:
            number = self._number(start)
            piece = self.pieces[number]
            stop = min(end, piece.stop)
            yield self.buffers.piece(self, number)[start - piece.start : stop - piece.start]
            start = stop

    def keys(self, name: str, start: int, numel: int) -> Iterator[Key]:
        """Yield the pieces, for `PieceBuffers.expect`, that have elements [start, start + numel) of tensor `name`."""
        entry = self.entries[name]
        if entry.dtype is not None and numel:
            first = entry.offset + start * entry.dtype.itemsize
            last = first + numel * entry.dtype.itemsize - 1
            yield from ((self, number) for number in range(self._number(first), self._number(last) + 1))

    def load(self, number: int, buffer: Tensor) -> None:
        """Read a piece to the beginning of `buffer` and verify it; on any thread."""
        piece = self.pieces[number]
        size = piece.stop - piece.start
        wanted = -(-size // PAGE_BYTES) * PAGE_BYTES if self.direct else size
        data: Any = buffer[:wanted].numpy()
        got = 0
        try:
            while got < size and (count := os.preadv(self._handle, [data[got:]], piece.start + got)):
                got += count
        except OSError as error:
            raise BrokenCheckpoint(f"{self.path}: {error.strerror} between bytes {piece.start} and {piece.stop}") from error
        if got < size or checksum(data[:size]) != piece.checksum:
            raise BrokenCheckpoint(f"{self.path}: bytes {piece.start} to {piece.stop} changed since they were written")

    def _number(self, position: int) -> int:
        return bisect_right(self.pieces, position, key=attrgetter("stop"))


class CodedFile:
    """A moment of one tensor in 8 bits, read as fp32. Call `read_scales` for a range before `read`.

    A range may begin and end inside a group: a tensor that was in a block need not be in one now.

    Args:
        codes: File with the codes. Its tensor has whole groups.
        scales: File with the scales.
        name: Name of the tensor.
        root: The codes have the square roots of the values, without a sign.
        host: Loops that decode.
    """

    def __init__(self, codes: CheckedFile, scales: CheckedFile, name: str, *, root: bool, host: HostLoops) -> None:
        self.codes, self.scales, self.name, self.root, self.host = codes, scales, name, root, host
        self.keys = codes.keys

    def scale_keys(self, start: int, numel: int) -> Iterator[Key]:
        """Yield the pieces that `read_scales` asks for."""
        first, last = _groups(start, numel)
        yield from self.scales.keys(self.name, first, last - first)

    def read_scales(self, start: int, numel: int) -> None:
        """Read the scales of elements [start, start + numel)."""
        self._first, last = _groups(start, numel)
        self._found = torch.empty(last - self._first)
        self.scales.read(self.name, self._first, self._found)

    def release(self) -> None:
        """Free the scales."""
        del self._found

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,) fp32 with elements [start, start + n)."""
        first, last = _groups(start, out.numel())
        codes = torch.empty((last - first) * GROUP_NUMEL, dtype=torch.uint8)
        self.codes.read(name, first * GROUP_NUMEL, codes)
        scales = self._found[first - self._first : last - self._first]
        values = self.host.decode(codes, scales, signed=not self.root)[start - first * GROUP_NUMEL :][: out.numel()]
        out.copy_(values.square_() if self.root else values)


def _groups(start: int, numel: int) -> tuple[int, int]:
    """Return the groups [first, last) that have elements [start, start + numel)."""
    return start // GROUP_NUMEL, -(-(start + numel) // GROUP_NUMEL)


@contextmanager
def open_files(
    folder: Path, manifest: dict[str, Any], kinds: Collection[str] | None = None
) -> Iterator[tuple[PieceBuffers, Places]]:
    """Open the files of a checkpoint with this manifest, of some kinds (None: of all); yield their buffers and places."""
    places: Places = {}
    with ExitStack() as stack:
        buffers = stack.enter_context(PieceBuffers())
        for name, (size_bytes, pieces) in sorted(manifest["files"].items()):
            kind = name.removesuffix(SUFFIX).rpartition(".")[2]
            if kinds is None or kind in kinds:
                file = stack.enter_context(CheckedFile(folder / name, size_bytes, pieces, buffers))
                places.update({(kind, tensor): file for tensor in file.entries})
        yield buffers, places


def _valid(path: Path, size_bytes: Any, listed: Any) -> list[Piece]:
    """Return the pieces that a manifest, which is untrusted, lists for a file. They cover it without gaps."""
    pieces: list[Piece] = []
    end = 0
    for each in listed if isinstance(listed, list) else ():
        valid = isinstance(each, list) and [type(value) for value in each] == [int, int, str]
        if not valid or each[0] != end or not 0 < each[1] - end <= PIECE_BYTES:
            break
        pieces.append(Piece(*each))
        end = each[1]
    if not pieces or len(pieces) != len(listed) or type(size_bytes) is not int or end != size_bytes:
        raise BrokenCheckpoint(f"{path}: its pieces in the manifest do not cover it")
    return pieces
