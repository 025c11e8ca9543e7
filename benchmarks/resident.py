"""What a process holds in memory while it does one thing: the kernel's own peak, and samples of what it is made of.

The peak (VmHWM) is set back before each thing and never misses a page. Of what kind the pages are (anonymous and shared,
or of files; locked by the process or pinned by a driver) the kernel tells for the moment only: that is sampled.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import suppress
from pathlib import Path

EVERY_S = 0.02


def status() -> dict[str, int]:
    """Return the sizes in this process's status, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in lines}


class Watch:
    """Notes the peaks of what runs in its `with` block.

    Attributes:
        peaks: bytes: resident; anonymous (shared memory included) and pinned (locked ones included), as sampled.
        whole: whether the resident peak is the kernel's, not a sample.
    """

    def __init__(self) -> None:
        self.peaks = {"resident": 0, "anonymous": 0, "pinned": 0}
        self.whole = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        gc.collect()
        with suppress(OSError, AttributeError):  # glibc keeps what was freed before: that is not what is measured
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.whole = True
        except OSError:  # not every container lets it be set back
            pass
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._note()
        if self.whole:
            self.peaks["resident"] = status()["VmHWM"]

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._note()

    def _note(self) -> None:
        now = status()
        found = {
            "resident": now["VmRSS"],
            "anonymous": now["RssAnon"] + now["RssShmem"],
            "pinned": now["VmPin"] + now["VmLck"],
        }
        self.peaks = {kind: max(size, found[kind]) for kind, size in self.peaks.items()}
