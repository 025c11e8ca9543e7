"""Initialise the weights of a model on meta after sharding, one flat parameter at a time, by the rules of its family.

transformers does not initialise a tensor or module with the flag `_is_hf_initialized`. The flag selects what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.model import Exact, ShardedModel
from ftkit.spec.layout import Span
from ftkit.spec.tiers import DEVICE

Initialiser = Callable[[Any], object]


def mark_initialised(thing: Tensor | nn.Module, *, done: bool = True) -> None:
    """Set transformers' flag of a tensor or module: whether it is initialised."""
    marked: Any = thing
    marked._is_hf_initialized = done


def unmark(tensor: Tensor) -> None:
    """Remove the flag of a tensor that has it."""
    marked: Any = tensor
    del marked._is_hf_initialized


def fill_weights(flat: FlatParameter, put: Callable[[Span, Tensor], object]) -> None:
    """Let `put` write each tensor's part of this rank's weights: the whole tensor where the flat parameter is resident."""
    if flat.full is None:
        flat.fill(flat.weights, put)
        return
    for span in flat.layout.spans(0, flat.layout.numel):
        put(span, flat.full[span.start : span.stop])


def initialise(units: ShardedModel, missing: set[str]) -> dict[str, Exact]:
    """Initialise the tensors in `missing` with the model's own rules, the same on any number of ranks.

    Returns:
        Name of each trained flat parameter of 16 bits that was initialised to a function that gives its weights in fp32.
    """
    if not missing:
        return {}
    device = units.comm.device
    seed = units.comm.same(int(torch.randint(1 << 62, ()).item()))  # ranks need not have the same random numbers
    flats = [f for f in units.flats if missing.intersection(segment.name for segment in f.layout.segments)]
    home = device if units.tiers.tier("state") == DEVICE else torch.device("cpu")
    owners = [_owners(units.model, flat) for flat in flats]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _set_aside(units.model):
        torch.manual_seed(seed)
        fresh = {flat.name: _initialise_flat(flat, own, missing, home) for flat, own in zip(flats, owners)}
    return {flat.name: fresh[flat.name] for flat in flats if flat.trainable and flat.dtype != torch.float32}


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Replace every parameter by a marked tensor on meta while the body runs, and mark the buffers.

    A module's initialiser may write to everything below it, also to tensors of other flat parameters.
    """
    own = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    buffers = list(model.buffers())
    for module, key, parameter in own:
        module._parameters[key] = _empty(parameter)
    for buffer in buffers:
        mark_initialised(buffer)
    try:
        yield
    finally:
        for module, key, parameter in own:
            module._parameters[key] = parameter
        for buffer in buffers:
            unmark(buffer)


def _empty(parameter: Tensor) -> nn.Parameter:
    empty = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
    mark_initialised(empty)
    return empty


Owner = tuple[nn.Module, dict[str, int], Initialiser]
"""A module, its parameters in a flat parameter (attribute to index), and the function that initialises it."""


def _initialise_flat(flat: FlatParameter, owners: list[Owner], missing: set[str], home: torch.device) -> Exact:
    """Initialise one flat parameter in fp32, whole. Each rank keeps its part, at `home`, where the master will be made."""
    full = torch.zeros(flat.layout.padded_numel, dtype=torch.float32, device=flat.comm.device)
    fresh = []
    for segment in flat.layout.segments:
        value = nn.Parameter(full[segment.start : segment.stop].view(segment.shape), requires_grad=False)
        mark_initialised(value, done=segment.name not in missing)
        fresh.append(value)
    for module, places, _ in owners:
        module._parameters.update({key: fresh[index] for key, index in places.items()})
    for module, _, initialiser in owners:
        mark_initialised(module, done=False)
        initialiser(module)
    for module, places, _ in owners:
        module._parameters.update({key: _empty(flat.parameters[index]) for key, index in places.items()})
    fill_weights(flat, lambda span, out: span.segment.name in missing and out.copy_(full[span.start : span.stop]))
    first, last = flat.layout.shard_range(flat.rank)
    own = full[first:last].to(home, copy=True)

    def fill(start: int, out: Tensor) -> None:
        begin = first + start
        for span in flat.layout.spans(begin, begin + out.numel()):
            if span.segment.name in missing:
                out[span.start - begin : span.stop - begin].copy_(own[span.start - first : span.stop - first])

    return fill


def _owners(model: nn.Module, flat: FlatParameter) -> list[Owner]:
    """Return the modules with parameters of a flat parameter in or below them, each with the initialiser of its model.

    Children come first, as in transformers: some families scale a weight in the module above the one that has it.
    """
    indices = {id(parameter): index for index, parameter in enumerate(flat.parameters)}
    owners: list[Owner] = []
    placed: set[int] = set()  # a tied weight is initialised at its first place: the embedding, not the head

    def walk(module: nn.Module, initialiser: Initialiser) -> bool:
        if isinstance(module, PreTrainedModel):
            initialiser = module._init_weights
        below = [walk(child, initialiser) for child in module.children()]
        own = {key: indices[id(p)] for key, p in module._parameters.items() if id(p) in indices}
        places = {key: index for key, index in own.items() if index not in placed}
        placed.update(own.values())
        if concerned := bool(own) or any(below):
            owners.append((module, places, initialiser))
        if isinstance(module, LoraLayer) and any(
            id(parameter) in indices for name, parameter in module.named_parameters() if name.startswith("lora_")
        ):
            owners.append((module, {}, reset_adapter))  # after its parts, which transformers initialises as any layer
        return concerned

    def reset_adapter(layer: LoraLayer) -> None:
        configs: Any = cast(PeftModel, model).peft_config
        for name in layer.active_adapters:
            layer.reset_lora_parameters(name, configs[name].init_lora_weights)

    walk(model, lambda module: None)
    return owners
