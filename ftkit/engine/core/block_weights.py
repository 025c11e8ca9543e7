"""The weights of one block: gathered before it is computed, freed after, and what state they are in.

[Note: the states of a block's weights]

              enter                 leave, a backward will want them
    SHARDED --------> GATHERED ------------------------------------> HELD
       ^  ^             |  ^                                           |
       |  +-------------+  +-------------------------------------------+
       |     leave                           enter
       |
       +--------> WHOLE       hold_whole, for forwards without gradients, until give_back; HELD may be left for it, too

    SHARDED   each rank has its shard; the parameters refuse computations (resharded.py)
    GATHERED  the parameters are views of a buffer: one of the two slots that all blocks share, or one of the block's own
    HELD      the block's own buffer keeps the weights from a forward to its backward (`reshard_after_forward: false`)
    WHOLE     a buffer keeps them from call to call, and no call waits for another rank (holding.py)

Resident weights are always usable, and have no state: they are brought up to date when they are wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.transfer import Transfer, WeightSlot
from ftkit.errors import UserError


class WeightState(Enum):
    """See [Note: the states of a block's weights]."""

    SHARDED = "sharded"
    GATHERED = "gathered"
    HELD = "held"
    WHOLE = "whole"


class BlockWeights:
    """The weights of one block.

    Args:
        number: place of the block in the order of execution.
        name: name of the block in the model.
        flats: its flat parameters.
        hold: keep the weights gathered from forward to backward.
        transfer: the slots that all blocks share.
    """

    def __init__(
        self, number: int, name: str, flats: Sequence[FlatParameter], *, hold: bool, transfer: Transfer
    ) -> None:
        self.number = number
        self.name = name
        self.flats = list(flats)
        self.gathered = [flat for flat in flats if not flat.resident]
        self.resident = [flat for flat in flats if flat.resident]
        self.hold = hold
        self.transfer = transfer
        self.before: BlockWeights | None = None
        self.after: BlockWeights | None = None
        self.state = WeightState.SHARDED
        self.backwards = 0  # that are to come since zero_grad: counted, so alike on all ranks
        self._own: WeightSlot | None = None  # from a forward to its backward
        self._whole: WeightSlot | None = None

    @property
    def slot(self) -> WeightSlot:
        """The buffer for these weights: their own while they are held, else slot `number` mod 2."""
        return self._own or self.transfer.slots[self.number % 2]

    @property
    def is_whole(self) -> bool:
        """Whether forwards without gradients find the weights without a gather."""
        return self.state is WeightState.WHOLE

    def fetch(self, *, graph: bool) -> None:
        """Start gathering the weights, if they are not here.

        Args:
            graph: a backward will follow; weights that are held for it get a buffer of their own.
        """
        self.transfer.refresh(self.resident)
        if not self.gathered:
            return
        if self.hold and graph and self._own is None:
            self._own = self.transfer.lend(self.gathered)
        self.transfer.gather(self.slot, self.gathered, self.number)

    def enter(self, *, graph: bool, neighbour: BlockWeights | None) -> None:
        """Make the weights usable, and start the neighbour's gather.

        Args:
            graph: a backward will follow.
            neighbour: the block that is computed next.

        Raises:
            RuntimeError: if all weights are held for forwards without gradients.
        """
        if self.is_whole:
            raise RuntimeError(
                f"{self.name} was used for training while its weights are held for generation: leave the `hold` context "
                "first, or compute under torch.no_grad()"
            )
        self.fetch(graph=graph)
        for flat in self.resident:
            self.transfer.side.wait(flat.refreshed)
        if self.gathered:
            self.transfer.take(self.slot, self.gathered, self.number)
        self.state = WeightState.GATHERED
        if neighbour is not None and self.transfer.prefetch:
            neighbour.fetch(graph=graph)
        self.transfer.read_ahead([each.gathered for each in self._beyond(neighbour, turns=graph)])

    def _beyond(self, neighbour: BlockWeights | None, *, turns: bool) -> list[BlockWeights]:
        """Return the blocks that come after the neighbour; after the last of a forward, the one that its backward wants."""
        if neighbour is None:
            return [each for each in (self.before,) if each is not None and turns]
        coming = neighbour.after if neighbour is self.after else neighbour.before
        return [coming] if coming is not None else []

    def leave(self) -> None:
        """Free the weights. A buffer of their own stays while a backward will ask for it.

        Raises:
            UserError: if one was written in place: it is a copy, and the write would be lost.
        """
        try:
            failing = sys.exc_info()[0] is not None  # then that is what the user has to see
            edited = None if failing else next((name for flat in self.gathered if (name := flat.edited())), None)
        finally:
            if self.gathered:
                self.transfer.free(self.slot, self.gathered, for_good=self._own is None)
            self._rest()
        if edited is not None:
            raise UserError(
                f"{edited} was written in place while its block {self.name} computed. At stage 3 a block's weights are "
                "copies meanwhile, and the write would be lost. Compute with a changed copy (weight * scale), use a "
                "parametrization, or set ftkit={'stage': 2}"
            )

    def hold_whole(self) -> None:
        """Gather the weights into a buffer of their own, where calls without gradients find them until `give_back`."""
        self._whole = self.transfer.lend(self.gathered)
        self.transfer.take(self._whole, self.gathered, self.number)
        self.state = WeightState.WHOLE

    def give_back(self) -> None:
        """Let the buffer of `hold_whole` go."""
        if self._whole is not None:
            self.transfer.free(self._whole, self.gathered, for_good=True)
            self._whole = None
            self._rest()

    def expect_backward(self) -> None:
        """Note that a backward will want the weights."""
        self.backwards += 1

    def begin_backward(self) -> None:
        """Note that a backward that was to come is here."""
        self.backwards = max(self.backwards - 1, 0)  # zero_grad may have come between

    def forget_backwards(self) -> None:
        """Let a held buffer go. A backward that comes all the same gathers again."""
        self.backwards = 0
        if self.state is WeightState.HELD:
            self._rest()
        self._own = None

    def _rest(self) -> None:
        """Take the state between two computations."""
        if self.backwards == 0:
            self._own = None
        self.state = WeightState.SHARDED if self._own is None else WeightState.HELD


def connect(row: Sequence[BlockWeights]) -> None:
    """Tell the weights of blocks, in order of execution, their neighbours."""
    for former, latter in pairwise(row):
        former.after, latter.before = latter, former
