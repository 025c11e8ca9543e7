"""An adapter added to its base, tensor by tensor: W + s B A, in fp32, a few MiB at a time; no model is ever in memory.

PEFT itself says which modules have an adapter and with what scale: it is asked with a model without weights. Tensors that
the adapter does not touch are copied; modules that were trained whole take the place of the base's. The result is a plain
folder that from_pretrained opens, and it gives what the adapter on its base gives, up to rounding.

It refuses adapters other than LoRA on matrices (DoRA, activated LoRA, embeddings, biases, rows of a vocabulary), one that
changes a weight that the base ties to another, a base whose tensors transformers stores in another form, and one whose
names or shapes are not the adapter's. What it costs: one read of the base, one write of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import QALoraLinearVariant
from peft.utils import SAFETENSORS_WEIGHTS_NAME, PeftType
from torch import Tensor

from ftkit.engine.checkpoint.safetensors import PIECE_BYTES, TensorFile
from ftkit.engine.checkpoint.sealed import CONTENTS, check_contents
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.models.model_config import reading
from ftkit.hf.weights.exporting import (
    CONFIG,
    Outgoing,
    copy_small_files,
    note_dtype,
    pieces,
    refuse_model,
    small_files,
    write_model,
)
from ftkit.hf.weights.loading import adapted_on_meta, find_weights, skeleton
from ftkit.hf.weights.new_folder import new_folder
from ftkit.hf.weights.saving import SHARD_BYTES, hub_names, save_config

PREFIX = "base_model.model."
"""Of all names in an adapter file."""
OF_THE_ADAPTER = ("ftkit_base.json", "adapter_config.json", SAFETENSORS_WEIGHTS_NAME, "README.md")


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to a matrix (rows, columns): scale * second @ first, or its transpose.

    Args:
        first: (rank, inputs), fp32.
        second: (outputs, rank), fp32.
        scale: factor on the product.
        transposed: whether the matrix is (inputs, outputs), as in GPT-2.
    """

    first: Tensor
    second: Tensor
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        outputs, inputs = self.second.shape[0], self.first.shape[1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop)."""
        if self.transposed:
            return self.scale * (self.first[:, start:stop].T @ self.second.T)
        return self.scale * (self.second[start:stop] @ self.first)


def merge_adapter(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    task: str = "causal-lm",
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write an adapter and its base as one model; return its parameters.

    Args:
        adapter: a checkpoint of an adapter's run, or any adapter folder.
        out: folder to make; it must not hold a model yet.
        base: folder or hub id of the base; None: what the adapter names.
        dtype: fp32, bf16 or fp16; None: that of the base's files.
        shard_bytes: see `export_checkpoint`.
        task: see `export_checkpoint`.
        trust_remote_code: see `export_checkpoint`.
        progress: see `export_checkpoint`.

    Raises:
        UserError: if the adapter is not whole or cannot be merged, or does not fit the base.
    """
    listed = check_contents(adapter) if (adapter / CONTENTS).exists() else _plain_files(adapter)
    refuse_model(out)
    config = _config(adapter)
    _check_kind(config, adapter)
    name = base or config.base_model_name_or_path
    if not name:
        raise UserError(f"{adapter}/adapter_config.json: names no base model; name it with --base")
    options: dict[str, Any] = {"task": task, "trust_remote_code": trust_remote_code}
    model = skeleton(name, **options)
    layers = adapted_on_meta(skeleton(name, **options), config)
    with ExitStack() as stack:
        own = stack.enter_context(TensorFile(adapter / SAFETENSORS_WEIGHTS_NAME))
        files = [stack.enter_context(TensorFile(path)) for path in find_weights(name)]
        stored = {tensor: file for file in files for tensor in file.entries}
        deltas, whole = _changes(layers, model, own)
        for hub in (*deltas, *whole):
            if hub not in stored:
                raise UserError(f"{adapter}: changes {hub}, which {name} does not hold (a tied weight, or another base)")
        tensors = {}
        for hub, file in stored.items():
            entry = file.entries[hub]
            changed = deltas[hub].shape if hub in deltas else own.entries[whole[hub]].shape if hub in whole else entry.shape
            if changed != entry.shape:
                raise UserError(f"{adapter}: {hub} has shape {changed}, {entry.shape} in {file.path}: another base")
            if entry.dtype is None:
                raise UserError(f"{file.path}: {hub} has a dtype that ftkit cannot read (quantised weights?)")
            values = partial(pieces, file, hub)
            if hub in deltas:
                values = partial(_sums, file, hub, deltas[hub])
            elif hub in whole:
                values = partial(pieces, own, whole[hub])
            tensors[hub] = Outgoing(entry.shape, DTYPES[dtype] if dtype else entry.dtype, values)
        target = stack.enter_context(new_folder(out, [*small_files(listed, but=OF_THE_ADAPTER), CONFIG]))
        copy_small_files(adapter, listed, target, but=OF_THE_ADAPTER)
        save_config(model, target)
        note_dtype(target, next(iter(tensors.values())).dtype)
        return write_model(target, tensors, shard_bytes, progress)


