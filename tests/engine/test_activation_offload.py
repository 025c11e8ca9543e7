"""Offloaded inputs return unchanged from every tier, once, whatever else moves meanwhile."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor

from ftkit.engine.core.activation_offload import STAGING, ActivationOffload
from ftkit.engine.memory.disk import Disk
from ftkit.engine.memory.flat_file import FlatFile
from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.strategy import Strategy

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
    assert len(offload.arenas) == COUNT  # memory is reused


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
    assert len(offload.arenas) == STAGING
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
    assert len(offload.arenas) == 3
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
    assert len(offload.arenas) == 2
