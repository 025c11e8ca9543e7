"""Charts as SVG inside a page: lines over steps, and bars of stacked parts; axes with units, ticks at round numbers.

Colours are CSS variables (`--c0` ... of style.py), so that one drawing serves light and dark. A value that is missing is a
gap; one that is not finite is a cross at the chart's upper edge, and never bends the axis. However long a run is, a line has
at most some hundred points: of each stretch of the axis the first, least, largest and last value, so that no spike is lost.
Hovering tells numbers, by <title>: there is no script.

Of no numbers it makes an empty chart that says so. All text is escaped here, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ftkit.report.text import escaped, short

WIDTH, HEIGHT = 400, 244
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 14, 44
STRETCHES = 240
"""Of the x axis, of which each gives a line at most four points."""
HOVERS = 80
"""Places along the x axis that tell their numbers."""
COLOURS = 6
DECADES = 1.5
"""From how many powers of ten on a chart that may be logarithmic is."""

LARGEST = 1e100
"""On an axis: from there on, and as near to zero, numbers are drawn at its end, so that no sum overflows."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Point = tuple[float, "float | None"]
"""x, and y: None for a gap, not finite for a mark."""


@dataclass(frozen=True)
class Series:
    """What one colour draws.

    Args:
        name: name in the legend.
        points: points by x, as they come.
        kind: "line"; "dots", joined by a thin line; or "level", one dashed line at the y of the first point, over the whole
            chart.
        colour: number of the colour; None takes the place of the series.
    """

    name: str
    points: Sequence[Point]
    kind: str = "line"
    colour: int | None = None


@dataclass(frozen=True)
class Axis:
    """A range of numbers on a length of the drawing.

    Args:
        low: number at the lower end.
        high: number at the upper end.
        ticks: numbers at which the axis is labelled.
        log: whether it is logarithmic.
        room: numbers below this one are short enough as labels; larger ones are divided by a power of ten.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False
    room: float = 1e4

    @property
    def factor(self) -> float:
        """A power of ten to divide labels by, so that they are short and alike; 1 where they are so already."""
        most = max(map(abs, self.ticks), default=0.0)
        if self.log or most == 0 or 1e-2 <= most < self.room:
            return 1.0
        return 10.0 ** (3 * math.floor(math.log10(most) / 3))

    def title(self, name: str, unit: str) -> str:
        """Return a title with the unit, and with what labels are divided by."""
        factor = self.factor
        power = "" if factor == 1 else f"10{str(round(math.log10(factor))).translate(RAISED)}"
        return f"{name} ({' '.join(filter(None, (power, unit))) or 'no unit'}{', logarithmic' if self.log else ''})"

    def label(self, tick: float) -> str:
        """Return what stands at a tick."""
        return short(tick / self.factor)

    def share(self, value: float) -> float:
        """Return where a number lies: 0 at the low end, 1 at the high one; what lies outside is at the nearer end."""
        if self.low == self.high:  # steps that a file made as small as 1e-82
            return 0.0
        if self.log:
            value = min(max(value, self.low), self.high)
            found = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            found = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return found


def axis_of(
    values: Iterable[float], *, log: bool = False, from_zero: bool = False, whole: bool = False, count: int = 5
) -> Axis:
    """Return an axis with ticks at round numbers on which all values lie.

    Args:
        values: finite numbers.
        log: whether the axis may be logarithmic, if they spread so far.
        from_zero: whether zero belongs to it.
        whole: whether only whole numbers are ticks.
        count: about how many ticks there are.
    """
    known = [min(max(value, -LARGEST), LARGEST) if abs(value) > 1 / LARGEST else 0.0 for value in values]
    low, high = min(known, default=0.0), max(known, default=1.0)
    positive = [value for value in known if value > 0]
    if log and len(positive) == len(known) and known and math.log10(high / low) >= DECADES:
        return _log_axis(low, high, count)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= abs(high) * 1e-9:
        room = abs(high) / 2 or 1.0
        low, high = (0.0 if from_zero and low >= 0 else low - room), high + room
    step = _round_step((high - low) / count)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, tuple(number * step for number in range(first, last + 1)))


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least this."""
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
    """Return at most four points for each stretch of [low, high], in order: first, least, largest, last; gaps stay gaps."""
    if len(points) <= 4 * STRETCHES:
        return list(points)
    width = (high - low) / STRETCHES or 1.0
    kept: list[Point] = []
    for _, run in groupby(points, key=lambda point: (int((point[0] - low) / width), _kind(point[1]))):
        stretch = list(run)
        if len(stretch) <= 4 or stretch[0][1] is None:
            kept += stretch[:4] if stretch[0][1] is None else stretch
            continue
        by_value = sorted(range(len(stretch)), key=lambda number: stretch[number][1] or 0.0)
        if not math.isfinite(stretch[0][1]):
            kept.append(stretch[0])
            continue
        kept += [stretch[number] for number in sorted({0, by_value[0], by_value[-1], len(stretch) - 1})]
    return kept[: 16 * STRETCHES]  # gaps and values that take turns in every step of a hostile file


