"""Optimizers of the Trainer and Accelerate, by name and by object, and their sharded forms.

An optimizer that was made from the model's parameters is replaced by the sharded optimizer with the same group objects, so
that schedulers made earlier still drive it. A name (`optim=`) gives a class without a sharded model: the Trainer makes its
groups, and then it is replaced as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.training_args import OptimizerNames

from ftkit.engine.optim.adagrad import ShardedAdagrad
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.adamw_8bit import ShardedAdamW8bit
from ftkit.engine.optim.ademamix import ShardedAdEMAMix
from ftkit.engine.optim.lion import ShardedLion
from ftkit.engine.optim.lion_8bit import ShardedLion8bit
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.plain import Adagrad, AdamW8bit, AdEMAMix, Lion, Lion8bit, StableAdamW
from ftkit.engine.optim.rmsprop import ShardedRMSprop
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.engine.optim.stable_adamw import ShardedStableAdamW
from ftkit.errors import UserError
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.spec.update_rules import ADAMW, UpdateRule, rule_named

SHARDED: dict[str, type[ShardedOptimizer]] = {
    kind.kind.name: kind
    for kind in (
        ShardedAdamW, ShardedSGD, ShardedLion, ShardedAdagrad, ShardedRMSprop, ShardedAdEMAMix, ShardedStableAdamW,
        ShardedAdamW8bit, ShardedLion8bit,
    )
}  # fmt: skip
"""The sharded optimizer of each rule."""


@dataclass(frozen=True)
class Known:
    """A class of optimizers that has a sharded form, and its settings that the form lacks."""

    sharded: type[ShardedOptimizer]
    unsupported: tuple[str, ...] = ()


KNOWN: dict[type[torch.optim.Optimizer], Known] = {
    torch.optim.AdamW: Known(ShardedAdamW, ("amsgrad", "maximize", "capturable")),
    torch.optim.SGD: Known(ShardedSGD, ("maximize", "dampening")),
    torch.optim.Adagrad: Known(ShardedAdagrad, ("maximize", "initial_accumulator_value")),
    torch.optim.RMSprop: Known(ShardedRMSprop, ("maximize", "capturable")),
    AdamW8bit: Known(ShardedAdamW8bit, ("amsgrad", "maximize", "capturable")),
    **{kind: Known(kind.sharded) for kind in (Lion, Adagrad, AdEMAMix, StableAdamW, Lion8bit)},
}
_BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    **{kind.sharded.kind.name: kind for kind in (Lion, Adagrad, AdEMAMix, StableAdamW, AdamW8bit, Lion8bit)},
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}
"""The class that the Trainer makes for a rule. torch's Adagrad would allocate whole tensors as its state."""


def sharded_optimizer(optimizer: torch.optim.Optimizer, units: ShardedTransformer) -> ShardedOptimizer:
    """Return the sharded form of an optimizer that has not stepped.

    Args:
        optimizer: An optimizer of `KNOWN` over the model's parameters. Its `param_groups` are shared, so schedulers drive
            both.
        units: The sharded model.

    Raises:
        UserError: The class or a setting has no sharded form, or a parameter does not belong to the model.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    name, known = type(optimizer).__name__, KNOWN.get(type(optimizer))
    if known is None:
        names = ", ".join(dict.fromkeys(each.__name__ for each in KNOWN))
        raise UserError(f"optimizer {name} has no sharded form: use {names}, or the Trainer's optim=adamw_torch")
    if any(state.get("step", 1) > 0 for state in optimizer.state.values()):  # Adagrad has a state at step 0
        raise UserError(f"this {name} has stepped already; its state is not taken over: give a new one")
    for key in known.unsupported:
        if any(group.get(key) for group in optimizer.param_groups):
            raise UserError(f"{name}: {key} has no sharded form; leave it off")
    made = known.sharded(units, **known.sharded.kind.needed(optimizer.param_groups))
    made.take_groups(optimizer.param_groups)
    made.defaults = {**made.defaults, **optimizer.defaults}  # schedules read them: polynomial, OneCycleLR
    # A scheduler that was made for the original asks it whether a step was made.
    made.register_step_post_hook(lambda *_: setattr(optimizer, "_opt_called", True))
    return made


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the update rule of an optimizer's sharded form; AdamW's for an optimizer without one."""
    return rule_of_class(type(optimizer), optimizer.param_groups)


def rule_of_class(kind: Any, groups: Sequence[Mapping[str, Any]]) -> UpdateRule:
    """Return the update rule of a class of optimizers, with the moments that the settings of the groups need."""
    known = KNOWN.get(kind)
    return ADAMW if known is None else known.sharded.kind.of(known.sharded.kind.needed(groups))


def rule_by_name(args: Any) -> UpdateRule:
    """Return the rule that `TrainingArguments.optim` names, with the settings of the arguments.

    Raises:
        UserError: No rule has this name, or `optim_args` has a setting that the rule has not.
    """
    name = str(getattr(args.optim, "value", args.optim))
    try:
        rule = rule_named(name)
    except ValueError as error:
        raise UserError(f"optim={name!r}: {error}. Or set ftkit=None to train without ftkit's engine") from None
    settings: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in rule.settings:
        settings["betas"] = args.adam_beta1, args.adam_beta2
    if {"betas", "eps"} <= rule.settings.keys():
        settings["eps"] = args.adam_epsilon
    for key, text in _parsed(args.optim_args):
        if key in ("beta1", "beta2") and "betas" in rule.settings:
            (beta1, beta2), value = settings["betas"], _like(0.0, key, text)
            settings["betas"] = (value, beta2) if key == "beta1" else (beta1, value)
        elif key in rule.arguments or (key == "eps" and key in rule.settings):
            settings[key] = _like(rule.settings[key], key, text)
        else:
            known = ", ".join([*rule.arguments, *(["eps"] if "eps" in rule.settings else [])]) or "no settings"
            raise UserError(f"optim_args: found {key!r}; {rule.name} takes {known} there")
    return rule.of(settings)


def optimizer_by_name(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer that the arguments name, and its settings. Raises as `rule_by_name`."""
    rule = rule_by_name(args)
    settings = {key: value for key, value in rule.settings.items() if key != "weight_decay"}
    fused = {"fused": True} if args.optim == OptimizerNames.ADAMW_TORCH_FUSED else {}  # as the Trainer makes it
    return _BY_NAME[rule.name], {**settings, **fused}


def _parsed(text: str | None) -> list[tuple[str, str]]:
    """Return the pairs of `optim_args`, which is written as `key=value,key=value`."""
    pairs = [part.partition("=") for part in (text or "").replace(" ", "").split(",") if part]
    if odd := [key for key, equals, _ in pairs if not equals]:
        raise UserError(f"optim_args: found {odd[0]!r}, needs key=value, for example momentum=0.9")
    return [(key, value) for key, _, value in pairs]


def _like(default: Any, key: str, text: str) -> Any:
    """Return a setting in the type of its default."""
    if isinstance(default, bool):
        return text.lower() in ("true", "1", "yes")
    try:
        return type(default)(text)
    except ValueError:
        raise UserError(f"optim_args: {key} is {text!r}, needs a number") from None