def _plain_files(folder: Path) -> list[str]:
    """Return the names of a folder's files, links left out: they may lead anywhere."""
    return [path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()] if folder.is_dir() else []


def _config(adapter: Path) -> PeftConfig:
    if (adapter / CONTENTS).exists() and not (adapter / "adapter_config.json").exists():
        raise UserError(f"{adapter}: is a checkpoint without an adapter: leave --merge-adapter off")
    with reading(str(adapter), "no adapter folder that PEFT can read"):
        return PeftConfig.from_pretrained(str(adapter))


def _check_kind(config: PeftConfig, adapter: Path) -> None:
    """Refuse an adapter that is no plain LoRA, before anything else is made of it.

    Raises:
        UserError: naming its kind.
    """
    first = getattr(config, "init_lora_weights", True)
    if config.peft_type != PeftType.LORA:
        told = f"is an adapter of another kind ({getattr(config.peft_type, 'value', config.peft_type)})"
    elif getattr(config, "use_dora", False):
        told = "is a LoRA of another kind (DoRA), which changes more than a matrix"
    elif getattr(config, "trainable_token_indices", None):
        told = "trains rows of a vocabulary (trainable_token_indices)"
    elif first not in (True, "gaussian"):
        told = f"has init_lora_weights={first!r}, under which PEFT may have changed the base's weights, too"
    else:
        return
    raise UserError(
        f"{adapter}: {told}. Only plain LoRA, and modules trained whole, can be added to the files of a base. Use the "
        "adapter on its base, peft.PeftModel.from_pretrained(base, folder); its merge_and_unload() merges kinds that can be"
    )


def _changes(layers: PeftModel, model: Any, own: TensorFile) -> tuple[dict[str, Delta], dict[str, str]]:
    """Return what an adapter adds, by the hub's names, and the names in its file of tensors that it replaces.

    Raises:
        UserError: if the file holds anything else.
    """
    names = hub_names(model, [name for name, _ in model.named_parameters()], {})
    left = set(own.entries)
    deltas: dict[str, Delta] = {}
    for name, layer in layers.get_base_model().named_modules():
        parts = [f"{PREFIX}{name}.lora_{part}.weight" for part in "AB"]
        if not isinstance(layer, LoraLayer) or not left.issuperset(parts):
            continue
        first, second = (_read(own, part) for part in parts)
        if first.dim() != 2 or second.dim() != 2 or first.shape[0] != second.shape[1]:
            shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
            raise UserError(f"{own.path}: {parts[0]} and {parts[1]}, {shapes}, make no matrix")
        [active] = layers.active_adapters
        variant = layer.lora_variant.get(active)
        if not isinstance(variant, QALoraLinearVariant | None):
            kind = getattr(variant, "__name__", type(variant).__name__)
            raise UserError(
                f"{own.path}: {name} has a LoRA of another kind ({kind}), which changes more than its matrix"
            )
        delta = Delta(first, second, float(layer.scaling[active]), bool(getattr(layer, "fan_in_fan_out", False)))
        if f"{name}.weight" not in names:  # of two tied weights the second has no name of its own
            raise _tied(own, f"{name}.weight")
        deltas.update(dict.fromkeys(names[f"{name}.weight"], delta))
        left -= set(parts)
    whole = {hub: key for key in left for hub in names.get(key.removeprefix(PREFIX), ())}
    if odd := left - set(whole.values()):
        raise UserError(
            f"{own.path}: {min(odd)} cannot be merged: no tensor in the base's files belongs to it alone. It may be the "
            "head of another task, or one of two tied weights. Use the adapter on its base, peft.PeftModel.from_pretrained("
            "base, folder)"
        )
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in sorted({*tied, *tied.values()}):
        if any(hub in deltas or hub in whole for hub in names.get(name, (name,))):
            raise _tied(own, name)
    return deltas, whole


def _tied(own: TensorFile, name: str) -> UserError:
    """Return the error that names a tied weight which the adapter changes."""
    return UserError(
        f"{own.path}: changes {name}, which the base ties to another weight. The adapter left that one as it was, and a "
        "folder with tied weights cannot hold both. Untie the base before training (tie_word_embeddings=False)"
    )


def _read(file: TensorFile, name: str) -> Tensor:
    entry = file.entries[name]
    values = torch.empty(entry.numel, dtype=torch.float32)
    file.read(name, 0, values)
    return values.view(entry.shape)


def _sums(file: TensorFile, name: str, delta: Delta) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, fp32 values (n,)) of a matrix with what the adapter adds, some rows at a time."""
    rows, columns = delta.shape
    step = max(PIECE_BYTES // (4 * columns), 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        piece = torch.empty((stop - start) * columns, dtype=torch.float32)
        file.read(name, start * columns, piece)
        piece.view(stop - start, columns).add_(delta.rows(start, stop))
        yield start * columns, piece
