"""Where the weights of a model come from between `load_model` and `shard`, and what was done to them meanwhile.

`fill` gives a model on meta the weights of a folder: parameters of mapped files (`mapped.py`), which are ordinary tensors
with true values. PEFT, transformers and the user may therefore do to the model what they do to one of from_pretrained.

`settle` comes first in `shard`. It sorts the parameters by what they are by then:

    still the mapped tensor, unwritten     -> absent; each rank streams its own ranges from the file
    a value (replaced, written to, added)  -> kept; the same on all ranks, rank 0's where they differ, as under DDP
    on meta, from a bare configuration     -> initialised after sharding
    on meta otherwise                      -> refused by name

The memory decides, not the name: a layer that was moved, renamed, duplicated or deleted keeps its own weights.

Where a file has another dtype than the configuration asks for, a cast to the file's own (`.float()`) changes nothing that
could be seen. So modules of such weights carry an empty buffer, which a cast changes too, until the model is sharded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.placeholder import absent
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.hf.weights.agreement import agree
from ftkit.hf.weights.mapped import MappedFile, Stored, written
from ftkit.hf.weights.marks import mark_initialised, unmark
from ftkit.hf.weights.narrowing import Narrowing
from ftkit.hf.weights.own_memory import separate
from ftkit.hf.weights.tensor_names import Places, find_places, matches

logger = logging.getLogger(__name__)


CAST = "_ftkit_cast"
"""Name of the buffer that tells whether a module was cast."""
NOT_CAST = torch.float64
"""Its dtype, until somebody does; no file's parameter is still the file's after a cast to this one."""


@dataclass
class LoadReport:
    """What a load found: tensor names that were missing and initialised anew, and names in the folder nobody wanted.

    `narrowing` is what becomes of wider weights in fp16, of those that this rank has read.
    """

    initialised: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    bytes_read: int = 0
    narrowing: Narrowing = field(default_factory=Narrowing)


@dataclass
class WeightSource:
    """Where the weights of a model come from.

    Args:
        model: the inner model that the folder describes.
        files: the folder's safetensors files.
        report: what the last load found.
        stored: address of each of the folder's parameters to its place in a file.
        made: parameters on meta that a bare configuration made, by identity, each with its version, which counts writes.
        streamed: after sharding, name in the sharded model to (file, name in the file), for what was read from files.
        initialised: after sharding, names of the tensors that began on meta.
    """

    model: PreTrainedModel
    files: list[Path]
    report: LoadReport | None = None
    stored: dict[int, Stored] = field(default_factory=dict)
    made: dict[int, tuple[nn.Parameter, int]] = field(default_factory=dict)
    streamed: dict[str, tuple[Path, str]] = field(default_factory=dict)
    initialised: set[str] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        """Let a copy of the model have what a copy has: values of its own, which come from no file any more."""
        made = [(parameter, parameter._version == version) for parameter, version in self.made.values()]
        return {**vars(self), "stored": {}, "made": made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = {id(each): (each, each._version if unwritten else -1) for each, unwritten in state["made"]}
        vars(self).update({**state, "made": made})


def source_of(model: nn.Module) -> WeightSource | None:
    """Return what `load_model` noted on a model, or on a model inside it."""
    return next(iter(_sources(model)), None)


def _sources(model: nn.Module) -> Iterator[WeightSource]:
    for module in model.modules():
        source = vars(module).get("_ftkit_source")
        if isinstance(source, WeightSource):
            yield source


# --- from a folder into the model


def fill(model: PreTrainedModel, files: list[Path]) -> WeightSource:
    """Give a model on meta the weights of its folder, and what the folder lacks by transformers' own initialisation.

    Args:
        model: the model; its parameters are on meta, its buffers are not.
        files: the folder's safetensors files.

    Returns:
        The source; its report says what was initialised and what was not used.

    Raises:
        UserError: for wrong shapes, tensors that would have to be cut or merged, files that share no tensor with the model,
            and blocks that lack weights.

    Cost: no memory but for what is initialised. Two tied tensors that the folder has both are compared.
    """
    report = LoadReport()
    source = WeightSource(model, files, report)
    with ExitStack() as stack:
        opened = [stack.enter_context(TensorFile(path)) for path in files]
        bindings = _bindings(model)
        names = {name for places in bindings.values() for name, _, _ in places}
        places, report.unused = find_places(model, opened, "", names, {})
        _check(model, places)
        if not places:
            raise UserError(f"{files[0].parent}: none of its tensors belongs to a {type(model).__name__}")
        _untie(model, bindings, places)
        missing = []
        loaded: list[Tensor] = []
        mapped = {file.path: MappedFile(file.path) for file in opened}
        for members in _bindings(model).values():
            name = next((name for name, _, _ in members if name in places), None)
            old = getattr(members[0][1], members[0][2])
            if name is None:
                missing.append((members, old))
                continue
            file, key = places[name]
            stored = Stored(mapped[file.path], key, file.entries[key], old.dtype)
            value = stored.file.tensor(stored.entry)
            source.stored[value.data_ptr()] = stored
            loaded.append(_register(members, old, value))
            for _, module, _ in members if value.dtype != old.dtype else ():
                module.register_buffer(CAST, torch.empty(0, dtype=NOT_CAST), persistent=False)
        loaded += load_buffers(model, places)
    _initialise_missing(source, missing)
    for tensor in loaded:
        mark_initialised(tensor)  # as from_pretrained leaves it: `model._init_weights(layer)` passes it by
    return source


_Binding = tuple[str, nn.Module, str]


def _bindings(model: nn.Module) -> dict[int, list[_Binding]]:
    """Return for each parameter, by identity and in model order, all places where it is registered."""
    found: dict[int, list[_Binding]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            found.setdefault(id(parameter), []).append((name, module, attribute))
    return found


def _register(members: list[_Binding], old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Put a parameter with `value` in all places of `old`, with what its module noted on that."""
    new = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
    new.__dict__.update(vars(old))
    for _, module, attribute in members:
        module.register_parameter(attribute, new)
    return new


