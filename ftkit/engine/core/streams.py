"""Streams for work that overlaps with the computation.

On CUDA, a rank has three streams beside the computing one: `collectives`, `up` (weights from the host) and `down` (gradients
to the host). Activation offload and deferred updates each have a stream of their own.

Work on a stream runs in the order of issue, and all ranks issue their collectives in the same order. Events order work
on different streams. On a CPU the same calls run in program order, and every event is None.

Each piece of work is a span of the trace, under the name of its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ftkit.engine.trace import Trace

Event = torch.cuda.Event | None
"""A point of a stream's work. None on a CPU, where everything issued before is done."""


class SideStream:
    """A stream beside the computing one.

    Args:
        name: Its name in the trace.
        device: Its device.
        trace: Receives its spans.
    """

    def __init__(self, name: str, device: torch.device, trace: Trace) -> None:
        self.name, self.trace = name, trace
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def run(self, span: str, *after: Event) -> Iterator[None]:
        """Run the body on this stream, after the events `after`, as a span of the trace."""
        if self.stream is None:
            with self.trace.span(self.name, span):
                yield
            return
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream), self.trace.span(self.name, span):
            yield

    def mark(self) -> Event:
        """Return an event after the work issued on this stream so far."""
        return None if self.stream is None else self.stream.record_event()


class Streams:
    """The streams of one rank, which computes on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.trace = Trace(device)
        self.collectives = SideStream("collectives", device, self.trace)
        self.up = SideStream("up", device, self.trace)
        self.down = SideStream("down", device, self.trace)

    def now(self) -> Event:
        """Return an event after the work issued on the computing stream so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self, event: Event) -> None:
        """Make the computing stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
