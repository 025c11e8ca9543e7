"""SVG charts: lines over steps, histograms, stacked bars.

Colours are CSS classes (`s0` to `s11` in report.css), so one drawing serves light and dark. A missing value is a gap. An
infinite value or NaN is a cross at the upper edge and does not change the axis. `thinned` bounds the size of a line and
keeps its spikes. Values appear on hover through <title>; there is no script. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from ftkit.report.text import GIB, escaped, short

WIDTH, HEIGHT = 400, 244
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 44
WIDE, WIDE_LEFT, WIDE_RIGHT, WIDE_TOP, ROW = 1080, 128, 60, 10, 34
"""Width, margins and row height of charts that span the page."""
BAR = 23
"""Height of a bar in such a chart."""
STRETCHES = 240
"""Parts of the x axis. A line has at most four points in each."""
HOVERS = 80
"""Places along the x axis that show their values on hover."""
COLOURS = 6
DECADES = 1.5
"""Powers of ten from which an axis that may be logarithmic is."""

Point = tuple[float, "float | None"]
"""x and y; y is None for a gap."""
Legend = Sequence[tuple[str, int, str]]
"""Name, colour and kind of each entry."""


@dataclass(frozen=True)
class Series:
    """Points of one colour, in order of x."""

    name: str
    points: Sequence[Point]
    kind: str = "line"  # or "dots", joined by a thin line
    colour: int = 0


@dataclass(frozen=True)
class Axis:
    """The numbers from `low` to `high` along one side of a chart; `ticks` have a label."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a number, from 0 at the low end to 1 at the high end; numbers outside are at an end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis_of(
    values: Iterable[float], *, log: bool = False, from_zero: bool = False, whole: bool = False, count: int = 5
) -> Axis:
    """Return an axis with round ticks that contains all values.

    Args:
        values: Finite numbers.
        log: Whether the axis may be logarithmic if the values spread over decades.
        from_zero: Whether the axis contains zero.
        whole: Whether ticks are whole numbers.
        count: Approximate number of ticks.
    """
    known = list(values)
    low, high = min(known, default=0.0), max(known, default=1.0)
    if log and known and low > 0 and math.log10(high / low) >= DECADES:
        return _log_axis(low, high, count)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= abs(high) * 1e-9:
        margin = abs(high) / 2 or 1.0
        low, high = (0.0 if from_zero and low >= 0 else low - margin), high + margin
    step = _round_step((high - low) / count)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, tuple(number * step for number in range(first, last + 1)))


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * times for times in (1, 2, 5, 10, 20) if power * times >= least * (1 - 1e-9))


def _log_axis(low: float, high: float, count: int) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / count))
    times = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [t * 10.0**power for power in range(first, last + 1, every) for t in times]
    ends = max((tick for tick in ticks if tick <= low), default=ticks[0]), min((t for t in ticks if t >= high), default=high)
    return Axis(ends[0], ends[1], tuple(tick for tick in ticks if ends[0] <= tick <= ends[1]), log=True)


def thinned(points: Sequence[Point], low: float, high: float) -> list[Point]:
    """Return the first, least, largest and last point of each stretch of [low, high], in order. Gaps stay gaps."""
    if len(points) <= 4 * STRETCHES:
        return list(points)
    width = (high - low) / STRETCHES
    kept: list[Point] = []
    for (_, drawable), run in groupby(points, key=lambda point: (int((point[0] - low) / width), _drawable(point[1]))):
        stretch = list(run)
        by_value = sorted(range(len(stretch)), key=lambda number: stretch[number][1] or 0.0) if drawable else [0]
        kept += [stretch[number] for number in sorted({0, by_value[0], by_value[-1], len(stretch) - 1})]
    return kept


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def line_chart(
    title: str,
    y: tuple[str, str],
    series: Sequence[Series],
    *,
    x: tuple[str, str] = ("step", "optimizer steps"),
    xs: Sequence[float] = (),
    log: bool = False,
    from_zero: bool = False,
) -> Markup:
    """Return a figure: heading, legend for two or more series, and chart.

    Args:
        title: Heading above the chart.
        y: Name and unit of the y axis; the unit may be "".
        series: Series to draw.
        x: Name and unit of the x axis.
        xs: Further numbers that the x axis contains.
        log: Whether the y axis may be logarithmic; see `axis_of`.
        from_zero: Whether the y axis contains zero; see `axis_of`.
    """
    drawn = [each for each in series if each.points]
    known = [*xs, *(place for each in drawn for place, _ in each.points)]
    values = [value for each in drawn for _, value in each.points if value is not None and math.isfinite(value)]
    across = axis_of(known, whole=True)
    if known and (low := min(known)) < (high := max(known)):  # no empty margins
        across = Axis(low, high, tuple(tick for tick in across.ticks if low <= tick <= high))
    up = axis_of(values, log=log, from_zero=from_zero)
    parts: list[str] = []
    for each in sorted(drawn, key=lambda one: one.kind == "dots"):
        parts += _drawn(each, across, up)
    parts += _hovers(drawn, across, x[0])
    if not values:
        parts.append(svg_text("none", (WIDTH + LEFT) / 2, HEIGHT / 2 - 12, "no numbers yet"))
    legend = [(each.name, each.colour, each.kind) for each in drawn] if len(drawn) > 1 else []
    return _upright(title, across, up, (x, y), parts, legend)


