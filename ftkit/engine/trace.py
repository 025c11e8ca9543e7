"""Spans: when the parts of a step ran, recorded on request.

    with trace.span("compute", "forward 3"):  a span of the stream `compute`. On CUDA, events on the current stream
                                              measure the work and not its launch.
    with trace.span(..., host=True):          a span of a host thread, also on CUDA.

The streams have the names of the plan's simulation (plan/speed.py), so measurement and simulation can be compared. Spans
may begin in any thread. A span that is open when the recording starts or stops is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

_NOTHING = nullcontext()

UPDATE = "update "
"""Prefix of the name of a span that is a piece of a flat parameter's update."""


@dataclass(frozen=True)
class Span:
    """A part of a step, in seconds since the start of the recording."""

    stream: str
    name: str
    start_s: float
    end_s: float


_Record = tuple[str, str, Any, Any, bool]
"""Stream, name, stamps at the start and the end, whether they are the host's."""


class Clock(Protocol):
    """The part of `Streams` that a trace uses."""

    device: torch.device

    def stamp(self) -> Any:
        """Return the time at which the current stream gets here."""

    def seconds(self, start: Any, stamp: Any) -> float:
        """Return the seconds between two stamps."""

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""


class Trace:
    """The spans of one rank. `clock` is the rank's streams."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._open: list[_Record] | None = None
        self._began_s = 0.0
        self._began: Any = None

    @property
    def recording(self) -> bool:
        """Whether spans are recorded."""
        return self._open is not None

    def span(self, stream: str, name: str, *, host: bool = False) -> AbstractContextManager[None]:
        """Return a context whose body becomes a span of `stream`, during a recording."""
        return _NOTHING if self._open is None else self._span(self._open, stream, name, host=host)

    def start(self) -> None:
        """Start a recording, and discard the spans of an earlier one that was not stopped."""
        self.clock.synchronize()
        self._began = self.clock.stamp()
        self.clock.synchronize()  # the device is idle, so its clock and the host's start together
        self._open, self._began_s = [], time.perf_counter()

    def stop(self) -> list[Span]:
        """Stop the recording and return its spans, sorted by start. Without a recording the list is empty."""
        found, self._open = list(self._open or []), None  # a copy: a thread may end a span meanwhile
        if found:
            self.clock.synchronize()
        spans = [
            Span(stream, name, self._seconds(start, host=host), self._seconds(end, host=host))
            for stream, name, start, end, host in found
        ]
        return _joined(sorted(spans, key=lambda each: each.start_s))

    def watch_backward(self, stream: str, name: str, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Record autograd's work between `results` and the first of `inputs` as a span."""
        found = self._open
        begun: list[Any] = []
        last = next((tensor for tensor in inputs if tensor.requires_grad), None)
        if found is None or last is None:
            return

        def end(gradient: Tensor) -> None:
            if begun:
                found.append((stream, name, begun[0], self.clock.stamp(), False))

        for tensor in results:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: begun.append(self.clock.stamp()))
        last.register_hook(end)

    @contextmanager
    def _span(self, found: list[_Record], stream: str, name: str, *, host: bool) -> Iterator[None]:
        stamp = time.perf_counter if host else self.clock.stamp
        start = stamp()
        yield
        found.append((stream, name, start, stamp(), host))

    def _seconds(self, stamp: Any, *, host: bool) -> float:
        return float(stamp) - self._began_s if host else self.clock.seconds(self._began, stamp)


def _joined(spans: list[Span]) -> list[Span]:
    """Return the spans with consecutive pieces of one flat parameter's update merged into one."""
    joined: list[Span] = []
    last: dict[str, int] = {}  # stream to the index of its last span in `joined`
    for span in spans:
        place = last.get(span.stream)
        if place is not None and span.name.startswith(UPDATE) and joined[place].name == span.name:
            joined[place] = replace(joined[place], end_s=span.end_s)
        else:
            last[span.stream] = len(joined)
            joined.append(span)
    return joined
