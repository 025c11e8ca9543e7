"""The walk of an update: pieces read ahead and written behind, failures that poison, staging that is not reused early.

Pieces are made small here, so that a line has many of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ftkit.engine import disk, tiers, update
from ftkit.engine.comm import Communicator
from ftkit.engine.disk import Disk, FlatFile
from ftkit.engine.flat import Policy
from ftkit.engine.optimizer import ShardedAdamW
from ftkit.engine.shard import Units, shard
from ftkit.engine.tiers import Placement, Tiers
from ftkit.errors import UserError

PIECE = 4096
NUMEL = 40 * PIECE + 77
NVME = Placement("nvme", "nvme", "nvme")


@contextmanager
def small_pieces() -> Iterator[None]:
    """Let a piece be 4096 elements in every file that knows its size."""
    rooms = (disk, tiers, update)
    before = disk.PIECE_NUMEL
    for room in rooms:
        room.PIECE_NUMEL = PIECE
    try:
        yield
    finally:
        for room in rooms:
            room.PIECE_NUMEL = before


class Line(nn.Module):
    """One block with one long parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(dtype))


def made(folder: Path, placement: Placement, dtype: torch.dtype, *, deferred: bool) -> tuple[Line, Units, ShardedAdamW]:
    model = Line(dtype)
    comm = Communicator(torch.device("cpu"))
    policy = Policy(placement=placement, deferred_update=deferred, debug=True)
    drive = Disk(folder, "test", depth=4, block_bytes=1 << 20) if placement.uses_disk else None
    opened = Tiers(comm.device, placement, drive)
    units = shard(model, [("block", model.block)], comm=comm, policy=policy, tiers=opened)
    return model, units, ShardedAdamW(units, None, lr=1e-2)


def train(folder: Path, placement: Placement, dtype: torch.dtype, *, deferred: bool, steps: int = 4) -> torch.Tensor:
    """Return the weights after a few steps on given gradients."""
    _, units, optimizer = made(folder, placement, dtype, deferred=deferred)
    (flat,) = units.flats
    for step in range(steps):
        full = torch.zeros(flat.layout.padded_numel, dtype=flat.dtype)
        full[:NUMEL] = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
        flat.touched = [True]
        if flat.deferred:
            flat.full_grad, flat._has_gradient = full, True
        else:
            flat.contribute(full)
        optimizer.step()
        optimizer.zero_grad()
    (weights,) = units.state_dict().values()
    units.tiers.close()
    return weights


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", [NVME, Placement(state="nvme"), Placement("host", "host", "host"), Placement("nvme")])
def test_many_pieces_in_files_are_one_update_in_memory(placement, dtype, deferred, tmp_path):
    expected = train(tmp_path, Placement(), dtype, deferred=False)
    with small_pieces():
        assert torch.equal(train(tmp_path, placement, dtype, deferred=deferred), expected)
    assert list(tmp_path.iterdir()) == []


def test_slots_are_not_reused_early(tmp_path, monkeypatch):
    """Weights are written late: whoever fills a slot that is still being written back spoils what is written."""
    expected = train(tmp_path, Placement(), torch.bfloat16, deferred=False)
    move = FlatFile._transfer

    def late(self, call, data, start, doing):
        if doing == "writing" and self.path.name.startswith("block.weights"):
            time.sleep(0.02)
        return move(self, call, data, start, doing)

    monkeypatch.setattr(FlatFile, "_transfer", late)
    with small_pieces():
        assert torch.equal(train(tmp_path, NVME, torch.bfloat16, deferred=True), expected)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_failed_update_poisons_what_comes_after(deferred, tmp_path, monkeypatch):
    with small_pieces():
        _, units, optimizer = made(tmp_path, Placement(state="nvme"), torch.bfloat16, deferred=deferred)
        (flat,) = units.flats
        optimizer.line(flat)
        moment = optimizer.lines[flat.name].moments["exp_avg"].file
        with open(moment.path, "r+b") as file:  # as a failing drive would
            file.seek(disk.DATA_START + 5 * PIECE * 4)
            file.write(b"\x01")
        full = torch.ones(flat.layout.padded_numel, dtype=flat.dtype)
        flat.touched = [True]
        flat.full_grad, flat._has_gradient = full, True

        def step_and_look() -> None:
            optimizer.step()
            units.state_dict()

        with pytest.raises(UserError, match=r"update of block failed.*a byte in .*exp_avg"):
            step_and_look()
        for later in (units.state_dict, optimizer.settle, lambda: optimizer.line(flat)):
            with pytest.raises(UserError, match="update of block failed"):
                later()
        optimizer.zero_grad()
        flat.touched, flat._has_gradient = [True], True
        with pytest.raises(UserError, match="failed"):
            optimizer.step()
        units.tiers.close()
