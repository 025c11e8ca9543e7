"""End the processes that a process started. This module does not import torch."""

from __future__ import annotations

from contextlib import suppress

import psutil


def kill_children(pid: int) -> None:
    """End every process that a process started, at once."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
