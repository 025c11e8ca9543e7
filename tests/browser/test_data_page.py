"""The page of `ftkit data`, and the element of a notebook, as a browser shows them in light and dark: `make browser`."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftkit
from ftkit.train.preview import Preview
from tests.browser.chromium import Chromium
from tests.browser.test_report import BRIGHTNESS, DESKTOP, PHONE, check

pytestmark = pytest.mark.browser

CONTRAST = """(() => {
    const light = text => { const parts = text.match(/[\\d.]+/g).slice(0, 3).map(one => {
        const part = one / 255; return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; };
    const ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const of = (element, ground) => ratio(
        light(getComputedStyle(element).color), light(getComputedStyle(ground).backgroundColor));
    const mark = document.querySelector('.shown mark'), read = document.querySelector('.shown .tokens');
    return [of(mark, mark), of(read, document.querySelector('.shown'))]; })()"""


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> Preview:
    cache = f"data.cache_dir={tmp_path_factory.mktemp('cache')}"
    return ftkit.preview("tiny-cpu", settings=[cache, "data.sequence_tokens=96", "train.batch_tokens=1152"])


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page(browser: Chromium, preview: Preview, tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "data.html"
    path.write_text(preview.page(), encoding="utf-8")
    browser.open(path, width=width, dark=dark)
    check(browser, path)
    assert (browser.evaluate(BRIGHTNESS) < 3 * 60) == dark
    assert all(ratio >= 4.5 for ratio in browser.evaluate(CONTRAST))  # WCAG 2, AA
    line = browser.evaluate("getComputedStyle(document.querySelector('.shown mark')).borderBottomWidth")
    assert line == "2px"  # not by colour alone
    assert browser.evaluate("document.scripts.length + document.images.length") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_element_follows_the_notebooks_theme(browser: Chromium, preview: Preview, tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "notebook.html"
    theme = "false" if dark else "true"
    text = f'<body data-jp-theme-light="{theme}" style="color:red"><p id="other">mine</p>{preview._repr_html_()}</body>'
    path.write_text(f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{text}', encoding="utf-8")
    browser.open(path, width=DESKTOP, dark=not dark)  # the notebook's own theme is what counts
    assert browser.complaints == []
    ground = BRIGHTNESS.replace("document.body", "document.querySelector('.ftkit-data .frame')")
    assert (browser.evaluate(ground) < 3 * 60) == dark
    assert browser.evaluate("getComputedStyle(document.getElementById('other')).color") == "rgb(255, 0, 0)"
    assert all(ratio >= 4.5 for ratio in browser.evaluate(CONTRAST))
