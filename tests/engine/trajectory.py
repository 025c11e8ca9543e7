"""One training run twice: on the engine, spread over ranks, and in plain PyTorch, in one process.

Both sides see the same global batches, learning rates (they change every step) and parameter groups. A run is recorded
as its losses, its gradient norms before clipping, and its weights at the end; `differences` says where two records part.
Comparisons are written so that a NaN fails them.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core import gradient_offload, read_ahead
from ftkit.engine.memory import flat_file as flatfile
from ftkit.engine.memory.tiers import FileStore, MemoryStore, Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim import updater as update
from ftkit.engine.optim.adagrad import ShardedAdagrad
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.adamw_8bit import ShardedAdamW8bit
from ftkit.engine.optim.ademamix import ShardedAdEMAMix
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.plain import AdEMAMix, StableAdamW
from ftkit.engine.optim.rmsprop import ShardedRMSprop
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.engine.optim.stable_adamw import ShardedStableAdamW
from ftkit.engine.shard import shard
from ftkit.hf.blocks import batch_rows
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import Tier
from tests.engine import families
from tests.worlds import Worlds

STEPS = 10
QUICK_STEPS = 6
"""Of the rows of `make test`; the slow rows make `STEPS`."""
BOTH_BYTES = 64 << 10
"""Of a rank's state that stays in host memory where the state lies on both tiers: some lines of every family's, not all."""
MAX_NORM = 1.0
"""Below the gradient norm of every family at every step, so that clipping always acts."""


@dataclass(frozen=True)
class Row:
    """The settings of one run."""

    family: str
    world: int = 1
    stage: int = 3
    activations: str | int = "recompute"
    reshard_after_forward: bool = True
    prefetch: bool = True
    debug: bool = False
    accumulation: int = 1
    clip: bool = True
    groups: int = 1
    optimizer: str = "adamw"
    parameters: Tier = "device"
    gradients: Tier = "device"
    state: Literal[Tier, "both"] = "device"  # both: on NVMe, the first lines in host memory all the same
    activation_offload: Tier = "device"
    deferred: bool = False
    parts: int = 1
    late: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = [
            self.family,
            f"W{self.world}",
            f"stage{self.stage}",
            f"{self.activations}",
            "free" if self.reshard_after_forward else "hold",
        ]
        words += [f"acc{self.accumulation}", f"{self.groups}groups", self.optimizer]
        tiers = [f"{name[0]}={getattr(self, name)}" for name in ("parameters", "gradients", "state", "activation_offload")]
        words += [word for word in tiers if not word.endswith("device")]
        words += [f"parts{self.parts}"] * (self.parts > 1)
        words += [name for name in ("prefetch", "debug", "clip", "deferred", "late") if getattr(self, name)]
        return "-".join(word for word in words if word)

    @property
    def plain(self) -> Row:
        """What matters to the run in plain PyTorch: one reference serves many rows."""
        return Row(self.family, clip=self.clip, groups=self.groups, optimizer=self.optimizer, changes=self.changes)

    @property
    def strategy(self) -> Strategy:
        """The engine's share of the settings."""
        return Strategy.of(
            stage=self.stage,
            activations=self.activations,
            reshard_after_forward=self.reshard_after_forward,
            prefetch=self.prefetch,
            parameters=self.parameters,
            gradients=self.gradients,
            state="nvme" if self.state == "both" else self.state,
            state_host_bytes=BOTH_BYTES if self.state == "both" else 0,
            activation_offload=self.activation_offload,
            update="deferred" if self.deferred else "now",
            accumulate_in="unit" if self.parts > 1 else "step",
            accumulation=self.parts,
            debug=self.debug,
        )


