"""Persistent buffers of a model, such as running means.

Every rank has whole buffers. A forward writes to a rank's own buffers, from its own rows, so ranks differ during training.
A save broadcasts rank 0's buffers before they are written: the run goes on with the buffers that a resumed run would read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator


def persistent_buffers(model: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return the buffers that a saved model has, by name; without `recurse` those of the module itself."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in (model.named_modules() if recurse else [("", model)])
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def share_buffers(model: nn.Module, comm: Communicator) -> dict[str, Tensor]:
    """Copy rank 0's persistent buffers to all ranks, and return them. A collective if the model has such buffers."""
    buffers = persistent_buffers(model)
    for buffer in buffers.values() if comm.world_size > 1 else ():
        data = buffer.to(comm.device).contiguous().view(-1).view(torch.uint8)
        comm.broadcast(data)
        buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
    return buffers