def _kind(value: float | None) -> str:
    return "gap" if value is None else "value" if math.isfinite(value) else "mark"


def line_chart(
    title: str,
    y: tuple[str, str],
    series: Sequence[Series],
    *,
    x: tuple[str, str] = ("step", "optimizer steps"),
    xs: Sequence[float] = (),
    log: bool = False,
    from_zero: bool = False,
) -> str:
    """Return a figure: a heading, a legend where there is more than one series, and the chart.

    Args:
        title: heading above the chart.
        y: name and unit of the y axis; the unit may be "".
        series: what is drawn.
        x: name and unit of the x axis; the unit may be "".
        xs: numbers that the x axis shows beside what is drawn.
        log: whether the y axis may be logarithmic; see `axis_of`.
        from_zero: whether zero belongs to the y axis; see `axis_of`.
    """
    drawn = [each for each in series if each.points]
    known = [*xs, *(place for each in drawn if each.kind != "level" for place, _ in each.points)]
    values = [value for each in drawn for _, value in each.points if value is not None and math.isfinite(value)]
    across = axis_of(known or [0.0, 1.0], whole=True)
    if known and (low := min(known)) < (high := max(known)):  # no empty margins: ticks that lie outside are left out
        across = Axis(low, high, tuple(tick for tick in across.ticks if low <= tick <= high))
    across = replace(across, room=1e6)
    up = axis_of(values, log=log, from_zero=from_zero)
    x_title, y_title = across.title(*x), up.title(*y)
    colours = {id(each): (place if each.colour is None else each.colour) % COLOURS for place, each in enumerate(series)}
    parts = [*_grid(across, up, x_title, y_title)]
    for each in sorted(drawn, key=lambda one: one.kind == "dots"):
        parts += _drawn(each, colours[id(each)], across, up)
    parts += _hovers(drawn, across, x[0])
    if not values:
        middle = f'x="{(WIDTH + LEFT) / 2}" y="{HEIGHT / 2 - 12}"'
        parts.append(f'<text class="none" {middle} text-anchor="middle">no numbers yet</text>')
    label = escaped(f"{title}: {y_title} over {x_title}")
    legend = _legend([(each.name, colours[id(each)], each.kind) for each in drawn]) if len(drawn) > 1 else ""
    svg = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escaped(title)}</figcaption>{legend}{svg}</figure>"


