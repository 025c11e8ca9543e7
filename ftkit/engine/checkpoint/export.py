"""A Hugging Face folder's weight files, each rank writing its own ranges: no rank ever holds the model.

Files are written under temporary names and get their own when all ranks have written all of them; the index comes last, and
then what an earlier export left is removed, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.core.buffers import may_be_infinite
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.shard import Units
from ftkit.engine.files.durable import all_ranks, rank_zero, sync_folder
from ftkit.engine.files.storage import TensorFile, create_file
from ftkit.engine.memory.tiers import Store
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError

INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""The hub's names of weight files: those of an earlier export are replaced, and no others."""


def export_tensors(
    folder: Path,
    units: Units,
    optimizer: ShardedOptimizer | None,
    *,
    names_of: Callable[[str], Sequence[str]],
    dtype_of: Callable[[str], torch.dtype],
    buffers: Mapping[str, Tensor],
    shard_bytes: int,
) -> None:
    """Write the weights as a Hugging Face folder's safetensors files, each rank its own ranges. A collective.

    Args:
        folder: an existing folder.
        units: units of the sharded model.
        optimizer: the optimizer of these units; None writes the weights that are computed with.
        names_of: hub names under which a tensor is written; none leaves it out.
        dtype_of: dtype in which a tensor is written; fp32 masters are the source where there are any.
        buffers: hub name to value, the same on all ranks.
        shard_bytes: a file is closed when the next tensor would make it larger.

    Cost: the bytes written; 8 MiB of memory a rank; no rank holds the model.
    """
    wanted = [
        (hub, segment.shape, dtype_of(segment.name))
        for flat in units.flats
        for segment in flat.layout.segments
        for hub in names_of(segment.name)
    ] + [(name, tuple(value.shape), value.dtype) for name, value in buffers.items()]
    files = cut(wanted, shard_bytes)
    with all_ranks(units.comm):
        (optimizer or units).settle()
        optimizer.take_edits(unseen=True) if optimizer is not None else units.take_edits()
    with rank_zero(units.comm) as first:
        if first:
            for stale in _unfinished(folder):
                stale.unlink()
            for file_name, tensors in files.items():
                create_file(folder / f"{file_name}.writing", tensors)
    home = {name: file for file, tensors in files.items() for name, _, _ in tensors}
    with _cleaned(folder, units), all_ranks(units.comm), ExitStack() as stack:
        opened = {name: stack.enter_context(TensorFile(folder / f"{name}.writing", writable=True)) for name in files}
        for flat in units.flats:
            source = optimizer.line(flat).master if optimizer is not None and flat.trainable else flat.weights
            for name, start, values in owned_ranges(flat, source):
                for hub in names_of(name):
                    opened[home[hub]].write(hub, start, values)
        if units.comm.rank == 0:
            for name, value in buffers.items():
                opened[home[name]].write(name, 0, value.reshape(-1), infinite=may_be_infinite(name))
        for file in opened.values():
            file.sync()
    with rank_zero(units.comm) as first:
        if first:
            publish(folder, files, wanted)


def _unfinished(folder: Path) -> list[Path]:
    """Return the files of an export that was not finished."""
    named = ((path, path.name.removesuffix(".writing")) for path in folder.glob("model*.writing"))
    return [path for path, name in named if name == INDEX or WEIGHTS.fullmatch(name)]


@contextmanager
def _cleaned(folder: Path, units: Units) -> Iterator[None]:
    """Leave no unfinished file where the body raises on all ranks."""
    try:
        yield
    except UserError:
        for unfinished in _unfinished(folder) if units.comm.rank == 0 else ():
            unfinished.unlink()
        raise


def publish(folder: Path, files: Mapping[str, Any], wanted: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
    """Give whole files their final names, in place of what was there; the index comes last, then the former files go."""
    for name in files:
        (folder / f"{name}.writing").replace(folder / name)
    if len(files) > 1:
        weight_map = {name: file for file, tensors in files.items() for name, _, _ in tensors}
        total = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in wanted)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        written = folder / f"{INDEX}.writing"
        written.write_text(json.dumps(index, indent=2))
        sync_folder(written)  # a file is synced by the same call
        written.replace(folder / INDEX)
    for path in folder.iterdir():
        stale = (path.name == INDEX and len(files) == 1) or (WEIGHTS.fullmatch(path.name) and path.name not in files)
        if stale:
            path.unlink()
    sync_folder(folder)


def cut(
    tensors: list[tuple[str, tuple[int, ...], torch.dtype]], shard_bytes: int
) -> dict[str, list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Distribute tensors over files of at most `shard_bytes` (one tensor at least), under the hub's file names."""
    parts: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    size = 0
    for tensor in tensors:
        own = torch.Size(tensor[1]).numel() * tensor[2].itemsize
        if parts[-1] and size + own > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += own
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}


def owned_ranges(flat: FlatParameter, store: Store) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (tensor name, first element in it, values) of what this rank should write of a line's `store` (S,)."""
    for span, values in flat.spans(store, *flat.written_range()):
        yield span.segment.name, span.start - span.segment.start, values
