"""The flat parameter: tensors of a unit laid end to end. Each rank owns a shard.

[Note: the tensors of a flat parameter]   N elements, W ranks, shards of S elements (spec/layout.py)

    weights     (S,)    compute dtype   this rank's shard; permanent; written by the optimizer and by loading
    full        (W*S,)  compute dtype   all weights; permanent if resident, else part of a slot (transfer.py)

`weights` can be in device memory, in host memory or on NVMe, so it is accessed through a `Store`.

The `nn.Parameter` objects of the model keep their identity and names. While gathered, their `.data` are views of `full`.
While resharded, they are placeholders (placeholder.py).

A resident flat parameter (stages 0 to 2, small parameters, or one rank with its weights on the device) keeps `full`, and
`weights` is a view of it. A replicated one (stage 0) has the layout of a world of one on every rank.

While the optimizer updates the weights in the background, `update` is set. Before reading or writing them, call `settle` on
the stream that does it. `updated` is the event after the last write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.placeholder import absent, guarded_class, is_absent, placeholder_class
from ftkit.engine.memory.tiers import MemoryStore, Pieces, Store, Tiers
from ftkit.engine.streams import DONE, Event
from ftkit.spec.layout import SHARD_ALIGNMENT, FlatLayout, Span
from ftkit.spec.state_forms import can_be_coded
from ftkit.spec.strategy import FlatKind, Strategy
from ftkit.spec.tiers import DEVICE


class Update(Protocol):
    """An update of a flat parameter that is under way (optim/updater.py)."""

    event: Event
    """After the device's part of the update. Set when `wait` returns."""

    def wait(self) -> None:
        """Block the host until the update is issued, and files are written. Raises the error of a failed update."""


@dataclass
class _Placeholder:
    """A parameter's value while it is resharded, and its classes while gathered and while resharded."""

    value: Tensor
    plain: type
    resharded: type


