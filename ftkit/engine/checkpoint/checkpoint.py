"""Checkpoints: every rank writes its own ranges of every line, and reads whatever ranges it needs.

A folder holds, for each line and kind, one safetensors file whose data section is the flat parameter (storage.py):

    <line>.weights.safetensors      compute dtype; only where there is no master (fp32 weights, frozen lines)
    <line>.master.safetensors       fp32
    <line>.exp_avg.safetensors      fp32, and one for each further moment
    model.buffers.safetensors       persistent buffers, if the model has any (buffers.py)
    manifest.json                   format version, hyper-parameters, step counts, loss scale, and the pieces of every file
                                    with their checksums (pieces.py); sealed (sealed_files.py), written last

How it is written is told in saving.py. No world size, stage, tier or slot appears in it: reading finds tensors by name, so
the lines may be cut differently (another stage, other ranks). Not a byte is used before the piece that it lies in was
compared. No rank ever holds more than a few pieces beyond its own shards.

It refuses a folder that is not complete, of another format, of another model, or changed in a single byte, by name. What it
costs: the bytes, past the page cache where the file system lets it; 24 MiB of memory, twice that and more where files
are filled.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.arena import Arena, populate
from ftkit.engine.core.buffers import BUFFERS, persistent_buffers, read_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.shard import Units
from ftkit.engine.files.checked_file import CheckedFile, Places, open_files
from ftkit.engine.files.durable import all_ranks
from ftkit.engine.files.flat_file import PIECE_NUMEL, DiskError, Request
from ftkit.engine.files.manifest import MANIFEST, alike, read_manifest
from ftkit.engine.files.piece_reader import Key, PieceBuffers, PieceReader
from ftkit.engine.files.sealed_files import BrokenCheckpoint
from ftkit.engine.memory.tiers import Store
from ftkit.engine.optim.optimizer import LossScale, ShardedOptimizer, ranges
from ftkit.errors import UserError
from ftkit.spec.layout import Span

BEHIND = 2
"""Pieces on their way to files of the NVMe tier while further ones are read: 4 MiB each."""

WEIGHTS = ("master", "weights", BUFFERS)
"""Kinds of files that hold a model."""

POPULATED_BYTES = 8 << 20
"""Memory that is brought in at a time, ahead of what is read."""


def load_checkpoint(
    folder: str | Path,
    units: Units,
    optimizer: ShardedOptimizer | None = None,
    *,
    frozen: bool = True,
    state: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint in place, on any number of ranks and at any stage. A collective.

    Args:
        folder: the checkpoint's folder.
        units: units of the sharded model that is filled.
        optimizer: the optimizer that is filled, too; None reads weights only.
        frozen: expect frozen weights in it.
        state: read the optimizer's moments, counts and settings, too; False reads its masters alone, and the rest stays as
            it is.

    Returns:
        The `extra` that was saved.

    Raises:
        BrokenCheckpoint: if a file is missing or a byte of it is not what was written.
        UserError: if it is of a later format, or of another model or optimizer: names and shapes of tensors are compared.

    Cost: reads this rank's ranges only, in whole pieces, ahead; 24 MiB of memory, 48 where files are filled.
    """
    folder = Path(folder)
    if units.saving is not None:
        with suppress(UserError):  # told to whoever began it
            units.saving.wait()
    with all_ranks(units.comm, BrokenCheckpoint):
        (optimizer or units).settle()
        extra = _read(folder, units, optimizer, frozen=frozen, state=state)
    units.rewritten()
    return extra


def _read(folder: Path, units: Units, optimizer: ShardedOptimizer | None, *, frozen: bool, state: bool) -> dict[str, Any]:
    """Read this rank's share of a checkpoint; see `load_checkpoint`."""
    manifest = read_manifest(folder)
    scale = _check_optimizer(folder, manifest, optimizer) if optimizer is not None and state else None
    with ExitStack() as stack:
        if optimizer is not None and state:
            stack.enter_context(optimizer.overwritten())
        elif optimizer is not None:
            optimizer.prepare()
        buffers = stack.enter_context(PieceBuffers())
        places = open_files(folder, manifest, buffers, stack, None if state else WEIGHTS)
        _check_names(folder, places, units)
        lines = [
            _Line(flat, stores, [_file_of(places, kinds, span, folder) for span in _own_spans(flat)])
            for flat, kinds, stores in _wanted(units, optimizer, frozen=frozen, state=state)
        ]
        read_buffers(places, units.model)
        buffers.expect(key for key, _ in groupby(key for line in lines for key in line.expected()))
        with _Behind() as behind, _Populated(store for line in lines for store in line.stores):
            for line in lines:
                line.read(behind)
    if optimizer is not None and state:
        steps = manifest["optimizer"]["steps"]
        for flat in units.trainable:
            optimizer.line(flat).steps = [steps[segment.name] for segment in flat.layout.segments]
    if optimizer is not None and scale is not None:
        if scale.dynamic and optimizer.loss_scale.dynamic:  # else it was saved, or goes on, in a wider dtype
            optimizer.loss_scale = scale
        for group, own, saved in zip(optimizer.param_groups, optimizer.plain_groups(), manifest["optimizer"]["groups"]):
            known = _known(optimizer)
            taken = {key: v for key, v in saved.items() if key in known or (key != "params" and alike(v, own.get(key, v)))}
            group.update({key: tuple(v) if isinstance(v, list) and key in known else v for key, v in taken.items()})
    return dict(manifest["extra"])


