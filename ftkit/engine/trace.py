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


_Mark = float | torch.cuda.Event


class Trace:
    """The spans of one rank, which computes on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: list[tuple[str, str, _Mark, _Mark]] | None = None
        self._began_s = 0.0
        self._began: torch.cuda.Event | None = None

    @property
    def recording(self) -> bool:
        """Whether spans are recorded."""
        return self._open is not None

    def span(self, stream: str, name: str, *, host: bool = False) -> AbstractContextManager[None]:
        """Return a context whose body becomes a span of `stream`, during a recording."""
        return _NOTHING if self._open is None else self._span(self._open, stream, name, host=host)

    def start(self) -> None:
        """Start a recording, and discard the spans of an earlier one that was not stopped."""
        if self.device.type == "cuda":  # the device is idle, so its clock and the host's start together
            torch.cuda.synchronize(self.device)
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record(torch.cuda.current_stream(self.device))
            torch.cuda.synchronize(self.device)
        self._open, self._began_s = [], time.perf_counter()

    def stop(self) -> list[Span]:
        """Stop the recording and return its spans, sorted by start. Without a recording the list is empty."""
        found, self._open = list(self._open or []), None  # a copy: a thread may end a span meanwhile
        if self.device.type == "cuda" and found:
            torch.cuda.synchronize(self.device)
        spans = [Span(stream, name, self._seconds(start), self._seconds(end)) for stream, name, start, end in found]
        self._began = None
        return _joined(sorted(spans, key=lambda each: each.start_s))

    def watch_backward(self, stream: str, name: str, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Record autograd's work between `results` and the first of `inputs` as a span."""
        found = self._open
        begun: list[_Mark] = []
        last = next((tensor for tensor in inputs if tensor.requires_grad), None)
        if found is None or last is None:
            return

        def end(gradient: Tensor) -> None:
            if begun:
                found.append((stream, name, begun[0], self._mark(host=False)))

        for tensor in results:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: begun.append(self._mark(host=False)))
        last.register_hook(end)

    @contextmanager
    def _span(self, found: list[tuple[str, str, _Mark, _Mark]], stream: str, name: str, *, host: bool) -> Iterator[None]:
        start = self._mark(host=host)
        yield
        found.append((stream, name, start, self._mark(host=host)))

    def _mark(self, *, host: bool) -> _Mark:
        if host or self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return mark - self._began_s
        assert self._began is not None
        return self._began.elapsed_time(mark) / 1e3


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
