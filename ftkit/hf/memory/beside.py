"""Memory for a second model in one process.

A reference model, a reward model and a second Trainer's model are planned one after another. Each plan may use the granted
or free memory minus the peaks of the plans before it. Those peaks may not be allocated yet, because the first step
allocates gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.plan.limits import Limits
from ftkit.spec.tiers import DEVICE, TIERS


def limits_beside(limits: Limits, others: Iterable[ShardedTransformer]) -> Limits:
    """Return the limits of a model that is sharded after others.

    Args:
        limits: Limits of all models of this process together.
        others: Models that were sharded before.
    """
    for units in others:
        for tier in TIERS:
            granted, taken = limits.granted(tier), _taken_bytes(units, tier, limits) * limits.ranks(tier)
            if granted and taken:
                names = dict(limits.names) | {tier: f"{limits.name(tier)}, beside {type(units.model).__name__}"}
                changes: dict[str, Any] = {f"{tier}_bytes": max(granted - taken, 1), "names": tuple(names.items())}
                limits = replace(limits, **changes)
    return limits


def _taken_bytes(units: ShardedTransformer, tier: str, limits: Limits) -> int:
    """Return the bytes of a tier that a rank of a planned model will take, and that `limits` still count as free."""
    assert units.plan is not None
    memory = units.plan.memory
    peak = memory.peak_phase(tier)
    planned = memory.at(tier, peak) - memory.purposes(tier, peak).get("runtime", 0)  # a process takes it once
    if tier == DEVICE and limits.name(DEVICE).startswith("free memory"):  # allocated bytes are not free
        planned -= sum(units.state_bytes().values())
    return max(planned, 0)
