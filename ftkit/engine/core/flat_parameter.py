"""The flat parameter: tensors of a unit laid end to end, of which each rank holds a part.

[Note: the tensors of a flat parameter]   N elements, W ranks, shards of S elements (layout.py)

    weights     (S,)    compute dtype   this rank's part of the weights; permanent; written by the optimizer and the loader
    full        (W*S,)  compute dtype   all weights; permanent ("resident") or lent by a slot (transfer.py)

`weights` may lie in host memory or on NVMe (tiers.py), so it is read through its store. Its gradient is a noun of its own
(gradient.py), and so is its optimizer state (optim/).

The `nn.Parameter` objects of the model stay where they are, under the names they have. While a unit is gathered their
`.data` are views of `full`. Otherwise they are *absent*: shape, dtype and device stay true (counts, PEFT and Trainer read
them), the one element behind them is NaN, and their class refuses every computation (resharded.py).

A resident flat parameter (stages 0, 1 and 2, small parameters everywhere, or one rank whose weights are on the device)
keeps `full` for good, and `weights` is a view of it. A replicated one (stage 0) is laid out for a world of one although W
ranks hold it.

While the optimizer updates it in the background, `update` says so. Whoever reads or writes its weights, its gradient or its
state calls `settle` first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.resharded import guard, plain_class, resharded_class
from ftkit.engine.files.finite import is_finite
from ftkit.engine.memory.tiers import MemoryStore, Store, Tiers
from ftkit.spec.layout import SHARD_ALIGNMENT, FlatLayout, Span
from ftkit.spec.strategy import LineKind, Strategy
from ftkit.spec.tiers import DEVICE


def is_absent(parameter: Tensor) -> bool:
    """Return whether a tensor holds nothing of its own: on meta, or one element expanded."""
    return parameter.is_meta or (parameter.dim() > 0 and parameter.numel() > 0 and not any(parameter.stride()))


Origin = Callable[[int, Tensor], object]
"""Fills a tensor (n,) fp32 with elements [start, start + n) of this rank's shard, as exact as the weights came."""


PIECE_NUMEL = 1 << 18
"""Elements of mixed dtypes that are added at a time on a CPU: they stay in cache meanwhile."""


class Update(Protocol):
    """A line's update under way (updater.py)."""

    def wait(self) -> None:
        """Return when it is done; raise if it failed."""


