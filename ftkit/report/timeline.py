"""The timeline of a step as SVG: streams down, time across, what ran when; of a trace, or of the plan's simulation.

Of spans that lie outside the step, or that are not numbers, nothing is drawn. However many there are, a drawing has at
most `MOST_SPANS`: those too short to be seen are drawn as one with their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ftkit.report.charts import axis_of, broad
from ftkit.report.text import escaped, finite, items, record, short

MOST_SPANS = 1500
MOST_STREAMS = 12
WIDTH, LEFT, RIGHT, ROW, HEIGHT = 1080, 128, 12, 34, 24

WORDS = (
    ("forward",),
    ("backward", "recompute"),
    ("gather", "refresh", "read", "fetch"),
    ("reduce", "finish", "norm", "offload", "down"),
    ("update", "adam", "up", "write"),
    ("loss", "head"),
)
COLOUR_OF = {word: colour for colour, words in enumerate(WORDS) for word in words}
"""First words of names to colours."""

LEGEND = ("forward", "backward", "weights in", "gradients out", "update", "head and loss", "activations and others")
"""What the colours mean."""

OTHERS = 6

ORDER = ("compute", "collectives", "up", "down", "host update")
"""Of streams, from above; others below."""


@dataclass(frozen=True)
class Part:
    """What ran on a stream from when to when, in seconds since the step began."""

    stream: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Parts of one step.

    Args:
        parts: parts of the step, in any order.
        seconds: duration of the step.
        step: number of the step, or None.
        device: device that it ran on, or "".
    """

    parts: Sequence[Part]
    seconds: float
    step: int | None = None
    device: str = ""


def as_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the trace event format, which chrome://tracing and Perfetto open."""
    streams = list(dict.fromkeys(part.stream for part in timeline.parts))
    named = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for number, stream in enumerate(streams)
    ]
    spans = [
        {
            "ph": "X",
            "name": part.name,
            "pid": 0,
            "tid": streams.index(part.stream),
            "ts": round(part.start_s * 1e6, 3),
            "dur": round((part.end_s - part.start_s) * 1e6, 3),
        }
        for part in timeline.parts
    ]
    about = {"step": timeline.step, "seconds": timeline.seconds, "device": timeline.device}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*named, *spans]}


def from_chrome(content: Any) -> Timeline | None:
    """Return what `as_chrome` wrote, as far as it can be read; None if nothing can."""
    content = record(content)
    about = record(content.get("otherData"))
    streams: dict[Any, str] = {}
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
    """Return a measured timeline with what lies between a last forward and the backward after it as head and loss."""
    own = sorted((part for part in timeline.parts if part.stream == "compute"), key=lambda part: part.start_s)
    loss = [
        Part("compute", "head and loss", before.end_s, after.start_s)
        for before, after in pairwise(own)
        if before.name.startswith("forward")
        and after.name.startswith(("recompute", "backward"))
        and after.start_s > before.end_s
    ]
    return replace(timeline, parts=[*timeline.parts, *loss])


def draw(title: str, timeline: Timeline) -> str:
    """Return a figure of a timeline; its axis is in milliseconds, or in seconds from ten on."""
    unit, name = (1.0, "s") if timeline.seconds >= 10 else (1e-3, "ms")
    found = dict.fromkeys(part.stream for part in timeline.parts)
    streams = [*(each for each in ORDER if each in found), *(each for each in found if each not in ORDER)][:MOST_STREAMS]
    bottom = 8 + ROW * len(streams)
    height = bottom + 46
    axis = axis_of([0.0, timeline.seconds / unit], from_zero=True, count=10)
    scale = (WIDTH - LEFT - RIGHT) / timeline.seconds

    def at(seconds: float) -> float:
        return LEFT + min(max(seconds, 0.0), timeline.seconds) * scale

    drawn = []
    for tick in axis.ticks:
        if tick * unit <= timeline.seconds * (1 + 1e-9):
            x = round(at(tick * unit), 1)
            drawn.append(f'<line class="grid" x1="{x}" x2="{x}" y1="4" y2="{bottom}"/>')
            drawn.append(f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">{short(tick)}</text>')
    for place, stream in enumerate(streams):
        y = 8 + place * ROW
        drawn.append(f'<text class="tick name" x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escaped(stream, 40)}</text>')
        own = sorted((each for each in timeline.parts if each.stream == stream), key=lambda each: each.start_s)
        seen = list(_visible(own, timeline.seconds, alike=True))
        for part in seen if len(seen) <= MOST_SPANS else _visible(own, timeline.seconds, alike=False):
            drawn.append(_bar(part, at(part.start_s), at(part.end_s), y))
    drawn.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = f'x="{(LEFT + WIDTH) / 2}" y="{height - 6}" text-anchor="middle"'
    drawn.append(f'<text class="axis-title x" {middle}>time in the step ({name})</text>')
    colours = sorted({_colour(part) for part in timeline.parts})
    keys = "".join(f'<li><i class="key part b{colour}"></i>{LEGEND[colour]}</li>' for colour in colours)
    return broad(title, keys, WIDTH, height, drawn)


def _visible(parts: Sequence[Part], seconds: float, *, alike: bool) -> Iterator[Part]:
    """Yield the parts in the step, with runs of what is too short to be seen made one, where it is `alike`."""
    least = seconds / MOST_SPANS
    waiting: Part | None = None
    for part in parts:
        if part.end_s < 0 or part.start_s > seconds or not math.isfinite(part.end_s):
            continue
        close = waiting is not None and part.start_s - waiting.end_s < least and part.end_s - part.start_s < least
        if waiting is not None and close and (not alike or _colour(waiting) == _colour(part)):
            name = waiting.name if waiting.name.endswith(" …") else f"{waiting.name} …"
            waiting = Part(part.stream, name, waiting.start_s, max(waiting.end_s, part.end_s))
            continue
        if waiting is not None:
            yield waiting
        waiting = part
    if waiting is not None:
        yield waiting


def _colour(part: Part) -> int:
    return COLOUR_OF.get(next(iter(part.name.split()), ""), OTHERS)


def _bar(part: Part, start: float, end: float, y: int) -> str:
    words, colour = part.name.split(), _colour(part)
    width = max(end - start, 0.7)
    lasts, begins = short((part.end_s - part.start_s) * 1e3), short(part.start_s * 1e3)
    told = escaped(f"{part.name}: {lasts} ms, from {begins} ms on", 300)
    label = words[-1] if words and words[-1].isdigit() and width > 7 * len(words[-1]) + 6 else ""
    text = f'<text class="inside" x="{(start + end) / 2:.1f}" y="{y + 16}" text-anchor="middle">{escaped(label)}</text>'
    return (
        f'<g><rect class="part p{colour}" x="{start:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="2"/>'
        f"{text if label else ''}<title>{told}</title></g>"
    )
