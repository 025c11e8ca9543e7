"""A sharded model written as a folder that `from_pretrained` opens. No rank gathers the whole model.

Every rank writes its own ranges of safetensors files, under the names that the hub uses. Rank 0 adds the configuration. A
model whose tensors transformers would have to cut or merge is refused. An adapter is small: its tensors are gathered one
flat parameter at a time, and PEFT writes its folder.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer import TRAINING_ARGS_NAME

from ftkit.engine.checkpoint.durable import all_ranks, rank_zero
from ftkit.engine.checkpoint.export import export_tensors
from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.hf.adapters import names_only, saved_names
from ftkit.hf.dtypes import named_dtype
from ftkit.hf.load.config import reading
from ftkit.hf.load.model import every_buffer

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
"""Default size at which the next safetensors file is begun, bytes."""
ONE_FILE = 1 << 62
"""Size for plain modules: they are one file, as in the stock Trainer."""


def check_savable(units: ShardedModel) -> None:
    """Check, before training, that a model can be saved after it.

    Raises:
        UserError: Parameters changed since they were sharded, transformers would have to cut or merge tensors, or it
            refuses to save the generation configuration.
    """
    units.check_unchanged()
    model = units.model
    if not isinstance(model, PreTrainedModel):
        return
    hub_names(model, *_stored(units))
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"{type(model).__name__} has an adapter inside (add_adapter, load_adapter), and would be saved under names that "
            "from_pretrained does not know: use peft.get_peft_model(model, config) or peft.PeftModel.from_pretrained"
        )
    # transformers checks the generation configuration only when it is saved, and more strictly than when it is loaded.
    with reading(type(model).__name__, "its configuration cannot be saved"), TemporaryDirectory() as folder:
        save_config(model, Path(folder))


def _stored(units: ShardedModel) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Return the shapes of all tensors and persistent buffers, and of every name the one under which a shape is there.

    A shared tensor has several names, also one in a module that is registered twice.
    """
    buffers = every_buffer(units.model)
    shapes = {segment.name: torch.Size(segment.shape) for flat in units.flats for segment in flat.layout.segments}
    stored = dict(zip(shapes, shapes))
    for name, parameter in units.model.named_parameters(remove_duplicate=False):
        flat, index = units.places[id(parameter)]
        stored[name] = flat.layout.segments[index].name
    first: dict[int, str] = {}
    stored |= {name: first.setdefault(id(buffer), name) for name, buffer in buffers.items()}
    return shapes | {name: buffers[name].shape for name in first.values()}, stored