def _check(model: PreTrainedModel, places: Places) -> None:
    wrong = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in places:
            file, key = places[name]
            entry = file.entries[key]
            if entry.dtype is None:
                raise UserError(f"{file.path}: {key} has a dtype that ftkit cannot read (quantised weights?)")
            if entry.shape != tuple(parameter.shape):
                wrong.append(f"{key} is {list(entry.shape)}, the model needs {list(parameter.shape)}")
    if wrong:
        folder = next(iter(places.values()))[0].path.parent
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(f"{folder}: shapes differ from config.json: {'; '.join(wrong[:3])}{more}")


def _untie(model: PreTrainedModel, bindings: dict[int, list[_Binding]], places: Places) -> None:
    """Give tied names parameters of their own where the folder has different values for them, as from_pretrained does."""
    for members in bindings.values():
        here = [binding for binding in members if binding[0] in places]
        for binding in here[1:]:
            name, module, attribute = binding
            if name in model.all_tied_weights_keys and not _equal(places[here[0][0]], places[name]):
                old = getattr(module, attribute)
                _register([binding], old, torch.empty_like(old))
                model.all_tied_weights_keys.pop(name)
                logger.warning(
                    "%s: the configuration ties %s to %s and the folder has other values for it: it is not tied. Set "
                    "tie_word_embeddings to false in config.json",
                    places[name][0].path.parent,
                    name,
                    here[0][0],
                )


COMPARED_NUMEL = 1 << 20
"""Elements of two tied tensors that are compared at a time."""


def _equal(one: tuple[TensorFile, str], other: tuple[TensorFile, str]) -> bool:
    (file, key), (second, name) = one, other
    if (file.path, key) == (second.path, name):
        return True
    numel, dtype = file.entries[key].numel, file.entries[key].dtype
    for low in range(0, numel, COMPARED_NUMEL):
        parts = [torch.empty(min(COMPARED_NUMEL, numel - low), dtype=dtype) for _ in range(2)]
        file.read(key, low, parts[0])
        second.read(name, low, parts[1])
        if not torch.equal(*parts):
            return False
    return True


def load_buffers(model: PreTrainedModel, places: Places) -> list[Tensor]:
    """Read the buffers that files have, and return them."""
    found = []
    for name, buffer in model.named_buffers():
        place = places.get(f"buffer:{name}")
        if place is not None and place[0].entries[place[1]].shape == tuple(buffer.shape):
            place[0].read(place[1], 0, buffer.view(-1))
            found.append(buffer)
    return found


def _initialise_missing(source: WeightSource, missing: list[tuple[list[_Binding], nn.Parameter]]) -> None:
    """Let transformers initialise what the folder lacks, with the random numbers that from_pretrained would use.

    Raises:
        UserError: if a block lacks a tensor: a new head may begin at random, a block of a pretrained model may not.
    """
    model, files, report = source.model, source.files, source.report
    assert report is not None
    if not missing:
        return
    names = [members[0][0] for members, _ in missing]
    report.initialised = sorted(name for name in names if not matches(name, model._keys_to_ignore_on_load_missing))
    whole = set(model._no_split_modules or ())
    blocks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in whole
    ]
    holes = [name for name in report.initialised if any(name.startswith(f"{block}.") for block in blocks)]
    if holes:
        more = f" and {len(holes) - 1} more" if len(holes) > 1 else ""
        raise UserError(
            f"{files[0].parent}: lacks {holes[0]}{more}: the folder is incomplete, or belongs to another model than its "
            "config.json says; fetch it again"
        )
    fresh = {id(_register(members, old, torch.empty_like(old, device="cpu"))) for members, old in missing}
    marked = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in fresh]
    for tensor in marked:
        mark_initialised(tensor)
    for module in model.modules():
        mark_initialised(module, done=not any(id(parameter) in fresh for parameter in module.parameters()))
    model.initialize_weights()
    for tensor in marked:
        unmark(tensor)


# --- from the model to shards


