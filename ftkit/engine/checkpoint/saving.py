"""Saving a checkpoint: every rank writes its own ranges of every flat parameter.

A folder has one safetensors file per flat parameter and kind. The data section of a file is the flat parameter.

    <flat parameter>.weights.safetensors    compute dtype; only where there is no master (fp32 weights, frozen weights)
    <flat parameter>.master.safetensors     fp32
    <flat parameter>.exp_avg.safetensors    fp32; other optimizer state likewise
    model.buffers.safetensors               persistent buffers, if the model has any
    manifest.json                           hyper-parameters, step counts, loss scale, pieces and checksums; written last

The folder is written under a temporary name and renamed when it is complete and on the disk. No world size, stage, tier or
slot appears in it. `loading.py` reads it.

[Note: saving while training goes on]

    Weights and state only change in an update, and an update comes after a forward and a backward. A thread writes the flat
    parameters in the order of the updates, and the next update of a flat parameter waits until it is written. So nothing is
    copied, on any tier, and training waits only where a save takes longer than a forward and a backward.
    Collectives stay on the main thread. `Saving.poll`, at the end of a step, renames the folder if all ranks are done.

Cost: the bytes written, past the page cache where the file system supports it, and 16 MiB of memory.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ftkit.engine import threads
from ftkit.engine.checkpoint.durable import all_ranks, make_folder, rank_zero, sync_folder, text_of
from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.checkpoint.manifest import BUFFERS_FILE, FORMAT, MANIFEST, SUFFIX
from ftkit.engine.checkpoint.pieces import Piece, PieceWriter
from ftkit.engine.checkpoint.safetensors import TensorSpec, create_file, data_start
from ftkit.engine.checkpoint.sealed import checksum, write_sealed
from ftkit.engine.core.buffers import share_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import Store
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError

MODEL_KINDS = ("weights", "master")


def save_checkpoint(
    folder: str | Path,
    units: ShardedModel,
    optimizer: ShardedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    frozen: bool = True,
) -> None:
    """Write a checkpoint of the weights, and of the optimizer if one is given. A collective.

    Args:
        folder: Folder to make; must not exist.
        units: The sharded model.
        optimizer: Optimizer whose state is written. None writes weights only.
        extra: JSON data, returned by `load_checkpoint`.
        frozen: Also write frozen weights. The base of an adapter can be loaded from its own folder.

    Raises:
        UserError: The folder exists or cannot be written. Nothing is left of it.

    Cost: the bytes written; 16 MiB of memory per rank.
    """
    Saving(folder, units, optimizer, extra=extra, frozen=frozen).wait()


def checkpoint_bytes(units: ShardedModel, optimizer: ShardedOptimizer | None = None, *, frozen: bool = True) -> int:
    """Return the bytes of a checkpoint on the disk, without small files."""
    if optimizer is not None:
        optimizer.prepare()
    return sum(job.flat.layout.numel * job.dtype.itemsize for job in _jobs(units, optimizer, frozen))


class Saving:
    """A checkpoint that is written while training goes on; see [Note: saving while training goes on]. A collective.

    Its arguments are those of `save_checkpoint`.

    Attributes:
        seconds: Time that this rank's writing took, once it is done.
        blocked_seconds: Time that this rank's updates waited for the writing; a part of `seconds`.
        problem: Why the checkpoint could not be written; None if it was, or is being written.

    Raises:
        UserError: The folder exists or cannot be written, or another save of this model is running.
    """

    def __init__(
        self,
        folder: str | Path,
        units: ShardedModel,
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
        with all_ranks(units.comm):
            units.check_unchanged()
            if optimizer is None:  # else the thread waits for its update
                units.settle()
        self.updater = optimizer.updater if optimizer is not None else None
        self.update = self.updater.running if self.updater is not None else None  # of the last step, if it is deferred
        self.jobs = _jobs(units, optimizer, frozen)
        self.manifest = _manifest(units, optimizer, dict(extra or {}))
        buffers = share_buffers(units.model, units.comm)
        self.buffers = {name: each.detach().cpu().clone() for name, each in buffers.items() if units.comm.rank == 0}
        self.files: dict[str, list[TensorSpec]] = {job.file: job.tensors() for job in self.jobs}
        if self.buffers:
            self.files[BUFFERS_FILE] = [(name, tuple(each.shape), each.dtype) for name, each in self.buffers.items()]
        self.writer = PieceWriter(units.comm.device)
        self.captured = {flat: threading.Event() for flat in units.trainable}
        self.error: Exception | None = None
        self.problem: str | None = None
        self.seconds = self.blocked_seconds = 0.0
        self._create()
        units.saving = self
        self.ready = torch.cuda.current_stream().record_event() if units.comm.device.type == "cuda" else None
        self.thread = threads.thread(self._write, "ftkit-save", units.comm.device)
        self.thread.start()

    def await_capture(self, flat: FlatParameter) -> None:
        """Return when a trained flat parameter is written. The updater calls it before it changes one."""
        if not self.captured[flat].is_set():
            began = time.perf_counter()
            self.captured[flat].wait()
            self.blocked_seconds += time.perf_counter() - began

    def poll(self) -> bool:
        """Return whether the checkpoint is complete. A collective, at the same place on all ranks.

        Raises:
            UserError: It could not be written. Nothing is left of it, and training can go on.
        """
        if self.problem is not None:
            raise UserError(self.problem)
        if self.units.saving is not self:
            return True
        if self.units.comm.any(self.thread.is_alive()):
            return False
        self._publish()
        return True

    def wait(self) -> None:
        """Wait until the checkpoint is complete. A collective. Raises as `poll` does."""
        self.thread.join()
        self.poll()

    def give_up(self) -> None:
        """Wait for the thread, and remove the folder. A collective. `problem` is that of the first rank that failed."""
        self.thread.join()
        texts = self.units.comm.all(None if self.error is None else text_of(self.error))
        found = [text for text in texts if text is not None]
        self.units.saving = None
        self._remove()
        self.units.comm.barrier()
        self.problem = f"the checkpoint {self.folder} could not be written: {found[0] if found else 'it was stopped'}"

    # --- the thread

    def _write(self) -> None:
        began = time.perf_counter()
        try:
            if self.update is not None:
                self.update.result()
            if self.updater is not None and self.updater.error is not None:
                raise UserError(f"the last update failed ({self.updater.error}): there is no state to save")
            with torch.cuda.stream(self._side_stream()), self.writer:
                self._write_buffers()
                for number, job in enumerate(self.jobs, 1):
                    job.write(self.temporary, self.writer)
                    last = number == len(self.jobs) or self.jobs[number].flat is not job.flat
                    if last and job.flat.trainable:
                        self.captured[job.flat].set()
                self.writer.settle()
        except Exception as error:
            self.error = error
        finally:
            for captured in self.captured.values():
                captured.set()
            self.seconds = time.perf_counter() - began

    def _side_stream(self) -> torch.cuda.Stream | None:
        """Return a stream that begins where the save was asked for, and does not wait for later training."""
        if self.ready is None:
            return None
        stream = torch.cuda.Stream(self.units.comm.device)
        stream.wait_event(self.ready)
        if self.updater is not None and self.updater.stream is not None:
            stream.wait_stream(self.updater.stream)
        return stream

    def _write_buffers(self) -> None:
        if self.buffers:
            path = self.temporary / BUFFERS_FILE
            self.writer.open(path, data_start(path))
            self.writer.write(torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in self.buffers.values()]))
            self.writer.close()

    # --- the folder

    def _create(self) -> None:
        """Make the temporary folder with all files at their full size, in place of one that a killed save left."""
        with rank_zero(self.units.comm) as first:
            if not first:
                return
            if self.folder.exists():
                raise UserError(f"{self.folder}: exists already; give a new folder for the checkpoint")
            shutil.rmtree(self.temporary, ignore_errors=True)
            make_folder(self.temporary)
            try:
                for name, tensors in self.files.items():
                    create_file(self.temporary / name, tensors)
            except OSError:
                self._remove()
                raise

    def _publish(self) -> None:
        """Write the manifest and rename the folder; remove it if a rank failed."""
        written = self.units.comm.all(self.writer.pieces)
        try:
            with all_ranks(self.units.comm):
                if self.error is not None:
                    raise self.error
            with rank_zero(self.units.comm) as first:
                if first:
                    self.manifest["files"] = {name: _listed(self.temporary / name, written) for name in self.files}
                    write_sealed(self.temporary / MANIFEST, self.manifest)
                    sync_folder(self.temporary)
                    self.temporary.rename(self.folder)
                    sync_folder(self.folder.parent)
        except Exception as error:
            self.error = error
            self.give_up()
            raise UserError(self.problem) from error
        self.units.saving = None

    def _remove(self) -> None:
        if self.units.comm.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)


@dataclass(frozen=True)
class _Job:
    """One file: this rank writes its part of a flat parameter in one kind, from `store` (S,)."""

    flat: FlatParameter
    kind: str
    dtype: torch.dtype
    store: Store

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.flat.name}.{self.kind}{SUFFIX}"

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors of the file."""
        return [(segment.name, segment.shape, self.dtype) for segment in self.flat.layout.segments]

    def write(self, folder: Path, writer: PieceWriter) -> None:
        """Write to the file in `folder`, or raise UserError if a weight is not finite."""
        first, last = self.flat.written_range()
        if first >= last:
            return
        path = folder / self.file
        writer.open(path, data_start(path) + first * self.dtype.itemsize)
        for span, values in self.flat.spans(self.store, first, last):
            if self.kind in MODEL_KINDS:
                refuse_not_finite(span.segment.name, values)
            writer.write(values)
        writer.close()


