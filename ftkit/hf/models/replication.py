"""Models without blocks: replicated weights, sharded optimizer state (ZeRO stage 1).

The engine shards weights block by block. A model without blocks (a regression, an MLP, a net of convolutions) has nothing to
gather one after another, so every rank keeps all of its weights and the ranks share the optimizer state. Such a model is
small; one that is not names its blocks with `_no_split_modules` or `ftkit.shard(blocks=...)`.

This file refuses settings that need blocks: stage 3, and parameters or gradients below the device.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import DEVICE

logger = logging.getLogger(__name__)

NAME_THEM = (
    "name the class of the modules that repeat in the model's _no_split_modules, or pass the modules to "
    "ftkit.shard(blocks=...)"
)


def named_block_classes(model: nn.Module) -> set[str]:
    """Return the class names in `_no_split_modules` of the model and of every module in it.

    transformers' lists name classes that a model may lack; a list on any other module must match.

    Raises:
        UserError: if a list on a module that is no PreTrainedModel names a class that the model does not contain.
    """
    classes = {type(module).__name__ for module in model.modules()}
    named: set[str] = set()
    for module in model.modules():
        listed = getattr(module, "_no_split_modules", None) or ()
        names = {listed} if isinstance(listed, str) else set(listed)
        missing = sorted(names - classes)
        own = "_no_split_modules" in {**vars(type(module)), **vars(module)}  # PEFT's wrappers hand out that of the base
        if missing and own and not isinstance(module, PreTrainedModel):
            near = difflib.get_close_matches(missing[0], sorted(classes), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"{type(module).__name__}._no_split_modules names {missing[0]!r}, and no module is of that class{hint} "
                f"Classes in the model: {', '.join(sorted(classes))}"
            )
        named |= names
    return named


def replicated(strategy: Strategy, model: nn.Module, *, say: bool) -> Strategy:
    """Return the strategy of a model without blocks: stage 1 unless the user chose 0 or 2.

    Args:
        strategy: what the user decided.
        model: a model without blocks.
        say: whether the notice is logged; on one rank.

    Raises:
        UserError: for settings that need blocks.
    """
    kind = type(model).__name__
    if strategy.stage == 3:
        raise UserError(
            f"stage 3 shards weights block by block, and {kind} has no blocks (no GradientCheckpointingLayer, no "
            f"_no_split_modules): {NAME_THEM}; or leave stage to 'auto', which keeps its weights on every rank"
        )
    for tier in ("parameters", "gradients"):
        if getattr(strategy, tier) not in ("auto", DEVICE):
            raise UserError(
                f"{tier}={getattr(strategy, tier)!r} needs blocks, and {kind} has none: {NAME_THEM}; or leave {tier} to "
                "'auto'"
            )
    if strategy.stage == "auto":
        strategy = replace(strategy, stage=1)
    if say:
        ignored = " Nothing is recomputed." if strategy.activations == "recompute" else ""
        logger.warning(
            "%s has no blocks, so every rank keeps all weights%s.%s The memory plan does not count its activations. "
            "To shard the weights, %s.",
            kind,
            "" if strategy.stage == 0 else f" and its share of the optimizer state (ZeRO stage {strategy.stage})",
            ignored,
            NAME_THEM,
        )
    return strategy
