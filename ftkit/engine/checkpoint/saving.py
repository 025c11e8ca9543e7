"""Saving a checkpoint, at once or while training goes on: every rank writes its own ranges of every line.

What a folder holds is told in checkpoint.py. It is written under a temporary name and renamed when it is complete and on
the disk, so a folder that has the final name is whole. No rank ever holds more than two pieces beyond its own shards.

[Note: saving while training goes on]

    weights and state only change in an update, and an update comes after a forward and a backward. A thread writes line
    after line in the order of the updates; a later update of a line waits until that line is taken (`LineUpdate`).
    So nothing is copied, on any tier, and training waits only where a save takes longer than a forward and a backward.
    What lies on NVMe on the checkpoint's own file system, if that can share blocks, is taken by reference (reflink.py): in
    no time, so that no update waits; what is left is to read it once, for the checksums.
    Collectives stay where they are: `Saving.poll`, at the end of a step, asks whether all ranks are done, and names the
    folder.

What it costs: the bytes, past the page cache where the file system lets it, and 16 MiB of memory.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ftkit.engine import threads
from ftkit.engine.core.buffers import FILE, persistent_buffers, refuse_unsaved, write_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.shard import Units
from ftkit.engine.files.durable import all_ranks, make_folder, rank_zero, sync_folder
from ftkit.engine.files.finite import refuse_not_finite
from ftkit.engine.files.flat_file import PIECE_NUMEL
from ftkit.engine.files.manifest import FORMAT, MANIFEST, SUFFIX
from ftkit.engine.files.pieces import PIECE_BYTES, Piece, PieceWriter, WriteBehind, read_back
from ftkit.engine.files.sealed_files import checksum, write_sealed
from ftkit.engine.files.storage import create_file, data_start
from ftkit.engine.memory.tiers import FileStore, Store
from ftkit.engine.optim.optimizer import ShardedOptimizer
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
        folder: the folder to make; must not exist.
        units: units of the sharded model.
        optimizer: the optimizer whose state is written, too; None writes weights only.
        extra: anything JSON can hold, given back by `load_checkpoint`.
        frozen: also write frozen weights (an adapter's base can be loaded from where it came from).

    Raises:
        UserError: if the folder exists or cannot be written; nothing is left of it then.

    Cost: the bytes written; no memory beyond 16 MiB a rank.
    """
    Saving(folder, units, optimizer, extra=extra, frozen=frozen).wait()


def checkpoint_bytes(units: Units, optimizer: ShardedOptimizer | None = None, *, frozen: bool = True) -> int:
    """Return the bytes that a checkpoint takes on its disk, small files aside."""
    if optimizer is not None:
        optimizer.prepare()
    return sum(flat.layout.numel * dtype.itemsize for flat, _, dtype, _ in _kinds(units, optimizer, frozen))


