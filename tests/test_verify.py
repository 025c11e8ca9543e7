"""`ftkit verify`: passes where nothing is wrong, and fails where the gradient's scale, a weight or a sample is."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from accelerate.state import AcceleratorState, GradientState

import ftkit.cli.trials
from ftkit.cli.trials import Trajectory, run_one, run_trials
from ftkit.cli.verify import PLANNED, STOCK, groups, trials_of, verdicts, verify
from ftkit.config.recipe import parse
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.launch.ranks import Stop
from ftkit.train.trainer import WholeSteps
from tests.jobs import recipe
from tests.worlds import PATIENCE, RankFailure

STEPS = 4


def wrong_scale():
    """Return a fault: the mean over ranks is the sum."""
    reduce = Communicator.reduce_scatter_mean

    def summed(self, out, full, *of):
        reduce(self, out, full, *of)
        out.mul_(self.world_size)

    return mock.patch.object(Communicator, "reduce_scatter_mean", summed)


def stale_weight():
    """Return a fault: one block is never updated."""
    flat_step = ShardedOptimizer._flat_step

    def without(self, gradient, noted, factor):
        return None if gradient.flat is self.units.trainable[1] else flat_step(self, gradient, noted, factor)

    return mock.patch.object(ShardedOptimizer, "_flat_step", without)


def swapped_sample():
    """Return a fault: the first sample of the second step comes in the first, and the other way round."""
    deal = WholeSteps.__iter__

    def swapped(self):
        numbers = list(deal(self))
        numbers[0], numbers[self.step_sequences] = numbers[self.step_sequences], numbers[0]
        return iter(numbers)

    return mock.patch.object(WholeSteps, "__iter__", swapped)


FAULTS = {"none": nullcontext, "scale": wrong_scale, "stale": stale_weight, "swapped": swapped_sample}


def tried(trials, fault):
    """Be one rank of some trials; a fault is planted where they are not stock."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()

    def faulty(*args):
        with FAULTS[fault]():
            return run_one(*args)

    with mock.patch.object(ftkit.cli.trials, "run_one", faulty):
        return run_trials(Stop(), trials)


def facts_of(home, out, **sections):
    return parse(recipe(home, out, show=None, eval={"path": str(home / "held.jsonl")}, **sections), "recipe.yaml")


def runner(worlds, fault="none"):
    """Return what starts ranks for `verify`: those of the tests."""

    def run(trials, ranks):
        if trials[0].killed_at is not None:
            with pytest.raises(RankFailure, match="exit code -9"):
                worlds[ranks].run(tried, trials, fault)
            return []
        return worlds[ranks].run(tried, trials, fault, seconds=180.0)[0]

    return run


@pytest.mark.slow
def test_a_sound_engine_passes(home, worlds, tmp_path):
    said = []
    found = verify(facts_of(home, "v"), 2, 3, tmp_path / "verify", runner(worlds), steps=STEPS, say=said.append)
    named = {each.name: each for each in found}
    assert set(named) >= {
        PLANNED,
        STOCK,
        "1 rank",
        "3 ranks",
        "shards on NVMe, deferred update",
        "killed, resumed on 1 rank",
    }
    assert [each for each in found if each.passed is not True] == []
    assert all(each.steps == STEPS for each in found)
    assert all(each.loss < 1e-5 for each in found if each.loss is not None)
    assert list((tmp_path / "verify").iterdir()) == [], "what the trials wrote is gone"
    assert said[0] == "2 ranks: killed"


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", ["scale", "stale", "swapped"])
def test_a_planted_fault_is_caught(fault, home, worlds, tmp_path):
    trials = [trial for trial in trials_of(facts_of(home, "v"), 2, 3, tmp_path, STEPS) if trial.name in (PLANNED, STOCK)]
    run = runner(worlds, fault)
    found = verdicts([each for group in groups(trials) for each in run(group, group[0].ranks)], "fp32", STEPS)
    [planned] = [each for each in found if each.name == PLANNED]
    assert planned.passed is False
    if fault == "scale":
        assert planned.grad_norm > 0.5, "Adam would hide it in the losses"
    elif fault == "stale":
        assert planned.loss > 1e-3
        assert planned.samples
    else:
        assert not planned.samples


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"rank": 4}},
        {"train": {"batch_tokens": 192, "dtype": "bf16"}},
        {"model": "new"},
        {"optimizer": {"name": "stable_adamw", "lr": 1e-3}},
    ],
)
def test_adapters_narrow_dtypes_and_new_models_are_compared_with_stock(sections, home, worlds, tmp_path):
    wanted = (PLANNED, STOCK, "1 rank")
    if "model" in sections:
        config = json.loads((home / "base" / "config.json").read_text())
        sections = {"model": {"name": None, "tokenizer": str(home / "base"), "config": config}}
    trials = [each for each in trials_of(facts_of(home, "v", **sections), 2, 3, tmp_path, STEPS) if each.name in wanted]
    run = runner(worlds)
    dtype = "bf16" if "train" in sections else "fp32"
    found = verdicts([each for group in groups(trials) for each in run(group, group[0].ranks)], dtype, STEPS)
    assert [each.name for each in found if each.passed is not True] == []
    assert len(found) == 3


def test_what_does_not_fit_is_left_out_and_said():
    def made(name, factor=1.0, **more):
        return Trajectory(name, [1.0, factor * 0.5], [2.0, 1.0], {1: ["a"], 2: ["b"]}, **more)

    found = verdicts([made(PLANNED), made("x", 1.001), Trajectory("y", problem="too large"), made(STOCK)], "fp32", 2)
    assert [each.passed for each in found] == [True, False, None, True]
    assert found[2].note == "not run: too large"
    assert found[1].loss == pytest.approx(1e-3)
    assert verdicts([made(PLANNED), made("x", float("nan"))], "fp32", 2)[1].passed is False
    assert verdicts([made(PLANNED), Trajectory("x", [1.0], [2.0], {1: ["a"]})], "fp32", 2)[1].passed is False
    with pytest.raises(UserError, match="does not fit this machine: too large"):
        verdicts([Trajectory(PLANNED, problem="too large")], "fp32", 2)


@pytest.mark.slow
def test_the_command_verifies_the_bundled_recipe(tmp_path):
    """In real processes, one of which really dies."""
    ftkit = str(Path(sys.executable).with_name("ftkit"))
    place = f"output.dir={tmp_path / 'run'}"
    done = subprocess.run(
        [ftkit, "verify", "tiny-cpu", "--json", "--set", place],
        capture_output=True,
        text=True,
        check=False,
        timeout=500 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 11
    assert {each["passed"] for each in found} == {True}
    assert [path.name for path in (tmp_path / "run" / "verify").iterdir() if path.is_dir()] == []
