"""Where bytes lie in files: safetensors read and written by ranges of elements, never whole.

A line's file is a valid safetensors file whose data section *is* the flat parameter: the JSON header is padded with spaces
so that data begins at byte 4096 or a multiple of it, and the tensors follow in model order without gaps. Any rank of
any world can therefore read or write elements [a, b) of any tensor with one seek. Files that others made (hub folders)
are read by the same reader, whatever their order.

A file from a stranger is not trusted: that it is a regular file, the header's length, its JSON, every dtype, shape and
offset are checked against the file's size before the first element is read. As the format has it, the tensors cover the
data without gap or overlap, and no name comes twice. Nothing here knows training.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.files.finite import refuse_not_finite
from ftkit.errors import UserError

DATA_START = 4096
"""Bytes. The data section begins at a multiple of this."""

HEADER_LIMIT_BYTES = 100 << 20
"""The format's own limit on its header."""

MOST_DIMENSIONS = 64
"""As torch has it: the product of more is a number that only a hostile header asks for."""

PIECE_BYTES = 8 << 20
"""Bytes read or converted at a time."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its dtype (None for one that torch has no name for), shape, and first byte."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class TensorFile:
    """A safetensors file, open for reading and writing ranges.

    Args:
        path: an existing file.
        writable: open for `write`.

    Raises:
        UserError: if the file is not a whole, valid safetensors file; it is named, with what is wrong.
    """

    def __init__(self, path: str | Path, *, writable: bool = False) -> None:
        self.path = Path(path)
        try:
            # not to wait for the writer of a pipe that lies there in a file's place; files do not heed it
            self._handle = os.open(self.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from error
        try:
            self.entries, self.metadata = self._read_header()
        except BaseException:
            os.close(self._handle)
            raise

    def sync(self) -> None:
        """Return when its bytes are on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,), any dtype and device, with elements [start, start + n) of tensor `name`, cast to its dtype.

        Raises:
            UserError: if the tensor has a dtype that torch lacks, or the file ends early.

        Cost: `PIECE_BYTES` of host memory.
        """
        entry = self.entries[name]
        if entry.dtype is None:
            raise UserError(f"{self.path}: {name} has a dtype that ftkit cannot read (quantised weights?)")
        size = entry.dtype.itemsize
        step = PIECE_BYTES // size
        for low in range(0, out.numel(), step):
            count = min(step, out.numel() - low)
            raw = bytearray(count * size)
            position = entry.offset + (start + low) * size
            if not self.fill(position, raw):
                raise UserError(f"{self.path}: ends inside tensor {name}; the file was cut short or is being written")
            out[low : low + count].copy_(torch.frombuffer(raw, dtype=entry.dtype))

    def fill(self, position: int, out: bytearray) -> bool:
        """Fill `out` with the file's bytes from `position` on; return whether it has so many."""
        return os.preadv(self._handle, [out], position) == len(out)

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        found = os.fstat(self._handle)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{self.path}: is no file")
        size = found.st_size
        raw = bytearray(8)
        length = int.from_bytes(raw, "little") if self.fill(0, raw) else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise UserError(f"{self.path}: not a safetensors file, or cut short ({size} bytes)")
        text = bytearray(length)
        self.fill(8, text)
        return _parsed(self.path, text, size)

    def write(self, name: str, start: int, values: Tensor, *, infinite: bool = False) -> None:
        """Write `values` (n,), any dtype and device, to elements [start, start + n) of tensor `name`, cast to its dtype.

        Args:
            name: name of the tensor.
            start: first element of the range.
            values: values to write, cast to the file's dtype.
            infinite: let infinite values pass, as masks hold them; NaN never does.

        Raises:
            UserError: for a value that is not finite in the file's dtype.

        Cost: `PIECE_BYTES` of host memory.
        """
        entry = self.entries[name]
        assert entry.dtype is not None
        size = entry.dtype.itemsize
        step = PIECE_BYTES // size
        for low in range(0, values.numel(), step):
            source = values[low : low + step].detach()
            piece = source.to(device="cpu", dtype=entry.dtype).contiguous()
            refuse_not_finite(name, piece, infinite=infinite, source=source)
            data = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy has the buffer protocol, its stubs do not say so
            position = entry.offset + (start + low) * size
            while data:
                written = os.pwrite(self._handle, data, position)
                data, position = data[written:], position + written


def create_file(
    path: str | Path,
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Create a safetensors file of the right size with its header, its data all zeros (a hole); ranks fill the ranges.

    Args:
        path: path of the file, which must not exist.
        tensors: (name, shape, dtype) in the order in which they will lie, gapless.
        metadata: strings for the header's `__metadata__`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, shape, dtype in tensors:
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    length = -(-(8 + len(text)) // DATA_START) * DATA_START - 8
    with open(path, "xb") as file:
        file.write(length.to_bytes(8, "little") + text.ljust(length, b" "))
        file.truncate(8 + length + offset)


def data_start(path: str | Path) -> int:
    """Return the byte at which the data of a file begins that `create_file` made."""
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _parsed(path: Path, text: bytearray, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return a header's tensors and metadata, checked against the file's size."""
    data_start = 8 + len(text)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
        metadata = header.pop("__metadata__", None) or {}
        entries, ends = {}, [0]
        for name, value in header.items():
            entries[name], end = _entry(value, data_start)
            ends.append(end)
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its safetensors header is not valid ({error!s:.200})") from error
    stop = data_start + max(ends)
    if stop > size:
        name = f"{max(zip(ends[1:], entries))[1]:.200}"
        raise UserError(f"{path}: cut short: tensor {name} ends at byte {stop}, the file has {size}. Fetch it again")
    begins = [entry.offset - data_start for entry in entries.values()]
    if sorted([*begins, size - data_start]) != sorted(ends):  # where one ends the next begins, the last at the file's end
        raise UserError(f"{path}: its safetensors header is not valid (tensors overlap, or do not cover the file)")
    return entries, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object in which no key comes twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice")
    return made


def _entry(value: dict[str, Any], data_start: int) -> tuple[Entry, int]:
    """Return a tensor's entry, and where it ends in the data."""
    dtype = DTYPES.get(str(value["dtype"]))
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("offsets are not a pair")
    begin, end = offsets
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or offsets {offsets} are not counts")
    if begin > end or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"offsets {offsets} or {len(shape)} dimensions do not fit a tensor")
    if dtype is not None and end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} of {value['dtype']} does not fill offsets {offsets}")
    return Entry(dtype, tuple(shape), data_start + begin), end
