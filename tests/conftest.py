"""Shared set-up of all tests: no network, one thread, seeded generators, and worlds of ranks for the whole session."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Hypothesis stores Unicode tables even without a database of examples. Keep them out of the working directory.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), f"hypothesis-{os.getuid()}"))

import hypothesis
import pytest
import torch

from tests.worlds import PATIENCE, World, Worlds, seed_all

WORLD_FIXTURES = {"worlds", "world1", "world2", "world3"}
SLOW_SECONDS = 600.0
"""Limit of a test that is marked slow, before `PATIENCE`. `timeout` in pyproject.toml limits the others."""

hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("same every time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests before `-m` selects them.

    All but n evenly spread cases of a test marked `quick(n)` become slow. Tests that use a world of ranks are marked
    `ranks`. Each test gets its time limit.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") is not None and item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("quick")
        assert mark is not None
        (number,) = mark.args
        quick = {turn * len(cases) // number for turn in range(number)}
        for turn, case in enumerate(cases):
            if turn not in quick:
                case.add_marker(pytest.mark.slow)
    for item in items:
        if WORLD_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)
        if item.get_closest_marker("timeout") is None:
            slow = item.get_closest_marker("slow") is not None
            item.add_marker(pytest.mark.timeout((SLOW_SECONDS if slow else float(item.config.getini("timeout"))) * PATIENCE))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which every Trainer and every sharding runs."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before fixtures, so that random numbers do not depend on the tests that the worker ran before."""
    seed_all()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed again before the test, so that random numbers do not depend on the fixtures that were made for it."""
    seed_all()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds by size: `worlds[2]` has two ranks. Started at first use, ended with the session."""
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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folder with a base model, rows and held-out rows."""
    from tests.tiny import make_base, write_rows  # here: the engine's tests need no tokenizers

    folder = tmp_path_factory.mktemp("finetune")
    make_base(folder / "base")
    write_rows(folder / "rows.jsonl", 50)
    write_rows(folder / "held.jsonl", 7, first=60)
    return folder


@pytest.fixture(scope="module")
def whole(home, worlds):
    """Complete run on two ranks: its folder and the result of rank 0."""
    from tests.jobs import job, recipe  # here: the engine's tests need no recipes

    (home / "whole").mkdir()
    show = {"prompts": ["3+1?"], "max_new_tokens": 4}
    return home / "whole", worlds[2].run(job, recipe(home, "whole", show=show))[0]
