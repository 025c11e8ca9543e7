"""A fake run: the engine's own code for one rank of W, at the model's full size, with tensors that hold nothing.

The plan counts bytes by formula; this executes what the plan describes and counts what is allocated: `shard`, gathers,
recomputation, autograd, reductions, the move of gradients, the update. Tensors of the device are on `meta` (fake CUDA
tensors need a torch that was built for CUDA), those that the engine's storage places in host memory are fake ones on `cpu`:
so the engine itself tells one tier from the other, and a `Meter` counts both.

[Note: what is replaced]
    Communicator   the collectives of one rank among W: they fill nothing and return at once, as NCCL's take no memory here
    Tiers.arena    host memory that is not mapped and not pinned
    Tiers.worker   threads: what they would do is done at once, as fake tensors are for one thread
    HostLoops      the arithmetic on host shards, which reads pointers; its memory is its arguments'
    weights        are not read: the shards hold nothing, whatever a folder would give them
    attention      `scaled_dot_product_attention` is the memory-efficient kernel wherever CUDA before sm_80 would take that
                   one, with the workspace that torch states for it; the model attends by ftkit's own function
    CUDA           has no streams and events here, so nothing lives longer for the sake of another stream

Steps are those of the Trainer: the loss from the model's own forward with labels, scaled, backward, the norm, the update;
one micro-batch or two, see `train`. Kernels are off, as the plan counts the model unfused; but the loss is made by chunks
where the plan says so, with what its kernels take on a GPU. Rows are one sample each, as packing has it at least.

What it refuses: plans without a GPU, where a run can be had for less, and plans that put anything on NVMe. What it costs:
some seconds, and a few hundred MiB for torch and the module tree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.meter import Meter
from ftkit.config.recipe import Recipe
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import PAGE_BYTES, Arena
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.errors import UserError
from ftkit.hf.blocks import find_blocks
from ftkit.hf.dtypes import own_dtype
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.kernels.head import attach_head_loss, only_loss
from ftkit.hf.memory.fake import CudaAttentionBackward, batch, nothing_behind
from ftkit.hf.sharding import shard_as
from ftkit.plan.choice import Plan
from ftkit.plan.memory import GIB
from ftkit.spec.tiers import DEVICE, HOST
from ftkit.spec.update_rules import ADAMW, MOMENTUM
from ftkit.train.planning import model_of

PASSES = 2
"""Micro-batches that are run at most: the second one finds gradients where the first one left them."""

CLOSE = 0.05
"""Share by which the plan may differ from the fake run."""

PLANNED_AS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "optimizer state",
    "moments": "optimizer state",
    "slots": "slots",
    "staging": "staging",
    "activations": "activations",
    "workspace": "activations",
    "logits": "activations",
    "root parameters": "activations",
}
"""The plan's purposes as the fake run can tell them apart: autograd's own tensors are one."""


@dataclass(frozen=True)
class FakeRun:
    """What a fake run found.

    Args:
        found: bytes that one rank holds at its peak, by tier and purpose.
        planned: the same as the plan has it, without the runtime's own memory.
        largest: bytes of the device's activations at the peak, by the operation that made them, largest first.
        seconds: how long the fake run took.
    """

    found: dict[str, dict[str, int]]
    planned: dict[str, dict[str, int]]
    largest: tuple[tuple[str, int], ...]
    seconds: float

    def found_bytes(self, tier: str) -> int:
        """Return the peak of a tier."""
        return sum(self.found[tier].values())

    def planned_bytes(self, tier: str) -> int:
        """Return what was planned on a tier, runtime not counted."""
        return sum(self.planned[tier].values())

    def share(self, tier: str) -> float:
        """Return the peak as a share of the plan."""
        planned = self.planned_bytes(tier)
        return self.found_bytes(tier) / planned if planned else float(self.found_bytes(tier) == 0)

    @property
    def agrees(self) -> bool:
        """Whether plan and fake run agree within `CLOSE` on every tier."""
        return all(abs(self.share(tier) - 1) <= CLOSE for tier in self.found)

    def show(self, console: Console) -> None:
        """Print it beside the plan, in GiB of one rank."""
        table = Table(box=None, pad_edge=False, title="GiB of a rank, runtime aside", title_justify="left")
        table.add_column("")
        for tier in self.found:
            table.add_column(f"{tier}, planned", justify="right")
            table.add_column("fake run", justify="right")
        for purpose in dict.fromkeys([*PLANNED_AS.values(), "activations"]):
            sizes = [part[tier].get(purpose, 0) for tier in self.found for part in (self.planned, self.found)]
            if any(sizes):
                table.add_row(purpose, *(f"{size / GIB:.2f}" if size else "" for size in sizes))
        totals = [total(tier) for tier in self.found for total in (self.planned_bytes, self.found_bytes)]
        table.add_row("[bold]peak[/]", *(f"[bold]{size / GIB:.2f}[/]" for size in totals))
        console.print(table)
        shares = ", ".join(f"{tier} {self.share(tier):.1%}" for tier in self.found)
        verdict = "agrees with" if self.agrees else f"differs by more than {CLOSE:.0%} from"
        console.print(f"[bold]{'fake run':<13}[/] {verdict} the plan: {shares} of it; {self.seconds:.0f} s")

    def as_dict(self) -> dict[str, Any]:
        """Return it as an object for JSON, sizes in bytes of one rank."""
        return {
            "device_bytes": self.found_bytes(DEVICE),
            "host_bytes": self.found_bytes(HOST),
            "planned_device_bytes": self.planned_bytes(DEVICE),
            "planned_host_bytes": self.planned_bytes(HOST),
            "share": {tier: self.share(tier) for tier in self.found},
            "agrees": self.agrees,
            "purposes": self.found,
            "planned_purposes": self.planned,
            "largest": [{"operation": name, "bytes": size} for name, size in self.largest],
            "seconds": self.seconds,
        }


def fake_run_recipe(recipe: Recipe, plan: Plan) -> FakeRun:
    """Execute a recipe's plan with tensors that hold nothing; see `fake_run`.

    Args:
        recipe: the facts.
        plan: the plan of this recipe.
    """
    return fake_run(plan, model_of(recipe), packed=recipe.data.packing)


def fake_run(
    plan: Plan,
    model: Any,
    *,
    packed: bool = False,
    device: torch.device | None = None,
    world_size: int | None = None,
) -> FakeRun:
    """Execute a step of one rank with tensors that hold nothing, and count the bytes.

    Args:
        plan: what to execute.
        model: the model that the plan was made for, on meta. It gets sharded, and is of no use afterwards.
        packed: whether rows hold packed samples, which ftkit's own attention keeps apart.
        device: where the model computes; None takes meta, which stands for a GPU. Tests take the CPU, to compare with a real
            run.
        world_size: number of ranks; None takes the plan's.

    Raises:
        UserError: if the plan is of a box without GPUs, or puts anything on NVMe.
    """
    if plan.limits.cpu and device is None:
        raise UserError("--fake-run stands for a GPU and this plan is for ranks without one: run a few steps instead")
    if plan.strategy.uses_nvme:
        raise UserError(f"--fake-run does not know files, and this plan puts something on NVMe ({plan.strategy})")
    began = time.perf_counter()
    device = device or torch.device("meta")
    dtype = DTYPES.get(plan.strategy.dtype) or own_dtype(model)
    if plan.shape.chunked_loss and (reason := attach_head_loss(model, dtype, torch.device("cpu"))) is not None:
        raise UserError(f"the plan has the loss made by chunks, and this model does not make it so: {reason}")
    meter = Meter(lambda tensor: HOST if tensor.device.type == "cpu" and device.type != "cpu" else DEVICE)
    with nothing_behind(), meter, CudaAttentionBackward():
        units, optimizer = build(plan, model, device, world_size, packed=packed)
        train(plan, units, optimizer, packed=packed)
        return FakeRun(_found(meter, units, optimizer), _planned(plan), _largest(meter), time.perf_counter() - began)


def build(
    plan: Plan, model: Any, device: torch.device, world_size: int | None = None, *, packed: bool
) -> tuple[ShardedModel, ShardedOptimizer]:
    """Shard the model for rank 0 of W as the plan says, and make its optimizer with all state."""
    use_packed_attention(model)  # also where rows are not packed: on meta it has the memory of the GPU's kernel
    model.train()
    comm = FakeCommunicator(device, world_size or plan.shape.world_size)
    units = shard_as(model, find_blocks(model), comm, plan.strategy, FakeTiers(device, plan.strategy), FakeLoops)
    rule = plan.shape.rule
    optimizer = ShardedAdamW(units) if rule == ADAMW else ShardedSGD(units, momentum=float(rule == MOMENTUM))
    optimizer.prepare()  # from its second step on a run has all state in every forward
    return units, optimizer


def train(plan: Plan, units: ShardedModel, optimizer: ShardedOptimizer, *, packed: bool) -> None:
    """Run a step as a later one finds things, with one micro-batch, or `PASSES` where the second one finds more.

    What a first backward makes and a step leaves is made before; but for gradients on the device that are reduced after
    each block, which a second micro-batch adds to: two, in one step if the plan accumulates, else a step each.
    """
    reduced = any(unit.reduced for unit in units.units)
    units.finish_gradients()
    optimizer.zero_grad()
    if reduced:
        units.transfer.gradient_slot()
    if units.offload is not None:
        units.offload.device_buffer()
    passes = PASSES if reduced and plan.strategy.gradients == DEVICE else 1
    steps = 1 if plan.strategy.rounds > 1 else passes
    rows, tokens = plan.strategy.sequences, plan.shape.sequence_tokens
    for _ in range(steps):
        for _ in range(passes // steps):
            with only_loss(units.model, wanted=plan.shape.chunked_loss):
                loss = units.model(**batch(units.model, rows, tokens, units.comm.device, packed=packed)).loss
            optimizer.scale(loss).backward()
            del loss
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.settle()
        optimizer.zero_grad()


# --- what is replaced


class FakeCommunicator(Communicator):
    """One rank among W that are not there. Nothing is sent; a sum is such that a step is made of it."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.group = None
        self.device = device
        self.bytes_sent = Counter()
        self.rank, self.world_size = 0, world_size
        self._stage = None

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> None:
        """Count."""
        self._count("all_gather", full)

    def reduce_scatter_mean(self, shard: Tensor, full: Tensor, of: str = "") -> None:
        """Count."""
        self._count("reduce_scatter", full)

    def all_reduce_mean(self, full: Tensor, of: str = "") -> None:
        """Count."""
        self._count("all_reduce", full, 2)

    def sum(self, numbers: Tensor, of: str = "") -> Tensor:
        """Return the rank's own numbers."""
        return numbers

    def totals(self, numbers: Tensor, of: str = "") -> list[float]:
        """Return ones: norms are finite, and every tensor has got a gradient."""
        return [1.0] * numbers.numel()

    def any(self, flag: bool, of: str = "") -> bool:
        """Return the rank's own flag."""
        return flag

    def broadcast(self, tensor: Tensor, of: str = "") -> None:
        """Count."""
        self._count("broadcast", tensor)

    def same(self, value: Any, of: str = "") -> Any:
        """Return it: this is rank 0."""
        return value

    def all(self, value: Any, of: str = "") -> list[Any]:
        """Return it for every rank."""
        return [value] * self.world_size

    def barrier(self, of: str = "") -> None:
        """Wait for nobody."""


