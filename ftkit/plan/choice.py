"""The choice: the fastest way that fits what is granted, why it was taken, and three ways out where nothing fits.

Ways are tried in one order (`order`), cheapest first:

    1. everything on the device; then with something on the host; then with something on NVMe, where a folder was named
    2. within that, by the sum of `COSTS`: what a way adds to a micro-batch, roughly, in percent of one that computes only;
       the state's costs come once a step, and so do all but the arithmetic's where micro-batches pass blocks together

So blocks are recomputed before anything leaves the device, state leaves it before parameters do, and NVMe takes state
first. The costs order ways; they promise no time. They are integers from published runs on V100 boxes (reference/
performance-model.md): recomputation 33 %, offloaded activations 5 to 20 %, a host optimizer at 16K tokens a rank 15 %,
parameters that are fetched twice a micro-batch over PCIe 25 %. On a CPU rank device and host are one memory, and moving
between them is left out.

It refuses: what fits no way, with numbers for each purpose. What it costs: some thousand sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from ftkit.errors import UserError
from ftkit.plan.memory import GIB, KEPT, MOMENTS, Memory, memory
from ftkit.plan.shape import TIERS, Line, Shape, Way

COSTS = {
    ("activations", "recompute"): 33,
    ("kept", "host"): 10,
    ("state", "host"): 15,
    ("gradients", "host"): 5,
    ("parameters", "host"): 25,
    ("state", "nvme"): 200,
    ("gradients", "nvme"): 250,
    ("parameters", "nvme"): 300,
    ("kept", "nvme"): 350,
    ("micro-batch", "halved"): 8,
    ("stage", "next"): 1,  # each further entry of STAGES
    ("accumulation", "unit"): 3,
}
"""What a choice adds; see the top of this file. What is not listed adds nothing."""

STAGES = ((2, "free"), (3, "hold"), (3, "free"))
"""(stage, weights), from fast to small: gathered once a step, once a micro-batch, twice a micro-batch."""

KINDS = ("parameters", "gradients", "state", "kept")

SPARE_SHARE = (9, 10)
"""Of the host memory that is left, what a state on NVMe may have: the rest of the plan is an estimate."""

LARGEST_SEARCHED = 1 << 14
"""Sequences: where the search for the largest micro-batch ends."""


@dataclass(frozen=True)
class Limits:
    """What may be used. Bytes; None: not limited (nvme: there is no such tier).

    Args:
        device_bytes: of each rank's device. host_bytes: of a box. nvme_bytes: of a box. disk_bytes: for checkpoints.
        ranks_per_box: ranks that share host and NVMe. cpu: ranks compute on the host.
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
        return {"device": self.device_bytes, "host": self.host_bytes, "nvme": self.nvme_bytes or 0}[tier]

    def name(self, tier: str) -> str:
        """Return what granted a tier."""
        return dict(self.names).get(tier, f"memory.{'nvme_dir' if tier == 'nvme' else f'{tier}_gib'}")

    def ranks(self, tier: str) -> int:
        """Return how many ranks share what is granted on a tier."""
        return 1 if tier == "device" else self.ranks_per_box


@dataclass(frozen=True)
class Forced:
    """What the user decided; None leaves it to the plan.

    Args:
        micro_batch: sequences of a rank in one forward. unit_accumulation: micro-batches pass each block together.
        gradient_dtype: 'auto', 'fp32' or 'compute'. deferred: the update runs under the next forward.
        state_host_bytes: of a rank's state on NVMe, what stays in host memory.
    """

    stage: int | None = None
    activations: str | None = None
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
        where = {"device": "device memory a rank", "host": "host memory", "nvme": "NVMe"}[self.tier]
        if self.tier == "nvme" and not self.granted_bytes:
            return f"{_gib(self.needed_bytes)} GiB of NVMe needed, none granted"
        return f"{where}: {_gib(short)} GiB short ({_gib(self.needed_bytes)} needed, {_gib(self.granted_bytes)} granted)"


