"""8-bit moments and the split master in the engine, against one process that updates whole tensors with the reference.

The gradients are given, and equal on all ranks, so every bit of the state is known: for each number of ranks, stage and
tier, deferred or not, and after a resume on other ranks and another tier. Steps leave out a tensor, have rows of zeros, and
overflow once in fp16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftkit.engine.checkpoint import saving
from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory import tiers
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim import coding, state_stores, updater
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.state_stores import CodedMoment
from ftkit.engine.shard import shard
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.state_forms import GROUP_NUMEL, can_be_coded
from ftkit.spec.strategy import Strategy
from ftkit.spec.update_rules import RULES
from tests.engine import families, gradients
from tests.engine.trajectory import shard_model, split

PIECE = 1024 * GROUP_NUMEL
"""Elements of a piece here: the scales of one fill a page."""
BLOCK = {"norm": (257,), "up": (256, 1024), "odd": (500, 301), "down": (640, 200)}
OTHERS = {"embedding": (500, 64), "head_norm": (64,)}
SHAPES = BLOCK | OTHERS
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw_8bit": {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    "lion_8bit": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
}
STEPS = 6
SCALE = 64.0


@dataclass(frozen=True)
class Case:
    """A run: rule, form of the master, dtype of the weights, ranks, stage, tier of all that may leave the device."""

    rule: str = "adamw_8bit"
    master: str = "fp32"
    dtype: str = "bf16"
    world: int = 1
    stage: int = 3
    tier: str = "device"
    deferred: bool = False
    convert: bool = False

    def __str__(self) -> str:
        late = "-deferred" * self.deferred
        return f"{self.rule}-{self.master}-{self.dtype}-W{self.world}-stage{self.stage}-{self.tier}{late}"

    @property
    def strategy(self) -> Strategy:
        return Strategy.of(
            stage=self.stage,
            dtype=self.dtype,
            gradient_dtype="fp32",
            parameters=self.tier if self.stage == 3 else "device",
            gradients=self.tier if self.stage >= 2 else "device",
            state=self.tier,
            update="deferred" if self.deferred else "now",
            master=self.master,
            convert_state=self.convert,
            debug=True,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]


class Model(nn.Module):
    """A block with coded and other tensors, in mixed order, between an embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        values = {name: nn.Parameter(value_of(name)) for name in SHAPES}
        self.embedding, self.head_norm = values["embedding"], values["head_norm"]
        self.block = nn.ParameterDict({name: values[name] for name in BLOCK})


def value_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator) * 0.02


def gradient_of(name: str, step: int) -> Tensor | None:
    """Return a gradient of few bits, so that the mean of equal ones is exact. `down` has none at step 1."""
    if (name, step) == ("down", 1):
        return None
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    found = torch.randn(SHAPES[name], generator=generator) * torch.rand(SHAPES[name], generator=generator) ** 6
    found[:2] = 0
    if (name, step) == ("up", 3):
        found[5, 5] = torch.inf
    return found.bfloat16().float() * SCALE / 4


def sent(gradient: Tensor, case: Case) -> Tensor:
    """Return a gradient in the precision of the weights, finite where there is no loss scale."""
    return gradient.half().float() if case.dtype == "fp16" else gradient.nan_to_num(posinf=0.0)


