"""Schedules of transformers, torch and users give the stock Trainer's learning rates, and go on from a checkpoint.

The reference is the stock Trainer in one process. A run of six steps is saved after three; a second one goes on from there
and must log what the first one logged. Schedules read the defaults of their optimizer, so those are compared too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.optim import lr_scheduler as torch_schedules
from torch.utils.data import IterableDataset

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, train

STEPS = 6


def small() -> torch.nn.Module:
    """Return a Llama of one block."""
    return runs.llama(num_hidden_layers=1)


BASE = Run(
    model=small,
    rows=36,
    arguments={
        "max_steps": STEPS,
        "learning_rate": 4e-3,
        "adam_beta1": 0.8,
        "weight_decay": 0.05,
        "warmup_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
    },
)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return what a user would make."""
    return torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.05)


def sequential(optimizer: Any) -> Any:
    """Return a warm-up, then an exponential decay."""
    parts = [torch_schedules.LinearLR(optimizer, 0.1, total_iters=2), torch_schedules.ExponentialLR(optimizer, 0.7)]
    return torch_schedules.SequentialLR(optimizer, parts, milestones=[2])


def one_cycle(optimizer: Any) -> Any:
    """Return a cycle of learning rate and beta1."""
    return torch_schedules.OneCycleLR(optimizer, max_lr=4e-3, total_steps=STEPS + 2)


def plateau(optimizer: Any) -> Any:
    """Return torch's own schedule of plateaus."""
    return torch_schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)


OF_TORCH = (sequential, one_cycle, plateau)


class Pair:
    """Makes an optimizer and its schedule of a model, as the `optimizers` of a Trainer."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def __call__(self, model: torch.nn.Module) -> tuple[Any, Any]:
        optimizer = optimizer_of(model)
        return optimizer, self.schedule(optimizer)


def defaults_of(trainer: Any) -> dict[str, Any]:
    """Return the defaults of a trainer's optimizer."""
    return dict(trainer.optimizer.defaults)


def goes_on(world: Any, folder: Path, run: Run) -> None:
    """Compare a run with stock's, and its continuation with itself."""
    run = replace(run, after=defaults_of)
    stock = world.run(train, "stock", str(folder / "stock"), run)[0]
    ours = world.run(train, "ours", str(folder / "ours"), run)[0]
    assert_same_history(ours, stock)
    assert len(set(ours.column("learning_rate"))) > 1
    assert ours.after == stock.after
    resumed = world.run(train, "ours", str(folder / "ours"), replace(run, resume=str(folder / "ours" / "checkpoint-3")))[0]
    assert_same_history(resumed, ours, relative=0.0, absolute=0.0, leave_out=["train_loss"])


def named(name: str, keywords: dict[str, Any]) -> Run:
    """Return a run with a schedule of transformers."""
    arguments = {**BASE.arguments, "lr_scheduler_type": name, "lr_scheduler_kwargs": keywords}
    if name in ("reduce_lr_on_plateau", "greedy"):
        return replace(BASE, eval_rows=6, arguments={**arguments, "eval_strategy": "steps", "eval_steps": 1})
    return replace(BASE, arguments=arguments)


EVERY: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 0.4},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0, "lr_end": 1e-4},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 3},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5, "threshold": 0.1, "threshold_mode": "abs"},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2, "warmup_type": "cosine"},
    "greedy": {"patience": 0, "factor": 0.5, "threshold": 0.1, "min_lr": 1e-4},
}
"""Every schedule of transformers, with arguments. The thresholds are such that some losses are better and some are not."""


def rates_of_all(folder: str) -> dict[str, list[list[float]]]:
    """Return the rates of each schedule: of stock's Trainer, of ours, and of ours after a resume."""
    found = {}
    for name, keywords in EVERY.items():
        run, path = named(name, keywords), f"{folder}/{name}"
        again = replace(run, resume=f"{path}/ours/checkpoint-3")
        outcomes = [train(kind, f"{path}/{kind}", each) for kind, each in (("stock", run), ("ours", run), ("ours", again))]
        found[name] = [outcome.column("learning_rate") for outcome in outcomes]
    return found


