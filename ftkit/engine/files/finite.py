"""Whether values are finite: asked of weights as they are loaded, and of every tensor while its bytes are written.

The sum of finite values in fp32 is finite unless it overflows, and NaN and infinities stay in it. So one sum answers for
almost every piece, at the speed of memory; only where it is not finite is every value looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
WIDER = {torch.float16: "bf16 or fp32", torch.bfloat16: "fp32"}
"""Dtypes that hold what one does not."""


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


def refuse_not_finite(name: str, values: Tensor, *, infinite: bool = False, source: Tensor | None = None) -> None:
    """Raise for values of a tensor that is about to be written.

    Args:
        name: name of the tensor.
        values: see `is_finite`.
        infinite: see `is_finite`.
        source: the values before they were cast to the dtype in which they are written; None: they were not.

    Raises:
        UserError: naming the tensor.
    """
    if not is_finite(values, infinite=infinite):
        dtype = str(values.dtype).removeprefix("torch.")
        if source is not None and is_finite(source):
            wider = WIDER.get(values.dtype, "a wider dtype")
            raise UserError(
                f"{name} has a weight of {float(source.abs().max()):g}, {holds(values.dtype)}: such a model is not written. "
                f"Ask for {wider} (--dtype bf16); if the weight grew in training, go back to a checkpoint before"
            )
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
        raise UserError(f"{where}{are_broken(found)}: every loss would be NaN. Fetch or write the model again")


def refuse_beyond(comm: Communicator, largest: Mapping[str, float], dtype: torch.dtype, where: str = "") -> None:
    """Raise where any rank found finite weights that are beyond the dtype to compute in. A collective.

    Args:
        comm: the ranks.
        largest: name of a tensor to its largest weight.
        dtype: the dtype to compute in.
        where: where they came from, with what separates it from the name.

    Raises:
        UserError: naming the first of them, alike on all ranks.
    """
    found = {name: weight for own in comm.all(dict(largest)) for name, weight in own.items()}
    if found:
        name, more = min(found), f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        advice = f"compute in {WIDER[dtype]}" if dtype in WIDER else "write the model with smaller weights"
        raise UserError(f"{where}{name} has a weight of {found[name]:g}{more}, {holds(dtype)}: {advice}")


def holds(dtype: torch.dtype) -> str:
    """Return what the largest value of a dtype is."""
    return f"{NAMES.get(dtype, dtype)} holds {torch.finfo(dtype).max:.6g}"


def are_broken(names: Sequence[str]) -> str:
    """Return what is wrong with tensors of these names, one at least."""
    more = f" (and {len(names) - 1} more tensors)" if len(names) > 1 else ""
    return f"{names[0]}{more} holds NaN or infinite weights"
