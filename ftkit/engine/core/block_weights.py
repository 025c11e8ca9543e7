"""The weights of one block: gathered before each use, resharded after it.

Gathered weights are views of a buffer. Usually it is one of the two slots that all blocks share; the next blocks
overwrite it. With `reshard_after_forward: false` it is a buffer of the block's own, which stays from forward to
backward. `Transfer` knows which weights a buffer contains, and gathers only if they are not there.

Resident weights need no buffer. They are brought up to date after an update, when the block is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.transfer import Transfer, WeightSlot


class BlockWeights:
    """The weights of one block.

    Args:
        number: Position of the block in the order of execution.
        name: Name of the block in the model.
        flats: Its flat parameters.
        stay: Keep the weights gathered from forward to backward.
        transfer: The slots that all blocks share.
    """

    def __init__(self, number: int, name: str, flats: Sequence[FlatParameter], *, stay: bool, transfer: Transfer) -> None:
        self.number, self.name = number, name
        self.flats = list(flats)
        self.gathered = [flat for flat in flats if not flat.resident]
        self.resident = [flat for flat in flats if flat.resident]
        self.stay = stay
        self.transfer = transfer
        self._next: Callable[[], None] | None = None  # starts a gather that blocks the host until an update ends
        self.backwards = 0  # backwards to come since zero_grad; the same on all ranks
        self._own: WeightSlot | None = None

    @property
    def slot(self) -> WeightSlot:
        """The buffer for these weights: the block's own if it has one, else slot `number` mod 2."""
        return self._own or self.transfer.slots[self.number % 2]

    @property
    def updating(self) -> bool:
        """Whether an update of the weights may be running. If so, `fetch` blocks the host until it ends."""
        return any(flat.update is not None for flat in self.flats)

    def fetch(self, *, graph: bool) -> None:
        """Start gathering the weights if they are not here.

        Args:
            graph: A backward follows.
        """
        self.transfer.refresh(self.resident)
        if self.gathered:
            self.reserve(graph=graph)
            self.transfer.gather(self.slot, self.gathered, self.number)

    def reserve(self, *, graph: bool) -> None:
        """Allocate the block's own buffer, if it gets one. Arguments as `fetch`'s."""
        if self.gathered and self.stay and graph and self._own is None:
            self._own = self.transfer.lend(self.gathered)

    def enter(self, *, graph: bool, neighbour: BlockWeights | None = None, beyond: BlockWeights | None = None) -> None:
        """Make the weights usable, and start gathering the neighbour's. If that would block the host, `start_next` does it.

        Args:
            graph: A backward follows this use.
            neighbour: The block that is used next.
            beyond: The block after it, whose weights are read ahead from NVMe.

        Raises:
            RuntimeError: All weights are gathered for generation.
        """
        if self.gathered and self.transfer.whole is not None:
            raise RuntimeError(
                f"{self.name} was used for training while all weights are gathered for generation: leave that context, or "
                "compute under torch.no_grad()"
            )
        self._next = None
        self.fetch(graph=graph)
        for flat in self.resident:
            flat.refreshed.wait()
        if self.gathered:
            self.transfer.take(self.slot, self.gathered, self.number)
        if neighbour is not None and self.transfer.prefetch:
            if neighbour.updating:
                neighbour.reserve(graph=graph)  # memory that the computation of this block does not use
                self._next = partial(neighbour.fetch, graph=graph)
            else:
                neighbour.fetch(graph=graph)
        if beyond is not None:
            self.transfer.read_ahead([beyond.gathered])

    def start_next(self) -> None:
        """Start the gather that `enter` postponed. Call this after the computation is issued."""
        start, self._next = self._next, None
        if start is not None:
            start()

    def leave(self) -> None:
        """Reshard the weights after the computation. A buffer of the block's own stays while a backward needs it."""
        if self.gathered:
            self.transfer.free(self.slot, self.gathered, for_good=self._own is None)
        self._drop_unneeded()

    def expect_backward(self) -> None:
        """Count a backward that will use the weights."""
        self.backwards += 1

    def begin_backward(self) -> None:
        """Count down a backward that starts now."""
        self.backwards = max(self.backwards - 1, 0)  # zero_grad may have reset the count

    def forget_backwards(self) -> None:
        """Free the block's own buffer. A backward that still runs gathers again."""
        self.backwards = 0
        self._drop_unneeded()

    def _drop_unneeded(self) -> None:
        if self.backwards == 0 and self._own is not None:
            self._own.filled.wait()  # a gather that nothing read may still write there
            self._own = None
