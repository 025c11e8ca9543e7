"""Holding all weights for a while: gathered once, used by many forwards without gradients, given back.

A token of an answer is one small forward through the whole model. Where every block's weights come and go with it, the
answer waits for the wire; where there is room for all of them they are gathered once, each line into a buffer of its own,
and blocks and root parameters find them there. Nothing that training uses is touched meanwhile: the slots, the shards, the
gradients and the state stay what they are, so training goes on afterwards as if nobody had asked.

What it refuses: a forward with gradients, or a backward, while weights are held, and a forward after they were updated.
What it costs: the bytes that `gathered_bytes` says, on the device, on every rank, and one all-gather a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter, differs_from_shard
from ftkit.engine.core.resharded import Guard
from ftkit.engine.core.root_parameters import RootParameter, gather_whole
from ftkit.engine.core.shard import Units
from ftkit.errors import UserError

MARKS = 4093
"""Columns of 8 bytes: a prime, which divides no usual width, so that rows that change places change the sums."""


def gathered_bytes(units: Units) -> int:
    """Return what `hold` takes on each rank's device, in bytes; 0 where all weights are whole already."""
    return sum(flat.layout.padded_numel * flat.dtype.itemsize for flat in units.flats if not flat.resident)


@contextmanager
def hold(units: Units) -> Iterator[None]:
    """Hold all weights of a model in the body. A collective: all ranks enter it; inside none waits for another.

    A `hold` inside another one does nothing.

    Raises:
        RuntimeError: if an update that is under way fails.
    """
    if units.held_since is not None:
        yield
        return
    units.check_unchanged()
    units.freshen()
    transfer = units.transfer
    with ExitStack() as stack:
        gathered = [unit.weights for unit in units.units if unit.weights.gathered]
        for number, weights in enumerate(gathered):
            transfer.read_ahead([other.gathered for other in gathered[number : number + 3]])
            stack.callback(weights.give_back)
            weights.hold_whole()
        lines = dict.fromkeys(root.flat for root in units.root_parameters)
        for flat in lines:
            _hold_roots(units, [root for root in units.root_parameters if root.flat is flat], stack)
        transfer.settle()
        units.held_since = transfer.updates
        stack.callback(units.stop_holding)
        yield


def _hold_roots(units: Units, roots: list[RootParameter], stack: ExitStack) -> None:
    """Give the readers of one line its whole tensor, until `stack` is left."""
    whole = gather_whole(roots[0].flat)
    for root in roots:
        root.whole = root.with_attributes(whole.view_as(whole))

    def give_back() -> None:
        for root in roots:
            root.whole = None
        if units.strategy.debug:
            whole.fill_(math.nan)

    stack.callback(give_back)


@contextmanager
def gathered(units: Units) -> Iterator[None]:
    """Give every parameter of the model its value in the body, without gradients. A collective for all ranks.

    Inside another one it leaves the values there for the other's body.

    Raises:
        UserError: at the end, if a value was edited: shards and masters would not know.

    Cost: as `hold`, one comparison of this rank's shards, and two reads of its part of what is whole.
    """
    with torch.no_grad(), hold(units):
        before = {flat.name: (_versions(flat), _marks(flat)) for flat in units.flats if flat.resident}
        values = {root.flat: root.whole for root in units.root_parameters if isinstance(root.parameter, Guard)}
        for flat, whole in values.items():
            assert whole is not None
            flat.attach(whole.reshape(-1))
        try:
            yield
            edited = next((name for flat in units.flats if (name := _changed(flat, before.get(flat.name)))), None)
        finally:
            for flat in values:
                flat.detach()
        names = [name for name in units.comm.all(edited) if name is not None]
    if names:
        raise UserError(
            f"gathered_parameters: a value of {names[0]} was edited. The values in the body are copies: read them, do not "
            "write them. Edit weights before ftkit.shard() or before training. A weight that every rank has whole (all "
            "weights at stages 0 to 2) may also be edited in place, under torch.no_grad(), outside of the body"
        )


def _changed(flat: FlatParameter, before: tuple[list[int], Tensor] | None) -> str | None:
    """Return what to call a line, or the parameter on it, whose part on this rank is not what it was.

    Args:
        flat: the line.
        before: versions and marks that a resident line had; None for a gathered one, which is compared with its shard.
    """
    if before is None:
        return flat.name if differs_from_shard(flat) else None
    versions, marks = before
    if flat.displaced() is None and torch.equal(marks, _marks(flat)):
        return None
    names = [s.name for s, old, new in zip(flat.layout.segments, versions, _versions(flat)) if old != new]
    return flat.displaced() or next(iter(names), flat.name)


def _versions(flat: FlatParameter) -> list[int]:
    return [0 if parameter.is_inference() else parameter._version for parameter in flat.parameters]


def _marks(flat: FlatParameter) -> Tensor:
    """Return sums of the bits of this rank's part of a resident line, in columns: an edit changes one.

    Cost: one read of it.
    """
    words = flat.shard.view(torch.int64)  # a shard is a whole number of them
    whole = len(words) // MARKS * MARKS
    return torch.cat([words[:whole].view(-1, MARKS).sum(0), words[whole:]])
