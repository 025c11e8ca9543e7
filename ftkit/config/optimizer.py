"""The section `optimizer:` of a recipe: update rule, learning rate schedule and parameter groups.

Names of schedules are those of transformers' `SchedulerType`; `ftkit/train/schedule.py` makes them. Names of update rules
are ours (`ftkit/spec/update_rules.py`) or transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ftkit.config.values import CountOrZero, Fraction, NotNegative, Positive, Section
from ftkit.config.wording import brief
from ftkit.spec.strategy import FP32, SPLIT
from ftkit.spec.update_rules import NAMES, REFUSED, RULES, UpdateRule

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


def _own_name(name: Any) -> Any:
    """Return the rule of an optimizer's name in transformers; other values as they are."""
    if name in REFUSED:
        raise ValueError(f"found {name}: {REFUSED[name]}")
    return NAMES.get(name, name) if isinstance(name, str) else name


DEFAULT_BETAS = {"adamw": (0.9, 0.95), "adamw_8bit": (0.9, 0.95)}
"""Decay of the moments where a recipe differs from the rule's own default."""
_NULL = "`{}: null` takes away the key of a recipe that this one extends"
_KINDS = {
    "bool": "true or false",
    "int": "a number of steps, 0 or more",
    "float": "a number, 0 or more",
    "fraction": "a number from 0, below 1",
}
_FITS: dict[str, Callable[[Any], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int and value >= 0,
    "float": lambda value: type(value) in (int, float) and value >= 0,
    "fraction": lambda value: type(value) in (int, float) and 0 <= value < 1,
}
_FRACTIONS = {("sgd", "momentum"), ("rmsprop", "momentum"), ("rmsprop", "alpha"), ("ademamix", "beta3")}


class Optimizer(Section):
    """The optimizer and its learning rate."""

    name: Annotated[
        Literal["adamw", "sgd", "lion", "adagrad", "rmsprop", "ademamix", "stable_adamw", "adamw_8bit", "lion_8bit"],
        BeforeValidator(_own_name),
    ] = Field("adamw", description="update rule; its names in transformers, such as `adamw_torch`, are known")
    lr: Positive = Field(2e-5, description="peak learning rate")
    betas: tuple[Fraction, Fraction] | None = Field(
        None,
        description="decay per step of the moments; default: 0.9, 0.95 of adamw and adamw_8bit, that of the rule for others",
    )
    eps: Positive | None = Field(None, description="added to the root of the second moment; default: that of the rule")
    args: dict[str, Any] = Field(
        default={},
        description="further settings of the rule: sgd `momentum`, `nesterov`; adagrad `lr_decay`; rmsprop `alpha`, "
        "`momentum`, `centered`; ademamix `beta3`, `alpha`, `t_alpha`, `t_beta3`",
    )
    master: Literal["fp32", "split"] = Field(
        FP32, description="master of a 16-bit weight; split: a 16-bit residual beside the weight, 2 bytes instead of 4"
    )
    convert_state: bool = Field(
        False, description="on resume, take moments that were saved in the other form, fp32 or 8 bits"
    )
    weight_decay: NotNegative = Field(0.0, description="on matrices; biases and norms are left out")
    warmup_steps: CountOrZero = Field(0, description="optimizer steps until the peak")
    warmup_ratio: Fraction = Field(0.0, description="the same, as a share of all steps")
    schedule: ScheduleName = Field("cosine", description="of the learning rate after the warm-up, by transformers' names")
    schedule_args: dict[str, Any] = Field({}, description="further arguments of transformers' schedule")
    min_lr: NotNegative | None = Field(None, description="learning rate at the end; default: that of the schedule")
    groups: tuple[Group, ...] = Field((), description="parameters with a learning rate or weight decay of their own")
    max_grad_norm: NotNegative = Field(1.0, description="global norm above which gradients are scaled down; 0 = never")

    @model_validator(mode="after")
    def _settings_of_the_rule(self) -> Optimizer:
        rule = RULES[self.name]
        for key, default in {"betas": DEFAULT_BETAS.get(self.name), "eps": None}.items():
            given = getattr(self, key)
            if given is not None and key not in rule.settings:
                raise ValueError(f"{key} is not a setting of {self.name}; remove it; {_NULL.format(key)}")
            if given is None:  # the recipe is frozen once it is made
                object.__setattr__(self, key, default or rule.settings.get(key))
        for key, value in self.args.items():
            if key not in rule.arguments:
                known = ", ".join(rule.arguments) or "no further settings"
                raise ValueError(f"args.{key} is not a setting of {self.name}, which has {known}")
            kind = "fraction" if (self.name, key) in _FRACTIONS else type(rule.arguments[key]).__name__
            if not _FITS[kind](value):
                raise ValueError(f"args.{key}: found {brief(value)}, needs {_KINDS[kind]}")
        if self.args.get("nesterov") and not self.args.get("momentum"):
            raise ValueError("args.nesterov needs args.momentum")
        return self

    @model_validator(mode="after")
    def _schedule_keys(self) -> Optimizer:
        _check_schedule(self)
        return self

    @property
    def described(self) -> str:
        """Rule, master, and schedule for a reader."""
        end = "" if self.min_lr is None else f" to {self.min_lr:g}"
        warmup = f"{self.warmup_ratio:g} of the steps" if self.warmup_ratio else f"{self.warmup_steps} steps"
        master = ", split master" if self.master == SPLIT else ""
        return f"{self.name}{master}, peak learning rate {self.lr:g}, {self.schedule}{end}, warm-up {warmup}"

    @property
    def rule(self) -> UpdateRule:
        """The update rule with these settings."""
        own = {key: value for key in ("lr", "weight_decay", "betas", "eps") if (value := getattr(self, key)) is not None}
        return RULES[self.name].of({**own, **self.args})


def _check_schedule(optimizer: Optimizer) -> None:
    """Raise ValueError for keys of the schedule that exclude each other."""
    name, arguments, least = optimizer.schedule, optimizer.schedule_args, optimizer.min_lr
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        raise ValueError(f"found both `warmup_steps` and `warmup_ratio`; keep one; {_NULL.format('warmup_steps')}")
    if name in FOLLOWING and (optimizer.warmup_steps or optimizer.warmup_ratio):
        raise ValueError(f"schedule {name} has no warm-up; set warmup_steps and warmup_ratio to 0")
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
