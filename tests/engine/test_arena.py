"""An arena has the requested size to the page: addresses, zeros, resident pages, and the range that CUDA pins.

There is no CUDA here: what CUDA would be asked is recorded by a stand-in. The test marked `gpu` asks the real one.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ftkit.engine.memory.arena import HUGE_PAGE_BYTES, PAGE_BYTES, Arena, HostMemoryError, arena_bytes
from ftkit.engine.streams import CudaStreams

SIZES = [(4096, torch.float32), (1, torch.int8), (5000, torch.bfloat16), (0, torch.float16), (12288, torch.float64)]
GIB = 1 << 30


def resident(view: Tensor) -> int:
    """Bytes of the pages of a view that are in memory."""
    pages = -(-view.nbytes // PAGE_BYTES)
    present = (ctypes.c_ubyte * pages)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(view.data_ptr()), ctypes.c_size_t(view.nbytes), present)
    return sum(page & 1 for page in present) * PAGE_BYTES


def mapped(address: int) -> bool:
    """Whether any mapping of this process has `address`."""
    spans = [line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


class Cudart:
    """Stands in for CUDA: records what is registered."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, int(mapped(address))))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    stand_in = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    return stand_in


def test_views_fill_it_exactly():
    arena = Arena(arena_bytes(SIZES))
    assert arena.requested_bytes == 16384 + 4096 + 12288 + 0 + 98304
    views = [arena.take(numel, dtype) for numel, dtype in SIZES]
    assert [(view.numel(), view.dtype) for view in views] == SIZES
    assert views[0].data_ptr() % HUGE_PAGE_BYTES == 0
    assert all(view.data_ptr() % PAGE_BYTES == 0 for view in views if view.numel())
    assert all(view.is_contiguous() and not view.float().any() for view in views)
    for number, view in enumerate(views):
        view.fill_(number + 1)
    assert all(bool((view == number + 1).all()) for number, view in enumerate(views)), "views overlap"
    with pytest.raises(AssertionError, match="did not count this tensor"):
        arena.take(1, torch.int8)


def test_untouched_it_costs_nothing():
    arena = Arena(GIB)
    view = arena.take(GIB // 4, torch.float32)
    assert resident(view) == 0
    view[: HUGE_PAGE_BYTES // 4].fill_(1)
    assert resident(view) == HUGE_PAGE_BYTES


def test_its_last_part_lies_on_small_pages():
    """Or the kernel might bring in 2 MiB, past its end, for the last few KiB."""
    size = 2 * HUGE_PAGE_BYTES - PAGE_BYTES
    arena = Arena(size)
    view = arena.take(size, torch.uint8)
    view[-1] = 1
    assert resident(view) == PAGE_BYTES
    view.fill_(1)
    assert resident(view) == size


def test_memory_goes_with_the_last_view():
    arena = Arena(64 << 20)
    view = arena.take(16 << 20, torch.float32).fill_(3)
    address = view.data_ptr()
    part = view[1000:2000]
    del arena, view
    assert mapped(address)
    assert bool((part == 3).all())
    del part
    gc.collect()
    assert not mapped(address)


def test_a_forked_child_does_not_share_it():
    """Otherwise the system copies each page that is written while a data-loader worker lives."""
    view = Arena(HUGE_PAGE_BYTES).take(HUGE_PAGE_BYTES, torch.uint8).fill_(1)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= view.data_ptr() < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            assert "dc" in line.split(), "the kernel's flag of a mapping that fork() leaves out"
            return
    pytest.fail("the arena is in no mapping")


def test_what_is_pinned_is_what_was_asked(cudart: Cudart):
    size = (3 << 20) + 5
    arena = Arena(size, CudaStreams.pin)
    assert arena.requested_bytes == size
    view = arena.take(1024, torch.float32)
    assert cudart.calls == [("register", view.data_ptr(), (3 << 20) + 4096)]
    Arena(0, CudaStreams.pin), Arena(4096)
    assert len(cudart.calls) == 1


def test_it_is_unpinned_before_it_is_unmapped(cudart: Cudart):
    arena = Arena(1 << 20, CudaStreams.pin)
    view = arena.take(1024, torch.float32)
    address = view.data_ptr()
    del arena
    gc.collect()
    assert len(cudart.calls) == 1, "unpinned though a view is left"
    del view
    gc.collect()
    assert cudart.calls[1:] == [("unregister", address, 1)]


def test_what_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(HostMemoryError, match=rf"host memory: {1 << 62} bytes needed"):
        Arena(1 << 62)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(error=2))
    with pytest.raises(HostMemoryError, match=r"could not pin 8192 bytes \(error 2\)"):
        Arena(8000, CudaStreams.pin)


@pytest.mark.gpu
def test_cuda_takes_it_for_pinned():
    arena = Arena((3 << 20) + 5, CudaStreams.pin)
    view = arena.take(1 << 18, torch.float32).fill_(2)
    assert view.is_pinned()
    assert resident(view) == 1 << 20
    there = view.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert bool((there == 2).all())
