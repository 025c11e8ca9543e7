"""The update of a step: the shards of all flat parameters in pieces, in forward order, now or under the next forward.

    step()   ->  FlatStep (flat_step.py): what one step does to one flat parameter, a snapshot
    Updater  ->  pieces of all flat parameters: read ahead, updated, written behind

The update is computed where the state is: on the device if that is its tier, else on the host. Stores that are there are
updated in place. Others (files; on CUDA, weights and gradients of a state on the host) pass through staging slots of one
piece each, so that reads run ahead of the arithmetic and writes behind it, across the borders of flat parameters.

A deferred update runs in a thread. Each flat parameter has a `FlatUpdate`, so a block's gather waits for its own update and
no other. After a failure, every later flat parameter raises when it is waited for, so no checkpoint can mix two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftkit.engine.memory.arena import arena_bytes
from ftkit.engine.memory.flat_file import PIECE_NUMEL, Request
from ftkit.engine.memory.tiers import FileStore, Store, Tiers
from ftkit.engine.optim.flat_step import Elements, FlatStep
from ftkit.engine.trace import UPDATE, Trace
from ftkit.errors import UserError
from ftkit.spec.tiers import DEVICE

if TYPE_CHECKING:
    from ftkit.engine.checkpoint.saving import Saving

SLOTS = 6
"""Pieces in progress: one is computed, the others are read ahead or written behind."""

CUDA_PIECE_NUMEL = 1 << 24
"""Elements updated at a time on a GPU: bounds the fp32 copy of the gradient to 64 MiB."""


@dataclass(eq=False)
class FlatUpdate:
    """The pending update of one flat parameter. See `flat_parameter.Update`."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    writes: list[Request] = field(default_factory=list)  # of weights
    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Return when the weights can be read, and make the current CUDA stream wait for them.

        Raises:
            RuntimeError: An update of this step or before failed. A UserError if the cause is one.
        """
        self.done.wait()
        _check(self.error)
        for request in self.writes:
            request.wait()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class Updater:
    """Applies steps to flat parameters.

    Args:
        tiers: Their strategy decides where updates are computed, and whether in a thread while the caller goes on.
        update_piece: `ShardedOptimizer.update_piece`.
        trace: Receives a span for each piece.
    """

    def __init__(self, tiers: Tiers, update_piece: Callable[..., None], trace: Trace) -> None:
        self.tiers, self.update_piece, self.trace = tiers, update_piece, trace
        self.device, deferred = tiers.device, tiers.strategy.deferred
        self.home = tiers.device if tiers.tier("state") == DEVICE else torch.device("cpu")
        self.slots = [_Slot() for _ in range(SLOTS)]
        self.thread = tiers.worker("ftkit-update") if deferred else None
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" and deferred else None
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
        updates = {FlatUpdate(): step for step in steps}
        for update, step in updates.items():
            step.flat.settle()
            step.flat.update = update
            step.flat.version += 1
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the gradients are complete
        if self.thread is None:
            self._run(updates, saving)
            self.settle()
            for step in steps:
                step.flat.settle()
        else:
            self.running = self.thread.submit(self._run, updates, saving)

    def settle(self) -> None:
        """Wait for all updates, and until their results are on their tiers. Raises as `submit`."""
        if self.running is not None:
            wait([self.running])
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        _check(self.error)

    # --- the pieces

    def _run(self, updates: dict[FlatUpdate, FlatStep], saving: Saving | None) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                self._walk(_pieces(updates, self.home), saving)
        except BaseException as error:
            self.error = error
            for update in updates:  # all of the step: a write of the state may fail after its update is done
                update.error = error
                update.done.set()

    def _walk(self, coming: Iterator[_Piece], saving: Saving | None) -> None:
        """Compute piece after piece, while the next ones are read and the last ones are written."""
        on_host = self.home.type == "cpu"
        for piece in self._fetched(coming):
            piece.slot.settle()  # everything is in the slot
            if saving is not None:
                saving.await_capture(piece.step.flat)
            with self.trace.span("host update" if on_host else "compute", UPDATE + piece.step.flat.name, host=on_host):
                self._compute(piece)
            piece.write_back()
            if piece.ends_flat:
                if self.device.type == "cuda":
                    piece.update.event = torch.cuda.current_stream(self.device).record_event()
                piece.update.done.set()
        for slot in self.slots:
            slot.settle()

    def _fetched(self, coming: Iterator[_Piece]) -> Iterator[_Piece]:
        """Yield the pieces in order, while the next ones are being read."""
        slots = cycle(self.slots)
        ahead: deque[_Piece] = deque()
        for piece in coming:
            piece.fetch(next(slots))
            ahead.append(piece)
            if len(ahead) == SLOTS - 1:
                yield ahead.popleft()
        yield from ahead

    def _compute(self, piece: _Piece) -> None:
        step = piece.step
        for run in step.runs:
            start, stop = max(run.start, piece.start) - piece.start, min(run.stop, piece.stop) - piece.start
            if start < stop:
                views = {role: view[start:stop] for role, view in piece.views.items()}
                at = Elements(views.pop("master"), views.pop("gradient"), views.pop("weight", None), views)
                self.update_piece(at, run.group, run.step, step.factor)

    def _make_slots(self, steps: Sequence[FlatStep]) -> None:
        """Allocate staging for stores that are elsewhere, and again when a step needs wider slots."""
        allocated = {role: buffer.numel() for role, buffer in self.slots[0].buffers.items()}
        widths = dict(allocated)  # bytes
        for step in steps:
            for role, store in _remote(step, self.home).items():
                widths[role] = max(widths.get(role, 0), min(store.numel, PIECE_NUMEL) * store.dtype.itemsize)
        if widths == allocated:
            return
        self.settle()  # the last step may still use the slots
        self.slots = [_Slot() for _ in range(SLOTS)]  # frees the buffers before the allocation
        arena = self.tiers.arena(arena_bytes([(width, torch.uint8) for width in widths.values()] * SLOTS))
        self.slots = [_Slot({role: arena.take(width, torch.uint8) for role, width in widths.items()}) for _ in range(SLOTS)]


@dataclass(eq=False)
class _Slot:
    """Staging for one piece by role, and the waits for the transfers that still use it."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    pending: list[Callable[[], object]] = field(default_factory=list)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying between host and device."""
        target.copy_(source, non_blocking=True)
        if target.is_cuda or source.is_cuda:
            self.pending.append(torch.cuda.current_stream().record_event().synchronize)

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
    remote: dict[str, Store]
    ends_flat: bool
    slot: _Slot = field(default_factory=_Slot)
    views: dict[str, Tensor] = field(default_factory=dict)

    def fetch(self, slot: _Slot) -> None:
        """Start reading the stores that are elsewhere into the slot."""
        slot.settle()
        self.slot = slot
        for role, store in self.step.stores.items():
            if role not in self.remote:
                self.views[role] = store.read(self.start, self.stop)
                continue
            size = (self.stop - self.start) * store.dtype.itemsize
            view = self.views[role] = slot.buffers[role][:size].view(store.dtype)
            if role == "weight" and self.step.updates_all:
                continue  # written only
            if isinstance(store, FileStore):
                slot.pending.append(store.file.read(self.start, view).wait)
            else:
                slot.copy(view, store.read(self.start, self.stop))

    def write_back(self) -> None:
        """Start writing the results to the stores that are elsewhere."""
        for role, store in self.remote.items():
            if role == "gradient":
                continue
            if isinstance(store, FileStore):
                request = store.file.write(self.start, self.views[role])
                self.slot.pending.append(request.wait)
                if store is self.step.flat.weights:
                    self.update.writes.append(request)
            else:
                self.slot.copy(store.read(self.start, self.stop), self.views[role])


