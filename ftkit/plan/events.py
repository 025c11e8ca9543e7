"""A simulation of events on streams that share resources.

[Note: the model]
    stream     runs its events one after the other, in the given order (a GPU's stream, a thread)
    resource   has a rate in bytes or operations per second. Events that run at the same time share it
    event      begins when its stream is free and all events in `after` have ended. Alone it takes its latency plus the
               longest of (work / rate) over its resources

Events that together ask more of a resource than its rate slow down by the same factor. An event's speed changes only when
another event begins or ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUNDING = 1e-9
"""Shares and seconds that differ by less are equal."""


class Event(NamedTuple):
    """A unit of work."""

    name: str
    stream: str
    work: Mapping[str, float]  # bytes or operations of each resource
    after: tuple[int, ...] = ()  # numbers of the events that must end before it begins
    latency_s: float = 0.0  # at any rate


@dataclass
class Script:
    """Events in the order of issue."""

    events: list[Event] = field(default_factory=list)

    def add(
        self, name: str, stream: str, work: Mapping[str, float], after: Sequence[int | None] = (), latency_s: float = 0.0
    ) -> int:
        """Add an event and return its number. None in `after` is ignored."""
        number = len(self.events)
        known = tuple([each for each in after if each is not None])
        self.events.append(Event(name, stream, work, known, latency_s))
        return number


@dataclass(frozen=True)
class Timeline:
    """The start and end of each event, in seconds."""

    events: Sequence[Event]
    starts: Sequence[float]
    ends: Sequence[float]

    def busy(self, first_s: float, last_s: float) -> dict[str, float]:
        """Return for each stream the share of [first_s, last_s] during which it worked."""
        found: dict[str, float] = defaultdict(float)
        for event, start, end in zip(self.events, self.starts, self.ends):
            found[event.stream] += max(0.0, min(end, last_s) - max(start, first_s))
        return {stream: seconds / (last_s - first_s) for stream, seconds in found.items()}


def simulate(events: Sequence[Event], rates: Mapping[str, float]) -> Timeline:
    """Return the start and end of each event. Events of one stream run in the given order; rates are per second."""
    left = [alone(event, rates) for event in events]  # seconds that the event still takes alone
    shares = [  # of each resource that an event uses alone
        [(name, amount / took / rates[name]) for name, amount in event.work.items()] if took else []
        for event, took in zip(events, left)
    ]
    queues: dict[str, deque[int]] = defaultdict(deque)
    waits = [len(event.after) for event in events]  # events that must end before it
    awaited: list[list[int]] = [[] for _ in events]
    for number, event in enumerate(events):
        queues[event.stream].append(number)
        for each in event.after:
            awaited[each].append(number)
    starts, ends = [0.0] * len(events), [-1.0] * len(events)
    asked = dict.fromkeys(rates, 0.0)  # shares of the running events
    running: list[int] = []
    busy: set[str] = set()  # streams with a running event
    waking = list(queues)  # streams whose first event may begin now
    now = 0.0

    def end(number: int) -> None:
        ends[number] = now
        for each in awaited[number]:
            waits[each] -= 1
            if not waits[each]:
                waking.append(events[each].stream)

    while True:
        while waking:
            stream = waking.pop()
            queue = queues[stream]
            while queue and stream not in busy and not waits[queue[0]]:
                number = queue.popleft()
                starts[number] = now
                if left[number] > 0:
                    running.append(number)
                    busy.add(stream)
                    for name, share in shares[number]:
                        asked[name] += share
                else:  # an event without duration lets others begin
                    end(number)
        if not running:
            return Timeline(events, starts, ends)
        speeds = [1.0] * len(running)
        if max(asked.values()) > 1 + ROUNDING:
            speeds = [1 / max([1.0, *(asked[name] for name, _ in shares[each])]) for each in running]
        step = min([left[each] / speed for each, speed in zip(running, speeds)])
        now += step
        for each, speed in zip(tuple(running), speeds):
            left[each] -= speed * step
            if left[each] <= ROUNDING * step:
                running.remove(each)
                busy.discard(events[each].stream)
                waking.append(events[each].stream)
                for name, share in shares[each]:
                    asked[name] -= share
                end(each)


def alone(event: Event, rates: Mapping[str, float]) -> float:
    """Return the seconds of an event that runs alone."""
    return event.latency_s + max([amount / rates[name] for name, amount in event.work.items()], default=0.0)