class Reference:
    """The state of one tensor, updated whole."""

    def __init__(self, name: str, case: Case) -> None:
        self.case, value = case, value_of(name)
        self.weight = value.to(case.torch_dtype).view(-1)
        self.master, self.residual = value.clone().view(-1), None
        if case.master == "split" and case.dtype != "fp32":
            self.residual = torch.zeros(value.numel(), dtype=torch.int16)
            coding.split(self.master, self.weight, self.residual)
        rule = RULES[case.rule]
        self.coded = rule.coded and name in BLOCK and can_be_coded(SHAPES[name])
        self.moments, self.scales = {}, {}
        for moment in rule.moments:
            self.moments[moment] = torch.zeros(value.numel(), dtype=torch.uint8 if self.coded else torch.float32)
            self.scales[moment] = torch.zeros(value.numel() // GROUP_NUMEL)
        self.steps = 0

    def update(self, gradient: Tensor, factor: float) -> None:
        self.steps += 1
        settings = {key: value for key, value in SETTINGS[self.case.rule].items() if key != "betas"}
        settings["beta1"], settings["beta2"] = SETTINGS[self.case.rule]["betas"]
        gradient, lion = gradient.view(-1), self.case.rule == "lion_8bit"
        if not lion:
            settings["step"] = self.steps
        master = self.master if self.residual is None else None
        weight = self.weight if self.residual is not None or self.case.dtype != "fp32" else None
        if self.coded:
            pairs = [part for name in self.moments for part in (self.moments[name], self.scales[name])]
            update = coding.lion_8bit if lion else coding.adamw_8bit
            update(master, gradient, *pairs, weight, self.residual, factor=factor, **settings)
            return
        p = self.now()
        if lion:
            numbers = factor, 1 - settings["lr"] * 0.1, 0.9, 1 - 0.9, 0.99, 1 - 0.99, settings["lr"]
            HostLoops(1).update("lion", (p, gradient, *self.moments.values(), None), numbers)
        else:
            HostLoops(1).adamw(p, gradient, *self.moments.values(), None, factor=factor, **settings)
        if self.residual is not None:
            coding.split(p, self.weight, self.residual)
        else:
            self.weight.copy_(p)

    def now(self) -> Tensor:
        """Return the master in fp32."""
        return self.master if self.residual is None else coding.join(self.weight, self.residual)

    def moment(self, name: str) -> Tensor:
        """Return a moment in fp32."""
        if not self.coded:
            return self.moments[name]
        root = name in RULES[self.case.rule].roots
        values = coding.decode(self.moments[name], self.scales[name], signed=not root)
        return values.square() if root else values


def by_reference(case: Case, steps: int = STEPS) -> dict[str, Tensor]:
    """Return all whole tensors after some steps, by "name/kind"."""
    found, scale = {}, SCALE if case.dtype == "fp16" else 1.0
    states = {name: Reference(name, case) for name in SHAPES}
    for step in range(steps):
        given = {name: gradient_of(name, step) for name in SHAPES}
        if step == 3 and case.dtype == "fp16":
            scale /= 2
            continue
        for name, gradient in given.items():
            if gradient is not None:
                states[name].update(sent(gradient, case), 1 / scale)
    for name, state in states.items():
        weight = state.master if case.dtype == "fp32" else state.weight
        found |= {f"{name}/master": state.now(), f"{name}/weight": weight}
        found |= {f"{name}/{moment}": state.moment(moment) for moment in state.moments}
    return found


@contextmanager
def engine(case: Case) -> Iterator[tuple[ShardedModel, ShardedOptimizer]]:
    """Shard the model, with small pieces in every file that knows their size."""
    model, comm = Model(), Communicator(torch.device("cpu"))
    modules = tiers, updater, state_stores, saving
    for module in modules:
        module.PIECE_NUMEL = PIECE
    try:
        with tempfile.TemporaryDirectory() as folder:
            opened = Tiers.open(comm, case.strategy, folder)
            units = shard(model, [("block", model.block)], comm=comm, strategy=case.strategy, tiers=opened)
            scale = LossScale(SCALE, dynamic=True) if case.dtype == "fp16" else None
            yield units, SHARDED[case.rule](units, loss_scale=scale, **SETTINGS[case.rule])
            opened.close()
    finally:
        for module in modules:
            module.PIECE_NUMEL = PIECE_NUMEL


def train(case: Case, units: ShardedModel, optimizer: ShardedOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for flat in units.trainable:
            names = [segment.name.removeprefix("block.") for segment in flat.layout.segments]
            given = {index: gradient_of(name, step) for index, name in enumerate(names)}
            found = {index: sent(gradient, case) for index, gradient in given.items() if gradient is not None}
            gradients.give(units.gradient_of[flat], found)
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 3 and case.dtype == "fp16")
        optimizer.zero_grad()


def whole(units: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Return all whole tensors by "name/kind", as `by_reference`. A collective."""
    optimizer.settle()
    found = {f"{name.removeprefix('block.')}/weight": tensor.view(-1).clone() for name, tensor in units.full_tensors()}
    for flat in units.trainable:
        state = optimizer.state_of(flat)
        for kind, store in {"master": state.master, **state.moments}.items():
            full = flat.collect(store)
            for segment in flat.layout.segments:
                found[f"{segment.name.removeprefix('block.')}/{kind}"] = full[segment.start : segment.stop].clone()
    return found


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert different == [], different


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


RESUMED = [
    (Case(), Case(world=3, tier="nvme", deferred=True)),
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

