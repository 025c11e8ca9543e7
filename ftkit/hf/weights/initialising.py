"""First values of a model on meta, drawn after sharding, line by line, by the rules of its family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.model import Exact, ShardedModel
from ftkit.hf.weights.marks import mark_initialised, unmark
from ftkit.spec.layout import Span
from ftkit.spec.tiers import DEVICE


def fill_weights(flat: FlatParameter, put: Callable[[Span, Tensor], object]) -> None:
    """Let `put` write each tensor's part of what this rank holds of a line: all of it where it is resident."""
    if flat.full is None:
        flat.fill(flat.weights, put)
        return
    for span in flat.layout.spans(0, flat.layout.numel):
        put(span, flat.full[span.start : span.stop])


def initialise(units: ShardedModel, missing: set[str]) -> dict[str, Exact]:
    """Initialise the tensors in `missing` with the models' own rules, the same on any number of ranks.

    Returns:
        For each trained line of 16 bits that was concerned, what gives its new weights in fp32.
    """
    if not missing:
        return {}
    device = units.comm.device
    seed = units.comm.same(int(torch.randint(1 << 62, ()).item()))  # ranks need not have the same random numbers
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        concerned = [f for f in units.flats if missing.intersection(segment.name for segment in f.layout.segments)]
        home = device if units.tiers.tier("state") == DEVICE else torch.device("cpu")
        owners = [_owners(units.model, flat) for flat in concerned]
        with _set_aside(units.model):
            fresh = {flat.name: _initialise_line(flat, line, missing, home) for flat, line in zip(concerned, owners)}
    return {flat.name: fresh[flat.name] for flat in concerned if flat.trainable and flat.dtype != torch.float32}


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Put empty tensors, marked as done, in the place of every parameter while the body runs, and mark the buffers.

    A module's initialiser may write to all that is below it, of which other lines hold some.
    """
    held = [(module, key, p) for module in model.modules() for key, p in module._parameters.items() if p is not None]
    buffers = list(model.buffers())
    for module, key, parameter in held:
        module._parameters[key] = _empty(parameter)
    for buffer in buffers:
        mark_initialised(buffer)
    try:
        yield
    finally:
        for module, key, parameter in held:
            module._parameters[key] = parameter
        for buffer in buffers:
            unmark(buffer)


def _empty(parameter: Tensor) -> nn.Parameter:
    empty = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
    mark_initialised(empty)
    return empty


def _initialise_line(flat: FlatParameter, owners: list[Owner], missing: set[str], home: torch.device) -> Exact:
    """Initialise one line, the others being set aside: in fp32, whole, each rank keeping its part, at `home`, which is
    where the master will be made of it.
    """
    full = torch.zeros(flat.layout.padded_numel, dtype=torch.float32, device=flat.comm.device)
    fresh = []
    for segment in flat.layout.segments:
        value = nn.Parameter(full[segment.start : segment.stop].view(segment.shape), requires_grad=False)
        mark_initialised(value, done=segment.name not in missing)
        fresh.append(value)
    _register(owners, fresh)
    try:
        for owner in owners:
            mark_initialised(owner.module, done=False)
            owner.initialise(owner.module)
    finally:
        _register(owners, [_empty(parameter) for parameter in flat.parameters])
    fill_weights(flat, lambda span, out: span.segment.name in missing and out.copy_(full[span.start : span.stop]))
    first, last = flat.layout.shard_range(flat.rank)
    own = full[first:last].to(home, copy=True)

    def fill(start: int, out: Tensor) -> None:
        begin = first + start
        for span in flat.layout.spans(begin, begin + out.numel()):
            if span.segment.name in missing:
                out[span.start - begin : span.stop - begin].copy_(own[span.start - first : span.stop - first])

    return fill


@dataclass(frozen=True)
class Owner:
    """A module with parameters of one line in or below it: its own, with their index there, and who initialises it."""

    module: nn.Module
    places: tuple[tuple[str, int], ...]
    initialise: Callable[[nn.Module], None]


def _owners(model: nn.Module, flat: FlatParameter) -> list[Owner]:
    """Return the modules with the line's parameters in or below them, each with the `_init_weights` of its model.

    Children come first, as in transformers: some families give a weight its scale in the module above the one that has it.
    """
    indices = {id(parameter): index for index, parameter in enumerate(flat.parameters)}
    owners: list[Owner] = []
    placed: set[int] = set()  # a tied weight is initialised where it stands first: an embedding, not the head tied to it

    def walk(module: nn.Module, initialise: Callable[[nn.Module], None]) -> bool:
        if isinstance(module, PreTrainedModel):
            initialise = module._init_weights
        below = [walk(child, initialise) for child in module.children()]
        own = {key: indices[id(p)] for key, p in module._parameters.items() if id(p) in indices}
        places = tuple((key, index) for key, index in own.items() if index not in placed)
        placed.update(own.values())
        if concerned := bool(own) or any(below):
            owners.append(Owner(module, places, initialise))
        if isinstance(module, LoraLayer) and any(
            id(parameter) in indices for name, parameter in module.named_parameters() if name.startswith("lora_")
        ):
            owners.append(Owner(module, (), reset_adapter))  # after its parts: what transformers gave them is not LoRA's
        return concerned

    def reset_adapter(module: Any) -> None:
        configs: Any = cast(PeftModel, model).peft_config
        for name in module.active_adapters:
            module.reset_lora_parameters(name, configs[name].init_lora_weights)

    walk(model, lambda module: None)
    return owners


def _register(owners: list[Owner], values: Sequence[nn.Parameter]) -> None:
    """Put `values` where the line's parameters are registered."""
    for owner in owners:
        for key, index in owner.places:
            owner.module._parameters[key] = values[index]
