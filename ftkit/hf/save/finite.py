"""Weights that are not finite, or that fp16 does not represent, found while a folder is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ftkit.engine.checkpoint.finite import is_finite
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError

LARGEST_FP16 = torch.finfo(torch.float16).max


@dataclass
class Narrowing:
    """The weights that one load must refuse.

    Args:
        beyond: Tensor name to its largest weight, if fp16 does not represent it.
        broken: Names of tensors with a weight that is NaN or infinite.
    """

    beyond: dict[str, float] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def check(self, name: str, weights: Tensor) -> bool:
        """Return whether weights (n,) of a tensor are finite. Record the tensor's name if not."""
        if is_finite(weights):
            return True
        self.broken.add(name)
        return False

    def look(self, name: str, weights: Tensor) -> None:
        """Record a tensor if some of its weights (n,), fp32, are beyond the range of fp16."""
        largest = float(weights.abs().max())
        if largest > LARGEST_FP16:
            self.beyond[name] = max(largest, self.beyond.get(name, 0.0))

    def refuse(self, comm: Communicator, files: Sequence[Path]) -> None:
        """Raise UserError if any rank has recorded a tensor. A collective.

        Args:
            comm: Communicator of all ranks.
            files: The files that were read, for the message.
        """
        where = f"{files[0].parent}: " if files else ""
        found = comm.all((sorted(self.broken), self.beyond))
        if broken := sorted({name for names, _ in found for name in names}):
            listed = ", ".join(broken[:3])
            raise UserError(f"{where}{listed} holds NaN or infinite weights: every loss would be NaN. Fetch the model again")
        if beyond := {name: weight for _, own in found for name, weight in own.items()}:
            name = min(beyond)
            raise UserError(
                f"{where}{name} has a weight of {beyond[name]:g}, fp16 holds {LARGEST_FP16:.6g}: compute in bf16 or fp32"
            )
