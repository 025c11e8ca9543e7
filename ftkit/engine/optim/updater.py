"""The update of a step: every line's shard walked in pieces, in forward order, now or under the next forward.

    step()  ->  LineStep: what is done to one line (runs, hyper-parameters, factor), a snapshot
    Updater ->  pieces of all lines, read ahead where they lie elsewhere than where the update is computed, written behind

The update is computed where the state is: on the device if it lies there, else on the host. What lies there is updated in
place. Anything else (files; on CUDA, weights and gradients of a host-tier state) passes through slots of staging, each
one piece wide, so that reads run ahead of the arithmetic and writes behind it, across the borders of lines.

Deferred, all this happens in a thread while the caller goes on. Each line has a `LineUpdate` to wait for, so a block's
gather waits for its own update and no other. When an update fails, every line after it is as stale as before the step and
says so to whoever asks; the run cannot go on, and no checkpoint can be written that mixes two steps.

This file knows no formula: the optimizer hands in `update_piece`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypedDict

import torch
from torch import Tensor

from ftkit.engine.arena import Arena, arena_bytes
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.files.flat_file import PIECE_NUMEL, Request, sum_of
from ftkit.engine.memory.tiers import FileStore, Store, Tiers
from ftkit.engine.trace import UPDATE, Trace
from ftkit.errors import UserError
from ftkit.spec.tiers import DEVICE

SLOTS = 6
"""Pieces under way at once: one is computed, the others are read ahead or written behind."""

CUDA_PIECE_NUMEL = 1 << 24
"""Elements updated at a time on a GPU: bounds the fp32 copy of the gradient to 64 MiB."""


class Hyperparameters(TypedDict, total=False):
    """What an update rule reads of a parameter group, under the names of torch.optim; each rule has some of them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float


@dataclass(frozen=True)
class Run:
    """Neighbouring elements [start, stop) of a shard that are updated alike: same group, same step count."""

    start: int
    stop: int
    group: int
    step: int


@dataclass
class LineState:
    """The optimizer state of one line on this rank: fp32 stores (S,), and how often each tensor was updated.

    The master of fp32 weights may be the weights' own store.
    """

    master: Store
    moments: dict[str, Store]
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LineStep:
    """What one step does to one line.

    Args:
        flat: the line.
        state: the optimizer state of the line.
        gradient: gradient shard of the line (S,).
        runs: runs of this rank's shard whose elements are updated alike.
        groups: hyper-parameters of each group, as they were at the step.
        factor: what the gradient is multiplied by: clip over loss scale.
    """

    flat: FlatParameter
    state: LineState
    gradient: Store
    runs: list[Run]
    groups: list[Hyperparameters]
    factor: float

    @property
    def stores(self) -> dict[str, Store]:
        """All that the update touches, by role; the weight only where it is not the master."""
        stores = {"gradient": self.gradient, "master": self.state.master, **self.state.moments}
        if self.state.master is not self.flat.weights:
            stores["weight"] = self.flat.weights
        return stores