class FlatParameter:
    """Parameters of one dtype, all trained or all frozen. Call `allocate` after construction.

    Args:
        name: Unique name in the model, and the name of its files in a checkpoint.
        parameters: (name in the model, parameter), in model order.
        comm: The ranks that share it.
        dtype: Compute dtype.
        strategy: A strategy without "auto".
        kind: Where the parameters are in the model.
    """

    weights: Store

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        comm: Communicator,
        dtype: torch.dtype,
        strategy: Strategy,
        kind: FlatKind,
    ) -> None:
        self.name, self.comm, self.dtype, self.kind = name, comm, dtype, kind
        self.parameters = [parameter for _, parameter in parameters]
        self.trainable = self.parameters[0].requires_grad
        self.owners = strategy.owners(comm.world_size)
        self.rank = comm.rank if self.owners > 1 else 0
        self.layout = FlatLayout.of([(n, tuple(p.shape)) for n, p in parameters], self.owners)
        self.resident = strategy.resident(kind, comm.world_size)
        self.version = 0  # number of updates of the shards
        self.stored: Tensor | None = None  # `weights`, if a collective can read them in place
        self.full: Tensor | None = None
        self.full_version = 0  # version of the shards that `full` was gathered from
        self.refreshed: Event = DONE  # after the last write of `full`
        self.update: Update | None = None
        self.updated: Event = DONE  # after the last write of the shards, except by `update`
        self._placeholders: list[_Placeholder] = []  # of the parameters, if they are ever resharded

    @property
    def own_numel(self) -> int:
        """Elements of this rank's shard, without padding."""
        start, stop = self.layout.shard_range(self.rank)
        return stop - start

    @property
    def coded_numel(self) -> int:
        """Elements of the tensors that can have 8-bit moments (spec/state_forms.py). `partition` puts them first."""
        segments = self.layout.segments if self.trainable and self.kind == "block" else ()
        return sum(segment.numel for segment in takewhile(lambda each: can_be_coded(each.shape), segments))

    @property
    def size_bytes(self) -> int:
        """Bytes of live storage on this rank, on any tier."""
        return self.full.nbytes if self.full is not None else store_bytes(self.weights)

    def own_part(self, full: Tensor) -> Tensor:
        """Return this rank's part (S,) of `full` (W*S,)."""
        numel = self.layout.shard_numel
        return full[self.rank * numel : (self.rank + 1) * numel]

    def written_range(self) -> tuple[int, int]:
        """Return the elements [first, last) that this rank writes to a checkpoint. Ranks with equal copies divide them."""
        first, last = self.layout.shard_range(self.rank)
        if self.owners < self.comm.world_size:
            part = -(-last // (self.comm.world_size * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT
            first, last = min(part * self.comm.rank, last), min(part * (self.comm.rank + 1), last)
        return first, last

    # --- allocation

    def allocate(self, tiers: Tiers) -> None:
        """Allocate this rank's weights and copy the values of parameters that have them (a meta tensor has none).

        Afterwards the parameters are views of `full`, equal on all ranks, or placeholders. A collective if resident.
        """
        built = not all(map(is_absent, self.parameters))
        if not self.resident:
            self.weights = tiers.make("parameters", f"{self.name}.weights", self.layout.shard_numel, self.dtype)
            if built:
                self.fill(self.weights, self.copy_value)
            for parameter, segment in zip(self.parameters, self.layout.segments):
                parameter.ftkit_name = segment.name  # type: ignore[attr-defined]  # tensors take attributes
                value, plain = absent(parameter, self.comm.device, self.dtype), type(parameter)
                self._placeholders.append(_Placeholder(value, plain, placeholder_class(plain)))
            self.detach()
        else:
            full = tiers.make("full parameters", f"{self.name}.full", self.layout.padded_numel, self.dtype, DEVICE).tensor
            assert full is not None
            self.full = full
            self.weights = MemoryStore(self.own_part(full))
            for span in self.layout.spans(0, self.layout.numel):
                self.copy_value(span, full[span.start : span.stop])
            if built and self.owners > 1:
                self.comm.all_gather(full, self.own_part(full), self.name)
            elif built:
                self.comm.broadcast(full, self.name)
            self.attach(self.views(full))
        if not (self.weights.on_host and tiers.streams.separate):
            self.stored = self.weights.tensor
        self.updated = tiers.streams.now()
        for parameter in self.parameters:
            parameter.grad = None

    def guard(self, collected: Callable[[nn.Parameter], bool]) -> None:
        """Make `.grad` of the parameters raise while the engine has their gradients. Call it after `allocate`.

        Args:
            collected: Takes a parameter; returns whether the engine has its gradient.
        """
        for parameter in self.parameters:
            parameter.__class__ = guarded_class(type(parameter), collected)
        for parameter, placeholder in zip(self.parameters, self._placeholders):
            placeholder.resharded = type(parameter)

    def copy_value(self, span: Span, out: Tensor) -> None:
        """Write a parameter's own values to `out` (n,), the elements of `span`. Does nothing if it has none."""
        source = self.parameters[span.index].detach()
        if not is_absent(source):
            low = span.start - span.segment.start
            out.copy_(source.reshape(-1)[low : low + span.numel])

    def fill(self, store: Pieces, put: Callable[[Span, Tensor], object]) -> None:
        """Write each tensor's part of this rank's shard into a store, piece by piece.

        Args:
            store: Store (S,) to write.
            put: Writes the elements of a span to a tensor (n,).
        """
        base, stop = self.layout.shard_range(self.rank)
        for low, high in store.pieces():
            piece = store.read(low, high)
            for span in self.layout.spans(base + low, min(base + high, stop)):
                put(span, piece[span.start - base - low : span.stop - base - low])
            store.write(low, piece)

    def spans(self, store: Pieces, first: int | None = None, last: int | None = None) -> Iterator[tuple[Span, Tensor]]:
        """Yield each tensor's part of this rank's shard with its values (n,), piece by piece.

        Args:
            store: Store (S,) to read.
            first: First element of the flat parameter to read. None: the start of this rank's shard.
            last: Element of the flat parameter to stop before. None: the end of this rank's shard.
        """
        base, stop = self.layout.shard_range(self.rank)
        first, last = max(base, first or base), stop if last is None else min(stop, last)
        for low, high in store.pieces():
            start, end = max(base + low, first), min(base + high, last)
            if start < end:
                piece = store.read(low, high)
                for span in self.layout.spans(start, end):
                    yield span, piece[span.start - base - low : span.stop - base - low]

    # --- use

    def settle(self) -> None:
        """Wait for an update that is under way, and make the current stream wait for the last write of the shards.

        Raises:
            RuntimeError: The update failed; weights and state no longer belong to the same step.
        """
        if self.update is not None:
            self.update.wait()
            self.updated, self.update = self.update.event, None
        self.updated.wait()

    def views(self, full: Tensor) -> list[Tensor]:
        """Return each parameter's view of `full` (W*S,)."""
        return [full[segment.start : segment.stop].view(segment.shape) for segment in self.layout.segments]

    def attach(self, views: Sequence[Tensor]) -> None:
        """Give the parameters their values: the views of a gathered buffer."""
        for parameter, placeholder in zip(self.parameters, self._placeholders):
            parameter.__class__ = placeholder.plain
        for parameter, view in zip(self.parameters, views):
            parameter.data = view

    def detach(self) -> None:
        """Make the parameters placeholders."""
        for parameter, placeholder in zip(self.parameters, self._placeholders):
            parameter.__class__ = placeholder.plain
            parameter.data = placeholder.value
            parameter.__class__ = placeholder.resharded

    def fetch(self, full: Tensor, read: Tensor | None = None) -> None:
        """Copy this rank's weights from host memory or NVMe to its part of `full`.

        With several CPU ranks nothing is copied: the collective reads host memory itself.

        Args:
            full: Buffer for all weights, shape (W*S,). Only this rank's part is written.
            read: This rank's weights (S,) in host memory if they were read ahead from NVMe. None: read them from their tier.
        """
        self.settle()
        source = self.weights.tensor if read is None else read
        if source is None:
            _copy_pieces(self.own_part(full), self.weights)
        elif self.owners == 1 or source is not self.stored:
            self.own_part(full).copy_(source, non_blocking=True)

    def gather(self, full: Tensor) -> None:
        """Fill `full` (W*S,) with the weights of all ranks. This rank's are on the device, or `fetch` has copied them.

        Cost: one all-gather of W*S elements.
        """
        self.settle()
        if self.owners > 1:
            self.comm.all_gather(full, self.own_part(full) if self.stored is None else self.stored, self.name)

    def collect(self, store: Pieces) -> Tensor:
        """Return all elements (W*S,) of a tensor that is sharded like the weights, on the device. A collective.

        Args:
            store: This rank's shard (S,) of it.

        Cost: one all-gather.
        """
        full = torch.empty(self.layout.padded_numel, dtype=store.dtype, device=self.comm.device)
        own = self.own_part(full)
        _copy_pieces(own, store)
        if self.owners > 1:
            self.comm.all_gather(full, own, self.name)
        return full

    @property
    def stale(self) -> bool:
        """Whether `full` of a resident flat parameter is older than the shards."""
        return self.full is not None and self.full_version != self.version

    def refresh(self) -> None:
        """Update `full` of a resident flat parameter. Cost: one all-gather if it is stale."""
        if self.full is not None and self.stale:
            self.gather(self.full)
            self.full_version = self.version


def _copy_pieces(out: Tensor, store: Pieces) -> None:
    for low, high in store.pieces():
        out[low:high].copy_(store.read(low, high))


def store_bytes(store: Store) -> int:
    """Return the bytes of a shard, on any tier."""
    return store.numel * store.dtype.itemsize
