"""Threads that use a device: each makes its rank's device the current one first.

The current device of a new thread is 0. Waiting for an event or using a stream there would create a CUDA context on GPU 0,
about 530 MiB for each of the other ranks of a node. Threads that use only host memory and files do not need this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import torch


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread. Do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def worker(name: str, device: torch.device) -> Executor:
    """Return an executor of one thread on a device. The thread starts with its first job."""
    return ThreadPoolExecutor(1, name, initializer=use_device, initargs=(device,))


def thread(target: Callable[[], None], name: str, device: torch.device) -> threading.Thread:
    """Return a daemon thread that calls `target` on a device."""

    def run() -> None:
        use_device(device)
        target()

    return threading.Thread(target=run, name=name, daemon=True)
