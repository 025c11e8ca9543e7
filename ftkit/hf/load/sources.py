"""Provenance of a model's weights between `load_model` and `shard`.

`fill` gives a model on meta the weights of its folder as tensors of privately mapped files. They are ordinary CPU tensors
with true values, read page by page on use; a write copies a page for this process alone. PEFT, transformers and users may
therefore change the model as they change a model of from_pretrained.

`settle` is the first step of `shard`. It sorts the parameters:

    still the mapped tensor, unwritten     -> absent; each rank streams its own ranges from the file
    any other value                        -> kept; rank 0's where ranks differ, as in DDP
    on meta, from a bare configuration     -> initialised after sharding
    on meta otherwise                      -> refused by name

The address decides, not the name: a layer that was moved, renamed or duplicated keeps its own weights. If a file has
another dtype than the configuration, a cast to the file's own dtype has no effect: the configuration's dtype is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import xxhash
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.placeholder import absent, is_absent
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.hf.adapters import adapter_parameters, check_plain_lora
from ftkit.hf.load.initialise import mark_initialised, unmark
from ftkit.hf.load.names import Places, check_shapes, find_places, matches
from ftkit.hf.save.finite import Narrowing

logger = logging.getLogger(__name__)

DIGEST_BYTES = 64 << 20
"""Bytes of a tensor that are copied to the host at a time for its digest."""


@dataclass
class LoadReport:
    """Result of a load.

    Args:
        initialised: Names of tensors that no file contains and that were initialised.
        unused: Names of tensors in the files that the model does not have.
        bytes_read: Bytes that this rank read.
        narrowing: Weights that this rank read and that are not finite, or that fp16 does not represent.
    """

    initialised: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    bytes_read: int = 0
    narrowing: Narrowing = field(default_factory=Narrowing)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file that a parameter was given.

    Args:
        value: The mapped tensor. Keeps the mapping, so that no other tensor gets its address.
        path: The file.
        key: Name of the tensor in the file.
        dtype: Dtype of the parameter according to the configuration.
    """

    value: Tensor
    path: Path
    key: str
    dtype: torch.dtype

    def is_written(self) -> bool:
        """Return whether the mapped tensor has other values than the file.

        The version counter of a tensor does not see `weight.data += delta`, by which PEFT merges adapters and initialises
        OLoRA. The kernel does: a written page belongs to the process and no longer to the file. Only then, or if the kernel
        does not say, the tensor is compared with the file.
        """
        page, start = os.sysconf("SC_PAGE_SIZE"), self.value.data_ptr()
        first, last = start // page, (start + self.value.nbytes - 1) // page
        try:
            with open("/proc/self/pagemap", "rb") as pages:
                pages.seek(8 * first)
                entries = numpy.frombuffer(pages.read(8 * (last - first + 1)), dtype=numpy.uint64)
            in_memory, of_file = (entries >> 62) != 0, (entries >> 61) & 1 != 0
            if not (in_memory & ~of_file).any():
                return False
        except OSError:
            pass
        with safe_open(self.path, framework="pt") as file:
            return not torch.equal(self.value, file.get_tensor(self.key))

    def is_value_of(self, parameter: Tensor) -> bool:
        """Return whether a parameter at this address is the whole tensor, unchanged in form."""
        return parameter.dtype == self.value.dtype and parameter.shape == self.value.shape and parameter.is_contiguous()


