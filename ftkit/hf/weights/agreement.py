"""The values of a model before sharding, made equal on all ranks.

Ranks build their models alone: a new adapter or head may have been drawn from other random numbers on each. Stock DDP takes
rank 0's values; so does this, but only where a digest says that they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.placeholder import is_absent
from ftkit.errors import UserError

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Bytes of a tensor that are on the host at a time for its digest."""


def agree(model: nn.Module, stored: Mapping[str, str], comm: Communicator) -> set[str]:
    """Make parameters and buffers the same on all ranks: rank 0's. A collective.

    Args:
        model: the model, not yet sharded.
        stored: name of a parameter to its place in the folder, for parameters whose values are nowhere else.
        comm: the ranks.

    Returns:
        Names of parameters in `stored` that another rank has a value for: they are values now, here too.

    Raises:
        UserError: if ranks have other names, shapes or dtypes; the parameter is named.

    Cost: a pass over all values in memory, and a broadcast of each that differs. On one rank nothing.
    """
    if comm.world_size == 1:
        return set()
    own = dict(model.named_parameters())
    buffers = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    seen = {name: _seen(tensor, stored.get(name)) for name, tensor in {**own, **buffers}.items()}
    ranks = comm.all(seen)
    _refuse_other_shapes(ranks)
    differing = [name for name, first in ranks[0].items() if any(other[name] != first for other in ranks[1:])]
    for name in differing:
        tensor = (own[name] if name in own else buffers[name]).data
        value = tensor.to(comm.device, copy=True).contiguous()
        comm.broadcast(value.view(-1).view(torch.uint8))
        tensor.copy_(value)
    if differing and comm.rank == 0:
        logger.info("%d tensors differed among ranks, rank 0's are taken: %s", len(differing), ", ".join(differing[:8]))
    return set(differing) & set(stored)


def _seen(tensor: Tensor, place: str | None) -> tuple[str, str]:
    """Return a tensor's form, and where its value is: in a file, nowhere, or here, with its digest."""
    form = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_meta:
        return f"{form} on meta", ""
    if place is not None:
        return form, f"file {place}"
    return form, "absent" if is_absent(tensor) else digest(tensor.detach())


def _refuse_other_shapes(ranks: list[dict[str, tuple[str, str]]]) -> None:
    for number, other in enumerate(ranks[1:], 1):
        for name in {**ranks[0], **other}:
            forms = [seen[name][0] if name in seen else "missing" for seen in (ranks[0], other)]
            if forms[0] != forms[1]:
                raise UserError(
                    f"{name} is {forms[0]} on rank 0 and {forms[1]} on rank {number}: build the same model on all ranks"
                )


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, made on the host.

    Cost: one pass over the tensor; from a device, a copy of it to the host, piece by piece.
    """
    total = xxhash.xxh3_64()
    for piece in tensor.contiguous().view(-1).view(torch.uint8).split(PIECE_BYTES):
        total.update(piece.cpu().numpy())
    return total.hexdigest()
