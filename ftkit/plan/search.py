"""The search: of strategies that fit, the one whose simulated step is shortest.

Each strategy has a bound that is cheap to work out: no step is shorter than what its busiest stream, or the most wanted
resource, needs alone. Strategies are simulated from the lowest bound on, and once a bound lies above what was reached, no
strategy after it can win. One that is another one with something moved down to NVMe cannot win, and is left out at once.
Between strategies that differ by less than `ALIKE` the cheapest in order is taken: rates are not known better than that, and
simpler strategies have fewer parts that can be slow.

Cost: one step's events for each strategy, three simulated for a few: a second or two for 13B.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftkit.plan.events import Event, alone
from ftkit.plan.schedule import parts_of_step, speed
from ftkit.plan.shape import Shape
from ftkit.plan.speed import Rates, Speed
from ftkit.spec.strategy import Strategy, decided
from ftkit.spec.tiers import DEVICE, KINDS, NVME

ALIKE = 0.005
"""Shares of a step's seconds by which strategies may differ and still count as equally fast."""


ROUNDS = 3
"""Of micro-batches that are simulated: the first hides the update, the last is followed by one."""


MOST_ROUNDS = 16
"""Of micro-batches that are simulated where their timeline is shown, or where none is like the one before."""


def fastest(
    candidates: Sequence[Strategy], shape: Shape, rates: Rates, *, next_best: bool = True
) -> list[tuple[Strategy, Speed]]:
    """Return the strategy to take and the next best one of another kind, with their speeds; none where the rates do not say.

    Strategies that differ only in how many blocks keep their graphs are of one kind: the next best of all is often one block
    less, which helps nobody. Nor does the same with something on NVMe.

    Args:
        candidates: strategies that fit, from cheap to dear.
        shape: the model and what is asked of it.
        rates: what one rank has for itself.
        next_best: whether to look for the second one, which takes about as long as the first.
    """
    known = list(_worth_it([each for each in candidates if rates.know(shape, each)], len(shape.blocks)))
    bounds = [bound(shape, each, rates) for each in known]
    ordered = sorted(range(len(known)), key=lambda number: bounds[number])
    found: dict[int, float] = {}
    for number in ordered:
        if found and bounds[number] > min(found.values()) * (1 + ALIKE):
            break
        found[number] = seconds(shape, known[number], rates)
    ranked: list[tuple[Strategy, Speed]] = []
    while found and len(ranked) < 1 + next_best:
        shortest = min(found.values())
        best = known[min(number for number, each in found.items() if each <= shortest * (1 + ALIKE))]
        ranked.append((best, speed_of(shape, best, rates)))
        found = _of_other_kinds(best, shape, known, bounds, ordered, rates) if next_best and len(ranked) == 1 else {}
    return ranked


def _of_other_kinds(
    strategy: Strategy,
    shape: Shape,
    known: Sequence[Strategy],
    bounds: Sequence[float],
    ordered: Sequence[int],
    rates: Rates,
) -> dict[int, float]:
    """Return seconds of strategies of other kinds by number: of each kind the one with the lowest bound, the best kinds."""
    found: dict[int, float] = {}
    seen = {_kind(strategy)}
    for number in ordered:
        if found and bounds[number] > min(found.values()):
            break
        kind = _kind(known[number])
        if kind not in seen:
            seen.add(kind)
            found[number] = seconds(shape, known[number], rates)
    return found


def _worth_it(candidates: Sequence[Strategy], blocks: int) -> Iterator[Strategy]:
    """Yield the candidates but those that are one before them with something moved down to NVMe, and keep no more graphs."""
    before: dict[Strategy, list[Strategy]] = defaultdict(list)
    alike: dict[str, Any] = dict.fromkeys(KINDS, DEVICE) | {"activations": "recompute", "state_host_bytes": 0}
    for each in candidates:
        known = before[replace(each, **alike)]
        if not any(_is_lower(each, one) and each.graphs(blocks) <= one.graphs(blocks) for one in known):
            known.append(each)
            yield each


def _is_lower(strategy: Strategy, other: Strategy) -> bool:
    """Return whether a strategy is another one with something moved down, and nothing moved up for it."""
    tiers = [(getattr(strategy, kind), getattr(other, kind)) for kind in KINDS]
    lower = all(own in (above, NVME) for own, above in tiers) and any(own != above for own, above in tiers)
    return lower and (other.state != NVME or decided(strategy.state_host_bytes) <= decided(other.state_host_bytes))


def _kind(strategy: Strategy) -> Strategy:
    return replace(strategy, activations="recompute")


def seconds(shape: Shape, strategy: Strategy, rates: Rates) -> float:
    """Return what a step takes.

    All rounds of micro-batches after the first two are alike and are counted, not simulated. At stages 0 and 1 the last
    round also reduces full gradients. If gradients go to NVMe, all rounds are simulated: unfinished writes add up from round
    to round. If gradients are summed in host memory, some rounds pass until they are alike, an error of about a thousandth.
    """
    if strategy.rounds <= ROUNDS or strategy.gradients == NVME:
        return speed_of(shape, strategy, rates).seconds
    return speed(shape, strategy, rates, rounds=ROUNDS).longer(ROUNDS, strategy.rounds - ROUNDS).seconds


def speed_of(shape: Shape, strategy: Strategy, rates: Rates) -> Speed:
    """Return the speed of a strategy; of more than `MOST_ROUNDS` rounds those after them are counted, not simulated.

    Its timeline then shows the first ones.
    """
    if strategy.rounds <= MOST_ROUNDS:
        return speed(shape, strategy, rates)
    return speed(shape, strategy, rates, rounds=MOST_ROUNDS).longer(MOST_ROUNDS, strategy.rounds - MOST_ROUNDS)


def bound(shape: Shape, strategy: Strategy, rates: Rates) -> float:
    """Return seconds than which no step of this strategy is shorter."""
    first, further, update = (
        _busy(events, rates.all(shape.hidden)) for events in parts_of_step(shape, strategy, in_order=rates.in_order)
    )
    keys = first.keys() | further.keys() | update.keys()
    return max(first.get(key, 0.0) + (strategy.rounds - 1) * further.get(key, 0.0) + update.get(key, 0.0) for key in keys)


def _busy(events: Sequence[Event], resources: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the seconds of each stream's events, and of all work on each resource."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        found["stream", event.stream] += alone(event, resources)
        for name, amount in event.work.items():
            found["resource", name] += amount / resources[name]
    return found
