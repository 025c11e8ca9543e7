"""Plans and scripts of steps in one call, for tests."""

from __future__ import annotations

from typing import Any

from ftkit.plan.events import Script
from ftkit.plan.plan import Asked, Plan
from ftkit.plan.schedule import Steps
from ftkit.plan.shape import Shape
from ftkit.spec.strategy import Strategy


def make_plan(*args: Any, **kwargs: Any) -> Plan:
    """Return the plan. Arguments as `Asked`'s."""
    return Asked(*args, **kwargs).plan()


def script(shape: Shape, strategy: Strategy, steps: int = 1, *, in_order: bool = False) -> Script:
    """Return the events of consecutive steps."""
    made = Steps(shape, strategy, strategy.rounds, 0.0, in_order=in_order)
    for _ in range(steps):
        made.add()
    return made.script