def absent(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of `parameter`'s shape that holds nothing: one NaN, expanded."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(parameter.shape)


class FlatParameter:
    """One line of parameters of one dtype that are trained, or frozen, together. `allocate` comes after the constructor.

    Args:
        name: unique in the model; the checkpoint's file name.
        parameters: (name in the model, parameter) in model order.
        comm: the ranks that share it.
        dtype: compute dtype of the line.
        strategy: how it is held; nothing in it is "auto".
        kind: where its parameters stand in the model; see `LineKind`.
    """

    weights: Store

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        comm: Communicator,
        dtype: torch.dtype,
        strategy: Strategy,
        kind: LineKind,
    ) -> None:
        self.name = name
        self.comm = comm
        self.dtype = dtype
        self.parameters = [parameter for _, parameter in parameters]
        self.trainable = self.parameters[0].requires_grad
        self.owners = strategy.owners(comm.world_size)
        self.rank = comm.rank if self.owners > 1 else 0
        self.layout = FlatLayout.of([(n, tuple(p.shape)) for n, p in parameters], self.owners)
        self.resident = strategy.resident(kind, comm.world_size)
        self.kind = kind
        self.version = 0  # of the weights: +1 an update
        self.full: Tensor | None = None
        self.full_version = 0
        self._versions: list[int] = []  # of gathered parameters, when they were attached
        self.refreshed: torch.cuda.Event | None = None  # when a resident copy is up to date
        self.origin: Origin | None = None  # weights as they came, where they are wider than the compute dtype
        self.valued: Sequence[bool] = ()  # which tensors had values before sharding, where there is an origin
        self.update: Update | None = None
        self.captured: threading.Event | None = None  # set when a checkpoint that is being written has this line
        self.capture_seconds = 0.0  # that updates have waited for it
        self.edits_taken = 0  # what `edits` was when the optimizer last looked

    # --- where it lies

    @property
    def own_numel(self) -> int:
        """Elements of this rank's part, without padding."""
        start, stop = self.layout.shard_range(self.rank)
        return stop - start

    def written_range(self) -> tuple[int, int]:
        """Return the elements [first, last) of the line that this rank writes to a file for all: of a whole copy, a part."""
        first, last = self.layout.shard_range(self.rank)
        if self.owners < self.comm.world_size:
            part = -(-last // (self.comm.world_size * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT
            first, last = min(part * self.comm.rank, last), min(part * (self.comm.rank + 1), last)
        return first, last

    @property
    def shard(self) -> Tensor:
        """This rank's weights (S,), where they are in memory.

        Raises:
            RuntimeError: if they are in a file.
        """
        self.settle()
        if self.weights.tensor is None:
            raise RuntimeError(f"the weights of {self.name} lie on NVMe: read them piece by piece")
        return self.weights.tensor

    def allocate(self, tiers: Tiers) -> None:
        """Lay down this rank's bytes; take over values of parameters that have them (a meta tensor has none).

        The parameters are absent afterwards, or views of `full`.
        """
        device, numel = self.comm.device, self.layout.shard_numel
        if self.resident:
            self.full = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=device)
            self.weights = MemoryStore(self.full[self.rank * numel : (self.rank + 1) * numel], DEVICE)
        else:
            self.weights = tiers.make("parameters", f"{self.name}.weights", numel, self.dtype)
        self._take_over(device)
        for parameter in self.parameters:
            parameter.grad = None
        if self.full is not None:
            self.attach(self.full)
            self.edits_taken = self.edits()
            return
        for parameter, segment in zip(self.parameters, self.layout.segments):
            guard(parameter, segment.name)
        self.detach()

    def _take_over(self, device: torch.device) -> None:
        sources = [parameter.detach() for parameter in self.parameters]
        self.built = not all(map(is_absent, sources))
        if not self.built:
            return

        def copy(span: Span, out: Tensor) -> None:
            if not is_absent(sources[span.index]):
                low = span.start - span.segment.start
                out.copy_(sources[span.index].reshape(-1)[low : low + span.numel])

        if self.trainable and any(not is_absent(s) and s.dtype.itemsize > self.dtype.itemsize for s in sources):
            exact = MemoryStore(torch.zeros(self.layout.shard_numel, dtype=torch.float32, device=device), DEVICE)
            self.fill(exact, copy)
            self.origin = self._values(exact.tensor, [not is_absent(source) for source in sources])
        if self.full is not None:
            for span in self.layout.spans(0, self.layout.numel):
                copy(span, self.full[span.start : span.stop])
        else:
            self.fill(self.weights, copy)

    def _values(self, exact: Tensor, valued: Sequence[bool]) -> Origin:
        """Return the origin that gives from `exact` (S,) the tensors that had values; the others are left alone."""
        self.valued = valued

        def fill(start: int, out: Tensor) -> None:
            first = self.layout.shard_range(self.rank)[0]
            begin = first + start
            for span in self.layout.spans(begin, min(begin + out.numel(), self.layout.shard_range(self.rank)[1])):
                if valued[span.index]:
                    out[span.start - begin : span.stop - begin].copy_(exact[span.start - first : span.stop - first])

        return fill

    def fill(self, store: Store, put: Callable[[Span, Tensor], object]) -> None:
        """Let `put` write each tensor's part of this rank's range into `store` (S,), piece by piece."""
        base, stop = self.layout.shard_range(self.rank)
        for low, high in store.pieces():
            piece = store.read(low, high)
            for span in self.layout.spans(base + low, min(base + high, stop)):
                put(span, piece[span.start - base - low : span.stop - base - low])
            store.write(low, piece)

    def spans(self, store: Store, first: int | None = None, last: int | None = None) -> Iterator[tuple[Span, Tensor]]:
        """Yield each tensor's part of this rank's range in `store` (S,), with its values, piece by piece.

        Args:
            store: this rank's store (S,).
            first: first element of the line that is wanted; None begins at this rank's range.
            last: element of the line before which to stop; None ends with this rank's range.
        """
        base, stop = self.layout.shard_range(self.rank)
        first, last = max(base, first or base), stop if last is None else min(stop, last)
        for low, high in store.pieces():
            start, end = max(base + low, first), min(base + high, last)
            if start < end:
                piece = store.read(low, high)
                for span in self.layout.spans(start, end):
                    yield span, piece[span.start - base - low : span.stop - base - low]

    def settle(self) -> None:
        """Wait for an update of this line that is under way.

        Raises:
            RuntimeError: if it failed: the weights and their state no longer belong together.
        """
        if self.update is not None:
            self.update.wait()
            self.update = None

    # --- weights

    def agree(self) -> None:
        """Make whole copies equal on all ranks, as they may have been built from other random numbers: the owner's count.

        Cost: for a resident line one all-gather or broadcast.
        """
        if self.full is None or not self.built:
            return
        if self.owners > 1:
            self.gather(self.full)
            return
        self.comm.broadcast(self.full, self.name)
        if self.origin is not None:
            exact = self.full.float()
            self.origin(0, exact[: self.layout.numel])
            self.comm.broadcast(exact, self.name)
            self.origin = self._values(exact, self.valued)

    def attach(self, full: Tensor) -> None:
        """Point the parameters at their places in `full` (W*S,)."""
        for parameter, segment in zip(self.parameters, self.layout.segments):
            if not self.resident:
                parameter.__class__ = plain_class(parameter)
            parameter.data = full[segment.start : segment.stop].view(segment.shape)
        if not self.resident:
            self._versions = self._counts()

    def detach(self) -> None:
        """Make the parameters absent; until they are attached again, computing with one raises (resharded.py)."""
        for parameter in self.parameters:
            kind = plain_class(parameter)
            parameter.__class__ = kind
            parameter.data = absent(parameter, self.comm.device, self.dtype)
            parameter.__class__ = resharded_class(kind)

    def edited(self) -> str | None:
        """Return the name of a gathered parameter that was written in place since it was attached; None if none was.

        Cost: a count of each parameter; one read of this rank's part where a count has changed.
        """
        changed = [s.name for s, old, new in zip(self.layout.segments, self._versions, self._counts()) if old != new]
        return changed[0] if changed and differs_from_shard(self) else None

    def _counts(self) -> list[int]:
        return [0 if parameter.is_inference() else parameter._version for parameter in self.parameters]

    def edits(self) -> int:
        """Return a count of in-place writes to resident parameters by others; the engine's own, to `full`, leave it alone.

        A parameter counts what is written through it and its views; `.data` is a view that counts for itself.
        """
        return sum(self._counts()) if self.resident else 0

    def displaced(self) -> str | None:
        """Return the name of a resident parameter whose `.data` was replaced, so that it lies elsewhere than in `full`.

        Cost: under a microsecond a parameter.
        """
        if self.full is None:
            return None
        start, size = self.full.data_ptr(), self.full.element_size()
        for parameter, segment in zip(self.parameters, self.layout.segments):
            if parameter.numel() and parameter.data_ptr() != start + segment.start * size:
                return segment.name
        return None

    def gather(self, full: Tensor, read: Tensor | None = None) -> None:
        """Fill `full` (W*S,) with every rank's weights. Cost: one all-gather of W*S elements, and a copy from their tier.

        Args:
            full: receives the weights of all ranks (W*S,).
            read: this rank's weights (S,) in host memory, where they were read ahead from a file; None takes them from their
                tier.
        """
        self.settle()
        source = self.weights.tensor if read is None else read
        if self.owners > 1 and source is not None and read is None and source.device == full.device:
            self.comm.all_gather(full, source, self.name)
            return
        numel = self.layout.shard_numel
        own = full[self.rank * numel : (self.rank + 1) * numel]
        if source is None:
            for low, high in self.weights.pieces():
                own[low:high].copy_(self.weights.read(low, high))
        elif own.data_ptr() != source.data_ptr():
            own.copy_(source, non_blocking=True)
        if self.owners > 1:
            self.comm.all_gather(full, own, self.name)

    def collect(self, store: Store) -> Tensor:
        """Return all (W*S,) of what `store` (S,) is this rank's part of. A collective; on the device.

        Cost: its bytes on every rank, and an all-gather.
        """
        full = torch.empty(self.layout.padded_numel, dtype=store.dtype, device=self.comm.device)
        numel = self.layout.shard_numel
        own = full[self.rank * numel : (self.rank + 1) * numel]
        for low, high in store.pieces():
            own[low:high].copy_(store.read(low, high))
        if self.owners > 1:
            self.comm.all_gather(full, own, self.name)
        return full

    def exact_weights(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of this rank's weights in fp32, as exact as they came. They must lie in one piece.

        Cost: 4 bytes an element.
        """
        weights = self.weights.read(start, stop).float()
        if self.origin is not None and start < self.own_numel:
            self.origin(start, weights[: self.own_numel - start])
        return weights

    @property
    def stale(self) -> bool:
        """Whether a resident copy is older than the shards."""
        return self.full is not None and self.full_version != self.version

    def refresh(self) -> None:
        """Bring a resident copy up to date after an update. Cost: one all-gather, if it is stale."""
        if self.full is not None and self.stale:
            self.gather(self.full)
            self.full_version = self.version

    @property
    def size_bytes(self) -> int:
        """Bytes of live storage on this rank, wherever it lies."""
        return self.full.untyped_storage().nbytes() if self.full is not None else store_bytes(self.weights)


def store_bytes(store: Store) -> int:
    """Return the bytes of a shard, wherever it lies."""
    return store.numel * store.dtype.itemsize


def unusable(flat: FlatParameter) -> tuple[set[str], dict[str, float]]:
    """Return tensors that came with values which are not finite, and the largest values of those beyond the dtype.

    This rank looks at the values that it will take over; called before `allocate`.
    """
    broken: set[str] = set()
    beyond: dict[str, float] = {}
    first, last = (0, flat.layout.numel) if flat.resident else flat.layout.shard_range(flat.rank)
    for span in flat.layout.spans(first, last):
        source, name = flat.parameters[span.index].detach(), span.segment.name
        if is_absent(source):
            continue
        low = span.start - span.segment.start
        values = source.reshape(-1)[low : low + span.numel]
        for part in [values] if values.dtype == flat.dtype else values.split(PIECE_NUMEL):
            if is_finite(part.to(flat.dtype)):
                continue
            if is_finite(part):
                beyond[name] = max(float(part.abs().max()), beyond.get(name, 0.0))
            else:
                broken.add(name)
    return broken, beyond


def differs_from_shard(flat: FlatParameter) -> bool:
    """Return whether this rank's part of the gathered values differs from its shard."""
    base, _ = flat.layout.shard_range(flat.rank)
    for low, high in flat.weights.pieces():
        shard = flat.weights.read(low, high)
        for span in flat.layout.spans(base + low, min(base + high, base + flat.own_numel)):
            own = shard[span.start - base - low : span.stop - base - low]
            first = span.start - span.segment.start
            there = flat.parameters[span.index].reshape(-1)[first : first + span.numel]
            if not torch.equal(there.view(torch.uint8), own.to(there.device).view(torch.uint8)):
                return True
    return False
