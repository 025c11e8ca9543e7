"""The search: of ways that fit, the one whose simulated step is shortest.

Each way has a bound that is cheap to work out: no step is shorter than what its busiest stream, or the most wanted resource,
needs alone. Ways are simulated from the lowest bound on, and once a bound lies above what was reached, no way
after it can win. A way that is another one with something moved down to NVMe cannot win, and is left out at once. Between
ways that differ by less than `ALIKE` the cheapest in order is taken: rates are not known better
than that, and simpler ways have fewer parts that can be slow.

Cost: one step's events for each way, three simulated for a few: a second or two for 13B.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftkit.plan.events import Event, alone
from ftkit.plan.schedule import Rates, Speed, parts_of_step, speed
from ftkit.plan.shape import Shape, Way
from ftkit.spec.tiers import DEVICE, KINDS, NVME

ALIKE = 0.005
"""Shares of a step's seconds by which ways may differ and still count as equally fast."""


ROUNDS = 3
"""Of micro-batches that are simulated: the first hides the update, the last is followed by one."""


MOST_ROUNDS = 16
"""Of micro-batches that are simulated where their timeline is shown, or where none is like the one before."""


@dataclass(frozen=True)
class Candidate:
    """A way that fits: with the shape that has the width of its gradients, and times that blocks are passed in a step."""

    shape: Shape
    way: Way
    accumulation: int


def fastest(candidates: Sequence[Candidate], rates: Rates, *, next_best: bool = True) -> list[tuple[Candidate, Speed]]:
    """Return the way to take and the next best one of another kind, with their speeds; none where the rates do not say.

    Ways that differ only in how many blocks keep their graphs are of one kind: the next best of all is often one block less,
    which tells nobody anything. Nor does the same with something on NVMe.

    Args:
        candidates: ways that fit, from cheap to dear.
        rates: what one rank has for itself.
        next_best: whether to look for the second one, which takes about as long as the first.
    """
    known = list(_worth_it([each for each in candidates if rates.know(each.shape, each.way)]))
    bounds = [bound(each, rates) for each in known]
    ordered = sorted(range(len(known)), key=lambda number: bounds[number])
    found: dict[int, float] = {}
    for number in ordered:
        if found and bounds[number] > min(found.values()) * (1 + ALIKE):
            break
        found[number] = seconds(known[number], rates)
    ranked: list[tuple[Candidate, Speed]] = []
    while found and len(ranked) < 1 + next_best:
        shortest = min(found.values())
        best = known[min(number for number, each in found.items() if each <= shortest * (1 + ALIKE))]
        ranked.append((best, speed_of(best, rates)))
        found = _of_other_kinds(best.way, known, bounds, ordered, rates) if next_best and len(ranked) == 1 else {}
    return ranked


def _of_other_kinds(
    way: Way, known: Sequence[Candidate], bounds: Sequence[float], ordered: Sequence[int], rates: Rates
) -> dict[int, float]:
    """Return seconds of ways of other kinds by their numbers: of each kind the one with the lowest bound, the best kinds."""
    found: dict[int, float] = {}
    seen = {_kind(way)}
    for number in ordered:
        if found and bounds[number] > min(found.values()):
            break
        kind = _kind(known[number].way)
        if kind not in seen:
            seen.add(kind)
            found[number] = seconds(known[number], rates)
    return found


def _worth_it(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates but those that are one before them with something moved down to NVMe, and keep no more graphs."""
    before: dict[tuple[Way, int], list[Way]] = defaultdict(list)
    alike: dict[str, Any] = dict.fromkeys(KINDS, DEVICE) | {"activations": "recompute", "state_host_bytes": 0}
    for each in candidates:
        blocks = len(each.shape.blocks)
        known = before[replace(each.way, **alike), each.accumulation]
        if not any(_is_lower(each.way, one) and each.way.graphs(blocks) <= one.graphs(blocks) for one in known):
            known.append(each.way)
            yield each


def _is_lower(way: Way, other: Way) -> bool:
    """Whether a way is another one with something moved down, and nothing moved up for it."""
    tiers = [(getattr(way, kind), getattr(other, kind)) for kind in KINDS]
    lower = all(own in (above, NVME) for own, above in tiers) and any(own != above for own, above in tiers)
    return lower and (other.state != NVME or way.state_host_bytes <= other.state_host_bytes)


def _kind(way: Way) -> Way:
    return replace(way, activations="recompute")


def seconds(candidate: Candidate, rates: Rates) -> float:
    """Return what a step takes.

    Of many rounds of micro-batches all after the first two are alike: they are counted, not simulated. (Not where gradients
    go to NVMe: what has not been written yet by the end of a round grows from round to round. Where they are summed in host
    memory it takes some rounds until they are alike, which is about a thousandth.)
    """
    shape, way, rounds = candidate.shape, candidate.way, candidate.accumulation
    if rounds <= ROUNDS or way.gradients == NVME:
        return speed_of(candidate, rates).seconds
    return speed(shape, way, rates, accumulation=ROUNDS).longer(ROUNDS, rounds - ROUNDS).seconds


def speed_of(candidate: Candidate, rates: Rates) -> Speed:
    """Return the speed of a way; of more than `MOST_ROUNDS` micro-batches those after them are counted, not simulated.

    Its timeline then shows the first ones.
    """
    shape, way, rounds = candidate.shape, candidate.way, candidate.accumulation
    if rounds <= MOST_ROUNDS:
        return speed(shape, way, rates, accumulation=rounds)
    return speed(shape, way, rates, accumulation=MOST_ROUNDS).longer(MOST_ROUNDS, rounds - MOST_ROUNDS)


def bound(candidate: Candidate, rates: Rates) -> float:
    """Return seconds than which no step of this way is shorter."""
    first, further, update = (
        _busy(events, rates.all(candidate.shape.hidden))
        for events in parts_of_step(candidate.shape, candidate.way, in_order=rates.in_order)
    )
    rounds = candidate.accumulation
    keys = first.keys() | further.keys() | update.keys()
    return max(first.get(key, 0.0) + (rounds - 1) * further.get(key, 0.0) + update.get(key, 0.0) for key in keys)


def _busy(events: Sequence[Event], resources: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the seconds of each stream's events, and of all work on each resource."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        found["stream", event.stream] += alone(event, resources)
        for name, amount in event.work.items():
            found["resource", name] += amount / resources[name]
    return found
