"""Threads that may touch a device: each begins by making it the current one.

A new thread's current device is 0. An event that it waits for, or a stream that it leaves, then creates a CUDA context on
GPU 0: some 530 MiB a process, seven times on a node of eight ranks. Threads that only see host memory and files need
nothing of this and are made by their owners.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import torch


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def worker(name: str, device: torch.device) -> Executor:
    """Return an executor of one thread, which begins on a device when its first job arrives."""
    return ThreadPoolExecutor(1, name, initializer=use_device, initargs=(device,))


def thread(target: Callable[[], None], name: str, device: torch.device) -> threading.Thread:
    """Return a daemon thread that calls `target` on a device once it is started."""

    def run() -> None:
        use_device(device)
        target()

    return threading.Thread(target=run, name=name, daemon=True)
