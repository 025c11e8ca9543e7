"""Whether values are finite: asked of weights as they are loaded, and of every tensor while its bytes are written.

The sum of finite values in fp32 is finite unless it overflows, and NaN and infinities stay in it. So one sum answers for
almost every piece, at the speed of memory; only where it is not finite is every value looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ftkit.engine.comm import Communicator
from ftkit.errors import UserError


def is_finite(values: Tensor, *, infinite: bool = False) -> bool:
    """Return whether no value is NaN or infinite.

    Args:
        values: (n,) of any dtype and device.
        infinite: let infinite values pass: only NaN counts.

    Cost: one pass over the values; a host wait on a GPU.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:  # fp8 has no sum
        values = values.float()
    if math.isfinite(float(values.sum(dtype=torch.float32))):
        return True
    return not bool(values.isnan().any()) if infinite else bool(values.isfinite().all())


def refuse_not_finite(name: str, values: Tensor, *, infinite: bool = False) -> None:
    """Raise for values of a tensor that is about to be written; arguments as of `is_finite`.

    Raises:
        UserError: naming the tensor.
    """
    if not is_finite(values, infinite=infinite):
        dtype = str(values.dtype).removeprefix("torch.")
        kind = "NaN" if bool(values.isnan().any()) else f"an infinite value in {dtype}"
        raise UserError(
            f"{name} holds {kind}: such a model is not written. Training went wrong before: go back to a checkpoint before, "
            "and lower the learning rate or look at the data of the first step whose loss is not finite"
        )


def refuse_broken(comm: Communicator, names: Iterable[str], where: str = "") -> None:
    """Raise where any rank found weights that are not finite before training. A collective.

    Args:
        comm: the ranks.
        names: names of the tensors that this rank found.
        where: where they came from, with what separates it from the name.

    Raises:
        UserError: naming the first of them, alike on all ranks.
    """
    found = sorted({name for own in comm.all(sorted(names)) for name in own})
    if found:
        more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
        raise UserError(
            f"{where}{found[0]}{more} holds NaN or infinite weights: every loss would be NaN. Fetch or write the model again"
        )