@dataclass
class WeightSource:
    """Origin of the weights of a model.

    Args:
        files: The folder's safetensors files.
        report: Result of the last load.
        stored: Address of each of the folder's tensors to its place in a file.
        made: Parameters on meta that a bare configuration made, each with its version, which counts in-place writes.
        streamed: After sharding, name in the sharded model to (file, name in the file) of what was read from files.
        initialised: After sharding, names of the tensors that began on meta.
    """

    files: list[Path]
    report: LoadReport | None = None
    stored: dict[int, Stored] = field(default_factory=dict)
    made: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    streamed: dict[str, tuple[Path, str]] = field(default_factory=dict)
    initialised: set[str] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy. A copied model has values of its own."""
        return {**vars(self), "stored": {}}


def source_of(model: nn.Module) -> WeightSource | None:
    """Return the source that `load_model` attached to a model, or to a model inside it."""
    return next(iter(_sources(model)), None)


def _sources(model: nn.Module) -> list[WeightSource]:
    return [vars(module)["_ftkit_source"] for module in model.modules() if "_ftkit_source" in vars(module)]


# --- from a folder into the model


def fill(model: PreTrainedModel, files: list[Path]) -> WeightSource:
    """Give a model on meta the weights of its folder, and initialise what the folder lacks as transformers does.

    Args:
        model: The model; its parameters are on meta, its buffers are not.
        files: The folder's safetensors files.

    Raises:
        UserError: For wrong shapes, tensors that transformers would split or merge, files that share no tensor with the
            model, and blocks that lack weights.

    Cost: no memory except for what is initialised. Two tied tensors that the folder has both are compared.
    """
    source = WeightSource(files, LoadReport())
    assert source.report is not None
    with ExitStack() as stack:
        opened = [stack.enter_context(TensorFile(path)) for path in files]  # checks the headers
        shapes = {name: getattr(module, key).shape for each in _bindings(model).values() for name, module, key in each}
        places, source.report.unused = find_places(model, opened, "", set(shapes), {})
        check_shapes(shapes, places)
        mapped = {path: stack.enter_context(safe_open(path, framework="pt")) for path in files}
        values = {name: mapped[file.path].get_tensor(key) for name, (file, key) in places.items() if name in shapes}
        _untie(model, values, files[0].parent)
        missing = []
        loaded: list[Tensor] = []
        for members in _bindings(model).values():
            name = next((name for name, _, _ in members if name in values), None)
            old = getattr(members[0][1], members[0][2])
            if name is None:
                missing.append((members, old))
                continue
            file, key = places[name]
            loaded.append(_register(members, old, values[name]))
            source.stored[loaded[-1].data_ptr()] = Stored(values[name], file.path, key, old.dtype)
        loaded += load_buffers(model, places)
    source.report.initialised = _initialise_missing(model, missing, files[0].parent)
    for tensor in loaded:
        mark_initialised(tensor)  # as from_pretrained: `model._init_weights(layer)` leaves it unchanged
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
    """Put a parameter with `value` in all places of `old`, with the attributes of `old`."""
    new = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
    new.__dict__.update(vars(old))
    for _, module, attribute in members:
        module.register_parameter(attribute, new)
    return new


def _untie(model: PreTrainedModel, values: Mapping[str, Tensor], folder: Path) -> None:
    """Give tied names parameters of their own if the folder has different values for them, as from_pretrained does."""
    for members in _bindings(model).values():
        stored = [binding for binding in members if binding[0] in values]
        for name, module, attribute in stored[1:]:
            first = stored[0][0]
            if name in model.all_tied_weights_keys and not torch.equal(values[first], values[name]):
                old = getattr(module, attribute)
                _register([(name, module, attribute)], old, torch.empty_like(old))
                model.all_tied_weights_keys.pop(name)
                logger.warning(
                    "%s: the configuration ties %s to %s, but the folder has different values for them: they are not tied. "
                    "Set tie_word_embeddings to false in config.json",
                    folder,
                    name,
                    first,
                )


def load_buffers(model: PreTrainedModel, places: Places) -> list[Tensor]:
    """Read the buffers that files contain, and return them."""
    found = []
    for name, buffer in model.named_buffers():
        place = places.get(f"buffer:{name}")
        if place is not None and place[0].entries[place[1]].shape == tuple(buffer.shape):
            place[0].read(place[1], 0, buffer.view(-1))
            found.append(buffer)
    return found


def _initialise_missing(
    model: PreTrainedModel, missing: list[tuple[list[_Binding], nn.Parameter]], folder: Path
) -> list[str]:
    """Let transformers initialise what the folder lacks, with the random numbers of from_pretrained; return the names.

    Raises:
        UserError: See `refuse_incomplete`.
    """
    if not missing:
        return []
    names = [members[0][0] for members, _ in missing]
    initialised = sorted(name for name in names if not matches(name, model._keys_to_ignore_on_load_missing))
    refuse_incomplete(model, initialised, folder)
    fresh = {id(_register(members, old, torch.empty_like(old, device="cpu"))) for members, old in missing}
    marked = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in fresh]
    for tensor in marked:
        mark_initialised(tensor)
    for module in model.modules():
        mark_initialised(module, done=not any(id(parameter) in fresh for parameter in module.parameters()))
    model.initialize_weights()
    for tensor in marked:
        unmark(tensor)
    return initialised


def refuse_incomplete(model: nn.Module, missing: list[str], folder: Path) -> None:
    """Refuse a folder that lacks weights of a block. A new head may begin at random, a block of a pretrained model may not.

    Args:
        model: The model, sharded or not.
        missing: Names of the parameters that no file contains.
        folder: The folder, for the error.

    Raises:
        UserError: A block lacks weights.
    """
    kinds = {kind for module in model.modules() for kind in getattr(module, "_no_split_modules", None) or ()}
    blocks = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in kinds
    )
    holes = [name for name in missing if name.startswith(blocks)]
    if holes:
        more = f" and {len(holes) - 1} more" if len(holes) > 1 else ""
        raise UserError(
            f"{folder}: lacks {holes[0]}{more}: the folder is incomplete, or belongs to another model than its config.json "
            "says; fetch it again"
        )


# --- from the model to shards


@dataclass
class Settled:
    """Parameters of a model that is being sharded. As a context manager it restores their values if sharding fails.

    Args:
        streamed: Parameter, by identity, to its place in a file.
        meta: Names of the parameters on meta.
        values: Parameters that were made absent, with their values.
    """

    streamed: dict[int, Stored] = field(default_factory=dict)
    meta: set[str] = field(default_factory=set)
    values: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def __enter__(self) -> Settled:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for parameter, value in self.values if kind is not None else ():
            parameter.data = value
        self.values.clear()

    def note(self, units: ShardedModel, source: WeightSource) -> None:
        """Note on `source` which tensors of the sharded model are in files and which are to be initialised."""
        names = {key: flat.layout.segments[index].name for key, (flat, index) in units.places.items()}
        source.streamed = {names[key]: (place.path, place.key) for key, place in self.streamed.items()}
        source.initialised = self.meta
        source.stored.clear()  # unmaps the files
        source.made.clear()
        self.streamed.clear()


def on_meta(model: nn.Module) -> set[str]:
    """Return the names of a model's parameters on meta."""
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


