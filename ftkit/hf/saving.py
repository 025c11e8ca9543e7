"""From a sharded model to a folder that `from_pretrained` opens, without gathering the model anywhere.

Each rank writes its own ranges of hub-named safetensors files; rank 0 adds the configuration. Where transformers renames
tensors on load, its own reverse mapping gives the names; where it would have to cut or merge them, the save is refused. An
adapter is small and replicated: PEFT writes it as it always does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from ftkit.engine.buffers import persistent_buffers
from ftkit.engine.durable import rank_zero
from ftkit.engine.export import export_tensors
from ftkit.engine.optimizer import ShardedOptimizer
from ftkit.engine.shard import Units
from ftkit.errors import UserError
from ftkit.hf.loading import adapter_names, names_only

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
        _save_adapters(units, path, optimizer, dtype)
        return
    model = units.model
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{type(model).__name__} is no transformers model: use units.state_dict() and save it yourself")
    own = [segment.name for flat in units.flats for segment in flat.layout.segments]
    names = hub_names(model, own, units.aliases)
    own_buffers = persistent_buffers(model)
    buffers = {hub: buffer.detach().cpu() for name, buffer in own_buffers.items() for hub in names.get(name, ())}
    export_tensors(
        path,
        units,
        optimizer,
        names_of=lambda name: names.get(name, ()),
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


def _save_adapters(units: Units, path: Path, optimizer: ShardedOptimizer | None, dtype: torch.dtype | None) -> None:
    """Let PEFT write its folder. A collective; rank 0 holds what is written.

    PEFT itself says what belongs in it: adapters, modules trained whole, embeddings where they were resized.
    """
    model, comm = units.model, units.comm
    line_names = {segment.name: segment.name for flat in units.flats for segment in flat.layout.segments} | units.aliases
    wanted: set[str] = set()
    with rank_zero(comm) as first:
        if first:
            wanted.update(*(adapter_names(model, line_names, adapter) for adapter in model.peft_config))
    wanted = comm.same(wanted)
    whole = {}
    for name, tensor in _whole(units, optimizer, {line_names[name] for name in wanted}):
        if comm.rank == 0:
            whole[name] = tensor.to(device="cpu", dtype=dtype or units.dtypes[name], copy=True)
    with rank_zero(comm) as first, names_only(model):
        if first:
            model.save_pretrained(path, state_dict={name: whole[line_names[name]] for name in wanted})


def _whole(units: Units, optimizer: ShardedOptimizer | None, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) from the fp32 masters where there are any, gathering one line at a time. A collective."""
    (optimizer or units).settle()
    units.transfer.settle()
    for flat in units.flats:
        segments = [segment for segment in flat.layout.segments if segment.name in names]
        if not segments:
            continue
        source = optimizer.line(flat).master if optimizer is not None and flat.trainable else flat.weights
        full = flat.collect(source)
        for segment in segments:
            yield segment.name, full[segment.start : segment.stop].view(segment.shape)


def hub_names(model: PreTrainedModel, own: Sequence[str], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hub's names of each tensor and of each persistent buffer: more than one for a weight that was tied by hand,
    which transformers would not tie again when it loads.

    The mapping is asked of transformers itself: its reverse conversion runs on empty tensors, and what comes out under
    another name is the same object, unless it was cut or merged.

    Args:
        own: names of the tensors in the model. aliases: other names of some of them.

    Raises:
        UserError: if transformers would have to cut or merge tensors.
    """
    own = [*own, *persistent_buffers(model)]
    by_hand = {alias: name for alias, name in aliases.items() if alias not in model.all_tied_weights_keys}
    by_hand = {a: n for a, n in by_hand.items() if n not in model.all_tied_weights_keys and not _shared_module(model, a, n)}
    own += list(by_hand)
    stand_ins = {name: torch.empty(0, device="meta") for name in own}
    original = {id(tensor): name for name, tensor in stand_ins.items()}
    names: dict[str, list[str]] = {}
    for hub_name, tensor in revert_weight_conversion(model, dict(stand_ins)).items():
        if id(tensor) not in original:
            raise UserError(
                f"{type(model).__name__}: {hub_name} is stored in another form than it has in the model; saving such models "
                "from shards is not supported: use units.state_dict() and save_pretrained(state_dict=...)"
            )
        name = original[id(tensor)]
        names.setdefault(by_hand.get(name, name), []).append(hub_name)
    return names


def _shared_module(model: PreTrainedModel, one: str, other: str) -> bool:
    """Return whether two names of a parameter lead through the same module: shared by the code, not tied by hand."""
    return model.get_submodule(one.rpartition(".")[0]) is model.get_submodule(other.rpartition(".")[0])
