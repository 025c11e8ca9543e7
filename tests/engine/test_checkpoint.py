"""Checkpoints: the same training goes on after a reload, on any number of ranks and at any stage, or it is refused.

What a world wrote is read by another one; the trajectory after the reload is compared with the one that was not broken off.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ftkit.engine.checkpoint.loading import check_checkpoint, load_checkpoint
from ftkit.engine.checkpoint.manifest import MANIFEST
from ftkit.engine.checkpoint.pieces import PieceWriter
from ftkit.engine.checkpoint.saving import Saving, save_checkpoint
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint, read_sealed, write_sealed
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.updater import Updater
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.trajectory import shard_model
from tests.worlds import PATIENCE, World, Worlds

STEPS_BEFORE, STEPS_AFTER = 2, 3

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def make(strategy: Strategy, **changes: Any) -> tuple[Any, ShardedAdamW]:
    """Return a sharded small Llama and its optimizer with two groups."""
    model = families.build("llama", **changes)
    units = shard_model(model, strategy)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 5e-4}]
    return units, ShardedAdamW(units, groups, lr=1e-3)


def train(units: Any, optimizer: ShardedAdamW, first: int, steps: int) -> list[float]:
    """Train on batches that depend on the step only; return the global losses."""
    losses = []
    comm = units.comm
    for step in range(first, first + steps):
        rows = torch.randint(3, families.VOCABULARY, (6, 8), generator=torch.Generator().manual_seed(step))
        own = rows.tensor_split(comm.world_size)[comm.rank]
        loss = units.model(input_ids=own, labels=own, use_cache=False).loss
        optimizer.scale(loss).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(comm.sum(loss.detach().float().clone())) / comm.world_size)
    return losses


def write(folder: str, strategy: Strategy) -> tuple[list[float], dict[str, Tensor]]:
    """Train, save, and go on; return the losses after the save and the last weights."""
    units, optimizer = make(strategy)
    train(units, optimizer, 0, STEPS_BEFORE)
    save_checkpoint(folder, units, optimizer, extra={"cursor": 7})
    losses = train(units, optimizer, STEPS_BEFORE, STEPS_AFTER)
    return losses, units.state_dict()


def read(folder: str, strategy: Strategy) -> tuple[list[float], dict[str, Tensor]]:
    """Load into a model with other weights and go on."""
    units, optimizer = make(strategy)
    train(units, optimizer, 90, 1)
    assert load_checkpoint(folder, units, optimizer) == {"cursor": 7}
    losses = train(units, optimizer, STEPS_BEFORE, STEPS_AFTER)
    return losses, units.state_dict()


POLICIES = {
    "zero3": Strategy.of(stage=3, debug=True),
    "zero3-hold-keep": Strategy.of(stage=3, activations="keep", reshard_after_forward=False),
    "zero2": Strategy.of(stage=2),
    "zero1-keep": Strategy.of(stage=1, activations="keep"),
    "ddp": Strategy.of(stage=0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_it_goes_on_exactly_on_as_many_ranks(world2: World, name: str, tmp_path: Path) -> None:
    losses, weights = world2.run(write, str(tmp_path / name), POLICIES[name])[0]
    again, restored = world2.run(read, str(tmp_path / name), POLICIES[name])[0]
    assert again == losses
    assert all(torch.equal(restored[key], weights[key]) for key in weights)


@pytest.mark.parametrize("dtype", [torch.float16])
def test_narrow_weights_come_back_from_masters(world2: World, dtype: torch.dtype, tmp_path: Path) -> None:
    strategy = Strategy.of(stage=3, dtype=NAMES[dtype])
    losses, weights = world2.run(write, str(tmp_path / "a"), strategy)[0]
    again, restored = world2.run(read, str(tmp_path / "a"), strategy)[0]
    assert again == losses
    assert all(torch.equal(restored[key], weights[key]) for key in weights)
    names = {path.name.rsplit(".", 2)[1] for path in (tmp_path / "a").glob("*.safetensors")}
    assert names == {"master", "exp_avg", "exp_avg_sq"}
    scale = json.loads((tmp_path / "a" / MANIFEST).read_text())["optimizer"]["loss_scale"]
    assert scale["dynamic"] == (dtype == torch.float16)


def change_dtype(folder: str, before: torch.dtype, after: torch.dtype) -> tuple[float, bool]:
    """Save in one compute dtype, load in another; return the loss scale that goes on."""
    units, optimizer = make(Strategy.of(stage=3, dtype=NAMES[before]))
    train(units, optimizer, 0, 1)
    save_checkpoint(folder, units, optimizer)
    units, optimizer = make(Strategy.of(stage=3, dtype=NAMES[after]))
    load_checkpoint(folder, units, optimizer)
    return optimizer.loss_scale.value, optimizer.loss_scale.dynamic


def test_the_loss_scale_belongs_to_the_dtype_that_goes_on(world2: World, tmp_path: Path) -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    assert world2.run(change_dtype, str(tmp_path / "up"), bf16, fp16)[0] == (2.0**16, True)
    assert world2.run(change_dtype, str(tmp_path / "down"), fp16, bf16)[0] == (1.0, False)


def test_files_are_plain_safetensors_without_a_world_size(worlds: Worlds, tmp_path: Path) -> None:
    for size in (1, 2, 3):
        worlds[size].run(write, str(tmp_path / str(size)), Strategy.of(stage=3))
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    for size in (2, 3):
        assert sorted(path.name for path in (tmp_path / str(size)).iterdir()) == names
    for name in names[:-1]:
        if not name.endswith(".safetensors"):
            continue
        sizes = {(tmp_path / str(size) / name).stat().st_size for size in (1, 2, 3)}
        assert len(sizes) == 1
        first, second = load_file(tmp_path / "1" / name), load_file(tmp_path / "3" / name)
        for key, tensor in first.items():
            torch.testing.assert_close(tensor, second[key], rtol=1e-3, atol=1e-5)
        with open(tmp_path / "1" / name, "rb") as file:
            assert (8 + int.from_bytes(file.read(8), "little")) % 4096 == 0


def load_and_tell(folder: str) -> str:
    """Return the error of a load."""
    units, optimizer = make(Strategy.of(stage=3))
    try:
        load_checkpoint(folder, units, optimizer)
    except UserError as error:
        return str(error)
    return "loaded"


def weights_alone(folder: str) -> tuple[bool, bool, list[int], float]:
    """Train on, and take the weights of a checkpoint that has lost its moments; the state stays as it is."""
    units, optimizer = make(POLICIES["zero3"])
    train(units, optimizer, 0, STEPS_BEFORE)
    save_checkpoint(folder, units, optimizer)
    saved = units.state_dict()
    train(units, optimizer, STEPS_BEFORE, 1)
    optimizer.settle()
    state = optimizer.state_of(units.trainable[0])
    moment = state.moments["exp_avg"].tensor.clone()
    for path in Path(folder).glob("*.exp_avg*"):
        path.unlink()
    load_checkpoint(folder, units, optimizer, state=False)
    now = units.state_dict()
    same = all(torch.equal(now[name], tensor) for name, tensor in saved.items())
    return same, torch.equal(state.moments["exp_avg"].tensor, moment), state.steps, optimizer.param_groups[0]["lr"]


def test_weights_come_back_without_the_state(world1: World, tmp_path: Path) -> None:
    [(same, kept, steps, lr)] = world1.run(weights_alone, str(tmp_path / "save"))
    assert same
    assert kept
    assert set(steps) == {STEPS_BEFORE + 1}
    assert lr == 1e-3 / (STEPS_BEFORE + 1)


def test_what_is_no_whole_checkpoint_is_refused(world1: World, tmp_path: Path) -> None:
    good = tmp_path / "good"
    world1.run(write, str(good), Strategy.of(stage=3))

    def spoiled(name: str) -> Path:
        copy = tmp_path / name
        shutil.copytree(good, copy)
        return copy

    without = spoiled("without-manifest")
    (without / MANIFEST).unlink()
    assert "no checkpoint of ftkit" in world1.run(load_and_tell, str(without))[0]
    later = spoiled("later")
    manifest = read_sealed(later / MANIFEST)
    write_sealed(later / MANIFEST, {**manifest, "format": 99})
    assert "format 99" in world1.run(load_and_tell, str(later))[0]
    garbled = spoiled("garbled")
    (garbled / MANIFEST).write_text("{")
    assert "not a file that ftkit wrote" in world1.run(load_and_tell, str(garbled))[0]
    cut = spoiled("cut")
    victim = sorted(cut.glob("*.exp_avg.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    assert f"{victim}: {victim.stat().st_size} bytes, " in world1.run(load_and_tell, str(cut))[0]
    lacking = spoiled("lacking")
    victim = sorted(lacking.glob("*.exp_avg_sq.safetensors"))[0]
    victim.unlink()
    assert f"{victim}: No such file" in world1.run(load_and_tell, str(lacking))[0]
    del manifest["files"][victim.name]
    write_sealed(lacking / MANIFEST, manifest)
    assert "has no exp_avg_sq of" in world1.run(load_and_tell, str(lacking))[0]


def test_not_one_byte_can_change_unseen(world1: World, tmp_path: Path) -> None:
    """Of each file: its first bytes, its last, and some in between, of header and data."""
    folder = tmp_path / "good"
    world1.run(write, str(folder), Strategy.of(stage=3))
    check_checkpoint(folder)
    random = torch.Generator().manual_seed(0)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        drawn = torch.randint(len(good), (12,), generator=random).tolist()
        for at in {0, 1, 8, 20, min(4096, len(good) - 1), len(good) - 1, *drawn}:
            bad = bytearray(good)
            bad[at] ^= 1 << int(torch.randint(8, (1,), generator=random))
            path.write_bytes(bad)
            with pytest.raises(UserError, match=str(path)):
                check_checkpoint(folder)
        path.write_bytes(good)
    assert "loaded" in world1.run(load_and_tell, str(folder))[0]
    victim = sorted(folder.glob("*.exp_avg.safetensors"))[0]
    bad = bytearray(victim.read_bytes())
    bad[5000] ^= 1
    victim.write_bytes(bad)
    assert f"{victim}: bytes 4096 to {len(bad)} changed" in world1.run(load_and_tell, str(folder))[0]
    for share in range(3):
        check_checkpoint_tells = pytest.raises(BrokenCheckpoint) if share == 1 else nullcontext()
        with check_checkpoint_tells:
            check_checkpoint(folder, share, 3)


def save_twice(folder: str) -> list[str]:
    """Save to the same folder twice, and to one that cannot be made; return the errors."""
    units, optimizer = make(Strategy.of(stage=3))
    save_checkpoint(folder, units, optimizer)
    errors = []
    for target in (folder, "/proc/nowhere/checkpoint"):
        try:
            save_checkpoint(target, units, optimizer)
        except UserError as error:
            errors.append(str(error))
    return errors


def test_every_rank_learns_that_a_save_failed(world2: World, tmp_path: Path) -> None:
    for errors in world2.run(save_twice, str(tmp_path / "once")):
        assert len(errors) == 2
        assert "exists already" in errors[0]
    assert not list(tmp_path.glob("*.writing"))


# --- while training goes on


def write_meanwhile(folder: str, strategy: Strategy) -> tuple[list[float], dict[str, Tensor], bool]:
    """Train, save while training goes on, on a slow drive; return losses, weights, and whether an update came meanwhile.

    The drive takes nothing until an update asks whether it may begin: so a save is on its way whenever that is.
    """
    units, optimizer = make(strategy)
    train(units, optimizer, 0, STEPS_BEFORE)
    waited: list[bool] = []
    asked, move, wait = threading.Event(), PieceWriter._transfer, Saving.await_capture

    def transfer(handle: int, data: Any, at: int) -> None:
        asked.wait(10.0 * PATIENCE)
        time.sleep(0.02)
        move(handle, data, at)

    def await_capture(self: Saving, flat: FlatParameter) -> None:
        waited.append(not self.captured[flat].is_set())
        asked.set()
        wait(self, flat)

    slow = mock.patch.object(PieceWriter, "_transfer", staticmethod(transfer))
    with slow, mock.patch.object(Saving, "await_capture", await_capture):
        saving = Saving(folder, units, optimizer, extra={"cursor": 7})
        losses = []
        for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            losses += train(units, optimizer, step, 1)
            if units.saving is not None:
                saving.poll()
        if units.saving is not None:
            saving.wait()
    optimizer.settle()
    return losses, units.state_dict(), any(waited)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["zero3", "zero1-keep", "nvme", "ddp", "deferred"])
def test_a_save_holds_one_moment_while_training_goes_on(world2: World, name: str, tmp_path: Path) -> None:
    """An update waits for its own line, and for no other; what is read back is the moment of the save, to the bit."""
    nvme = dict.fromkeys(("parameters", "gradients", "state"), "nvme")
    more = {"deferred": Strategy.of(update="deferred"), "nvme": Strategy.of(**nvme, update="deferred")}
    strategy = (POLICIES | more)[name]
    expected = world2.run(write, str(tmp_path / "at-once"), strategy)[0]
    losses, weights, update_waited = world2.run(write_meanwhile, str(tmp_path / "meanwhile"), strategy)[0]
    assert losses == expected[0], "a save changes no trajectory"
    assert all(torch.equal(weights[key], expected[1][key]) for key in weights)
    assert update_waited
    for path in sorted((tmp_path / "at-once").iterdir()):
        assert path.read_bytes() == (tmp_path / "meanwhile" / path.name).read_bytes(), path.name
    assert world2.run(read, str(tmp_path / "meanwhile"), strategy)[0][0] == losses


def write_after_late_update(folder: str) -> bool:
    """Save right after a step whose update is slow and deferred; return whether what is saved is of that step."""
    strategy = Strategy.of(state="nvme", update="deferred")
    units, optimizer = make(strategy)
    train(units, optimizer, 0, STEPS_BEFORE)
    compute = Updater._compute

    def late(*args: Any) -> None:
        time.sleep(0.02)
        compute(*args)

    with mock.patch.object(Updater, "_compute", late):
        train(units, optimizer, STEPS_BEFORE, 1)
        Saving(folder, units, optimizer).wait()
    optimizer.settle()
    last = units.trainable[-1]
    store = optimizer.states[last.name].moments["exp_avg"]
    kept = torch.cat([store.read(low, high).clone() for low, high in store.pieces()])[: last.own_numel]
    load_checkpoint(folder, units, optimizer)
    store = optimizer.states[last.name].moments["exp_avg"]
    return torch.equal(torch.cat([store.read(low, high).clone() for low, high in store.pieces()])[: last.own_numel], kept)


def test_a_save_waits_for_the_update_before_it(world2: World, tmp_path: Path) -> None:
    assert all(world2.run(write_after_late_update, str(tmp_path / "save")))


def open_files_in(folder: str) -> list[str]:
    """Return what this process has open in a folder or what was removed from it."""
    names = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            names.append(os.readlink(handle))
    return [name for name in names if name.startswith(folder)]


def fail_meanwhile(folder: str, how: str) -> list[str]:
    """Save while training goes on, on a drive that fails for rank 1; return the errors, of both kinds of end."""
    units, optimizer = make(Strategy.of(stage=3))
    train(units, optimizer, 0, 1)

    def full(handle: int, data: Any, at: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if how == "full" else ZeroDivisionError("a fault of ours")

    told = []
    for attempt in ("wait", "poll"):
        with mock.patch.object(PieceWriter, "_transfer", staticmethod(full)) if units.comm.rank else nullcontext():
            saving = Saving(f"{folder}-{attempt}", units, optimizer)
            try:
                if attempt == "wait":
                    saving.wait()
                step = 0
                while not saving.poll():  # a world's case has a time limit
                    train(units, optimizer, step := step + 1, 1)
            except UserError as error:
                told.append(str(error))
    assert open_files_in(folder) == []
    save_checkpoint(f"{folder}-after", units, optimizer)
    return told


@pytest.mark.parametrize(("how", "says"), [("full", "No space left on device"), ("fault", "ZeroDivisionError: a fault")])
def test_a_save_that_fails_leaves_nothing_and_training_goes_on(world2: World, how: str, says: str, tmp_path: Path) -> None:
    for told in world2.run(fail_meanwhile, str(tmp_path / "save"), how):
        assert len(told) == 2
        assert all(says in each and "could not be written" in each for each in told)
    assert [path.name for path in tmp_path.iterdir()] == ["save-after"]
    check_checkpoint(tmp_path / "save-after")


def load_what_is_refused(folder: str) -> list[float]:
    """Load a damaged checkpoint of the first weights into an optimizer without state; return sums of weights."""
    strategy = Strategy.of(stage=3, dtype="bf16")
    units, optimizer = make(strategy)
    optimizer.prepare()
    save_checkpoint(folder, units, optimizer)
    if units.comm.rank == 0:
        for path in Path(folder).glob("*.master.safetensors"):
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
    units.comm.any(False)  # all wait for it
    sizes = []
    for refused in (True, False):
        units, optimizer = make(strategy)
        if refused:
            with pytest.raises(BrokenCheckpoint):
                load_checkpoint(folder, units, optimizer)
        train(units, optimizer, 0, 3)
        moments = [m for state in optimizer.states.values() for m in state.moments.values()]
        assert all(bool(torch.isfinite(moment.tensor).all()) for moment in moments)
        sizes.append(sum(float(tensor.double().abs().sum()) for tensor in units.state_dict().values()))
    return sizes


def test_a_load_that_is_refused_leaves_the_masters_of_the_weights(world2: World, tmp_path: Path) -> None:
    for refused, plain in world2.run(load_what_is_refused, str(tmp_path / "save")):
        assert refused == pytest.approx(plain, rel=2e-3), "masters begin at the weights in bf16, which were overwritten"