@dataclass(frozen=True)
class Plan:
    """A way that fits, what it takes, and why it was taken.

    Args:
        shape: with the gradient dtype that the way needs. way: the choice. memory: of one rank.
        why: sentences: what did not fit in the ways before it.
        largest_micro_batch: sequences that would fit this way. accumulation: micro-batches of a step.
    """

    shape: Shape
    way: Way
    memory: Memory
    limits: Limits
    why: tuple[str, ...]
    largest_micro_batch: int
    accumulation: int

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers that are used."""
        return tuple(tier for tier in TIERS if self.memory.peak(tier))

    def needed_bytes(self, tier: str) -> int:
        """Return the peak on a tier: of a rank on the device, of a box elsewhere."""
        return self.memory.peak(tier) * self.limits.ranks(tier)

    def check_wide_inputs(self) -> None:
        """Refuse to go on where blocks' kept inputs take twice what was planned, as on a residual stream in fp32.

        Raises:
            DoesNotFit: with what they take, and what is granted.
        """
        for tier in self.tiers:
            more = self.memory.purposes(tier).get(KEPT, 0) * self.limits.ranks(tier)
            granted, needed = self.limits.granted(tier), self.memory.at(tier, "train") * self.limits.ranks(tier) + more
            if more and granted is not None and needed > granted:
                raise DoesNotFit(
                    f"residual sums overflow in fp16; in fp32 kept inputs take {more / GIB:.2f} GiB more, "
                    f"{needed / GIB:.2f} in all, and {self.limits.name(tier)} grants {granted / GIB:.2f} on {tier}: set "
                    f"engine.micro_batch below {self.way.micro_batch} or engine.kept to a lower tier"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as an object for JSON, all sizes in bytes."""
        shape = self.shape
        return {
            "model": {"parameters": shape.numel, "trained": shape.trained_numel, "blocks": len(shape.blocks)},
            "ranks": shape.world_size,
            "ranks_per_box": self.limits.ranks_per_box,
            "way": {**asdict(self.way), "accumulation": self.accumulation, "says": str(self.way)},
            "why": list(self.why),
            "largest_micro_batch": self.largest_micro_batch,
            "tiers": {
                tier: {
                    "per": "rank" if tier == "device" else "box",
                    "granted_bytes": self.limits.granted(tier),
                    "granted_by": self.limits.name(tier),
                    "needed_bytes": self.needed_bytes(tier),
                    "peak_moment": self.memory.peak_moment(tier),
                    "moments": {m: self.memory.at(tier, m) * self.limits.ranks(tier) for m in MOMENTS},
                    "purposes": {
                        purpose: size * self.limits.ranks(tier)
                        for purpose, size in self.memory.purposes(tier, self.memory.peak_moment(tier)).items()
                    },
                }
                for tier in self.tiers
            },
            "peak_bytes_per_rank": {tier: self.memory.peak(tier) for tier in ("device", "host")},
            "disk": {"needed_bytes": self.memory.checkpoint_bytes, "granted_bytes": self.limits.disk_bytes},
            "nvme_wear": wear(self.shape, self.way, self.accumulation, cpu=self.limits.cpu),
        }


class DoesNotFit(UserError):
    """No way fits what is granted. Says what is needed for which purpose, and three ways out.

    Args:
        text: for the user. shortages: of the way that comes nearest. ways_out: sentences.
    """

    def __init__(self, text: str, shortages: tuple[Shortage, ...] = (), ways_out: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.shortages, self.ways_out = shortages, ways_out

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.shortages, self.ways_out)