def test_every_schedule_of_transformers_has_stocks_rates_and_goes_on(world1, tmp_path):
    assert set(EVERY) == {kind.value for kind in transformers.SchedulerType}
    for name, (stock, ours, resumed) in world1.run(rates_of_all, str(tmp_path))[0].items():
        assert ours == stock == resumed, name
        assert len(stock) == STEPS
        assert (len(set(stock)) > 1) == (name != "constant"), name


def made(schedule: Any) -> Run:
    """Return a run with a schedule of torch."""
    run = replace(BASE, options={"optimizers": Pair(schedule)})
    if schedule is plateau:
        run = replace(
            run,
            eval_rows=6,
            arguments={**BASE.arguments, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
        )
    return run


@pytest.mark.parametrize(
    ("name", "keywords"),
    [("cosine_with_min_lr", {"min_lr": 1e-4}), ("greedy", {"patience": 0, "min_lr": 1e-4})],
)
def test_a_schedule_of_transformers_is_stocks_and_goes_on(name, keywords, world1, tmp_path):
    goes_on(world1, tmp_path, named(name, keywords))


@pytest.mark.parametrize("schedule", OF_TORCH)
def test_a_schedule_of_torch_is_stocks_and_goes_on(schedule, world1, tmp_path):
    goes_on(world1, tmp_path, made(schedule))


class Sets(transformers.TrainerCallback):
    """Somebody's callback that lowers the learning rate of the next step."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Halve it."""
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def test_a_learning_rate_that_a_callback_sets_goes_on(world1, tmp_path):
    goes_on(world1, tmp_path, replace(named("cosine", {}), options={"callbacks": [Sets()]}))


class Kept(torch_schedules.LRScheduler):
    """A user's schedule that keeps a factor in each group of its optimizer."""

    def get_lr(self) -> list[Any]:
        """Return rates that fall, as numbers of NumPy."""
        for group in self.optimizer.param_groups:
            group["factor"] = group.get("factor", np.float32(1)) * np.float32(0.9)
        return [float(group["initial_lr"] * group["factor"]) for group in self.optimizer.param_groups]


def test_what_a_user_keeps_in_a_group_goes_on(world1, tmp_path):
    goes_on(world1, tmp_path, made(Kept))


class Rule:
    """A user's rule, whose state grows."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int) -> float:
        self.steps.append(step)
        return float(0.9**step)


def of_a_rule(optimizer: Any) -> Any:
    """Return a schedule of torch with it."""
    return torch_schedules.LambdaLR(optimizer, Rule())


def test_a_schedule_of_ones_own_whose_state_grows_goes_on(world1, tmp_path):
    goes_on(world1, tmp_path, made(of_a_rule))


def to_a_constant(folder: str) -> list[float]:
    """Go on with another schedule of the same class, whose rule is a function and not an object; return the rates."""
    runs.make_trainer("ours", folder, named("linear", {})).train()
    again = runs.make_trainer("ours", folder, named("constant", {}))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return [line["learning_rate"] for line in again.state.log_history if "learning_rate" in line and line["step"] > 3]


def test_another_schedule_of_the_same_class_holds_from_the_resumed_step_on(world1, tmp_path):
    [rates] = world1.run(to_a_constant, str(tmp_path))
    assert len(rates) == 3
    assert set(rates) == {BASE.arguments["learning_rate"]}


def test_an_exchanged_optimizer_keeps_the_users_defaults():
    model = small()
    accelerator = ftkit.Accelerator(cpu=True)
    user = optimizer_of(model)
    _, optimizer = accelerator.prepare(model, user)
    assert optimizer.defaults == user.defaults


class Stream(IterableDataset):
    """Rows of unknown number."""

    def __iter__(self):
        yield from runs.token_rows(40)


def test_a_stream_with_max_steps_goes_on(world1, tmp_path):
    run = replace(BASE, rows=Stream)
    ours = world1.run(train, "ours", str(tmp_path), run)[0]
    resumed = world1.run(train, "ours", str(tmp_path), replace(run, resume=str(tmp_path / "checkpoint-3")))[0]
    assert_same_history(resumed, ours, relative=0.0, absolute=0.0, leave_out=["train_loss"])
