"""Saving a checkpoint: every rank writes its own ranges of every flat parameter.

A folder has one safetensors file per flat parameter and kind. The data section of a file is the flat parameter.

    <flat parameter>.weights.safetensors          compute dtype; only where there is no master (fp32 or frozen weights)
    <flat parameter>.master.safetensors           fp32
    <flat parameter>.exp_avg.safetensors          fp32, or 8-bit codes of its coded tensors; other optimizer state likewise
    <flat parameter>.exp_avg_scales.safetensors   fp32 scales of these codes, one per 128 elements
    <flat parameter>.plain.exp_avg.safetensors    fp32, of the tensors that are not coded beside others that are
    model.buffers.safetensors                     persistent buffers, if the model has any
    manifest.json                                 settings, step counts, loss scale, pieces and checksums; written last

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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftkit.engine.checkpoint.durable import all_ranks, make_folder, rank_zero, sync_folder, text_of
from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.checkpoint.manifest import BUFFERS_FILE, FORMAT, MANIFEST, SCALES, SUFFIX, WEIGHT_KINDS
from ftkit.engine.checkpoint.pieces import Piece, PieceWriter
from ftkit.engine.checkpoint.safetensors import TensorSpec, create_file, data_start
from ftkit.engine.checkpoint.sealed import checksum, write_sealed
from ftkit.engine.core.buffers import share_buffers
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import Store
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.flat_step import FlatState
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.state_stores import CodedMoment, Extent, SplitMaster
from ftkit.errors import UserError
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.state_forms import GROUP_NUMEL


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


class Saving:
    """A checkpoint that is written while training goes on; see [Note: saving while training goes on]. A collective.

    Its arguments are those of `save_checkpoint`.

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
        self.parts = _parts(units, optimizer, frozen)
        self.manifest = _manifest(units, optimizer, dict(extra or {}))
        buffers = share_buffers(units.model, units.comm)
        self.buffers = {name: each.detach().cpu().clone() for name, each in buffers.items() if units.comm.rank == 0}
        every = chain.from_iterable(self.parts.values())
        self.files: dict[str, list[TensorSpec]] = {part.file: part.tensors for part in every}
        if self.buffers:
            self.files[BUFFERS_FILE] = [(name, tuple(each.shape), each.dtype) for name, each in self.buffers.items()]
        self.writer = PieceWriter(units.streams.pin)
        self.captured = {flat: units.streams.signal() for flat in units.trainable}
        self.error: Exception | None = None
        self._problem: str | None = None
        self._create()
        units.saving = self
        self.ready = units.streams.now()  # the collectives above wait too, but only as long as they exchange objects
        self.thread = units.streams.thread(self._write, "ftkit-save")
        self.thread.start()

    def await_capture(self, flat: FlatParameter) -> None:
        """Return when a trained flat parameter is written. The updater calls it before it changes one."""
        self.captured[flat].wait()

    def poll(self) -> bool:
        """Return whether the checkpoint is complete. A collective, at the same place on all ranks.

        Raises:
            UserError: It could not be written. Nothing is left of it, and training can go on.
        """
        if self._problem is not None:
            raise UserError(self._problem)
        if self.units.saving is not self:
            return True
        if self.units.comm.any(self.thread.is_alive()):
            return False
        try:
            self._publish()
        except Exception as error:
            self.give_up(text_of(error))
            raise UserError(self._problem) from error
        self.units.saving = None
        return True

    def wait(self) -> None:
        """Wait until the checkpoint is complete. A collective. Raises as `poll` does."""
        self.thread.join()
        self.poll()

    def give_up(self, problem: str = "it was stopped") -> None:
        """Wait for the thread, and remove the folder. A collective."""
        self.thread.join()
        self.units.comm.barrier()  # no rank writes any more
        self.units.saving = None
        if self.units.comm.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.units.comm.barrier()
        self._problem = f"the checkpoint {self.folder} could not be written: {problem}"

    # --- the thread

    def _write(self) -> None:
        try:
            if self.update is not None:
                self.update.result()
            if self.updater is not None and self.updater.error is not None:
                raise UserError(f"the last update failed ({self.updater.error}): there is no state to save")
            updated = self.updater.marks() if self.updater is not None else []
            with self.units.streams.save.run(self.ready, *updated), self.writer:
                self._write_buffers()
                for flat, parts in self.parts.items():
                    for part in parts:
                        self._write_part(part)
                    if flat.trainable:
                        self.captured[flat].set()
                self.writer.settle()
        except Exception as error:
            self.error = error
        finally:
            for captured in self.captured.values():
                captured.set()

    def _write_part(self, part: _Part) -> None:
        """Write this rank's range of a file, or raise UserError if a weight is not finite."""
        first, last = (min(max(each, part.start), part.stop) for each in part.flat.written_range())
        if first >= last:
            return
        path = self.temporary / part.file
        self.writer.open(path, data_start(path) + (first - part.start) // part.per * part.dtype.itemsize)
        for name, values in part.values(first, last):
            if part.weights:
                refuse_not_finite(name, values)
            self.writer.write(values)
        self.writer.close()

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
                shutil.rmtree(self.temporary, ignore_errors=True)
                raise

    def _publish(self) -> None:
        """Write the manifest and rename the folder, or raise if a rank failed. A collective."""
        with all_ranks(self.units.comm):
            if self.error is not None:
                raise self.error
        written = self.units.comm.all(self.writer.pieces)
        with rank_zero(self.units.comm) as first:
            if first:
                self.manifest["files"] = {name: _listed(self.temporary / name, written) for name in self.files}
                write_sealed(self.temporary / MANIFEST, self.manifest)
                sync_folder(self.temporary)
                self.temporary.rename(self.folder)
                sync_folder(self.folder.parent)


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of a flat parameter in one kind: one file.

    Args:
        flat: The flat parameter.
        kind: Kind of the file.
        store: This rank's shard, or the store of a form of it.
        start: First element of the flat parameter.
        stop: Element to stop before.
        per: Elements per value.
    """

    flat: FlatParameter
    kind: str
    store: Store | SplitMaster | Extent
    start: int
    stop: int
    per: int = 1

    @property
    def weights(self) -> bool:
        return self.kind in WEIGHT_KINDS

    @property
    def file(self) -> str:
        """Name of the file. The kind is its last part."""
        return f"{self.flat.name}{'.plain' * (self.start > 0)}.{self.kind}{SUFFIX}"

    @property
    def dtype(self) -> torch.dtype:
        return self.store.store.dtype if isinstance(self.store, Extent) else self.store.dtype

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors of the file."""
        segments = [each for each in self.flat.layout.segments if self.start <= each.start < self.stop]
        return [(each.name, each.shape if self.per == 1 else (each.numel // self.per,), self.dtype) for each in segments]

    def values(self, first: int, last: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of elements [first, last), which are this rank's, in pieces, with a tensor's name."""
        if not isinstance(self.store, Extent):
            yield from ((span.segment.name, values) for span, values in self.flat.spans(self.store, first, last))
            return
        base = self.flat.layout.shard_range(self.flat.rank)[0]
        for low in range((first - base) // PIECE_NUMEL * PIECE_NUMEL, last - base, PIECE_NUMEL):
            start, stop = max(low, first - base), min(low + PIECE_NUMEL, last - base)
            piece = self.store.read(low, min(low + PIECE_NUMEL, self.flat.layout.shard_numel))  # whole pages
            yield self.kind, self.store.cut(piece, low, start, stop)


def _listed(path: Path, written: list[dict[str, list[Piece]]]) -> list[Any]:
    """Return [bytes, pieces] of a file: its header, and what every rank has written of it."""
    start = data_start(path)
    with open(path, "rb") as file:
        header = Piece(0, start, checksum(file.read(start)))
    pieces = sorted([header, *(piece for pieces in written for piece in pieces.get(path.name, ()))])
    return [path.stat().st_size, [list(piece) for piece in pieces]]


def _parts(units: ShardedModel, optimizer: ShardedOptimizer | None, frozen: bool) -> dict[FlatParameter, list[_Part]]:
    """Return the files to write. Trained flat parameters come first, in the order of updates."""
    states = {} if optimizer is None else optimizer.states
    found = {flat: [*_parts_of(flat, states.get(flat.name))] for flat in units.trainable}
    return found | {flat: [*_parts_of(flat, None)] for flat in units.flats if frozen and not flat.trainable}


def _parts_of(flat: FlatParameter, state: FlatState | None) -> Iterator[_Part]:
    """Yield the files of a flat parameter."""
    numel, coded = flat.layout.numel, flat.coded_numel
    if state is None:
        yield _Part(flat, "weights", flat.weights, 0, numel)
        return
    yield _Part(flat, "weights" if state.master is flat.weights else "master", state.master, 0, numel)
    for name, moment in state.moments.items():
        if not isinstance(moment, CodedMoment):
            yield _Part(flat, name, moment, 0, numel)
            continue
        yield _Part(flat, name, moment.codes, 0, coded)
        yield _Part(flat, f"{name}{SCALES}", moment.scales, 0, coded, GROUP_NUMEL)
        if moment.plain is not None:
            yield _Part(flat, name, moment.plain, coded, numel)


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
            "members": optimizer.group_of,
            "loss_scale": asdict(optimizer.loss_scale),
            "steps": {
                segment.name: count
                for flat in units.trainable
                for segment, count in zip(flat.layout.segments, optimizer.states[flat.name].steps)
            },
        }
    return manifest
