"""A run that was planned is not planned again: the Trainer shards by the plan that it was given."""

from __future__ import annotations

import pytest

import ftkit
from ftkit.hf import sharding
from tests.hf import runs


def test_a_trainer_with_a_plan_plans_nothing(tmp_path, monkeypatch):
    trainer = runs.make_trainer("ours", str(tmp_path), runs.Run())
    planned = ftkit.shard(
        runs.llama(), {"stage": 3, "state": "host", "activations": "recompute", "reshard_after_forward": True}
    ).plan
    trainer.plan = planned

    def never(*args, **kwargs):
        raise AssertionError("planned again")

    monkeypatch.setattr(sharding, "Asked", never)
    monkeypatch.setattr(sharding, "common_limits", never)
    trainer.train()
    assert trainer.units.plan is planned
    assert trainer.units.strategy.state == "host"
    assert trainer.units.strategy.activations == "recompute"


def test_a_plan_with_blocks_together_makes_the_loader_hand_over_whole_steps(tmp_path, monkeypatch):
    run = runs.Run(arguments={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2})
    planned = ftkit.shard(runs.llama(), {"stage": 3, "accumulate_in": "unit"}, accumulation_steps=2).plan
    assert planned.strategy.parts == 2
    monkeypatch.setattr(ftkit.Trainer, "plan", planned)
    trainer = runs.make_trainer("ours", str(tmp_path), run)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (4, 1)


def test_blocks_divide_a_batch_into_the_micro_batches_of_a_step_where_they_accumulate():
    settings = {"stage": 3, "accumulate_in": "unit"}
    plan = ftkit.shard(runs.llama(), settings, accumulation_steps=3).plan
    assert ftkit.shard(runs.llama(), plan=plan).strategy.parts == plan.strategy.parts == 3
    for settings in ({"stage": 3, "accumulate_in": "step"}, {"stage": 3}):
        assert ftkit.shard(runs.llama(), settings, accumulation_steps=3).strategy.parts == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_settings_leave_open_is_the_plans(stage):
    plan = ftkit.shard(runs.llama(), {"stage": stage, "activations": "keep"}).plan
    units = ftkit.shard(runs.llama(), "auto", plan=plan)
    assert (units.strategy.stage, units.strategy.activations) == (stage, "keep")
    assert not units.evaluated_only