def _listed(path: Path, written: list[dict[str, list[Piece]]]) -> list[Any]:
    """Return [bytes, pieces] of a file: its header, and what every rank has written of it."""
    start = data_start(path)
    with open(path, "rb") as file:
        header = Piece(0, start, checksum(file.read(start)))
    pieces = sorted([header, *(piece for pieces in written for piece in pieces.get(path.name, ()))])
    return [path.stat().st_size, [list(piece) for piece in pieces]]


def _jobs(units: ShardedModel, optimizer: ShardedOptimizer | None, frozen: bool) -> list[_Job]:
    """Return the write jobs. Trained flat parameters come first, in the order of updates."""
    jobs: list[_Job] = []
    for flat in units.trainable:
        state = optimizer.states[flat.name] if optimizer is not None else None
        if state is None or state.master is flat.weights:
            jobs.append(_Job(flat, "weights", flat.dtype, flat.weights))
        else:
            jobs.append(_Job(flat, "master", torch.float32, state.master))
        jobs += [_Job(flat, name, torch.float32, store) for name, store in (state.moments if state else {}).items()]
    if frozen:
        jobs += [_Job(flat, "weights", flat.dtype, flat.weights) for flat in units.flats if not flat.trainable]
    return jobs


def _manifest(units: ShardedModel, optimizer: ShardedOptimizer | None, extra: dict[str, Any]) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "format": FORMAT,
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
                for segment, count in zip(flat.layout.segments, optimizer.states[flat.name].steps)
            },
        }
    return manifest