class FakeArena(Arena):
    """An arena of the same size without memory."""

    def __init__(self, size_bytes: int) -> None:
        self.requested_bytes = size_bytes
        self._size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._taken_bytes = 0
        self._memory = torch.empty(self._size_bytes, dtype=torch.uint8, device="cpu")


class FakeTiers(Tiers):
    """Tiers whose host memory is none."""

    def arena(self, size_bytes: int) -> FakeArena:
        """See `Tiers.arena`."""
        return FakeArena(size_bytes)

    def worker(self, name: str) -> Executor:
        """See `Tiers.worker`."""
        return AtOnce()


class AtOnce(Executor):
    """A thread that is none: what it is given is done when it returns. Fake tensors are for one thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn`."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FakeLoops(HostLoops):
    """The arithmetic on host shards, not done: it works in place and needs no memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def adamw(self, *tensors: Tensor | None, **numbers: float) -> None:  # type: ignore[override]  # any arguments will do
        """Do nothing."""

    def sgd(self, *tensors: Tensor | None, **numbers: float) -> None:  # type: ignore[override]  # as above
        """Do nothing."""

    def square_sum(self, gradient: Tensor) -> float:
        """Return a norm that is finite."""
        return 1.0

    def add_(self, into: Tensor, other: Tensor, scale: float = 1.0) -> None:
        """Do nothing."""


