"""Strategies in order, from cheap to expensive, and those that fit.

`order` yields the cheapest first:

    1. everything on the device, then with something on the host, then with something on NVMe (if a folder is set)
    2. within that, by the sum of `COSTS`, roughly the percent that a choice adds to a micro-batch. The costs of the state
       count once per step. With `accumulate_in: unit`, all costs except arithmetic count once per step

The costs, rounded from published runs on V100 nodes (docs/rates.md), only order strategies. If the rates of the hardware are
known, simulated seconds decide (search.py). On a CPU rank device and host are one memory, and the host tier is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ftkit.errors import UserError
from ftkit.plan.limits import Limits, Shortage, shortages
from ftkit.plan.memory import Memory, memory
from ftkit.plan.shape import Flat, Shape
from ftkit.plan.speed import Rates
from ftkit.spec.strategy import AUTO, FP32, OPEN, STEP, UNIT, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, KINDS, NVME, TIERS

COSTS = {
    ("activations", "recompute"): 33,
    ("activation_offload", HOST): 10,
    ("state", HOST): 15,
    ("gradients", HOST): 5,
    ("parameters", HOST): 25,
    ("state", NVME): 200,
    ("gradients", NVME): 250,
    ("parameters", NVME): 300,
    ("activation_offload", NVME): 350,
    ("micro-batch", "halved"): 8,
    ("stage", "next"): 1,  # each further entry of STAGES
    ("accumulation", "unit"): 3,
}
"""The cost of each choice, in percent of a micro-batch that only computes. Other choices cost nothing."""

STAGES = ((2, True), (3, False), (3, True))
"""(stage, reshard_after_forward), from fast to small: gathered once a step, once a micro-batch, twice a micro-batch."""

MOST_MICRO_BATCHES = 16
"""Divisors of a step that are tried. A step of short sequences has hundreds."""


@dataclass(frozen=True)
class Request:
    """The input of a plan."""

    shape: Shape  # the model and its data
    limits: Limits  # memory that may be used
    wanted: Strategy = OPEN  # the user's decisions. "auto" leaves a choice to the plan
    sequences: int = 1  # sequences of a rank in one optimizer step
    preferred: int = 1  # the largest micro-batch that the plan chooses
    rates: Rates | None = None  # rates of one rank. None does not simulate the strategies

    def memory(self, strategy: Strategy) -> Memory:
        """Return the memory of one rank."""
        return memory(self.shape, strategy, cpu=self.limits.cpu)

    def short(self, strategy: Strategy) -> tuple[Shortage, ...]:
        """Return the tiers that are too small for a strategy."""
        return shortages(self.memory(strategy), self.limits)

    def order(self) -> Iterator[Strategy]:
        """Yield the possible strategies without "auto", cheapest first, or raise UserError if the decisions contradict."""
        limits, wanted = self.limits, self.wanted
        micro_batches = some_divisors(self.sequences, self.preferred) if wanted.micro_batch == AUTO else [wanted.micro_batch]
        pairs = ((_or(wanted.stage, stage), _or(wanted.reshard_after_forward, reshard)) for stage, reshard in STAGES)
        stages = list(dict.fromkeys((stage, reshard or stage < 3) for stage, reshard in pairs))
        tiers = [DEVICE, *[HOST] * (not limits.cpu), *[NVME] * bool(limits.nvme_bytes)]
        open_: dict[str, list[Any]] = {"activations": ["keep", "recompute"], "accumulate_in": [STEP, UNIT]}
        open_ |= dict.fromkeys(KINDS, tiers)
        choices = {name: each if getattr(wanted, name) == AUTO else [getattr(wanted, name)] for name, each in open_.items()}
        found: list[tuple[int, float, Strategy]] = []
        problems = []
        for micro_batch, (stage, reshard), *values in product(micro_batches, stages, *choices.values()):
            chosen = dict(zip(choices, values), micro_batch=micro_batch, stage=stage, reshard_after_forward=reshard)
            strategy = self._decided(chosen)
            problem = strategy.problem(cpu=limits.cpu)
            if problem is not None:
                problems.append(problem)
            elif not _pointless(strategy, wanted):
                further = stages.index((stage, reshard)) * COSTS["stage", "next"] / strategy.parts
                depth = max(TIERS.index(strategy.tier(kind)) for kind in KINDS)
                found.append((depth, further + cost(strategy, self.preferred), strategy))
        if not found:
            raise UserError(f"the choices contradict each other: {problems[0]}. Change it, or set it to auto")
        yield from (strategy for _, _, strategy in sorted(found, key=lambda each: each[:2]))

    def _decided(self, chosen: dict[str, Any]) -> Strategy:
        """Return the strategy of some choices, and of the values that follow from them."""
        wanted, state = self.wanted, chosen["state"]
        together = max(self.sequences // chosen["micro_batch"], 1)  # micro-batches of a step
        elsewhere = state == NVME or (state == HOST and not self.limits.cpu)
        return replace(
            wanted,
            **chosen,
            accumulation=together,
            gradient_dtype=_or(wanted.gradient_dtype, FP32 if together > 1 else "compute"),
            update=_or(wanted.update, "deferred" if elsewhere else "now"),
            state_host_bytes=0 if state != NVME or wanted.state_host_bytes == AUTO else wanted.state_host_bytes,
        )

    def first_fit(self) -> Strategy | None:
        """Return the cheapest strategy that fits."""
        return next((strategy for strategy in self.order() if not self.short(strategy)), None)


def last_true(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number in [low, high] that fits, or `low`. All numbers below one that fits must fit, too."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _pointless(strategy: Strategy, wanted: Strategy) -> bool:
    """Return whether the plan's own choices have no effect beside the others."""
    kept = strategy.activations == "keep"
    offloads = kept and strategy.activation_offload != DEVICE and AUTO in (wanted.activations, wanted.activation_offload)
    gathered = strategy.activations == "recompute" and strategy.reshard_after_forward is False
    gathered = gathered and wanted.reshard_after_forward == AUTO
    alone = strategy.accumulation == 1 and strategy.accumulate_in == UNIT and wanted.accumulate_in == AUTO
    return offloads or gathered or alone


