"""Host memory of exact size: one anonymous mapping on 2 MiB pages, pinned on CUDA.

The plan counts host memory to the byte, so the arena takes what was asked, rounded up to a page. PyTorch's pinned
allocator rounds every allocation up to a power of two (a factor of 1.78 was measured). Huge pages matter for NVMe: with
4 KiB pages the kernel hands a transfer to the drive page by page, at half to a third of the rate.

On a CPU an arena takes no memory until it is touched. On CUDA pinning touches every page.

An arena cannot grow and has no free list. Forked children do not inherit it (MADV_DONTFORK): otherwise every page that
the trainer writes while a data-loader worker lives would be copied. A child that reads a view crashes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from ftkit.errors import UserError

PAGE_BYTES = 4096
"""Views begin at a multiple of this, as O_DIRECT requires."""

Window = ctypes.Array[ctypes.c_ubyte]
"""Mapped memory. The object owns the mapping."""

HUGE_PAGE_BYTES = 2 << 20
"""An arena begins at a multiple of this, so that huge pages fit."""


class HostMemoryError(UserError):
    """The system did not provide, or did not pin, the host memory that the plan counts on."""


class Arena:
    """Host memory for tensors. Views are handed out from start to end and freed together.

    Args:
        size_bytes: Bytes of all views together; see `arena_bytes`.
        pin: Pins the memory for the device that copies from and to it (`Streams.pin`). None for host use only.
        memory: Memory to use instead of a mapping of its own, uint8.

    Raises:
        HostMemoryError: The system provides or pins less.
    """

    def __init__(self, size_bytes: int, pin: Callable[[Window], int] | None = None, memory: Tensor | None = None) -> None:
        self.requested_bytes = size_bytes
        self._size_bytes = _whole_pages(size_bytes)
        self._taken_bytes = 0
        self._memory = self._new(size_bytes, pin) if memory is None else memory

    def _new(self, size_bytes: int, pin: Callable[[Window], int] | None) -> Tensor:
        try:
            window = _map(self._size_bytes)
        except OSError as error:
            raise HostMemoryError(
                f"host memory: {size_bytes} bytes needed, the system refuses ({error.strerror}). Use a smaller model, an "
                "adapter or memory.nvme_dir, or raise the limit on virtual memory (ulimit -v, vm.overcommit_memory)"
            ) from error
        refused = pin(window) if pin is not None and self._size_bytes else 0
        if refused:
            raise HostMemoryError(
                f"host memory: CUDA could not pin {self._size_bytes} bytes (error {refused}). Free host memory, raise the "
                "limit on locked memory (ulimit -l), or set a smaller memory.host_gib"
            )
        return torch.frombuffer(window, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a view (numel,) of zeros on whole pages of its own. `arena_bytes` has counted it."""
        size, taken = numel * dtype.itemsize, self._taken_bytes
        self._taken_bytes += _whole_pages(size)
        assert self._taken_bytes <= self._size_bytes, "arena_bytes() did not count this tensor"
        return self._memory[taken : taken + size].view(dtype)


def arena_bytes(sizes: Iterable[tuple[int, torch.dtype]]) -> int:
    """Return the exact size of an arena for tensors of (numel, dtype)."""
    return sum(_whole_pages(numel * dtype.itemsize) for numel, dtype in sizes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _map(size_bytes: int) -> Window:
    """Map `size_bytes` from a multiple of 2 MiB on. The returned array owns the mapping.

    Only whole huge pages are requested. Otherwise the kernel could back the last few KiB, and the unused ends of the
    mapping, with 2 MiB each.
    """
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) % HUGE_PAGE_BYTES
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        if size_bytes >= HUGE_PAGE_BYTES:
            memory.madvise(mmap.MADV_HUGEPAGE, start, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return (ctypes.c_ubyte * max(size_bytes, 1)).from_buffer(memory, start)

