"""The gradient of a flat parameter: from a unit's backward to the optimizer.

[Note: the forms of a gradient]   N elements, W ranks, shards of S elements (spec/layout.py)

    form         a backward writes to               reduced             the optimizer reads
    reduced      the gradient slot (W*S,)           after each backward `memory` (S,) on the device
    offloaded    the gradient slot (W*S,)           after each backward a store (S,) on host or NVMe (gradient_offload.py)
    deferred     `memory` (W*S,), on every rank     once per step       this rank's part of `memory`

Each is the mean over ranks, summed over the micro-batches of a step. `Transfer.gradients` opens a unit's gradients with
places in the slot, and reduces them after the unit's backward; in between, hooks of autograd call `add`. A use outside
blocks (an embedding, a head) calls `add_use`. `DeferredReductions` reduces the deferred gradients. Afterwards the optimizer
reads `store`, `square` and `touched`. All reductions run on the stream of collectives.

[Note: touched]   A tensor without a gradient on any rank is not updated; AdamW would decay it. Each rank records the tensors
it has touched since `zero_grad`, and the norm's collective combines the records (optimizer.py).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.placeholder import on_gradient
from ftkit.engine.memory.tiers import MemoryStore, Store
from ftkit.engine.streams import DONE, Event, Streams
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy

Measure = Callable[[Tensor], "Tensor | float"]
"""Takes a gradient (n,); returns its sum of squares, as a scalar on its device or a float."""

PIECE_NUMEL = 1 << 18
"""Elements of mixed dtypes to add at a time on a CPU, so that they stay in cache."""


class Gradient(ABC):
    """The gradient of one trained flat parameter.

    Args:
        flat: The flat parameter.
        strategy: Gives the dtype in which micro-batches are summed.
        streams: The streams of this rank.
    """

    def __init__(self, flat: FlatParameter, strategy: Strategy, streams: Streams) -> None:
        self.flat, self.streams = flat, streams
        self.dtype = torch.float32 if strategy.sums_in_fp32 else flat.dtype
        self.touched = [False] * len(flat.parameters)  # see [Note: touched]
        self.changes = 0  # number of changes; the optimizer caches the norm of one such number
        self.there = False  # whether this rank's shard of the step's gradient is reduced
        self.memory: Tensor | None = None  # of the sum; allocated at first use, because evaluation needs none

    @abstractmethod
    def add(self, index: int, gradient: Tensor) -> None:
        """Add the local gradient of tensor `index`, of any shape, from a backward of the unit."""

    def add_use(self, index: int, gradient: Tensor | None) -> None:
        """Add the local gradient of tensor `index` from a use outside blocks. A collective unless deferred."""
        if gradient is not None:
            self.add(index, gradient)

    @property
    @abstractmethod
    def part(self) -> Tensor | None:
        """This rank's shard (S,) of the step's gradient on the device. None: there is none."""

    def store(self) -> Store | None:
        """Return the store of this rank's shard (S,) of the step's gradient. None: there is no gradient."""
        return None if self.part is None else MemoryStore(self.part)

    def square(self, measure: Measure) -> Tensor | float | None:
        """Return this rank's share of the squared norm, or None without a gradient. The shares of all ranks add up to it."""
        return None if self.part is None else self._shared(measure(self.part[: self.flat.own_numel]))

    def _shared(self, square: Tensor | float) -> Tensor | float:
        return square / self.flat.comm.world_size if self.flat.owners == 1 else square

    def zero(self) -> None:
        """Drop the step's gradient. Writes nothing: the next backward overwrites it."""
        self.there = False
        self.changes += 1
        self.touched = [False] * len(self.touched)

    @property
    def size_bytes(self) -> int:
        """Bytes of live storage on this rank."""
        return 0 if self.memory is None else self.memory.nbytes

    def receive(self, *, in_block: bool) -> None:
        """Take each parameter's gradient when autograd has finished it."""
        for index, parameter in enumerate(self.flat.parameters):
            on_gradient(parameter, partial(_receive, weakref.ref(self), index, in_block))

    def guard(self) -> None:
        """Make `.grad` of the parameters raise while their gradients are here."""
        own = weakref.ref(self)
        indices = {id(parameter): index for index, parameter in enumerate(self.flat.parameters)}

        def collected(parameter: Tensor) -> bool:
            gradient, index = own(), indices.get(id(parameter))  # None: the model is gone, or a copy of the parameter
            return gradient is not None and index is not None and gradient.touched[index]

        self.flat.guard(collected)

    def _memory(self, numel: int) -> Tensor:
        if self.memory is None:
            self.memory = torch.empty(numel, dtype=self.dtype, device=self.flat.comm.device)
        return self.memory

    def _change(self) -> None:
        """Count a change, and wait for an update that still reads the gradient."""
        self.changes += 1
        self.flat.settle()