@dataclass
class Settled:
    """A model's parameters on the eve of sharding. As a context manager it puts their values back if sharding fails.

    Args:
        streamed: parameter, by identity, to its place in a file.
        meta: names of the parameters on meta.
        values: the parameters that were made absent, with the values that they had.
        casts: modules with the buffers that told of casts.
    """

    streamed: dict[int, Stored] = field(default_factory=dict)
    meta: set[str] = field(default_factory=set)
    values: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    casts: list[tuple[nn.Module, Tensor]] = field(default_factory=list)

    def __enter__(self) -> Settled:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            for parameter, value in self.values:
                parameter.data = value
            for module, cast in self.casts:
                module.register_buffer(CAST, cast, persistent=False)
        self.values.clear()
        self.casts.clear()

    def note(self, units: ShardedModel, source: WeightSource) -> None:
        """Note on `source` which tensors of the sharded model files have and which are to be initialised."""
        names = {key: flat.layout.segments[index].name for key, (flat, index) in units.places.items()}
        source.streamed = {names[key]: (place.file.path, place.key) for key, place in self.streamed.items()}
        source.initialised = self.meta
        source.stored.clear()  # the files are unmapped
        source.made.clear()
        self.streamed.clear()


def on_meta(model: nn.Module) -> set[str]:
    """Return the names of a model's parameters on meta."""
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


def settle(model: nn.Module, comm: Communicator) -> Settled:
    """Sort a model's parameters by where their values are, and make those that files still have absent. A collective.

    Raises:
        UserError: for a parameter on meta that nothing can give a value, one on meta that was written to, trained ones that
            share memory, and parameters that differ among ranks in name, shape or dtype.

    Cost: on several ranks a pass over all values that are in memory.
    """
    sources = list(_sources(model))
    stored = {address: place for source in sources for address, place in source.stored.items()}
    changed = written(stored.values())
    _refuse_meta(model, sources)
    separate(model)
    marks = ((each, each._buffers.get(CAST)) for each in model.modules())
    settled = Settled(casts=[(each, mark) for each, mark in marks if mark is not None])
    cast = {id(each) for module, told in settled.casts if told.dtype != NOT_CAST for each in module._parameters.values()}
    found: dict[str, Stored] = {}
    for name, parameter in model.named_parameters():
        place = None if parameter.is_meta else stored.get(parameter.data_ptr())
        if place is None or not place.is_still(parameter):
            continue
        if id(parameter) in cast:
            place = replace(place, dtype=parameter.dtype)
        if place.address in changed or parameter.dim() == 0:  # (an absent scalar cannot be seen to be absent)
            parameter.data = parameter.data.to(place.dtype)
        else:
            found[name] = place
    kept = agree(model, {name: f"{place.file.path.name}:{place.key}" for name, place in found.items()}, comm)
    for module, _ in settled.casts:
        del module._buffers[CAST]
        module._non_persistent_buffers_set.discard(CAST)
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.data = parameter.data.to(found[name].dtype)
        elif name in found:
            settled.streamed[id(parameter)] = found[name]
            settled.values.append((parameter, parameter.data))
            parameter.data = absent(parameter, parameter.device, found[name].dtype)
    return settled


def _refuse_meta(model: nn.Module, sources: list[WeightSource]) -> None:
    made = {key: member for source in sources for key, member in source.made.items()}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        if id(parameter) in made and parameter._version != made[id(parameter)][1]:
            raise UserError(
                f"{name} was written to while the model was on the meta device, which keeps no values: write after "
                "ftkit.shard(), or save the model's folder first and load that with ftkit.load_model(folder)"
            )
        if id(parameter) not in made and _lora(model, name):
            for config in cast(PeftModel, model).peft_config.values():
                check_adapter(config)
        elif id(parameter) not in made:
            raise UserError(
                f"{name} is on the meta device and has no value, and ftkit.load_model did not make it: give it one before "
                "sharding (PEFT: leave low_cpu_mem_usage off), or load a folder of weights with ftkit.load_model(folder)"
            )


def check_adapter(adapter: PeftConfig) -> None:
    """Refuse an adapter that cannot be initialised on a base without weights.

    Raises:
        UserError: for all but LoRA with its plain first values.
    """
    plain = isinstance(adapter, LoraConfig) and adapter.init_lora_weights in (True, "gaussian")
    plain = plain and not (adapter.use_dora or adapter.trainable_token_indices)  # type: ignore[attr-defined]  # LoRA's
    if not plain:
        raise UserError(
            f"adapter: {PeftType(adapter.peft_type).value} with these settings is initialised from the base's weights, and "
            "a model of a bare configuration has none. Save such a model first and load its folder with "
            "ftkit.load_model(folder), or build it with from_config(), apply get_peft_model(), and give the result to the "
            "Trainer"
        )


def _lora(model: nn.Module, name: str) -> bool:
    """Return whether a parameter on meta is one of LoRA's matrices."""
    matrices = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}
    return isinstance(model, PeftModel) and not matrices.isdisjoint(name.split("."))
