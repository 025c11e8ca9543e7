"""Transfer: gathers weights into slots, and reduces gradients out of a slot.

There are two weight slots and one gradient slot, each as large as the widest unit. Unit i uses weight slot i mod 2 and no
other. While unit i computes, its neighbour is gathered into the other slot, and a graph kept from forward finds unit i's
weights in backward at the same addresses. A slot records names and versions of its weights, so a unit whose weights are
still there (the last one, when backward begins) is not gathered again.

On CUDA, gathers and reductions run on side streams (engine/streams.py), in the same order on all ranks. Events order them
with the computation: a gather waits for the last reader of its slot, a computation waits for its own gather, and a unit
writes gradients after the previous reduction has read the slot. Its recomputation does not wait for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.activation_offload import ActivationOffload
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.gradient import ReducedGradient, reduce
from ftkit.engine.core.read_ahead import ReadAhead, content_of
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.streams import DONE, Event, Streams
from ftkit.spec.sizes import ALIGNMENT_BYTES
from ftkit.spec.tiers import DEVICE, NVME


class WeightSlot:
    """A buffer for one unit's gathered weights. It may be written after the computation issued so far."""

    def __init__(self, size_bytes: int, streams: Streams) -> None:
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=streams.device)
        self.content: tuple[tuple[str, int], ...] = ()  # names and versions of the weights in it
        self.filled: Event = DONE  # after the gather
        self.read = streams.now()  # after the last computation that uses its memory
        self._views: dict[FlatParameter, list[Tensor]] = {}

    def views(self, flats: Sequence[FlatParameter]) -> list[tuple[FlatParameter, list[Tensor]]]:
        """Return each flat parameter with its parameters' views of this buffer."""
        if any(flat not in self._views for flat in flats):
            with torch.inference_mode(False):  # autograd could not save views that were made in inference mode
                places = _places(self.buffer, _weight_sizes(flats))
                self._views |= {flat: flat.views(place) for flat, place in zip(flats, places)}
        return [(flat, self._views[flat]) for flat in flats]


@dataclass
class WholeModel:
    """All weights of the model, gathered for generation or reading (holding.py)."""

    updates: int  # number of updates when they were gathered
    roots: dict[FlatParameter, Tensor]  # values of the root parameters


