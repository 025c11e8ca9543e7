"""Provenance of a model's weights between `load_model` and `shard`.

`from_files` lets transformers load a folder whose tensors are privately mapped files. The parameters are ordinary CPU
tensors with true values, read page by page on use; a write copies a page for this process alone. PEFT, transformers and
users may therefore change the model as they change a model of from_pretrained.

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
from collections.abc import Iterator, Set
from contextlib import contextmanager
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
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ftkit.engine.checkpoint.safetensors import TensorFile
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.placeholder import absent, is_absent
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.hf.adapters import adapter_parameters, check_plain_lora
from ftkit.hf.blocks import find_blocks
from ftkit.hf.load.config import reading

logger = logging.getLogger(__name__)

DIGEST_BYTES = 64 << 20
"""Bytes of a tensor that are copied to the host at a time for its digest."""


@dataclass
class Stored:
    """A mapped tensor of a file. from_pretrained reads it by `stored[...].to(...)`, and gets it without a cast.

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

    def __getitem__(self, index: object) -> Stored:
        """Return the whole tensor, as from_pretrained asks for it."""
        return self

    def to(self, **options: object) -> Tensor:
        """Return the mapped tensor. A cast would copy it into memory."""
        return self.value

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


@dataclass
class WeightSource:
    """Origin of the weights of a model.

    Args:
        files: The folder's safetensors files; none for a bare configuration.
        stored: Address of each of the folder's tensors to its place in a file.
        streamed: After sharding, name in the sharded model to (file, name in the file), for each tensor read from a file.
        initialised: After sharding, names of the tensors that began on meta.
    """

    files: list[Path] = field(default_factory=list)
    stored: dict[int, Stored] = field(default_factory=dict)
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