# --- what was found


def _found(meter: Meter, units: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, dict[str, int]]:
    """Return the bytes at each tier's peak by purpose."""
    purposes: dict[int, str] = {}
    for purpose, tensors in _permanent(units, optimizer):
        for tensor in tensors:
            lifetime = meter.lifetime(tensor)
            if lifetime is not None:
                purposes.setdefault(id(lifetime), purpose)
    found = {}
    for tier in (DEVICE, HOST):
        sizes: Counter[str] = Counter()
        for each in meter.at_peak(tier):
            sizes[purposes.get(id(each), "activations")] += each.size_bytes
        found[tier] = dict(sizes)
    return found


def _permanent(units: ShardedModel, optimizer: ShardedOptimizer) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield the tensors that stay from step to step, by purpose."""

    def of(*stores: Store | None) -> list[Tensor]:
        return [store.tensor for store in stores if store is not None and store.tensor is not None]

    for flat in units.flats:
        yield "parameters", [flat.full] if flat.full is not None else of(flat.weights)
    for gradient in units.gradients:
        yield "gradients", [] if gradient.memory is None else [gradient.memory]
    for state in optimizer.states.values():
        yield "optimizer state", of(state.master, *state.moments.values())
    yield "slots", units.transfer.buffers()
    if units.offload is not None:
        yield "slots", [units.offload.device_buffer()]
        yield "staging", units.offload.buffers
    yield "staging", [buffer for slot in optimizer.updater.slots for buffer in slot.buffers.values()]


def _planned(plan: Plan) -> dict[str, dict[str, int]]:
    """Return what the plan has in training, by the purposes of a fake run; the runtime is none of them."""
    planned = {}
    for tier in (DEVICE, HOST):
        sizes: Counter[str] = Counter()
        for purpose, size in plan.memory.purposes(tier, "train").items():
            if purpose in PLANNED_AS:
                sizes[PLANNED_AS[purpose]] += size
        planned[tier] = dict(sizes)
    return planned


def _largest(meter: Meter) -> tuple[tuple[str, int], ...]:
    sizes: Counter[str] = Counter()
    for each in meter.at_peak(DEVICE):
        sizes[each.operation.removeprefix("aten.")] += each.size_bytes
    return tuple(sizes.most_common(8))
