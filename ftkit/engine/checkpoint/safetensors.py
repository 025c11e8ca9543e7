"""Safetensors files, read and written by ranges of elements.

The data section of a checkpoint file is a flat parameter: tensors follow in model order without gaps, and the JSON header is
padded so that data begins at a multiple of 4096 bytes. A rank of any world size reads or writes elements [a, b) of a tensor
with one seek. Files from the hub are read the same way, whatever their order.

Files are untrusted. A header's length, JSON, dtypes, shapes and offsets are compared with the file's size before an element
is read. Tensors must cover the data without gap or overlap, and no name may come twice.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.errors import UserError

DATA_START = 4096
"""Bytes. The data section begins at a multiple of this."""
HEADER_LIMIT_BYTES = 100 << 20
"""Largest header that the format allows."""
PIECE_BYTES = 8 << 20
"""Bytes that are read, converted or written at a time."""
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
    """One tensor in a file: its dtype (None if torch has no such dtype), shape, and first byte."""

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
        """Fill `out` with the bytes from `position` on; return whether the file has that many."""
        return os.preadv(self._handle, [out], position) == len(out)

    def write(self, name: str, start: int, values: Tensor, *, check: bool = True) -> None:
        """Write `values` (n,), any dtype and device, to elements [start, start + n) of tensor `name`, cast to its dtype.

        Args:
            name: Name of the tensor.
            start: First element of the range.
            values: Values to write.
            check: Raise UserError for values that are not finite in the file's dtype. Masks in buffers may be infinite.

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
            data = memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy has the buffer protocol, its stubs do not say so
            position = entry.offset + (start + low) * size
            while data:
                written = os.pwrite(self._handle, data, position)
                data, position = data[written:], position + written

    def _open(self, flags: int) -> int:
        return os.open(self.path, flags | os.O_NONBLOCK)  # a pipe in the file's place must not block

    def _read_header(self) -> dict[str, Entry]:
        found = os.fstat(self._handle)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{self.path}: is no file")
        raw = bytearray(8)
        length = int.from_bytes(raw, "little") if self.fill(0, raw) else 0
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, found.st_size - 8):
            raise UserError(f"{self.path}: not a safetensors file, or cut short ({found.st_size} bytes)")
        text = bytearray(length)
        self.fill(8, text)
        return _parsed(self.path, text, found.st_size)


def create_file(path: str | Path, tensors: Sequence[TensorSpec]) -> None:
    """Create a new safetensors file with its header and zeros as data (a hole). Ranks fill their ranges later.

    Args:
        path: Path of the file, which must not exist.
        tensors: The tensors, in the order of the data section.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        name, shape, dtype = tensor
        end = offset + bytes_of(tensor)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    length = -(-(8 + len(text)) // DATA_START) * DATA_START - 8
    with open(path, "xb") as file:
        file.write(length.to_bytes(8, "little") + text.ljust(length, b" "))
        file.truncate(8 + length + offset)


def bytes_of(tensor: TensorSpec) -> int:
    """Return the bytes of a tensor's data."""
    _, shape, dtype = tensor
    return prod(shape) * dtype.itemsize


def data_start(path: str | Path) -> int:
    """Return the first byte of the data section of a file that `create_file` made."""
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _parsed(path: Path, text: bytearray, size: int) -> dict[str, Entry]:
    """Return a header's tensors, checked against the file's size."""
    data_start = 8 + len(text)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        found = {name: _entry(value, data_start) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its safetensors header is not valid ({error!s:.200})") from error
    ends = [end for _, end in found.values()]
    if max(ends, default=0) > size:
        raise UserError(f"{path}: cut short: its tensors end at byte {max(ends)}, the file has {size}. Fetch it again")
    # Each tensor begins where another ends, and the last one ends with the file.
    begins = [entry.offset for entry, _ in found.values()]
    if sorted([*begins, size]) != sorted([data_start, *ends]):
        raise UserError(f"{path}: its safetensors header is not valid (tensors overlap, or do not cover the file)")
    return {name: entry for name, (entry, _) in found.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, in which no key comes twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice")
    return made


def _entry(value: dict[str, Any], data_start: int) -> tuple[Entry, int]:
    """Return a tensor's entry, and the byte of the file at which it ends."""
    dtype = DTYPES.get(str(value["dtype"]))
    shape, offsets = value["shape"], value["data_offsets"]
    begin, end = offsets
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or offsets {offsets} are not counts")
    if begin > end or (dtype is not None and end - begin != prod(shape) * dtype.itemsize):
        raise ValueError(f"shape {shape} of {value['dtype']} does not fill offsets {offsets}")
    return Entry(dtype, tuple(shape), data_start + begin), data_start + end