def histogram(
    title: str,
    x: tuple[str, str],
    y: tuple[str, str],
    classes: Sequence[tuple[float, float, int]],
    limit: tuple[float, str] | None = None,
) -> str:
    """Return a figure of upright bars, one a class, with a heading.

    Args:
        title: heading above the chart.
        x: name and unit of the x axis.
        y: name and unit of the y axis.
        classes: (low, high, count), from low up to high.
        limit: where a mark stands, with what it is; None for none.
    """
    ends = [end for low, high, _ in classes for end in (low, high)]
    across = replace(axis_of([*ends, *([limit[0]] if limit else [])], from_zero=True, whole=True), room=1e6)
    up = axis_of([count for _, _, count in classes], from_zero=True, whole=True)
    x_title, y_title = across.title(*x), up.title(*y)
    parts = [*_grid(across, up, x_title, y_title)]
    for low, high, count in classes:
        left, right, top = _x(across, low), _x(across, high), _y(up, count)
        told = escaped(f"{short(low)} to {short(high)} {x[1]}: {short(count)} {y[1]}")
        parts.append(
            f'<rect class="p0" x="{left + 0.5:.1f}" y="{top}" width="{max(right - left - 1, 0.6):.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{told}</title></rect>'
        )
    if limit is not None:
        at, told = _x(across, limit[0]), escaped(f"{limit[1]}: {short(limit[0])}")
        anchor = "end" if at > (LEFT + WIDTH) / 2 else "start"
        parts.append(f'<path class="limit" d="M{at} {TOP}V{HEIGHT - BOTTOM}"><title>{told}</title></path>')
        text = f'x="{at + (-5 if anchor == "end" else 5)}" y="{TOP - 3}" text-anchor="{anchor}"'
        parts.append(f'<text class="tick name" {text}>{told}</text>')
    label = escaped(f"{title}: {y_title} over {x_title}")
    svg = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escaped(title)}</figcaption>{svg}</figure>"


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM), 1)