class Transfer:
    """The slots of one model.

    Args:
        groups: For each unit, in order of execution, its flat parameters.
        gradients: For each unit, its gradients that are reduced after each use.
        comm: The ranks.
        tiers: Where shards are stored.
        prefetch: Gather the neighbour's weights while a unit computes.
        debug: Fill freed buffers with NaN.
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
        self.comm, self.prefetch, self.debug = comm, prefetch, debug
        self.streams, self.trace = tiers.streams, tiers.streams.trace
        gathered = [[flat for flat in group if not flat.resident] for group in groups]
        size = max((_slot_bytes(_weight_sizes(group)) for group in gathered), default=0)
        self.slots = [WeightSlot(size, self.streams) for _ in range(2)] if size else []
        self.on_device = tiers.tier("parameters") == DEVICE
        self.activations = ActivationOffload(tiers)
        self.ahead = ReadAhead(gathered, tiers) if size and tiers.tier("parameters") == NVME else None
        self.gradient_bytes = max((_slot_bytes(_gradient_sizes(group)) for group in gradients), default=0)
        self._gradient_slot: Tensor | None = None
        self.reduced: Event = DONE  # after the last reduction has read the gradient slot
        self.updates = 0  # number of updates of the shards
        self.whole: WholeModel | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of the permanent slots on this rank."""
        return sum(slot.buffer.numel() for slot in self.slots) + self.gradient_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory for reading ahead."""
        return self.ahead.arena.requested_bytes if self.ahead is not None else 0

    def buffers(self) -> list[Tensor]:
        """Return the allocated slots."""
        return [slot.buffer for slot in self.slots] + ([] if self._gradient_slot is None else [self._gradient_slot])

    # --- weights

    def lend(self, flats: Sequence[FlatParameter]) -> WeightSlot:
        """Allocate a slot for one unit."""
        return WeightSlot(_slot_bytes(_weight_sizes(flats)), self.streams)

    def gather(self, slot: WeightSlot, flats: Sequence[FlatParameter], number: int) -> None:
        """Start gathering weights into a slot, if they are not there.

        Args:
            slot: The slot.
            flats: The unit's gathered flat parameters.
            number: Number of the unit.

        Cost: one all-gather per flat parameter, and a copy from the tier.
        """
        content = content_of(flats)
        if slot.content == content:
            return
        slot.content = ()
        places = _places(slot.buffer, _weight_sizes(flats))
        # A gather that nothing read may still write the slot.
        slot.filled = self._fill(str(number), flats, places, slot.read, slot.filled, blocks=True)
        slot.content = content

    def gather_root(self, flat: FlatParameter) -> tuple[Tensor, Event]:
        """Start gathering the one tensor of a root parameter.

        Args:
            flat: The flat parameter, which contains nothing else.

        Returns:
            The tensor, and the event after which it is complete.

        Cost: one all-gather, and the bytes of the tensor on every rank.
        """
        full = torch.empty(flat.layout.padded_numel, dtype=flat.dtype, device=self.comm.device)
        filled = self._fill(flat.name, [flat], [full], self.streams.now())
        return full[: flat.layout.numel].view(flat.layout.segments[0].shape), filled

    def _fill(
        self,
        name: str,
        flats: Sequence[FlatParameter],
        places: Sequence[Tensor],
        *free: Event,
        blocks: bool = False,
    ) -> Event:
        """Gather weights into places (W*S,) that may be written after the events `free`. Return the event after the gather.

        `blocks`: They are a unit's, so their reads from NVMe have begun.
        """
        if not self.on_device:
            read, buffer = self.ahead.take(flats) if self.ahead is not None and blocks else ([None] * len(flats), None)
            with self.streams.up.run(*free, span=f"fetch {name}"):
                for flat, place, part in zip(flats, places, read):
                    if part is None and self.ahead is not None:
                        self.ahead.copy(flat, flat.own_part(place))
                    else:
                        flat.fetch(place, part)
                if self.ahead is not None and buffer is not None:
                    self.ahead.give_back(buffer)
            fetched = self.streams.up.mark()
            if flats[0].owners == 1:
                return fetched
            free = (fetched,)
        with self.streams.collectives.run(*free, span=f"gather {name}"):
            for flat, place in zip(flats, places):
                flat.gather(place)
        return self.streams.collectives.mark()

    def read_ahead(self, groups: Sequence[Sequence[FlatParameter]]) -> None:
        """Start reading the shards of the next units from NVMe."""
        if self.ahead is not None and self.prefetch:
            for flats in groups:
                self.ahead.start(flats)

    def take(self, slot: WeightSlot, flats: Sequence[FlatParameter], number: int) -> None:
        """Gather weights and make the parameters views of the slot. Arguments as in `gather`."""
        self.gather(slot, flats, number)
        slot.filled.wait()
        for flat, views in slot.views(flats):
            flat.attach(views)

    def free(self, slot: WeightSlot, flats: Sequence[FlatParameter], *, for_good: bool) -> None:
        """Make the parameters placeholders again. `for_good`: no backward reads the slot's content again."""
        for flat in flats:
            flat.detach()
        if self.debug and for_good:
            for place in _places(slot.buffer, _weight_sizes(flats)):
                place.fill_(math.nan)
            slot.content = ()
        slot.read = self.streams.now()

    def refresh(self, flats: Sequence[FlatParameter]) -> None:
        """Gather resident weights again that are stale. Cost: one all-gather for each."""
        for flat in flats:
            if flat.stale:
                with self.streams.collectives.run(span=f"refresh {flat.name}"):
                    flat.refresh()
                flat.refreshed = self.streams.collectives.mark()

    # --- gradients

    @contextmanager
    def gradients(self, gradients: Sequence[ReducedGradient], number: int) -> Iterator[None]:
        """Collect the gradients of unit `number` in the gradient slot during the body, then reduce them."""
        if not gradients:
            yield
            return
        places = _places(self.gradient_slot(), _gradient_sizes(gradients))
        for gradient, place in zip(gradients, places):
            gradient.begin(place)
        try:
            yield
        finally:
            for gradient in gradients:
                gradient.end()
        self.reduced = reduce(f"backward {number}", gradients, places, self.streams)
        for place in places if self.debug else ():
            self.await_gradient_slot()
            place.fill_(math.nan)

    def await_gradient_slot(self) -> None:
        """Wait on the computing stream until the previous reduction has read the gradient slot. CPU ranks wait here."""
        self.reduced.wait()
        self.comm.await_readers()

    def gradient_slot(self) -> Tensor:
        """Return the gradient slot. Allocates it at the first call, on all ranks: evaluation needs none."""
        if self._gradient_slot is None:
            slot = self.comm.share(self.gradient_bytes)
            if slot is None:
                slot = torch.empty(self.gradient_bytes, dtype=torch.uint8, device=self.comm.device)
            self._gradient_slot = slot
            if self.debug:
                self._gradient_slot.fill_(255)  # NaN in every dtype
        return self._gradient_slot


_Sizes = list[tuple[int, torch.dtype]]
"""Elements and dtype of each flat tensor in a slot."""


def _weight_sizes(flats: Sequence[FlatParameter]) -> _Sizes:
    return [(flat.layout.padded_numel, flat.dtype) for flat in flats]


def _gradient_sizes(gradients: Sequence[ReducedGradient]) -> _Sizes:
    return [(each.flat.layout.padded_numel, each.slot_dtype) for each in gradients]


def _slot_bytes(sizes: _Sizes) -> int:
    """Return the bytes of the flat tensors in a slot."""
    return sum(-(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for numel, dtype in sizes)


def _places(buffer: Tensor, sizes: _Sizes) -> list[Tensor]:
    """Return the flat tensors (W*S,) in a slot."""
    parts = buffer[: _slot_bytes(sizes)].split([_slot_bytes([size]) for size in sizes])
    return [part.view(dtype)[:numel] for part, (numel, dtype) in zip(parts, sizes)]
