"""Checkpoints: every rank writes its own ranges of every line, and reads whatever ranges it needs.

A folder holds, for each line and kind, one safetensors file whose data section is the flat parameter (storage.py):

    <line>.weights.safetensors      compute dtype; only where there is no master (fp32 weights, frozen lines)
    <line>.master.safetensors       fp32
    <line>.exp_avg.safetensors      fp32, and one for each further moment
    model.buffers.safetensors       persistent buffers, if the model has any (buffers.py)
    manifest.json                   format version, hyper-parameters, step counts, loss scale, and the pieces of every file
                                    with their checksums (pieces.py); sealed (seal.py), written last

It is written under a temporary name and renamed when it is complete and on the disk, so a folder that has the final name is
whole. No world size, stage, tier or slot appears in it: reading finds tensors by name, so the lines may be cut differently
(another stage, other ranks). Not a byte is used before the piece that it lies in was compared. No rank ever holds more than
a piece beyond its own shards.

[Note: saving while training goes on]

    weights and state only change in an update, and an update comes after a forward and a backward. A thread writes line
    after line in the order of the updates; a later update of a line waits until that line is written (`LineUpdate`).
    So nothing is copied, on any tier, and training waits only where a save takes longer than a forward and a backward.
    What lies on NVMe on the checkpoint's own file system, if that can share blocks, is taken by reference (clone.py): in no
    time, so that no update waits; what is left is to read it once, for the checksums.
    Collectives stay where they are: `Saving.poll`, at the end of a step, asks whether all ranks are done, and names the
    folder.

It refuses a folder that is not complete, of another format, of another model, or changed in a single byte, by name. What it
costs: the bytes, past the page cache where the file system lets it; 8 MiB of memory.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.buffers import FILE, persistent_buffers, read_buffers, write_buffers
from ftkit.engine.durable import make_folder, rank_zero, sync_folder
from ftkit.engine.flat import FlatParameter
from ftkit.engine.flatfile import PIECE_NUMEL
from ftkit.engine.layout import SHARD_ALIGNMENT, Span
from ftkit.engine.manifest import FORMAT, MANIFEST, SUFFIX, alike, read_manifest
from ftkit.engine.optimizer import LossScale, ShardedOptimizer, ranges
from ftkit.engine.pieces import Piece, PieceBuffer, PieceReader, PieceWriter, read_back
from ftkit.engine.seal import BrokenCheckpoint, checksum, write_sealed
from ftkit.engine.shard import Units
from ftkit.engine.storage import TensorFile, create_file, data_start
from ftkit.engine.tiers import FileStore, Store
from ftkit.errors import UserError

RUNNING, DONE, FAILED = 0, 1, 2


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
        UserError: if the folder exists or cannot be written; nothing is left of it then.

    Cost: the bytes written; no memory beyond 8 MiB a rank.
    """
    Saving(folder, units, optimizer, extra=extra, frozen=frozen).wait()


def checkpoint_bytes(units: Units, optimizer: ShardedOptimizer | None = None, *, frozen: bool = True) -> int:
    """Return the bytes that a checkpoint takes on its disk, small files aside."""
    if optimizer is not None:
        optimizer.prepare()
    return sum(flat.layout.numel * dtype.itemsize for flat, _, dtype, _ in _kinds(units, optimizer, frozen))


