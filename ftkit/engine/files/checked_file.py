"""The safetensors files of a checkpoint, of which not a byte is used before its piece was compared.

They refuse what `TensorFile` and `PieceReader` refuse. What they cost: the buffers that they share (piece_reader.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from ftkit.engine.files.manifest import SUFFIX
from ftkit.engine.files.piece_reader import Key, PieceBuffers, PieceReader
from ftkit.engine.files.storage import TensorFile


class CheckedFile(TensorFile):
    """One of them, open.

    Args:
        path: path of the file.
        size_bytes: the size that the file must have.
        pieces: the pieces of the whole file, as a manifest has them.
        buffers: the buffers to read into.
    """

    def __init__(self, path: Path, size_bytes: Any, pieces: Any, buffers: PieceBuffers) -> None:
        self.reader = PieceReader(path, size_bytes, pieces, buffers)
        try:
            super().__init__(path)
        except BaseException:
            self.reader.close()
            raise

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorFile.read`. Cost: one copy, from where the drive has put it."""
        entry = self.entries[name]
        if entry.dtype is None or entry.offset % entry.dtype.itemsize:  # no view of it can be taken
            super().read(name, start, out)
            return
        size, done = entry.dtype.itemsize, 0
        for view in self.reader.views(entry.offset + start * size, out.numel() * size):
            values = view.view(entry.dtype)
            out[done : done + values.numel()].copy_(values)
            done += values.numel()

    def fill(self, position: int, out: bytearray) -> bool:
        """See `TensorFile.fill`."""
        self.reader.read(position, memoryview(out))
        return True

    def keys(self, name: str, start: int, numel: int) -> Iterator[Key]:
        """Yield what `PieceBuffers.expect` wants of elements [start, start + numel) of tensor `name`."""
        entry = self.entries[name]
        if entry.dtype is not None:
            size = entry.dtype.itemsize
            for number in self.reader.numbers(entry.offset + start * size, numel * size):
                yield self.reader, number

    def close(self) -> None:
        """Close the file."""
        self.reader.close()
        super().close()


Places = dict[tuple[str, str], CheckedFile]


def open_files(
    folder: Path,
    manifest: dict[str, Any],
    buffers: PieceBuffers,
    stack: ExitStack,
    kinds: Collection[str] | None = None,
) -> Places:
    """Open a checkpoint's files until `stack` closes; return for each (kind, tensor name) the one that has it.

    Args:
        folder: the checkpoint's folder.
        manifest: its manifest, which lists the files with their sizes and pieces.
        buffers: buffers to read into; they stay open for longer than the files.
        stack: closes the files when it ends.
        kinds: kinds of the files that are opened; None opens all.

    Raises:
        BrokenCheckpoint: if one is missing or of another size.
    """
    places: Places = {}
    for name, (size_bytes, pieces) in sorted(manifest["files"].items()):
        kind = name.removesuffix(SUFFIX).rpartition(".")[2]
        if kinds is not None and kind not in kinds:
            continue
        file = CheckedFile(folder / name, size_bytes, pieces, buffers)
        stack.callback(file.close)
        places.update({(kind, tensor): file for tensor in file.entries})
    return places
