"""Saves that take what lies on NVMe by reference: the moment of the save, whatever training writes meanwhile.

Where no file system of the machine shares blocks, the system call is replaced by a copy: what is tested then is all but it.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ftkit.engine.checkpoint import saving as engine_saving
from ftkit.engine.checkpoint.checkpoint import check_checkpoint, load_checkpoint
from ftkit.engine.checkpoint.saving import Saving
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.shard import shard
from ftkit.engine.files import flat_file as flatfile
from ftkit.engine.files import reflink as clone
from ftkit.engine.files.flat_file import PIECE_NUMEL
from ftkit.engine.files.pieces import PieceWriter
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.optim.optimizer import ShardedAdamW
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy

NVME = dict.fromkeys(("parameters", "gradients", "state"), "nvme")
WIDTH = 1100  # two blocks of a piece and a part of one


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def made(folder: Path) -> tuple[Two, Any, ShardedAdamW]:
    comm, model = Communicator(torch.device("cpu")), Two()
    strategy = Strategy.of(**NVME, update="deferred", debug=True)
    tiers = Tiers.open(comm, strategy, folder, 0)
    units = shard(model, [("first", model.first), ("second", model.second)], comm=comm, strategy=strategy, tiers=tiers)
    return model, units, ShardedAdamW(units, None, lr=1e-2)


def train(model: Two, optimizer: ShardedAdamW, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(3, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def copied(source: int, start: int, size: int, target: int, at: int) -> bool:
    """Do what a clone does, by copying."""
    path = f"/proc/self/fd/{source}"
    with open(path, "rb", buffering=0) as file:
        assert os.pwrite(target, os.pread(file.fileno(), size, start), at) == size
    return True


@pytest.fixture(params=["copied", "xfs", "btrfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder whose file system shares blocks, or where that is replaced."""
    if request.param == "copied":
        with mock.patch.object(flatfile, "clone_range", copied):
            yield tmp_path
        return
    make = shutil.which(f"mkfs.{request.param}")
    if os.geteuid() != 0 or make is None:
        pytest.skip(f"needs root and mkfs.{request.param}")
    image, mount = tmp_path / "image", tmp_path / "mount"
    with open(image, "wb") as file:
        file.truncate(500 << 20)
    mount.mkdir()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([make, "-q", str(image)], check=True, **quiet)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=False, **quiet).returncode:
        pytest.skip("this machine mounts no images")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=False, **quiet)


def test_it_is_the_moment_of_the_save(place: Path) -> None:
    """A save that takes its time, with three steps meanwhile: no update waits for whole pieces, and none is seen."""
    model, units, optimizer = made(place)
    train(model, optimizer, 2)
    move, read = PieceWriter._transfer, engine_saving.read_back
    late = mock.patch.object(engine_saving, "read_back", lambda *args: (time.sleep(0.5), read(*args))[1])
    with late, mock.patch.object(PieceWriter, "_transfer", staticmethod(lambda *args: (os.sync(), move(*args)))):
        saving = Saving(place / "save", units, optimizer)
        after = train(model, optimizer, 3)
        saving.wait()
    assert saving.blocked_seconds < saving.seconds - 2.5, "no update waits until six files were read back"
    pieces = WIDTH * (WIDTH + 1) // PIECE_NUMEL
    assert saving.shared_bytes == 2 * 3 * pieces * PIECE_NUMEL * 4, "weights and two moments of two blocks"
    check_checkpoint(place / "save")
    load_checkpoint(place / "save", units, optimizer)
    assert train(model, optimizer, 3) == after
    units.tiers.close()


def test_what_the_drive_gives_back_is_compared(tmp_path: Path) -> None:
    model, units, optimizer = made(tmp_path)
    train(model, optimizer, 1)

    def flipped(source: int, start: int, size: int, target: int, at: int) -> bool:
        copied(source, start, size, target, at)
        with open(f"/proc/self/fd/{target}", "r+b") as file:
            file.seek(at + size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return True

    with (
        mock.patch.object(flatfile, "clone_range", flipped),
        pytest.raises(UserError, match=r"bytes \d+ to \d+ are not those written to NVMe"),
    ):
        Saving(tmp_path / "save", units, optimizer).wait()
    assert not list(tmp_path.glob("save*"))
    units.tiers.close()


@pytest.mark.parametrize(("answer", "shared"), [(None, True), (errno.EXDEV, False), (errno.EOPNOTSUPP, False)])
def test_where_it_cannot_be_done_the_caller_copies(answer: int | None, shared: bool) -> None:
    def ioctl(*args: Any) -> int:
        if answer is not None:
            raise OSError(answer, os.strerror(answer))
        return 0

    with mock.patch.object(clone.fcntl, "ioctl", ioctl):
        assert clone.clone_range(0, 0, 4096, 1, 0) is shared


def test_a_full_drive_is_no_such_case() -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    with mock.patch.object(clone.fcntl, "ioctl", full), pytest.raises(OSError, match="full"):
        clone.clone_range(0, 0, 4096, 1, 0)
