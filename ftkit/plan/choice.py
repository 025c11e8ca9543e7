"""The plan: of the ways that fit what is granted the one that is taken, why, and what stood behind it.

Where the rates of a box are known, that is the way whose simulated step is shortest (search.py); else the cheapest of
`ways.order`. So a laptop without a GPU and every rank of a run choose alike, given the same rates.

It refuses what fits no way (refusal.py). What it costs: some thousand sums of integers; with rates, seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftkit.plan.memory import GIB, KEPT, MOMENTS, Memory, kept_bytes, memory, widest_states_bytes
from ftkit.plan.refusal import DoesNotFit, check_disk, refusal
from ftkit.plan.schedule import Rates, Speed
from ftkit.plan.search import Candidate, fastest
from ftkit.plan.shape import Shape, Way
from ftkit.plan.ways import FREE, Forced, Limits, Shortage, larger, order, shortages, with_gradients
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS

SPARE_SHARE = (9, 10)
"""Of the host memory that is left, what a state on NVMe may have: the rest of the plan is an estimate."""

UNITS_IN_HOST = 2
"""Of a state that the user put on NVMe, the widest units whose bytes stay in host memory where they fit. Rooms to read two
units ahead would take as much; but what stays need not be read, summed and written at all, and the drive has the whole
forward for the others (benchmarks/results/2026-11-22-offload-11.json)."""

KEPT_BLOCKS_SHARE = (9, 10)
"""Of the blocks whose graphs would fit, those that are kept: what autograd keeps of a block is an estimate."""

LARGEST_SEARCHED = 1 << 14
"""Sequences: where the search for the largest micro-batch ends."""


@dataclass(frozen=True)
class Asked:
    """What a plan is made of; see `make_plan`."""

    shape: Shape
    limits: Limits
    forced: Forced = FREE
    sequences: int = 1
    preferred: int = 1
    rates: Rates | None = None

    def fits(self) -> bool:
        """Whether some way fits."""
        for way in order(self.limits, self.forced, self.sequences, self.preferred):
            settled = with_gradients(self.shape, self.forced, self.sequences // way.micro_batch)
            taken = memory(settled, way, cpu=self.limits.cpu)
            disk = self.limits.disk_bytes
            if not shortages(taken, self.limits):
                return disk is None or taken.checkpoint_bytes <= disk
        return False

    def plan(self, *, next_best: bool = True) -> Plan:
        """Make it.

        Args:
            next_best: whether to look for the next best way, too.
        """
        return make_plan(
            self.shape,
            self.limits,
            self.forced,
            sequences=self.sequences,
            preferred=self.preferred,
            rates=self.rates,
            next_best=next_best,
        )


@dataclass(frozen=True)
class Plan:
    """A way that fits, what it takes, and why it was taken.

    Args:
        shape: the model, with the gradient dtype that the way needs.
        way: the way that was chosen.
        memory: what one rank takes.
        limits: what may be used.
        why: sentences: what did not fit in the ways before it.
        largest_micro_batch: sequences that would fit this way.
        accumulation: times that all blocks are passed in a step; `way.parts` micro-batches pass each together.
        speed: speed of a step; None where no rates are known.
        runner_up: the next best way, and its speed; None where there is none.
        asked: what the plan was made of.
    """

    shape: Shape
    way: Way
    memory: Memory
    limits: Limits
    why: tuple[str, ...]
    largest_micro_batch: int
    accumulation: int
    speed: Speed | None = None
    runner_up: tuple[Way, Speed] | None = None
    asked: Asked | None = None

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
        graphs = self.way.graphs(len(self.shape.blocks)) * kept_bytes(self.shape, self.way)  # each has its input, too
        for tier in self.tiers:
            more = (self.memory.purposes(tier).get(KEPT, 0) + graphs * (tier == DEVICE)) * self.limits.ranks(tier)
            granted, needed = self.limits.granted(tier), self.memory.at(tier, "train") * self.limits.ranks(tier) + more
            if more and granted is not None and needed > granted:
                raise DoesNotFit(
                    f"residual sums overflow in fp16; in fp32 kept inputs take {more / GIB:.2f} GiB more, "
                    f"{needed / GIB:.2f} in all, and {self.limits.name(tier)} grants {granted / GIB:.2f} on {tier}: set "
                    f"engine.micro_batch below {self.way.micro_batch} or engine.kept to a lower tier"
                    f"{', or engine.state_host_gib to 0' if self.way.state_host_bytes else ''}"
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
                    "per": "rank" if tier == DEVICE else "box",
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
            "peak_bytes_per_rank": {tier: self.memory.peak(tier) for tier in (DEVICE, HOST)},
            "disk": {"needed_bytes": self.memory.checkpoint_bytes, "granted_bytes": self.limits.disk_bytes},
            "speed": None if self.speed is None else self.speed.as_dict(),
            "runner_up": self.runner_up and {"says": str(self.runner_up[0]), **self.runner_up[1].as_dict()},
            "nvme_wear": wear(self.shape, self.way, self.accumulation, cpu=self.limits.cpu),
        }


def make_plan(
    shape: Shape,
    limits: Limits,
    forced: Forced = FREE,
    *,
    sequences: int = 1,
    preferred: int = 1,
    rates: Rates | None = None,
    next_best: bool = True,
) -> Plan:
    """Return the best way that fits; see the top of this file.

    Args:
        shape: the model and what is asked of it.
        limits: what may be used.
        forced: what the user decided.
        sequences: sequences of a rank in one optimizer step.
        preferred: the largest micro-batch taken unless one is forced.
        rates: rates that one rank has for itself; None does not simulate the ways.
        next_best: whether to look for the next best way, too.

    Raises:
        DoesNotFit: if no way fits, or the checkpoints do not fit their disk.
        UserError: if what is forced contradicts itself.
    """
    passed: list[tuple[Way, tuple[Shortage, ...]]] = []
    fitting: list[Candidate] = []
    for way in order(limits, forced, sequences, preferred):
        settled = with_gradients(shape, forced, sequences // way.micro_batch)
        taken = memory(settled, way, cpu=limits.cpu)
        short = shortages(taken, limits)
        if short:
            passed.append((way, short))
            continue
        accumulation = sequences // (way.micro_batch * way.parts) or 1
        fitting.append(Candidate(settled, with_spare_host(way, settled, limits, forced), accumulation))
        if rates is None:
            break
        if (kept := _most_kept(settled, way, limits, forced)) is not None:
            fitting.append(Candidate(settled, with_spare_host(kept, settled, limits, forced), accumulation))
    if not fitting:
        raise refusal(shape, limits, forced, sequences, preferred, passed)
    best = [] if rates is None else fastest(fitting, rates, next_best=next_best)
    chosen = best[0][0] if best else fitting[0]
    taken = memory(chosen.shape, chosen.way, cpu=limits.cpu)
    check_disk(taken, limits)
    return Plan(
        chosen.shape,
        chosen.way,
        taken,
        limits,
        tuple(_why(chosen, limits, forced, passed, preferred, best, len(fitting))),
        _largest(chosen.shape, _without_spare_host(chosen.way, forced), limits),
        chosen.accumulation,
        best[0][1] if best else None,
        (best[1][0].way, best[1][1].without_timeline()) if len(best) > 1 else None,
        Asked(shape, limits, forced, sequences, preferred, rates),
    )


def with_spare_host(way: Way, shape: Shape, limits: Limits, forced: Forced = FREE) -> Way:
    """Return the way with as much of a state on NVMe in host memory as is left of that: it need not be moved.

    Where the user chose NVMe, not more than some units; where the user said how much stays, or nobody knows what is left,
    the way as it is.
    """
    if way.state != NVME or limits.host_bytes is None or forced.state_host_bytes is not None:
        return way
    taken = memory(shape, way, cpu=limits.cpu)
    spare = (limits.host_bytes - taken.peak(HOST) * limits.ranks(HOST)) // limits.ranks(HOST)
    part, whole = SPARE_SHARE
    stays = max(spare, 0) * part // whole
    if forced.state is not None:
        stays = min(stays, widest_states_bytes(shape, way, UNITS_IN_HOST, cpu=limits.cpu))
    filled = replace(way, state_host_bytes=stays)
    return filled if not shortages(memory(shape, filled, cpu=limits.cpu), limits) else way


def _without_spare_host(way: Way, forced: Forced) -> Way:
    """Return the way without the host cache of a state on NVMe that the planner chose; the user's own stays."""
    return replace(way, state_host_bytes=forced.state_host_bytes or 0) if way.state == NVME else way


