"""The plan: of the strategies that fit what is granted the one that is taken, why, and what stood behind it.

Where the rates of a node are known, that is the strategy whose simulated step is shortest (search.py); else the cheapest of
`candidates.order`. So a laptop without a GPU and every rank of a run choose alike, given the same rates.

It refuses what fits no strategy (refusal.py). What it costs: some thousand sums of integers; with rates, seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftkit.plan.candidates import larger, order
from ftkit.plan.limits import Limits, Shortage, shortages
from ftkit.plan.memory import ACTIVATIONS, GIB, PHASES, Memory, kept_bytes, memory, widest_states_bytes
from ftkit.plan.refuse import DoesNotFit, check_disk, refusal
from ftkit.plan.search import fastest
from ftkit.plan.shape import Shape
from ftkit.plan.speed import Rates, Speed
from ftkit.spec.strategy import AUTO, OPEN, Strategy, decided
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
    wanted: Strategy = OPEN
    sequences: int = 1
    preferred: int = 1
    rates: Rates | None = None

    def fits(self) -> bool:
        """Whether some strategy fits."""
        for strategy in order(self.limits, self.wanted, self.sequences, self.preferred):
            taken = memory(self.shape, strategy, cpu=self.limits.cpu)
            disk = self.limits.disk_bytes
            if not shortages(taken, self.limits):
                return disk is None or taken.checkpoint_bytes <= disk
        return False

    def plan(self, *, next_best: bool = True) -> Plan:
        """Make it.

        Args:
            next_best: whether to look for the next best strategy, too.
        """
        return make_plan(
            self.shape,
            self.limits,
            self.wanted,
            sequences=self.sequences,
            preferred=self.preferred,
            rates=self.rates,
            next_best=next_best,
        )


@dataclass(frozen=True)
class Plan:
    """A strategy that fits, what it takes, and why it was taken.

    Args:
        shape: the model and what is asked of it.
        strategy: the strategy that was chosen; nothing is left to "auto".
        memory: what one rank takes.
        limits: what may be used.
        why: sentences: what did not fit in the strategies before it.
        largest_micro_batch: sequences that would fit this strategy.
        speed: speed of a step; None where no rates are known.
        runner_up: the next best strategy, and its speed; None where there is none.
        asked: what the plan was made of.
    """

    shape: Shape
    strategy: Strategy
    memory: Memory
    limits: Limits
    why: tuple[str, ...]
    largest_micro_batch: int
    speed: Speed | None = None
    runner_up: tuple[Strategy, Speed] | None = None
    asked: Asked | None = None

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers that are used."""
        return tuple(tier for tier in TIERS if self.memory.peak(tier))

    def needed_bytes(self, tier: str) -> int:
        """Return the peak on a tier: of a rank on the device, of a node elsewhere."""
        return self.memory.peak(tier) * self.limits.ranks(tier)

    def check_wide_inputs(self) -> None:
        """Refuse to go on where blocks' activations take twice what was planned, as on a residual stream in fp32.

        Raises:
            DoesNotFit: with what they take, and what is granted.
        """
        each = kept_bytes(self.shape, self.strategy)
        graphs = self.strategy.graphs(len(self.shape.blocks)) * each  # each has its input, too
        for tier in self.tiers:
            more = (self.memory.purposes(tier).get(ACTIVATIONS, 0) + graphs * (tier == DEVICE)) * self.limits.ranks(tier)
            granted, needed = self.limits.granted(tier), self.memory.at(tier, "train") * self.limits.ranks(tier) + more
            if more and granted is not None and needed > granted:
                raise DoesNotFit(
                    f"residual sums overflow in fp16; in fp32 activations take {more / GIB:.2f} GiB more, "
                    f"{needed / GIB:.2f} in all, and {self.limits.name(tier)} grants {granted / GIB:.2f} on {tier}: set "
                    f"engine.micro_batch below {self.strategy.micro_batch} or engine.activation_offload to a lower tier"
                    f"{', or engine.state_host_bytes to 0' if self.strategy.state_host_bytes else ''}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as an object for JSON, all sizes in bytes."""
        shape = self.shape
        return {
            "model": {"parameters": shape.numel, "trained": shape.trained_numel, "blocks": len(shape.blocks)},
            "ranks": shape.world_size,
            "ranks_per_node": self.limits.ranks_per_node,
            "strategy": {**asdict(self.strategy), "says": str(self.strategy)},
            "why": list(self.why),
            "largest_micro_batch": self.largest_micro_batch,
            "tiers": {
                tier: {
                    "per": "rank" if tier == DEVICE else "node",
                    "granted_bytes": self.limits.granted(tier),
                    "granted_by": self.limits.name(tier),
                    "needed_bytes": self.needed_bytes(tier),
                    "peak_phase": self.memory.peak_phase(tier),
                    "phases": {phase: self.memory.at(tier, phase) * self.limits.ranks(tier) for phase in PHASES},
                    "purposes": {
                        purpose: size * self.limits.ranks(tier)
                        for purpose, size in self.memory.purposes(tier, self.memory.peak_phase(tier)).items()
                    },
                }
                for tier in self.tiers
            },
            "peak_bytes_per_rank": {tier: self.memory.peak(tier) for tier in (DEVICE, HOST)},
            "disk": {"needed_bytes": self.memory.checkpoint_bytes, "granted_bytes": self.limits.disk_bytes},
            "speed": None if self.speed is None else self.speed.as_dict(),
            "runner_up": self.runner_up and {"says": str(self.runner_up[0]), **self.runner_up[1].as_dict()},
            "nvme_wear": wear(self.shape, self.strategy, cpu=self.limits.cpu),
        }


def make_plan(
    shape: Shape,
    limits: Limits,
    wanted: Strategy = OPEN,
    *,
    sequences: int = 1,
    preferred: int = 1,
    rates: Rates | None = None,
    next_best: bool = True,
) -> Plan:
    """Return the best strategy that fits; see the top of this file.

    Args:
        shape: the model and what is asked of it.
        limits: what may be used.
        wanted: what the user decided.
        sequences: sequences of a rank in one optimizer step.
        preferred: the largest micro-batch taken unless one is decided.
        rates: rates that one rank has for itself; None does not simulate the strategies.
        next_best: whether to look for the next best strategy, too.

    Raises:
        DoesNotFit: if no strategy fits, or the checkpoints do not fit their disk.
        UserError: if what was decided contradicts itself.
    """
    passed: list[tuple[Strategy, tuple[Shortage, ...]]] = []
    fitting: list[Strategy] = []
    for strategy in order(limits, wanted, sequences, preferred):
        taken = memory(shape, strategy, cpu=limits.cpu)
        short = shortages(taken, limits)
        if short:
            passed.append((strategy, short))
            continue
        fitting.append(with_spare_host(strategy, shape, limits, wanted))
        if rates is None:
            break
        if (kept := _most_kept(shape, strategy, limits, wanted)) is not None:
            fitting.append(with_spare_host(kept, shape, limits, wanted))
    if not fitting:
        raise refusal(shape, limits, wanted, sequences, preferred, passed)
    best = [] if rates is None else fastest(fitting, shape, rates, next_best=next_best)
    chosen = best[0][0] if best else fitting[0]
    taken = memory(shape, chosen, cpu=limits.cpu)
    check_disk(taken, limits)
    return Plan(
        shape,
        chosen,
        taken,
        limits,
        tuple(_why(chosen, shape, limits, wanted, passed, preferred, best, len(fitting))),
        _largest(shape, _without_spare_host(chosen, wanted), limits),
        best[0][1] if best else None,
        (best[1][0], best[1][1].without_timeline()) if len(best) > 1 else None,
        Asked(shape, limits, wanted, sequences, preferred, rates),
    )


def with_spare_host(strategy: Strategy, shape: Shape, limits: Limits, wanted: Strategy = OPEN) -> Strategy:
    """Return the strategy with as much of a state on NVMe in host memory as is left of that: it need not be moved.

    Where the user chose NVMe, not more than some units; where the user said how much stays, or nobody knows what is left,
    the strategy as it is.
    """
    if strategy.state != NVME or limits.host_bytes is None or wanted.state_host_bytes != AUTO:
        return strategy
    taken = memory(shape, strategy, cpu=limits.cpu)
    spare = (limits.host_bytes - taken.peak(HOST) * limits.ranks(HOST)) // limits.ranks(HOST)
    part, whole = SPARE_SHARE
    stays = max(spare, 0) * part // whole
    if wanted.state != AUTO:
        stays = min(stays, widest_states_bytes(shape, strategy, UNITS_IN_HOST, cpu=limits.cpu))
    filled = replace(strategy, state_host_bytes=stays)
    return filled if not shortages(memory(shape, filled, cpu=limits.cpu), limits) else strategy


def _without_spare_host(strategy: Strategy, wanted: Strategy) -> Strategy:
    """Return the strategy without the host cache of a state on NVMe that the planner chose; the user's own stays."""
    if strategy.state != NVME or wanted.state_host_bytes != AUTO:
        return strategy
    return replace(strategy, state_host_bytes=0)


def _most_kept(shape: Shape, strategy: Strategy, limits: Limits, wanted: Strategy) -> Strategy | None:
    """Return the strategy with the graphs of as many last blocks kept as fit, less a tenth; None if none, or decided."""
    if strategy.activations != "recompute" or wanted.activations != AUTO:
        return None
    low, high = 0, len(shape.blocks) - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = not shortages(memory(shape, replace(strategy, activations=middle), cpu=limits.cpu), limits)
        low, high = (middle, high) if fits else (low, middle - 1)
    part, whole = KEPT_BLOCKS_SHARE
    low = low * part // whole
    return replace(strategy, activations=low) if low else None


def _largest(shape: Shape, strategy: Strategy, limits: Limits) -> int:
    """Return the largest micro-batch, in sequences, that fits; memory grows with it, so halves are searched."""
    low, high = decided(strategy.micro_batch), LARGEST_SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        fits = not shortages(memory(shape, larger(strategy, middle), cpu=limits.cpu), limits)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _why(
    chosen: Strategy,
    shape: Shape,
    limits: Limits,
    wanted: Strategy,
    passed: list[tuple[Strategy, tuple[Shortage, ...]]],
    preferred: int,
    best: list[tuple[Strategy, Speed]],
    fitting: int,
) -> Iterator[str]:
    """Yield why it was chosen, and what did not fit: the cheapest strategy, and those that are better in one thing only."""
    if best:
        yield f"the fastest of {fitting} {'strategy' if fitting == 1 else 'strategies'} that fit, as simulated"
    if not passed:
        if not best:
            yield "the fastest strategy fits"
        return
    if not best:
        yield f"the fastest strategy ({passed[0][0]}) does not fit: {_and(passed[0][1])}"
    for name, better in _better(_without_spare_host(chosen, wanted), limits, wanted, preferred):
        short = shortages(memory(shape, better, cpu=limits.cpu), limits)
        if short and (best or better != passed[0][0]):
            yield f"{name}: {_and(short)}"


def _better(strategy: Strategy, limits: Limits, wanted: Strategy, preferred: int) -> Iterator[tuple[str, Strategy]]:
    """Yield strategies that are better than `strategy` in one thing, with its name."""
    if strategy.activations != "keep" and wanted.activations == AUTO:
        yield "with activations kept", replace(strategy, activations="keep", activation_offload=DEVICE)
    if strategy.stage == 3 and wanted.stage == AUTO:
        better = replace(strategy, stage=2, reshard_after_forward=True, parameters=DEVICE)
        yield "with whole weights on every rank (stage 2)", better
    for kind in ("activation_offload", "parameters", "gradients", "state"):
        tier = getattr(strategy, kind)
        if tier == DEVICE or getattr(wanted, kind) != AUTO:
            continue
        up = DEVICE if limits.cpu or tier == HOST else HOST
        changes: dict[str, Any] = {kind: up}
        if kind == "state":
            changes["state_host_bytes"] = 0
        if kind == "state" and up == DEVICE:
            changes |= {"parameters": DEVICE, "gradients": DEVICE}
        better = replace(strategy, **changes)
        if better.problem(cpu=limits.cpu) is None:
            yield f"with {kind.replace('activation_offload', 'activations')} on {up}", better
    if wanted.micro_batch == AUTO and (micro_batch := decided(strategy.micro_batch)) < preferred:
        yield f"with {micro_batch * 2} sequences a micro-batch", larger(strategy, micro_batch * 2)


def wear(shape: Shape, strategy: Strategy, *, cpu: bool) -> dict[str, int]:
    """Return the bytes that a rank writes to NVMe in one step, by kind. (The day's follow from the step's seconds.)"""
    world, owners = shape.world_size, strategy.owners(shape.world_size)
    shards = {p: count * p.line.shard_numel(owners) for p, count in shape.counted if p.line.trained}
    written = {}
    if strategy.state == NVME:  # fp32 weights that are their own master are counted as parameters
        items = memory(shape, strategy, cpu=cpu).purposes(NVME)
        written["state"] = items.get("master", 0) + items.get("moments", 0)
    if strategy.gradients == NVME:
        written["gradients"] = strategy.rounds * sum(
            n * strategy.gradient_itemsize(p.line.itemsize)
            for p, n in shards.items()
            if not strategy.reduced_late(p.kind, world)
        )
    if strategy.parameters == NVME:
        written["parameters"] = sum(n * p.line.itemsize for p, n in shards.items() if not strategy.resident(p.kind, world))
    if strategy.activation_offload == NVME:
        recomputed = len(shape.blocks) - strategy.graphs(len(shape.blocks))
        tokens = strategy.sequences * strategy.rounds * shape.sequence_tokens
        written["activations"] = recomputed * tokens * shape.hidden * shape.itemsize
    return written


def _and(short: tuple[Shortage, ...]) -> str:
    return " and ".join(map(str, short))
