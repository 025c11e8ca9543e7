"""Host memory of exact size: one mapping, on 2 MiB pages, pinned as it is.

Optimizer state and staging buffers on the host are planned to the byte, and are what disks and GPUs copy from. So they
come from one anonymous mapping whose size is what was asked, rounded up to a page. PyTorch's pinned allocator rounds
every allocation up to a power of two (1.78 times as much was measured); registering our own mapping with CUDA does not.
Pages of 2 MiB are asked for because the kernel hands a transfer to the drive page by page: with 4 KiB pages the same
drive gives half to a third of its rate.

Nothing is touched before it is used: on a CPU a fresh arena costs no memory. On CUDA, pinning brings every page in.

What it refuses: to grow, to take a tensor back (there is no free list: plan first), and to be inherited by forked
children. The last is deliberate: a child such as a data-loader worker would share the pages, and every page that the
trainer writes after that would be copied, until the host holds everything twice. A child that reads a view crashes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from math import ceil

import numpy as np
import torch
from torch import Tensor

from ftkit.errors import UserError

PAGE_BYTES = 4096
"""Views begin at a multiple of this: what O_DIRECT asks of an address."""

HUGE_PAGE_BYTES = 2 << 20
"""The arena begins at a multiple of this, so that its memory can lie on huge pages."""

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of <linux/mman.h>, which Python's mmap does not name."""



class HostMemoryError(UserError):
    """The system did not give, or did not pin, the host memory that the plan counts on."""


class Arena:
    """Host memory for tensors, handed out from one end to the other and given back as a whole.

    Args:
        size_bytes: what the views will take together; see `arena_bytes`.
        device: the device that will copy from and to it. A CUDA device has it pinned.
        huge: ask for pages of 2 MiB. What no drive and no device reads may do without: small ones come sooner.

    Attributes:
        requested_bytes: `size_bytes`, as it was asked for.
        pinned_bytes: the same rounded up to a page, or 0 where nothing is pinned.

    Raises:
        HostMemoryError: if the system gives less address space, or pins less, than that.

    Cost: on a CPU nothing until it is used; on CUDA all of its memory at once.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, huge: bool = True) -> None:
        self.requested_bytes = size_bytes
        self.device = device
        self._size_bytes = _whole_pages(size_bytes)
        self._taken_bytes = 0
        try:
            window = _map(self._size_bytes, huge=huge)
        except OSError as error:
            raise HostMemoryError(
                f"host memory: {size_bytes} bytes asked, the system gives none ({error.strerror}). Use a smaller model, an "
                "adapter or memory.nvme_dir, or raise the limit on virtual memory (ulimit -v, vm.overcommit_memory)"
            ) from error
        self._address = ctypes.addressof(window)
        self.pinned_bytes = self._size_bytes if device.type == "cuda" else 0
        if self.pinned_bytes:
            _pin(self._address, self.pinned_bytes)
        # On the window and not on the arena: views keep the window alive, so it is unpinned before it is unmapped.
        self._unpin = weakref.finalize(window, _unpin, self._address if self.pinned_bytes else 0, os.getpid())
        self._memory: Tensor | None = torch.frombuffer(window, dtype=torch.uint8)

    @property
    def free_bytes(self) -> int:
        """Bytes that `take` can still hand out."""
        return self._size_bytes - self._taken_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages that are in memory: those that were touched, or pinned. Cost: one system call."""
        if self._memory is None:
            return 0
        pages = ceil(self._size_bytes / mmap.PAGESIZE)
        present = (ctypes.c_ubyte * pages)()
        if _libc().mincore(ctypes.c_void_p(self._address), ctypes.c_size_t(self._size_bytes), present):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return int((np.frombuffer(bytes(present), np.uint8) & 1).sum(dtype=np.int64)) * mmap.PAGESIZE

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of `dtype`: zeros, on whole pages of its own, alive as long as it is referred to.

        Raises:
            MemoryError: if less is free: the arena was made for something else.
            RuntimeError: after `close`.
        """
        if self._memory is None:
            raise RuntimeError("this arena is closed")
        size, taken = numel * dtype.itemsize, self._taken_bytes
        if _whole_pages(size) > self.free_bytes:
            raise MemoryError(
                f"host memory: {_whole_pages(size)} bytes requested ({numel} of {dtype}), {self.free_bytes} free in an "
                f"arena of {self.requested_bytes}: arena_bytes() was not given this tensor"
            )
        self._taken_bytes += _whole_pages(size)
        return self._memory[taken : taken + size].view(dtype)

    def close(self) -> None:
        """Unpin, once the device has done its copies; the memory goes back with the last view of it.

        To be called when no view is in use any more; the end of the program does it too.
        """
        if self.pinned_bytes and self._memory is not None:
            torch.cuda.synchronize(self.device)
        self._unpin()
        self._memory = None


def arena_bytes(sizes: Iterable[tuple[int, torch.dtype]]) -> int:
    """Return the exact size of an arena from which these tensors, (numel, dtype) each, are taken."""
    return sum(_whole_pages(numel * dtype.itemsize) for numel, dtype in sizes)


def populate(tensor: Tensor) -> bool:
    """Bring the pages of a CPU tensor in, without changing a byte; return whether the kernel did.

    What is written to untouched memory waits for it a page at a time, on a virtual machine for its host too. A thread that
    has nothing else to do may be ahead of the writer: this releases the interpreter's lock.

    Returns:
        False where the kernel has no such call (before Linux 5.14), or no memory: whoever writes there will be told.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: the others may be anybody's
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start >= stop:
        return True
    return not _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), POPULATE_WRITE)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _map(size_bytes: int, *, huge: bool) -> ctypes.Array[ctypes.c_ubyte]:
    """Map `size_bytes` from a multiple of 2 MiB on; the array owns the mapping.

    Only whole huge pages are asked for; the rest lies on small ones. Otherwise the kernel could back the last few KiB,
    and the unused ends of the mapping with them, by 2 MiB.
    """
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) % HUGE_PAGE_BYTES
    on_huge = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES if huge else 0
    _advise(memory, "MADV_DONTFORK", 0, len(memory))
    _advise(memory, "MADV_NOHUGEPAGE", 0, len(memory))
    if on_huge:
        _advise(memory, "MADV_HUGEPAGE", start, on_huge)
    return (ctypes.c_ubyte * max(size_bytes, 1)).from_buffer(memory, start)


def _advise(memory: mmap.mmap, name: str, start: int, size_bytes: int) -> None:
    """Advise the kernel, where this system has the word and the kernel takes it."""
    if hasattr(mmap, name):
        with suppress(OSError):
            memory.madvise(getattr(mmap, name), start, size_bytes)


def _pin(address: int, size_bytes: int) -> None:
    # flags 0: unified addressing pins the memory for every device, and no other device gets a context
    error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if error:
        raise HostMemoryError(
            f"host memory: CUDA could not pin {size_bytes} bytes (error {error}). Free host memory, raise the limit on "
            "locked memory (ulimit -l), or grant less by memory.host_gib"
        )


def _unpin(address: int, owner: int) -> None:
    if address and os.getpid() == owner:  # a forked child pinned nothing
        torch.cuda.cudart().cudaHostUnregister(address)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
