"""Initialise the weights of a model on meta after sharding, one flat parameter at a time, by the rules of its family.

transformers does not initialise a tensor or module with the flag `_is_hf_initialized`. ftkit clears the flag of the tensors
that are to be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.model import Exact, ShardedModel
from ftkit.spec.layout import Span
from ftkit.spec.tiers import DEVICE


def mark_initialised(thing: Tensor | nn.Module, *, done: bool = True) -> None:
    """Set transformers' flag of a tensor or module: whether it is initialised."""
    marked: Any = thing
    marked._is_hf_initialized = done


def fill_weights(flat: FlatParameter, put: Callable[[Span, Tensor], object]) -> None:
    """Let `put` write each tensor's part of this rank's weights: the whole tensor where the flat parameter is resident."""
    if flat.full is None:
        flat.fill(flat.weights, put)
        return
    for span in flat.layout.spans(0, flat.layout.numel):
        put(span, flat.full[span.start : span.stop])


def initialise(units: ShardedModel, missing: Set[str]) -> dict[str, Exact]:
    """Initialise the tensors in `missing` with the model's own rules, the same on any number of ranks.

    Returns:
        Name of each trained flat parameter of 16 bits that was initialised to a function that gives its weights in fp32.
    """
    if not missing:
        return {}
    device = units.comm.device
    seed = units.comm.same(int(torch.randint(1 << 62, ()).item()))  # ranks need not have the same random numbers
    flats = [f for f in units.flats if any(segment.name in missing for segment in f.layout.segments)]
    fresh: dict[str, Exact] = {}
    home = device if units.tiers.tier("state") == DEVICE else torch.device("cpu")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for flat in flats:
            exact = _initialise_flat(units.model, flat, missing, home)
            if flat.trainable and flat.dtype != torch.float32:
                fresh[flat.name] = exact
    return fresh


def _initialise_flat(model: nn.Module, flat: FlatParameter, missing: Set[str], home: torch.device) -> Exact:
    """Initialise one flat parameter in fp32, whole. Each rank keeps its part, at `home`, where the master will be made."""
    full = torch.zeros(flat.layout.padded_numel, dtype=torch.float32, device=flat.comm.device)
    segments = flat.layout.segments
    fresh = [nn.Parameter(full[s.start : s.stop].view(s.shape), requires_grad=False) for s in segments]
    for value, segment in zip(fresh, segments):
        mark_initialised(value, done=segment.name not in missing)
    with _only(model, dict(zip(map(id, flat.parameters), fresh))):
        _apply_rules(model, set(map(id, fresh)))
    fill_weights(flat, lambda span, out: span.segment.name in missing and out.copy_(full[span.start : span.stop]))
    first, last = flat.layout.shard_range(flat.rank)
    own = full[first:last].to(home, copy=True)

    def fill(start: int, out: Tensor) -> None:
        begin = first + start
        for span in flat.layout.spans(begin, begin + out.numel()):
            if span.segment.name in missing:
                out[span.start - begin : span.stop - begin].copy_(own[span.start - first : span.stop - first])

    return fill


@contextmanager
def _only(model: nn.Module, fresh: dict[int, nn.Parameter]) -> Iterator[None]:
    """Replace parameters, by identity, by `fresh` ones while the body runs, and all others by marked tensors on meta.

    A module's initialiser may write to everything below it, also to tensors of other flat parameters and to buffers. A tied
    weight is replaced at its first place alone: it begins as the embedding, not as the head.
    """
    own = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    buffers: list[Any] = list(model.buffers())
    for module, key, parameter in own:
        empty = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
        mark_initialised(empty)
        module._parameters[key] = fresh.pop(id(parameter), empty)
    for buffer in buffers:
        mark_initialised(buffer)
    try:
        yield
    finally:
        for module, key, parameter in own:
            module._parameters[key] = parameter
        for buffer in buffers:
            del buffer._is_hf_initialized


def _apply_rules(model: nn.Module, fresh: set[int]) -> None:
    """Initialise the modules with `fresh` parameters, by identity, in or below them: as transformers, then as PEFT does."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    inside: set[nn.Module] = set()
    for module in model.modules():
        mark_initialised(module, done=not any(id(parameter) in fresh for parameter in module.parameters()))
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            module.initialize_weights()
    for module in model.modules():
        if isinstance(module, LoraLayer) and any(
            id(parameter) in fresh for name, parameter in module.named_parameters() if name.startswith("lora_")
        ):
            for name in module.active_adapters:
                module.reset_lora_parameters(name, configs[name].init_lora_weights)
