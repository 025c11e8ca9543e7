"""The plan: the strategy that is chosen from those that fit, and why.

If the rates of the hardware are known, the plan takes the strategy with the shortest simulated step (search.py), otherwise
the cheapest of `candidates.order`. Every rank chooses the same strategy, and so does a laptop without a GPU that is given
the same rates and limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftkit.plan.candidates import Request, larger, last_true
from ftkit.plan.limits import Limits, Shortage
from ftkit.plan.memory import ACTIVATIONS, GIB, PHASES, Memory, kept_bytes, widest_states_bytes
from ftkit.plan.refuse import DoesNotFit, check_disk, refusal
from ftkit.plan.search import ALIKE, fastest
from ftkit.plan.shape import Shape
from ftkit.plan.speed import Speed
from ftkit.spec.strategy import AUTO, OPEN, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS

SPARE_SHARE = (9, 10)
"""Share of the unused host memory in which an NVMe state is cached. The plan's other bytes are estimates."""

UNITS_IN_HOST = 2
"""The widest units whose state stays in host memory if the user put the state on NVMe."""

KEPT_BLOCKS_SHARE = (9, 10)
"""Share of the blocks whose graphs would fit that keep them. The bytes of a graph are an estimate."""

LARGEST_SEARCHED = 1 << 14
"""Sequences at which the search for the largest micro-batch ends."""


@dataclass(frozen=True)
class Asked(Request):
    """The input of a plan, which it makes."""

    def plan(self, *, next_best: bool = True) -> Plan:
        """Return the best strategy that fits, and the next best.

        Raises:
            DoesNotFit: No strategy fits, or the checkpoints do not fit their disk.
            UserError: The user's decisions contradict each other.
        """
        passed: list[tuple[Strategy, tuple[Shortage, ...]]] = []
        fitting: list[Strategy] = []
        for strategy in self.order():
            if short := self.short(strategy):
                passed.append((strategy, short))
                continue
            fitting.append(with_spare_host(strategy, self.shape, self.limits, self.wanted))
            if self.rates is None:
                break
            if (kept := _most_kept(self, strategy)) is not None:
                fitting.append(with_spare_host(kept, self.shape, self.limits, self.wanted))
        if not fitting:
            raise refusal(self, passed)
        best = [] if self.rates is None else fastest(fitting, self.shape, self.rates, next_best=next_best)
        chosen = best[0][0] if best else fitting[0]
        taken = self.memory(chosen)
        check_disk(taken, self.limits)
        cached = chosen.state == NVME and self.wanted.state_host_bytes == AUTO
        plain = replace(chosen, state_host_bytes=0) if cached else chosen
        return Plan(
            self,
            chosen,
            taken,
            tuple(_why(self, plain, passed, len(fitting) if best else None)),
            last_true(decided(plain.micro_batch), LARGEST_SEARCHED, lambda count: not self.short(larger(plain, count))),
            best[0][1] if best else None,
            best[1] if len(best) > 1 else None,
        )


