"""Update rules: what an optimizer keeps and moves for each trained element. Plan, engine and checkpoint ask the rule.

A rule's `moments` are the kinds of its fp32 state besides the master weight, under the names of torch.optim; a checkpoint
has a file of each kind. A new rule is a row here and a `ShardedOptimizer` that computes it
(`ftkit/engine/optim/optimizer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES, NARROW_BYTES = 4, 2


@dataclass(frozen=True)
class UpdateRule:
    """What an update keeps for each element.

    Args:
        name: its name in a recipe (`optimizer.name`).
        moments: kinds of fp32 state besides the master weight.
    """

    name: str
    moments: tuple[str, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of state an element: the fp32 master and the moments."""
        return FP32_BYTES * (1 + len(self.moments))

    @property
    def traffic_bytes(self) -> int:
        """Bytes of memory traffic an element: state in and out, a 16-bit gradient in, a 16-bit weight out."""
        return 2 * self.state_bytes + 2 * NARROW_BYTES


ADAMW = UpdateRule("adamw", ("exp_avg", "exp_avg_sq"))
"""Loshchilov and Hutter, arXiv:1711.05101."""
SGD = UpdateRule("sgd", ())
MOMENTUM = UpdateRule("sgd", ("momentum_buffer",))
"""SGD with momentum, as torch.optim.SGD has it."""


def rule_of(name: str, *, momentum: float = 0.0) -> UpdateRule:
    """Return the rule of an optimizer.

    Args:
        name: "adamw" or "sgd".
        momentum: of SGD.

    Raises:
        KeyError: for another name.
    """
    return {"adamw": ADAMW, "sgd": MOMENTUM if momentum else SGD}[name]
