"""Loading a checkpoint on any number of ranks, at any stage and tier.

`saving.py` describes the folder. Every rank reads the ranges of its own shards. Tensors are found by name, so flat
parameters may differ from those that were saved. No byte is used before its piece is verified, and no rank has more than a
few pieces beyond its own shards.

Cost: the bytes read, past the page cache where the file system supports it; 24 MiB of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftkit.engine.checkpoint.durable import all_ranks
from ftkit.engine.checkpoint.manifest import BUFFERS, MANIFEST, SCALES, WEIGHT_KINDS, alike, read_manifest
from ftkit.engine.checkpoint.reader import CheckedFile, CodedFile, Key, PieceBuffers, Places, open_files
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import Pieces
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import LossScale, ShardedOptimizer
from ftkit.engine.optim.state_stores import SplitMaster
from ftkit.errors import UserError
from ftkit.spec.layout import Segment
from ftkit.spec.state_forms import GROUP_NUMEL

EIGHT_BITS = "8bit"
"""Ends the names of optimizers with 8-bit moments."""


def load_checkpoint(
    folder: str | Path,
    units: ShardedModel,
    optimizer: ShardedOptimizer | None = None,
    *,
    frozen: bool = True,
    state: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint in place, and return the `extra` that was saved. A collective.

    Args:
        folder: The checkpoint's folder.
        units: The sharded model.
        optimizer: Optimizer of this model. None reads weights only.
        frozen: Expect frozen weights in the checkpoint.
        state: Read the optimizer's moments, step counts and settings. False reads its masters only.

    Raises:
        BrokenCheckpoint: A file is missing, or is not what was written.
        UserError: The checkpoint has another format, or is of another model or optimizer.
    """
    folder = Path(folder)
    if units.saving is not None:
        with suppress(UserError):  # its caller learns of the error from `poll`
            units.saving.wait()
    units.comm.await_readers()
    with all_ranks(units.comm, BrokenCheckpoint), ExitStack() as stack:
        (optimizer or units).settle()
        manifest = read_manifest(folder)
        if optimizer is not None and state:
            _check_optimizer(folder, manifest, optimizer)
            stack.enter_context(optimizer.overwritten())
        elif optimizer is not None:
            optimizer.prepare()
        opened = open_files(folder, manifest, None if state else (*WEIGHT_KINDS, BUFFERS))
        buffers, places = stack.enter_context(opened)
        _check_names(folder, places, units)
        shards = [
            _Shard(flat, stores, {s.name: _source(places, kinds, s, folder, optimizer) for s in flat.layout.segments})
            for flat, kinds, stores in _wanted(units, optimizer, frozen=frozen, state=state)
        ]
        _read_buffers(places, units.model, folder)
        buffers.expect(key for key, _ in groupby(key for shard in shards for key in shard.expected()))
        for shard in shards:
            shard.read()
        if optimizer is not None and state:
            _restore_settings(optimizer, manifest["optimizer"])
    units.rewritten()
    return dict(manifest["extra"])


