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

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.arena import Arena, arena_bytes
from ftkit.engine.memory.flat_file import PIECE_NUMEL, Request
from ftkit.engine.memory.tiers import FileStore, Store, Tiers
from ftkit.engine.model import SaveInFlight
from ftkit.engine.optim.flat_step import Elements, FlatStep, Hyperparameters
from ftkit.engine.trace import UPDATE, Trace
from ftkit.errors import UserError
from ftkit.spec.tiers import DEVICE

SLOTS = 6
"""Pieces in progress: one is computed, the others are read ahead or written behind."""

CUDA_PIECE_NUMEL = 1 << 24
"""Elements updated at a time on a GPU: bounds the fp32 copy of the gradient to 64 MiB."""

UpdatePiece = Callable[[Elements, Hyperparameters, int, float], None]
"""(elements, group, step, factor): updates the elements in place."""


@dataclass(eq=False)
class FlatUpdate:
    """The pending update of one flat parameter. See `flat_parameter.Update`."""

    flat: FlatParameter
    saving: SaveInFlight | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    writes: list[Request] = field(default_factory=list)  # of weights
    event: torch.cuda.Event | None = None

    def await_capture(self) -> None:
        """Wait until the checkpoint that is being written contains this flat parameter, which is about to change."""
        if self.saving is not None:
            self.saving.await_capture(self.flat)

    def wait(self) -> None:
        """Return when the weights can be read, and make the current CUDA stream wait for them.

        Raises:
            RuntimeError: This update or one before it failed. A UserError if the cause is one.
        """
        self.done.wait()
        if self.error is not None:
            kind = UserError if isinstance(self.error, UserError) else RuntimeError  # a full disk is the user's to fix
            raise kind(
                f"the update of {self.flat.name} failed ({type(self.error).__name__}: {self.error}); its weights and state "
                "are not of one step: start again from the last checkpoint"
            ) from self.error
        for request in self.writes:
            request.wait()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class Updater:
    """Applies steps to flat parameters.

    Args:
        tiers: Tiers of the state. They decide where updates are computed.
        update_piece: The arithmetic.
        deferred: Whether updates run in a thread while the caller goes on.
        trace: Receives a span for each piece.
    """

    def __init__(self, tiers: Tiers, *, update_piece: UpdatePiece, deferred: bool, trace: Trace) -> None:
        self.tiers, self.trace = tiers, trace
        self.device = device = tiers.device
        self.home = device if tiers.tier("state") == DEVICE else torch.device("cpu")
        self.update_piece = update_piece
        self.widths: dict[str, int] = {}  # bytes of each role in a slot
        self.slots: list[_Slot] = []
        self.arena: Arena | None = None
        self.error: BaseException | None = None
        self.thread = tiers.worker("ftkit-update") if deferred else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and deferred else None
        self.last: FlatUpdate | None = None
        self.running: Future[None] | None = None

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging slots."""
        return self.arena.requested_bytes if self.arena is not None else 0

    def submit(self, steps: Sequence[FlatStep], saving: SaveInFlight | None = None) -> None:
        """Start the updates in this order. Without `deferred`, return when they are done.

        Each update waits until `saving`, a checkpoint that is being written, contains its flat parameter.

        Raises:
            RuntimeError: An update failed, now or before.
        """
        self._check()
        if not steps:
            return
        self._make_slots(steps)
        updates = []
        for step in steps:
            step.flat.settle()
            step.flat.update = update = FlatUpdate(step.flat, saving)
            step.flat.version += 1
            updates.append(update)
        self.last = updates[-1]
        if self.thread is None:
            self._run(steps, updates, None)
            self.settle()
        else:
            ready = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
            self.running = self.thread.submit(self._run, steps, updates, ready)

    def settle(self) -> None:
        """Wait for all updates, and until their results are on their tiers. Raises as `submit`."""
        if self.running is not None:
            wait([self.running])  # an update is done before its state is written behind
        if self.last is not None:
            self.last.wait()
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"an earlier update failed: {self.error}") from self.error

    # --- the pieces

    def _run(self, steps: Sequence[FlatStep], updates: Sequence[FlatUpdate], ready: torch.cuda.Event | None) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                if ready is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready)
                self._walk(_pieces(steps, updates, self.home))
        except BaseException as error:
            self.error = error
            for update in updates:
                if not update.done.is_set():
                    update.error = error
                    update.done.set()
                    update.saving = None

    def _walk(self, coming: Iterator[_Piece]) -> None:
        """Compute piece after piece, while the next ones are read and the last ones are written."""
        slots = cycle(self.slots or [_Slot()])
        ahead: deque[_Piece] = deque()
        lane = "host update" if self.home.type == "cpu" else "compute"
        while True:
            while len(ahead) < SLOTS - 1 and (piece := next(coming, None)) is not None:
                piece.fetch(next(slots))
                ahead.append(piece)
            if not ahead:
                break
            piece = ahead.popleft()
            piece.slot.settle()  # everything is in the slot
            piece.update.await_capture()
            with self.trace.span(lane, UPDATE + piece.step.flat.name, host=lane == "host update"):
                self._compute(piece)
            piece.write_back()
            if piece.ends_flat:
                if self.device.type == "cuda":
                    piece.update.event = torch.cuda.current_stream(self.device).record_event()
                piece.update.done.set()
                piece.update.saving = None
        for slot in self.slots:
            slot.settle()

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
        widths = dict(self.widths)
        for step in steps:
            for role, store in step.stores.items():
                if _is_remote(store, self.home):
                    size = min(store.numel, PIECE_NUMEL) * store.dtype.itemsize
                    widths[role] = max(widths.get(role, 0), size)
        if widths == self.widths:
            return
        self.settle()  # the last step may still use the slots
        self.widths, self.slots = widths, []
        self.arena = arena = self.tiers.arena(arena_bytes([(width, torch.uint8) for width in widths.values()] * SLOTS))
        self.slots = [_Slot({role: arena.take(width, torch.uint8) for role, width in widths.items()}) for _ in range(SLOTS)]


@dataclass(eq=False)
class _Slot:
    """Staging for one piece by role, and the waits for the transfers that still use it."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    pending: list[Callable[[], object]] = field(default_factory=list)

    def view(self, role: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer of a role as (n,) of `dtype`."""
        return self.buffers[role][: numel * dtype.itemsize].view(dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying between host and device."""
        target.copy_(source, non_blocking=True)
        if target.is_cuda or source.is_cuda:
            self.pending.append(torch.cuda.current_stream().record_event().synchronize)

    def settle(self) -> None:
        """Wait until no transfer uses the buffers."""
        for wait_for_one in self.pending:
            wait_for_one()
        self.pending = []


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
            view = self.views[role] = slot.view(role, self.stop - self.start, store.dtype)
            if role == "weight" and self._rewrites_all:
                continue  # written only
            if isinstance(store, FileStore):
                slot.pending.append(store.file.read(self.start, view).wait)
            else:
                slot.copy(view, store.read(self.start, self.stop))

    @property
    def _rewrites_all(self) -> bool:
        """Whether the runs cover all elements of the piece. Padding does not count, because it is not read."""
        own = min(self.stop, self.step.flat.own_numel)
        covered = sum(max(0, min(run.stop, own) - max(run.start, self.start)) for run in self.step.runs)
        return covered == max(own - self.start, 0)

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


def _is_remote(store: Store, home: torch.device) -> bool:
    """Return whether a store must pass through staging to be updated at `home`."""
    return store.tensor is None or store.tensor.device.type != home.type


def _pieces(steps: Sequence[FlatStep], updates: Sequence[FlatUpdate], home: torch.device) -> Iterator[_Piece]:
    """Yield the pieces of all flat parameters in order: small ones where a store is elsewhere, else large ones."""
    for step, update in zip(steps, updates):
        total = step.flat.layout.shard_numel
        remote = {role: store for role, store in step.stores.items() if _is_remote(store, home)}
        width = PIECE_NUMEL if remote else total if home.type == "cpu" else CUDA_PIECE_NUMEL
        ranges = [(start, min(start + width, total)) for start in range(0, total, width)]
        due = [(a, b) for a, b in ranges if any(run.start < b and a < run.stop for run in step.runs)] or ranges[-1:]
        for start, stop in due:
            yield _Piece(step, update, start, stop, remote, ends_flat=stop == due[-1][1])
