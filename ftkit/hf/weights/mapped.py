"""The weights of a folder as tensors that are read when somebody uses them.

A safetensors file is mapped privately: a page comes from the file when it is touched, and a write copies that page for
this process alone. A parameter of a mapped file is therefore an ordinary CPU tensor to PEFT, transformers and the user,
with its true values, and costs no memory until it is used. All processes of a node share the pages of the page cache.

`written` finds the tensors that were changed in place. The kernel counts the copied pages of each mapping; only where it
counts any, or cannot be asked, are the tensors compared with the file.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ftkit.engine.checkpoint.safetensors import PIECE_BYTES, Entry, TensorFile

COPIED = re.compile(r"^(?:Anonymous|Swap): +(\d+) kB")
"""Lines of /proc/self/smaps that count pages which no longer come from the file."""
AREA = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


class MappedFile:
    """A safetensors file in this process's address space.

    Args:
        path: an existing file, whose header was checked by `TensorFile`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self.first, self.last = whole.data_ptr(), whole.data_ptr() + whole.numel()

    def tensor(self, entry: Entry) -> Tensor:
        """Return one tensor of the file, its values unread. One that lies unaligned is copied."""
        assert entry.dtype is not None
        if not entry.numel:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.offset % entry.dtype.itemsize:
            raw = bytearray(self._bytes[entry.offset : entry.offset + entry.numel * entry.dtype.itemsize])
            return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)
        return torch.frombuffer(self._bytes, dtype=entry.dtype, count=entry.numel, offset=entry.offset).view(entry.shape)


@dataclass(frozen=True)
class Stored:
    """One parameter's place in a file.

    Args:
        file: the mapped file.
        key: the tensor's name in the file.
        entry: the tensor's dtype, shape and first byte in the file.
        dtype: dtype of the parameter, which may differ from the file's.
    """

    file: MappedFile
    key: str
    entry: Entry
    dtype: torch.dtype

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.file.first + self.entry.offset

    def is_still(self, parameter: Tensor) -> bool:
        """Return whether `parameter` is this whole tensor in its place: neither replaced, nor cut, nor turned."""
        same = parameter.data_ptr() == self.address and parameter.dtype == self.entry.dtype
        return same and parameter.numel() == self.entry.numel and parameter.is_contiguous()


def written(stored: Iterable[Stored]) -> set[int]:
    """Return the addresses of the tensors that were changed in place since their file was mapped.

    Cost: nothing is read where the kernel counts no copied page in a mapping; else its whole file, by this rank.
    """
    of_file: dict[MappedFile, list[Stored]] = {}
    for each in stored:
        of_file.setdefault(each.file, []).append(each)
    found: set[int] = set()
    for file, members in of_file.items():
        if copied_kib(file.first, file.last) == 0:
            continue
        with TensorFile(file.path) as now:
            found.update(each.address for each in members if _differs(now, each))
    return found


def copied_kib(first: int, last: int) -> int | None:
    """Return the KiB of this process's memory in [first, last) that a write has copied; None where nobody counts them."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    total, counted, inside = 0, False, False
    for line in lines:
        if area := AREA.match(line):
            inside = int(area[1], 16) < last and int(area[2], 16) > first
        elif inside and (copied := COPIED.match(line)):
            total, counted = total + int(copied[1]), True
    return total if counted else None


def _differs(now: TensorFile, stored: Stored) -> bool:
    """Return whether a tensor in memory has other bytes than in its file."""
    entry = stored.entry
    values = stored.file.tensor(entry).view(-1)
    step = PIECE_BYTES // values.dtype.itemsize
    for low in range(0, values.numel(), step):
        part = values[low : low + step]
        piece = torch.empty_like(part)
        now.read(stored.key, low, piece)
        if not torch.equal(piece.view(torch.uint8), part.view(torch.uint8)):
            return True
    return False
