"""Memory for a second model, and for one that is evaluated only.

What the models that this process has sharded were planned with is not granted again.

A reference model beside a trained one, a reward model, a second Trainer: each is planned for itself. What a plan may use is
what was granted, or what is free, less the peaks of the plans that are there; a part of those may not be allocated yet
(gradients and state come with the first step).

A model that is evaluated only is planned without gradients and optimizer state. If it is to be trained after all, it is
planned anew in the form that it has (`planned_for_training`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.plan.choice import Plan, make_plan
from ftkit.plan.limits import Limits
from ftkit.plan.memory import Memory
from ftkit.plan.shape import Line, Shape
from ftkit.spec.strategy import AUTO
from ftkit.spec.tiers import DEVICE, TIERS

RUNTIME = "runtime"
"""The purpose of bytes that a process takes once, however many models it has."""


def limits_beside(limits: Limits, others: Iterable[ShardedTransformer]) -> Limits:
    """Return the limits of a model that is sharded beside others.

    Args:
        limits: limits of all models of this process together.
        others: models that were sharded before; those without a plan are left out.
    """
    changes: dict[str, Any] = {}
    names = dict(limits.names)
    for units in others:
        if units.plan is None:
            continue
        for tier in TIERS:
            granted = changes.get(f"{tier}_bytes", limits.granted(tier))
            taken = _taken_bytes(units, units.plan.memory, tier, limits) * limits.ranks(tier)
            if granted and taken:
                changes[f"{tier}_bytes"] = max(granted - taken, 1)
                names[tier] = f"{dict(limits.names).get(tier, limits.name(tier))}, beside {type(units.model).__name__}"
    return replace(limits, **changes, names=tuple(names.items())) if changes else limits


def untrained(shape: Shape) -> Shape:
    """Return the shape of the same model with nothing to train: no gradients, no state."""

    def frozen(lines: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple(replace(line, trained=False) for line in lines)

    return replace(
        shape,
        blocks=tuple(map(frozen, shape.blocks)),
        roots=frozen(shape.roots),
        replicated=frozen(shape.replicated),
        fresh=False,
    )


def planned_for_training(plan: Plan, shape: Shape) -> Plan:
    """Return the plan of a model that was planned for evaluation only, for its training in the same form.

    Args:
        plan: the plan for evaluation.
        shape: the model's shape, with what it trains.

    Raises:
        DoesNotFit: if gradients and state do not fit in that form.
    """
    asked = plan.asked
    assert asked is not None
    wanted = replace(plan.strategy, gradient_dtype=asked.wanted.gradient_dtype, state_host_bytes=AUTO)
    return make_plan(shape, asked.limits, wanted, sequences=asked.sequences)


def _taken_bytes(units: ShardedTransformer, memory: Memory, tier: str, limits: Limits) -> int:
    """Return the bytes of a tier that one rank of a planned model takes, and that `limits` still count as free."""
    peak = memory.peak_phase(tier)
    planned = memory.at(tier, peak) - memory.purposes(tier, peak).get(RUNTIME, 0)
    if tier == DEVICE and limits.name(DEVICE).startswith("what is free"):  # free beside what is allocated by now
        planned -= sum(units.state_bytes().values())
    return max(planned, 0)
