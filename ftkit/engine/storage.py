"""Where bytes lie in files: safetensors read and written by ranges of elements, never whole.

A line's file is a valid safetensors file whose data section *is* the flat parameter: the JSON header is padded with spaces
so that data begins at byte 4096 or a multiple of it, and the tensors follow in model order without gaps. Any rank of
any world can therefore read or write elements [a, b) of any tensor with one seek. Files that others made (hub folders)
are read by the same reader, whatever their order.

A file from a stranger is not trusted: the header's length, its JSON, every dtype, shape and offset are checked against the
file's size before the first element is read. Nothing here knows training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ftkit.errors import UserError

DATA_START = 4096
"""Bytes. The data section begins at a multiple of this."""

HEADER_LIMIT_BYTES = 100 << 20
"""The format's own limit on its header."""

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
            self._handle = os.open(self.path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from error
        try:
            self.entries, self.metadata = _read_header(self.path, self._handle)
        except BaseException:
            os.close(self._handle)
            raise

    def close(self, *, sync: bool = False) -> None:
        """Close the file; `sync`: once its bytes are on the disk."""
        if sync:
            os.fsync(self._handle)
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
            if os.preadv(self._handle, [raw], position) != len(raw):
                raise UserError(f"{self.path}: ends inside tensor {name}; the file was cut short or is being written")
            out[low : low + count].copy_(torch.frombuffer(raw, dtype=entry.dtype))

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write `values` (n,), any dtype and device, to elements [start, start + n) of tensor `name`, cast to its dtype.

        Cost: `PIECE_BYTES` of host memory.
        """
        entry = self.entries[name]
        assert entry.dtype is not None
        size = entry.dtype.itemsize
        step = PIECE_BYTES // size
        for low in range(0, values.numel(), step):
            piece = values[low : low + step].detach().to(device="cpu", dtype=entry.dtype).contiguous()
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


def _read_header(path: Path, handle: int) -> tuple[dict[str, Entry], dict[str, str]]:
    size = os.fstat(handle).st_size
    raw = os.pread(handle, 8, 0)
    length = int.from_bytes(raw, "little")
    if len(raw) < 8 or not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
        raise UserError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
    try:
        header = json.loads(os.pread(handle, length, 8))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        ends = {name: value["data_offsets"][1] for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its safetensors header is not valid ({error})") from error
    for name, end in ends.items():
        if 8 + length + end > size:
            raise UserError(
                f"{path}: cut short: tensor {name} ends at byte {8 + length + end}, the file has {size}. Fetch it again"
            )
    return entries, metadata


def _entry(value: dict[str, object], data_start: int) -> Entry:
    dtype = DTYPES.get(str(value["dtype"]))
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"offsets {offsets} are not a pair")
    begin, end = offsets
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} or offsets [{begin}, {end}] are not counts")
    if dtype is not None and end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} of {value['dtype']} does not fill offsets [{begin}, {end}]")
    return Entry(dtype, tuple(shape), data_start + begin)
