"""Weights that are not finite, or that fp16 does not represent, found while a folder is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ftkit.engine.checkpoint.finite import is_finite
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError


@dataclass
class Narrowing:
    """The weights that one load must refuse.

    Args:
        refused: Name of a tensor to a weight of it: NaN or infinite if it has one, else beyond the range of fp16.
    """

    refused: dict[str, float] = field(default_factory=dict)

    def check(self, name: str, stored: Tensor, cast: Tensor) -> None:
        """Record a tensor if some of its weights are not finite.

        Args:
            name: Name of the tensor.
            stored: Weights (n,) of the file.
            cast: The same weights (n,) in the dtype of the model.
        """
        if math.isfinite(self.refused.get(name, 0.0)) and not is_finite(cast):
            self.refused[name] = float(stored.abs().max())

    def refuse(self, comm: Communicator, files: Sequence[Path]) -> None:
        """Raise UserError if any rank has recorded a tensor. A collective.

        Args:
            comm: Communicator of all ranks.
            files: The files that were read, for the message.
        """
        where = f"{files[0].parent}: " if files else ""
        found = [each for refused in comm.all(self.refused) for each in refused.items()]
        for name, weight in sorted(found, key=lambda each: (math.isfinite(each[1]), each[0])):
            if math.isfinite(weight):
                limit = torch.finfo(torch.float16).max
                raise UserError(f"{where}{name} has a weight of {weight:g}, fp16 holds {limit:g}: compute in bf16 or fp32")
            raise UserError(f"{where}{name} holds NaN or infinite weights: every loss would be NaN. Fetch the model again")