def _or(choice: Any, value: Any) -> Any:
    return value if choice == AUTO else choice


def some_divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, the largest first. Of many, `MOST_MICRO_BATCHES` spread evenly."""
    found = [count for count in range(min(number, most), 0, -1) if number % count == 0]
    if len(found) <= MOST_MICRO_BATCHES:
        return found
    return [found[number * (len(found) - 1) // (MOST_MICRO_BATCHES - 1)] for number in range(MOST_MICRO_BATCHES)]


def cost(strategy: Strategy, preferred: int) -> float:
    """Return the sum of `COSTS` of a strategy per micro-batch, without the stage."""
    times = {"state": decided(strategy.accumulation), "parameters": strategy.parts, "gradients": strategy.parts}
    chosen: dict[str, Any] = {kind: getattr(strategy, kind) for kind in KINDS}
    chosen["activations"] = "keep" if strategy.activations == "keep" else "recompute"
    total = sum(COSTS.get((kind, choice), 0) / times.get(kind, 1) for kind, choice in chosen.items())
    total += COSTS["accumulation", "unit"] if strategy.parts > 1 else 0
    return total + round(COSTS["micro-batch", "halved"] * math.log2(max(preferred / decided(strategy.micro_batch), 1)))


def larger(strategy: Strategy, micro_batch: int) -> Strategy:
    """Return the strategy with another micro-batch, and as many micro-batches less."""
    sequences = decided(strategy.micro_batch) * decided(strategy.accumulation)
    return replace(strategy, micro_batch=micro_batch, accumulation=max(sequences // micro_batch, 1))


def in_8_bits(shape: Shape) -> Shape | None:
    """Return the shape with 8-bit moments. None if its rule has no such form, or if it has no moments that can be coded."""
    rule = shape.rule.in_8_bits
    coded = any(flat.trained and flat.coded_numel for flats, _ in shape.groups for flat in flats)
    return replace(shape, rule=rule) if rule is not None and coded else None


def with_adapter(shape: Shape) -> Shape:
    """Return the shape of the same model with only an adapter of rank 16 trained."""
    frozen = shape.frozen()
    adapter = Flat(shape.adapter_numel, shape.itemsize, True)
    return replace(frozen, replicated=(*frozen.replicated, adapter), peft=True)