def _check(error: BaseException | None) -> None:
    """Raise if an update failed: UserError if the cause is one, as a full disk, else RuntimeError."""
    if error is not None:
        kind = UserError if isinstance(error, UserError) else RuntimeError
        raise kind(
            f"an update failed ({type(error).__name__}: {error}); weights and state are not of one step: start again from "
            "the last checkpoint"
        ) from error


def _remote(step: FlatStep, home: torch.device) -> dict[str, Store]:
    """Return the stores that must pass through staging to be updated at `home`, by role."""
    stores = step.stores.items()
    return {role: each for role, each in stores if each.tensor is None or each.tensor.device.type != home.type}


def _pieces(updates: dict[FlatUpdate, FlatStep], home: torch.device) -> Iterator[_Piece]:
    """Yield the pieces of all flat parameters in order: small ones where a store is elsewhere, else large ones."""
    for update, step in updates.items():
        total, remote = step.flat.layout.shard_numel, _remote(step, home)
        width = PIECE_NUMEL if remote else total if home.type == "cpu" else CUDA_PIECE_NUMEL
        ranges = [(start, min(start + width, total)) for start in range(0, total, width)]
        due = [(a, b) for a, b in ranges if any(run.start < b and a < run.stop for run in step.runs)] or ranges[-1:]
        for start, stop in due:
            yield _Piece(step, update, start, stop, remote, ends_flat=stop == due[-1][1])
