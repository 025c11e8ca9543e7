"""The timeline of one step as SVG, one row per stream: measured (trace.json) or simulated by the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from ftkit.plan.speed import Speed
from ftkit.report.charts import BAR, Axis, axis_of, bar, svg_text, wide_chart, wide_x, wide_y
from ftkit.report.text import short

LEAST = 1500
"""A step has about so many pixels: shorter spans than this part of it are joined."""
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
LEGEND = (
    "forward",
    "backward",
    "all-gather and reads of weights",
    "reduce-scatter and copies of gradients",
    "optimizer update",
    "head and loss",
    "activations and others",
)
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
    """Spans of one step, in any order; its duration; its number and its device if known."""

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


def from_chrome(content: dict[str, Any]) -> Timeline:
    """Return the timeline that `as_chrome` wrote."""
    events, streams = content["traceEvents"], {}
    parts = []
    for event in events:
        if event["ph"] == "M":
            streams[event["tid"]] = event["args"]["name"]
        else:
            start, end = event["ts"], event["ts"] + event["dur"]
            parts.append(Part(streams[event["tid"]], event["name"], start / 1e6, end / 1e6))
    return Timeline(parts, **content["otherData"])


def draw(title: str, timeline: Timeline) -> Markup:
    """Return a figure of a timeline. Its axis is in milliseconds, from ten seconds on in seconds."""
    unit, name = (1.0, "s") if timeline.seconds >= 10 else (1e-3, "ms")
    found = dict.fromkeys(part.stream for part in timeline.parts)
    streams = [*(each for each in ORDER if each in found), *(each for each in found if each not in ORDER)]
    end = timeline.seconds / unit
    ticks = axis_of([end], from_zero=True, count=10).ticks
    axis = Axis(0.0, end, tuple(tick for tick in ticks if tick <= end))
    drawn: list[str] = []
    for row, stream in enumerate(streams):
        own = sorted((each for each in timeline.parts if each.stream == stream), key=lambda each: each.start_s)
        for part in _joined(own, timeline.seconds / LEAST):
            drawn += _span(part, wide_x(axis, part.start_s / unit), wide_x(axis, part.end_s / unit), wide_y(row))
    legend = [(LEGEND[colour], colour, "part") for colour in sorted({_colour(part) for part in timeline.parts})]
    return wide_chart(title, [stream[:40] for stream in streams], axis, f"time in the step ({name})", drawn, legend)


def _joined(parts: Sequence[Part], least: float) -> list[Part]:
    """Return the spans of a stream; neighbours of one colour that are too short to be seen are one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        alike = last is not None and _colour(last) == _colour(part)
        if last is not None and alike and part.end_s - part.start_s < least and part.start_s - last.end_s < least:
            found[-1] = replace(last, name=f"{last.name.removesuffix(' …')} …", end_s=max(last.end_s, part.end_s))
        else:
            found.append(part)
    return found


def _colour(part: Part) -> int:
    return COLOUR_OF.get(part.name.partition(" ")[0], len(WORDS))


def _span(part: Part, start: float, end: float, y: int) -> Iterator[str]:
    lasts, begins = short((part.end_s - part.start_s) * 1e3), short(part.start_s * 1e3)
    width = max(end - start, 0.7)
    yield bar(f"part s{_colour(part)}", start, y, width, BAR, f"{part.name}: {lasts} ms, from {begins} ms on")
    label = part.name.rpartition(" ")[2]
    if label.isdigit() and width > 7 * len(label) + 6:
        yield svg_text("inside", (start + end) / 2, y + 16, label)