def check_checkpoint(folder: str | Path, part: int = 0, parts: int = 1) -> None:
    """Compare every byte of a checkpoint with its checksums, or one of `parts` shares of them.

    Raises:
        BrokenCheckpoint: naming the first file that is missing or changed. UserError: of another format.

    Cost: one read of the share; 24 MiB of memory.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    with PieceBuffers() as buffers:
        for name, (size_bytes, pieces) in manifest["files"].items():
            with closing(PieceReader(folder / name, size_bytes, pieces, buffers)) as reader:
                numbers = range(part, len(reader.pieces), parts)
                buffers.expect((reader, number) for number in numbers)
                for number in numbers:
                    buffers.piece(reader, number)


def _check_optimizer(folder: Path, manifest: dict[str, Any], optimizer: ShardedOptimizer) -> LossScale:
    """Raise unless the saved optimizer state belongs to an optimizer like this one; return its loss scale."""
    saved = manifest.get("optimizer")
    if saved is None:
        raise UserError(f"{folder}: holds weights only; its optimizer state was not saved")
    kind, groups, steps = saved["class"], saved["groups"], set(saved["steps"])
    if kind != type(optimizer).__name__ or len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{folder}: saved from {kind} with {len(groups)} parameter groups, this run has {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)}; continue with the same optimizer, or load the weights only"
        )
    wanted = {segment.name for flat in optimizer.units.trainable for segment in flat.layout.segments}
    if wanted - steps:
        raise UserError(f"{folder}: has no optimizer state of {min(wanted - steps)}; it was not trained then")
    if steps - wanted:
        raise UserError(f"{folder}: has optimizer state of {min(steps - wanted)}, which this run does not train")
    members, now = saved.get("members", {}), optimizer.groups_by_name()  # earlier versions did not note them
    if not isinstance(members, dict):
        raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.members is not valid")
    moved = [name for name in sorted(now) if members.get(name, now[name]) != now[name]]
    if moved:
        raise UserError(
            f"{folder}: {moved[0]} was in parameter group {members[moved[0]]!r:.20}, and is in group {now[moved[0]]} of "
            "this run's optimizer: each would go on with the learning rate of the other. Make the groups as they were, in "
            "the same order"
        )
    for own, group in zip(optimizer.plain_groups(), groups):
        odd = [key for key in _known(optimizer) & set(group) if not alike(group[key], own.get(key, own["lr"]))]
        if odd:
            raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.groups is not valid ({min(odd)})")
    scale = saved["loss_scale"]
    if not alike(scale, asdict(LossScale())) or not 0 < scale["value"] < math.inf:
        raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.loss_scale is not valid")
    return LossScale(**scale)


def _known(optimizer: ShardedOptimizer) -> set[str]:
    """Return the keys of a group that a checkpoint sets."""
    return {*optimizer.hyper_parameters, "initial_lr"}


def _check_names(folder: Path, places: Places, units: Units) -> None:
    """Raise for tensors that the model does not have: a shorter model would go on with a part of a longer one."""
    own = {segment.name for flat in units.flats for segment in flat.layout.segments} | set(persistent_buffers(units.model))
    others = {name for _, name in places} - own
    if others:
        odd = f"{min(others)!r:.200}"
        raise UserError(f"{folder}: holds {odd}, which this model does not have; it was saved from another model")


def _wanted(
    units: Units, optimizer: ShardedOptimizer | None, *, frozen: bool, state: bool
) -> Iterator[tuple[FlatParameter, tuple[str, ...], list[Store]]]:
    """Yield what is read: (line, kinds of which the first that a checkpoint has is taken, this rank's stores for it)."""
    for flat in units.flats:
        stores = [flat.weights]
        if optimizer is not None and flat.trainable:
            own = optimizer.line(flat)
            if own.master is not flat.weights:
                stores = [own.master, flat.weights]
            for moment, store in own.moments.items() if state else ():
                yield flat, (moment,), [store]
        if flat.trainable or frozen:
            yield flat, ("master", "weights"), stores


def _own_spans(flat: FlatParameter) -> Iterator[Span]:
    return flat.layout.spans(*flat.layout.shard_range(flat.rank))


def _file_of(places: Places, kinds: tuple[str, ...], span: Span, folder: Path) -> CheckedFile:
    """Return the file that has a span's tensor, in the first of `kinds` of which there is one.

    Raises:
        UserError: if none has it, or in another shape.
    """
    name = span.segment.name
    file = next((places[kind, name] for kind in kinds if (kind, name) in places), None)
    if file is None:
        raise UserError(f"{folder}: has no {kinds[0]} of {name}; it was saved from another model")
    if file.entries[name].shape != span.segment.shape:
        raise UserError(f"{file.path}: {name} has shape {file.entries[name].shape}, the model needs {span.segment.shape}")
    return file


@dataclass(frozen=True)
class _Line:
    """This rank's range of a line in one kind: the stores (S,) that it is read into, and the file of each of its spans.

    The files are read once: what is read into the first store, the widest, is copied to the others.
    """

    flat: FlatParameter
    stores: Sequence[Store]
    files: Sequence[CheckedFile]

    def expected(self) -> Iterator[Key]:
        """Yield the pieces that `read` will ask for, in order; one may come several times in a row."""
        for span, file in zip(_own_spans(self.flat), self.files):
            yield from file.keys(span.segment.name, span.start - span.segment.start, span.stop - span.start)

    def read(self, behind: _Behind) -> None:
        """Read it into its stores.

        Raises:
            BrokenCheckpoint: if a byte is not what was written. DiskError: of the NVMe tier.
        """
        base, stop = self.flat.layout.shard_range(self.flat.rank)
        file_of = {span.segment.name: file for span, file in zip(_own_spans(self.flat), self.files)}
        first, *others = self.stores
        if self.flat.weights in self.stores:
            self.flat.origin = None  # from here on the weights are the checkpoint's
        for low, high in ranges(*self.stores):
            piece = behind.room(first, low, high)
            for span in self.flat.layout.spans(base + low, min(base + high, stop)):
                out = piece[span.start - base - low : span.stop - base - low]
                file_of[span.segment.name].read(span.segment.name, span.start - span.segment.start, out)
            piece[max(stop - base - low, 0) :].zero_()  # the padding
            for other in others:
                copy = behind.room(other, low, high)
                copy.copy_(piece)
                behind.put(other, low, copy)
            behind.put(first, low, piece)


class _Behind:
    """Pieces that are on their way to files while further ones are read, and the room in which they lie meanwhile."""

    def __init__(self) -> None:
        self.requests: deque[tuple[Request, Tensor]] = deque()
        self._rooms: list[Tensor] = []  # of `PIECE_NUMEL` fp32 each, on pages that a drive likes, free now
        self._room_of: dict[int, Tensor] = {}  # address of a piece to the room that it lies in

    def room(self, store: Store, start: int, stop: int) -> Tensor:
        """Return where a piece of `store` is to be made: in the store itself, or in a room for what `put` sends off."""
        if store.tensor is not None:
            return store.blank(start, stop)
        room = self._rooms.pop() if self._rooms else _room()
        piece = room.view(store.dtype)[: stop - start]
        self._room_of[piece.data_ptr()] = room
        return piece

    def put(self, store: Store, start: int, piece: Tensor) -> None:
        """Put a piece where it belongs, not before others have gone.

        Raises:
            DiskError: if one of those did not come through.
        """
        request = store.send(start, piece)
        if request is not None:
            self.requests.append((request, self._room_of.pop(piece.data_ptr())))
        if len(self.requests) > BEHIND:
            oldest, room = self.requests.popleft()
            oldest.wait()
            self._rooms.append(room)

    def __enter__(self) -> _Behind:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        problem: DiskError | None = None
        for request, _ in self.requests:  # all of them, whatever becomes of one: the next who writes there must be alone
            try:
                request.wait()
            except DiskError as error:
                problem = problem or error
        if problem is not None and kind is None:
            raise problem


def _room() -> Tensor:
    return Arena(4 * PIECE_NUMEL, torch.device("cpu")).take(PIECE_NUMEL, torch.float32)


class _Populated:
    """Brings in the memory of stores, in the order in which they will be filled, by a thread, until it is left.

    Host arenas of a resume have not been touched yet: whoever copies pieces there would wait for every page.
    """

    def __init__(self, stores: Iterable[Store]) -> None:
        tensors = (store.tensor for store in stores)
        self._tensors = [tensor for tensor in tensors if tensor is not None and tensor.device.type == "cpu"]
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftkit-populate")

    def __enter__(self) -> _Populated:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._thread.join()

    def _run(self) -> None:
        for tensor in self._tensors:
            for part in tensor.split(POPULATED_BYTES // tensor.element_size()):
                if self._left.is_set() or not populate(part):
                    return
