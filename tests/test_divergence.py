"""Steps whose loss is not finite or jumps: how they are detected and counted, and what is done about them.

Tests spoil the loss at chosen steps. With `skip`, the losses equal those of a run that never had the skipped samples.
"""

from __future__ import annotations

import json
import math
import random
from contextlib import ExitStack
from unittest import mock

import pytest

from ftkit.errors import Diverged, refusal
from ftkit.hf.trainer.trainer import TrainerMixin
from ftkit.train.divergence import LEAST, WINDOW, LossWindow
from ftkit.train.trainer import WholeSteps
from tests.jobs import job, losses, recipe
from tests.worlds import RankFailure

CONSTANT = {"lr": 0.01, "schedule": "constant"}
EARLY = 6


def spoiled_job(text, factors, settings=(), checkpoint=None, left_out=None):
    """Run one rank whose loss is multiplied by `factors[step]`, or whose data lack the samples of step `left_out`."""
    compute, deal = TrainerMixin.compute_loss, WholeSteps.__iter__

    def spoiled(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        found = compute(self, model, inputs, return_outputs, num_items_in_batch)
        factor = factors.get(self.state.global_step + 1) if model.training else None
        return found if factor is None else found * factor

    def without(self):
        size = self.step_sequences
        return (sample for at, sample in enumerate(deal(self)) if at // size + 1 != left_out)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TrainerMixin, "compute_loss", spoiled))
        if left_out:
            stack.enter_context(mock.patch.object(WholeSteps, "__iter__", without))
        return job(text, settings, checkpoint)


def events(folder):
    return [json.loads(line) for line in (folder / "divergences.jsonl").read_text().splitlines()]


def text_of(home, out, policy, **sections):
    (home / out).mkdir()
    train = {"batch_tokens": 192, "max_steps": 8, "on_divergence": policy}
    data = {"path": str(home / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(home / "cache")}
    return recipe(home, out, **{"train": train, "optimizer": CONSTANT, "eval": None, "data": data, **sections})


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_skipped_step_leaves_no_trace(ranks, home, worlds):
    out, left_out = f"skip-{ranks}", 6
    deferred = {"stage": 3, "update": "deferred"} if ranks == 2 else {"stage": 3}
    text = text_of(home, out, "skip", engine=deferred)
    summary = worlds[ranks].run(spoiled_job, text, {left_out: math.nan})[0]
    (home / f"{out}-never").mkdir()
    other = text.replace(f"/{out}", f"/{out}-never")
    worlds[ranks].run(spoiled_job, other, {}, ("train.max_steps=7",), None, left_out)
    found = {line[0]: line[1] for line in losses(home / out)}
    expected = [line[1] for line in losses(home / f"{out}-never")]
    assert [found[step] for step in found if step != left_out] == pytest.approx(expected, rel=1e-6)
    assert len(found) == 8
    (event,) = events(home / out)
    assert event["step"] == left_out
    assert summary["divergences"] == 1
    assert len(event["places"]) == 6
    assert all(place.startswith(f"{home / 'rows.jsonl'}:") for place in event["places"])


def test_the_run_ends_without_the_step(home, worlds):
    text = text_of(home, "stop", "stop")
    with pytest.raises(RankFailure, match=r"Diverged: step 6: the loss is nan(.|\n)*auto continues from checkpoint-4"):
        worlds[2].run(spoiled_job, text, {6: math.nan})
    assert [path.name for path in (home / "stop").glob("checkpoint-*")] == ["checkpoint-4"]
    assert not (home / "stop" / "model").exists()
    assert "step 6: the loss is nan" in json.loads((home / "stop" / "summary.json").read_text())["problem"]
    assert isinstance(refusal("text", Diverged.exit_code), Diverged)


def test_by_default_a_divergence_is_reported_and_counted(home, worlds):
    text = text_of(home, "continue", "continue")
    with pytest.raises(RankFailure, match=r"Diverged: training failed: the loss of the last step is nan"):
        worlds[2].run(spoiled_job, text, {6: math.inf})
    summary = json.loads((home / "continue" / "summary.json").read_text())
    assert summary["problem"].startswith("training failed")
    assert summary["train_loss"] > 0, "the mean of the finite ones"
    assert not (home / "continue" / "model").exists()
    assert [path.name for path in (home / "continue").glob("checkpoint-*")] == ["checkpoint-4"]
    lines = [json.loads(line) for line in (home / "continue" / "metrics.jsonl").read_text().splitlines()]
    assert lines[5]["loss"] is None, "it is not hidden behind the mean of the others"
    assert [line["divergences"] for line in lines][4:6] == [0, 1]
    assert summary["divergences"] >= 1
    assert events(home / "continue")[0]["reason"] == "the loss is inf"


def test_a_last_update_that_kills_the_weights_is_said_in_the_summary(home, worlds):
    """Every loss is finite; nothing is written but the reason."""
    train = {"batch_tokens": 192, "max_steps": 1}
    text = text_of(home, "killed", "continue", train=train, optimizer={"lr": 1e39, "schedule": "constant"})
    with pytest.raises(RankFailure, match=r"training failed: .* holds .*: such a model is not written") as failed:
        worlds[2].run(job, text)
    assert "Diverged" in str(failed.value)
    assert not (home / "killed" / "divergences.jsonl").exists()
    summary = json.loads((home / "killed" / "summary.json").read_text())
    assert "is not written" in summary["problem"]
    assert summary["model_written"] is False
    assert not (home / "killed" / "model").exists()


@pytest.mark.slow
def test_a_held_out_loss_that_is_nan_at_the_end_is_a_failure(home, worlds):
    train, held = {"batch_tokens": 192, "max_steps": 1}, {"path": str(home / "held.jsonl")}
    text = text_of(home, "held", "continue", train=train, eval=held, optimizer={"lr": 1e30, "schedule": "constant"})
    with pytest.raises(RankFailure, match=r"Diverged: training failed: the loss of the held-out rows at the end is"):
        worlds[2].run(job, text)


def early_job(*arguments):
    """Run one rank in which a loss can be a jump after `EARLY` steps."""
    with mock.patch("ftkit.train.divergence.LEAST", EARLY):
        return spoiled_job(*arguments)


def test_a_resumed_run_judges_as_the_first(home, worlds):
    train = {"batch_tokens": 192, "max_steps": EARLY + 6, "on_divergence": "skip"}
    text = text_of(home, "spike", "skip", train=train, output={"dir": str(home / "spike"), "save_every_steps": EARLY + 2})
    at = EARLY + 4
    worlds[2].run(early_job, text, {at: 40.0})
    first, before = events(home / "spike"), losses(home / "spike")
    assert [(line["step"], line["action"]) for line in first] == [(at, "skip")]
    assert "standard deviations above" in first[0]["reason"]
    worlds[2].run(early_job, text, {at: 40.0}, (), str(home / "spike" / f"checkpoint-{EARLY + 2}"))
    assert events(home / "spike") == [*first, *first]
    assert losses(home / "spike") == before


def test_when_a_loss_is_a_jump():
    random.seed(0)
    window = LossWindow()
    assert not any(window.judge(5 - step / 100 + random.gauss(0, 0.1), 1.0) for step in range(WINDOW * 2))
    assert len(window.losses) == WINDOW
    assert window.judge(math.nan, 1.0) == "the loss is nan"
    assert "standard deviations" in window.judge(9.0, 1.0)
    assert window.judge(3.0, math.nan) == "the gradient norm is nan"
    assert window.judge(3.0, math.inf, scaled=True) is None, "an overflow of fp16 is for the loss scale"
    young = LossWindow([1.0] * (LEAST - 1))
    assert young.judge(100.0, 1.0) is None
    flat = LossWindow([1.0] * LEAST)
    assert flat.judge(1.05, 1.0) is None, "hardly any deviation is no measure"
    assert flat.judge(1.2, 1.0) is not None