class Saving:
    """A checkpoint on its way to the disk, while training goes on; see [Note: saving while training goes on].

    Args: as of `save_checkpoint`. A collective.

    Attributes:
        seconds: that the writing took on this rank, once it is done. blocked_seconds: of these, what updates waited.
        shared_bytes: of this rank's part, what the file system shares with the NVMe tier instead of copying it.

    Raises:
        UserError: if the folder exists or cannot be written, or another save of the same units is on its way.
    """

    def __init__(
        self,
        folder: str | Path,
        units: Units,
        optimizer: ShardedOptimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        frozen: bool = True,
    ) -> None:
        if units.saving is not None:
            raise UserError(f"{folder}: another checkpoint of this model is still being written; wait for it first")
        self.folder = Path(folder)
        self.temporary = self.folder.with_name(self.folder.name + ".writing")
        self.units = units
        if optimizer is not None:
            optimizer.prepare()
        self.updater = optimizer.updater if optimizer is not None else None
        self.update = self.updater.running if self.updater is not None else None  # that of the last step, if deferred
        self.jobs = [_Job.of(flat, kind, dtype, store) for flat, kind, dtype, store in _kinds(units, optimizer, frozen)]
        self.manifest = _manifest(units, optimizer, dict(extra or {}))
        self.error: BaseException | None = None
        self.stop = False
        self.ended = False  # well: the folder has its name
        self.problem: str | None = None  # it ended badly
        self.written: dict[str, list[Piece]] = {}
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(units.model).items()}
        self.seconds, self.shared_bytes = 0.0, 0
        self._create()
        for flat in units.trainable:
            flat.captured, flat.capture_seconds = threading.Event(), 0.0
        units.saving = self
        self.ready = torch.cuda.current_stream().record_event() if units.comm.device.type == "cuda" else None
        self.thread = threading.Thread(target=self._write, name="ftkit-save", daemon=True)
        self.thread.start()

    @property
    def blocked_seconds(self) -> float:
        """Seconds that updates have waited for lines to be written."""
        return sum(flat.capture_seconds for flat in self.units.trainable)

    def poll(self) -> bool:
        """Return whether the checkpoint is there under its name. A collective, at the same place on all ranks.

        Raises:
            UserError: if it could not be written; nothing is left of it then, and training can go on.
        """
        if self.problem is not None:
            raise UserError(self.problem)
        if self.ended:
            return True
        own = RUNNING if self.thread.is_alive() else DONE if self.error is None else FAILED
        told = self.units.comm.all_numbers(own)
        if FAILED in told:
            self.give_up()
            raise UserError(self.problem) from self.error
        if min(told) == RUNNING:
            return False
        self._finish()
        self.ended = True
        return True

    def wait(self) -> None:
        """Return when the checkpoint is there under its name. A collective.

        Raises:
            UserError: as `poll`.
        """
        self.thread.join()
        self.poll()

    # --- the thread

    def _write(self) -> None:
        began = time.perf_counter()
        try:
            if self.update is not None:
                self.update.result()
            if self.updater is not None and self.updater.error is not None:
                raise UserError(f"the last update failed ({self.updater.error}): there is no state to save")
            with torch.cuda.stream(self._side_stream()):
                buffer = PieceBuffer()
                shared = [job.share(self.temporary) for job in self.jobs]
                self.shared_bytes = sum(len(sums) * job.piece_bytes for job, sums in zip(self.jobs, shared))
                for number, (job, sums) in enumerate(zip(self.jobs, shared), 1):
                    self.written[job.file] = job.write(self.temporary, buffer, lambda: self.stop, len(sums))
                    if number == len(self.jobs) or self.jobs[number].flat is not job.flat:
                        self._capture(job.flat)
                for job, sums in zip(self.jobs, shared):  # last: no update waits for this
                    self.written[job.file] += job.read_back(self.temporary, buffer, sums)
        except BaseException as error:
            self.error = error
        finally:
            for flat in self.units.trainable:
                self._capture(flat)
            self.seconds = time.perf_counter() - began

    def _side_stream(self) -> torch.cuda.Stream | None:
        """Return a stream that begins where the save was asked for, and does not stand in line behind training."""
        if self.ready is None:
            return None
        stream = torch.cuda.Stream(self.units.comm.device)
        stream.wait_event(self.ready)
        if self.updater is not None and self.updater.stream is not None:
            stream.wait_stream(self.updater.stream)
        return stream

    @staticmethod
    def _capture(flat: FlatParameter) -> None:
        if flat.captured is not None:
            flat.captured.set()

    # --- the folder

    def _create(self) -> None:
        with rank_zero(self.units.comm) as first:
            if first:
                if self.folder.exists():
                    raise UserError(f"{self.folder}: exists already; give a new folder for the checkpoint")
                shutil.rmtree(self.temporary, ignore_errors=True)
                make_folder(self.temporary)
                try:
                    for job in self.jobs:
                        shapes = [(segment.name, segment.shape, job.dtype) for segment in job.flat.layout.segments]
                        create_file(self.temporary / job.file, shapes)
                    if self.buffers:
                        self.written[FILE] = write_buffers(self.temporary, self.buffers)
                except OSError:
                    shutil.rmtree(self.temporary, ignore_errors=True)
                    raise

    def _finish(self) -> None:
        """Write the manifest and give the folder its name."""
        told = self.units.comm.all(self.written)
        self._forget()
        try:
            with rank_zero(self.units.comm) as first:
                if first:
                    names = [*(job.file for job in self.jobs), *([FILE] if self.buffers else [])]
                    self.manifest["files"] = {name: _listed(self.temporary / name, told) for name in names}
                    write_sealed(self.temporary / MANIFEST, self.manifest)
                    sync_folder(self.temporary)
                    self.temporary.rename(self.folder)
                    sync_folder(self.folder.parent)
        except Exception as error:
            self.problem = f"the checkpoint {self.folder} could not be written: {error}"
            if self.units.comm.rank == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise UserError(self.problem) from error

    def give_up(self) -> None:
        """Stop, and remove what was written. A collective; `problem` then says what the first rank that failed said."""
        self.stop = True
        self.thread.join()
        problem = None
        if self.error is not None and not isinstance(self.error, _Stopped):
            known = isinstance(self.error, (OSError, UserError))
            problem = str(self.error) if known else f"{type(self.error).__name__}: {self.error}"
        told = [text for text in self.units.comm.all(problem) if text is not None]
        self._forget()
        if self.units.comm.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.units.comm.barrier()
        self.problem = f"the checkpoint {self.folder} could not be written: {told[0] if told else 'it was stopped'}"

    def _forget(self) -> None:
        for flat in self.units.trainable:
            flat.captured = None
        self.units.saving = None


