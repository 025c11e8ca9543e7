"""The learning rate schedule of a recipe: its name and arguments in transformers, and a check before the run.

transformers makes the schedule in `Trainer.create_scheduler`, after the model is loaded and sharded. `check_schedule`
makes it before, on an optimizer of one number.
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

from ftkit.config.optimizer import END_RATES, Optimizer
from ftkit.errors import UserError

MANY_STEPS = 1_000_000
"""Steps of a run whose rows are not counted yet."""


def schedule_of(optimizer: Optimizer) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a recipe's schedule in transformers."""
    name: str = optimizer.schedule
    arguments = dict(optimizer.schedule_args)
    if name == "constant" and warmup_of(optimizer):
        return "constant_with_warmup", arguments
    if optimizer.min_lr is None:
        return name, arguments
    share = name == "warmup_stable_decay"
    arguments[END_RATES[name]] = optimizer.min_lr / optimizer.lr if share else optimizer.min_lr
    if name == "linear":
        return "polynomial", {"power": 1.0, **arguments}
    return ("cosine_with_min_lr" if name == "cosine" else name), arguments


def warmup_of(optimizer: Optimizer) -> float:
    """Return the warm-up as `TrainingArguments.warmup_steps` has it: below 1 a share of all steps."""
    return optimizer.warmup_ratio or optimizer.warmup_steps


def warmup_steps(optimizer: Optimizer, steps: int) -> int:
    """Return the optimizer steps of the warm-up in a run of so many steps, as transformers counts them."""
    return math.ceil(steps * optimizer.warmup_ratio) if optimizer.warmup_ratio else optimizer.warmup_steps


def check_schedule(optimizer: Optimizer, steps: int) -> None:
    """Make the schedule of a run of so many steps once, and compute the learning rates where it bends.

    Raises:
        UserError: transformers refuses an argument or misses one.
    """
    name, arguments = schedule_of(optimizer)
    warmup = warmup_steps(optimizer, steps)
    try:
        with warnings.catch_warnings(action="ignore"):
            one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optimizer.lr)
            made = get_scheduler(name, one, warmup, steps, arguments)
            if isinstance(made, LambdaLR):
                for step in (warmup, max(steps - 1, 0), steps):
                    made.lr_lambdas[0](step)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        if isinstance(error, ZeroDivisionError) and warmup >= steps:
            raise UserError(
                f"optimizer.schedule: {name} cannot decay in a run of {steps} steps with a warm-up of {warmup}; shorten it"
            ) from None
        found = f"refuses {arguments}" if arguments else "needs arguments"
        raise UserError(
            f"optimizer.schedule_args: the schedule {name} {found}: {error}; it has {', '.join(_known(name))}"
        ) from error


def _known(name: str) -> list[str]:
    """Return the names of the arguments of a schedule, without those that the Trainer sets."""
    classes: dict[str, Any] = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
    function: Any = classes[name] if name in classes else TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    parameters = inspect.signature(function).parameters
    return [each for each in parameters if each not in ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")]
