"""Persistent buffers go with a checkpoint: a model with running means goes on as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.manifest import BUFFERS_FILE
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.shard import shard
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


def made() -> tuple[ShardedModel, ShardedAdamW]:
    model = Normed()
    comm = Communicator(torch.device("cpu"))
    strategy = Strategy.of(stage=3, activations="keep")
    units = shard(model, [("first", model.first), ("last", model.last)], comm=comm, strategy=strategy)
    return units, ShardedAdamW(units, None, lr=1e-2)


def train(units: ShardedModel, optimizer: ShardedAdamW, steps: range) -> list[float]:
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
    data = bytearray((tmp_path / "save" / BUFFERS_FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / "save" / BUFFERS_FILE).write_bytes(data)
    with pytest.raises(BrokenCheckpoint, match=BUFFERS_FILE):
        load_checkpoint(tmp_path / "save", units, optimizer)


def save_with_own_buffers(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train each rank on rows of its own and save; return the buffers before and after the save."""
    units, optimizer = made()
    rank = units.comm.rank
    train(units, optimizer, range(10 * rank, 10 * rank + 2))
    before = {name: buffer.clone() for name, buffer in persistent_buffers(units.model).items()}
    save_checkpoint(folder, units, optimizer)
    return before, persistent_buffers(units.model)


def test_a_save_gives_all_ranks_the_buffers_of_rank_0(world2: World, tmp_path: Path) -> None:
    (first, _), (other, after) = world2.run(save_with_own_buffers, str(tmp_path / "save"))
    assert not torch.equal(first["norm.running_mean"], other["norm.running_mean"])
    saved = load_file(tmp_path / "save" / BUFFERS_FILE)
    assert saved.keys() == first.keys()
    for name, buffer in first.items():
        assert torch.equal(after[name], buffer)
        assert torch.equal(saved[name], buffer)
