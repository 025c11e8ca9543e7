"""8-bit moments and the split master in the engine: the state of one process, bit for bit.

For each number of ranks, stage and tier, deferred or not, and after a resume on other ranks and another tier. See
`coded_runs.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.manifest import MANIFEST, read_manifest
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.checkpoint.sealed import write_sealed
from ftkit.engine.optim import coding
from ftkit.engine.optim import optimizer as optimizers
from ftkit.engine.optim.state_stores import CodedMoment
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.spec.state_forms import GROUP_NUMEL
from ftkit.spec.strategy import Strategy
from tests.engine import families
from tests.engine.coded_runs import STEPS, Case, by_reference, compare, engine, train, whole
from tests.engine.trajectory import shard_model, split


def run(case: Case) -> None:
    """On every rank: make the steps on the engine, and compare."""
    with engine(case) as (units, optimizer):
        train(case, units, optimizer, 0, STEPS)
        compare(whole(units, optimizer), by_reference(case))


def first_half(case: Case, folder: str) -> None:
    """On every rank: train for some steps, past the one that leaves out a tensor, and save."""
    with engine(case) as (units, optimizer):
        train(case, units, optimizer, 0, STEPS // 2)
        save_checkpoint(folder, units, optimizer)


def second_half(case: Case, folder: str) -> None:
    """On every rank: load, go on, and compare with a run without a break."""
    with engine(case) as (units, optimizer):
        load_checkpoint(folder, units, optimizer)
        compare(whole(units, optimizer), by_reference(case, STEPS // 2))
        train(case, units, optimizer, STEPS // 2, STEPS)
        compare(whole(units, optimizer), by_reference(case))


CASES = [
    Case(),
    Case(world=2),
    Case(world=3, tier="nvme", deferred=True),
    Case(master="split", world=1, tier="nvme"),
    Case(master="split", world=2, tier="nvme", deferred=True),
    Case(master="split", world=3, tier="host", deferred=True),
    Case(master="split", world=2, stage=0),
    Case(world=3, stage=1, deferred=True),
    Case(master="split", world=3, stage=2),
    Case(dtype="fp16", world=2, tier="host"),
    Case(dtype="fp16", master="split", world=1, tier="nvme", deferred=True),
    Case(dtype="fp16", master="split", world=3, tier="device"),
    Case(dtype="fp32", world=2, tier="nvme"),
    Case(dtype="fp32", world=3),
    Case("lion_8bit", world=1),
    Case("lion_8bit", "split", world=2, tier="nvme", deferred=True),
    Case("lion_8bit", dtype="fp16", world=3, tier="host"),
    Case("adamw", "split", world=1),
    Case("adamw", "split", "fp16", world=2, tier="nvme", deferred=True),
    Case("adamw", "split", world=3, tier="host"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_state_is_that_of_one_process(worlds, case):
    worlds[case.world].run(run, case)


def run_with_pytorch(case: Case) -> None:
    """On every rank: make the steps as a device without kernels does, in parts of 10 groups, and compare coded tensors."""
    with engine(case) as (units, optimizer), mock.patch.object(optimizers, "CONVERTED_NUMEL", 10 * GROUP_NUMEL):
        optimizer.loops_for = lambda shard: None
        train(case, units, optimizer, 0, STEPS)
        found, wanted = (
            {name: tensor for name, tensor in tensors.items() if name.startswith(("up/", "down/"))}
            for tensors in (whole(units, optimizer), by_reference(case))
        )
        compare(found, wanted)


@pytest.mark.parametrize("case", [Case(world=2), Case("lion_8bit", "split", world=1)], ids=str)
def test_pytorch_operations_in_parts_give_the_same_state(worlds, case):
    worlds[case.world].run(run_with_pytorch, case)


RESUMED = [
    (Case(), Case(world=3, tier="nvme", deferred=True)),
    (Case(world=3, stage=0), Case(world=2, tier="host")),
    (Case(world=3, tier="nvme"), Case(world=2, tier="host")),
    (Case(master="split", world=2, tier="host"), Case(master="split", world=1, tier="nvme")),
    (Case(master="split", world=3, stage=2, dtype="fp16"), Case(master="split", world=2, tier="nvme", dtype="fp16")),
    (Case("lion_8bit", world=2, tier="nvme", deferred=True), Case("lion_8bit", world=3, stage=0)),
]


@pytest.mark.parametrize(("first", "second"), RESUMED, ids=str)
def test_a_resume_on_other_ranks_and_another_tier_changes_nothing(worlds, tmp_path: Path, first: Case, second: Case):
    folder = str(tmp_path / "saved")
    worlds[first.world].run(first_half, first, folder)
    worlds[second.world].run(second_half, second, folder)


def converted(case: Case, folder: str) -> dict[str, Tensor]:
    """On every rank: load a checkpoint of the other form."""
    with engine(case) as (units, optimizer):
        load_checkpoint(folder, units, optimizer)
        found = whole(units, optimizer)
        train(case, units, optimizer, STEPS // 2, STEPS)
        return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_matrix_that_is_in_no_block_any_more_keeps_its_moments(worlds, tmp_path, world):
    folder, writer = str(tmp_path / "saved"), Case(world=2)
    worlds[2].run(first_half, writer, folder)
    found = worlds[world].run(converted, Case("adamw", world=world, convert=True, blocks=False), folder)[0]
    compare(found, by_reference(writer, STEPS // 2))


@pytest.mark.parametrize("removed", ["block.exp_avg_scales.safetensors", "block.exp_avg_sq_scales.safetensors"])
def test_codes_without_scales_are_a_broken_checkpoint(world1, tmp_path, removed):
    folder = tmp_path / "saved"
    world1.run(first_half, Case(), str(folder))
    manifest = read_manifest(folder)
    del manifest["files"][removed]
    write_sealed(folder / MANIFEST, manifest)
    with pytest.raises(AssertionError, match=r"block.exp_avg(_sq)?.safetensors: block.down is in 8 bits, without exp_avg"):
        world1.run(converted, Case(), str(folder))


def coded_again(moment: Tensor, *, root: bool) -> Tensor:
    """Return a moment after it was encoded and decoded."""
    stored = moment.double().sqrt().float() if root else moment
    values = coding.decode(*coding.encode(stored, signed=not root), signed=not root)
    return values.square() if root else values


@pytest.mark.parametrize(("saved", "now"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_moments_are_converted_only_when_asked(worlds, tmp_path, saved, now):
    folder, writer, reader = str(tmp_path / "saved"), Case(saved, world=2), Case(now, world=3, tier="nvme")
    worlds[2].run(first_half, writer, folder)
    with pytest.raises(AssertionError, match=r"its moments are .*, those of this run .* optimizer.convert_state: true"):
        worlds[3].run(converted, reader, folder)
    found = worlds[3].run(converted, replace(reader, convert=True), folder)[0]
    wanted = by_reference(writer, STEPS // 2)
    for name in ("up", "down") if now == "adamw_8bit" else ():
        for moment, root in (("exp_avg", False), ("exp_avg_sq", True)):
            wanted[f"{name}/{moment}"] = coded_again(wanted[f"{name}/{moment}"], root=root)
    compare(found, wanted)


def test_a_master_becomes_split_and_whole_again_on_a_resume(worlds, tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    plain, halves = Case(world=2), Case(master="split", world=1, tier="host")
    worlds[2].run(first_half, plain, one)
    worlds[1].run(resaved, halves, one, two)
    found = worlds[2].run(converted, plain, two)[0]
    compare(found, by_reference(plain, STEPS // 2))


def resaved(case: Case, source: str, target: str) -> None:
    """On every rank: load a checkpoint and save it again."""
    with engine(case) as (units, optimizer):
        load_checkpoint(source, units, optimizer)
        save_checkpoint(target, units, optimizer)


def trained(master: str) -> tuple[list[float], dict[str, Tensor]]:
    """On every rank: train a small Llama in bf16 for 20 steps. An fp32 master is rounded to its weights as a split one."""
    units = shard_model(families.build("llama"), Strategy.of(dtype="bf16", gradient_dtype="fp32", master=master))
    optimizer, losses, comm = SHARDED["adamw"](units, lr=3e-3), [], units.comm
    for step in range(20):
        rows = families.batch("llama", step)
        loss = families.token_loss(units.model, split(rows, comm.world_size, comm.rank), families.label_tokens(rows))
        (loss * comm.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(comm.sum(loss.detach().clone()).item())
        for flat in units.trainable if master == "fp32" else ():
            state = optimizer.state_of(flat)
            residual = torch.empty(flat.layout.shard_numel, dtype=torch.int16)
            coding.split(state.master.read(0, residual.numel()), flat.weights.tensor, residual)
        comm.barrier()
    masters = {flat.name: flat.collect(optimizer.state_of(flat).master).clone() for flat in units.trainable}
    return losses, masters


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_split_master_trains_as_an_fp32_master(worlds, world):
    one, two = (worlds[world].run(trained, master)[0] for master in ("split", "fp32"))
    assert one[0] == two[0]
    assert one[0][-1] < one[0][0]
    compare(one[1], two[1])


def bytes_per_parameter(case: Case) -> float:
    """Return the bytes of state of the coded matrices, in the engine's storages, per parameter."""
    with engine(case) as (units, optimizer):
        (flat,) = (flat for flat in units.trainable if flat.kind == "block")
        state = optimizer.state_of(flat)
        moments = [moment for moment in state.moments.values() if isinstance(moment, CodedMoment)]
        used = [extent.store for name, extent in state.extents.items() if name in ("master", "residual")]
        used += [extent.store for moment in moments for extent in (moment.codes, moment.scales)]
        return sum(store.numel * store.dtype.itemsize for store in used) / flat.layout.shard_numel


@pytest.mark.parametrize(("rule", "master", "most"), [("adamw_8bit", "fp32", 6.1), ("adamw_8bit", "split", 4.1)])
def test_state_takes_six_or_four_bytes_per_parameter(world1, rule, master, most):
    (found,) = world1.run(bytes_per_parameter, Case(rule, master))
    assert most - 0.1 < found <= most

