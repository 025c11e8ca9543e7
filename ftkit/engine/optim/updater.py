"""The update of a step: the shards of all flat parameters in pieces, in forward order, now or under the next forward.

    step()   ->  FlatStep (flat_step.py): what one step does to one flat parameter, a snapshot
    Updater  ->  pieces of all flat parameters: read ahead, updated, written behind

The update is computed where the state is: on the device if that is its tier, else on the host. Stores that are there are
updated in place. Others (files; on CUDA, weights and gradients of a state on the host) pass through staging slots of one
piece each, so that reads run ahead of the arithmetic and writes behind it, across the borders of flat parameters. On CUDA
gradients come and weights leave on two streams, so that both directions of the link are used.

A deferred update runs in a thread, and on the device on a stream of its own. Each flat parameter has a `FlatUpdate`, so a
block's gather waits for its own update and no other. After a failure, every later flat parameter raises when it is waited
for, so no checkpoint can mix two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftkit.engine.memory.arena import arena_bytes
from ftkit.engine.memory.flat_file import Request
from ftkit.engine.memory.tiers import FileStore, Store, Tiers
from ftkit.engine.optim.flat_step import FlatStep, Run
from ftkit.engine.optim.state_stores import Extent
from ftkit.engine.streams import DONE, Event, SideStream
from ftkit.engine.trace import UPDATE
from ftkit.errors import UserError
from ftkit.spec.sizes import CUDA_PIECE_NUMEL, PIECE_NUMEL, UPDATE_SLOTS
from ftkit.spec.tiers import DEVICE

if TYPE_CHECKING:
    from ftkit.engine.checkpoint.saving import Saving


@dataclass(eq=False)
class FlatUpdate:
    """The pending update of one flat parameter. See `flat_parameter.Update`."""

    done: threading.Event
    error: BaseException | None = None
    writes: list[Request] = field(default_factory=list)  # of weights
    event: Event = DONE

    def wait(self) -> None:
        """Block the host until the update is issued on the device, and weights on NVMe are written.

        Raises:
            RuntimeError: An update of this step or before failed. A UserError if the cause is one.
        """
        self.done.wait()
        _check(self.error)
        for request in self.writes:
            request.wait()


class Updater:
    """Applies steps to flat parameters.

    Args:
        tiers: Their strategy decides where updates are computed, and whether in a thread while the caller goes on.
        update_run: `ShardedOptimizer.update_run`.
    """

    def __init__(self, tiers: Tiers, update_run: Callable[[dict[str, Tensor], Run, float], None]) -> None:
        self.tiers, self.update_run, self.streams = tiers, update_run, tiers.streams
        self.on_host = not self.streams.separate or tiers.tier("state") != DEVICE
        self.slots = [_Slot() for _ in range(UPDATE_SLOTS)]
        self.thread = tiers.worker("ftkit-update") if tiers.strategy.deferred else None
        self.compute, self.down, self.up = map(self.streams.side, ("update", "update down", "update up"))
        self.running: Future[None] | None = None
        self.error: BaseException | None = None

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging slots."""
        return sum(buffer.numel() for slot in self.slots for buffer in slot.buffers.values())

    def submit(self, steps: Sequence[FlatStep], saving: Saving | None = None) -> None:
        """Start the updates in this order. Unless they are deferred, return when they are done.

        Each update waits until `saving`, a checkpoint that is being written, contains its flat parameter.

        Raises:
            RuntimeError: An update failed, now or before.
        """
        _check(self.error)
        self._make_slots(steps)
        updates = {FlatUpdate(self.streams.signal()): step for step in steps}
        for update, step in updates.items():
            step.flat.settle()
            step.flat.update = update
            step.flat.version += 1
        self.streams.join()
        ready = self.streams.now()  # gradients are complete, and nothing reads weights, not even an unused gather
        if self.on_host:
            ready.synchronize()
        if self.thread is None:
            self._run(updates, ready, saving)
            self.settle()
            for step in steps:
                step.flat.settle()
        else:
            self.running = self.thread.submit(self._run, updates, ready, saving)

    def settle(self) -> None:
        """Block the host until all updates are issued on the device, and files are written. Raises as `submit`."""
        if self.running is not None:
            self.running.result()
        _check(self.error)

    def marks(self) -> list[Event]:
        """Return the events after the work issued so far."""
        return [self.compute.mark(), self.up.mark()]

    def at_home(self, store: Store) -> bool:
        """Return whether the arithmetic can access a store where it is, once it is in memory."""
        return store.tensor is None or not self.streams.separate or store.on_host == self.on_host

    # --- the pieces

    def _run(self, updates: dict[FlatUpdate, FlatStep], ready: Event, saving: Saving | None) -> None:
        try:
            with torch.no_grad(), self.compute.run(ready) if self.thread is not None else nullcontext():
                self._walk(self._pieces(updates), saving)
        except BaseException as error:
            self.error = error
            for update in updates:  # all of the step: a write of the state may fail after its update is done
                update.error = error
                update.done.set()

    def _walk(self, coming: Iterator[_Piece], saving: Saving | None) -> None:
        """Compute piece after piece, while the next ones are read and the last ones are written."""
        stream = "host update" if self.on_host else "compute"
        for piece in self._fetched(coming):
            piece.slot.settle()  # everything is in the slot
            if saving is not None:
                saving.await_capture(piece.step.flat)
            with self.streams.trace.span(stream, UPDATE + piece.step.flat.name, host=self.on_host):
                self._compute(piece)
            piece.write_back(self.up)
            if piece.ends_flat:
                piece.update.event = self.up.mark() if self.on_host else self.streams.now()
                piece.update.done.set()
        for slot in self.slots:
            slot.settle()

    def _fetched(self, coming: Iterator[_Piece]) -> Iterator[_Piece]:
        """Yield the pieces in order, while the next ones are being read."""
        slots = cycle(self.slots)
        ahead: deque[_Piece] = deque()
        for piece in coming:
            piece.fetch(next(slots), self.down)
            ahead.append(piece)
            if len(ahead) == UPDATE_SLOTS - 1:
                yield ahead.popleft()
        yield from ahead

    def _compute(self, piece: _Piece) -> None:
        step = piece.step
        for run in step.runs:
            start, stop = max(run.start, piece.start), min(run.stop, piece.stop)
            if start < stop:
                roles = [role for role in piece.views if step.reads(run, role)]
                cut = {role: step.extents[role].cut(piece.views[role], piece.start, start, stop) for role in roles}
                self.update_run(cut, run, step.factor)

    def _make_slots(self, steps: Sequence[FlatStep]) -> None:
        """Allocate staging for stores that are elsewhere, and again when a step needs wider slots."""
        allocated = {role: buffer.numel() for role, buffer in self.slots[0].buffers.items()}
        widths = dict(allocated)  # bytes
        for step in steps:
            for role, extent in self._remote(step).items():
                size = extent.width(PIECE_NUMEL) * extent.store.dtype.itemsize
                widths[role] = max(widths.get(role, 0), size)
        if widths == allocated:
            return
        self.settle()  # the last step may still use the slots
        self.slots = [_Slot() for _ in range(UPDATE_SLOTS)]  # frees the buffers before the allocation
        arena = self.tiers.arena(arena_bytes([(width, torch.uint8) for width in widths.values()] * UPDATE_SLOTS))
        self.slots = [
            _Slot({role: arena.take(width, torch.uint8) for role, width in widths.items()}) for _ in range(UPDATE_SLOTS)
        ]

    def _remote(self, step: FlatStep) -> dict[str, Extent]:
        """Return the stores that must pass through staging, by role."""
        return {
            role: extent
            for role, extent in step.extents.items()
            if extent.store.tensor is None or not self.at_home(extent.store)
        }

    def _pieces(self, updates: dict[FlatUpdate, FlatStep]) -> Iterator[_Piece]:
        """Yield the pieces of all flat parameters in order: small ones where a store is elsewhere, else large ones."""
        for update, step in updates.items():
            total, remote = step.flat.layout.shard_numel, self._remote(step)
            width = PIECE_NUMEL if remote else total if self.on_host else CUDA_PIECE_NUMEL
            ranges = [(start, min(start + width, total)) for start in range(0, total, width)]
            due = [(a, b) for a, b in ranges if any(run.start < b and a < run.stop for run in step.runs)] or ranges[-1:]
            for start, stop in due:
                yield _Piece(step, update, start, stop, remote, ends_flat=stop == due[-1][1])


