"""A thread that may touch a device makes it the current one first: else each rank gets a CUDA context on GPU 0."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

import ftkit.engine
from ftkit.engine import threads
from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.strategy import Strategy

DEVICE = torch.device("cuda", 3)

HOST_ONLY = {"board.py", "checkpoint.py", "flat_file.py", "host_loops.py", "piece_reader.py", "pieces.py", "watchdog.py"}
"""Modules whose own threads see host memory and files alone."""


@pytest.fixture
def devices(monkeypatch) -> list[tuple[str, torch.device]]:
    """Which thread made which device the current one."""
    found: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device)))
    return found


def test_workers_of_tiers_begin_on_the_ranks_device(devices):
    worker = Tiers(DEVICE, Strategy.of()).worker("moves")
    before = worker.submit(lambda: list(devices)).result()
    worker.shutdown()
    assert [device for _, device in before] == [DEVICE]
    assert before[0][0].startswith("moves")


def test_a_thread_begins_on_its_device(devices):
    seen: list[list[tuple[str, torch.device]]] = []
    thread = threads.thread(lambda: seen.append(list(devices)), "saves", DEVICE)
    thread.start()
    thread.join()
    assert seen == [[("saves", DEVICE)]]


def test_on_a_cpu_no_device_is_asked_for(devices):
    worker = threads.worker("moves", torch.device("cpu"))
    worker.submit(int).result()
    worker.shutdown()
    assert devices == []


def test_no_other_thread_of_the_engine_can_touch_a_device():
    made = {}
    for path in Path(ftkit.engine.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes}
        if names & {"Thread", "ThreadPoolExecutor"}:
            made[path.name] = "cuda" in names
    assert set(made) == HOST_ONLY | {"threads.py"}
    assert not any(made[name] for name in HOST_ONLY - {"watchdog.py"})  # its own way to CUDA is `abort`, of communicator.py
