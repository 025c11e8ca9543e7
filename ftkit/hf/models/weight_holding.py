"""Whether all weights fit beside what is there, and holding them where they do.

Needed are the bytes of all weights gathered (`engine.holding.gathered_bytes`) and of what a caller will put beside them, a
key/value cache say. Free is the less of two: what was granted to the model when it was sharded, or by the caller, less what
its ranks take by now; and what the node has left by now, less the reserve that a plan keeps too. On a GPU that is asked of
the device, on a CPU of the host, which its ranks share evenly. The rank that has least decides for all.

It refuses `hold=True` where that does not fit, with the numbers. What it costs: one exchange of a few numbers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.engine.holding import gathered_bytes, hold
from ftkit.errors import UserError
from ftkit.hf.models.shapes import CPU_SHARE, DEVICE_SHARE, usable_host
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.plan.limits import Limits
from ftkit.plan.memory import DEVICE_RUNTIME, GIB
from ftkit.spec.tiers import DEVICE, HOST

HOLDS = ("auto", True, False)


@dataclass(frozen=True)
class Room:
    """What one rank needs to hold all weights, and has.

    Args:
        weights_bytes: bytes of all weights, gathered.
        beside_bytes: bytes of what comes with them.
        free_bytes: bytes that are left for both.
        where: the tier that they lie on, and what limits it.
        rank: rank in the group.
    """

    weights_bytes: int
    beside_bytes: int
    free_bytes: int
    where: str
    rank: int = 0

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.weights_bytes + self.beside_bytes <= self.free_bytes

    def __str__(self) -> str:
        gib = [f"{size / GIB:.2f} GiB" for size in (self.weights_bytes, self.beside_bytes, self.free_bytes)]
        beside = f" and {gib[1]} beside them" if self.beside_bytes else ""
        return f"all weights take {gib[0]} on rank {self.rank}{beside}, and {self.where} has {gib[2]} left"


def room_for(units: ShardedTransformer, beside_bytes: int = 0, limits: Limits | None = None) -> Room:
    """Return the room of the rank that has least, the same on all ranks. A collective.

    Args:
        units: the sharded model.
        beside_bytes: bytes of what will lie on this rank's device beside the weights.
        limits: memory granted; None takes the limits with which the model was sharded, if any.
    """
    if limits is None and units.plan is not None:
        limits = units.plan.limits
    device = units.comm.device
    free, where = _on_device(device, limits) if device.type == "cuda" else _on_host(units.comm, limits)
    told = units.comm.all(Room(gathered_bytes(units), beside_bytes, free, where, units.comm.rank), "room for all weights")
    return min(told, key=lambda room: room.free_bytes - room.beside_bytes)


def _on_device(device: torch.device, limits: Limits | None) -> tuple[int, str]:
    """Return the bytes that this rank may still take of its GPU, and what says so."""
    open_, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - taken
    part, whole = DEVICE_SHARE
    free = [(open_ + cached - total * part // whole, "the device")]
    if limits is not None and limits.device_bytes is not None:
        free.append((limits.device_bytes - DEVICE_RUNTIME - taken, f"the device ({limits.name(DEVICE)})"))
    size, where = min(free)
    return max(size, 0), where


def _on_host(comm: Communicator, limits: Limits | None) -> tuple[int, str]:
    """Return the bytes that this rank may still take of the host, where it computes, and what says so."""
    node = socket.gethostname()
    own = psutil.Process().memory_info().rss - of_other_ranks()
    resident = [size for host, size in comm.all((node, own), "free memory for all weights") if host == node]
    usable, source, _ = usable_host(CPU_SHARE)
    free = [(usable, f"host memory ({source})")]
    if limits is not None and limits.host_bytes is not None:
        free.append((limits.host_bytes - sum(resident), f"host memory ({limits.name(HOST)})"))
    size, where = min(free)
    return max(size // len(resident), 0), f"its share of {where}" if len(resident) > 1 else where


@contextmanager
def held(
    units: ShardedTransformer | None, wanted: bool | str = "auto", *, beside_bytes: int = 0, limits: Limits | None = None
) -> Iterator[bool]:
    """Hold all weights of a sharded model in the body, where that is wanted and fits. A collective.

    Args:
        units: the sharded model; None: the model is not sharded.
        wanted: auto | True | False.
        beside_bytes: see `room_for`.
        limits: see `room_for`.

    Yields:
        Whether all weights are at hand: then no forward in the body waits for another rank.

    Raises:
        UserError: if they are wanted and do not fit: with the numbers.
    """
    if wanted not in HOLDS:
        raise UserError(f"hold is {wanted!r}, one of 'auto', True, False is needed")
    if units is None or units.transfer.whole is not None:
        yield True
        return
    units.freshen()  # by all ranks here: later it would be in the first forward, which a rank may never make
    if not gathered_bytes(units):
        yield True
        return
    if wanted is False:
        yield False
        return
    room = room_for(units, beside_bytes, limits)
    if not room.fits:
        if wanted is True:
            raise UserError(
                f"hold=True: {room}. Use hold='auto' or False, which brings weights block by block for each token, or "
                "grant more memory"
            )
        yield False
        return
    with hold(units):
        yield True


def cache_bytes(model: nn.Module, rows: int, tokens: int) -> int:
    """Return what keys and values of so many rows of tokens take, by the model's configuration; 0 if it says nothing."""
    text: Any = getattr(model, "config", None)
    if hasattr(text, "get_text_config"):
        text = text.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 0
    hidden = getattr(text, "hidden_size", None) or 0
    width = (getattr(text, "head_dim", None) or (hidden // heads if heads else 0)) * (
        getattr(text, "num_key_value_heads", None) or heads
    )
    layers = getattr(text, "num_hidden_layers", None) or 0
    itemsize = next((parameter.dtype.itemsize for parameter in model.parameters()), 4)
    return 2 * layers * width * rows * tokens * itemsize
