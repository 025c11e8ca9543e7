"""Every name that the installed transformers knows for `optim=` trains as its reference, or is refused with what to use.

The reference is the stock Trainer with the optimizer object that the name means, in one process, for twenty steps. None of
the libraries behind the names is installed or needed. 8-bit names train nearly as their rule in fp32. On several ranks with
given gradients the rules are compared in `tests/engine/test_update_rules.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.training_args import OptimizerNames

import ftkit
from ftkit.engine.optim import plain
from ftkit.errors import UserError
from ftkit.hf.trainer.optimizers import optimizer_by_name, sharded_optimizer
from ftkit.spec.update_rules import NAMES, REFUSED, RULES
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, train

BETAS = (0.8, 0.97)
RUN = Run(
    model=lambda: runs.llama(num_hidden_layers=1),
    rows=120,
    arguments={
        "max_steps": 20, "learning_rate": 2e-3, "weight_decay": 0.0, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1],
    },
)  # fmt: skip
TRAINED: dict[str, tuple[str, type, dict[str, Any]]] = {
    "adamw": ("", torch.optim.AdamW, {"betas": BETAS}),
    "sgd": ("momentum=0.9,nesterov=true", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "lion": ("", plain.Lion, {"betas": BETAS}),
    "adagrad": ("lr_decay=0.01, eps=1e-9", torch.optim.Adagrad, {"lr_decay": 0.01, "eps": 1e-9}),
    "rmsprop": ("alpha=0.95,momentum=0.5,centered=True,eps=1e-6", torch.optim.RMSprop,
                {"alpha": 0.95, "momentum": 0.5, "centered": True, "eps": 1e-6}),
    "ademamix": ("beta3=0.999,alpha=4,t_alpha=10,t_beta3=10", plain.AdEMAMix,
                 {"betas": BETAS, "beta3": 0.999, "alpha": 4.0, "t_alpha": 10, "t_beta3": 10}),
    "stable_adamw": ("", plain.StableAdamW, {"betas": BETAS, "eps": 1e-8}),
}  # fmt: skip
"""By rule: `optim_args`, and the optimizer that they mean."""
INSTALLED = [each.value for each in OptimizerNames]


class Made:
    """Makes the reference optimizer of a rule."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    def __call__(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        _, kind, settings = TRAINED[self.rule]
        return kind(model.parameters(), **{"lr": 2e-3, "weight_decay": 0.0, **settings}), None


def compare(folder: str, name: str) -> None:
    """Train with a name on the engine, and with its reference in the stock Trainer."""
    rule = NAMES[name].removesuffix("_8bit")
    stock = train("stock", f"{folder}/stock", replace(RUN, options={"optimizers": Made(rule)}))
    ours = replace(RUN, arguments={**RUN.arguments, "optim": name, "optim_args": TRAINED[rule][0] or None})
    outcome = train("ours", f"{folder}/ours", ours)
    coded = RULES[NAMES[name]].coded
    assert_same_history(outcome, stock, relative=2e-2 if coded else 1e-6)
    assert_same_weights(outcome.weights, stock.weights, limit=0.015 if coded else 1e-6)  # they move by 0.05


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in REFUSED])
def test_a_name_trains_as_its_reference(name: str, world1: Any, tmp_path: Path) -> None:
    world1.run(compare, str(tmp_path), name)


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in NAMES])
def test_every_other_name_is_refused_with_what_to_use(name: str, tmp_path: Path) -> None:
    arguments = ftkit.TrainingArguments(str(tmp_path), optim=name, use_cpu=True)
    with pytest.raises(UserError, match=rf"optim='{name}': optimizer {name}: .*; use ({'|'.join(RULES)})\b") as found:
        ftkit.Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert "not known" not in str(found.value)


def test_a_refused_name_ends_the_run_before_the_model_is_sharded(world1: Any, tmp_path: Path) -> None:
    world1.run(refused, str(tmp_path))


def refused(folder: str) -> None:
    """Ask for 8 bits of a rule that has none."""
    trainer = runs.make_trainer("ours", folder, replace(RUN, arguments={**RUN.arguments, "optim": "ademamix_8bit"}))
    with pytest.raises(UserError, match="its 8-bit state is not supported; use adamw_8bit, or ademamix"):
        trainer.train()
    assert trainer.units is None


def test_without_the_engine_a_name_is_the_trainers_own(tmp_path: Path) -> None:
    arguments = ftkit.TrainingArguments(str(tmp_path), optim="adafactor", use_cpu=True, ftkit=None)
    assert ftkit.Trainer.get_optimizer_cls_and_kwargs(arguments)[0] is transformers.Adafactor


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("sgd", "momentun=0.9", "found 'momentun'; sgd takes momentum, nesterov there"),
        ("adamw_torch", "amsgrad=true", "found 'amsgrad'; adamw takes eps there"),
        ("rmsprop", "alpha=high", "alpha is 'high', needs a number"),
        ("sgd", "0.9", "found '0.9', needs key=value"),
    ],
)
def test_settings_that_a_rule_has_not_are_refused(name: str, given: str, words: str, tmp_path: Path) -> None:
    arguments = ftkit.TrainingArguments(str(tmp_path), optim=name, optim_args=given, use_cpu=True)
    with pytest.raises(UserError, match=f"optim_args: {words}"):
        optimizer_by_name(arguments)


def test_betas_may_be_given_as_settings(tmp_path: Path) -> None:
    arguments = ftkit.TrainingArguments(str(tmp_path), optim="lion_32bit", optim_args="beta2=0.95", use_cpu=True)
    assert optimizer_by_name(arguments) == (plain.Lion, {"lr": 5e-5, "betas": (0.9, 0.95)})


def prepared() -> None:
    """Prepare torch's Adagrad, which has a state before its first step; refuse it after a step."""
    model = runs.llama(num_hidden_layers=1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    stepped = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    model.zero_grad()
    model, ours = ftkit.Accelerator(cpu=True).prepare(model, optimizer)
    assert type(ours.optimizer) is ftkit.ShardedAdagrad
    with pytest.raises(UserError, match="this Adagrad has stepped already"):
        sharded_optimizer(stepped, ours.optimizer.units)


def test_accelerate_prepares_adagrad_of_torch(world1: Any) -> None:
    world1.run(prepared)


@pytest.mark.parametrize("kind", [ftkit.AdamW8bit, ftkit.Lion8bit])
def test_eight_bits_need_the_engine(kind: Any, world1: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = kind([parameter], lr=1e-2)
    with pytest.raises(RuntimeError, match=f"{kind.__name__}: 8-bit moments exist in sharded models only"):
        optimizer.step()
    assert parameter.tolist() == [1.0] * 3
    world1.run(prepared_8bit, kind)


def prepared_8bit(kind: Any) -> None:
    """Prepare it with a model: the sharded form has its settings, and steps."""
    model = runs.llama(num_hidden_layers=1)
    optimizer = kind(model.parameters(), lr=3e-4, betas=BETAS)
    model, ours = ftkit.Accelerator(cpu=True).prepare(model, optimizer)
    assert type(ours.optimizer) is kind.sharded
    assert ours.optimizer.rule == kind.sharded.kind
    assert ours.optimizer.param_groups[0]["betas"] == BETAS
    ids = torch.randint(0, 64, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    ours.step()