def settle(model: nn.Module, comm: Communicator) -> Settled:
    """Sort a model's parameters by provenance, and make those absent that files still contain. A collective.

    Raises:
        UserError: For a parameter on meta without a value, trained parameters that share memory, and parameters that differ
            among ranks in name, shape or dtype.

    Cost: on several ranks a pass over all values that are in memory.
    """
    sources = _sources(model)
    stored = {address: place for source in sources for address, place in source.stored.items()}
    _refuse_meta(model, sources)
    _refuse_shared(model)
    settled = Settled()
    found: dict[str, Stored] = {}
    for name, parameter in model.named_parameters():
        place = None if parameter.is_meta else stored.get(parameter.data_ptr())
        if place is None or not place.is_value_of(parameter):
            continue
        if place.is_written() or parameter.dim() == 0:  # a scalar cannot be seen to be absent
            parameter.data = parameter.data.to(place.dtype)
        else:
            found[name] = place
    kept = agree(model, {name: f"{place.path.name}:{place.key}" for name, place in found.items()}, comm)
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.data = parameter.data.to(found[name].dtype)
        elif name in found:
            settled.streamed[id(parameter)] = found[name]
            settled.values.append((parameter, parameter.data))
            parameter.data = absent(parameter, parameter.device, found[name].dtype)
    return settled


