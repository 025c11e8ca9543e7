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

`python -m benchmarks.fake_run RECIPE ...` runs the named recipes, and without names every packaged one for 8xV100-16GB (ten
minutes). It prints the peaks as shares of the plan, and exits with 1 if one differs by more than 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.meter import Meter
from ftkit.config.recipe import load
from ftkit.config.recipe_files import packaged
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import Arena, arena_bytes
from ftkit.engine.memory.tiers import Store, Tiers
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.hf.blocks import find_blocks
from ftkit.hf.dtypes import own_dtype
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.kernels.head import attach_head_loss, only_loss
from ftkit.hf.memory.fake import CudaAttentionBackward, batch, nothing_behind
from ftkit.hf.sharding import shard_as
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.plan.catalog import find_hardware
from ftkit.plan.plan import Plan
from ftkit.plan.refuse import DoesNotFit
from ftkit.spec.tiers import DEVICE, HOST
from ftkit.train.planning import model_of, plan_recipe

PASSES = 2
"""Most micro-batches: the second one adds to the gradients of the first."""

CLOSE = 0.05
"""Largest difference from the plan, as a share of it."""

PLANNED_AS = {
    **{name: name for name in ("parameters", "gradients", "slots", "staging")},
    **dict.fromkeys(("master", "residual", "moments"), "optimizer state"),
    **dict.fromkeys(("activations", "workspace", "logits", "root parameters"), "activations"),
}
"""Purposes in the plan to purposes in the fake run, which counts all tensors of autograd together."""


@dataclass(frozen=True)
class FakeRun:
    """Bytes of one rank by tier and purpose: at the peak of a fake run, and as planned."""

    found: dict[str, dict[str, int]]
    planned: dict[str, dict[str, int]]

    def share(self, tier: str) -> float:
        """Return the peak as a share of the plan."""
        found, planned = (sum(purposes[tier].values()) for purposes in (self.found, self.planned))
        return found / planned if planned else float(found == 0)

    @property
    def agrees(self) -> bool:
        """Whether plan and fake run agree within `CLOSE` on every tier."""
        return all(abs(self.share(tier) - 1) <= CLOSE for tier in self.found)


def fake_run(plan: Plan, model: Any, *, packed: bool = False) -> FakeRun:
    """Execute a step of one rank with fake tensors, and count the bytes.

    Args:
        plan: The plan. It must be for GPUs and without NVMe.
        model: The model that the plan was made for, on meta. It gets sharded and is of no use afterwards.
        packed: Whether rows are packed samples, which ftkit's own attention isolates.
    """
    assert not plan.limits.cpu, "the plan is for ranks without a GPU: run a few steps instead"
    assert not plan.strategy.uses_nvme, f"the plan uses NVMe, and a fake run has no files ({plan.strategy})"
    dtype = DTYPES.get(plan.strategy.dtype) or own_dtype(model)
    if plan.shape.chunked_loss:
        reason = attach_head_loss(model, dtype, torch.device("cpu"))
        assert reason is None, f"the plan has a chunked loss, and the model has none: {reason}"
    meter = Meter(lambda tensor: HOST if tensor.device.type == "cpu" else DEVICE)
    with nothing_behind(), meter, CudaAttentionBackward():
        units, optimizer = build(plan, model, torch.device("meta"), plan.shape.world_size)
        train(plan, units, optimizer, packed=packed)
        return FakeRun(_found(meter, units, optimizer), _planned(plan))


def build(plan: Plan, model: Any, device: torch.device, world_size: int) -> tuple[ShardedModel, ShardedOptimizer]:
    """Shard the model for rank 0 of W as planned, and make its optimizer with all state."""
    use_packed_attention(model)  # for rows that are not packed, too: on meta it uses the memory of the GPU's kernel
    model.train()
    comm = FakeCommunicator(device, world_size)
    units = shard_as(model, find_blocks(model), comm, plan.strategy, FakeTiers(device, plan.strategy), FakeLoops)
    rule = plan.shape.rule
    optimizer = SHARDED[rule.name](units, **rule.settings)
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


def _nothing(self: object, *args: Any, **kwargs: Any) -> None:
    """Take the place of a method whose result no other part reads."""


class FakeCommunicator(Communicator):
    """Rank 0 of W. It sends nothing. Norms are finite and every tensor has a gradient, so that each step updates."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        super().__init__(device)
        self.world_size = world_size

    all_gather = reduce_scatter_mean = all_reduce_mean = broadcast = barrier = _nothing

    def sum(self, numbers: Tensor, of: str = "") -> Tensor:
        return numbers

    def totals(self, numbers: Tensor, of: str = "") -> list[float]:
        return [1.0] * numbers.numel()

    def any(self, flag: bool, of: str = "") -> bool:
        return flag

    def all(self, value: Any, of: str = "") -> list[Any]:
        return [value] * self.world_size


class FakeTiers(Tiers):
    """Tiers without host memory and threads."""

    def arena(self, size_bytes: int) -> Arena:
        whole = arena_bytes([(size_bytes, torch.uint8)])
        return Arena(size_bytes, memory=torch.empty(whole, dtype=torch.uint8, device="cpu"))

    def worker(self, name: str) -> Executor:
        return AtOnce()


class AtOnce(Executor):
    """An executor that calls each function at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class FakeLoops(HostLoops):
    """Arithmetic on host shards, left out: it works in place and needs no memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    adamw = sgd = adamw_8bit = lion_8bit = split = update = add_ = _nothing

    def join(self, weight: Tensor, residual: Tensor) -> Tensor:
        return torch.empty_like(weight, dtype=torch.float32)

    def square_sum(self, gradient: Tensor) -> float:
        return 1.0


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
        yield "optimizer state", of(*(extent.store for extent in state.extents.values()))
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


def run(name: str, hardware: str) -> FakeRun:
    """Plan a recipe for a hardware profile, and execute the plan."""
    recipe, profile = load(name), find_hardware(hardware)
    ranks = recipe.ranks if recipe.ranks != "auto" else profile.gpus * profile.nodes
    return fake_run(plan_recipe(recipe, ranks, profile), model_of(recipe), packed=recipe.data.packing)


def main() -> None:
    """Run recipes, print the peaks as shares of the plan, and exit with 1 if one is outside."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("recipes", nargs="*", help="YAML files or names; default: all packaged ones for the hardware")
    parser.add_argument("--hardware", default="8xv100-16gb", help="a hardware profile")
    options = parser.parse_args()
    print(f"{'device':>7} {'host':>7}  of the plan")
    failed = 0
    for name in options.recipes or [each for each in packaged() if each.endswith(options.hardware)]:
        try:
            found = run(name, options.hardware)
        except (AssertionError, DoesNotFit) as error:
            failed += 1
            print(f"  <- failed: {name}: {error}", flush=True)
            continue
        print(f"{found.share(DEVICE):7.1%} {found.share(HOST):7.1%}  {name}", flush=True)
        if not found.agrees:
            failed += 1
            print(f"  <- outside\n  found   {found.found}\n  planned {found.planned}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