class ReducedGradient(Gradient):
    """A gradient that is reduced after each backward of its unit. Arguments as in `Gradient`."""

    def __init__(self, flat: FlatParameter, strategy: Strategy, streams: Streams) -> None:
        super().__init__(flat, strategy, streams)
        self.slot_dtype = self.dtype if strategy.parts > 1 else flat.dtype  # parts are summed in the slot
        self._place: Tensor | None = None  # (W*S,) in the slot, during a unit's backward
        self._written: set[int] = set()

    @property
    def part(self) -> Tensor | None:
        """See `Gradient.part`."""
        return self.memory if self.there else None

    def begin(self, place: Tensor) -> None:
        """Let `add` write to `place` (W*S,) until `end`."""
        self._place, self._written = place, set()

    def add(self, index: int, gradient: Tensor) -> None:
        """See `Gradient.add`. Later parts are added to the first.

        Raises:
            UserError: No backward of the unit runs.
        """
        segment = self.flat.layout.segments[index]
        if self._place is None:
            raise UserError(
                f"{segment.name} got a gradient outside the backward of its block {self.flat.name} (a penalty on a weight, "
                "for example). The gradients of a sharded block are reduced in its own backward. For an L2 penalty set "
                "weight_decay; otherwise set ftkit={'stage': 1, 'activations': 'keep'}"
            )
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

    def add_use(self, index: int, gradient: Tensor | None) -> None:
        """See `Gradient.add_use`. The flat parameter has one tensor.

        Args:
            index: 0.
            gradient: None if autograd computed none on this rank.

        Cost: one reduce-scatter, and a buffer of W*S elements.
        """
        flat, numel = self.flat, self.flat.layout.numel
        full = torch.empty(flat.layout.padded_numel, dtype=flat.dtype, device=flat.comm.device)
        if gradient is None:
            full.zero_()
        else:
            full[:numel].copy_(gradient.reshape(-1))
            full[numel:].zero_()
            self.touched[index] = True
        # Wait, so that the next block reuses the memory of `full` instead of allocating more.
        reduce(flat.name, [self], [full], self.streams).wait()

    @property
    def free(self) -> Event:
        """The event after which `reduce` may write."""
        return DONE

    def reduce(self, full: Tensor) -> None:
        """Average a full gradient over ranks and add this rank's part to the sum.

        Args:
            full: Local gradient of all elements, shape (W*S,). Overwritten.

        Cost: one reduce-scatter of W*S elements.
        """
        self._change()
        part = self._destination(full)
        self.flat.comm.reduce_scatter_mean(part, full, self.flat.name)
        self._sum(part)
        self.there = True

    def leave(self, reduced: Event) -> None:
        """Start copying the reduced part to its tier after the event `reduced`. Do nothing if it stays on the device."""

    def _destination(self, full: Tensor) -> Tensor:
        """Return where to reduce `full`: the first micro-batch goes straight to `memory`, others to this rank's part."""
        first = not self.there and self.dtype == full.dtype
        return self._memory(self.flat.layout.shard_numel) if first else self.flat.own_part(full)

    def _sum(self, part: Tensor) -> None:
        total = self._memory(part.numel())
        if self.there:
            add_in_pieces(total, part)
        elif part is not total:
            total.copy_(part)


class DeferredGradient(Gradient):
    """A gradient that is reduced once in a step, by `DeferredReductions`. Arguments as in `Gradient`."""

    added: Callable[[], None] | None = None
    """Called after each `add` of a block that plain autograd computes."""

    @property
    def part(self) -> Tensor | None:
        """See `Gradient.part`. There is none before `finish`."""
        return self.flat.own_part(self.memory) if self.there and self.memory is not None else None

    def add(self, index: int, gradient: Tensor) -> None:
        """See `Gradient.add`.

        Raises:
            RuntimeError: The gradient is reduced already.
        """
        if self.there and self.flat.comm.world_size > 1:
            raise RuntimeError(
                f"a backward reached {self.flat.name} after its gradient was reduced: call zero_grad() between a step and "
                "the next backward, and backward() once in a training_step (at stages 2 and 3, weights of blocks, but not "
                "adapters, allow more)"
            )
        self.there = False
        self.changes += 1
        if self.flat.update is not None:  # it still reads the gradient
            self.flat.settle()
        segment = self.flat.layout.segments[index]
        place = self._memory(self.flat.layout.padded_numel)[segment.start : segment.stop]
        if self.touched[index]:
            add_in_pieces(place, gradient.reshape(-1))
        else:
            place.copy_(gradient.reshape(-1))
        self.touched[index] = True
        if self.added is not None:
            self.added()

    def finish(self) -> None:
        """Reduce the step's gradient on all ranks, also on those without a local gradient. `DeferredReductions` calls it.

        Cost: one reduce-scatter (stage 1) or all-reduce (stage 0), at the first call in a step.
        """
        if self.there:
            return
        flat, layout = self.flat, self.flat.layout
        flat.settle()
        full = self._memory(layout.padded_numel)
        for index, segment in enumerate(layout.segments):
            if not self.touched[index]:
                full[segment.start : segment.stop].zero_()
        full[layout.numel :].zero_()
        if flat.owners == 1:
            flat.comm.all_reduce_mean(full, flat.name)
        else:
            flat.comm.reduce_scatter_mean(flat.own_part(full), full, flat.name)
        self.there = True


