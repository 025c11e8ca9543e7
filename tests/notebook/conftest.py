"""Two ranks behind this process, as a notebook has them. Started once a file: other files look for processes left over."""

import signal

import pytest

from ftkit.notebook import Ranks


@pytest.fixture(autouse=True)
def interruptible():
    """A job in the background of a script starts with interrupts ignored; a kernel never does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def two():
    """Two ranks; a test that ends them starts them again by using `ranks`."""
    made = Ranks(2)
    yield made
    made.shutdown()


@pytest.fixture
def ranks(two):
    return two.start()


@pytest.fixture
def work(home, tmp_path, monkeypatch):
    """A folder to work in, with a recipe of ten steps as a dictionary."""
    monkeypatch.chdir(tmp_path)
    return {
        "model": {"name": str(home / "base")},
        "data": {"path": str(home / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(home / "cache")},
        "eval": {"path": str(home / "held.jsonl")},
        "train": {"batch_tokens": 192, "max_steps": 10},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "output": {"dir": "run", "save_every_steps": 4, "keep": 2},
        "engine": {"stage": 3},
    }
