"""What the tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    opened = Chromium()
    yield opened
    opened.close()
