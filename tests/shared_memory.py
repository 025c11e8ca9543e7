"""The files that ranks of ftkit leave in /dev/shm. There must be none."""

from __future__ import annotations

import time
from pathlib import Path

from tests.worlds import PATIENCE


def names() -> set[str]:
    """Return the names of ftkit's files in /dev/shm. Files of other programs come and go."""
    return {path.name for path in Path("/dev/shm").glob("ftkit-*")}


def stays(before: set[str], seconds: float = 10.0) -> set[str]:
    """Return the files that are new since `before` and remain. A rank of another test removes its file at once."""
    new = names() - before
    deadline = time.monotonic() + seconds * PATIENCE
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= names()
    return new