def from_files(model: PreTrainedModel, files: list[Path]) -> PreTrainedModel:
    """Return the model of from_pretrained, in eval mode, whose parameters are tensors of the mapped files.

    Args:
        model: The model on meta.
        files: The folder's safetensors files.

    Raises:
        UserError: For damaged files, wrong shapes, and blocks that lack weights.

    Cost: memory for initialised tensors, and for tensors that transformers splits or merges on load (mixtures of experts).
    If the folder has both of two tied tensors, they are compared.
    """
    folder = files[0].parent
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
    dtypes |= {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    mapped: dict[str, Stored] = {}
    with reading(str(folder), "its weights do not fit the model of its config.json"):
        for path in files:
            with TensorFile(path), safe_open(path, framework="pt") as file:  # the first checks the header
                values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
                mapped |= {key: Stored(value, path, key, value.dtype) for key, value in values.items()}
        options: dict[str, Any] = {"state_dict": mapped, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with _no_bar():  # `shard` reads the weights
            result: Any = type(model).from_pretrained(None, config=model.config, dtype=model.dtype, **options)
        loaded, found = result
    if found["mismatched_keys"]:
        name, shape, own = min(found["mismatched_keys"])
        raise UserError(f"{folder}: shapes differ from config.json: {name} is {[*shape]}, the model needs {[*own]}")
    _refuse_incomplete(loaded, sorted(found["missing_keys"]), folder)
    stored = {place.value.data_ptr(): place for place in mapped.values()}
    for name, parameter in loaded.named_parameters():
        place = stored.get(parameter.data_ptr())
        if place is not None and _form(place.value) == _form(parameter):
            place.dtype = dtypes[name]
        else:  # initialised, split or merged
            parameter.data = parameter.data.to(dtypes[name])
    for name, buffer in loaded.named_buffers():
        buffer.data = buffer.data.to(dtypes[name], copy=True)
    loaded._ftkit_source = WeightSource(files, stored)
    return cast(PreTrainedModel, loaded)


@contextmanager
def _no_bar() -> Iterator[None]:
    """Turn off transformers' progress bars in the body."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


def _refuse_incomplete(model: nn.Module, missing: list[str], folder: Path) -> None:
    """Refuse a folder that lacks weights of a block. A new head may begin at random, a pretrained block may not."""
    blocks = tuple(f"{name}." for name, _ in find_blocks(model))
    parameters = {name for name, _ in model.named_parameters()}
    holes = [name for name in missing if name.startswith(blocks) and name in parameters]
    if holes:
        more = f" and {len(holes) - 1} more" if len(holes) > 1 else ""
        raise UserError(
            f"{folder}: lacks {holes[0]}{more}: the folder is incomplete, or belongs to another model than its config.json "
            "says; fetch it again"
        )


# --- from the model to shards


@dataclass
class Settled:
    """Parameters of a model that is being sharded.

    Args:
        streamed: Parameters that were made absent, with their values and their places in files.
        meta: Names of the parameters on meta.
    """

    streamed: list[tuple[nn.Parameter, Tensor, Stored]] = field(default_factory=list)
    meta: set[str] = field(default_factory=set)

    def note(self, units: ShardedModel, source: WeightSource) -> None:
        """Note on `source` which tensors of the sharded model are in files and which are to be initialised."""
        for parameter, _, place in self.streamed:
            flat, index = units.places[id(parameter)]
            source.streamed[flat.layout.segments[index].name] = (place.path, place.key)
        source.initialised = self.meta
        source.stored.clear()  # unmaps the files
        self.streamed.clear()


def on_meta(model: nn.Module) -> set[str]:
    """Return the names of a model's parameters on meta."""
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


@contextmanager
def settle(model: nn.Module, comm: Communicator) -> Iterator[Settled]:
    """Sort a model's parameters by provenance, and make those absent that files still contain. A collective.

    The parameters get their values back if the body, which shards the model, raises.

    Raises:
        UserError: For a parameter on meta without a value, and parameters that differ among ranks in name, shape or dtype.

    Cost: on several ranks a pass over all values that are in memory.
    """
    _refuse_meta(model)
    stored = {address: place for source in _sources(model) for address, place in source.stored.items()}
    parameters = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    mapped = {name: stored[p.data_ptr()] for name, p in parameters.items() if p.data_ptr() in stored}
    mapped = {name: place for name, place in mapped.items() if _form(parameters[name]) == _form(place.value)}
    # A scalar cannot be seen to be absent.
    changed = {name for name, place in mapped.items() if parameters[name].dim() == 0 or place.is_written()}
    values = set().union(*comm.all(changed | parameters.keys() - mapped.keys()))
    _agree(model, mapped.keys() - values, comm)
    settled = Settled()
    for name, place in mapped.items():
        parameter = parameters[name]
        if name in values:
            parameter.data = parameter.data.to(place.dtype)
        else:
            settled.streamed.append((parameter, parameter.data, place))
            parameter.data = absent(parameter, parameter.device, place.dtype)
    try:
        yield settled
    except BaseException:
        for parameter, value, _ in settled.streamed:
            parameter.data = value
        raise


def _refuse_meta(model: nn.Module) -> None:
    """Refuse parameters on meta that nothing gives a value: only a bare configuration's are initialised after sharding."""
    names = on_meta(model)
    if names and all(source.files for source in _sources(model)):
        raise UserError(
            f"{min(names)} is on the meta device and has no value: give it one before sharding (PEFT: leave "
            "low_cpu_mem_usage off)"
        )
    if names & adapter_parameters(model, copies=True):
        for config in cast(PeftModel, model).peft_config.values():
            check_plain_lora(config)


def _agree(model: nn.Module, streamed: Set[str], comm: Communicator) -> None:
    """Make parameters and buffers the same on all ranks: rank 0's, as in DDP. A collective.

    Ranks build their models alone. A new adapter or head may have been drawn from different random numbers.

    Args:
        model: The model, not yet sharded.
        streamed: Names of the parameters that have no other values than the files'.
        comm: The ranks.

    Raises:
        UserError: Ranks have different names, shapes or dtypes; names the parameter.

    Cost: a pass over all values in memory, and a broadcast of each that differs. On one rank nothing.
    """
    if comm.world_size == 1:
        return
    tensors = {**dict(model.named_parameters()), **{f"buffer {name}": buffer for name, buffer in model.named_buffers()}}
    ranks = comm.all({name: (_form(t), _digest(t) if name not in streamed else "") for name, t in tensors.items()})
    for name in sorted(set().union(*ranks)):
        found = [own[name][0] if name in own else "missing" for own in ranks]
        if len(set(found)) > 1:
            raise UserError(f"{name} differs among ranks ({', '.join(found)}): build the same model on all ranks")
    differing = [name for name, first in ranks[0].items() if any(other[name] != first for other in ranks[1:])]
    for name in differing:
        data = tensors[name].data
        value = data.to(comm.device, copy=True).contiguous()
        comm.broadcast(value.view(-1).view(torch.uint8))
        data.copy_(value)
    if differing and comm.rank == 0:
        logger.info("%d tensors differed among ranks, rank 0's are used: %s", len(differing), ", ".join(differing[:8]))


def _form(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} by {[*tensor.stride()]} {tensor.dtype} on {tensor.device.type}"


def _digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes, computed on the host piece by piece; "" for a tensor without values."""
    if is_absent(tensor):
        return ""
    total = xxhash.xxh3_64()
    for piece in tensor.detach().contiguous().view(-1).view(torch.uint8).split(DIGEST_BYTES):
        total.update(piece.cpu().numpy())
    return total.hexdigest()