def _grid(across: Axis, up: Axis, x_title: str, y_title: str) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in up.ticks:
        y = _y(up, tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{up.label(tick)}</text>'
    for tick in across.ticks:
        x = _x(across, tick)
        yield f'<line class="mark" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">{across.label(tick)}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield _title_below(x_title, (LEFT + right) / 2, HEIGHT - 8)
    middle = (TOP + bottom) / 2
    yield (
        f'<text class="axis-title y" transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escaped(y_title)}</text>"
    )


def _drawn(series: Series, colour: int, across: Axis, up: Axis) -> Iterator[str]:
    if series.kind == "level":
        value = series.points[0][1]
        if value is not None and math.isfinite(value):
            y = _y(up, value)
            name = escaped(f"{series.name}: {short(value)}")
            yield f'<path class="level s{colour}" d="M{LEFT} {y}H{WIDTH - RIGHT}"><title>{name}</title></path>'
        return
    points = thinned(series.points, across.low, across.high)
    path: list[str] = []
    pen = "M"
    for x, value in points:
        if value is None:
            pen = "M"
        elif math.isfinite(value):
            path.append(f"{pen}{_x(across, x)} {_y(up, value)}")
            pen = "L"
    if path:
        yield f'<path class="{"line" if series.kind == "line" else "thread"} s{colour}" d="{"".join(path)}"/>'
    values = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if series.kind == "dots" or len(values) == 1:
        for x, y in values:
            yield f'<circle class="f{colour}" cx="{_x(across, x)}" cy="{_y(up, y)}" r="3.5"/>'
    for x, value in points:
        if value is not None and not math.isfinite(value):
            told = escaped(f"{series.name}, {short(x)}: {short(value)}")
            at = _x(across, x)
            yield f'<path class="bad" d="M{at - 4} {TOP - 6}l8 8m0 -8l-8 8"><title>{told}</title></path>'


def _hovers(drawn: Sequence[Series], across: Axis, name: str) -> Iterator[str]:
    """Yield invisible strips that tell what lies there: the last value of each series in each of them."""
    found: dict[int, dict[str, Point]] = {}
    for series in drawn:
        if series.kind != "level":
            for x, y in series.points:
                found.setdefault(min(int(across.share(x) * HOVERS), HOVERS - 1), {})[series.name] = (x, y)
    for place in sorted(found):
        told: dict[float, list[str]] = {}
        for series_name, (x, y) in found[place].items():
            told.setdefault(x, []).append(f"{series_name} {short(y)}")
        text = "\n".join(f"{name} {short(x)}: {', '.join(parts)}" for x, parts in sorted(told.items()))
        width = (WIDTH - LEFT - RIGHT) / HOVERS
        yield (
            f'<rect class="hit" x="{LEFT + place * width:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escaped(text, 600)}</title></rect>'
        )


def _legend(entries: Iterable[tuple[str, int, str]]) -> str:
    keys = "".join(f'<li><i class="key {kind} b{colour}"></i>{escaped(name, 80)}</li>' for name, colour, kind in entries)
    return f'<ul class="legend">{keys}</ul>'


@dataclass(frozen=True)
class Bar:
    """One bar of a stacked bar chart.

    Args:
        name: name left of the bar.
        parts: (name, size) from left to right.
        limit: where a mark stands, with what it is; None for none.
        plain: draw it in one quiet colour, which is not in the legend.
    """

    name: str
    parts: Sequence[tuple[str, float]]
    limit: tuple[float, str] | None = None
    plain: bool = False


def stacked_bars(title: str, x: tuple[str, str], bars: Sequence[Bar], *, unit: float = 1.0) -> str:
    """Return a figure of horizontal bars from zero, one under the other, whose parts have the same colour in each.

    Args:
        title: heading above the chart.
        x: name and unit of the axis.
        bars: bars, from above.
        unit: one unit of the axis, in the sizes of the bars (2**30 where those are bytes and the axis has GiB).
    """
    names = list(dict.fromkeys(name for bar in bars if not bar.plain for name, size in bar.parts if size > 0))
    colours = {name: str(place % (2 * COLOURS)) for place, name in enumerate(names)}
    width, left, row = 1080, 128, 34
    bottom = 12 + row * len(bars)
    height = bottom + 46
    totals = [sum(size for _, size in bar.parts) for bar in bars]
    most = max(totals, default=0.0)
    near = [bar.limit[0] for bar in bars if bar.limit is not None and bar.limit[0] <= 3 * most]
    axis = axis_of([value / unit for value in (*totals, *near)], from_zero=True, count=6)

    def at(value: float) -> float:
        return round(left + axis.share(value / unit) * (width - left - 60), 1)

    parts = []
    for tick in axis.ticks:
        across = at(tick * unit)
        parts.append(f'<line class="grid" x1="{across}" x2="{across}" y1="6" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{across}" y="{bottom + 18}" text-anchor="middle">{axis.label(tick)}</text>')
    for place, bar in enumerate(bars):
        y = 12 + place * row
        name_ends = f'x="{left - 10}" y="{y + 15}" text-anchor="end"'
        parts.append(f'<text class="tick name" {name_ends}>{escaped(bar.name, 40)}</text>')
        done = 0.0
        for name, size in bar.parts:
            if size > 0:
                told = escaped(f"{bar.name}, {name}: {short(size / unit)}")
                start, end = at(done), at(done + size)
                parts.append(
                    f'<rect class="part p{"-plain" if bar.plain else colours[name]}" x="{start}" y="{y}" '
                    f'width="{max(end - start, 0.6):.1f}" height="22">'
                    f"<title>{told}</title></rect>"
                )
                done += size
        parts.append(f'<text class="tick" x="{at(done) + 8}" y="{y + 15}">{short(done / unit, 3)}</text>')
        if bar.limit is not None and bar.limit[0] in near:
            across, told = at(bar.limit[0]), escaped(f"{bar.limit[1]}: {short(bar.limit[0] / unit)}")
            parts.append(f'<path class="limit" d="M{across} {y - 4}v30"><title>{told}</title></path>')
    parts.append(f'<line class="axis" x1="{left}" x2="{width - 14}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_title_below(axis.title(*x), (left + width) / 2, height - 6))
    keys = "".join(f'<li><i class="key part b{colours[name]}"></i>{escaped(name, 80)}</li>' for name in names)
    return broad(title, keys, width, height, parts)


def broad(title: str, keys: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Return a figure as wide as the page, which is scrolled where the page is narrow.

    Args:
        title: heading above the figure.
        keys: entries of its legend, as markup.
        width: width of the drawing.
        height: height of the drawing.
        parts: parts of the drawing, as markup.
    """
    name = escaped(title)
    return (
        f'<figure class="broad"><figcaption>{name}</figcaption><ul class="legend">{keys}</ul><div class="scroll">'
        f'<svg class="chart wide" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
        "</div></figure>"
    )


def _title_below(text: str, x: float, y: float) -> str:
    return f'<text class="axis-title x" x="{x}" y="{y}" text-anchor="middle">{escaped(text)}</text>'
