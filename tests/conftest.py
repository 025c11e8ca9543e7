"""What all tests share: no network, one thread, and worlds of ranks that live as long as the session."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Hypothesis keeps tables of Unicode even without a database of examples: not in the folder that it was started in
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(tempfile.gettempdir(), f"hypothesis-{os.getuid()}"))

import hypothesis
import pytest
import torch

from tests.worlds import World, Worlds

hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("same every time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but n cases of a test that is marked `quick(n)`, evenly spread, before `-m` chooses."""
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


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight: each Trainer and each sharding collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random numbers do not depend on which tests its worker ran before (`worksteal` deals anew each time)."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Nor on which fixtures of several tests were made for this one."""
    torch.manual_seed(0)


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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a base model, rows and held-out rows."""
    from tests.tiny import make_base, write_rows  # here: the engine's tests need no tokenizers

    folder = tmp_path_factory.mktemp("finetune")
    make_base(folder / "base")
    write_rows(folder / "rows.jsonl", 50)
    write_rows(folder / "held.jsonl", 7, first=60)
    return folder


@pytest.fixture(scope="module")
def whole(home, worlds):
    """A run from beginning to end on two ranks: its folder and what rank 0 returned."""
    from tests.jobs import job, recipe  # here: the engine's tests need no recipes

    (home / "whole").mkdir()
    show = {"prompts": ["3+1?"], "max_new_tokens": 4}
    return home / "whole", worlds[2].run(job, recipe(home, "whole", show=show))[0]
