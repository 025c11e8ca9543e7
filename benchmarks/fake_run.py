"""`make dry-runs`: execute the plans of recipes with fake tensors, and compare the bytes.

The plan counts bytes by formula. A fake run executes the engine's own code for one rank of W at the model's full size
(`shard`, gathers, recomputation, autograd, reductions, the move of gradients, the update) and counts every storage with a
`Meter`. Tensors of the device are on `meta`. Host memory is fake CPU tensors, which separates the two tiers.

[Note: replaced parts]
    Communicator   collectives of one rank among W, which fill nothing and return at once
    Tiers.arena    host memory that is neither mapped nor pinned
    Tiers.worker   threads: work is done at once, because fake tensors are for one thread
    HostLoops      arithmetic on host shards, which reads pointers
    weights        not read
    attention      `scaled_dot_product_attention` is the memory-efficient kernel wherever CUDA before sm_80 selects it, with
                   its workspace
    CUDA           no streams and events, so no tensor lives longer for another stream

A step is that of the Trainer: forward with labels, scaled loss, backward, gradient norm, update. Kernels are off, as in the
plan; a chunked loss is computed as the plan says. Each row is one sample.

`python -m benchmarks.fake_run RECIPE HARDWARE` prints a JSON object for one recipe. Without arguments every packaged recipe
for 8xV100-16GB runs in its own process (ten minutes). Exits with 1 if plan and fake run differ by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.meter import Meter
from ftkit.config.recipe import load, packaged
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import PAGE_BYTES, Arena
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.hf.blocks import find_blocks
from ftkit.hf.dtypes import own_dtype
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.kernels.head import attach_head_loss, only_loss
from ftkit.hf.memory.fake import CudaAttentionBackward, batch, nothing_behind
from ftkit.hf.sharding import shard_as
from ftkit.plan.catalog import find_hardware
from ftkit.plan.plan import Plan
from ftkit.spec.tiers import DEVICE, HOST
from ftkit.spec.update_rules import ADAMW, MOMENTUM
from ftkit.train.planning import model_of, plan_recipe

PASSES = 2
"""Most micro-batches: the second one adds to the gradients of the first."""

CLOSE = 0.05
"""Largest difference from the plan, as a share of it."""

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
"""Purposes in the plan to purposes in the fake run, which counts all tensors of autograd together."""


@dataclass(frozen=True)
class FakeRun:
    """The bytes of a fake run and of its plan.

    Args:
        found: Bytes of one rank at its peak, by tier and purpose.
        planned: The same in the plan, without the runtime's own memory.
        seconds: Duration of the fake run.
    """

    found: dict[str, dict[str, int]]
    planned: dict[str, dict[str, int]]
    seconds: float

    def found_bytes(self, tier: str) -> int:
        """Return the peak of a tier."""
        return sum(self.found[tier].values())

    def planned_bytes(self, tier: str) -> int:
        """Return the planned bytes of a tier, without the runtime."""
        return sum(self.planned[tier].values())

    def share(self, tier: str) -> float:
        """Return the peak as a share of the plan."""
        planned = self.planned_bytes(tier)
        return self.found_bytes(tier) / planned if planned else float(self.found_bytes(tier) == 0)

    @property
    def agrees(self) -> bool:
        """Whether plan and fake run agree within `CLOSE` on every tier."""
        return all(abs(self.share(tier) - 1) <= CLOSE for tier in self.found)

    def as_dict(self) -> dict[str, Any]:
        """Return an object for JSON, with sizes in bytes of one rank."""
        return {
            "device_bytes": self.found_bytes(DEVICE),
            "host_bytes": self.found_bytes(HOST),
            "planned_device_bytes": self.planned_bytes(DEVICE),
            "planned_host_bytes": self.planned_bytes(HOST),
            "share": {tier: self.share(tier) for tier in self.found},
            "agrees": self.agrees,
            "purposes": self.found,
            "planned_purposes": self.planned,
            "seconds": self.seconds,
        }


def fake_run(
    plan: Plan,
    model: Any,
    *,
    packed: bool = False,
    device: torch.device | None = None,
    world_size: int | None = None,
) -> FakeRun:
    """Execute a step of one rank with fake tensors, and count the bytes.

    Args:
        plan: The plan. It must be for GPUs (unless `device` is given) and without NVMe.
        model: The model that the plan was made for, on meta. It gets sharded and is of no use afterwards.
        packed: Whether rows are packed samples, which ftkit's own attention isolates.
        device: Device of the model. None takes meta in place of a GPU. Tests take the CPU to compare with a real run.
        world_size: Number of ranks. None takes the plan's.
    """
    assert device is not None or not plan.limits.cpu, "the plan is for ranks without a GPU: run a few steps instead"
    assert not plan.strategy.uses_nvme, f"the plan uses NVMe, and a fake run has no files ({plan.strategy})"
    began = time.perf_counter()
    device = device or torch.device("meta")
    dtype = DTYPES.get(plan.strategy.dtype) or own_dtype(model)
    if plan.shape.chunked_loss:
        reason = attach_head_loss(model, dtype, torch.device("cpu"))
        assert reason is None, f"the plan has a chunked loss, and the model has none: {reason}"
    meter = Meter(lambda tensor: HOST if tensor.device.type == "cpu" and device.type != "cpu" else DEVICE)
    with nothing_behind(), meter, CudaAttentionBackward():
        units, optimizer = build(plan, model, device, world_size, packed=packed)
        train(plan, units, optimizer, packed=packed)
        return FakeRun(_found(meter, units, optimizer), _planned(plan), time.perf_counter() - began)


def build(
    plan: Plan, model: Any, device: torch.device, world_size: int | None = None, *, packed: bool
) -> tuple[ShardedModel, ShardedOptimizer]:
    """Shard the model for rank 0 of W as planned, and make its optimizer with all state."""
    use_packed_attention(model)  # for rows that are not packed, too: on meta it uses the memory of the GPU's kernel
    model.train()
    comm = FakeCommunicator(device, world_size or plan.shape.world_size)
    units = shard_as(model, find_blocks(model), comm, plan.strategy, FakeTiers(device, plan.strategy), FakeLoops)
    rule = plan.shape.rule
    optimizer = ShardedAdamW(units) if rule == ADAMW else ShardedSGD(units, momentum=float(rule == MOMENTUM))
    optimizer.prepare()  # from the second step on, all state exists in every forward
    return units, optimizer


def train(plan: Plan, units: ShardedModel, optimizer: ShardedOptimizer, *, packed: bool) -> None:
    """Run a step in the state of a later step.

    Buffers that the first backward makes and a step leaves are made before. Gradients on the device that are reduced after
    each block need a second micro-batch: in the same step if the plan accumulates, else in a second step.
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


