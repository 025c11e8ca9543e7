"""Moving weights in and gradients out: the slots, and the side stream on which they are filled and emptied.

There are two weight slots and one gradient slot, each as large as the widest block, allocated once. Unit i uses weight
slot i mod 2 and no other: while block i computes, its neighbour is gathered into the other slot, and a graph that was kept
from forward finds block i's weights in backward at the addresses it remembers. What a slot holds is known by the versions
of the weights in it, so that a block whose weights are still there (the last one, when backward begins) is not
gathered again.

On CUDA gathers and reductions run on one side stream, in the order in which they are issued, which is the same on all
ranks: all-gather of the neighbour, computation, reduce-scatter. Events guard the slots: a gather waits until the last
reader of the slot has finished, a computation waits for its own gather only, and a block writes gradients only after the
former reduction has read them. On a CPU the same calls run in plain order.

Weights that lie in files are read ahead: while block i computes, the neighbour's are gathered from host memory, and those
of the two blocks beyond are on their way there from the disk (`ReadAhead`).

This file knows bytes and streams, nothing of autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from ftkit.engine.arena import arena_bytes
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.activation_offload import ActivationOffload
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.gradient import ReducedGradient
from ftkit.engine.memory.tiers import FileStore, Tiers
from ftkit.engine.trace import Trace
from ftkit.spec.tiers import NVME

ALIGNMENT_BYTES = 256
"""Each flat parameter inside a slot begins at a multiple of this, as CUDA's own allocations do."""


class SideStream:
    """A CUDA stream beside the computing one; on a CPU, the plain order of the program."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, *events: torch.cuda.Event | None) -> Iterator[None]:
        """Run the body on the side stream, once `events` have happened."""
        if self.stream is None:
            yield
            return
        for event in events:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event at the end of what the side stream was given so far."""
        return None if self.stream is None else self.stream.record_event()

    def now(self) -> torch.cuda.Event | None:
        """Return an event at the end of what the computing stream was given so far."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the computing stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class WeightSlot:
    """One permanent buffer for a block's gathered weights, and whose weights are in it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.content: tuple[object, ...] = ()  # (flat, version) pairs
        self.filled: torch.cuda.Event | None = None  # when the gather is done
        self.read: torch.cuda.Event | None = None  # when the last computation that reads it is done


READ_AHEAD = 2
"""Units whose weights are on their way from the disk while their neighbour is gathered."""

Content = tuple[tuple[str, int], ...]
"""What a buffer holds: names and versions of weights."""