@dataclass(frozen=True)
class Plan:
    """A strategy that fits, its memory, and the reasons for it."""

    asked: Asked  # the input of the plan
    strategy: Strategy  # the chosen strategy, without "auto"
    memory: Memory  # memory of one rank
    why: tuple[str, ...]  # sentences: the reason, and the strategies before it that did not fit
    largest_micro_batch: int  # the most sequences per micro-batch that would fit this strategy
    speed: Speed | None = None  # speed of a step. None if no rates are known
    runner_up: tuple[Strategy, Speed] | None = None  # the next best strategy and its speed, or None

    @property
    def shape(self) -> Shape:
        """The model and its data."""
        return self.asked.shape

    @property
    def limits(self) -> Limits:
        """Memory that may be used."""
        return self.asked.limits

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers in use."""
        return tuple(tier for tier in TIERS if self.memory.peak(tier))

    def needed_bytes(self, tier: str) -> int:
        """Return the peak on a tier: per rank on the device, per node elsewhere."""
        return self.memory.peak(tier) * self.limits.ranks(tier)

    @property
    def nvme_wear(self) -> dict[str, int]:
        """Bytes that a rank writes to NVMe in one step, by purpose."""
        times = {"gradients": self.strategy.rounds, ACTIVATIONS: self.strategy.rounds}
        written = {purpose: size * times.get(purpose, 1) for purpose, size in self.memory.purposes(NVME).items()}
        if "parameters" in written:  # frozen ones are only read; adapters stay on the device
            trained = 0 if self.shape.peft else self.shape.trained_numel
            written["parameters"] = written["parameters"] * trained // self.shape.numel
        return {purpose: size for purpose, size in written.items() if size}

    def check_wide_inputs(self) -> None:
        """Check that inputs of blocks fit if they need twice the planned bytes, because the residual stream is fp32.

        Raises:
            DoesNotFit: They do not fit.
        """
        graphs = self.strategy.graphs(len(self.shape.blocks)) * kept_bytes(self.shape, self.strategy)  # with their inputs
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
            "disk": {"needed_bytes": self.memory.checkpoint_bytes, "granted_bytes": self.limits.disk_bytes},
            "speed": None if self.speed is None else self.speed.as_dict(),
            "runner_up": self.runner_up and {"says": str(self.runner_up[0]), **self.runner_up[1].as_dict()},
            "nvme_wear": self.nvme_wear,
        }


def with_spare_host(strategy: Strategy, shape: Shape, limits: Limits, wanted: Strategy = OPEN) -> Strategy:
    """Return the strategy with a part of an NVMe state cached in unused host memory.

    If the user chose NVMe, at most the state of `UNITS_IN_HOST` units is cached. The strategy is returned unchanged if the
    user decided the size of the cache, or if the limit of host memory is not known.
    """
    if strategy.state != NVME or limits.host_bytes is None or wanted.state_host_bytes != AUTO:
        return strategy
    asked = Request(shape, limits, wanted)
    spare = (limits.host_bytes - asked.memory(strategy).peak(HOST) * limits.ranks(HOST)) // limits.ranks(HOST)
    part, whole = SPARE_SHARE
    stays = max(spare, 0) * part // whole
    if wanted.state != AUTO:
        stays = min(stays, widest_states_bytes(shape, strategy, UNITS_IN_HOST, cpu=limits.cpu))
    filled = replace(strategy, state_host_bytes=stays)
    return strategy if asked.short(filled) else filled


def _most_kept(asked: Request, strategy: Strategy) -> Strategy | None:
    """Return the strategy with the graphs of as many last blocks kept as fit, less a tenth. None if none fit."""
    if strategy.activations != "recompute" or asked.wanted.activations != AUTO:
        return None
    one, two = (asked.memory(replace(strategy, activations=count)) for count in (1, 2))  # a third adds as much as a second
    most = len(asked.shape.blocks) - 1
    for tier in TIERS:
        more, granted = two.at(tier, "train") - one.at(tier, "train"), asked.limits.granted(tier)
        if more > 0 and granted is not None:
            most = min(most, max(granted // asked.limits.ranks(tier) - one.at(tier, "train") + more, 0) // more)
    part, whole = KEPT_BLOCKS_SHARE
    kept = replace(strategy, activations=most * part // whole) if most * part >= whole else strategy
    return None if kept is strategy or asked.short(kept) else kept


def _why(
    asked: Request, plain: Strategy, passed: Sequence[tuple[Strategy, tuple[Shortage, ...]]], simulated: int | None
) -> Iterator[str]:
    """Yield the reason for the choice, and the shortages of strategies that are better in one choice.

    Args:
        asked: The input of the plan.
        plain: The chosen strategy, without the host cache of an NVMe state.
        passed: Strategies that do not fit, with their shortages.
        simulated: Number of strategies that fit. None if the choice was made without rates.
    """
    if simulated is not None:
        yield f"fastest of {simulated} that fit (simulated); within {ALIKE:.1%} the simpler strategy is taken"
    elif not passed:
        yield "the strategy with the least recomputation and offload fits"
    else:
        yield f"the strategy with the least recomputation and offload ({passed[0][0]}) does not fit: {_and(passed[0][1])}"
    for name, better in _better(plain, asked) if passed else ():
        short = asked.short(better)
        if short and (simulated is not None or better != passed[0][0]):
            yield f"{name}: {_and(short)}"


def _better(strategy: Strategy, asked: Request) -> Iterator[tuple[str, Strategy]]:
    """Yield strategies that are better in one choice, with a name for the choice."""
    wanted, limits = asked.wanted, asked.limits
    names = {"activation_offload": "activations", "state": "optimizer state"}
    if strategy.activations != "keep" and wanted.activations == AUTO:
        yield "all blocks keep activations", replace(strategy, activations="keep", activation_offload=DEVICE)
    if strategy.stage == 3 and wanted.stage == AUTO:
        better = replace(strategy, stage=2, reshard_after_forward=True, parameters=DEVICE)
        yield "stage 2, parameters whole on every rank", better
    for kind in ("activation_offload", "parameters", "gradients", "state"):
        tier = getattr(strategy, kind)
        if tier == DEVICE or getattr(wanted, kind) != AUTO:
            continue
        up = DEVICE if limits.cpu or tier == HOST else HOST
        changes: dict[str, Any] = {kind: up}
        if kind == "state":
            changes |= {"state_host_bytes": 0} | ({"parameters": DEVICE, "gradients": DEVICE} if up == DEVICE else {})
        better = replace(strategy, **changes)
        if better.problem(cpu=limits.cpu) is None:
            yield f"{names.get(kind, kind)} on {up}", better
    if wanted.micro_batch == AUTO and (micro_batch := decided(strategy.micro_batch)) < asked.preferred:
        yield f"micro-batch of {micro_batch * 2} sequences", larger(strategy, micro_batch * 2)


def _and(short: tuple[Shortage, ...]) -> str:
    return " and ".join(map(str, short))