def make_plan(
    shape: Shape, limits: Limits, forced: Forced = Forced(), *, sequences: int = 1, preferred: int = 1
) -> Plan:
    """Return the fastest way that fits; see the top of this file.

    Args:
        sequences: of a rank in one optimizer step. preferred: the largest micro-batch taken unless one is forced.

    Raises:
        DoesNotFit: if no way fits, or the checkpoints do not fit their disk.
        UserError: if what is forced contradicts itself.
    """
    passed: list[tuple[Way, tuple[Shortage, ...]]] = []
    for way in order(limits, forced, sequences, preferred):
        accumulation = sequences // (way.micro_batch * way.parts) or 1
        settled = with_gradients(shape, forced, sequences // way.micro_batch)
        taken = memory(settled, way, cpu=limits.cpu)
        short = shortages(taken, limits)
        if not short:
            largest = _largest(settled, way, limits)
            why = tuple(_why(settled, way, limits, forced, passed, preferred))
            way = _with_spare_host(way, settled, taken, limits, forced)
            taken = memory(settled, way, cpu=limits.cpu)
            _check_disk(taken, limits)
            return Plan(settled, way, taken, limits, why, largest, accumulation)
        passed.append((way, short))
    raise _refusal(shape, limits, forced, sequences, preferred, passed)


def _with_spare_host(way: Way, shape: Shape, taken: Memory, limits: Limits, forced: Forced) -> Way:
    """Return the way with as much of a state on NVMe in host memory as is left of that: it need not be moved."""
    if way.state != "nvme" or limits.host_bytes is None or forced.state is not None or forced.state_host_bytes is not None:
        return way
    spare = (limits.host_bytes - taken.peak("host") * limits.ranks("host")) // limits.ranks("host")
    part, whole = SPARE_SHARE
    filled = replace(way, state_host_bytes=max(spare, 0) * part // whole)
    return filled if not shortages(memory(shape, filled, cpu=limits.cpu), limits) else way


def with_gradients(shape: Shape, forced: Forced, micro_batches: int) -> Shape:
    """Return the shape with the width of its gradient shards: fp32 where several micro-batches of a step are summed."""
    wide = forced.gradient_dtype == "fp32" or (forced.gradient_dtype == "auto" and micro_batches > 1)
    return replace(shape, gradient_itemsize=4 if wide else 0)


def order(limits: Limits, forced: Forced, sequences: int, preferred: int) -> Iterator[Way]:
    """Yield the ways that are possible, cheapest first.

    Raises:
        UserError: if there is none, with the reason.
    """
    tiers = ["device"] if limits.cpu else ["device", "host"]
    tiers += ["nvme"] if limits.nvme_bytes else []
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
            elsewhere = placed["state"] == "nvme" or (placed["state"] == "host" and not limits.cpu)
            deferred = elsewhere if forced.deferred is None else forced.deferred
            way = Way(stage, graph, weights, **placed, deferred=deferred, parts=parts, micro_batch=micro_batch)
            if way.state == "nvme":
                way = replace(way, state_host_bytes=forced.state_host_bytes or 0)
            problem = way.problem(cpu=limits.cpu)
            idle = graph == "keep" and way.kept != "device" and forced.kept is None  # nothing is kept apart from graphs
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
    return [count for count in range(min(sequences, preferred), 0, -1) if sequences % count == 0]


def cost(way: Way, preferred: int, micro_batches: int = 1) -> float:
    """Return the sum of `COSTS` of a way, its stage aside, a micro-batch.

    Args:
        preferred: sequences of the largest micro-batch wanted. micro_batches: of a step.
    """
    times = {"state": micro_batches, "parameters": way.parts, "gradients": way.parts}
    chosen = {"activations": way.activations} | {kind: getattr(way, kind) for kind in KINDS}
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


def _check_disk(taken: Memory, limits: Limits) -> None:
    if limits.disk_bytes is not None and taken.checkpoint_bytes > limits.disk_bytes:
        short = Shortage("disk", taken.checkpoint_bytes, limits.disk_bytes, "save")
        raise DoesNotFit(
            f"does not fit: checkpoint disk: {_gib(taken.checkpoint_bytes)} GiB needed (checkpoints, one being written, the "
            f"model), {_gib(limits.disk_bytes)} GiB free at output.dir. Set output.keep lower, free space, or let "
            "output.dir name another disk",
            (short,),
        )


def _largest(shape: Shape, way: Way, limits: Limits) -> int:
    """Return the largest micro-batch, in sequences, that fits this way; it grows monotonously, so halves are searched."""
    low, high = way.micro_batch, LARGEST_SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        fits = not shortages(memory(shape, larger(way, middle), cpu=limits.cpu), limits)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def larger(way: Way, micro_batch: int) -> Way:
    """Return the way with another micro-batch; where all of a step pass a block together, with as many less of them."""
    return replace(way, micro_batch=micro_batch, parts=max(way.parts * way.micro_batch // micro_batch, 1))


def _why(
    shape: Shape,
    way: Way,
    limits: Limits,
    forced: Forced,
    passed: list[tuple[Way, tuple[Shortage, ...]]],
    preferred: int,
) -> Iterator[str]:
    """Yield what did not fit: of the fastest way, and of those that are better than the choice in one thing only."""
    if not passed:
        yield "the fastest way fits"
        return
    yield f"the fastest way ({passed[0][0]}) does not fit: {_and(passed[0][1])}"
    for name, better in _better(way, limits, forced, preferred):
        short = shortages(memory(shape, better, cpu=limits.cpu), limits)
        if short and better != passed[0][0]:
            yield f"{name}: {_and(short)}"


def _better(way: Way, limits: Limits, forced: Forced, preferred: int) -> Iterator[tuple[str, Way]]:
    """Yield ways that are better than `way` in one thing, with its name."""
    if way.activations == "recompute" and forced.activations is None:
        yield "with activations kept", replace(way, activations="keep", kept="device")
    if way.stage == 3 and forced.stage is None:
        better = replace(way, stage=2, weights="free", parameters="device")
        yield "with whole weights on every rank (stage 2)", better
    for kind in ("kept", "parameters", "gradients", "state"):
        tier = getattr(way, kind)
        if tier == "device" or getattr(forced, kind) is not None:
            continue
        up = "device" if limits.cpu or tier == "host" else "host"
        changes = {kind: up}
        if kind == "state" and up == "device":
            changes |= {"parameters": "device", "gradients": "device"}
        better = replace(way, **changes)
        if better.problem(cpu=limits.cpu) is None:
            yield f"with {kind.replace('kept', 'kept inputs')} on {up}", better
    if forced.micro_batch is None and way.micro_batch < preferred:
        yield f"with {way.micro_batch * 2} sequences a micro-batch", larger(way, way.micro_batch * 2)


def wear(shape: Shape, way: Way, accumulation: int, *, cpu: bool) -> dict[str, int]:
    """Return the bytes that a rank writes to NVMe in one step, by kind. (The day's follow from the step's seconds.)"""
    world, owners = shape.world_size, way.owners(shape.world_size)
    shards = {p: count * p.line.shard_numel(owners) for p, count in shape.counted if p.line.trained}
    written = {}
    if way.state == "nvme":  # fp32 weights that are their own master are counted as parameters
        items = memory(shape, way, cpu=cpu).purposes("nvme")
        written["state"] = items.get("master", 0) + items.get("moments", 0)
    if way.gradients == "nvme":
        written["gradients"] = accumulation * sum(
            n * (shape.gradient_itemsize or p.line.itemsize) for p, n in shards.items() if not way.reduced_late(p, world)
        )
    if way.parameters == "nvme":
        written["parameters"] = sum(n * p.line.itemsize for p, n in shards.items() if not way.resident(p, world))
    if way.kept == "nvme":
        tokens = way.micro_batch * way.parts * shape.sequence_tokens * accumulation
        written["kept"] = len(shape.blocks) * tokens * shape.hidden * shape.itemsize
    return written


# --- the refusal


def _refusal(
    shape: Shape,
    limits: Limits,
    forced: Forced,
    sequences: int,
    preferred: int,
    passed: list[tuple[Way, tuple[Shortage, ...]]],
) -> DoesNotFit:
    """Return the error: the numbers of the way that comes nearest, and the cheapest changes after which one fits."""
    # what can leave the device has left it, or the numbers would be of the wrong tier
    way, short = min(passed, key=lambda each: (any(s.tier == "device" for s in each[1]), max(s.ratio for s in each[1])))
    settled = with_gradients(shape, forced, sequences // way.micro_batch)
    taken = memory(settled, way, cpu=limits.cpu)
    lines = []
    for each in short:
        ranks = limits.ranks(each.tier)
        sizes = sorted(taken.purposes(each.tier, each.moment).items(), key=lambda item: -item[1])
        parts = ", ".join(f"{purpose} {_gib(size * ranks)}" for purpose, size in sizes)
        per = " a rank" if each.tier == "device" else ""
        where = {"device": "device", "host": "host memory", "nvme": "NVMe"}[each.tier]
        lines.append(
            f"{where}: {_gib(each.needed_bytes)} GiB{per} needed to {each.moment} ({parts}), "
            f"{_gib(each.granted_bytes)} GiB granted by {limits.name(each.tier)}"
        )
    ways_out = tuple(_ways_out(shape, limits, forced, sequences, preferred))[:3]
    advice = "; or ".join(ways_out) if ways_out else "use a smaller model"
    text = (
        f"does not fit: {'; '.join(lines)} ({shape.numel / 1e9:.2f}B parameters on {shape.world_size} "
        f"rank{'s' * (shape.world_size > 1)}, {way.micro_batch * shape.sequence_tokens} tokens a micro-batch; {way}). "
        f"Ways out: {advice}"
    )
    return DoesNotFit(text, short, ways_out)


def _ways_out(shape: Shape, limits: Limits, forced: Forced, sequences: int, preferred: int) -> Iterator[str]:
    """Yield changes, the cheapest first, after each of which a way fits: it was tried."""

    def fits(shape: Shape, limits: Limits, forced: Forced, sequences: int = sequences) -> Way | None:
        for way in order(limits, forced, sequences, preferred):
            settled = with_gradients(shape, forced, sequences // way.micro_batch)
            if not shortages(memory(settled, way, cpu=limits.cpu), limits):
                return way
        return None

    def needs(tier: str, limits: Limits) -> int | None:
        """Return the bytes of a tier with which some way fits."""
        open_ = replace(limits, **{f"{tier}_bytes": 1 << 60})
        least = None
        for way in order(open_, forced, sequences, preferred):
            settled = with_gradients(shape, forced, sequences // way.micro_batch)
            taken = memory(settled, way, cpu=limits.cpu)
            if not shortages(taken, open_):
                needed = taken.peak(tier) * limits.ranks(tier)
                least = needed if least is None else min(least, needed)
        return least

    if forced.micro_batch is not None and forced.micro_batch > 1:
        for micro in range(forced.micro_batch - 1, 0, -1):
            if sequences % micro == 0 and fits(shape, limits, replace(forced, micro_batch=micro)):
                yield f"set engine.micro_batch to {micro} (from {forced.micro_batch})"
                break
    free = Forced(micro_batch=forced.micro_batch, gradient_dtype=forced.gradient_dtype)
    if forced != free and (way := fits(shape, limits, free)) is not None:
        yield f"leave the choices of engine: to the plan ({way} fits)"
    if not limits.nvme_bytes and (size := needs("nvme", limits)):
        yield f"set memory.nvme_dir to a folder with {_up(size)} GiB free on each box (to plan with it: memory.nvme_gib)"
    shorter = replace(shape, sequence_tokens=max(shape.sequence_tokens // 2, 1))
    if shorter.sequence_tokens >= 64 and fits(shorter, limits, forced):
        yield f"set data.sequence_tokens to {shorter.sequence_tokens} (from {shape.sequence_tokens})"
    if limits.nvme_bytes and (size := needs("nvme", limits)) and size > limits.nvme_bytes:
        yield f"let memory.nvme_dir have {_up(size)} GiB free on each box"
    if limits.host_bytes is not None and (size := needs("host", limits)):
        yield f"grant {_up(size)} GiB of host memory (memory.host_gib)"
    if not shape.peft and fits(with_adapter(shape), limits, forced):
        yield "train an adapter (adapter: {rank: 16})"
    if not limits.cpu and limits.device_bytes is not None and (size := needs("device", limits)):
        yield f"use GPUs with {_up(size)} GiB each (memory.device_gib)"
    yield from _more_ranks(shape, limits, forced, sequences, fits)


def _more_ranks(
    shape: Shape, limits: Limits, forced: Forced, sequences: int, fits: Callable[..., Way | None]
) -> Iterator[str]:
    """Yield the number of boxes like this one on which it fits."""
    for boxes in (2, 4, 8):
        more = replace(shape, world_size=shape.world_size * boxes)
        if fits(more, limits, forced, max(sequences // boxes, 1)):
            yield f"use {boxes} boxes like this one ({more.world_size} ranks)"
            return


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


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.2f}"


def _up(size_bytes: int) -> str:
    """Return GiB rounded up, so that what is granted by this number fits."""
    tenths = -(-size_bytes * 10 // GIB)
    return f"{tenths / 10:.1f}"


def _and(short: tuple[Shortage, ...]) -> str:
    return " and ".join(map(str, short))