class ReadAhead:
    """This rank's weights of the units to come, read from files into host memory before they are gathered.

    Args:
        groups: for each unit, its gathered flat parameters.
        tiers: tiers of this rank, whose device will copy from the buffers.
    """

    def __init__(self, groups: Sequence[Sequence[FlatParameter]], tiers: Tiers) -> None:
        sizes = [[(flat.layout.shard_numel, flat.dtype) for flat in group] for group in groups]
        room = max(map(arena_bytes, sizes))
        self.arena = tiers.arena((READ_AHEAD + 1) * room)
        self.free = [self.arena.take(room, torch.uint8) for _ in range(READ_AHEAD + 1)]
        self.device = tiers.device
        self.coming: dict[Content, tuple[Future[None], Tensor]] = {}
        self.copied: list[tuple[torch.cuda.Event, Tensor]] = []  # buffers that a copy to the device still reads
        self.thread = tiers.worker("ftkit-read-ahead")  # waits for updates, so that nobody else has to

    def start(self, flats: Sequence[FlatParameter]) -> None:
        """Start reading the weights of a unit, unless they are on their way."""
        content = _content(flats)
        if content in self.coming or not flats:
            return
        buffer = self._buffer()
        self.coming[content] = (self.thread.submit(self._read, flats, buffer), buffer)

    def take(self, flats: Sequence[FlatParameter]) -> tuple[list[Tensor], Tensor]:
        """Return the unit's weights (S,) each, and the buffer they lie in, which `give_back` wants. Waits for the disk."""
        self.start(flats)
        future, buffer = self.coming.pop(_content(flats))
        future.result()
        return list(_parts(buffer, flats)), buffer

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be used again once what was asked of the current CUDA stream is done."""
        if self.device.type == "cuda":
            self.copied.append((torch.cuda.current_stream(self.device).record_event(), buffer))
        else:
            self.free.append(buffer)

    def _buffer(self) -> Tensor:
        while self.copied:
            event, buffer = self.copied.pop(0)
            event.synchronize()
            self.free.append(buffer)
        if not self.free:  # an order that did not come: what was read first is let go
            future, buffer = self.coming.pop(next(iter(self.coming)))
            future.exception()
            self.free.append(buffer)
        return self.free.pop()

    @staticmethod
    def _read(flats: Sequence[FlatParameter], buffer: Tensor) -> None:
        requests = []
        for flat, part in zip(flats, _parts(buffer, flats)):
            if (update := flat.update) is not None:  # waited for, not settled: that is the computing thread's to do
                update.wait()
            if isinstance(flat.weights, FileStore):
                requests.append(flat.weights.file.read(0, part))
        for request in requests:
            request.wait()


class Transfer:
    """The slots of one model.

    Args:
        groups: for each unit, in order of execution, its flat parameters.
        gradients: for each unit, its gradients that are reduced after each use.
        comm: the ranks.
        tiers: where the shards lie.
        prefetch: whether units gather their neighbour while they compute.
        debug: fill what is freed with NaN, compare among ranks what each gather and reduction is for.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[FlatParameter]],
        gradients: Sequence[Sequence[ReducedGradient]],
        comm: Communicator,
        tiers: Tiers,
        *,
        prefetch: bool,
        debug: bool,
    ) -> None:
        self.comm = comm
        self.prefetch = prefetch
        self.side = SideStream(comm.device)
        self.trace = Trace(comm.device)
        self.debug = debug
        gathered = [[flat for flat in group if not flat.resident] for group in groups]
        weights = max((_layout(_of_weights(group))[1] for group in gathered), default=0)
        self.slots = [WeightSlot(weights, comm.device) for _ in range(2)] if weights else []
        self.activations = ActivationOffload(tiers)
        self.ahead = ReadAhead(gathered, tiers) if weights and tiers.tier("parameters") == NVME else None
        self.gradient_bytes = max((_layout(_of_gradients(group))[1] for group in gradients), default=0)
        self._gradient_slot: Tensor | None = None
        self.reduced: torch.cuda.Event | None = None  # when the last reduction has read the gradient slot
        self.updated = self.side.now()  # when the shards were last written
        self.updates = 0  # how often that happened

    @property
    def slot_bytes(self) -> int:
        """Bytes of the permanent slots on this rank."""
        return sum(slot.buffer.numel() for slot in self.slots) + self.gradient_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory in which weights are read ahead."""
        return self.ahead.arena.requested_bytes if self.ahead is not None else 0

    def lend(self, flats: Sequence[FlatParameter]) -> WeightSlot:
        """Return a slot of its own for a unit that holds its weights until backward."""
        return WeightSlot(_layout(_of_weights(flats))[1], self.comm.device)

    def gather(self, slot: WeightSlot, flats: Sequence[FlatParameter], number: int) -> None:
        """Start filling `slot` with the weights of `flats`; nothing if they are there already.

        Cost: one all-gather a flat parameter, on the side stream.

        Raises:
            RuntimeError: in debug mode, if the ranks do something else at this point.
        """
        content = _content(flats)
        if slot.content == content:
            return
        slot.content = ()
        read, buffer = self.ahead.take(flats) if self.ahead is not None else ([None] * len(flats), None)
        with self.side.after(self.updated, slot.read or self.side.now()):
            if self.debug:
                self._same("gather", number)
            with self.trace.span("collectives", f"gather {number}"):
                for flat, place, part in zip(flats, _views(slot.buffer, _of_weights(flats)), read):
                    flat.gather(place, part)
            if self.ahead is not None and buffer is not None:
                self.ahead.give_back(buffer)
        slot.content = content
        slot.filled = self.side.mark()

    def read_ahead(self, groups: Sequence[Sequence[FlatParameter]]) -> None:
        """Start reading from the disk what will be gathered next; nothing where weights lie in memory."""
        if self.ahead is not None and self.prefetch:
            for flats in groups:
                self.ahead.start(flats)

    def take(self, slot: WeightSlot, flats: Sequence[FlatParameter], number: int) -> None:
        """Make unit `number`'s weights usable by the computing stream: the parameters become views of `slot`."""
        self.gather(slot, flats, number)
        self.side.wait(slot.filled)
        for flat, place in zip(flats, _views(slot.buffer, _of_weights(flats))):
            flat.attach(place)

    def free(self, slot: WeightSlot, flats: Sequence[FlatParameter], *, for_good: bool) -> None:
        """End a computation on `slot`: the parameters become absent.

        Args:
            slot: the slot that held the weights.
            flats: the flat parameters in it.
            for_good: the slot may be written again. (A held one is read once more, in backward; it is never poisoned, as a
                graph that outlives `zero_grad` may still see it.)
        """
        for flat in flats:
            flat.detach()
        if self.debug and for_good:
            for place in _views(slot.buffer, _of_weights(flats)):
                place.fill_(math.nan)
            slot.content = ()
        slot.read = self.side.now()

    @contextmanager
    def gradients(self, gradients: Sequence[ReducedGradient], number: int) -> Iterator[None]:
        """Let the backward of unit `number` add to its gradients in the body; reduce them afterwards.

        They lie in the gradient slot meanwhile.
        """
        if not gradients:
            yield
            return
        places = self._open(gradients)
        try:
            yield
        except BaseException:
            for gradient in gradients:
                gradient.drop()
            raise
        for gradient in gradients:
            gradient.end()
        self.reduce(gradients, places, number)

    def gradient_slot(self) -> Tensor:
        """Return the gradient slot, allocated at first use: evaluation needs none."""
        if self._gradient_slot is None:
            self._gradient_slot = torch.empty(self.gradient_bytes, dtype=torch.uint8, device=self.comm.device)
        return self._gradient_slot

    def buffers(self) -> list[Tensor]:
        """Return the slots that are allocated."""
        return [slot.buffer for slot in self.slots] + ([] if self._gradient_slot is None else [self._gradient_slot])

    def _open(self, gradients: Sequence[ReducedGradient]) -> list[Tensor]:
        """Return the places (W*S,) of gradients in their slot, once the computing stream may write to it."""
        self.side.wait(self.reduced)
        places = _views(self.gradient_slot(), _of_gradients(gradients))
        for gradient, place in zip(gradients, places):
            if self.debug:
                place.fill_(math.nan)
            gradient.begin(place)
        return places

    def reduce(self, gradients: Sequence[ReducedGradient], places: Sequence[Tensor], number: int) -> None:
        """Reduce unit `number`'s gradients from their places (W*S,), on the side stream.

        Raises:
            RuntimeError: in debug mode, if the ranks do something else at this point.
        """
        with self.side.after(self.side.now()):
            if self.debug:
                self._same("reduce", number)
            with self.trace.span("collectives", f"reduce backward {number}"):
                for gradient, place in zip(gradients, places):
                    gradient.reduce(place)
        self.reduced = self.side.mark()

    def note_update(self) -> None:
        """Take note that shards were written by what the computing stream was given so far."""
        self.updated = self.side.now()
        self.updates += 1

    def refresh(self, flats: Sequence[FlatParameter]) -> None:
        """Bring resident copies up to date after an update, in the order given, on the side stream.

        Cost: one all-gather for each that is stale.
        """
        for flat in flats:
            if flat.stale:
                with self.side.after(self.updated), self.trace.span("collectives", f"refresh {flat.name}"):
                    flat.refresh()
                flat.refreshed = self.side.mark()

    def settle(self) -> None:
        """Make the computing stream wait for everything that was given to the side stream."""
        self.side.wait(self.side.mark())

    def _same(self, operation: str, number: int) -> None:
        operations = ("gather", "reduce")
        told = self.comm.all_numbers(2 * number + operations.index(operation))
        if len(set(told)) > 1:
            doing = ", ".join(f"rank {r}: {operations[n % 2]} unit {n // 2}" for r, n in enumerate(told))
            raise RuntimeError(f"the ranks differ in what they do next ({doing}): they run blocks in different orders")


