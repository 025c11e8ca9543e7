"""The timeline of one step as SVG, one row per stream: measured (trace.json) or simulated by the plan.

A drawing has at most `MOST_SPANS` spans per stream: neighbours too short to be seen are drawn as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from ftkit.plan.speed import Speed
from ftkit.report.charts import ROW, WIDE, WIDE_LEFT, axis_of, bar, figure, svg_text, wide_axis
from ftkit.report.text import finite, items, record, short

MOST_SPANS = 1500
MOST_STREAMS = 12
HEIGHT = 24

WORDS = (
    ("forward",),
    ("backward", "recompute"),
    ("gather", "refresh", "read", "fetch"),
    ("reduce", "finish", "norm", "offload", "down"),
    ("update", "adam", "up", "write"),
    ("loss", "head"),
)
COLOUR_OF = {word: colour for colour, words in enumerate(WORDS) for word in words}
"""First word of a span's name to its colour."""
LEGEND = ("forward", "backward", "weights in", "gradients out", "update", "head and loss", "activations and others")
OTHERS = 6
ORDER = ("compute", "collectives", "up", "down", "host update")
"""Streams from the top; others follow."""


@dataclass(frozen=True)
class Part:
    """One span of a stream, in seconds since the step began."""

    stream: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one step.

    Args:
        parts: Spans, in any order.
        seconds: Duration of the step.
        step: Number of the step, or None.
        device: Device of the rank, or "".
    """

    parts: Sequence[Part]
    seconds: float
    step: int | None = None
    device: str = ""


def of_speed(speed: Speed) -> Timeline:
    """Return the last step that the plan simulated."""
    first, last = speed.step
    found = speed.timeline
    parts = [
        Part(event.stream, event.name, max(start, first) - first, min(end, last) - first)
        for event, start, end in zip(found.events, found.starts, found.ends)
        if end > first and start < last and end > start
    ]
    return Timeline(parts, speed.seconds, None, "simulated")


def as_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the trace event format, which Perfetto and chrome://tracing open."""
    streams = list(dict.fromkeys(part.stream for part in timeline.parts))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(streams)
    ]
    for part in timeline.parts:
        time = {"ts": round(part.start_s * 1e6, 3), "dur": round((part.end_s - part.start_s) * 1e6, 3)}
        events.append({"ph": "X", "name": part.name, "pid": 0, "tid": streams.index(part.stream), **time})
    about = {"step": timeline.step, "seconds": timeline.seconds, "device": timeline.device}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def from_chrome(content: Any) -> Timeline | None:
    """Return the timeline that `as_chrome` wrote, or None if the content has no usable span or no duration."""
    content = record(content)
    about = record(content.get("otherData"))
    streams: dict[str, str] = {}
    parts = []
    for event in map(record, items(content.get("traceEvents"))[: 100 * MOST_SPANS]):
        tid, start, lasts = str(event.get("tid")), finite(event.get("ts")), finite(event.get("dur"))
        if event.get("ph") == "M":
            streams[tid] = str(record(event.get("args")).get("name"))
        elif start is not None and lasts is not None and lasts >= 0:
            parts.append(Part(streams.get(tid, tid), str(event.get("name")), start / 1e6, (start + lasts) / 1e6))
    step, seconds = finite(about.get("step")), finite(about.get("seconds"))
    if not parts or seconds is None or seconds <= 0:
        return None
    return Timeline(parts, seconds, None if step is None else int(step), str(about.get("device") or ""))


def with_loss(timeline: Timeline) -> Timeline:
    """Return a measured timeline with the time between the last forward and the next backward as head and loss."""
    own = sorted((part for part in timeline.parts if part.stream == "compute"), key=lambda part: part.start_s)
    loss = [
        Part("compute", "head and loss", before.end_s, after.start_s)
        for before, after in pairwise(own)
        if before.name.startswith("forward")
        and after.name.startswith(("recompute", "backward"))
        and after.start_s > before.end_s
    ]
    return replace(timeline, parts=[*timeline.parts, *loss])


def draw(title: str, timeline: Timeline) -> Markup:
    """Return a figure of a timeline. Its axis is in milliseconds, from ten seconds on in seconds."""
    unit, name = (1.0, "s") if timeline.seconds >= 10 else (1e-3, "ms")
    found = dict.fromkeys(part.stream for part in timeline.parts)
    streams = [*(each for each in ORDER if each in found), *(each for each in found if each not in ORDER)][:MOST_STREAMS]
    bottom = 8 + ROW * len(streams)
    axis = axis_of([0.0, timeline.seconds / unit], from_zero=True, count=10)

    def at(seconds: float) -> float:
        return WIDE_LEFT + min(max(seconds / timeline.seconds, 0.0), 1.0) * (WIDE - WIDE_LEFT - 12)

    ticks = [(tick, round(at(tick * unit), 1)) for tick in axis.ticks if tick * unit <= timeline.seconds * (1 + 1e-9)]
    drawn = wide_axis(axis, ticks, f"time in the step ({name})", bottom)
    for place, stream in enumerate(streams):
        y = 8 + place * ROW
        drawn.append(svg_text("tick name", WIDE_LEFT - 10, y + 16, stream[:40], "end"))
        own = sorted((each for each in timeline.parts if each.stream == stream), key=lambda each: each.start_s)
        for part in _visible(own, timeline.seconds):
            drawn += _span(part, at(part.start_s), at(part.end_s), y)
    legend = [(LEGEND[colour], colour, "part") for colour in sorted({_colour(part) for part in timeline.parts})]
    return figure(title, title, legend, (WIDE, bottom + 46), drawn)


def _visible(parts: Sequence[Part], seconds: float) -> Iterator[Part]:
    """Yield the spans within the step. Runs of short spans become one: those of one colour, or all if there are many."""
    least, crowded = seconds / MOST_SPANS, len(parts) > 4 * MOST_SPANS
    waiting: Part | None = None
    for part in parts:
        if part.end_s < 0 or part.start_s > seconds or not math.isfinite(part.end_s):
            continue
        close = waiting is not None and part.start_s - waiting.end_s < least and part.end_s - part.start_s < least
        if waiting is not None and close and (crowded or _colour(waiting) == _colour(part)):
            name = f"{waiting.name.removesuffix(' …')} …"
            waiting = Part(part.stream, name, waiting.start_s, max(waiting.end_s, part.end_s))
            continue
        if waiting is not None:
            yield waiting
        waiting = part
    if waiting is not None:
        yield waiting


def _colour(part: Part) -> int:
    return COLOUR_OF.get(next(iter(part.name.split()), ""), OTHERS)


def _span(part: Part, start: float, end: float, y: int) -> Iterator[str]:
    lasts, begins = short((part.end_s - part.start_s) * 1e3), short(part.start_s * 1e3)
    width = max(end - start, 0.7)
    yield bar(f"part s{_colour(part)}", start, y, width, HEIGHT, f"{part.name}: {lasts} ms, from {begins} ms on")
    label = next(reversed(part.name.split()), "")
    if label.isdigit() and width > 7 * len(label) + 6:
        yield svg_text("inside", (start + end) / 2, y + 16, label)
