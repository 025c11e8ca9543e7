"""A second model is planned beside the first, and one that is evaluated only without gradients and optimizer state."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import ftkit
from ftkit.errors import UserError
from ftkit.hf.memory.beside import limits_beside
from tests.hf import runs
from tests.hf.runs import fresh_state, token_rows
from tests.plan.made import make_plan

GRANTED = 6.0
"""GiB of host memory; more than any of these models takes."""


def purposes(units: Any) -> set[str]:
    return set(units.plan.memory.purposes("host"))


def own_bytes(units: Any) -> int:
    """Return what a plan takes of the host beside what any process takes."""
    memory = units.plan.memory
    peak = memory.peak_phase("host")
    return memory.at("host", peak) - memory.purposes("host", peak)["runtime"]


def test_a_model_that_is_evaluated_only_has_no_gradients_and_no_state_in_its_plan():
    units = ftkit.shard(runs.llama(), device=torch.device("cpu"), evaluation=True)
    assert not purposes(units) & {"gradients", "master", "moments"}
    assert {"gradients", "moments"} <= purposes(ftkit.shard(runs.llama(), device=torch.device("cpu")))
    with pytest.raises(UserError, match="sharded for evaluation only"):
        ftkit.ShardedAdamW(units, lr=0.1)


def test_a_second_model_is_not_granted_what_the_first_was_planned_with():
    fresh_state()
    accelerator = ftkit.Accelerator(cpu=True, ftkit={"host_gib": GRANTED})
    first = ftkit.units_of(accelerator.prepare_model(runs.llama()))
    second = ftkit.units_of(accelerator.prepare_model(runs.t5(), evaluation_mode=True))
    third = ftkit.units_of(accelerator.prepare_model(runs.llama()))
    assert second.plan.limits.host_bytes == first.plan.limits.host_bytes - own_bytes(first)
    assert third.plan.limits.host_bytes == second.plan.limits.host_bytes - own_bytes(second)
    assert "beside LlamaForCausalLM" in second.plan.limits.name("host")


def test_what_does_not_fit_beside_another_is_refused_with_its_name():
    alone = ftkit.shard(runs.llama(), device=torch.device("cpu"))
    fresh_state()
    limits = replace(alone.plan.limits, host_bytes=int(1.01 * alone.plan.memory.peak("host")))
    assert limits_beside(limits, []) == limits
    left = limits_beside(limits, [alone] * 50)
    assert left.host_bytes == 1
    with pytest.raises(UserError, match="beside LlamaForCausalLM"):
        make_plan(alone.plan.shape, left)


def test_a_model_that_is_gone_leaves_its_memory():
    fresh_state()
    accelerator = ftkit.Accelerator(cpu=True, ftkit={"host_gib": GRANTED})
    model = accelerator.prepare_model(runs.llama())
    granted = ftkit.units_of(model).plan.limits.host_bytes
    accelerator.free_memory(model)
    del model
    gc.collect()
    assert ftkit.units_of(accelerator.prepare_model(runs.llama())).plan.limits.host_bytes == granted


def arguments(folder: Any, **fields: Any) -> Any:
    return ftkit.TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1, per_device_train_batch_size=4, **fields
    )


def test_a_trainer_without_training_rows_plans_an_evaluation_and_another_may_train_the_model(tmp_path):
    fresh_state()
    model = runs.llama()
    first = ftkit.Trainer(model, arguments(tmp_path), eval_dataset=token_rows(4))
    first.evaluate()
    assert first.units.evaluated_only
    first.save_model(f"{tmp_path}/model")
    second = ftkit.Trainer(model, arguments(tmp_path), train_dataset=token_rows(8))
    second.train()
    assert not second.units.evaluated_only


def test_evaluation_before_training_is_planned_for_training(tmp_path):
    fresh_state()
    trainer = ftkit.Trainer(runs.llama(), arguments(tmp_path), train_dataset=token_rows(8), eval_dataset=token_rows(4))
    trainer.evaluate()
    assert not trainer.units.evaluated_only
    trainer.train()


def test_an_optimizer_after_evaluation_mode_may_train():
    fresh_state()
    accelerator = ftkit.Accelerator(cpu=True)
    model = accelerator.prepare_model(runs.llama(), evaluation_mode=True)
    units = ftkit.units_of(model)
    assert units.evaluated_only
    accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    assert not units.evaluated_only