@dataclass
class Record:
    """What a run did."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def shard_model(model: nn.Module, strategy: Strategy, comm: Communicator | None = None, **settings: Any) -> ShardedModel:
    """Shard a Hugging Face model as the Hugging Face side of ftkit does."""
    comm = comm or Communicator(torch.device("cpu"))
    if strategy.uses_nvme and "tiers" not in settings:
        folder = tempfile.mkdtemp(prefix="ftkit-nvme-")  # of this rank alone: runs of other workers share nothing with it
        settings["tiers"] = Tiers.open(comm, strategy, folder)
        weakref.finalize(settings["tiers"], shutil.rmtree, folder, ignore_errors=True)
    if strategy.parts > 1:
        settings.setdefault("split", batch_rows)
    return shard(model, families.blocks(model), comm=comm, strategy=strategy, entries=families.entries(model), **settings)


def groups_of(model: nn.Module, row: Row) -> list[dict[str, Any]]:
    """Return the parameter groups: one, or two with their own decay and learning rate."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if row.groups == 1:
        return [{"params": [p for _, p in named]}]
    decayed = [p for _, p in named if p.dim() > 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": [p for _, p in named if p.dim() < 2], "lr": 5e-4}]


def learning_rate(step: int) -> float:
    """Return the factor on every group's learning rate: warm-up, then decay."""
    return min(1.0, (step + 1) / 3) * (1 - step / (2 * STEPS))


def split(rows: dict[str, Tensor], parts: int, index: int) -> dict[str, Tensor]:
    """Return part `index` of `parts` of a batch."""
    return {name: tensor.tensor_split(parts)[index] for name, tensor in rows.items()}


PLAIN = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=2e-2, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=2e-3, weight_decay=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=2e-4, momentum=0.9, centered=True, eps=1e-4),
    "ademamix": lambda groups: AdEMAMix(groups, lr=1e-3),
    "stable_adamw": lambda groups: StableAdamW(groups, lr=2e-3),
}
OURS: dict[str, Callable[[ShardedModel, Iterable[Any]], ShardedOptimizer]] = {
    "adamw": lambda units, groups: ShardedAdamW(units, groups, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01),
    "sgd": lambda units, groups: ShardedSGD(units, groups, lr=2e-2, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda units, groups: ShardedAdagrad(units, groups, lr=2e-3, weight_decay=0.01),
    "rmsprop": lambda units, groups: ShardedRMSprop(units, groups, lr=2e-4, momentum=0.9, centered=True, eps=1e-4),
    "ademamix": lambda units, groups: ShardedAdEMAMix(units, groups, lr=1e-3),
    "stable_adamw": lambda units, groups: ShardedStableAdamW(units, groups, lr=2e-3),
    "adamw_8bit": lambda units, groups: ShardedAdamW8bit(units, groups, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01),
}


Loss = Callable[[nn.Module, dict[str, Tensor], int], Any]
"""From (model, rows, label tokens of the global batch) to a loss, or to several that are walked back one after another."""


def run_plain(
    row: Row,
    model: nn.Module | None = None,
    loss_of: Loss = families.token_loss,
    *,
    steps: int = STEPS,
    parts: int = 1,
    early_zero_grad: bool = False,
) -> Record:
    """Train in plain PyTorch.

    Args:
        row: the settings.
        model: None takes the family's.
        loss_of: the loss.
        steps: of the optimizer.
        parts: pieces in which the global batch is walked; autograd adds up their gradients.
        early_zero_grad: call it between forward and backward, as some loops do.
    """
    model = model or families.build(row.family, **dict(row.changes))
    optimizer = PLAIN[row.optimizer](groups_of(model, row))
    scheduler = LambdaLR(optimizer, learning_rate)
    record = Record()
    for step in range(steps):
        rows = families.batch(row.family, step)
        torch.manual_seed(step)
        total = 0.0
        for part in range(parts):
            losses = _tuple(loss_of(model, split(rows, parts, part), families.label_tokens(rows)))
            if early_zero_grad and part == 0:
                optimizer.zero_grad()
            for loss in losses:
                loss.backward()
                total += loss.item()
        limit = MAX_NORM if row.clip else torch.inf
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], limit)
        optimizer.step()
        scheduler.step()
        if not early_zero_grad:
            optimizer.zero_grad()
        record.losses.append(total)
        record.norms.append(norm.item())
    record.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return record


def run_sharded(
    row: Row,
    model: nn.Module | None = None,
    loss_of: Loss = families.token_loss,
    *,
    steps: int = STEPS,
    early_zero_grad: bool = False,
    **settings: Any,
) -> Record:
    """Train on the engine; every rank of a world of `row.world` calls this. Arguments as `run_plain`'s and `shard`'s."""
    with late_transfers() if row.late else nullcontext():
        return _run_sharded(row, model, loss_of, steps=steps, early_zero_grad=early_zero_grad, **settings)


