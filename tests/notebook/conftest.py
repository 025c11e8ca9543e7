"""A recipe for the tests of notebooks."""

import pytest


@pytest.fixture
def recipe(home, tmp_path, monkeypatch):
    """A recipe of ten steps as a dictionary. The test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return recipe_of(home)


def recipe_of(home):
    """Return a recipe of ten steps as a dictionary."""
    return {
        "model": {"name": str(home / "base")},
        "data": {"path": str(home / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(home / "cache")},
        "eval": {"path": str(home / "held.jsonl")},
        "train": {"batch_tokens": 192, "max_steps": 10},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "output": {"dir": "run", "save_every_steps": 4, "keep": 2},
        "engine": {"stage": 3},
    }
