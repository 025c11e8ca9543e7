"""What fp16 makes of weights that are stored wider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ftkit.engine.checkpoint.finite import is_finite
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError


@dataclass
class Narrowing:
    """What fp16 makes of weights that were wider.

    Args:
        numel: number of weights looked at.
        subnormal: number of weights below fp16's normal range, where precision is lost.
        lost: number of those that become 0.
        beyond: name of a tensor to its largest weight, where fp16 does not hold it.
        broken: names of tensors with a weight that is NaN or infinite.
    """

    numel: int = 0
    subnormal: int = 0
    lost: int = 0
    beyond: dict[str, float] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def check(self, name: str, weights: Tensor) -> bool:
        """Return whether weights (n,) of a tensor are finite; note its name where they are not."""
        if is_finite(weights):
            return True
        self.broken.add(name)
        return False

    def look(self, name: str, weights: Tensor) -> None:
        """Look at some (n,) fp32 weights of a tensor."""
        sizes, known = weights.abs(), torch.finfo(torch.float16)
        zeros = int((sizes == 0).sum())
        self.numel += sizes.numel()
        self.subnormal += int((sizes < known.tiny).sum()) - zeros
        self.lost += int((sizes <= known.smallest_normal * known.eps / 2).sum()) - zeros
        if not (largest := float(sizes.max())) <= known.max:
            self.beyond[name] = max(largest, self.beyond.get(name, 0.0))

    def refuse(self, comm: Communicator, files: Sequence[Path]) -> None:
        """Raise where any rank has read a weight that is not finite, or that fp16 does not hold. A collective."""
        where = f"{files[0].parent}: " if files else ""
        refuse_broken(comm, self.broken, where)
        refuse_beyond(comm, self.beyond, torch.float16, where)

    def told(self) -> str:
        """Return which part of the weights fp16 holds badly."""
        if not self.subnormal:
            return "all weights are in its range"
        small, lost = self.subnormal / self.numel, self.lost / self.numel
        return f"{small:.2g} of the weights are below its normal range, {lost:.2g} become 0"


def refuse_broken(comm: Communicator, names: Iterable[str], where: str = "") -> None:
    """Raise UserError if any rank found tensors, before training, that are not finite. A collective.

    Args:
        comm: Communicator of all ranks.
        names: Names of the tensors that this rank found.
        where: Prefix of the message: where the tensors came from.
    """
    found = sorted({name for own in comm.all(sorted(names)) for name in own})
    if found:
        names = ", ".join(found[:3])
        raise UserError(f"{where}{names} holds NaN or infinite weights: every loss would be NaN. Fetch the model again")


def refuse_beyond(comm: Communicator, largest: Mapping[str, float], dtype: torch.dtype, where: str = "") -> None:
    """Raise UserError if any rank found weights that the compute dtype does not represent. A collective.

    Args:
        comm: Communicator of all ranks.
        largest: Tensor name to its largest weight.
        dtype: Compute dtype.
        where: Prefix of the message: where the tensors came from.
    """
    found = {name: weight for own in comm.all(dict(largest)) for name, weight in own.items()}
    if found:
        kind = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        name, limit = min(found), f"{kind} holds {torch.finfo(dtype).max:.6g}"
        raise UserError(f"{where}{name} has a weight of {found[name]:g}, {limit}: compute in bf16 or fp32")