def _refuse_shared(model: nn.Module) -> None:
    """Refuse a tie by `.data`: the two parameters would become two shards, each with an update of its own."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if is_absent(parameter) or not parameter.numel():
            continue
        other, owner = first.setdefault(parameter.data_ptr(), (name, parameter))
        if owner is not parameter and parameter.requires_grad and owner.requires_grad:
            raise UserError(
                f"{other} and {name} share memory and are two parameters: each would get its own gradient and update. "
                "To tie them, assign one parameter to both modules (module.weight = other.weight). To keep them apart, copy "
                f"one ({name}.data = {name}.data.clone()) before the model is sharded"
            )


def _refuse_meta(model: nn.Module, sources: list[WeightSource]) -> None:
    made = {id(parameter): version for source in sources for parameter, version in source.made}
    adapters = adapter_parameters(model, copies=True)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        if id(parameter) in made and parameter._version > made[id(parameter)]:
            raise UserError(
                f"{name} was written to while the model was on the meta device, which keeps no values: write after "
                "ftkit.shard(), or save the model's folder first and load that with ftkit.load_model(folder)"
            )
        if id(parameter) not in made and name in adapters:
            for config in cast(PeftModel, model).peft_config.values():
                check_plain_lora(config)
        elif id(parameter) not in made:
            raise UserError(
                f"{name} is on the meta device and has no value, and ftkit.load_model did not make it: give it one before "
                "sharding (PEFT: leave low_cpu_mem_usage off), or load a folder of weights with ftkit.load_model(folder)"
            )


def agree(model: nn.Module, stored: Mapping[str, str], comm: Communicator) -> set[str]:
    """Make parameters and buffers the same on all ranks: rank 0's, as in DDP. A collective.

    Ranks build their models alone. A new adapter or head may have been drawn from different random numbers.

    Args:
        model: The model, not yet sharded.
        stored: Name of a parameter to its place in the folder, for parameters without another value.
        comm: The ranks.

    Returns:
        Names in `stored` for which another rank has a value: they are values on this rank too.

    Raises:
        UserError: Ranks have different names, shapes or dtypes; names the parameter.

    Cost: a pass over all values in memory, and a broadcast of each that differs. On one rank nothing.
    """
    if comm.world_size == 1:
        return set()
    tensors = {**dict(model.named_parameters()), **{f"buffer {name}": buffer for name, buffer in model.named_buffers()}}
    ranks = comm.all({name: (_form(tensor), stored.get(name) or _digest(tensor)) for name, tensor in tensors.items()})
    for number, other in enumerate(ranks[1:], 1):
        for name in {**ranks[0], **other}:
            forms = [seen[name][0] if name in seen else "missing" for seen in (ranks[0], other)]
            if forms[0] != forms[1]:
                raise UserError(
                    f"{name} is {forms[0]} on rank 0 and {forms[1]} on rank {number}: build the same model on all ranks"
                )
    differing = [name for name, first in ranks[0].items() if any(other[name] != first for other in ranks[1:])]
    for name in differing:
        data = tensors[name].data
        value = data.to(comm.device, copy=True).contiguous()
        comm.broadcast(value.view(-1).view(torch.uint8))
        data.copy_(value)
    if differing and comm.rank == 0:
        logger.info("%d tensors differed among ranks, rank 0's are used: %s", len(differing), ", ".join(differing[:8]))
    return set(differing) & set(stored)


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{' on meta' if tensor.is_meta else ''}"


def _digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, computed on the host piece by piece; "" for a tensor without values."""
    if is_absent(tensor):
        return ""
    total = xxhash.xxh3_64()
    for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(DIGEST_BYTES):
        total.update(piece.cpu().numpy())
    return total.hexdigest()
