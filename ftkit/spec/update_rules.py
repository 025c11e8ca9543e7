"""Update rules: the state and memory traffic of an optimizer per trained element.

Plan, engine and checkpoint read the rule. Its `moments` are the kinds of fp32 state besides the master weight, named as in
torch.optim; a checkpoint has one file per kind and flat parameter. A new rule needs an `UpdateRule` here and a
`ShardedOptimizer` that computes it (`ftkit/engine/optim/optimizer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES, NARROW_BYTES = 4, 2


@dataclass(frozen=True)
class UpdateRule:
    """The state of an optimizer per element.

    Args:
        name: Name in a recipe (`optimizer.name`).
        moments: Kinds of fp32 state besides the master weight.
    """

    name: str
    moments: tuple[str, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of state per element: the fp32 master weight and the moments."""
        return FP32_BYTES * (1 + len(self.moments))

    @property
    def traffic_bytes(self) -> int:
        """Bytes of memory traffic per element: read and write the state, read a 16-bit gradient, write a 16-bit weight."""
        return 2 * self.state_bytes + 2 * NARROW_BYTES


ADAMW = UpdateRule("adamw", ("exp_avg", "exp_avg_sq"))
"""Loshchilov and Hutter, arXiv:1711.05101."""
SGD = UpdateRule("sgd", ())
MOMENTUM = UpdateRule("sgd", ("momentum_buffer",))
"""SGD with momentum, as in torch.optim.SGD."""


def rule_of(name: str, *, momentum: float = 0.0) -> UpdateRule:
    """Return the rule of an optimizer: "adamw", or "sgd" with its momentum."""
    return {"adamw": ADAMW, "sgd": MOMENTUM if momentum else SGD}[name]
