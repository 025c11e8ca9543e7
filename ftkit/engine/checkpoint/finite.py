"""Whether weights are finite. A model or checkpoint with NaN or infinite weights is not written."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftkit.errors import UserError

CPU_PIECE = 1 << 18
"""Values that are summed at a time on the CPU."""


def is_finite(values: Tensor) -> bool:
    """Return whether no value of (n,), any dtype and device, is NaN or infinite. Cost: one pass; a host wait on a GPU."""
    if not values.is_floating_point() or values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:  # fp8 has no sum
        values = values.float()
    # A sum on the CPU copies its operand to fp32: small copies stay in the cache, and the allocator keeps little of them.
    pieces = values.split(CPU_PIECE) if values.device.type == "cpu" else (values,)
    # The sum of finite values is finite unless it overflows. Only then every value is looked at.
    return all(math.isfinite(float(each.sum(dtype=torch.float32))) or bool(each.isfinite().all()) for each in pieces)


class NotFinite(UserError):
    """A weight to be written is not finite."""


def refuse_not_finite(name: str, values: Tensor) -> None:
    """Raise NotFinite if `values` (n,) of tensor `name` are not finite."""
    if is_finite(values):
        return
    dtype = str(values.dtype).removeprefix("torch.")
    kind = "NaN" if bool(values.isnan().any()) else f"an infinite value in {dtype}"
    advice = "If the weight is finite in training, write a wider dtype (--dtype bf16). " if dtype == "float16" else ""
    raise NotFinite(
        f"{name} holds {kind}: such a model is not written. {advice}Training diverged: go back to an earlier checkpoint, "
        "and lower the learning rate or check the data of the first step whose loss is not finite"
    )