def _run_sharded(
    row: Row, model: nn.Module | None, loss_of: Loss, *, steps: int, early_zero_grad: bool, **settings: Any
) -> Record:
    model = model or families.build(row.family, **dict(row.changes))
    units = shard_model(model, row.strategy, **settings)
    assert units.comm.world_size == row.world
    optimizer = OURS[row.optimizer](units, groups_of(model, row))
    scheduler = LambdaLR(optimizer, learning_rate)
    record = Record()
    for step in range(steps):
        rows = families.batch(row.family, step)
        tokens = families.label_tokens(rows)
        total = torch.zeros(())
        torch.manual_seed(step)
        for micro in range(row.accumulation):
            own = split(split(rows, row.accumulation, micro), row.world, units.comm.rank)
            losses = _tuple(loss_of(model, own, tokens))
            if early_zero_grad and micro == 0:
                optimizer.zero_grad()
            # Rows with prefetch use `last_backward`, as the Trainer does. The others reduce at the step.
            last = row.prefetch and micro == row.accumulation - 1 and len(losses) == 1
            with units.last_backward() if last else nullcontext():
                for loss in losses:
                    (loss * row.world).backward()
                    total += loss.detach()
        norm = optimizer.clip_grad_norm_(MAX_NORM).item() if row.clip else optimizer.grad_norm()
        optimizer.step()
        scheduler.step()
        if not early_zero_grad:
            optimizer.zero_grad()
        record.losses.append(units.comm.sum(total).item())
        record.norms.append(norm)
    record.weights = units.state_dict()
    if row.state == "both":
        moments = [store for state in optimizer.states.values() for store in state.moments.values()]
        assert {type(store) for store in moments} == {MemoryStore, FileStore}
    units.tiers.close()
    return record


@contextmanager
def late_transfers() -> Iterator[None]:
    """Let everything that runs beside the computation come late: reads, writes, updates, sums of gradients."""
    slow: list[tuple[Any, str]] = [(flatfile.FlatFile, "_transfer"), (update.Updater, "_compute")]
    slow += [(gradient_offload.GradientOffload, "_add"), (read_ahead.ReadAhead, "_read")]
    before = [(owner, name, vars(owner)[name]) for owner, name in slow]

    def delayed(function: Any) -> Any:
        inner = function.__func__ if isinstance(function, staticmethod) else function

        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.003)
            return inner(*args, **kwargs)

        return staticmethod(call) if isinstance(function, staticmethod) else call

    try:
        for owner, name, function in before:
            setattr(owner, name, delayed(function))
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _tuple(losses: Any) -> tuple[Tensor, ...]:
    return losses if isinstance(losses, tuple) else (losses,)


def relative(ours: Tensor, plain: Tensor) -> float:
    """Return the norm of the difference by the norm of `plain`."""
    distance = torch.linalg.vector_norm(ours.double() - plain.double())
    return float(distance / torch.linalg.vector_norm(plain.double()).clamp_min(1e-30))


def differences(ours: Record, plain: Record, *, limit: float = 1e-5, tensor_limit: float = 1e-4) -> list[str]:
    """Return where two runs part by more than they may; nothing if they agree.

    Args:
        limit: relative, on every loss and gradient norm and on all weights together.
        tensor_limit: relative, on every tensor.
    """
    found = []
    for kind in ("losses", "norms"):
        for step, (one, other) in enumerate(zip(getattr(ours, kind), getattr(plain, kind), strict=True)):
            if not abs(one - other) <= limit * abs(other):
                found.append(f"{kind}[{step}]: {one!r}, plain PyTorch has {other!r}")
    if ours.weights.keys() != plain.weights.keys():
        return [*found, f"other names: {sorted(ours.weights.keys() ^ plain.weights.keys())}"]
    distance = size = 0.0
    for name, tensor in plain.weights.items():
        one, other = families.determined(name, ours.weights[name]), families.determined(name, tensor)
        if one is None or other is None:
            continue
        if not relative(one, other) <= tensor_limit:
            found.append(f"{name}: {relative(one, other):.1e} away")
        distance += float((one.double() - other.double()).square().sum())
        size += float(other.double().square().sum())
    if plain.weights and not (distance / size) ** 0.5 <= limit:
        found.append(f"all weights: {(distance / size) ** 0.5:.1e} away")
    return found


@cache
def plain(row: Row, steps: int = STEPS) -> Record:
    """Return the run in plain PyTorch, made once for all rows that it serves."""
    return run_plain(row, steps=steps)


def sharded(row: Row, steps: int) -> Record:
    """Return the run on the engine; a case for a world."""
    return run_sharded(row, steps=steps)


def check(worlds: Worlds, row: Row, *, steps: int = STEPS, tensor_limit: float = 1e-4) -> None:
    """Run a row on its world; every rank must have the same record, and it must be that of plain PyTorch."""
    records = worlds[row.world].run(sharded, row, steps)
    assert same_on_all_ranks(records)
    assert differences(records[0], plain(row.plain, steps), tensor_limit=tensor_limit) == []


def same_on_all_ranks(records: list[Record]) -> bool:
    """Whether every rank has the very same record, bit for bit."""
    first = records[0]
    return all(
        dataclasses.astuple(r)[:2] == dataclasses.astuple(first)[:2]
        and all(torch.equal(r.weights[n], t) for n, t in first.weights.items())
        for r in records
    )
