"""The search: of the strategies that fit, the one with the shortest simulated step.

Strategies are simulated in order of a lower bound of their seconds (`bound`), until the bound exceeds the shortest steps
found. A strategy that is another one with something moved down to NVMe cannot win, and is left out at once. Of strategies
that differ by less than `ALIKE` the cheapest in order is chosen, because the rates are not known more exactly.

Bounds and seconds are cached, because `ftkit plan` asks for the same strategies again with other limits (whatif.py).
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ftkit.plan.events import Event
from ftkit.plan.schedule import parts_of_step, speed
from ftkit.plan.shape import Shape
from ftkit.plan.speed import Rates, Speed
from ftkit.spec.strategy import Strategy, decided
from ftkit.spec.tiers import DEVICE, KINDS, NVME

ALIKE = 0.005
"""Share of a step's seconds by which strategies may differ and still count as equally fast."""

ROUNDS = 3
"""Simulated rounds of micro-batches: the first hides the update, and the last precedes it. At stages 0 and 1 the last also
reduces full gradients."""

MOST_ROUNDS = 16
"""Simulated rounds of micro-batches if their timeline is shown, or if all rounds differ."""


def fastest(
    candidates: Sequence[Strategy], shape: Shape, rates: Rates, *, next_best: bool = True
) -> list[tuple[Strategy, Speed]]:
    """Return the strategy to take and the next best one of another kind, with their speeds. Empty without enough rates.

    Strategies that differ only in how many blocks keep their graphs are of one kind. `candidates` are ordered from cheap to
    expensive.
    """
    enabled = gc.isenabled()
    gc.disable()  # a search allocates a million objects without cycles; this saves a third of its time
    try:
        return _fastest(candidates, shape, rates, next_best=next_best)
    finally:
        if enabled:
            gc.enable()


def _fastest(candidates: Sequence[Strategy], shape: Shape, rates: Rates, *, next_best: bool) -> list[tuple[Strategy, Speed]]:
    simulated = [each for each in candidates if rates.missing(shape, each) is None]
    known = list(_worth_it(simulated, len(shape.blocks)))
    without_drive = replace(rates, nvme_read=0.0, nvme_write=0.0)  # questions with and without a drive share the cache
    used = [rates if each.uses_nvme else without_drive for each in known]
    bounds = [bound(shape, each, own) for each, own in zip(known, used)]
    ordered = sorted(range(len(known)), key=lambda number: bounds[number])
    kinds = [replace(each, activations="recompute") for each in known]
    found: dict[int, float] = {}
    shortest: dict[Strategy, float] = {}  # seconds of each kind
    for number in ordered:
        if len(shortest) > next_best and bounds[number] > sorted(shortest.values())[next_best] * (1 + ALIKE):
            break
        found[number] = seconds(shape, known[number], used[number])
        shortest[kinds[number]] = min(found[number], shortest.get(kinds[number], math.inf))
    ranked = [_simplest(found)] if found else []
    others = {number: each for number, each in found.items() if kinds[number] != kinds[ranked[0]]}
    if next_best and others:
        ranked.append(_simplest(others))
    return [(known[number], speed_of(shape, known[number], rates)) for number in ranked]


def _simplest(found: Mapping[int, float]) -> int:
    """Return the first strategy of those that are as fast as the fastest."""
    shortest = min(found.values())
    return min(number for number, each in found.items() if each <= shortest * (1 + ALIKE))


def _worth_it(candidates: Sequence[Strategy], blocks: int) -> Iterator[Strategy]:
    """Yield candidates, except an earlier one with something moved down to NVMe, and no more graphs kept."""
    before: dict[Strategy, list[Strategy]] = defaultdict(list)
    alike: dict[str, Any] = dict.fromkeys(KINDS, DEVICE) | {"activations": "recompute", "state_host_bytes": 0}
    for each in candidates:
        known = before[replace(each, **alike)]
        if not any(_is_lower(each, one) and each.graphs(blocks) <= one.graphs(blocks) for one in known):
            known.append(each)
            yield each


def _is_lower(strategy: Strategy, other: Strategy) -> bool:
    """Return whether a strategy is another one with something moved down, and nothing moved up."""
    tiers = [(getattr(strategy, kind), getattr(other, kind)) for kind in KINDS]
    lower = all(own in (above, NVME) for own, above in tiers) and any(own != above for own, above in tiers)
    return lower and (other.state != NVME or decided(strategy.state_host_bytes) <= decided(other.state_host_bytes))


@lru_cache(maxsize=4096)
def seconds(shape: Shape, strategy: Strategy, rates: Rates) -> float:
    """Return the duration of a step in seconds.

    Rounds after `ROUNDS` are counted, not simulated. If gradients go to NVMe, all rounds are simulated, because unfinished
    writes add up from round to round. If gradients are summed in host memory, the error is about a thousandth.
    """
    return speed_of(shape, strategy, rates, MOST_ROUNDS if strategy.gradients == NVME else ROUNDS).seconds


def speed_of(shape: Shape, strategy: Strategy, rates: Rates, most: int = MOST_ROUNDS) -> Speed:
    """Return the speed of a strategy. Rounds after `most` are counted, not simulated, and not in the timeline."""
    if strategy.rounds <= most:
        return speed(shape, strategy, rates)
    return speed(shape, strategy, rates, rounds=most).longer(most, strategy.rounds - most)


@lru_cache(maxsize=4096)
def bound(shape: Shape, strategy: Strategy, rates: Rates) -> float:
    """Return a lower bound of a step's seconds: a stream runs one event at a time, and a resource has its rate."""
    resources = rates.all(shape.hidden)
    parts = parts_of_step(shape, strategy, in_order=rates.in_order)
    first, further, update = (_busy(events, resources) for events in parts)
    total = {key: first[key] + (strategy.rounds - 1) * further[key] + update[key] for key in {*first, *further, *update}}
    # The updates begin after the last backward, and the first forward ends after the last update.
    forward = _busy(parts[0][: [event.name for event in parts[0]].index("loss")], resources)["compute"]
    total["compute"] += max(update["host update"] - forward, 0.0)
    return max(total.values())


def _busy(events: Sequence[Event], resources: Mapping[str, float]) -> defaultdict[str, float]:
    """Return the seconds of each stream's events, waits for reductions included, and of all work on each resource."""
    found: defaultdict[str, float] = defaultdict(float)
    reducing = 0.0  # seconds of the last reduction, less the computation beside it
    # Only the backward of a block with trained weights waits for the reduction before it.
    waiting = {event.name.removeprefix("collect ") for event in events if event.name.startswith("collect backward")}
    for event in events:
        longest = 0.0
        for name, amount in event.work.items():
            took = amount / resources[name]
            longest = max(longest, took)
            if name != event.stream:
                found[name] += took
        found[event.stream] += longest
        if event.stream == "compute":
            if event.name in waiting or event.name.startswith("await"):
                found["compute"] += max(reducing, 0.0)
                reducing = 0.0
            reducing -= longest
        elif event.name.startswith("reduce"):
            reducing = longest
    return found