def _content(flats: Sequence[FlatParameter]) -> Content:
    return tuple((flat.name, flat.version) for flat in flats)


def _parts(buffer: Tensor, flats: Sequence[FlatParameter]) -> Iterator[Tensor]:
    """Yield this rank's weights (S,) of each flat parameter in a buffer of whole pages each."""
    start = 0
    for flat in flats:
        size = flat.layout.shard_numel * flat.dtype.itemsize
        yield buffer[start : start + size].view(flat.dtype)
        start += arena_bytes([(flat.layout.shard_numel, flat.dtype)])


_Lines = list[tuple[int, torch.dtype]]
"""Elements and dtype of what lies in a slot, one after the other."""


def _of_weights(flats: Sequence[FlatParameter]) -> _Lines:
    return [(flat.layout.padded_numel, flat.dtype) for flat in flats]


def _of_gradients(gradients: Sequence[ReducedGradient]) -> _Lines:
    return [(each.flat.layout.padded_numel, each.slot_dtype) for each in gradients]


def _layout(lines: _Lines) -> tuple[list[tuple[int, int, torch.dtype]], int]:
    """Return (first byte, bytes, dtype) of each line in a slot, and the bytes that they need together."""
    places, end = [], 0
    for numel, dtype in lines:
        size = numel * dtype.itemsize
        places.append((end, size, dtype))
        end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, end


def _views(buffer: Tensor, lines: _Lines) -> list[Tensor]:
    """Return the places of lines in a slot."""
    places, _ = _layout(lines)
    return [buffer[start : start + size].view(dtype) for start, size, dtype in places]
