"""What all tests share: no network, one thread, and worlds of ranks that live as long as the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.worlds import World, Worlds


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds[2]` is a world of two ranks; started at first use, ended with the session."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def world1(worlds: Worlds) -> World:
    return worlds[1]


@pytest.fixture(scope="session")
def world2(worlds: Worlds) -> World:
    return worlds[2]


@pytest.fixture(scope="session")
def world3(worlds: Worlds) -> World:
    return worlds[3]