class Saving:
    """A checkpoint on its way to the disk, while training goes on; see [Note: saving while training goes on]. A collective.

    Args:
        folder: the folder to make; must not exist.
        units: units of the sharded model.
        optimizer: the optimizer whose state is written, too; None writes weights only.
        extra: anything JSON can hold, given back by `load_checkpoint`.
        frozen: also write frozen weights (an adapter's base can be loaded from where it came from).

    Attributes:
        seconds: time that the writing took on this rank, once it is done.
        blocked_seconds: time for which updates waited for the writing, on this rank; it lies within `seconds`.
        shared_bytes: bytes of this rank's part that the file system shares with the NVMe tier instead of copying them.

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
        refuse_unsaved(units.model)
        self.folder = Path(folder)
        self.temporary = self.folder.with_name(self.folder.name + ".writing")
        self.units = units
        if optimizer is not None:
            optimizer.prepare()
        with all_ranks(units.comm):
            units.check_savable()
            (optimizer or units).take_edits()
        self.updater = optimizer.updater if optimizer is not None else None
        self.update = self.updater.running if self.updater is not None else None  # that of the last step, if deferred
        self.jobs = [_Job.of(flat, kind, dtype, store) for flat, kind, dtype, store in _kinds(units, optimizer, frozen)]
        self.manifest = _manifest(units, optimizer, dict(extra or {}))
        self.error: BaseException | None = None
        self.stop = False
        self.ended = False  # well: the folder has its name
        self.problem: str | None = None  # it ended badly
        self.edits = {flat.name: flat.edits() for flat in units.flats}
        self.written: dict[str, list[Piece]] = {}
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(units.model).items()}
        self.seconds, self.shared_bytes = 0.0, 0
        self._create()
        for flat in units.trainable:
            flat.captured, flat.capture_seconds = threading.Event(), 0.0
        units.saving = self
        self.ready = torch.cuda.current_stream().record_event() if units.comm.device.type == "cuda" else None
        self.thread = threads.thread(self._write, "ftkit-save", units.comm.device)
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
                shared = [job.share(self.temporary) for job in self.jobs]
                self.shared_bytes = sum(len(sums) * job.piece_bytes for job, sums in zip(self.jobs, shared))
                with WriteBehind() as behind:
                    for number, (job, sums) in enumerate(zip(self.jobs, shared), 1):
                        self.written[job.file] = job.write(self.temporary, behind, lambda: self.stop, len(sums))
                        self._refuse_edited(job)
                        if number == len(self.jobs) or self.jobs[number].flat is not job.flat:
                            self._capture(job.flat)
                    behind.settle()
                    for job, sums in zip(self.jobs, shared):  # last: no update waits for this
                        if self.stop:
                            raise _Stopped
                        self.written[job.file] += job.read_back(self.temporary, behind.room, sums)
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

    def _refuse_edited(self, job: _Job) -> None:
        """Raise UserError where the weights of a line were edited in place while they were written."""
        if job.kind == "weights" and job.flat.edits() != self.edits[job.flat.name]:
            raise UserError(
                f"a weight of {job.flat.name} was edited in place while it was being written: edit weights before a save "
                "begins (on_step_end), or after it has ended"
            )

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
                self._remove_unfinished()
                make_folder(self.temporary)
                try:
                    for job in self.jobs:
                        shapes = [(segment.name, segment.shape, job.dtype) for segment in job.flat.layout.segments]
                        create_file(self.temporary / job.file, shapes)
                    if self.buffers:
                        self.written[FILE] = write_buffers(self.temporary, self.buffers)
                except (OSError, UserError):  # the latter for buffers that are not finite
                    shutil.rmtree(self.temporary, ignore_errors=True)
                    raise

    def _remove_unfinished(self) -> None:
        """Remove what a save left that was killed.

        Raises:
            UserError: if a file of others lies there.
        """
        for path in self.temporary.iterdir() if self.temporary.is_dir() else ():
            if path.suffix != SUFFIX and path.name != MANIFEST:
                raise UserError(f"{path} is there and ftkit did not write it: move it, a save needs the folder's name")
        shutil.rmtree(self.temporary, ignore_errors=True)

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
                    try:
                        sync_folder(self.folder.parent)
                    except OSError:
                        self.folder.rename(self.temporary)  # to be removed: its name may not outlive a power failure
                        raise
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
    """Another rank's part failed, or whoever asked for the save gave it up."""


