"""`.grad` of a model's parameters: None where there is no gradient, an error where the engine has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import ftkit
from tests.hf import runs
from tests.hf.runs import fresh_state, token_rows
from tests.hf.test_models_without_blocks import Mlp, batches


def trained(settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return a model with gradients of one backward, and its optimizer."""
    model = Mlp()
    units = ftkit.shard(model, settings, device=torch.device("cpu"))
    optimizer = ftkit.ShardedAdamW(units, lr=0.1)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(*batches()[0])["loss"].backward()
    return model, optimizer


USES = {
    "torch's clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "torch's clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a sum of norms": lambda model: sum(p.grad.norm() for p in model.parameters() if p.grad is not None),
    "a submodule's zero_grad": lambda model: model.out.zero_grad(),
    "an edit": lambda model: setattr(model.out.weight, "grad", torch.zeros(1, 6)),
}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("use", USES)
def test_a_gradient_that_the_engine_has_is_never_a_silent_none(use, stage):
    model, optimizer = trained({"stage": stage})
    with pytest.raises(ftkit.UserError, match=r"(up|out)\..*: its gradient is with ftkit's engine|cannot be set"):
        USES[use](model)
    assert model.up.bias.grad is None  # frozen: None is true
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad = None
    model.to("cpu")


def reads(stage: int) -> list[str]:
    model, _ = trained({"stage": stage})
    said = []
    for parameter in (model.up.weight, model.out.bias):
        try:
            said.append(repr(parameter.grad))
        except ftkit.UserError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("stage", [1, 2])
def test_the_same_on_two_ranks(worlds, stage):
    assert all("with ftkit's engine" in said for each in worlds[2].run(reads, stage) for said in each)


def test_the_advice_gives_the_norm(tmp_path):
    fresh_state()
    arguments = ftkit.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", max_steps=2, logging_steps=1, disable_tqdm=True, save_strategy="no"
    )
    trainer = ftkit.Trainer(runs.llama(), arguments, train_dataset=token_rows(16))
    seen: list[float] = []
    trainer.add_callback(reader(trainer, seen))
    trainer.train()
    logged = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert seen == pytest.approx(logged)


def reader(trainer: Any, seen: list[float]) -> Any:
    class Reader(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(trainer.sharded_optimizer.grad_norm())

    return Reader()


def test_a_copy_of_a_parameter_is_a_parameter():
    model, _ = trained({"stage": 1})
    copied = copy.deepcopy(model.out.weight.detach())
    assert torch.equal(copied, model.out.weight)
    assert isinstance(model.out.weight, nn.Parameter)
    assert "Parameter containing" in repr(model.out.weight)
