"""When the parts of one step ran: spans, recorded while somebody asks for them, and nothing otherwise.

    with trace.span("compute", "forward 3"):  a span of the stream `compute`; on CUDA between two events on the stream that
                                              is current, so that what is measured is the work and not its launch
    with trace.span(..., host=True):          of a thread of the host, also on CUDA

The streams are named as in the plan in seconds (plan/schedule.py), so that what was measured can be laid over what was
simulated. Spans may begin in any thread. One that is still open when the recording ends is left out, and so is one that was
open when it began. What it costs: while nothing is recorded a test of one attribute a span; while something is, two
readings of a clock, on CUDA two events, and a wait for the device at either end of the recording.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

_NOTHING = nullcontext()

UPDATE = "update "
"""How the name of a span begins that is a piece of a line's update."""


@dataclass(frozen=True)
class Span:
    """A part of a step, in seconds since the recording began."""

    stream: str
    name: str
    start_s: float
    end_s: float


_Mark = float | torch.cuda.Event


class Trace:
    """The spans of one rank.

    Args:
        device: device that the rank computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: list[tuple[str, str, _Mark, _Mark]] | None = None
        self._began_s = 0.0
        self._began: torch.cuda.Event | None = None

    @property
    def recording(self) -> bool:
        """Whether spans are recorded now."""
        return self._open is not None

    def span(self, stream: str, name: str, *, host: bool = False) -> AbstractContextManager[None]:
        """Return a context whose body is a span of `stream`, if anything is recorded."""
        return _NOTHING if self._open is None else self._span(self._open, stream, name, host=host)

    def start(self) -> None:
        """Begin to record; what was recorded before and not asked for is forgotten."""
        if self.device.type == "cuda":  # the device has nothing to do, so its clock and the host's begin together
            torch.cuda.synchronize(self.device)
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record(torch.cuda.current_stream(self.device))
            torch.cuda.synchronize(self.device)
        self._open, self._began_s = [], time.perf_counter()

    def stop(self) -> list[Span]:
        """Return what was recorded, in the order in which it began, and record no more; nothing if nothing was started."""
        found, self._open = list(self._open or []), None  # a copy: a thread may end a span while the device is waited for
        if self.device.type == "cuda" and found:
            torch.cuda.synchronize(self.device)
        spans = [Span(stream, name, self._seconds(start), self._seconds(end)) for stream, name, start, end in found]
        self._began = None
        return _joined(sorted(spans, key=lambda each: each.start_s))

    def watch_backward(self, stream: str, name: str, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Make what plain autograd does between `results` and the first of `inputs` a span, if anything is recorded."""
        found = self._open
        begun: list[_Mark] = []
        ends = [tensor for tensor in inputs if tensor.requires_grad][:1]
        if found is None or not ends:
            return

        def begin(gradient: Tensor) -> None:
            begun.append(self._mark(host=False))

        def end(gradient: Tensor) -> None:
            if begun:
                found.append((stream, name, begun[0], self._mark(host=False)))

        for tensor in results:
            if tensor.requires_grad:
                tensor.register_hook(begin)
        ends[0].register_hook(end)

    @contextmanager
    def _span(
        self, found: list[tuple[str, str, _Mark, _Mark]], stream: str, name: str, *, host: bool
    ) -> Iterator[None]:
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
    """Return the spans with the pieces of one line's update, which follow each other on their stream, made one."""
    joined: list[Span] = []
    last: dict[str, int] = {}  # of a stream, in `joined`
    for span in spans:
        place = last.get(span.stream)
        before = joined[place] if place is not None else None
        if place is not None and before is not None and span.name.startswith(UPDATE) and before.name == span.name:
            joined[place] = Span(span.stream, span.name, before.start_s, span.end_s)
        else:
            last[span.stream] = len(joined)
            joined.append(span)
    return joined
