"""A thread that may touch a device makes it the current one first: else each rank gets a CUDA context on GPU 0."""

from __future__ import annotations

import threading

import pytest
import torch

from ftkit.engine import threads
from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.strategy import Strategy
from tests.worlds import PATIENCE

DEVICE = torch.device("cuda", 3)


@pytest.fixture
def devices(monkeypatch) -> list[tuple[str, torch.device]]:
    """Which thread made which device the current one."""
    found: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, device)))
    return found


def test_workers_of_tiers_begin_on_the_ranks_device(devices):
    worker = Tiers(DEVICE, Strategy.of()).worker("moves")
    before = worker.submit(lambda: list(devices)).result(30 * PATIENCE)
    worker.shutdown()
    assert [device for _, device in before] == [DEVICE]
    assert before[0][0].startswith("moves")


def test_a_thread_begins_on_its_device(devices):
    seen: list[list[tuple[str, torch.device]]] = []
    thread = threads.thread(lambda: seen.append(list(devices)), "saves", DEVICE)
    thread.start()
    thread.join(30 * PATIENCE)
    assert seen == [[("saves", DEVICE)]]


def test_on_a_cpu_no_device_is_asked_for(devices):
    worker = threads.worker("moves", torch.device("cpu"))
    worker.submit(int).result(30 * PATIENCE)
    worker.shutdown()
    assert devices == []
