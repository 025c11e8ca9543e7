"""Time as data: events that wait for each other, on streams and on resources that they share, and when each of them runs.

[Note: the model]
    a stream     does its events one after the other, in the order in which they were given (a GPU's stream, a thread)
    a resource   has a rate (bytes or operations a second); events that run at the same time share it
    an event     begins when its stream is free and all events that it names are done; alone it takes its latency and the
                 longest of (work / rate) over its resources

Where events that run together ask more of a resource than it has, all of them slow down by the same factor. So an event's
speed changes whenever another begins or ends, and between two such moments nothing does: that is the whole simulation.

It knows no model and no engine; whoever writes a schedule in it (schedule.py) says what an event is. It refuses events that
wait for later ones, and work on resources without a rate. What it costs: for each event a look at those that are running.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """Something that takes time.

    Args:
        name: name that is shown.
        stream: the stream that does it.
        work: how much the event uses of each resource.
        after: numbers of events that must end before it begins.
        latency_s: seconds that pass whatever the rates are.
    """

    name: str
    stream: str
    work: Mapping[str, float]
    after: tuple[int, ...] = ()
    latency_s: float = 0.0


@dataclass
class Script:
    """Events in the order in which they are asked for."""

    events: list[Event] = field(default_factory=list)

    def add(
        self, name: str, stream: str, work: Mapping[str, float], after: Sequence[int | None] = (), latency_s: float = 0.0
    ) -> int:
        """Add an event; return its number. None in `after` stands for nothing to wait for."""
        number = len(self.events)
        known = tuple([each for each in after if each is not None])
        if known and max(known) >= number:
            raise ValueError(f"{name} waits for an event that comes later: a stream could wait for itself")
        self.events.append(Event(name, stream, work, known, latency_s))
        return number


@dataclass(frozen=True)
class Timeline:
    """When events ran.

    Args:
        events: those that were simulated.
        starts: start of each event, in seconds from the beginning.
        ends: end of each event, in seconds from the beginning.
    """

    events: Sequence[Event]
    starts: Sequence[float]
    ends: Sequence[float]

    def busy(self, first_s: float, last_s: float) -> dict[str, float]:
        """Return for each stream the share of [first_s, last_s] in which it was doing something."""
        found: dict[str, float] = defaultdict(float)
        for event, start, end in zip(self.events, self.starts, self.ends):
            found[event.stream] += max(0.0, min(end, last_s) - max(start, first_s))
        return {stream: seconds / (last_s - first_s) for stream, seconds in found.items()}


def simulate(events: Sequence[Event], rates: Mapping[str, float]) -> Timeline:
    """Return when each event runs.

    Args:
        events: the events; those of one stream run in this order.
        rates: rate of each resource, in its own units a second.

    Raises:
        ValueError: for work on a resource that has no rate.
    """
    takes = [alone(event, rates) for event in events]
    shares = [  # of each resource that an event wants, while nothing slows it down
        [(name, amount / took / rates[name]) for name, amount in event.work.items()] if took else []
        for event, took in zip(events, takes)
    ]
    queues: dict[str, deque[int]] = defaultdict(deque)
    waits = [len(event.after) for event in events]  # for how many others
    awaited: list[list[int]] = [[] for _ in events]
    for number, event in enumerate(events):
        queues[event.stream].append(number)
        for each in event.after:
            awaited[each].append(number)
    starts, ends = [0.0] * len(events), [-1.0] * len(events)
    left = [1.0] * len(events)
    running: list[int] = []
    busy: set[str] = set()  # streams of what runs
    waking = list(queues)  # streams whose first event may be able to begin now
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
                if takes[number] > 0:
                    running.append(number)
                    busy.add(stream)
                else:  # an event of no time lets others begin
                    end(number)
        if not running:
            break
        speeds = _speeds(running, takes, shares)
        step = min([left[each] / speed for each, speed in zip(running, speeds)])
        now += step
        still = []
        for each, speed in zip(running, speeds):
            left[each] -= speed * step
            if left[each] > 1e-12:
                still.append(each)
                continue
            end(each)
            busy.discard(events[each].stream)
            waking.append(events[each].stream)
        running = still
    return Timeline(events, starts, ends)


def alone(event: Event, rates: Mapping[str, float]) -> float:
    """Return the seconds of an event while nothing else runs.

    Raises:
        ValueError: for work on a resource that has no rate.
    """
    longest = 0.0
    try:
        for name, amount in event.work.items():
            longest = max(longest, amount / rates[name])
        return event.latency_s + longest
    except KeyError:
        unknown = event.work.keys() - rates.keys()
        raise ValueError(f"{event.name}: nothing says how fast {min(unknown)} is") from None


def _speeds(running: Sequence[int], takes: Sequence[float], shares: Sequence[Sequence[tuple[str, float]]]) -> list[float]:
    """Return how much of each running event is done in a second."""
    asked: dict[str, float] = {}
    for each in running if len(running) > 1 else ():
        for name, share in shares[each]:
            asked[name] = asked.get(name, 0.0) + share
    if max(asked.values(), default=0.0) <= 1:  # the usual case: nobody waits for anybody
        return [1.0 / takes[each] for each in running]
    return [
        min([1 / asked[name] for name, _ in shares[each] if asked[name] > 1], default=1.0) / takes[each] for each in running
    ]