class DeferredReductions:
    """Reduces the deferred gradients of a model.

    In the last backward of a step, a block is reduced after its own backward and after the reductions of all later blocks.
    A block without a gradient on this rank, and all earlier blocks, are reduced at the end of the backward. All ranks
    therefore reduce in the same order. Gradients outside blocks are reduced at the step. Without `last_backward`, all
    gradients are reduced at the step.

    Args:
        blocks: For each block, in order of execution, its deferred gradients.
        others: The deferred gradients outside blocks.
        streams: The streams of this rank.
    """

    def __init__(
        self, blocks: Sequence[Sequence[DeferredGradient]], others: Sequence[DeferredGradient], streams: Streams
    ) -> None:
        self.blocks, self.others, self.streams = blocks, others, streams
        self._missing: list[int] | None = None  # for each block, tensors without a gradient from the last backward
        self._next = len(blocks) - 1
        self.reduced: Event = DONE  # after the last reduction

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Reduce blocks during the body, which runs the last backward before the step."""
        self._missing = [sum(len(gradient.touched) for gradient in block) for block in self.blocks]
        self._next = len(self.blocks) - 1
        try:
            yield
            self._reduce_ready([0] * len(self.blocks))
        finally:
            self._missing = None

    def added(self, number: int) -> None:
        """Count a tensor of block `number` whose gradient is complete. Plain autograd calls this once per tensor."""
        if self._missing is not None:
            self._missing[number] -= 1
            self._reduce_ready(self._missing)

    def finished(self, number: int) -> None:
        """Note the end of the backward of block `number`."""
        if self._missing is not None:
            self._missing[number] = 0
            self._reduce_ready(self._missing)

    def finish(self) -> None:
        """Reduce the remaining gradients. Afterwards the computing stream waits for all reductions."""
        with self.streams.collectives.run(self.streams.now(), span="finish gradients"):
            for gradient in (*chain.from_iterable(self.blocks), *self.others):
                gradient.finish()
        self.reduced = self.streams.collectives.mark()
        self.reduced.wait()

    def _reduce_ready(self, missing: list[int]) -> None:
        while self._next >= 0 and missing[self._next] <= 0:
            if self.blocks[self._next]:
                with self.streams.collectives.run(self.streams.now(), span=f"reduce backward {self._next}"):
                    for gradient in self.blocks[self._next]:
                        gradient.finish()
                self.reduced = self.streams.collectives.mark()
            self._next -= 1


def add_in_pieces(total: Tensor, part: Tensor) -> None:
    """Add `part` (n,) to `total` (n,). On a CPU in pieces: torch would first widen all of a narrower `part`."""
    width = PIECE_NUMEL if total.device.type == "cpu" and total.dtype != part.dtype else max(total.numel(), 1)
    for start in range(0, total.numel(), width):
        total[start : start + width].add_(part[start : start + width])


def reduce(
    name: str,
    gradients: Sequence[ReducedGradient],
    fulls: Sequence[Tensor],
    streams: Streams,
) -> Event:
    """Reduce gradients on the stream of collectives, after the computation issued so far.

    Args:
        name: Their name in the trace.
        gradients: The gradients.
        fulls: The local gradient of each, shape (W*S,). Overwritten.
        streams: The streams of this rank.

    Returns:
        The event after which `fulls` may be written. Copies to the host may be under way.
    """
    with streams.collectives.run(streams.now(), *(each.free for each in gradients), span=f"reduce {name}"):
        for gradient, full in zip(gradients, fulls):
            gradient.reduce(full)
    reduced = streams.collectives.mark()
    for gradient in gradients:
        gradient.leave(reduced)
    return reduced


def reduced_at_once(gradients: Sequence[Gradient]) -> list[ReducedGradient]:
    """Return the gradients that are reduced after each backward."""
    return [each for each in gradients if isinstance(each, ReducedGradient)]


def _receive(reference: weakref.ref[Gradient], index: int, in_block: bool, parameter: Tensor) -> None:
    """Move a finished gradient of parameter `index` from autograd into its flat gradient.

    Autograd keeps hooks where Python's garbage collector cannot see them, so the hook has a weak reference.
    """
    gradient = reference()
    finished, parameter.grad = parameter.grad, None
    if gradient is not None and finished is not None:
        (gradient.add if in_block else gradient.add_use)(index, finished)