@dataclass(frozen=True)
class _Job:
    """One file: this rank's elements [first, last) of a line's `store` (S,), which begins at element `base` of the line."""

    flat: FlatParameter
    kind: str
    file: str
    dtype: torch.dtype
    store: Store
    base: int
    first: int
    last: int

    @classmethod
    def of(cls, flat: FlatParameter, kind: str, dtype: torch.dtype, store: Store) -> _Job:
        """Return the job of this rank; a replicated line is cut among the ranks all the same."""
        base, _ = flat.layout.shard_range(flat.rank)
        first, last = flat.written_range()
        return cls(flat, kind, f"{flat.name}.{kind}{SUFFIX}", dtype, store, base, first, last)

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

    def read_back(self, folder: Path, room: torch.Tensor, sums: list[int]) -> list[Piece]:
        """Return the pieces of what was taken by reference, compared with its sums, and durable."""
        path = folder / self.file
        start = data_start(path) + self.first * self.dtype.itemsize

        def look(done: int, data: torch.Tensor) -> None:
            self._look(self.first - self.base + done // self.dtype.itemsize, data.view(self.dtype))

        return read_back(path, start, sums, self.piece_bytes, room, look) if sums else []

    def write(self, folder: Path, behind: WriteBehind, stopped: Callable[[], bool], shared: int) -> list[Piece]:
        """Take in the range, and return its pieces: whole and durable once `behind` has settled.

        Args:
            folder: the folder that is being written.
            behind: writes the pieces.
            stopped: says whether the writing is to end at once.
            shared: pieces of the store at its beginning that are there already.

        Raises:
            OSError: of the drive. _Stopped: if `stopped` said so.
        """
        if self.first >= self.last:
            return []
        if shared:
            return replace(self, first=self.first + shared * PIECE_NUMEL).write(folder, behind, stopped, 0)
        path = folder / self.file
        writer = PieceWriter(path, data_start(path) + self.first * self.dtype.itemsize, behind)
        low, high = self.first - self.base, self.last - self.base
        straight = isinstance(self.store, FileStore) and low % PIECE_NUMEL == 0
        try:
            for _ in self._straight(writer, low, high) if straight else self._copied(writer, low, high):
                if stopped():
                    raise _Stopped
            return writer.close()
        except BaseException:
            writer.abandon()
            raise

    def _look(self, first: int, values: torch.Tensor) -> None:
        """Raise UserError where values (n,) of the store, from element `first` on, are not finite; NaN only, for moments."""
        start = self.base + first
        for span in self.flat.layout.spans(start, min(start + values.numel(), self.last)):
            moment = self.kind not in ("weights", "master")
            name = f"{self.kind} of {span.segment.name}" if moment else span.segment.name
            refuse_not_finite(name, values[span.start - start : span.stop - start], infinite=moment)

    def _copied(self, writer: PieceWriter, first: int, last: int) -> Iterator[None]:
        """Write elements [first, last) of the store, a piece at a time."""
        for low, high in self.store.pieces():
            begin, end = max(low, first), min(high, last)
            if begin < end:
                for number, part in enumerate(self.store.read(low, high)[begin - low : end - low].split(PIECE_NUMEL)):
                    yield
                    self._look(begin + number * PIECE_NUMEL, part)
                    writer.write(part)

    def _straight(self, writer: PieceWriter, first: int, last: int) -> Iterator[None]:
        """Write them of a file: what is read goes into the room that is written, while the drive writes the other."""
        assert isinstance(self.store, FileStore)
        together = PIECE_BYTES // self.piece_bytes * PIECE_NUMEL
        for low in range(first, last, together):
            yield
            high = min(low + together, -(-last // PIECE_NUMEL) * PIECE_NUMEL, self.store.numel)
            self.store.file.read(low, writer.room(self.dtype)[: high - low]).wait()
            self._look(low, writer.room(self.dtype)[: min(high, last) - low])
            writer.fill((min(high, last) - low) * self.dtype.itemsize)


def _listed(path: Path, told: list[dict[str, list[Piece]]]) -> list[Any]:
    """Return [bytes, pieces] of a file: its header, and what every rank has written of it."""
    start = data_start(path)
    with open(path, "rb") as file:
        header = Piece(0, start, checksum(file.read(start)))
    pieces = sorted([header, *(piece for written in told for piece in written.get(path.name, ()))])
    return [path.stat().st_size, [list(piece) for piece in pieces]]


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
            "groups": optimizer.plain_groups(),
            "members": optimizer.groups_by_name(),
            "loss_scale": asdict(optimizer.loss_scale),
            "steps": {
                segment.name: count
                for flat in units.trainable
                for segment, count in zip(flat.layout.segments, optimizer.lines[flat.name].steps)
            },
        }
    return manifest
