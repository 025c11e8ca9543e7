"""Charts: round ticks, gaps, what is not finite, spikes that survive thinning, and text that stays text."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftkit.report.charts import STRETCHES, Bar, Series, axis_of, line_chart, stacked_bars, thinned
from ftkit.report.text import GIB

NUMBERS = st.floats(-1e38, 1e38) | st.sampled_from([math.nan, math.inf, -math.inf])


def svg(figure):
    """Return the drawing of a figure, parsed: it must be well-formed."""
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", figure, re.DOTALL).group())


def texts(figure, kind):
    return ["".join(each.itertext()) for each in svg(figure).iter("text") if kind in each.get("class", "").split()]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.0, 9.7), (0, 2, 4, 6, 8, 10)),
        ((2.1, 2.9), (2, 2.2, 2.4, 2.6, 2.8, 3)),
        ((0.0, 1.5e-3), (0, 5e-4, 1e-3, 1.5e-3)),
        ((-3.0, 3.0), (-4, -2, 0, 2, 4)),
        ((5.0,), (2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_ticks_are_round_and_hold_all_values(values, ticks):
    axis = axis_of(values)
    assert axis.ticks == pytest.approx(ticks)
    assert axis.low <= min(values)
    assert axis.high >= max(values)


@given(st.lists(st.floats(-1e38, 1e38, allow_subnormal=False), max_size=6), st.booleans(), st.booleans())
def test_every_axis_has_few_ticks_within_its_ends(values, log, from_zero):
    axis = axis_of(values, log=log, from_zero=from_zero)
    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 12
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert all(0 <= axis.share(value) <= 1 for value in values)


def test_a_norm_that_spans_decades_is_on_a_logarithmic_axis():
    figure = line_chart("norm", ("norm", ""), [Series("a", [(1, 0.02), (2, 30.0)])], log=True)
    assert texts(figure, "y") == ["norm (no unit, logarithmic)"]
    assert texts(line_chart("n", ("norm", ""), [Series("a", [(1, 2.0), (2, 3.0)])], log=True), "y") == ["norm (no unit)"]
    axis = axis_of([0.02, 30.0], log=True)
    assert axis.share(0.2) - axis.share(0.02) == pytest.approx(axis.share(20) - axis.share(2))


def test_labels_of_small_and_large_numbers_are_short():
    figure = line_chart("rate", ("rate", ""), [Series("a", [(1, 0.0), (2, 1.5e-3)])])
    assert texts(figure, "tick")[:4] == ["0", "0.0005", "0.001", "0.0015"]
    figure = line_chart("scale", ("scale", ""), [Series("a", [(1, 0.0), (2, 1.5e-5)])])
    assert texts(figure, "tick")[:4] == ["0", "5e−6", "1e−5", "1.5e−5"]
    figure = line_chart("scale", ("scale", ""), [Series("a", [(1, 0.0), (2, 3e9)])])
    assert texts(figure, "tick")[1] == "1e9"


def test_a_missing_value_is_a_gap_and_a_wrong_one_a_mark():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, math.nan), (6, 3.0), (7, math.inf)]
    drawing = svg(line_chart("loss", ("loss", "nats"), [Series("run", points)]))
    (line,) = [each for each in drawing.iter("path") if each.get("class") == "line s0"]
    assert re.findall("[ML]", line.get("d")) == ["M", "L", "M", "L"]
    marks = [each for each in drawing.iter("path") if each.get("class") == "bad"]
    assert ["".join(mark.itertext()) for mark in marks] == ["run, 5: not a number", "run, 7: ∞"]
    assert float(re.search(r"M[\d.]+ ([\d.]+)", line.get("d")).group(1)) > 100, "NaN does not bend the axis"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.none() | NUMBERS), max_size=30), st.booleans())
def test_whatever_the_numbers_a_chart_is_drawn(points, log):
    for kind in ("line", "dots"):
        figure = line_chart("t", ("y", "u"), [Series("s", points, kind), Series("t", points[:1])], log=log)
        places = [each.get(key, "") for each in svg(figure).iter() for key in ("x", "y", "x1", "y1", "d", "width")]
        assert not [place for place in places if "nan" in place or "inf" in place]
        assert texts(figure, "x") == ["step (optimizer steps)"]


def test_a_long_run_stays_small_and_keeps_its_spikes():
    points = [(step, 2.0 + math.sin(step / 900)) for step in range(100_000)]
    points[54_321] = (54_321, 50.0)
    kept = thinned(points, 0, 99_999)
    assert len(kept) <= 4 * (STRETCHES + 1)
    assert (54_321, 50.0) in kept
    assert kept == sorted(kept)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert len(line_chart("loss", ("loss", "nats"), [Series("a", points)])) < 60_000


def test_bars_say_what_they_are():
    plan = Bar("host, plan", [("parameters", 2.0 * GIB), ("moments", 4.0 * GIB)], 7.0 * GIB)
    bars = [plan, Bar("host", [("all", 5.0 * GIB)], plain=True)]
    figure = stacked_bars("memory", bars)
    assert texts(figure, "x") == ["memory (GiB)"]
    shown = ["".join(each.itertext()) for each in svg(figure).iter("rect")]
    assert shown == ["host, plan, parameters: 2", "host, plan, moments: 4", "host, all: 5"]
    widths = [float(each.get("width")) for each in svg(figure).iter("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    names = [each[0].tail for each in ElementTree.fromstring(re.search("<ul.*</ul>", figure).group()).findall("li")]
    assert names == ["parameters", "moments", "limit"]
    far = Bar("host, plan", [("parameters", 2.0 * GIB)], 70.0 * GIB)
    assert ">limit<" not in stacked_bars("memory", [far]), "a mark far away would make the bar invisible"
