"""`FTKIT_STRICT=1`: a small model is sharded as a large one, so that a script meets what a large model would do to it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, train
from tests.hf.test_models_without_blocks import Mlp


def choices(value: str, settings: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.dict(os.environ, {"FTKIT_STRICT": value}):
        units = ftkit.shard(runs.llama(), settings, device=torch.device("cpu"))
    strategy = units.strategy
    return {
        "stage": strategy.stage,
        "activations": strategy.activations,
        "reshard_after_forward": strategy.reshard_after_forward,
        "debug": strategy.debug,
        "resident": any(flat.resident for unit in units.units for flat in unit.weights.flats),
    }


LARGE = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "debug": True, "resident": False}


@pytest.mark.parametrize("world", [1, 2])
def test_a_small_model_is_sharded_as_a_large_one(worlds, world):
    assert worlds[world].run(choices, "1", {})[0] == LARGE
    assert worlds[world].run(choices, "1", {"activations": "keep"})[0] == {**LARGE, "activations": "keep"}
    chosen = worlds[world].run(choices, "1", {"stage": 1})[0]
    assert (chosen["stage"], chosen["resident"]) == (1, True)
    for value in ("", "0"):
        assert worlds[world].run(choices, value, {})[0]["stage"] < 3


def strictly(kind: str, folder: str, run: Run) -> Any:
    with mock.patch.dict(os.environ, {"FTKIT_STRICT": "1"}):
        return train(kind, folder, run)


@pytest.mark.parametrize("world", [1, 2])
def test_the_trajectory_stays(worlds, world, tmp_path):
    run = Run(arguments={"max_steps": 3})
    theirs = worlds[1].run(train, "stock", str(tmp_path / "stock"), run)[0]
    ours = worlds[world].run(strictly, "ours", str(tmp_path / "ours"), run)[0]
    assert_same_history(ours, theirs)


def attentions(value: str) -> str:
    """Do what a large model refuses: a loss on tensors that come from inside blocks."""
    with mock.patch.dict(os.environ, {"FTKIT_STRICT": value}):
        model = runs.llama(attn_implementation="eager")
        ftkit.shard(model, device=torch.device("cpu"))
    try:
        model(input_ids=torch.ones(2, 5, dtype=torch.long), output_attentions=True)
    except ftkit.UserError as error:
        return str(error)
    return "went on"


def test_what_a_large_model_refuses_is_refused_on_a_small_one(worlds):
    assert worlds[1].run(attentions, "0") == ["went on"]
    assert "carry no gradient" in worlds[1].run(attentions, "1")[0]


def test_a_model_without_blocks_stays_replicated(monkeypatch):
    monkeypatch.setenv("FTKIT_STRICT", "1")
    assert ftkit.shard(Mlp(), device=torch.device("cpu")).strategy.stage == 1


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("FTKIT_STRICT", "yes")
    with pytest.raises(ftkit.UserError, match="1 or 0 is needed"):
        ftkit.shard(runs.llama(), device=torch.device("cpu"))
