"""The walk of an update: pieces read ahead and written behind, failures that poison, staging that is not reused early.

Pieces are made small here, so that a flat parameter has many of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory import tiers
from ftkit.engine.memory.disk import Disk
from ftkit.engine.memory.flat_file import DiskError, FlatFile
from ftkit.engine.memory.tiers import FileStore, MemoryStore, Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim import updater as update
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.shard import shard
from ftkit.errors import UserError
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.strategy import Strategy
from tests.engine.gradients import give

PIECE = 4096
NUMEL = 40 * PIECE + 77
NVME = dict.fromkeys(("parameters", "gradients", "state"), "nvme")


@contextmanager
def small_pieces() -> Iterator[None]:
    """Let a piece be 4096 elements in every file that knows its size."""
    modules = (tiers, update)
    before = PIECE_NUMEL
    for module in modules:
        module.PIECE_NUMEL = PIECE
    try:
        yield
    finally:
        for module in modules:
            module.PIECE_NUMEL = before


class Line(nn.Module):
    """One block with one long parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(dtype))


def made(
    folder: Path, placement: dict[str, str], dtype: torch.dtype, *, deferred: bool
) -> tuple[Line, ShardedModel, ShardedAdamW]:
    model = Line(dtype)
    comm = Communicator(torch.device("cpu"))
    strategy = Strategy.of(**placement, update="deferred" if deferred else "now", debug=True)
    drive = Disk(folder, "test") if strategy.uses_nvme else None
    opened = Tiers(comm.device, strategy, drive)
    units = shard(model, [("block", model.block)], comm=comm, strategy=strategy, tiers=opened)
    return model, units, ShardedAdamW(units, None, lr=1e-2)


def train(folder: Path, placement: dict[str, str], dtype: torch.dtype, *, deferred: bool, steps: int = 4) -> torch.Tensor:
    """Return the weights after a few steps on given gradients."""
    _, units, optimizer = made(folder, placement, dtype, deferred=deferred)
    (flat,) = units.flats
    for step in range(steps):
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        give(units.gradient_of[flat], {0: values.to(flat.dtype)})
        optimizer.step()
        optimizer.zero_grad()
    (weights,) = units.state_dict().values()
    units.tiers.close()
    return weights


@pytest.mark.quick(9)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", [NVME, {"state": "nvme"}, dict.fromkeys(NVME, "host"), {"parameters": "nvme"}])
def test_many_pieces_in_files_are_one_update_in_memory(placement, dtype, deferred, tmp_path):
    expected = train(tmp_path, {}, dtype, deferred=False)
    with small_pieces():
        assert torch.equal(train(tmp_path, placement, dtype, deferred=deferred), expected)
    assert list(tmp_path.iterdir()) == []


def test_slots_are_not_reused_early(tmp_path, monkeypatch):
    """Weights are written late: a slot that is filled too early would corrupt them."""
    expected = train(tmp_path, {}, torch.bfloat16, deferred=False)
    move = FlatFile._transfer

    def late(self, call, data, start, doing):
        if doing == "writing" and self.path.name.startswith("block.weights"):
            time.sleep(0.02)
        return move(self, call, data, start, doing)

    monkeypatch.setattr(FlatFile, "_transfer", late)
    with small_pieces():
        assert torch.equal(train(tmp_path, NVME, torch.bfloat16, deferred=True), expected)


class Pair(nn.Module):
    """Two blocks, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(self.first(x))


def train_in_two_groups(folder, state_host_bytes=0, **placement):
    """Train the first block alone, then both; return the weights."""
    comm, model = Communicator(torch.device("cpu")), Pair()
    strategy = Strategy.of(**placement, update="deferred" if placement else "now", state_host_bytes=state_host_bytes)
    tiers = Tiers.open(comm, strategy, folder)
    units = shard(model, [("first", model.first), ("second", model.second)], comm=comm, strategy=strategy, tiers=tiers)
    optimizer = ShardedAdamW(units, [*model.first.parameters()], lr=1e-2)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [*model.second.parameters()], "lr": 2e-2})
        model(torch.ones(3, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = units.state_dict()
    if state_host_bytes:
        assert all(optimizer.states[flat.name].master is flat.weights for flat in units.trainable)
        moments = [optimizer.states[flat.name].moments["exp_avg"] for flat in units.trainable]
        assert [type(store) for store in moments] == [MemoryStore, FileStore]
    tiers.close()
    return weights


def test_a_group_that_comes_later_finds_room_in_the_slots(tmp_path):
    """The first steps need no staging for moments: those of the first block are in host memory."""
    expected = train_in_two_groups(tmp_path)
    found = train_in_two_groups(tmp_path, 96 << 10, state="nvme", gradients="nvme")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_state_is_read_when_it_has_been_written(tmp_path, monkeypatch):
    """Moments are written late: what a checkpoint reads right after a step must be of that step."""
    seen = {}
    move = FlatFile._transfer

    def late(self, call, data, start, doing):
        if doing == "writing" and "exp_avg" in self.path.name:
            time.sleep(0.05)
        return move(self, call, data, start, doing)

    monkeypatch.setattr(FlatFile, "_transfer", late)
    for name, placement in (("memory", {}), ("files", {"state": "nvme"})):
        _, units, optimizer = made(tmp_path, placement, torch.bfloat16, deferred=True)
        (flat,) = units.flats
        give(units.gradient_of[flat], {0: torch.ones(NUMEL)})
        optimizer.step()
        optimizer.settle()
        store = optimizer.states[flat.name].moments["exp_avg"]
        seen[name] = torch.cat([store.read(start, stop).clone() for start, stop in store.pieces()])
        units.tiers.close()
    assert torch.equal(seen["memory"], seen["files"])
    assert seen["memory"][:NUMEL].min() > 0


@pytest.mark.parametrize("deferred", [False, True])
def test_a_failed_update_poisons_what_comes_after(deferred, tmp_path, monkeypatch):
    with small_pieces():
        _, units, optimizer = made(tmp_path, {"state": "nvme"}, torch.bfloat16, deferred=deferred)
        (flat,) = units.flats
        optimizer.state_of(flat)
        move = FlatFile._transfer

        def fails(self, call, data, start, doing):
            if doing == "reading" and self.path.name == "block.exp_avg" and start == 5 * PIECE * 4:
                raise DiskError(f"NVMe tier: {doing} {self.path}: the drive is gone")
            return move(self, call, data, start, doing)

        monkeypatch.setattr(FlatFile, "_transfer", fails)
        give(units.gradient_of[flat], {0: torch.ones(NUMEL)})

        def step_and_look() -> None:
            optimizer.step()
            units.state_dict()

        with pytest.raises(UserError, match=r"an update failed.*block.exp_avg.*the drive is gone"):
            step_and_look()
        for later in (units.state_dict, optimizer.settle, lambda: optimizer.state_of(flat)):
            with pytest.raises(UserError, match="an update failed"):
                later()
        optimizer.zero_grad()
        with pytest.raises(UserError, match="failed"):
            give(units.gradient_of[flat], {0: torch.ones(NUMEL)})
        units.tiers.close()
