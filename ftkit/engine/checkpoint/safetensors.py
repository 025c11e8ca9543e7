"""Safetensors files, read and written by ranges of elements.

The data section of a checkpoint file is a flat parameter: tensors follow in model order without gaps, and the JSON header is
padded so that data begins at a multiple of 4096 bytes. A rank of any world size reads or writes elements [a, b) of a tensor
with one seek. Files from the hub are read the same way, whatever their order.

Files are untrusted. A header's length, JSON, dtypes, shapes and offsets are compared with the file's size before an element
is read. Tensors must cover the data without gap or overlap.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.errors import UserError
from ftkit.spec.sizes import PIECE_BYTES

DATA_START = 4096  # bytes; the data section begins at a multiple of this
HEADER_LIMIT_BYTES = 100 << 20  # of the format
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
TensorSpec = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype of a tensor in a file."""
AnyFile = TypeVar("AnyFile", bound="TensorFile")


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its dtype (None if torch has no such dtype), shape, and bytes [offset, end)."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class TensorFile:
    """A safetensors file, open for reading and writing ranges.

    Args:
        path: Path of an existing file.
        writable: Open the file for `write`.

    Raises:
        UserError: The file is not a complete, valid safetensors file.
    """

    def __init__(self, path: str | Path, *, writable: bool = False) -> None:
        self.path = Path(path)
        try:
            self._handle = self._open(os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from error
        try:
            self.entries = self._read_header()
        except BaseException:
            os.close(self._handle)
            raise

    def sync(self) -> None:
        """Wait until the file's bytes are on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self: AnyFile) -> AnyFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (n,), any dtype and device, with elements [start, start + n) of tensor `name`, cast to its dtype.

        Raises:
            UserError: torch does not have the tensor's dtype, or the file ends early.

        Cost: `PIECE_BYTES` of host memory.
        """
        entry = self.entries[name]
        if entry.dtype is None:
            raise UserError(f"{self.path}: {name} has a dtype that ftkit cannot read (quantised weights?)")
        size, done = entry.dtype.itemsize, 0
        for chunk in self.chunks(entry.offset + start * size, out.numel() * size, size):
            values = chunk.view(entry.dtype)
            out[done : done + values.numel()].copy_(values)
            done += values.numel()

    def chunks(self, start: int, size: int, itemsize: int) -> Iterator[Tensor]:
        """Yield bytes [start, start + size) as tensors (n,) uint8 of whole elements of `itemsize` bytes."""
        for low in range(start, start + size, PIECE_BYTES):
            raw = bytearray(min(PIECE_BYTES, start + size - low))
            if os.preadv(self._handle, [raw], low) < len(raw):
                raise UserError(f"{self.path}: ends before byte {low + len(raw)}; it was cut short or is being written")
            yield torch.frombuffer(raw, dtype=torch.uint8)

    def write(self, name: str, start: int, values: Tensor, *, check: bool = True) -> None:
        """Write `values` (n,), any dtype and device, to elements [start, start + n) of tensor `name`, cast to its dtype.

        Raises:
            UserError: A value is not finite in the file's dtype. Not raised without `check`: buffers may be infinite masks.

        Cost: `PIECE_BYTES` of host memory.
        """
        entry = self.entries[name]
        assert entry.dtype is not None
        size = entry.dtype.itemsize
        step = PIECE_BYTES // size
        for low in range(0, values.numel(), step):
            piece = values[low : low + step].detach().to(device="cpu", dtype=entry.dtype).contiguous()
            if check:
                refuse_not_finite(name, piece)
            write_all(self._handle, piece.view(torch.uint8).numpy(), entry.offset + (start + low) * size)

    def _open(self, flags: int) -> int:
        return os.open(self.path, flags | os.O_NONBLOCK)  # a pipe in the file's place must not block

    def _read_header(self) -> dict[str, Entry]:
        """Return the header's tensors, checked against the file's size."""
        found = os.fstat(self._handle)
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        length = int.from_bytes(self._bytes(0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise UserError(f"{self.path}: not a safetensors file, or cut short ({size} bytes)")
        try:
            header = json.loads(self._bytes(8, length).decode())
            header.pop("__metadata__", None)
            entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{self.path}: its safetensors header is not valid ({error!s:.200})") from error
        begins, ends = [entry.offset for entry in entries.values()], [entry.end for entry in entries.values()]
        if max(ends, default=0) > size:
            raise UserError(f"{self.path}: cut short: its tensors end at byte {max(ends)}, it has {size}. Fetch it again")
        # Each tensor begins where another ends, and the last one ends with the file.
        if sorted([*begins, size]) != sorted([8 + length, *ends]):
            raise UserError(f"{self.path}: its safetensors header is not valid (tensors overlap, or do not cover the file)")
        return entries

    def _bytes(self, start: int, size: int) -> bytes:
        return b"".join(chunk.numpy().tobytes() for chunk in self.chunks(start, size, 1))


def write_all(handle: int, data: Any, position: int) -> None:
    """Write all bytes of an array (n,) uint8 to a file, from `position` on."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(handle, data[done:], position + done)


def create_file(path: str | Path, tensors: Sequence[TensorSpec]) -> None:
    """Create a file, which must not exist: the header of the tensors in this order, and zeros as data (a hole)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in tensors:
        end = offset + bytes_of(shape, dtype)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    length = -(-(8 + len(text)) // DATA_START) * DATA_START - 8
    with open(path, "xb") as file:
        file.write(length.to_bytes(8, "little") + text.ljust(length, b" "))
        file.truncate(8 + length + offset)


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor's data."""
    return prod(shape) * dtype.itemsize


def data_start(path: str | Path) -> int:
    """Return the first byte of the data section of a file that `create_file` made."""
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _entry(value: dict[str, Any], data_start: int) -> Entry:
    dtype = DTYPES.get(str(value["dtype"]))
    shape, offsets = value["shape"], value["data_offsets"]
    begin, end = offsets
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or offsets {offsets} are not counts")
    if begin > end or (dtype is not None and end - begin != bytes_of(shape, dtype)):
        raise ValueError(f"shape {shape} of {value['dtype']} does not fill offsets {offsets}")
    return Entry(dtype, tuple(shape), data_start + begin, data_start + end)
