"""What ranks leave in /dev/shm, which is nothing: also beside other tests, whose ranks make windows there for a moment."""

from __future__ import annotations

import time
from pathlib import Path


def names() -> set[str]:
    """Return what lies in /dev/shm, without semaphores: other programs' come and go, and no rank makes one with a name."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def stays(before: set[str], seconds: float = 10.0) -> set[str]:
    """Return what is there now, was not `before`, and is still there after a while. Ranks map a window in less than that."""
    new = names() - before
    deadline = time.monotonic() + seconds
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= names()
    return new
