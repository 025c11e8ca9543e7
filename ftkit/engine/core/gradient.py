"""The gradient of a flat parameter: from a unit's backward to the optimizer.

[Note: the forms of a gradient]   N elements, W ranks, shards of S elements (spec/layout.py)

    form         a backward writes to               reduced             the optimizer reads
    reduced      the gradient slot (W*S,)           after each backward `shard` (S,) on the device
    offloaded    the gradient slot (W*S,)           after each backward a store (S,) on host or NVMe (gradient_offload.py)
    deferred     `full` (W*S,), on every rank       once, at the step   this rank's part of `full`

Each is the mean over ranks, summed over the micro-batches of a step. `Transfer.gradients` opens a unit's gradients with
places in the slot, and reduces them on the side stream after the unit's backward; in between, hooks of autograd call
`add`. A use outside blocks (an embedding, a head) calls `add_use`. The optimizer calls `finish`, then reads `store`,
`square` and `touched`.

[Note: touched]   A tensor without a gradient on any rank is not updated; AdamW would decay it. Each rank records the tensors
it has touched since `zero_grad`, and the norm's collective combines the records (optimizer.py).

`shard` and `full` are allocated at first use: evaluation needs neither.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import MemoryStore, Store
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import DEVICE

Measure = Callable[[Tensor], "Tensor | float"]
"""Takes a gradient (n,); returns its sum of squares, as a scalar on its device or a float."""

PIECE_NUMEL = 1 << 18
"""Elements of mixed dtypes to add at a time on a CPU, so that they stay in cache."""


class Gradient(ABC):
    """The gradient of one trained flat parameter.

    Args:
        flat: The flat parameter.
        strategy: Gives the dtype in which micro-batches are summed.
    """

    def __init__(self, flat: FlatParameter, strategy: Strategy) -> None:
        self.flat = flat
        self.dtype = torch.float32 if strategy.sums_in_fp32 else flat.dtype
        self.touched = [False] * len(flat.parameters)  # see [Note: touched]
        self.changes = 0  # number of changes; the optimizer caches the norm of one such number
        self._there = False

    @property
    def there(self) -> bool:
        """Whether this rank has a gradient for the current step."""
        return self._there

    @property
    @abstractmethod
    def open(self) -> bool:
        """Whether `add` has a place to write to."""

    @abstractmethod
    def add(self, index: int, gradient: Tensor) -> None:
        """Add the local gradient of tensor `index`, of any shape, while the gradient is open."""

    @abstractmethod
    def add_use(self, index: int, gradient: Tensor | None) -> None:
        """Add the local gradient of tensor `index` from a use outside blocks. A collective unless deferred.

        Args:
            index: Index of the tensor in the flat parameter.
            gradient: The gradient, of any shape. None if this rank has none while others may have one.
        """

    @abstractmethod
    def finish(self) -> None:
        """Complete the step's mean gradient on this rank's shard. A collective if deferred."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors in memory that store it."""

    def store(self) -> Store | None:
        """Return the store of this rank's shard (S,) of the step's gradient. None: there is no gradient."""
        part = self._part() if self._there else None
        return None if part is None else MemoryStore(part, DEVICE)

    def square(self, measure: Measure) -> Tensor | float | None:
        """Return this rank's share of the squared norm, or None without a gradient. The shares of all ranks add up to it."""
        part = self._part() if self._there else None
        return None if part is None else self._shared(measure(part[: self.flat.own_numel]))

    def _part(self) -> Tensor | None:
        """Return this rank's shard (S,) on the device."""
        return None

    def _shared(self, square: Tensor | float) -> Tensor | float:
        return square / self.flat.comm.world_size if self.flat.owners == 1 else square

    def agree(self, touched: Sequence[bool]) -> None:
        """Set `touched` to that of any rank."""
        self.touched = list(touched)

    def zero(self) -> None:
        """Drop the step's gradient. Writes nothing: the next backward overwrites it."""
        self._there = False
        self.changes += 1
        self.touched = [False] * len(self.touched)

    @property
    def size_bytes(self) -> int:
        """Bytes of live storage on this rank."""
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self.tensors()}.values())

    def guard(self) -> None:
        """Make `.grad` of the parameters raise while their gradients are here. They do not keep this object alive."""
        own = weakref.ref(self)

        def collected(index: int) -> bool:
            gradient = own()
            return gradient is not None and gradient.touched[index]

        self.flat.guard(collected)

    def _change(self) -> None:
        """Count a change, and wait for an update that still reads the gradient."""
        self.changes += 1
        self.flat.settle()