def check_checkpoint(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Verify all pieces of a checkpoint, or one of `parts` shares of them.

    Raises:
        BrokenCheckpoint: A file is missing or changed.
        UserError: The checkpoint has another format.

    Cost: one read of the share; 24 MiB of memory.
    """
    manifest = read_manifest(folder)
    with PieceBuffers() as buffers:
        for name, (size_bytes, pieces) in manifest["files"].items():
            with CheckedFile(folder / name, size_bytes, pieces, buffers) as file:
                numbers = range(part, len(file.pieces), parts)
                buffers.expect((file, number) for number in numbers)
                for number in numbers:
                    buffers.piece(file, number)


def _restore_settings(optimizer: ShardedOptimizer, saved: dict[str, Any]) -> None:
    """Take over step counts, loss scale and the settings of the parameter groups."""
    for flat in optimizer.units.trainable:
        optimizer.state_of(flat).steps = [saved["steps"][segment.name] for segment in flat.layout.segments]
    scale = LossScale(**saved["loss_scale"])
    if scale.dynamic and optimizer.loss_scale.dynamic:  # both runs are in fp16
        optimizer.loss_scale = scale
    known = _known(optimizer)
    for group, own, values in zip(optimizer.param_groups, optimizer.plain_groups(), saved["groups"]):
        taken = {key: v for key, v in values.items() if key in known or (key != "params" and alike(v, own.get(key, v)))}
        group.update({key: tuple(v) if isinstance(v, list) and key in known else v for key, v in taken.items()})


def _check_optimizer(folder: Path, manifest: dict[str, Any], optimizer: ShardedOptimizer) -> None:
    """Raise unless the saved optimizer state belongs to an optimizer like this one."""
    saved = manifest.get("optimizer")
    if saved is None:
        raise UserError(f"{folder}: holds weights only; its optimizer state was not saved")
    kind, groups, steps = saved["class"], saved["groups"], set(saved["steps"])
    own_kind = type(optimizer).__name__
    same_rule = kind.removesuffix(EIGHT_BITS) == own_kind.removesuffix(EIGHT_BITS)
    if not same_rule or len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{folder}: saved from {kind} with {len(groups)} parameter groups, this run has {own_kind} with "
            f"{len(optimizer.param_groups)}; continue with the same optimizer, or load the weights only"
        )
    coded = any(flat.coded_numel for flat in optimizer.units.trainable)  # adapters have fp32 moments in either case
    if kind != own_kind and coded and not optimizer.units.strategy.convert_state:
        then, here = ("8-bit" if each.endswith(EIGHT_BITS) else "fp32" for each in (kind, own_kind))
        raise UserError(
            f"{folder}: its moments are {then}, those of this run {here}. Continue with the optimizer of the checkpoint, or "
            "let them be converted: optimizer.convert_state: true (in the Trainer ftkit={'convert_state': True})"
        )
    wanted = {segment.name for flat in optimizer.units.trainable for segment in flat.layout.segments}
    if wanted - steps:
        raise UserError(f"{folder}: has no optimizer state of {min(wanted - steps)}; it was not trained then")
    if steps - wanted:
        raise UserError(f"{folder}: has optimizer state of {min(steps - wanted)}, which this run does not train")
    members, now = saved.get("members") or {}, optimizer.group_of
    moved = [name for name in sorted(now) if members.get(name, now[name]) != now[name]]
    if moved:
        raise UserError(
            f"{folder}: {moved[0]} was in parameter group {members[moved[0]]!r:.20}, and is in group {now[moved[0]]} of "
            "this run's optimizer: its learning rate would be that of another group. Make the same groups in the same order"
        )
    for own, group in zip(optimizer.plain_groups(), groups):
        odd = [key for key in _known(optimizer) & set(group) if not alike(group[key], own.get(key, own["lr"]))]
        if odd:
            raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.groups is not valid ({min(odd)})")
    former = optimizer.kind.of(optimizer.kind.needed(groups))
    if former.moments != optimizer.rule.moments:
        then, here = (", ".join(rule.moments) or "no moments" for rule in (former, optimizer.rule))
        keys = " and ".join(optimizer.kind.optional)
        raise UserError(f"{folder}: its {kind} keeps {then}, and this run's keeps {here}: set {keys} as it was")
    scale = saved["loss_scale"]
    if not alike(scale, asdict(LossScale())) or not 0 < scale["value"] < math.inf:
        raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.loss_scale is not valid")


def _known(optimizer: ShardedOptimizer) -> set[str]:
    """Return the keys of a parameter group that a checkpoint always sets."""
    return {*optimizer.hyper_parameters, "initial_lr"}


def _check_names(folder: Path, places: Places, units: ShardedModel) -> None:
    """Raise for tensors that the model does not have: a smaller model must not load a part of a larger one."""
    own = {segment.name for flat in units.flats for segment in flat.layout.segments} | set(persistent_buffers(units.model))
    others = {name for _, name in places} - own
    if others:
        odd = f"{min(others)!r:.200}"
        raise UserError(f"{folder}: holds {odd}, which this model does not have; it was saved from another model")


def _wanted(
    units: ShardedModel, optimizer: ShardedOptimizer | None, *, frozen: bool, state: bool
) -> Iterator[tuple[FlatParameter, tuple[str, ...], list[Pieces]]]:
    """Yield each flat parameter to read, its kinds in order of preference, and this rank's stores."""
    for flat in units.flats:
        stores: list[Pieces] = [flat.weights]
        if optimizer is not None and flat.trainable:
            own = optimizer.state_of(flat)
            if isinstance(own.master, SplitMaster):
                stores = [own.master]
            elif own.master is not flat.weights:
                stores = [own.master, flat.weights]
            for moment, store in own.moments.items() if state else ():
                yield flat, (moment,), [store]
        if flat.trainable or frozen:
            yield flat, WEIGHT_KINDS, stores


def _file_of(places: Places, kinds: tuple[str, ...], name: str, shape: tuple[int, ...], folder: Path) -> CheckedFile:
    """Return the file that has a tensor, of the first of `kinds` that the checkpoint has. Raise UserError if none has it."""
    file = next((places[kind, name] for kind in kinds if (kind, name) in places), None)
    if file is None:
        raise UserError(f"{folder}: has no {kinds[0]} of {name}; it was saved from another model")
    if file.entries[name].shape != shape:
        raise UserError(f"{file.path}: {name} has shape {file.entries[name].shape}, the model needs {shape}")
    return file


def _source(
    places: Places, kinds: tuple[str, ...], segment: Segment, folder: Path, optimizer: ShardedOptimizer | None
) -> CheckedFile | CodedFile:
    """Return the file that has a tensor, and its scales if it is coded."""
    file = _file_of(places, kinds, segment.name, segment.shape, folder)
    if optimizer is None or kinds == WEIGHT_KINDS or file.entries[segment.name].dtype != torch.uint8:
        return file
    kind = kinds[0] + SCALES
    if segment.numel % GROUP_NUMEL or (kind, segment.name) not in places:
        raise BrokenCheckpoint(f"{file.path}: {segment.name} is in 8 bits, without {kind} or not in groups of {GROUP_NUMEL}")
    scales = _file_of(places, (kind,), segment.name, (segment.numel // GROUP_NUMEL,), folder)
    return CodedFile(file, scales, segment.name, root=kinds[0] in optimizer.rule.roots, host=optimizer.host)


@torch.no_grad()
def _read_buffers(places: Places, model: nn.Module, folder: Path) -> None:
    """Fill the persistent buffers that a checkpoint has."""
    for name, buffer in persistent_buffers(model).items():
        if (BUFFERS, name) in places:
            values = torch.empty(buffer.numel(), dtype=buffer.dtype)
            _file_of(places, (BUFFERS,), name, tuple(buffer.shape), folder).read(name, 0, values)
            buffer.copy_(values.view(buffer.shape))


@dataclass(frozen=True)
class _Shard:
    """This rank's shard of a flat parameter in one kind.

    Args:
        flat: The flat parameter.
        stores: Stores (S,) to fill. Files are read into the first one, the widest, which is copied to the others.
        files: The file of each tensor.
    """

    flat: FlatParameter
    stores: Sequence[Pieces]
    files: dict[str, CheckedFile | CodedFile]

    def _tensors(self) -> Iterator[tuple[CheckedFile | CodedFile, str, int, int]]:
        """Yield the file, name, first element and number of elements of this rank's part of each tensor."""
        for span in self.flat.layout.spans(*self.flat.layout.shard_range(self.flat.rank)):
            yield self.files[span.segment.name], span.segment.name, span.start - span.segment.start, span.numel

    def expected(self) -> Iterator[Key]:
        """Yield the pieces that `read` asks for, in order. A piece may come several times in a row."""
        for file, _, first, numel in self._tensors():
            if isinstance(file, CodedFile):
                yield from file.scale_keys(first, numel)
        for file, name, first, numel in self._tensors():
            yield from file.keys(name, first, numel)

    def read(self) -> None:
        """Fill the stores. Reading goes on ahead while a piece is written to the NVMe tier."""
        coded = [(file, start, numel) for file, _, start, numel in self._tensors() if isinstance(file, CodedFile)]
        for file, start, numel in coded:
            file.read_scales(start, numel)
        base, stop = self.flat.layout.shard_range(self.flat.rank)
        first, *others = self.stores
        for low, high in max((list(store.pieces()) for store in self.stores), key=len):  # whole pieces of each store
            piece = first.blank(low, high)
            for span in self.flat.layout.spans(base + low, min(base + high, stop)):
                out = piece[span.start - base - low : span.stop - base - low]
                self.files[span.segment.name].read(span.segment.name, span.start - span.segment.start, out)
            piece[max(stop - base - low, 0) :].zero_()  # the padding
            for other in others:
                copy = other.blank(low, high)
                copy.copy_(piece)
                other.write(low, copy)
            first.write(low, piece)
        for file, _, _ in coded:
            file.release()
