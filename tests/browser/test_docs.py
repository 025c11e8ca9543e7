"""The documentation in a browser: nothing is asked for elsewhere, nothing sticks out, light and dark, desktop and phone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium
from tests.worlds import PATIENCE

pytestmark = pytest.mark.browser

HERE = Path(__file__).parents[2]
DESKTOP, PHONE = 1280, 390
TOO_WIDE = """[...document.querySelectorAll('article > *')].filter(each => {
    const box = each.getBoundingClientRect();
    return box.right > innerWidth + 1 && getComputedStyle(each).overflowX === 'visible';
}).map(each => each.outerHTML.slice(0, 80))"""
UNSEEN = "[...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=HERE, check=True, timeout=120 * PATIENCE)
    return folder


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_is_whole(browser: Chromium, site: Path, width: int, dark: bool) -> None:
    for page in sorted(site.glob("*.html")):
        if page.stem == "404":  # a server shows it for any address, so what it needs stands from the server's root
            continue
        browser.open(page, width=width, dark=dark)
        assert [each for each in browser.requests if not each.startswith(("file:", "data:", "blob:"))] == [], page.name
        wide, room = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= room, page.name
        assert browser.evaluate(TOO_WIDE) == [], page.name
        assert browser.evaluate(UNSEEN) == [], page.name
        scheme = browser.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert (scheme == "slate") == dark, page.name