class _Stopped(Exception):
    """Another rank's part failed."""


@dataclass(frozen=True)
class _Job:
    """One file: this rank's elements [first, last) of a line's `store` (S,), which begins at element `base` of the line."""

    flat: FlatParameter
    file: str
    dtype: torch.dtype
    store: Store
    base: int
    first: int
    last: int

    @classmethod
    def of(cls, flat: FlatParameter, kind: str, dtype: torch.dtype, store: Store) -> _Job:
        """Return the job of this rank; a replicated line is cut among the ranks all the same."""
        base, stop = flat.layout.shard_range(flat.rank)
        first, last = base, stop
        if flat.owners < flat.comm.world_size:
            part = -(-stop // (flat.comm.world_size * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT
            first = min(part * flat.comm.rank, stop)
            last = min(first + part, stop)
        return cls(flat, f"{flat.name}.{kind}{SUFFIX}", dtype, store, base, first, last)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of a store in a file."""
        return PIECE_NUMEL * self.dtype.itemsize

    def share(self, folder: Path) -> list[int]:
        """Take the whole pieces of a store on NVMe by reference; return their sums, none where that cannot be done."""
        count = (self.last - self.first) // PIECE_NUMEL
        if not isinstance(self.store, FileStore) or self.first != self.base or count < 1:
            return []
        path = folder / self.file
        handle = os.open(path, os.O_WRONLY)
        try:
            return self.store.file.share(count, handle, data_start(path) + self.first * self.dtype.itemsize) or []
        finally:
            os.close(handle)

    def read_back(self, folder: Path, buffer: PieceBuffer, sums: list[int]) -> list[Piece]:
        """Return the pieces of what was taken by reference, compared with its sums, and durable."""
        path = folder / self.file
        start = data_start(path) + self.first * self.dtype.itemsize
        return read_back(path, start, sums, self.piece_bytes, buffer) if sums else []

    def write(self, folder: Path, buffer: PieceBuffer, stopped: Callable[[], bool], shared: int) -> list[Piece]:
        """Write the range, make it durable, and return its pieces.

        Args:
            shared: pieces of the store at its beginning that are there already.

        Raises:
            OSError: of the drive. _Stopped: if `stopped` said so.
        """
        if self.first >= self.last:
            return []
        if shared:
            return replace(self, first=self.first + shared * PIECE_NUMEL).write(folder, buffer, stopped, 0)
        path = folder / self.file
        writer = PieceWriter(path, data_start(path) + self.first * self.dtype.itemsize, buffer)
        try:
            for low, high in self.store.pieces():
                begin, end = max(self.base + low, self.first), min(self.base + high, self.last)
                if begin < end:
                    piece = self.store.read(low, high)
                    writer.write(piece[begin - self.base - low : end - self.base - low])
                if stopped():
                    raise _Stopped
        except BaseException:
            writer.abandon()
            raise
        return writer.close()


def _listed(path: Path, told: list[dict[str, list[Piece]]]) -> list[Any]:
    """Return [bytes, pieces] of a file: its header, and what every rank has written of it."""
    start = data_start(path)
    with open(path, "rb") as file:
        header = Piece(0, start, checksum(file.read(start)))
    pieces = sorted([header, *(piece for written in told for piece in written.get(path.name, ()))])
    return [path.stat().st_size, [list(piece) for piece in pieces]]


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
        BrokenCheckpoint: if a file is missing or a byte of it is not what was written.
        UserError: if it is of a later format, or of another model or optimizer: names and shapes of tensors are compared.

    Cost: reads this rank's ranges only, in whole pieces; 8 MiB of memory.
    """
    folder = Path(folder)
    if units.saving is not None:
        with suppress(UserError):  # told to whoever began it
            units.saving.wait()
    (optimizer or units).settle()
    extra: dict[str, Any] = {}
    problem: UserError | None = None
    try:
        extra = _read(folder, units, optimizer, frozen=frozen)
    except UserError as error:  # of this rank's share: the others must not go on alone
        problem = error
    told = units.comm.all(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if others := [text for text in told if text is not None]:
        raise BrokenCheckpoint(others[0])
    units.rewritten()
    return extra


def _read(folder: Path, units: Units, optimizer: ShardedOptimizer | None, *, frozen: bool) -> dict[str, Any]:
    """Read this rank's share of a checkpoint; see `load_checkpoint`."""
    manifest = read_manifest(folder)
    scale = _check_optimizer(folder, manifest, optimizer) if optimizer is not None else None
    with ExitStack() as stack:
        places = open_files(folder, manifest, stack)
        _check_names(folder, places, units)
        read_buffers(folder, places, units.model)
        for flat in units.flats:
            stores = [flat.weights]
            if optimizer is not None and flat.trainable:
                state = optimizer.line(flat)
                if state.master is not flat.weights:
                    stores = [state.master, flat.weights]
                for moment, store in state.moments.items():
                    _read_line(flat, places, (moment,), [store], folder)
                steps = manifest["optimizer"]["steps"]
                state.steps = [steps[segment.name] for segment in flat.layout.segments]
            if flat.trainable or frozen:
                _read_line(flat, places, ("master", "weights"), stores, folder)
    if optimizer is not None and scale is not None:
        if scale.dynamic and optimizer.loss_scale.dynamic:  # else it was saved, or goes on, in a wider dtype
            optimizer.loss_scale = scale
        for group, saved in zip(optimizer.param_groups, manifest["optimizer"]["groups"]):
            known = _known(optimizer)
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved.items() if key in known})
    return dict(manifest["extra"])


