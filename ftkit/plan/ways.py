"""Ways to hold and train a model, from cheap to dear, and what may be used of a box.

Ways come in one order (`order`), cheapest first:

    1. everything on the device; then with something on the host; then with something on NVMe, where a folder was named
    2. within that, by the sum of `COSTS`: what a way adds to a micro-batch, roughly, in percent of one that computes only;
       the state's costs come once a step, and so do all but the arithmetic's where micro-batches pass blocks together

So blocks are recomputed before anything leaves the device, state leaves it before parameters do, and NVMe takes state
first. The costs order ways; they promise no time: where the rates of a box are known, simulated seconds choose (search.py).
They are integers from published runs on V100 boxes (reference/performance-model.md): recomputation 33 %, offloaded
activations 5 to 20 %, a host optimizer at 16K tokens a rank 15 %, parameters that are fetched twice a micro-batch over PCIe
25 %. On a CPU rank device and host are one memory, and moving between them is left out.

It refuses choices that contradict each other. What it costs: some thousand sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ftkit.errors import UserError
from ftkit.plan.memory import GIB, Memory
from ftkit.plan.shape import Line, Shape, Way
from ftkit.spec.tiers import DEVICE, HOST, KINDS, NVME, TIERS

COSTS = {
    ("activations", "recompute"): 33,
    ("kept", HOST): 10,
    ("state", HOST): 15,
    ("gradients", HOST): 5,
    ("parameters", HOST): 25,
    ("state", NVME): 200,
    ("gradients", NVME): 250,
    ("parameters", NVME): 300,
    ("kept", NVME): 350,
    ("micro-batch", "halved"): 8,
    ("stage", "next"): 1,  # each further entry of STAGES
    ("accumulation", "unit"): 3,
}
"""What a choice adds; see the top of this file. What is not listed adds nothing."""

STAGES = ((2, "free"), (3, "hold"), (3, "free"))
"""(stage, weights), from fast to small: gathered once a step, once a micro-batch, twice a micro-batch."""


@dataclass(frozen=True)
class Limits:
    """What may be used. Bytes; None: not limited (nvme: there is no such tier).

    Args:
        device_bytes: memory of each rank's device.
        host_bytes: host memory of a box.
        nvme_bytes: NVMe of a box.
        disk_bytes: room for checkpoints, on the disk of `output.dir`.
        ranks_per_box: ranks that share host and NVMe.
        cpu: whether ranks compute on the host.
        names: what granted each tier, for messages.
    """

    device_bytes: int | None
    host_bytes: int | None
    nvme_bytes: int | None = None
    disk_bytes: int | None = None
    ranks_per_box: int = 1
    cpu: bool = False
    names: tuple[tuple[str, str], ...] = ()

    def granted(self, tier: str) -> int | None:
        """Return what is granted on a tier: per rank on the device, per box elsewhere."""
        return {DEVICE: self.device_bytes, HOST: self.host_bytes, NVME: self.nvme_bytes or 0}[tier]

    def name(self, tier: str) -> str:
        """Return what granted a tier."""
        return dict(self.names).get(tier, f"memory.{'nvme_dir' if tier == NVME else f'{tier}_gib'}")

    def ranks(self, tier: str) -> int:
        """Return how many ranks share what is granted on a tier."""
        return 1 if tier == DEVICE else self.ranks_per_box


@dataclass(frozen=True)
class Forced:
    """What the user decided; None leaves it to the plan.

    Args:
        stage: see `Way`.
        activations: see `Way`.
        weights: see `Way`.
        parameters: tier of the weight shards.
        gradients: tier of the gradient shards.
        state: tier of the optimizer state.
        kept: tier of the kept inputs of blocks.
        deferred: the update runs under the next forward.
        micro_batch: sequences of a rank in one forward.
        unit_accumulation: micro-batches pass each block together.
        gradient_dtype: 'auto', 'fp32' or 'compute'.
        state_host_bytes: bytes of a rank's state that stay in host memory where the state lies on NVMe.
    """

    stage: int | None = None
    activations: str | int | None = None
    weights: str | None = None
    parameters: str | None = None
    gradients: str | None = None
    state: str | None = None
    kept: str | None = None
    deferred: bool | None = None
    micro_batch: int | None = None
    unit_accumulation: bool | None = None
    gradient_dtype: str = "auto"
    state_host_bytes: int | None = None


FREE = Forced()
"""Nothing is decided."""


@dataclass(frozen=True)
class Shortage:
    """A tier on which something does not fit: bytes needed and granted, at a moment."""

    tier: str
    needed_bytes: int
    granted_bytes: int
    moment: str

    @property
    def ratio(self) -> float:
        """How many times what is granted is needed."""
        return self.needed_bytes / max(self.granted_bytes, 1)

    def __str__(self) -> str:
        short = self.needed_bytes - self.granted_bytes
        where = {DEVICE: "device memory a rank", HOST: "host memory", NVME: "NVMe"}[self.tier]
        if self.tier == NVME and not self.granted_bytes:
            return f"{gib(self.needed_bytes)} GiB of NVMe needed, none granted"
        return f"{where}: {gib(short)} GiB short ({gib(self.needed_bytes)} needed, {gib(self.granted_bytes)} granted)"


MOST_MICRO_BATCHES = 16
"""Divisors of a step that are tried: a step of short sequences has hundreds."""


def with_gradients(shape: Shape, forced: Forced, micro_batches: int) -> Shape:
    """Return the shape with the width of its gradient shards: fp32 where several micro-batches of a step are summed."""
    wide = forced.gradient_dtype == "fp32" or (forced.gradient_dtype == "auto" and micro_batches > 1)
    return replace(shape, gradient_itemsize=4 if wide else 0)


def order(limits: Limits, forced: Forced, sequences: int, preferred: int) -> Iterator[Way]:
    """Yield the ways that are possible, cheapest first.

    Raises:
        UserError: if there is none, with the reason.
    """
    tiers = [DEVICE] if limits.cpu else [DEVICE, HOST]
    tiers += [NVME] if limits.nvme_bytes else []
    choices = {kind: [getattr(forced, kind)] if getattr(forced, kind) else tiers for kind in KINDS}
    stages = dict.fromkeys((s if forced.stage is None else forced.stage, forced.weights or w) for s, w in STAGES)
    activations = [forced.activations] if forced.activations else ["keep", "recompute"]
    found: list[tuple[int, float, Way]] = []
    problems = []
    for micro_batch in micro_batches(forced, sequences, preferred):
        together = max(sequences // micro_batch, 1)  # micro-batches of a step
        divisions = {None: {1, together}, True: {together}, False: {1}}[forced.unit_accumulation]
        for (stage, weights), graph, parts, *places in product(stages, activations, divisions, *choices.values()):
            placed = dict(zip(KINDS, places))
            elsewhere = placed["state"] == NVME or (placed["state"] == HOST and not limits.cpu)
            deferred = elsewhere if forced.deferred is None else forced.deferred
            way = Way(stage, graph, weights, **placed, deferred=deferred, parts=parts, micro_batch=micro_batch)
            if way.state == NVME:
                way = replace(way, state_host_bytes=forced.state_host_bytes or 0)
            problem = way.problem(cpu=limits.cpu)
            idle = graph == "keep" and way.kept != DEVICE and forced.kept is None  # nothing is kept apart from graphs
            pointless = graph == "recompute" and weights == "hold" and forced.weights is None
            if problem is not None:
                problems.append(problem)
            elif not idle and not pointless:
                further = list(stages).index((stage, weights)) * COSTS["stage", "next"] / parts
                found.append((_depth(way), further + cost(way, preferred, together), way))
    if not found:
        raise UserError(f"what was chosen contradicts itself: {problems[0]}. Change it, or set it to auto")
    yield from (way for _, _, way in sorted(found, key=lambda each: each[:2]))


def micro_batches(forced: Forced, sequences: int, preferred: int) -> list[int]:
    """Return the micro-batches to try, in sequences: what is forced, or the divisors of a step up to `preferred`."""
    if forced.micro_batch is not None:
        return [forced.micro_batch]
    return some_divisors(sequences, preferred)


def some_divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, the largest first; of more than `MOST_MICRO_BATCHES` that many."""
    root = math.isqrt(number)
    small = [count for count in range(1, min(most, root) + 1) if number % count == 0]
    large = [] if most <= root else [number // count for count in small if root < number // count <= most]
    found = large + small[::-1]
    if len(found) <= MOST_MICRO_BATCHES:
        return found
    spread = range(MOST_MICRO_BATCHES)  # evenly over the divisors, the largest and 1 among them
    return [found[number * (len(found) - 1) // (MOST_MICRO_BATCHES - 1)] for number in spread]


def cost(way: Way, preferred: int, micro_batches: int = 1) -> float:
    """Return the sum of `COSTS` of a way, its stage aside, a micro-batch.

    Args:
        way: the way.
        preferred: sequences of the largest micro-batch wanted.
        micro_batches: micro-batches of a step.
    """
    times = {"state": micro_batches, "parameters": way.parts, "gradients": way.parts}
    chosen = {"activations": "keep" if way.activations == "keep" else "recompute"} | {k: getattr(way, k) for k in KINDS}
    total = sum(COSTS.get((kind, choice), 0) / times.get(kind, 1) for kind, choice in chosen.items())
    total += COSTS["accumulation", "unit"] if way.parts > 1 else 0
    return total + round(COSTS["micro-batch", "halved"] * math.log2(max(preferred / way.micro_batch, 1)))


def _depth(way: Way) -> int:
    return max(TIERS.index(getattr(way, kind)) for kind in KINDS)


def shortages(taken: Memory, limits: Limits) -> tuple[Shortage, ...]:
    """Return the tiers on which a way does not fit."""
    found = []
    for tier in TIERS:
        granted, needed = limits.granted(tier), taken.peak(tier) * limits.ranks(tier)
        if granted is not None and needed > granted:
            found.append(Shortage(tier, needed, granted, taken.peak_moment(tier)))
    return tuple(found)


def larger(way: Way, micro_batch: int) -> Way:
    """Return the way with another micro-batch; where all of a step pass a block together, with as many less of them."""
    return replace(way, micro_batch=micro_batch, parts=max(way.parts * way.micro_batch // micro_batch, 1))


def with_adapter(shape: Shape) -> Shape:
    """Return the shape of the same model with only an adapter of rank 16 trained."""

    def frozen(line: Line) -> Line:
        return replace(line, trained=False)

    return replace(
        shape,
        blocks=tuple(tuple(map(frozen, lines)) for lines in shape.blocks),
        leaves=tuple(map(frozen, shape.leaves)),
        whole=(*map(frozen, shape.whole), Line(shape.adapter_numel, shape.itemsize, True)),
        peft=True,
        fresh=False,
    )


def gib(size_bytes: int) -> str:
    """Return GiB, with two digits where one would say nothing."""
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.2f}"


def gib_up(size_bytes: int) -> str:
    """Return GiB rounded up, so that what is granted by this number fits."""
    tenths = -(-size_bytes * 10 // GIB)
    return f"{tenths / 10:.1f}"