def histogram(title: str, x: tuple[str, str], y: tuple[str, str], classes: Sequence[tuple[float, float, int]]) -> Markup:
    """Return a figure of upright bars, one for each class.

    Args:
        title: Heading above the chart.
        x: Name and unit of the x axis.
        y: Name and unit of the y axis.
        classes: (low, high, count); `high` is excluded.
    """
    across = axis_of([end for low, high, _ in classes for end in (low, high)], from_zero=True, whole=True)
    up = axis_of([count for _, _, count in classes], from_zero=True, whole=True)
    parts = []
    for low, high, count in classes:
        left, right, top = _x(across, low), _x(across, high), _y(up, count)
        text = f"{short(low)} to {short(high)} {x[1]}: {short(count)} {y[1]}"
        parts.append(bar("part s0", left + 0.5, top, max(right - left - 1, 0.6), HEIGHT - BOTTOM - top, text))
    return _upright(title, across, up, (x, y), parts, [])


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM), 1)


def svg_text(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    """Return a text element of a CSS class."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escaped(text)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def bar(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    """Return a rectangle of a CSS class that shows a title on hover."""
    size = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {size}><title>{escaped(title)}</title></rect>'


def _upright(
    title: str, across: Axis, up: Axis, names: tuple[tuple[str, str], tuple[str, str]], parts: Sequence[str], legend: Legend
) -> Markup:
    """Return a figure with two axes, given the drawing between them."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    (x_name, x_unit), (y_name, y_unit) = names
    x_title, y_title = f"{x_name} ({x_unit})", f"{y_name} ({y_unit or 'no unit'}{', logarithmic' if up.log else ''})"
    grid = []
    for tick in up.ticks:
        y = _y(up, tick)
        grid += [_line("grid", LEFT, y, right, y), svg_text("tick", LEFT - 8, y + 4, short(tick), "end")]
    for tick in across.ticks:
        x = _x(across, tick)
        grid += [_line("mark", x, bottom, x, bottom + 4), svg_text("tick", x, bottom + 18, short(tick))]
    grid.append(_line("axis", LEFT, bottom, right, bottom))
    grid.append(svg_text("axis-title x", (LEFT + right) / 2, HEIGHT - 8, x_title))
    turned = f'transform="translate(15 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle"'
    grid.append(f'<text class="axis-title y" {turned}>{escaped(y_title)}</text>')
    return _figure(title, f"{title}: {y_title} over {x_title}", legend, (WIDTH, HEIGHT), [*grid, *parts])


def wide_chart(title: str, rows: Sequence[str], axis: Axis, axis_title: str, parts: Iterable[str], legend: Legend) -> Markup:
    """Return a figure that spans the page: named rows of elements at `wide_x` and `wide_y`, and a horizontal axis."""
    bottom = wide_y(len(rows))
    grid = []
    for tick in axis.ticks:
        x = wide_x(axis, tick)
        grid += [_line("grid", x, 4, x, bottom), svg_text("tick", x, bottom + 18, short(tick))]
    grid.append(_line("axis", WIDE_LEFT, bottom, WIDE - WIDE_RIGHT, bottom))
    grid.append(svg_text("axis-title x", (WIDE_LEFT + WIDE - WIDE_RIGHT) / 2, bottom + 40, axis_title))
    grid += [svg_text("tick name", WIDE_LEFT - 10, wide_y(row) + 16, name, "end") for row, name in enumerate(rows)]
    return _figure(title, title, legend, (WIDE, bottom + 46), [*grid, *parts])


def wide_x(axis: Axis, value: float) -> float:
    """Return the x of a number in a wide chart."""
    return round(WIDE_LEFT + axis.share(value) * (WIDE - WIDE_LEFT - WIDE_RIGHT), 1)


def wide_y(row: int) -> int:
    """Return the upper edge of a bar in a row of a wide chart."""
    return WIDE_TOP + ROW * row


def _figure(title: str, label: str, legend: Legend, size: tuple[int, int], parts: Iterable[str]) -> Markup:
    """Return a figure of elements in markup. `label` describes it for screen readers."""
    keys = "".join(f'<li><i class="key {kind} s{colour}"></i>{escaped(name)}</li>' for name, colour, kind in legend)
    shown = f'<ul class="legend">{keys}</ul>' if keys else ""
    view = f'viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escaped(label)}"'
    wide = size[0] > WIDTH
    drawing = f'<svg class="chart{" wide" * wide}" {view}>{"".join(parts)}</svg>'
    kind, drawing = ("broad", f'<div class="scroll">{drawing}</div>') if wide else ("column", drawing)
    return Markup(f'<figure class="{kind}"><figcaption>{escaped(title)}</figcaption>{shown}{drawing}</figure>')


def _drawn(series: Series, across: Axis, up: Axis) -> Iterator[str]:
    path: list[str] = []
    values: list[str] = []
    pen, colour = "M", series.colour
    for x, value in thinned(series.points, across.low, across.high):
        at = _x(across, x)
        if value is None:
            pen = "M"
        elif math.isfinite(value):
            path.append(f"{pen}{at} {_y(up, value)}")
            values.append(f'<circle class="dot s{colour}" cx="{at}" cy="{_y(up, value)}" r="3.5"/>')
            pen = "L"
        else:
            name = escaped(f"{series.name}, {short(x)}: {short(value)}")
            yield f'<path class="bad" d="M{at - 4:g} {TOP - 6}l8 8m0 -8l-8 8"><title>{name}</title></path>'
    if path:
        yield f'<path class="{series.kind} s{colour}" d="{"".join(path)}"/>'
    if series.kind == "dots" or len(values) == 1:
        yield from values


def _hovers(drawn: Sequence[Series], across: Axis, name: str) -> Iterator[str]:
    """Yield invisible strips that show, on hover, the last value of each series in each of them."""
    found: dict[int, dict[str, Point]] = {}
    for series in drawn:
        for x, y in series.points:
            found.setdefault(min(int(across.share(x) * HOVERS), HOVERS - 1), {})[series.name] = (x, y)
    width = (WIDTH - LEFT - RIGHT) / HOVERS
    for place, points in sorted(found.items()):
        shown: dict[float, list[str]] = {}
        for series_name, (x, y) in points.items():
            shown.setdefault(x, []).append(f"{series_name} {short(y)}")
        text = "\n".join(f"{name} {short(x)}: {', '.join(parts)}" for x, parts in sorted(shown.items()))
        yield bar("hit", LEFT + place * width, TOP, width, HEIGHT - TOP - BOTTOM, text)


@dataclass(frozen=True)
class Bar:
    """One bar of a stacked bar chart: (name, bytes) of its parts from left to right."""

    name: str
    parts: Sequence[tuple[str, float]]
    granted: float | None = None  # the limit in bytes, at which there is a mark
    plain: bool = False  # one neutral colour, no entry in the legend


def stacked_bars(title: str, bars: Sequence[Bar]) -> Markup:
    """Return a figure of horizontal bars of memory. Parts of one name have one colour in all bars."""
    names = list(dict.fromkeys(name for each in bars if not each.plain for name, size in each.parts if size > 0))
    colours = {name: place % (2 * COLOURS) for place, name in enumerate(names)}
    totals = [sum(size for _, size in each.parts) for each in bars]
    near = [each.granted for each in bars if each.granted is not None and each.granted <= 3 * max(totals)]
    axis = axis_of([value / GIB for value in (*totals, *near)], from_zero=True, count=6)

    def at(size: float) -> float:
        return wide_x(axis, size / GIB)

    parts = []
    for row, each in enumerate(bars):
        y, done = wide_y(row), 0.0
        for name, size in each.parts:
            if size > 0:
                start, end = at(done), at(done + size)
                kind = "part plain" if each.plain else f"part s{colours[name]}"
                parts.append(bar(kind, start, y, max(end - start, 0.6), BAR, f"{each.name}, {name}: {short(size / GIB)}"))
                done += size
        parts.append(svg_text("tick", at(done) + 8, y + 16, short(done / GIB, 3), "start"))
        if each.granted in near:
            parts.append(f'<path class="limit" d="M{at(each.granted)} {y - 4}v{BAR + 8}"/>')
    legend = [(name, colours[name], "part") for name in names] + [("limit", 0, "limit")] * bool(near)
    return wide_chart(title, [each.name for each in bars], axis, "memory (GiB)", parts, legend)
