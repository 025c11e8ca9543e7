"""Gather all weights of a sharded model for the duration of a generation, if they fit.

The gathered weights and the key/value cache must fit into the memory granted to the model minus what its ranks use, and into
the free memory of the device or node minus the planner's reserve. CPU ranks of one node share host memory evenly. The rank
that misses most decides for all ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.engine.holding import gathered_bytes, hold
from ftkit.errors import UserError
from ftkit.hf.memory.shape import CPU_SHARE, DEVICE_SHARE, usable_host
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.plan.limits import Limits
from ftkit.plan.memory import DEVICE_RUNTIME, GIB
from ftkit.spec.tiers import DEVICE, HOST


@contextmanager
def holding(units: ShardedTransformer | None, wanted: bool | str = "auto", cache: int = 0) -> Iterator[None]:
    """Gather all weights for the body if wanted and if they fit. Forwards in the body then need no other rank. A collective.

    Args:
        units: The sharded model. None if the model is whole: nothing is done.
        wanted: "auto" gathers if all weights fit, True gathers or raises, False does not gather.
        cache: Bytes that the key/value cache will take on this rank's device.

    Raises:
        UserError: `wanted` is True and the weights do not fit. The message names the numbers.

    Cost: an exchange of a few numbers, and one all-gather per flat parameter if the weights fit.
    """
    if units is None or units.transfer.whole is not None:
        yield
        return
    units.freshen()  # on all ranks now: a rank that makes no forward would not take part later
    if wanted is False or not gathered_bytes(units):
        yield
        return
    missing, numbers = _missing(units, cache)
    if missing <= 0:
        with hold(units):
            yield
    elif wanted is True:
        raise UserError(
            f"hold=True: {numbers}. Use hold='auto' or False, which gathers the weights block by block for each token, or "
            "grant more memory"
        )
    else:
        yield


def _missing(units: ShardedTransformer, cache: int) -> tuple[int, str]:
    """Return the missing bytes of the rank that misses most (<= 0: all ranks have enough), and its numbers as text."""
    free, source = free_memory(units.comm, units.plan.limits if units.plan is not None else None)
    weights = gathered_bytes(units)
    numbers = (
        f"all weights take {weights / GIB:.2f} GiB and the key/value cache {cache / GIB:.2f} GiB on rank {units.comm.rank}, "
        f"and {source} has {free / GIB:.2f} GiB left"
    )
    return max(units.comm.all((weights + cache - free, numbers), "free memory for all weights"))


def free_memory(comm: Communicator, limits: Limits | None) -> tuple[int, str]:
    """Return the bytes that this rank may still use where it computes, and the name of the tightest limit. A collective."""
    return _free_on_device(comm.device, limits) if comm.device.type == "cuda" else _free_on_host(comm, limits)


def _free_on_device(device: torch.device, limits: Limits | None) -> tuple[int, str]:
    unused, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    part, whole = DEVICE_SHARE
    free = [(unused + cached - total * part // whole, "the device")]
    if limits is not None and limits.device_bytes is not None:
        free.append((limits.device_bytes - DEVICE_RUNTIME - allocated, f"the device ({limits.name(DEVICE)})"))
    size, source = min(free)
    return max(size, 0), source


def _free_on_host(comm: Communicator, limits: Limits | None) -> tuple[int, str]:
    node = socket.gethostname()
    own = psutil.Process().memory_info().rss - of_other_ranks()
    resident = [size for host, size in comm.all((node, own), "host memory in use") if host == node]
    usable, source, _ = usable_host(CPU_SHARE)
    free = [(usable, f"host memory ({source})")]
    if limits is not None and limits.host_bytes is not None:
        free.append((limits.host_bytes - sum(resident), f"host memory ({limits.name(HOST)})"))
    size, source = min(free)
    return max(size // len(resident), 0), f"its share of {source}" if len(resident) > 1 else source


def cache_bytes(model: nn.Module, rows: int, tokens: int) -> int:
    """Estimate the bytes of a key/value cache from the model's configuration.

    Args:
        model: A transformers model.
        rows: Sequences in the cache; each beam is one.
        tokens: Length of the longest sequence.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = head_dim * (getattr(config, "num_key_value_heads", None) or heads)
    itemsize = next(model.parameters()).dtype.itemsize
    return 2 * config.num_hidden_layers * width * rows * tokens * itemsize