def _most_kept(shape: Shape, way: Way, limits: Limits, forced: Forced) -> Way | None:
    """Return the way with the graphs of as many last blocks kept as fit, less a tenth; None if that is none, or decided."""
    if way.activations != "recompute" or forced.activations is not None:
        return None
    low, high = 0, len(shape.blocks) - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = not shortages(memory(shape, replace(way, activations=middle), cpu=limits.cpu), limits)
        low, high = (middle, high) if fits else (low, middle - 1)
    part, whole = KEPT_BLOCKS_SHARE
    low = low * part // whole
    return replace(way, activations=low) if low else None


def _largest(shape: Shape, way: Way, limits: Limits) -> int:
    """Return the largest micro-batch, in sequences, that fits this way; it grows monotonously, so halves are searched."""
    low, high = way.micro_batch, LARGEST_SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        fits = not shortages(memory(shape, larger(way, middle), cpu=limits.cpu), limits)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _why(
    chosen: Candidate,
    limits: Limits,
    forced: Forced,
    passed: list[tuple[Way, tuple[Shortage, ...]]],
    preferred: int,
    best: list[tuple[Candidate, Speed]],
    fitting: int,
) -> Iterator[str]:
    """Yield why it was chosen, and what did not fit: the cheapest way, and those that are better in one thing only."""
    if best:
        yield f"the fastest of {fitting} way{'s' * (fitting > 1)} that fit, as simulated"
    if not passed:
        if not best:
            yield "the fastest way fits"
        return
    if not best:
        yield f"the fastest way ({passed[0][0]}) does not fit: {_and(passed[0][1])}"
    for name, better in _better(_without_spare_host(chosen.way, forced), limits, forced, preferred):
        short = shortages(memory(chosen.shape, better, cpu=limits.cpu), limits)
        if short and (best or better != passed[0][0]):
            yield f"{name}: {_and(short)}"


