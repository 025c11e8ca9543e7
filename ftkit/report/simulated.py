"""The step that the plan simulated, as a timeline; apart from timeline.py, which knows no plan."""

from __future__ import annotations

from ftkit.plan.speed import Speed
from ftkit.report.timeline import Part, Timeline


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
