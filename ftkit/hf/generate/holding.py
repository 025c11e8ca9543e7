"""Gather all weights of a sharded model for the duration of a generation, if they fit.

The gathered weights and the key/value cache must fit into the memory granted to the model minus what its ranks use, and into
the free memory of the device or node minus the planner's reserve. CPU ranks of one node share host memory evenly. The rank
with the largest shortfall decides for all ranks.

If they do not fit, each forward gathers weights from all ranks. transformers' `synced_gpus` then lets a rank that has
finished its answers go on with forwards until all ranks have finished.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.engine.core.instance_class import specialise
from ftkit.engine.holding import gathered_bytes, hold
from ftkit.errors import UserError
from ftkit.hf.memory.shape import CPU_SHARE, DEVICE_SHARE, heads_of, usable_host
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.plan.limits import Limits
from ftkit.plan.memory import DEVICE_RUNTIME, GIB
from ftkit.spec.tiers import DEVICE, HOST

DEFAULT_NEW_TOKENS = 20
"""Length of an answer in transformers if neither the call nor the model names one."""


@contextmanager
def holding(units: ShardedTransformer | None, wanted: bool | str = "auto", cache: int = 0) -> Iterator[None]:
    """Gather all weights for the body if wanted and if they fit. Forwards in the body then need no other rank. A collective.

    Inside the body of another `holding` nothing is done.

    Args:
        units: The sharded model. None if the model is whole: nothing is done.
        wanted: "auto" gathers if all weights fit, True gathers or raises, False does not gather.
        cache: Bytes that the key/value cache will take on this rank's device.

    Raises:
        UserError: `wanted` is True and the weights do not fit. The message names the numbers.

    Cost: an exchange of a few numbers, and one all-gather per flat parameter if the weights fit.
    """
    if units is None or units.holding or units.transfer.whole is not None:
        yield
        return
    units.freshen()  # on all ranks now: a rank that makes no forward would not take part later
    missing, numbers = _missing(units, cache) if wanted is not False and gathered_bytes(units) else (0, "")
    if wanted is True and missing > 0:
        raise UserError(
            f"hold=True: {numbers}. Use hold='auto' or False, which gathers the weights block by block for each token, or "
            "grant more memory"
        )
    units.holding = True
    try:
        with hold(units) if numbers and missing <= 0 else nullcontext():
            yield
    finally:
        units.holding = False


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
    if comm.device.type == "cuda":
        unused, total = torch.cuda.mem_get_info(comm.device)
        allocated, (part, whole) = torch.cuda.memory_allocated(comm.device), DEVICE_SHARE
        cached = torch.cuda.memory_reserved(comm.device) - allocated
        free, source = unused + cached - total * part // whole, "free now"
        tier, used, ranks = DEVICE, allocated + DEVICE_RUNTIME, 1
    else:
        node, own = socket.gethostname(), psutil.Process().memory_info().rss - of_other_ranks()
        resident = [size for host, size in comm.all((node, own), "host memory in use") if host == node]
        free, source, _ = usable_host(CPU_SHARE)
        tier, used, ranks = HOST, sum(resident), len(resident)
    if limits is not None and (granted := limits.granted(tier)) is not None and granted - used < free:
        free, source = granted - used, limits.name(tier)
    return max(free // ranks, 0), f"{'its share of ' if ranks > 1 else ''}{tier} memory ({source})"


def cache_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Estimate the bytes of a key/value cache from the model's configuration.

    Args:
        model: A transformers model.
        rows: Sequences in the cache; each beam is one.
        tokens: Length of the longest sequence.
    """
    config = model.config.get_text_config(decoder=True)
    heads = heads_of(config)
    if heads is None:
        return 0
    width = heads.key_heads * (heads.head_dim + heads.value_dim)
    return config.num_hidden_layers * width * rows * tokens * next(model.parameters()).dtype.itemsize


def let_generate(units: ShardedTransformer) -> None:
    """Let `generate` of a sharded model gather all weights if they fit, and keep the ranks in step if they do not.

    All ranks must call `generate` together, each with prompts of its own.
    """
    for module in units.model.modules() if gathered_bytes(units) else ():
        if isinstance(module, PreTrainedModel) and module.can_generate():
            _specialise(module, units)


def _specialise(module: PreTrainedModel, units: ShardedTransformer) -> None:
    stock = type(module).generate  # type: ignore[attr-defined]  # of models that can generate

    @functools.wraps(stock)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with holding(units, "auto", _cache_of_call(self, args, kwargs)):
            streamed = units.transfer.whole is None and units.comm.world_size > 1
            return stock(self, *args, **{**kwargs, "synced_gpus": streamed})

    specialise(module, generate=generate)


def _cache_of_call(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Estimate the bytes of the key/value cache of one call of `generate`."""
    settings = vars(kwargs.get("generation_config") or module.generation_config) | kwargs
    tensors = (value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.dim() > 1)
    rows, tokens = next((value.shape[:2] for value in tensors), (1, 0))
    copies = max(settings.get(name) or 1 for name in ("num_beams", "num_return_sequences"))
    new = settings.get("max_new_tokens") or settings.get("max_length") or DEFAULT_NEW_TOKENS
    return cache_bytes(module, rows * copies, tokens + new)
