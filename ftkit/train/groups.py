"""The parameter groups of a recipe: `optimizer.groups` on the names of a model, and on the groups of an optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ftkit.config.optimizer import Group
from ftkit.config.wording import counted
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError

EXAMPLES = 4
"""Names of parameters in a refusal."""


def group_of(name: str, groups: Sequence[Group]) -> Group | None:
    """Return the first group that matches the name of a parameter."""
    return next((group for group in groups if re.search(group.match, name)), None)


def check_groups(model: torch.nn.Module, groups: Sequence[Group]) -> list[str]:
    """Return a line for each group of a recipe, with the number of its tensors.

    Args:
        model: The model, on any device.
        groups: The recipe's groups.

    Raises:
        UserError: A group has no parameter that is trained.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    counts = [sum(group_of(name, groups) is group for name in trained) for group in groups]
    for number, (group, count) in enumerate(zip(groups, counts)):
        if not count:
            taken = any(re.search(group.match, name) for name in trained)
            examples = ", ".join(trained[:: max(1, len(trained) // EXAMPLES)][:EXAMPLES])
            raise UserError(
                f"optimizer.groups.{number}.match: {group.match!r} matches "
                + ("only parameters of the groups before it" if taken else "no trained parameter")
                + f"; names are such as {examples}"
            )
    return [f"group {group.match!r}: {counted(count, 'tensor')}" for group, count in zip(groups, counts)]


def split_groups(optimizer: torch.optim.Optimizer, model: torch.nn.Module, groups: Sequence[Group]) -> None:
    """Move the parameters that a recipe's groups match to groups of their own, behind those of the optimizer.

    The optimizer's first groups remain, so that logs show the base learning rate.
    """
    chosen = {id(parameter): group_of(name, groups) for name, parameter in model.named_parameters()}
    own = optimizer.param_groups
    split = [{**base, "params": [each for each in base["params"] if chosen[id(each)] is None]} for base in own]
    for group in groups:
        settings = group.model_dump(include={"lr", "weight_decay"}, exclude_none=True)
        for base in own:
            if params := [each for each in base["params"] if chosen[id(each)] is group]:
                split.append({**base, **settings, "params": params})
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.take_groups(split)
    else:
        optimizer.param_groups = split
