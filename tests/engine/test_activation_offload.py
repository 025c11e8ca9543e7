"""Offloaded inputs return unchanged from every tier, once, whatever else moves meanwhile."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor

from ftkit.engine.core.activation_offload import ActivationOffload, OffloadedInputs
from ftkit.engine.memory.disk import Disk
from ftkit.engine.memory.flat_file import DiskError, FlatFile
from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.sizes import LEAVING, STAGING
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import activation_bytes
from tests.engine.recorder import RecordingStreams

CPU = torch.device("cpu")
COUNT = 3 * STAGING


def make_offload(folder, tier: str) -> ActivationOffload:
    drive = Disk(folder, "test") if tier == "nvme" else None
    return ActivationOffload(Tiers(CPU, Strategy.of(activation_offload=tier), drive))


def activations(count: int = COUNT) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 33, 16, generator=generator).requires_grad_() for _ in range(count)]


def offload_and_fetch(offload: ActivationOffload) -> None:
    kept = activations()
    handles = [offload.keep([tensor])[0] for tensor in kept]
    wanted = [tensor.detach().clone() for tensor in kept]
    for tensor in kept:  # freed, and used for something else
        tensor.data.fill_(float("nan"))
    for handle, tensor in reversed(list(zip(handles, wanted))):
        back = handle.take()
        assert back.requires_grad
        assert torch.equal(back, tensor)


def test_what_goes_to_host_memory_comes_back(tmp_path):
    offload = make_offload(tmp_path, "host")
    for _ in range(3):
        offload_and_fetch(offload)
    assert offload.host_bytes == COUNT * activation_bytes(activations(1)[0].nbytes)  # memory is reused


def test_what_goes_to_files_comes_back(tmp_path, monkeypatch):
    move = FlatFile._transfer

    def late(self, call, data, start, doing):
        if doing == "writing":
            time.sleep(0.01)
        return move(self, call, data, start, doing)

    monkeypatch.setattr(FlatFile, "_transfer", late)
    offload = make_offload(tmp_path, "nvme")
    for _ in range(2):
        offload_and_fetch(offload)
    assert offload.host_bytes == STAGING * activation_bytes(activations(1)[0].nbytes)
    offload.tiers.close()


def test_only_activations_leave(tmp_path):
    offload = make_offload(tmp_path, "host")
    mask, table, (hidden,) = torch.ones(3, dtype=torch.bool), torch.ones(3), activations(1)
    assert [handle is None for handle in offload.keep([mask, table, hidden])] == [True, True, False]
    assert make_offload(tmp_path, "device").keep([hidden]) == [None]


def test_one_tensor_for_several_blocks_leaves_once(tmp_path):
    offload = make_offload(tmp_path, "host")
    shared, first, second = activations(3)
    one, two = offload.keep([first, shared]), offload.keep([second, shared])
    assert one[1] is two[1]
    assert len({handle.place for handle in (*one, *two)}) == 3
    assert torch.equal(two[1].take(), one[1].take())
    with torch.no_grad():
        shared.add_(1)
    assert offload.keep([shared])[0] is not one[1]


def test_a_second_time_is_refused(tmp_path):
    (handle,) = make_offload(tmp_path, "host").keep(activations(1))
    handle.take()
    with pytest.raises(RuntimeError, match="a second backward over a graph whose activations were offloaded"):
        handle.take()


def test_unused_offloaded_tensors_free_their_memory(tmp_path):
    offload = make_offload(tmp_path, "host")
    for _ in range(5):
        offload.keep(activations(2))
        gc.collect()
    assert len(offload.free) == 2


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_few_originals_are_on_the_device_at_once(tmp_path, tier):
    """LEAVING of them, however far the host is ahead; none after the first fetch, or after a forward is forgotten."""
    offload, freed = make_offload(tmp_path, tier), []
    handles = []
    for number in range(COUNT):
        (kept,) = activations(1)
        weakref.finalize(kept.untyped_storage(), freed.append, number)
        handles += offload.keep([kept])
        del kept
        assert freed == list(range(number + 1 - LEAVING))
    handles[-1].take()
    assert freed == list(range(COUNT))
    inputs = OffloadedInputs(offload)
    (kept,) = activations(1)
    weakref.finalize(kept.untyped_storage(), freed.append, COUNT)
    handles += inputs.keep([kept])
    del kept
    assert COUNT not in freed
    inputs.forget()
    assert COUNT in freed
    offload.tiers.close()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_rows_of_any_length_share_few_places(tmp_path, tier):
    """Memory is pinned again in coarse steps only, and never more of it than the longest rows need."""
    offload, made, largest = make_offload(tmp_path, tier), [], 0
    make_arena = offload.tiers.arena
    offload.tiers.arena = lambda size: made.append(size) or make_arena(size)
    for length in (*range(400, 1200, 7), *range(1200, 400, -7)):
        kept = [torch.full((length, 33), float(length)).requires_grad_() for _ in range(2)]
        handles = offload.keep(kept)
        assert all(torch.equal(handle.take(), tensor) for handle, tensor in zip(handles, kept))
        largest = max(largest, activation_bytes(kept[0].nbytes))
        assert len(offload.free) == 2
        assert offload.host_bytes <= (2 if tier == "host" else STAGING) * largest
    assert len(set(made)) <= 14
    assert len(made) <= 14 * (2 if tier == "host" else STAGING)
    if tier == "nvme":
        assert sum(file.stat().st_size for file in tmp_path.rglob("kept.*")) == 2 * largest
    offload.tiers.close()


def test_a_tensor_takes_the_smallest_place_that_fits(tmp_path):
    offload = make_offload(tmp_path, "host")
    small, large = (torch.ones(size, 33).requires_grad_() for size in (400, 1200))
    for kept in ([small, large], [small, large], [large, small], [small, large]):
        handles = offload.keep(kept)
        assert offload.host_bytes == activation_bytes(small.nbytes) + activation_bytes(large.nbytes)
        assert all(torch.equal(handle.take(), tensor) for handle, tensor in zip(handles, kept))


@pytest.mark.parametrize("size", [1, 16384, 16385, 20 << 20, (20 << 20) + 1, 31 << 20])
def test_a_place_has_an_eighth_more_at_most(size):
    assert size <= activation_bytes(size) <= max(size * 9 // 8 + 1, -(-size // 16384) * 16384)


def test_activations_on_nvme_do_not_block_the_host(tmp_path):
    """The host waits when it needs a tensor, or when all staging buffers are in use; it never waits for a file."""
    streams = RecordingStreams()
    strategy, drive = Strategy.of(activation_offload="nvme"), Disk(tmp_path, "test")
    offload = ActivationOffload(Tiers(CPU, strategy, drive, streams=streams))
    with streams.recording() as recorder:
        handles = offload.keep(activations(STAGING))
        assert [why for thread, why in recorder.waits if thread == "MainThread"] == []
        for handle in handles:
            handle.take()
        assert {why for thread, why in recorder.waits if thread == "MainThread"} == {"a job"}
    offload.tiers.close()


def test_a_write_that_failed_is_an_error_when_the_tensor_is_taken(tmp_path, monkeypatch):
    def full(self, call, data, start, doing):
        raise DiskError("the drive is full")

    offload = make_offload(tmp_path, "nvme")
    monkeypatch.setattr(FlatFile, "_transfer", full)
    (handle,) = offload.keep(activations(1))
    with pytest.raises(DiskError, match="the drive is full"):
        handle.take()
    offload.tiers.close()
