"""Checkpoints: every rank writes its own ranges of every line, and reads whatever ranges it needs.

A folder holds, for each line and kind, one safetensors file whose data section is the flat parameter (storage.py):

    <line>.weights.safetensors      compute dtype; only where there is no master (fp32 weights, frozen lines)
    <line>.master.safetensors       fp32
    <line>.exp_avg.safetensors      fp32, and one for each further moment
    manifest.json                   format version, hyper-parameters, step counts, loss scale; written last

It is written under a temporary name and renamed when it is complete, so a folder that has the final name is whole. No world
size, stage or slot appears in it: reading finds tensors by name, so the lines may be cut differently (another
stage, other ranks). No rank ever holds more than a piece beyond its own shards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.comm import Communicator
from ftkit.engine.flat import FlatParameter
from ftkit.engine.layout import Span
from ftkit.engine.optimizer import LossScale, ShardedOptimizer
from ftkit.engine.shard import Units
from ftkit.engine.storage import TensorFile, create_file
from ftkit.engine.tiers import Store
from ftkit.errors import UserError

INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""The hub's names of weight files: those of an earlier export are replaced, and no others."""

FORMAT = 1
MANIFEST = "manifest.json"


def save_checkpoint(
    folder: str | Path,
    units: Units,
    optimizer: ShardedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    frozen: bool = True,
) -> None:
    """Write a checkpoint of the weights, and of the optimizer if one is given. A collective.

    Args:
        folder: must not exist.
        extra: anything JSON can hold, given back by `load_checkpoint`.
        frozen: also write frozen weights (an adapter's base can be loaded from where it came from).

    Raises:
        UserError: if the folder exists or cannot be written.

    Cost: the bytes written; no memory beyond 8 MiB a rank.
    """
    folder = Path(folder)
    comm = units.comm
    temporary = folder.with_name(folder.name + ".writing")
    units.settle()
    with rank_zero(units.comm) as first:
        if first:
            if folder.exists():
                raise UserError(f"{folder}: exists already; give a new folder for the checkpoint")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for flat in units.flats:
                for kind, dtype, _ in _kinds(flat, optimizer, frozen):
                    shapes = [(s.name, s.shape, dtype) for s in flat.layout.segments]
                    create_file(temporary / _file(flat, kind), shapes)
    for flat in units.flats:
        for kind, _, store in _kinds(flat, optimizer, frozen):
            _write_line(temporary / _file(flat, kind), flat, store)
    comm.barrier()
    with rank_zero(units.comm) as first:
        if first:
            manifest = _manifest(units, optimizer, dict(extra or {}))
            with open(temporary / MANIFEST, "w") as file:
                json.dump(manifest, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(temporary)
            temporary.rename(folder)
            sync_folder(folder.parent)


def load_checkpoint(
    folder: str | Path, units: Units, optimizer: ShardedOptimizer | None = None, *, frozen: bool = True
) -> dict[str, Any]:
    """Read a checkpoint in place, on any number of ranks and at any stage. A collective.

    Args:
        optimizer: None reads weights only.
        frozen: expect frozen weights in it.

    Returns:
        The `extra` that was saved.

    Raises:
        UserError: if it is no checkpoint, of a later format, or lacks a tensor; shapes are compared.

    Cost: reads this rank's ranges only; 8 MiB of memory.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if optimizer is not None:
        _check_optimizer(folder, manifest, optimizer)
    units.settle()
    with ExitStack() as stack:
        places = _index(folder, stack)
        for flat in units.flats:
            if flat.trainable or frozen:
                _read_weights(flat, places, folder)
            if optimizer is not None and flat.trainable:
                state = optimizer.line(flat)
                if state.master is not flat.weights:
                    _read_line(flat, places, ("master", "weights"), state.master, folder)
                for moment, store in state.moments.items():
                    _read_line(flat, places, (moment,), store, folder)
                steps = manifest["optimizer"]["steps"]
                state.steps = [int(steps[segment.name]) for segment in flat.layout.segments]
    if optimizer is not None:
        saved_scale = LossScale(**manifest["optimizer"]["loss_scale"])
        if saved_scale.dynamic and optimizer.loss_scale.dynamic:  # else it was saved, or goes on, in a wider dtype
            optimizer.loss_scale = saved_scale
        for group, saved in zip(optimizer.param_groups, manifest["optimizer"]["groups"]):
            known = {*optimizer.defaults, "initial_lr"}
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved.items() if key in known})
    units.rewritten()
    return dict(manifest["extra"])


def _check_optimizer(folder: Path, manifest: dict[str, Any], optimizer: ShardedOptimizer) -> None:
    """Raise unless the saved optimizer state belongs to an optimizer like this one."""
    saved = manifest.get("optimizer")
    if saved is None:
        raise UserError(f"{folder}: holds weights only; its optimizer state was not saved")
    try:
        kind, groups, steps = saved["class"], len(saved["groups"]), set(saved["steps"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST}: its optimizer entry is not readable ({error})") from error
    if kind != type(optimizer).__name__ or groups != len(optimizer.param_groups):
        raise UserError(
            f"{folder}: saved from {kind} with {groups} parameter groups, this run has {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)}; continue with the same optimizer, or load the weights only"
        )
    wanted = {segment.name for flat in optimizer.units.trainable for segment in flat.layout.segments}
    if wanted - steps:
        raise UserError(f"{folder}: has no optimizer state of {sorted(wanted - steps)[0]}; it was not trained then")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest.

    Raises:
        UserError: if `folder` is no complete checkpoint of a format that this version knows.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version = manifest["format"]
    except FileNotFoundError:
        raise UserError(f"{folder}: no checkpoint of ftkit ({MANIFEST} is missing)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST}: not readable ({error})") from error
    if version != FORMAT:
        raise UserError(f"{folder}: format {version}, this version of ftkit reads {FORMAT}. Update ftkit")
    return dict(manifest)


@contextmanager
def rank_zero(comm: Communicator) -> Iterator[bool]:
    """Run the body with True on rank 0 only; then let all ranks go on together, or fail together with its error."""
    problem: Exception | None = None
    try:
        yield comm.rank == 0
    except Exception as error:
        problem = error
    told = comm.same(None if problem is None else f"{type(problem).__name__}: {problem}")
    if isinstance(problem, OSError):
        raise UserError(str(problem)) from problem
    if problem is not None:
        raise problem
    if told is not None:
        raise UserError(told)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file in `folder`, at any depth, and its name durable."""
    for path in (*folder.rglob("*"), folder):
        sync_folder(path)  # files are synced by the same call


def _file(flat: FlatParameter, kind: str) -> str:
    return f"{flat.name}.{kind}.safetensors"


def _kinds(
    flat: FlatParameter, optimizer: ShardedOptimizer | None, frozen: bool
) -> list[tuple[str, torch.dtype, Store]]:
    """Return what is written of a line: (kind, dtype, this rank's part (S,))."""
    if not flat.trainable:
        return [("weights", flat.dtype, flat.weights)] if frozen else []
    if optimizer is None:
        return [("weights", flat.dtype, flat.weights)]
    state = optimizer.line(flat)
    kinds: list[tuple[str, torch.dtype, Store]] = []
    if state.master is flat.weights:
        kinds.append(("weights", flat.dtype, flat.weights))
    else:
        kinds.append(("master", torch.float32, state.master))
    return kinds + [(name, torch.float32, store) for name, store in state.moments.items()]


def _write_line(path: Path, flat: FlatParameter, store: Store) -> None:
    """Write this rank's range of a line; a replicated line is cut among the ranks all the same."""
    with TensorFile(path, writable=True) as file:
        for name, start, values in owned_ranges(flat, store):
            file.write(name, start, values)
        os.fsync(file._handle)


def owned_ranges(flat: FlatParameter, store: Store) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (tensor name, first element in it, values) of what this rank should write of a line's `store` (S,)."""
    base, stop = flat.layout.shard_range(flat.rank)
    first, last = base, stop
    if flat.owners < flat.comm.world_size:  # replicated: every rank has all, and writes its part
        part = -(-stop // flat.comm.world_size)
        first = min(part * flat.comm.rank, stop)
        last = min(first + part, stop)
    for span, values in flat.spans(store, first, last):
        yield span.segment.name, span.start - span.segment.start, values


Places = dict[tuple[str, str], TensorFile]


def _index(folder: Path, stack: ExitStack) -> Places:
    """Return for each (kind, tensor name) the open file that has it."""
    places: Places = {}
    for path in sorted(folder.glob("*.safetensors")):
        kind = path.name.removesuffix(".safetensors").rpartition(".")[2]
        file = stack.enter_context(TensorFile(path))
        places.update({(kind, name): file for name in file.entries})
    return places


def _read_weights(flat: FlatParameter, places: Places, folder: Path) -> None:
    _read_line(flat, places, ("weights", "master"), flat.weights, folder)


def _read_line(flat: FlatParameter, places: Places, kinds: tuple[str, ...], store: Store, folder: Path) -> None:
    """Read this rank's range of a line into `store` (S,), from the first of `kinds` that has the tensor."""

    def read(span: Span, out: Tensor) -> None:
        name = span.segment.name
        file = next((places[kind, name] for kind in kinds if (kind, name) in places), None)
        if file is None:
            raise UserError(f"{folder}: has no {kinds[0]} of {name}; it was saved from another model")
        if file.entries[name].shape != span.segment.shape:
            raise UserError(
                f"{file.path}: {name} has shape {file.entries[name].shape}, the model needs {span.segment.shape}"
            )
        file.read(name, span.start - span.segment.start, out)

    flat.fill(store, read)


def _manifest(units: Units, optimizer: ShardedOptimizer | None, extra: dict[str, Any]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "lines": {flat.name: [segment.name for segment in flat.layout.segments] for flat in units.flats},
        "extra": extra,
    }
    if optimizer is not None:
        manifest["optimizer"] = {
            "class": type(optimizer).__name__,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            "loss_scale": asdict(optimizer.loss_scale),
            "steps": {
                segment.name: count
                for flat in units.trainable
                for segment, count in zip(flat.layout.segments, optimizer.line(flat).steps)
            },
        }
    return manifest


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
        folder: exists.
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
    files = _cut(wanted, shard_bytes)
    units.settle()
    with rank_zero(units.comm) as first:
        if first:
            for stale in folder.glob("model*.writing"):
                stale.unlink()
            for file_name, tensors in files.items():
                create_file(folder / f"{file_name}.writing", tensors)
    home = {name: file for file, tensors in files.items() for name, _, _ in tensors}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(TensorFile(folder / f"{name}.writing", writable=True)) for name in files}
        for flat in units.flats:
            source = optimizer.line(flat).master if optimizer is not None and flat.trainable else flat.weights
            for name, start, values in owned_ranges(flat, source):
                for hub in names_of(name):
                    opened[home[hub]].write(hub, start, values)
        if units.comm.rank == 0:
            for name, value in buffers.items():
                opened[home[name]].write(name, 0, value.reshape(-1))
        for file in opened.values():
            os.fsync(file._handle)
    units.comm.barrier()
    with rank_zero(units.comm) as first:
        if first:
            _publish(folder, files, wanted)


def _publish(folder: Path, files: Mapping[str, Any], wanted: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
    """Give whole files their final names, in place of what was there; the index comes last, then the former files go."""
    for name in files:
        (folder / f"{name}.writing").replace(folder / name)
    if len(files) > 1:
        weight_map = {name: file for file, tensors in files.items() for name, _, _ in tensors}
        total = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in wanted)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    for path in folder.iterdir():
        stale = (path.name == INDEX and len(files) == 1) or (WEIGHTS.fullmatch(path.name) and path.name not in files)
        if stale:
            path.unlink()
    sync_folder(folder)


def _cut(
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