class LineUpdate:
    """One line's update under way; see `flat.Update`."""

    def __init__(self, flat: FlatParameter) -> None:
        self.flat, self.name = flat, flat.name
        self.captured = flat.captured  # of a save that was asked for before this update, not of one that waits for it
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.writes: list[Request] = []  # of weights, which are read again before anything else of the line
        self.event: torch.cuda.Event | None = None

    def await_capture(self) -> None:
        """Wait until a checkpoint that is being written has this line: the update is about to change it."""
        if self.captured is not None and not self.captured.is_set():
            began = time.perf_counter()
            self.captured.wait()
            self.flat.capture_seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Return when the line's weights can be read, and make the current CUDA stream wait for them.

        Raises:
            RuntimeError: if this update, or one before it, failed; a UserError if the user can help it.
        """
        self.done.wait()
        if self.error is not None:
            kind = UserError if isinstance(self.error, UserError) else RuntimeError  # a full disk is the user's to mend
            raise kind(
                f"the update of {self.name} failed ({type(self.error).__name__}: {self.error}); its weights and state no "
                "longer belong to one step: start again from the last checkpoint"
            ) from self.error
        for request in self.writes:
            request.wait()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


UpdatePiece = Callable[[Tensor, Tensor, dict[str, Tensor], "Tensor | None", Hyperparameters, int, float], None]
"""(master, gradient, moments, weight or None, group, step, factor): all (n,), updated in place."""


class Updater:
    """Applies steps to lines.

    Args:
        tiers: where the state lies, and so where updates are computed.
        update_piece: the arithmetic.
        moment_names: roles of the state besides the master.
        deferred: work in a thread while the caller goes on.
        trace: where the lines' updates are told.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        update_piece: UpdatePiece,
        moment_names: Sequence[str],
        deferred: bool,
        trace: Trace,
    ) -> None:
        self.trace = trace
        self.tiers = tiers
        self.device = device = tiers.device
        self.home = device if tiers.tier("state") == DEVICE else torch.device("cpu")
        self.update_piece = update_piece
        self.roles = ("gradient", "master", *moment_names, "weight")
        self.slots: list[_Slot] = []
        self.arena: Arena | None = None
        self.error: BaseException | None = None
        self.deferred = deferred
        self.thread = tiers.worker("ftkit-update") if deferred else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and deferred else None
        self.last: LineUpdate | None = None
        self.running: Future[None] | None = None

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging slots."""
        return self.arena.requested_bytes if self.arena is not None else 0

    def submit(self, steps: Sequence[LineStep]) -> None:
        """Start the updates, in this order; at once and to the end unless they are deferred.

        Raises:
            RuntimeError: if one fails now, or one failed before.
        """
        if self.error is not None:
            raise RuntimeError(f"an earlier update failed: {self.error}") from self.error
        if not steps:
            return
        self._make_slots(steps)
        updates = []
        for step in steps:
            step.flat.settle()
            step.flat.update = update = LineUpdate(step.flat)
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
        """Wait for all updates, and until what they changed lies where it belongs.

        Raises:
            RuntimeError: if one failed.
        """
        if self.running is not None:
            wait([self.running])  # a line is done before its state is written behind
        if self.last is not None:
            self.last.wait()

    # --- the walk

    def _run(self, steps: Sequence[LineStep], updates: Sequence[LineUpdate], ready: torch.cuda.Event | None) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self.stream):
                if ready is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready)
                self._walk(steps, updates)
        except BaseException as error:
            self.error = error
            for update in updates:
                if not update.done.is_set():
                    update.error = error
                    update.done.set()

    def _walk(self, steps: Sequence[LineStep], updates: Sequence[LineUpdate]) -> None:
        """Compute piece after piece, with the next ones on their way in and the former ones on their way out."""
        coming = _pieces(steps, self.home)
        slots = cycle(self.slots or [_Slot({})])
        ahead: deque[_Piece] = deque()
        while True:
            while len(ahead) < SLOTS - 1 and (piece := next(coming, None)) is not None:
                piece.fetch(next(slots))
                ahead.append(piece)
            if not ahead:
                break
            piece = ahead.popleft()
            piece.arrive()
            updates[piece.number].await_capture()
            on_host = self.home.type == "cpu"
            stream, name = "host update" if on_host else "compute", UPDATE + piece.step.flat.name
            with self.trace.span(stream, name, host=on_host):
                self._compute(piece)
            piece.leave(updates[piece.number])
            if piece.ends_line:
                if self.device.type == "cuda":
                    updates[piece.number].event = torch.cuda.current_stream(self.device).record_event()
                updates[piece.number].done.set()
        for slot in self.slots:
            slot.settle()

    def _compute(self, piece: _Piece) -> None:
        views, step = piece.views, piece.step
        moments = step.state.moments
        for run in step.runs:
            start, stop = max(run.start, piece.start) - piece.start, min(run.stop, piece.stop) - piece.start
            if start < stop:
                self.update_piece(
                    views["master"][start:stop],
                    views["gradient"][start:stop],
                    {name: views[name][start:stop] for name in moments},
                    views["weight"][start:stop] if "weight" in views else None,
                    step.groups[run.group],
                    run.step,
                    step.factor,
                )

    def _make_slots(self, steps: Sequence[LineStep]) -> None:
        """Allocate staging for the roles that need it; anew when a step needs more than those before it."""
        before = {role: buffer.numel() for role, buffer in self.slots[0].buffers.items()} if self.slots else {}
        widths = dict.fromkeys(self.roles, 0) | before
        for step in steps:
            for role, store in step.stores.items():
                if _is_remote(store, self.home):
                    widths[role] = max(widths[role], min(store.numel, PIECE_NUMEL) * store.dtype.itemsize)
        sizes = [(width, torch.uint8) for width in widths.values() if width] * SLOTS
        if {role: width for role, width in widths.items() if width} == before:
            return
        self.settle()  # whatever uses the slots that are there
        self.slots = []
        self.arena = self.tiers.arena(arena_bytes(sizes))
        take = self.arena.take
        self.slots = [
            _Slot({role: take(width, torch.uint8) for role, width in widths.items() if width}) for _ in range(SLOTS)
        ]


class _Slot:
    """Staging for one piece, and what still reads from it."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.buffers = buffers
        self.writes: list[Request] = []
        self.copied: torch.cuda.Event | None = None

    def view(self, role: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer of a role as (n,) of `dtype`."""
        return self.buffers[role][: numel * dtype.itemsize].view(dtype)

    def settle(self) -> None:
        """Wait until the buffers are free."""
        for request in self.writes:
            request.wait()
        self.writes = []
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None


class _Piece:
    """Elements [start, stop) of one line, on their way through an update."""

    def __init__(self, number: int, step: LineStep, start: int, stop: int, home: torch.device, *, ends_line: bool) -> None:
        self.number, self.step, self.start, self.stop = number, step, start, stop
        self.ends_line = ends_line
        self.remote = {role: store for role, store in step.stores.items() if _is_remote(store, home)}
        self.reads: list[Request] = []
        self.slot = _Slot({})
        self.views: dict[str, Tensor] = {}

    def fetch(self, slot: _Slot) -> None:
        """Start reading what lies elsewhere into the slot."""
        slot.settle()
        self.slot = slot
        for role, store in self.step.stores.items():
            if role not in self.remote:
                assert store.tensor is not None
                self.views[role] = store.tensor[self.start : self.stop]
                continue
            view = self.views[role] = slot.view(role, self.stop - self.start, store.dtype)
            if role == "weight" and self._rewrites_all:
                continue  # written only
            if isinstance(store, FileStore):
                self.reads.append(store.file.read(self.start, view))
            else:
                assert store.tensor is not None
                slot.copied = _copy(view, store.tensor[self.start : self.stop])

    @property
    def _rewrites_all(self) -> bool:
        """Whether the runs leave no element of the piece as it is (padding aside, which is not read)."""
        own = min(self.stop, self.step.flat.own_numel)
        covered = sum(max(0, min(run.stop, own) - max(run.start, self.start)) for run in self.step.runs)
        return covered == max(own - self.start, 0)

    def arrive(self) -> None:
        """Wait until everything is in the slot."""
        for request in self.reads:
            request.wait()
        if self.slot.copied is not None:
            self.slot.copied.synchronize()
            self.slot.copied = None

    def leave(self, update: LineUpdate) -> None:
        """Start writing what was changed back to where it lies."""
        for role, store in self.remote.items():
            if role == "gradient":
                continue
            if isinstance(store, FileStore):
                values = self.views[role]
                request = store.file.write(self.start, values, sums=[sum_of(values)])  # in cache: it was computed just now
                self.slot.writes.append(request)
                if store is self.step.flat.weights:
                    update.writes.append(request)
            else:
                assert store.tensor is not None
                self.slot.copied = _copy(store.tensor[self.start : self.stop], self.views[role])


def _copy(target: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Start copying between host and device; return what to wait for, None where a device has no streams."""
    target.copy_(source, non_blocking=True)
    return torch.cuda.current_stream().record_event() if target.is_cuda or source.is_cuda else None


def _is_remote(store: Store, home: torch.device) -> bool:
    """Whether a store's bytes must pass through staging to be used at `home`."""
    return store.tensor is None or store.tensor.device.type != home.type


def _pieces(steps: Sequence[LineStep], home: torch.device) -> Iterator[_Piece]:
    """Yield the pieces of all lines in order: small ones where something lies elsewhere, else as large as may be."""
    for number, step in enumerate(steps):
        stores = step.stores.values()
        total = step.flat.layout.shard_numel
        width = total if home.type == "cpu" else CUDA_PIECE_NUMEL
        if any(_is_remote(store, home) for store in stores):
            width = PIECE_NUMEL
        ranges = [(start, min(start + width, total)) for start in range(0, total, width)]
        due = [(a, b) for a, b in ranges if any(run.start < b and a < run.stop for run in step.runs)] or ranges[-1:]
        for start, stop in due:
            yield _Piece(number, step, start, stop, home, ends_line=stop == due[-1][1])
