"""The report of the demo's run, as a browser shows it: `make browser`. Without Chromium, or without the run, this fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftkit.report.compare import compare
from ftkit.report.page import refresh
from tests.browser.chromium import Chromium
from tests.report.test_page import HOSTILE, lines, run_folder

pytestmark = pytest.mark.browser

HERE = Path(__file__).parents[2]
DEMO = HERE / "runs" / "demo"
DESKTOP, PHONE = 1280, 390
SHOWN_HEIGHT = 1520
"""Of the report, on the pictures in docs: down to the timeline."""

CHARTS = """[...document.querySelectorAll('svg.chart')].map(chart => ({
    titles: [...chart.querySelectorAll('.axis-title')].map(title => title.textContent),
    wide: chart.classList.contains('wide'), width: chart.getBoundingClientRect().width,
    outside: [...chart.querySelectorAll('text')].filter(text => {
        const [own, all] = [text.getBoundingClientRect(), chart.getBoundingClientRect()];
        return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1;
    }).map(text => text.textContent)}))"""
BRIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
IS_DARK = "matchMedia('(prefers-color-scheme: dark)').matches"


@pytest.fixture(scope="module")
def demo() -> Path:
    assert (DEMO / "summary.json").is_file(), "there is no run of the demo: make demo"
    return refresh(DEMO)


def check(browser: Chromium, path: Path) -> None:
    """Check an open report: no complaints, no requests, nothing cut off, axes with units."""
    assert browser.complaints == []
    assert browser.requests == [path.resolve().as_uri()]
    wide, window = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window
    found = browser.evaluate(CHARTS)
    assert found
    for chart in found:
        assert len(chart["titles"]) == (1 if chart["wide"] else 2), chart
        assert all(title.endswith(")") and " (" in title for title in chart["titles"]), chart
        assert chart["outside"] == []
        assert chart["width"] > 250


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_of_the_demo(browser: Chromium, demo: Path, tmp_path: Path, width: int, dark: bool) -> None:
    browser.open(demo, width=width, dark=dark)
    check(browser, demo)
    assert browser.evaluate(IS_DARK) == dark
    assert (browser.evaluate(BRIGHTNESS) < 3 * 60) == dark
    assert browser.evaluate("document.querySelector('.status').textContent") == "finished"
    assert browser.evaluate("document.querySelectorAll('svg.chart').length") >= 7
    if width == DESKTOP:
        browser.screenshot(tmp_path / "shown.png", height=SHOWN_HEIGHT)
        shutil.copyfile(tmp_path / "shown.png", HERE / "docs" / f"report-{'dark' if dark else 'light'}.png")


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_comparison(browser: Chromium, demo: Path, tmp_path: Path, width: int) -> None:
    other = run_folder(tmp_path / "other", metrics=lines(120), recipe="train: {seed: 18}\n")
    path = tmp_path / "compare.html"
    compare([demo.parent, other], path)
    browser.open(path, width=width)
    check(browser, path)


def test_hostile_files(browser: Chromium, tmp_path: Path) -> None:
    answers = [dict.fromkeys(("question", "before", "after", "expected"), HOSTILE)]
    found = {"answers": answers, "why": HOSTILE, "command": HOSTILE, "status": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    text = HOSTILE.encode(errors="replace").decode()
    folder = run_folder(tmp_path / "<i>'\"", metrics=[text, *lines(3)], report=found, summary=found, recipe=HOSTILE)
    path = refresh(folder)
    browser.open(path, width=PHONE)
    check(browser, path)
    assert browser.evaluate("document.scripts.length + document.images.length") == 0
