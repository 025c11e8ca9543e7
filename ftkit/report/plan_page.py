"""A plan as a page: what each tier holds, the simulated step, and the memory of a GPU within it.

Made by `ftkit plan -o FILE.html`; like a report it needs no other file and asks for nothing. A plan without seconds
has its memory only.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from ftkit.plan.curve import curve
from ftkit.plan.plan import Plan
from ftkit.report.charts import Bar, Series, line_chart, stacked_bars
from ftkit.report.page import page
from ftkit.report.plan_text import TITLES, lines, time_lines
from ftkit.report.simulated import of_speed
from ftkit.report.text import GIB, escaped
from ftkit.report.timeline import draw


def render(plan: Plan, title: str) -> str:
    """Return the page of a plan; `title` says of what."""
    shape = plan.shape
    body = [
        f"<header><h1>{escaped(title)}</h1></header>",
        f"<p>{shape.numel / 1e9:.2f}B parameters, {shape.trained_numel / 1e9:.2f}B of them trained, on "
        f"{shape.world_size} ranks. Planned, not measured.</p>",
        *_memory(plan),
        *(_seconds(plan) if plan.speed is not None else ()),
        "<h2>What was chosen, and why</h2><ul>",
        *(f"<li>{escaped(name)}: {escaped(text)}</li>" for name, text in _words(plan)),
        "</ul>",
        f"<footer>Written by ftkit on {escaped(datetime.now().astimezone().strftime('%Y-%m-%d %H:%M:%S %z'))}.</footer>",
    ]
    return page(f"{title} – ftkit plan", body)


def _words(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from lines(plan)
    if plan.speed is not None:
        yield from time_lines(plan, plan.speed)


def _memory(plan: Plan) -> Iterator[str]:
    yield "<h2>Memory by tier</h2>"
    for tier in plan.tiers:
        phase = plan.memory.peak_phase(tier)
        sizes = plan.memory.purposes(tier, phase).items()
        parts = [(purpose, float(size * plan.limits.ranks(tier))) for purpose, size in sizes]
        yield stacked_bars(f"{TITLES[tier]}, to {phase}", ("memory", "GiB"), [Bar("planned", parts)], unit=GIB)


def _seconds(plan: Plan) -> Iterator[str]:
    speed = plan.speed
    assert speed is not None
    yield "<h2>A step</h2>"
    yield draw(f"Simulated from the rates of the profile: {speed.seconds:.2f} s", of_speed(speed))
    instants = curve(plan)
    static = [(each.seconds, each.static / GIB) for each in instants]
    both = [(each.seconds, (each.static + each.dynamic) / GIB) for each in instants]
    series = [Series("static", static), Series("static and dynamic", both)]
    chart = line_chart("Memory of a GPU within the step", ("memory", "GiB"), series, x=("time", "s"), from_zero=True)
    yield f'<div class="grid-of-charts">{chart}</div>'
