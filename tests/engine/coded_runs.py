"""Runs with 8-bit moments or a split master on the engine, and in one process that updates whole tensors with the reference.

The gradients are given, and equal on all ranks, so every bit of the state is known. Steps leave out a tensor, have rows of
zeros, and overflow once in fp16. Pieces are small, and every request to a file must have whole pages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ftkit.engine.checkpoint import saving
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory import tiers
from ftkit.engine.memory.arena import PAGE_BYTES
from ftkit.engine.memory.flat_file import FlatFile, Request
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim import coding, state_stores, updater
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.shard import shard
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.spec.state_forms import GROUP_NUMEL, can_be_coded
from ftkit.spec.strategy import Strategy
from ftkit.spec.update_rules import RULES
from tests.engine import gradients

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
REQUEST = FlatFile._request


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
    blocks: bool = True  # False: all tensors are replicated, and none is coded

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


def in_whole_pages(file: FlatFile, call: Any, start: int, tensor: Tensor, doing: str) -> Request:
    assert start * file.dtype.itemsize % PAGE_BYTES == 0, f"{doing} {file.path} from {start} on"
    assert tensor.nbytes % PAGE_BYTES == 0, f"{doing} {tensor.nbytes} bytes of {file.path}"
    return REQUEST(file, call, start, tensor, doing)


@contextmanager
def engine(case: Case) -> Iterator[tuple[ShardedModel, ShardedOptimizer]]:
    """Shard the model, with small pieces in every file that knows their size."""
    model, comm = Model(), Communicator(torch.device("cpu"))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for module in (tiers, updater, state_stores, saving):
            stack.enter_context(mock.patch.object(module, "PIECE_NUMEL", PIECE))
        stack.enter_context(mock.patch.object(FlatFile, "_request", in_whole_pages))
        opened = Tiers.open(comm, case.strategy, folder)
        blocks = [("block", model.block)] if case.blocks else []
        replicated = {} if case.blocks else {"replicated": lambda name, parameter: True}
        units = shard(model, blocks, comm=comm, strategy=case.strategy, tiers=opened, **replicated)
        scale = LossScale(SCALE, dynamic=True) if case.dtype == "fp16" else None
        yield units, SHARDED[case.rule](units, loss_scale=scale, **SETTINGS[case.rule])
        opened.close()


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