class ReducedGradient(Gradient):
    """A gradient that is reduced after each backward of its unit. Arguments as in `Gradient`."""

    def __init__(self, flat: FlatParameter, strategy: Strategy) -> None:
        super().__init__(flat, strategy)
        self.slot_dtype = self.dtype if strategy.parts > 1 else flat.dtype  # parts are summed in the slot
        self.shard: Tensor | None = None
        self._place: Tensor | None = None  # (W*S,) in the slot, during a unit's backward
        self._written: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether a backward of the unit runs."""
        return self._place is not None

    def begin(self, place: Tensor) -> None:
        """Let `add` write to `place` (W*S,) until `end`."""
        self._place, self._written = place, set()

    def add(self, index: int, gradient: Tensor) -> None:
        """See `Gradient.add`. Later parts are added to the first."""
        assert self._place is not None
        segment = self.flat.layout.segments[index]
        place = self._place[segment.start : segment.stop]
        if index in self._written:
            add_in_pieces(place, gradient.reshape(-1))
        else:
            place.copy_(gradient.reshape(-1))
        self._written.add(index)

    def end(self) -> None:
        """Close the gradient. Zero the elements of its place that were not written."""
        assert self._place is not None
        layout, place, self._place = self.flat.layout, self._place, None
        place[layout.numel :].zero_()
        for index, segment in enumerate(layout.segments):
            if index in self._written:
                self.touched[index] = True
            else:
                place[segment.start : segment.stop].zero_()

    def drop(self) -> None:
        """Close the gradient after an error in backward."""
        self._place = None

    def add_use(self, index: int, gradient: Tensor | None) -> None:
        """See `Gradient.add_use`. Cost: one reduce-scatter and one buffer of W*S elements."""
        flat = self.flat
        shape = flat.layout.padded_numel
        if gradient is None:
            self.reduce(torch.zeros(shape, dtype=flat.dtype, device=flat.comm.device))
            return
        full = torch.empty(shape, dtype=flat.dtype, device=flat.comm.device)
        segment = flat.layout.segments[index]
        full[: segment.start].zero_()
        full[segment.start : segment.stop].copy_(gradient.reshape(-1))
        full[segment.stop :].zero_()
        self.touched[index] = True
        self.reduce(full)

    def reduce(self, full: Tensor) -> None:
        """Average a full gradient over ranks and add this rank's part to the shard.

        Args:
            full: Local gradient of all elements, shape (W*S,). Overwritten.

        Cost: one reduce-scatter of W*S elements.
        """
        self._change()
        self._add_reduced(full)
        self._there = True

    def _add_reduced(self, full: Tensor) -> None:
        flat = self.flat
        if self.shard is None:
            self.shard = torch.empty(flat.layout.shard_numel, dtype=self.dtype, device=flat.comm.device)
        if not self._there and self.dtype == full.dtype:
            flat.comm.reduce_scatter_mean(self.shard, full, flat.name)
            return
        part = torch.empty(flat.layout.shard_numel, dtype=full.dtype, device=flat.comm.device)
        flat.comm.reduce_scatter_mean(part, full, flat.name)
        if self._there:
            add_in_pieces(self.shard, part)
        else:
            self.shard.copy_(part)

    def finish(self) -> None:
        """See `Gradient.finish`. Nothing is left to do."""

    def tensors(self) -> list[Tensor]:
        """Return the shard, once there is one."""
        return [] if self.shard is None else [self.shard]

    def _part(self) -> Tensor | None:
        return self.shard


class DeferredGradient(Gradient):
    """A gradient that is reduced once, at the step. Arguments as in `Gradient`."""

    def __init__(self, flat: FlatParameter, strategy: Strategy) -> None:
        super().__init__(flat, strategy)
        self.full: Tensor | None = None
        self._finished = False

    @property
    def open(self) -> bool:
        """Always true."""
        return True

    def add(self, index: int, gradient: Tensor) -> None:
        """See `Gradient.add`.

        Raises:
            RuntimeError: The gradient is reduced already.
        """
        if self._finished and self.flat.comm.world_size > 1:
            raise RuntimeError(
                f"a backward reached {self.flat.name} after its gradient norm was taken or the step was made: call "
                "zero_grad() between a step and the next backward"
            )
        self._finished = False
        self._change()
        segment = self.flat.layout.segments[index]
        place = self._whole()[segment.start : segment.stop]
        if self.touched[index]:
            add_in_pieces(place, gradient.reshape(-1))
        else:
            place.copy_(gradient.reshape(-1))
        self.touched[index] = True
        self._there = True

    def add_use(self, index: int, gradient: Tensor | None) -> None:
        """See `Gradient.add_use`."""
        if gradient is not None:
            self.add(index, gradient)

    def finish(self) -> None:
        """Reduce the step's gradient on all ranks, also on those without a local gradient.

        Cost: one reduce-scatter (stage 1) or all-reduce (stage 0), at the first call in a step.
        """
        if self._finished:
            return
        self._finished = True
        flat, layout = self.flat, self.flat.layout
        flat.settle()
        full = self._whole()
        for index, segment in enumerate(layout.segments):
            if not self.touched[index]:
                full[segment.start : segment.stop].zero_()
        full[layout.numel :].zero_()
        part = self._part()
        assert part is not None
        if flat.owners == 1:
            flat.comm.all_reduce_mean(part, flat.name)
        else:
            flat.comm.reduce_scatter_mean(part, full, flat.name)
        self._there = True

    def zero(self) -> None:
        """See `Gradient.zero`."""
        super().zero()
        self._finished = False

    def tensors(self) -> list[Tensor]:
        """Return the whole local gradient, once there is one."""
        return [] if self.full is None else [self.full]

    def _whole(self) -> Tensor:
        if self.full is None:
            layout, device = self.flat.layout, self.flat.comm.device
            self.full = torch.empty(layout.padded_numel, dtype=self.dtype, device=device)
        return self.full

    def _part(self) -> Tensor | None:
        if self.full is None or not self._finished:
            return None
        numel = self.flat.layout.shard_numel
        return self.full[self.flat.rank * numel : (self.flat.rank + 1) * numel]


def add_in_pieces(total: Tensor, part: Tensor) -> None:
    """Add `part` (n,) to `total` (n,). On a CPU in pieces: torch would first widen all of a narrower `part`."""
    width = PIECE_NUMEL if total.device.type == "cpu" and total.dtype != part.dtype else max(total.numel(), 1)
    for start in range(0, total.numel(), width):
        total[start : start + width].add_(part[start : start + width])


def reduced_at_once(gradients: Sequence[Gradient]) -> list[ReducedGradient]:
    """Return the gradients that are reduced after each backward."""
    return [each for each in gradients if isinstance(each, ReducedGradient)]
