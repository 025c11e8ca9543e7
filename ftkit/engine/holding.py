"""All weights gathered at once, for generation and for reading.

Generating a token is a small forward through the whole model. Gathering every block for it would take longer than the
forward. If memory allows, `hold` gathers all weights once, each unit's into a buffer of its own, and forwards in its body
need no other rank. Slots, shards, gradients and state are not touched, so training continues afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ftkit.engine.core.placeholder import Placeholder
from ftkit.engine.core.transfer import WholeModel
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError


def gathered_bytes(units: ShardedModel) -> int:
    """Return the bytes that `hold` allocates on each rank's device. 0 if all weights are resident."""
    return sum(flat.layout.padded_numel * flat.dtype.itemsize for flat in units.flats if not flat.resident)


@contextmanager
def hold(units: ShardedModel) -> Iterator[None]:
    """Gather all weights for the body. A collective; a nested one does nothing.

    Raises:
        RuntimeError: An update that was under way failed. In the body: a forward with gradients, a backward, or a forward
            after an update.

    Cost: `gathered_bytes` on every rank's device, and one all-gather per flat parameter.
    """
    transfer = units.transfer
    if transfer.whole is not None:
        yield
        return
    units.freshen()
    units.running.drop()
    with ExitStack() as stack:
        blocks = [unit.weights for unit in units.units if unit.weights.gathered]
        for index, weights in enumerate(blocks):
            transfer.read_ahead([other.gathered for other in blocks[index : index + 3]])
            slot = transfer.lend(weights.gathered)
            stack.callback(transfer.free, slot, weights.gathered, for_good=True)
            transfer.take(slot, weights.gathered, weights.number)
        flats = dict.fromkeys(root.flat for root in units.root_parameters)
        roots = {flat: transfer.gather_root(flat)[0] for flat in flats}
        transfer.streams.join()
        transfer.whole = WholeModel(transfer.updates, roots)
        try:
            yield
        finally:
            transfer.whole = None
            for whole in roots.values() if units.strategy.debug else ():
                whole.fill_(math.nan)


@contextmanager
def gathered(units: ShardedModel) -> Iterator[None]:
    """Give every parameter of the model its value in the body, without gradients. A collective.

    Raises:
        UserError: At the end, if a parameter was written in place: gathered values are copies.

    Cost: as `hold`.
    """
    with torch.no_grad(), hold(units):
        assert units.transfer.whole is not None
        values = units.transfer.whole.roots
        roots = {flat: whole for flat, whole in values.items() if isinstance(flat.parameters[0], Placeholder)}
        for flat, whole in roots.items():
            flat.attach([whole])
        parameters = [(name, p, p._version) for name, p in units.model.named_parameters() if not p.is_inference()]
        try:
            yield
        finally:
            for flat in roots:
                flat.detach()
        written = [name for name, parameter, version in parameters if parameter._version != version]
        edited = [name for names in units.comm.all(written[:1]) for name in names]
    if edited:
        raise UserError(
            f"gathered_parameters: {edited[0]} was edited in the body. The values are copies, so the edit is lost. Edit "
            "weights before ftkit.shard() or before training"
        )