# --- replaced parts


class FakeCommunicator(Communicator):
    """One rank among W. It sends nothing, and its sums let each step update."""

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
        """Return ones: norms are finite, and every tensor has a gradient."""
        return [1.0] * numbers.numel()

    def any(self, flag: bool, of: str = "") -> bool:
        """Return the rank's own flag."""
        return flag

    def broadcast(self, tensor: Tensor, of: str = "") -> None:
        """Count."""
        self._count("broadcast", tensor)

    def same(self, value: Any, of: str = "") -> Any:
        """Return the value: this is rank 0."""
        return value

    def all(self, value: Any, of: str = "") -> list[Any]:
        """Return the value for every rank."""
        return [value] * self.world_size

    def barrier(self, of: str = "") -> None:
        """Do not wait."""


class FakeArena(Arena):
    """An arena of the same size without memory."""

    def __init__(self, size_bytes: int) -> None:
        self.requested_bytes = size_bytes
        self._size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._taken_bytes = 0
        self._memory = torch.empty(self._size_bytes, dtype=torch.uint8, device="cpu")


class FakeTiers(Tiers):
    """Tiers without host memory."""

    def arena(self, size_bytes: int) -> FakeArena:
        """See `Tiers.arena`."""
        return FakeArena(size_bytes)

    def worker(self, name: str) -> Executor:
        """See `Tiers.worker`."""
        return AtOnce()


class AtOnce(Executor):
    """An executor that calls each function at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call `fn`."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FakeLoops(HostLoops):
    """Arithmetic on host shards, left out: it works in place and needs no memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def adamw(self, *tensors: Tensor | None, **numbers: float) -> None:  # type: ignore[override]  # any arguments will do
        """Do nothing."""

    def sgd(self, *tensors: Tensor | None, **numbers: float) -> None:  # type: ignore[override]  # as above
        """Do nothing."""

    def square_sum(self, gradient: Tensor) -> float:
        """Return a finite norm."""
        return 1.0

    def add_(self, into: Tensor, other: Tensor, scale: float = 1.0) -> None:
        """Do nothing."""


# --- results


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
    """Yield the tensors that live from step to step, by purpose."""

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
    """Return the planned bytes in training by the purposes of a fake run, without the runtime."""
    planned = {}
    for tier in (DEVICE, HOST):
        sizes: Counter[str] = Counter()
        for purpose, size in plan.memory.purposes(tier, "train").items():
            if purpose in PLANNED_AS:
                sizes[PLANNED_AS[purpose]] += size
        planned[tier] = dict(sizes)
    return planned


def all_recipes(hardware: str) -> int:
    """Run every packaged recipe for a profile in its own process, and print its shares; return the number outside."""
    failed = 0
    print(f"{'device':>7} {'host':>7}  of the plan")
    for name in (each for each in packaged() if each.endswith(hardware)):
        command = [sys.executable, "-m", "benchmarks.fake_run", name, hardware]
        done = subprocess.run(command, capture_output=True, text=True)
        failed += done.returncode != 0
        if not done.stdout.startswith("{"):
            print(f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
            continue
        share = json.loads(done.stdout)["share"]
        print(f"{share['device']:7.1%} {share['host']:7.1%}  {name}{'  <- outside' if done.returncode else ''}", flush=True)
    return failed


def main() -> None:
    """Plan a recipe for a hardware profile, execute the plan, and print the comparison."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "recipe", nargs="?", help="a YAML file, or the name of a packaged recipe; default: all packaged ones"
    )
    parser.add_argument("hardware", nargs="?", default="8xv100-16gb", help="a hardware profile")
    options = parser.parse_args()
    if options.recipe is None:
        sys.exit(all_recipes(options.hardware) > 0)
    recipe, hardware = load(options.recipe), find_hardware(options.hardware)
    ranks = recipe.ranks if recipe.ranks != "auto" else hardware.gpus * hardware.nodes
    found = fake_run(plan_recipe(recipe, ranks, hardware), model_of(recipe), packed=recipe.data.packing)
    print(json.dumps(found.as_dict(), indent=1))
    sys.exit(not found.agrees)


if __name__ == "__main__":
    main()