def check_checkpoint(folder: str | Path, part: int = 0, parts: int = 1) -> None:
    """Compare every byte of a checkpoint with its checksums, or one of `parts` shares of them.

    Raises:
        BrokenCheckpoint: naming the first file that is missing or changed. UserError: of another format.

    Cost: one read of the share; 8 MiB of memory.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    buffer = PieceBuffer()
    for name, (size_bytes, pieces) in manifest["files"].items():
        reader = PieceReader(folder / name, size_bytes, pieces, buffer)
        try:
            reader.check(range(part, len(reader.pieces), parts))
        finally:
            reader.close()


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
    for own, group in zip(optimizer.param_groups, groups):
        odd = [key for key in _known(optimizer) & set(group) if not alike(group[key], own.get(key, own["lr"]))]
        if odd:
            raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.groups is not valid ({min(odd)})")
    scale = saved["loss_scale"]
    if not alike(scale, asdict(LossScale())) or not 0 < scale["value"] < math.inf:
        raise BrokenCheckpoint(f"{folder / MANIFEST}: optimizer.loss_scale is not valid")
    return LossScale(**scale)


def _known(optimizer: ShardedOptimizer) -> set[str]:
    """Return the keys of a group that a checkpoint sets."""
    return {*optimizer.defaults, "initial_lr"}


def _kinds(
    units: Units, optimizer: ShardedOptimizer | None, frozen: bool
) -> list[tuple[FlatParameter, str, torch.dtype, Store]]:
    """Return what is written: (line, kind, dtype, this rank's part (S,)), trained lines first, in the order of updates."""
    kinds: list[tuple[FlatParameter, str, torch.dtype, Store]] = []
    for flat in units.trainable:
        state = optimizer.lines[flat.name] if optimizer is not None else None
        if state is None or state.master is flat.weights:
            kinds.append((flat, "weights", flat.dtype, flat.weights))
        else:
            kinds.append((flat, "master", torch.float32, state.master))
        kinds += [(flat, name, torch.float32, store) for name, store in (state.moments if state else {}).items()]
    if frozen:
        kinds += [(flat, "weights", flat.dtype, flat.weights) for flat in units.flats if not flat.trainable]
    return kinds


class _CheckedFile(TensorFile):
    """A safetensors file of a checkpoint, of which not a byte is used before its piece was compared."""

    def __init__(self, path: Path, size_bytes: Any, pieces: Any, buffer: PieceBuffer) -> None:
        self.reader = PieceReader(path, size_bytes, pieces, buffer)
        try:
            super().__init__(path)
        except BaseException:
            self.reader.close()
            raise

    def fill(self, position: int, out: bytearray) -> bool:
        """See `TensorFile.fill`."""
        self.reader.read(position, memoryview(out))
        return True

    def close(self) -> None:
        """Close the file."""
        self.reader.close()
        super().close()


Places = dict[tuple[str, str], TensorFile]


def open_files(folder: Path, manifest: dict[str, Any], stack: ExitStack) -> Places:
    """Open a checkpoint's files until `stack` closes; return for each (kind, tensor name) the one that has it.

    Raises:
        BrokenCheckpoint: if one is missing or of another size.
    """
    places: Places = {}
    buffer = PieceBuffer()
    for name, (size_bytes, pieces) in sorted(manifest["files"].items()):
        kind = name.removesuffix(SUFFIX).rpartition(".")[2]
        file = stack.enter_context(_CheckedFile(folder / name, size_bytes, pieces, buffer))
        places.update({(kind, tensor): file for tensor in file.entries})
    return places


def _check_names(folder: Path, places: Places, units: Units) -> None:
    """Raise for tensors that the model does not have: a shorter model would go on with a part of a longer one."""
    own = {segment.name for flat in units.flats for segment in flat.layout.segments} | set(persistent_buffers(units.model))
    others = {name for _, name in places} - own
    if others:
        odd = f"{min(others)!r:.200}"
        raise UserError(f"{folder}: holds {odd}, which this model does not have; it was saved from another model")


def _read_line(flat: FlatParameter, places: Places, kinds: tuple[str, ...], stores: Sequence[Store], folder: Path) -> None:
    """Read this rank's range of a line, from the first of `kinds` that has the tensor, into all of `stores` (S,).

    The file is read once: what is read into the first, the widest, is copied to the others.
    """

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

    base, stop = flat.layout.shard_range(flat.rank)
    first, *others = stores
    for low, high in ranges(*stores):
        piece = first.blank(low, high)
        for span in flat.layout.spans(base + low, min(base + high, stop)):
            read(span, piece[span.start - base - low : span.stop - base - low])
        piece[max(stop - base - low, 0) :].zero_()  # the padding
        first.write(low, piece)
        for other in others:
            copy = other.blank(low, high)
            copy.copy_(piece)
            other.write(low, copy)


def _manifest(units: Units, optimizer: ShardedOptimizer | None, extra: dict[str, Any]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "lines": {flat.name: [segment.name for segment in flat.layout.segments] for flat in units.flats},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in units.dtypes.items()},  # before sharding
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
                for segment, count in zip(flat.layout.segments, optimizer.lines[flat.name].steps)
            },
        }
    return manifest
