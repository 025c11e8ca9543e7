"""From a sharded model to a folder that `from_pretrained` opens, without gathering the model anywhere.

Each rank writes its own ranges of hub-named safetensors files; rank 0 adds the configuration. Where transformers renames
tensors on load, its own reverse mapping gives the names; where it would have to cut or merge them, the save is refused. An
adapter is small and replicated: PEFT writes it as it always does.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from ftkit.engine.checkpoint import export_tensors, rank_zero
from ftkit.engine.optimizer import ShardedOptimizer
from ftkit.engine.shard import Units
from ftkit.errors import UserError
from ftkit.hf.blocks import is_adapter

SHARD_BYTES = 5 * 10**9
"""Size at which a new safetensors file is begun, as transformers does."""


def save_model(
    units: Units,
    folder: str | os.PathLike[str],
    optimizer: ShardedOptimizer | None = None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a sharded model as a Hugging Face folder, or a PEFT model as an adapter folder. A collective.

    Args:
        units: of the model.
        folder: is made; model files in it are replaced.
        optimizer: its fp32 master weights are the source where the weights in use are narrower.
        dtype: of the tensors; None: what each had before sharding.
        shard_bytes: largest safetensors file.

    Raises:
        UserError: if the folder cannot be written, or transformers would have to rewrite tensors.
    """
    path = Path(folder)
    with rank_zero(units.comm) as first:
        if first:
            path.mkdir(parents=True, exist_ok=True)
    if isinstance(units.model, PeftModel):
        state = units.state_dict(lambda name: is_adapter(name, None) or ".modules_to_save." in name)
        with rank_zero(units.comm) as first:
            if first:
                units.model.save_pretrained(path, state_dict=state)
        return
    model = units.model
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{type(model).__name__} is no transformers model: use units.state_dict() and save it yourself")
    names = _hub_names(units, model)
    buffers = {
        names[name]: buffer.detach().cpu() for name, buffer in _persistent_buffers(model) if names.get(name) is not None
    }
    export_tensors(
        path,
        units,
        optimizer,
        name_of=names.get,
        dtype_of=lambda name: dtype or units.dtypes[name],
        buffers=buffers,
        shard_bytes=shard_bytes,
    )
    with rank_zero(units.comm) as first:
        if first:
            save_config(model, path, dtype or next(iter(units.dtypes.values())))


def save_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write what belongs beside the weights: configuration, generation configuration, custom code."""
    model.config.architectures = [type(model).__name__]
    if dtype is not None:
        model.config.dtype = str(dtype).removeprefix("torch.")
    if model._auto_class is not None:
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _persistent_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{name}.{key}" if name else key, buffer)
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    ]


def _hub_names(units: Units, model: PreTrainedModel) -> dict[str, str | None]:
    """Return the hub's name of each tensor on a line and of each persistent buffer.

    The mapping is asked of transformers itself: its reverse conversion runs on empty tensors, and what comes out under
    another name is the same object, unless it was cut or merged.
    """
    own = [segment.name for flat in units.flats for segment in flat.layout.segments]
    own += [name for name, _ in _persistent_buffers(model)]
    stand_ins = {name: torch.empty(0, device="meta") for name in own}
    original = {id(tensor): name for name, tensor in stand_ins.items()}
    names: dict[str, str | None] = {}
    for hub_name, tensor in revert_weight_conversion(model, dict(stand_ins)).items():
        if id(tensor) not in original:
            raise UserError(
                f"{type(model).__name__}: {hub_name} is stored in another form than it has in the model; saving such models "
                "from shards is not supported: use units.state_dict() and save_pretrained(state_dict=...)"
            )
        names[original[id(tensor)]] = hub_name
    return names