@dataclass(eq=False)
class _Slot:
    """Staging for one piece by role, and the waits for the transfers that still use it."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    pending: list[Callable[[], object]] = field(default_factory=list)

    def copy(self, side: SideStream, target: Tensor, source: Tensor) -> None:
        """Start copying between host and device."""
        with side.run():
            target.copy_(source, non_blocking=True)
        self.pending.append(side.mark().synchronize)

    def settle(self) -> None:
        """Wait until no transfer uses the buffers."""
        while self.pending:
            self.pending.pop(0)()


@dataclass(eq=False)
class _Piece:
    """Elements [start, stop) of one flat parameter in an update; `remote` stores pass through the slot."""

    step: FlatStep
    update: FlatUpdate
    start: int
    stop: int
    remote: dict[str, Extent]
    ends_flat: bool
    slot: _Slot = field(default_factory=_Slot)
    views: dict[str, Tensor] = field(default_factory=dict)

    def fetch(self, slot: _Slot, down: SideStream) -> None:
        """Start reading the stores that are elsewhere into the slot."""
        slot.settle()
        self.slot = slot
        for role, extent in self.step.extents.items():
            store, (low, high) = extent.store, extent.range(self.start, self.stop)
            if role not in self.remote:
                self.views[role] = store.read(low, high)
                continue
            view = self.views[role] = slot.buffers[role][: (high - low) * store.dtype.itemsize].view(store.dtype)
            if role == "weight" and self.step.writes_all:
                continue  # written only
            if isinstance(store, FileStore):
                slot.pending.append(store.file.read(low, view).wait)
            else:
                slot.copy(down, view, store.read(low, high))

    def write_back(self, up: SideStream) -> None:
        """Start writing the results to the stores that are elsewhere."""
        for role, extent in self.remote.items():
            if role == "gradient":
                continue
            store, (low, high) = extent.store, extent.range(self.start, self.stop)
            if isinstance(store, FileStore):
                request = store.file.write(low, self.views[role])
                self.slot.pending.append(request.wait)
                if store is self.step.flat.weights:
                    self.update.writes.append(request)
            else:
                self.slot.copy(up, store.read(low, high), self.views[role])


def _check(error: BaseException | None) -> None:
    """Raise if an update failed: UserError if the cause is one, as a full disk, else RuntimeError."""
    if error is not None:
        kind = UserError if isinstance(error, UserError) else RuntimeError
        raise kind(
            f"an update failed ({type(error).__name__}: {error}); weights and state are not of one step: start again from "
            "the last checkpoint"
        ) from error
