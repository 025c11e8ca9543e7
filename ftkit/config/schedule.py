"""Learning rate schedules by name, and parameter groups: what a recipe may say about them.

The names are those of transformers' `SchedulerType`. `ftkit.train.schedule` makes the schedules.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ftkit.config.values import NotNegative, Positive, Section

if TYPE_CHECKING:
    from ftkit.config.recipe import Optimizer

ScheduleName = Literal[
    "cosine",
    "linear",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "reduce_lr_on_plateau",
    "greedy",
]
FOLLOWING = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the held-out loss. They change the learning rate at evaluations, and have no warm-up."""
WITHOUT_ARGUMENTS = ("linear", "constant", "constant_with_warmup")
END_RATES = {
    "cosine": "min_lr",
    "linear": "lr_end",
    "cosine_with_min_lr": "min_lr",
    "cosine_warmup_with_min_lr": "min_lr",
    "polynomial": "lr_end",
    "warmup_stable_decay": "min_lr_ratio",
    "reduce_lr_on_plateau": "min_lr",
    "greedy": "min_lr",
}
"""Schedules that take `optimizer.min_lr`, and the argument of transformers that it becomes."""
GREEDY_MIN_LR = 1e-3
"""Default of transformers' GreedyLR."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"found {pattern!r}, needs a regular expression: {error}") from None
    return pattern


class Group(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: Annotated[str, AfterValidator(_compiles)] = Field(
        description="regular expression, searched in a parameter's name; the first group that matches takes it"
    )
    lr: Positive | None = Field(None, description="peak learning rate; default: optimizer.lr")
    weight_decay: NotNegative | None = Field(
        None, description="also on biases and norms that match; default: as without the group"
    )

    @model_validator(mode="after")
    def _any(self) -> Group:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("needs `lr`, `weight_decay` or both")
        return self


def check_schedule_keys(optimizer: Optimizer) -> None:
    """Raise ValueError for keys of the schedule that exclude each other."""
    name, arguments, least = optimizer.schedule, optimizer.schedule_args, optimizer.min_lr
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        raise ValueError("found both `warmup_steps` and `warmup_ratio`; keep one")
    if name in FOLLOWING and (optimizer.warmup_steps or optimizer.warmup_ratio):
        raise ValueError(f"schedule {name} has no warm-up; set warmup_steps and warmup_ratio to 0")
    if name in WITHOUT_ARGUMENTS and arguments:
        raise ValueError(f"schedule {name} has no arguments; remove schedule_args, found {', '.join(arguments)}")
    if name == "greedy" and least is None and "min_lr" not in arguments and optimizer.lr <= GREEDY_MIN_LR:
        raise ValueError(
            f"schedule greedy does not go below {GREEDY_MIN_LR} by default, and lr is {optimizer.lr}; set min_lr below it"
        )
    if least is None:
        return
    if name not in END_RATES:
        raise ValueError(f"schedule {name} takes no min_lr; remove it, or choose {', '.join(END_RATES)}")
    if least >= optimizer.lr:
        raise ValueError(f"min_lr is {least} and lr {optimizer.lr}; needs a min_lr below lr")
    if twice := {"min_lr", "min_lr_rate", "min_lr_ratio", "lr_end"} & arguments.keys():
        raise ValueError(f"found min_lr and schedule_args.{min(twice)}; keep one")