def _better(way: Way, limits: Limits, forced: Forced, preferred: int) -> Iterator[tuple[str, Way]]:
    """Yield ways that are better than `way` in one thing, with its name."""
    if way.activations != "keep" and forced.activations is None:
        yield "with activations kept", replace(way, activations="keep", kept=DEVICE)
    if way.stage == 3 and forced.stage is None:
        better = replace(way, stage=2, weights="free", parameters=DEVICE)
        yield "with whole weights on every rank (stage 2)", better
    for kind in ("kept", "parameters", "gradients", "state"):
        tier = getattr(way, kind)
        if tier == DEVICE or getattr(forced, kind) is not None:
            continue
        up = DEVICE if limits.cpu or tier == HOST else HOST
        changes: dict[str, Any] = {kind: up}
        if kind == "state":
            changes["state_host_bytes"] = 0
        if kind == "state" and up == DEVICE:
            changes |= {"parameters": DEVICE, "gradients": DEVICE}
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
    if way.state == NVME:  # fp32 weights that are their own master are counted as parameters
        items = memory(shape, way, cpu=cpu).purposes(NVME)
        written["state"] = items.get("master", 0) + items.get("moments", 0)
    if way.gradients == NVME:
        written["gradients"] = accumulation * sum(
            n * (shape.gradient_itemsize or p.line.itemsize) for p, n in shards.items() if not way.reduced_late(p, world)
        )
    if way.parameters == NVME:
        written["parameters"] = sum(n * p.line.itemsize for p, n in shards.items() if not way.resident(p, world))
    if way.kept == NVME:
        tokens = way.micro_batch * way.parts * shape.sequence_tokens * accumulation
        recomputed = len(shape.blocks) - way.graphs(len(shape.blocks))
        written["kept"] = recomputed * tokens * shape.hidden * shape.itemsize
    return written


def _and(short: tuple[Shortage, ...]) -> str:
    return " and ".join(map(str, short))
