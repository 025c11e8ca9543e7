"""The weight files of a Hugging Face folder. Every rank writes its own ranges, and no rank has the whole model.

Files are written under temporary names and renamed when all ranks have written all of them. The index follows. Then weight
files of an earlier export are removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ftkit.engine.checkpoint.durable import all_ranks, rank_zero, sync_folder
from ftkit.engine.checkpoint.safetensors import TensorFile, TensorSpec, bytes_of, create_file
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError

INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of weight files on the hub. An export replaces or removes these files, and no others."""


def export_tensors(
    folder: Path,
    units: ShardedModel,
    optimizer: ShardedOptimizer | None,
    *,
    names_of: Callable[[str], Sequence[str]],
    dtype_of: Callable[[str], torch.dtype],
    buffers: Mapping[str, Tensor],
    shard_bytes: int,
) -> None:
    """Write the weights as the safetensors files of a Hugging Face folder. A collective.

    Args:
        folder: An existing folder.
        units: The sharded model.
        optimizer: Optimizer of this model. Its fp32 masters are the source. None writes the weights of compute dtype.
        names_of: Returns the hub names under which a tensor is written. No name leaves it out.
        dtype_of: Returns the dtype in which a tensor is written.
        buffers: Hub name to value. Rank 0's values are written.
        shard_bytes: A file ends when the next tensor would make it larger.

    Raises:
        UserError: A weight is not finite in its dtype, or a file cannot be written. No unfinished file is left.

    Cost: the bytes written; 8 MiB of memory per rank.
    """
    wanted = [
        (hub, segment.shape, dtype_of(segment.name))
        for flat in units.flats
        for segment in flat.layout.segments
        for hub in names_of(segment.name)
    ]
    wanted += [(name, tuple(value.shape), value.dtype) for name, value in buffers.items()]
    files = cut(wanted, shard_bytes)
    with all_ranks(units.comm):
        (optimizer or units).settle()
    with rank_zero(units.comm) as first:
        if first:
            _remove_unfinished(folder)
            for file_name, tensors in files.items():
                create_file(folder / f"{file_name}.writing", tensors)
    try:
        with all_ranks(units.comm), ExitStack() as stack:
            opened = {name: stack.enter_context(TensorFile(folder / f"{name}.writing", writable=True)) for name in files}
            file_of = {name: opened[file] for file, tensors in files.items() for name, _, _ in tensors}
            for flat in units.flats:
                source = optimizer.state_of(flat).master if optimizer is not None and flat.trainable else flat.weights
                for span, values in flat.spans(source, *flat.written_range()):
                    for hub in names_of(span.segment.name):
                        file_of[hub].write(hub, span.start - span.segment.start, values)
            for name, value in buffers.items() if units.comm.rank == 0 else ():
                file_of[name].write(name, 0, value.reshape(-1), check=False)
            for file in opened.values():
                file.sync()
    except UserError:
        if units.comm.rank == 0:
            _remove_unfinished(folder)
        raise
    with rank_zero(units.comm) as first:
        if first:
            publish(folder, files)


def _remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of an export."""
    for path in folder.glob("model*.safetensors*.writing"):
        path.unlink()


def publish(folder: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Rename the complete files in `files`, which maps file names to tensors. Then write the index.

    Weight files of an earlier export are replaced or removed.
    """
    for name in files:
        (folder / f"{name}.writing").replace(folder / name)
    if len(files) > 1:
        weight_map = {name: file for file, tensors in files.items() for name, _, _ in tensors}
        total = sum(bytes_of(shape, dtype) for tensors in files.values() for _, shape, dtype in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        written = folder / f"{INDEX}.writing"
        written.write_text(json.dumps(index, indent=2))
        sync_folder(written)  # syncs a file likewise
        written.replace(folder / INDEX)
    for path in folder.iterdir():
        if (path.name == INDEX and len(files) == 1) or (WEIGHTS.fullmatch(path.name) and path.name not in files):
            path.unlink()
    sync_folder(folder)


def cut(tensors: Sequence[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """Distribute tensors over files of at most `shard_bytes`, at least one tensor each, by hub file names."""
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for name, shape, dtype in tensors:
        own = bytes_of(shape, dtype)
        if parts[-1] and size + own > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append((name, shape, dtype))
        size += own
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}