def hub_names(model: nn.Module, shapes: Mapping[str, torch.Size], stored: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hub names of each tensor and persistent buffer.

    transformers' own reverse conversion gives them: it converts tensors without values, and a tensor that only changes its
    name stays the same object. A shared weight has one name if transformers ties it when it loads, else all its names.

    Args:
        model: The model.
        shapes: Name of each tensor and persistent buffer to its shape.
        stored: Every name of a tensor to its name in `shapes`.

    Raises:
        UserError: transformers would have to cut or merge tensors.
    """
    names: dict[str, list[str]] = {}
    if not isinstance(model, PreTrainedModel):
        for name, first in stored.items():
            names.setdefault(first, []).append(name)
        return names
    tied, left_out = model.all_tied_weights_keys, model._keys_to_ignore_on_save or ()
    stand_ins = {
        name: torch.empty(shapes[first], device="meta")
        for name, first in stored.items()
        if name not in left_out and (name == first or (name not in tied and first not in tied))
    }
    original = {id(tensor): stored[name] for name, tensor in stand_ins.items()}
    for hub_name, tensor in revert_weight_conversion(model, dict(stand_ins)).items():
        if id(tensor) not in original:
            raise UserError(
                f"{type(model).__name__} is stored in another form than it has in memory ({hub_name} is cut or merged), and "
                "cannot be saved from shards. Train an adapter, or set save_strategy='no' and use units.state_dict() with "
                "save_pretrained(state_dict=...)"
            )
        names.setdefault(original[id(tensor)], []).append(hub_name)
    return names


def save_model(
    units: ShardedModel,
    folder: str | os.PathLike[str],
    optimizer: ShardedOptimizer | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a sharded model as a Hugging Face folder, or a PEFT model as an adapter folder. A collective.

    A plain `nn.Module` is written as one safetensors file with its own names, as by the stock Trainer.

    Args:
        units: The sharded model.
        folder: Folder to write. Model files in it are replaced.
        optimizer: Optimizer whose fp32 master weights are written if the model computes in a narrower dtype.
        dtype: Dtype of the written tensors, of torch or "fp32", "bf16", "fp16". None keeps the dtypes before sharding.
        shard_bytes: Largest size of a safetensors file, bytes.

    Raises:
        UserError: A weight is not finite, the folder cannot be written, or transformers would have to cut or merge tensors.

    Cost: the bytes written; 8 MiB of memory per rank.
    """
    path, dtype = Path(folder), named_dtype(dtype)
    units.check_unchanged()
    if isinstance(units.model, PeftModel):
        _save_adapters(units, path, optimizer, dtype)
        return
    model = units.model
    names = hub_names(model, *_stored(units))
    buffers = {hub: buffer.detach().cpu() for name, buffer in every_buffer(model).items() for hub in names.get(name, ())}
    with rank_zero(units.comm) as first:
        if first:
            path.mkdir(parents=True, exist_ok=True)
    export_tensors(
        path,
        units,
        optimizer,
        names_of=lambda name: names.get(name, ()),
        dtype_of=lambda name: dtype or units.dtypes[name],
        buffers=buffers,
        shard_bytes=shard_bytes if isinstance(model, PreTrainedModel) else ONE_FILE,
    )
    with rank_zero(units.comm) as first:
        if first and isinstance(model, PreTrainedModel):
            save_config(model, path, dtype or next(iter(units.dtypes.values())))


def save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write configuration, generation configuration and custom code of a model, as `save_pretrained` does."""
    model.config.architectures = [type(model).__name__]
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    if model._auto_class is not None:
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def save_arguments(arguments: TrainingArguments, folder: Path) -> None:
    """Write the arguments of a run, as the stock Trainer does. ftkit never reads them."""
    content = io.BytesIO()
    try:
        torch.save(arguments, content)
    except Exception as error:  # pickle's errors have no common class; a class of a notebook is the usual cause
        logger.warning("%s cannot be pickled (%s): %s is not written", type(arguments).__name__, error, TRAINING_ARGS_NAME)
        return
    (folder / TRAINING_ARGS_NAME).write_bytes(content.getvalue())


def _save_adapters(units: ShardedModel, path: Path, optimizer: ShardedOptimizer | None, dtype: torch.dtype | None) -> None:
    """Let PEFT write its folder from tensors that rank 0 gathers. A collective."""
    model, comm = cast(PeftModel, units.model), units.comm
    _, stored = _stored(units)
    wanted: set[str] = set()
    with rank_zero(comm) as first:  # PEFT may ask the hub
        if first:
            wanted.update(*(saved_names(model, stored, adapter) for adapter in model.peft_config))
    wanted = comm.same(wanted)
    names = {stored[name] for name in wanted}
    trained = {segment.name for flat in units.trainable for segment in flat.layout.segments}
    if (left := sorted(trained - names)) and comm.rank == 0:
        logger.warning(
            "%s: trained beside the adapter, and not in its folder: %s. PEFT saves adapters and modules_to_save; name the "
            "modules there before training",
            path,
            ", ".join(left[:8]),
        )
    whole = {}
    for name, tensor in _whole(units, optimizer, names):
        if comm.rank == 0:
            whole[name] = tensor.to(device="cpu", dtype=dtype or units.dtypes[name], copy=True)
    with rank_zero(comm) as first, names_only(model):
        for name, tensor in whole.items() if first else ():
            refuse_not_finite(name, tensor.reshape(-1))
        if first:
            whole |= {name: buffer.detach().cpu() for name, buffer in every_buffer(model).items()}
            model.save_pretrained(str(path), state_dict={name: whole[stored[name]] for name in wanted})


def _whole(units: ShardedModel, optimizer: ShardedOptimizer | None, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor), from fp32 masters if there are any, one flat parameter at a time. A collective."""
    with all_ranks(units.comm):
        (optimizer or units).settle()
    units.streams.join()
    for flat in units.flats:
        segments = [segment for segment in flat.layout.segments if segment.name in names]
        if not segments:
            continue
        source = optimizer.state_of(flat).master if optimizer is not None and flat.trainable else flat.weights
        full = flat.collect(source)
        for segment in segments:
            yield segment.name, full[segment.start : segment.stop].view(segment.shape)
