"""Persistent buffers go with a checkpoint: a model with running means goes on as it was."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.checkpoint.checkpoint import load_checkpoint
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.buffers import FILE, persistent_buffers
from ftkit.engine.core.shard import Units, shard
from ftkit.engine.files.sealed_files import BrokenCheckpoint
from ftkit.engine.optim.optimizer import ShardedAdamW
from ftkit.spec.strategy import Strategy
from tests.worlds import World


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def made() -> tuple[Units, ShardedAdamW]:
    model = Normed()
    comm = Communicator(torch.device("cpu"))
    strategy = Strategy.of(stage=3, activations="keep")
    units = shard(model, [("first", model.first), ("last", model.last)], comm=comm, strategy=strategy)
    return units, ShardedAdamW(units, None, lr=1e-2)


def train(units: Units, optimizer: ShardedAdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        loss = units.model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    units.model.eval()
    losses.append(units.model(torch.ones(1, 8)).item())
    units.model.train()
    return losses


def go_on(folder: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Save in the middle and go on; do the same again with a fresh model that reads the save."""
    units, optimizer = made()
    train(units, optimizer, range(3))
    save_checkpoint(folder, units, optimizer)
    after = train(units, optimizer, range(3, 6))
    units, optimizer = made()
    load_checkpoint(folder, units, optimizer)
    again = train(units, optimizer, range(3, 6))
    return after, again, persistent_buffers(units.model)


def test_running_means_go_on(world2: World, tmp_path: Path) -> None:
    for after, again, buffers in world2.run(go_on, str(tmp_path / "save")):
        assert again == after
        assert sorted(buffers) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
        assert buffers["norm.num_batches_tracked"] == 6


def test_a_changed_byte_of_them_is_refused(tmp_path: Path) -> None:
    units, optimizer = made()
    save_checkpoint(tmp_path / "save", units, optimizer)
    data = bytearray((tmp_path / "save" / FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / "save" / FILE).write_bytes(data)
    with pytest.raises(BrokenCheckpoint, match=FILE):
        load_checkpoint(tmp_path / "save", units, optimizer)


class Averaging(nn.Module):
    """Moves averages in a forward, by several ways, and computes with them; one is too large to be looked at whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("book", torch.zeros(3000, 8))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("replaced", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        y = self.last(self.norm(inner) + self.centre + self.book[7] + self.replaced)
        mean = inner.detach().mean(0)
        self.centre.lerp_(mean, 0.1)
        self.book.data.lerp_(mean, 0.2)
        self.seen.fill_(True)
        self.replaced = self.replaced + mean
        return y


def averaged(ours: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return a rank's losses on rows of its own, and its buffers after a step: by plain DDP, or by ours."""
    model: nn.Module = Averaging()
    comm = Communicator(torch.device("cpu"))
    if ours:
        blocks = [("first", model.first), ("last", model.last)]
        units = shard(model, blocks, comm=comm, strategy=Strategy.of(stage=3, activations="keep"))
        optimizer: torch.optim.Optimizer = ShardedAdamW(units, None, lr=1e-2, eps=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    called = model if ours else nn.parallel.DistributedDataParallel(model)
    losses = []
    for step in range(5):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: buffer.clone() for name, buffer in persistent_buffers(model).items()}


def test_ranks_go_on_with_the_buffers_of_rank_0_as_under_ddp(world2: World) -> None:
    truth, ours = world2.run(averaged, False), world2.run(averaged, True)
    assert ours[0][0] != ours[1][0]
    for rank in (0, 1):
        assert ours[rank][0] == pytest.approx(truth[rank][0], rel=1e-5)
        for name, buffer in truth[0][1].items():
            torch.testing.assert_close(ours[rank][1][name], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_whole_parameters_are_copied_and_pickled_as_plain_ones(stage):
    model = Normed()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.first.weight.mark = "a user's"
    blocks = [("first", model.first), ("last", model.last)]
    shard(model, blocks, comm=Communicator(torch.device("cpu")), strategy=Strategy.of(stage=stage))
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    assert file.tell() < 8192, "not the whole line with each"
    file.seek(0)
    for found in (torch.load(file), copy.deepcopy(dict(model.named_parameters()))):
        assert {name: type(each) for name, each in found.items()} == dict.fromkeys(expected, nn.Parameter)
        assert all(torch.equal(each, expected[name]) and each.requires_grad for name, each in found.items())
        assert found["first.weight"].mark == "a user's"
        found["first.weight"].grad = torch.zeros(8, 8)
