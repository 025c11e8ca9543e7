"""Bytes that one rank moves for a group of flat parameters, for the events of `schedule.py`."""

from __future__ import annotations

from collections.abc import Sequence

from ftkit.plan.shape import Flat, Placed, Shape
from ftkit.plan.state import state_of, total_bytes
from ftkit.spec.strategy import FlatKind, Strategy


class Group:
    """Flat parameters that one computation reads, in bytes of one rank.

    Attributes:
        numel: Parameters of all ranks.
        trained_numel: Trained parameters of all ranks.
        shard: Bytes of this rank's weights.
        gathered: Bytes sent to gather the weights.
        refreshed: Bytes sent to gather full copies again after an update.
        late: Gradients are reduced at the end of the step.
        collected: Bytes of device memory traffic to collect a gradient. By number of copies: 1 if it is copied, 0 if added.
        reduced: Bytes sent to reduce the gradients.
        received: Bytes of this rank's reduced gradients, before they are added to the sum.
        summed: Bytes of this rank's sums of gradients.
        state: Bytes of this rank's optimizer state.
        reread: Bytes of the moments in it that a step reads once more before the update.
        traffic: Bytes of memory traffic of the update.
        updated: Bytes of this rank's trained weights.
        weights_read: Bytes of those that the update reads.
    """

    def __init__(self, flats: Sequence[Flat], kind: FlatKind, shape: Shape, strategy: Strategy, *, cpu: bool) -> None:
        world, owners = shape.world_size, strategy.owners(shape.world_size)
        trained = [flat for flat in flats if flat.trained]
        self.kind, self.empty = kind, not flats
        self.numel, self.trained_numel = sum(flat.numel for flat in flats), sum(flat.numel for flat in trained)
        self.resident, self.late = strategy.resident(kind, world), strategy.reduced_late(kind, world)
        self.shard = float(sum(flat.shard_numel(owners) * flat.itemsize for flat in flats))
        self.gathered = 0.0 if owners == 1 else sum(_sent(flat, flat.itemsize, world) for flat in flats)
        again = trained if self.resident and owners > 1 else []
        self.refreshed = sum(_sent(flat, flat.itemsize, world) for flat in again)

        sums = [strategy.gradient_itemsize(flat.itemsize) for flat in trained]
        slots = sums if self.late else [strategy.slot_itemsize(flat.itemsize) for flat in trained]
        parts = strategy.parts if kind == "block" else 1  # root parameters get the gradient of all parts at once
        self.collected = [
            float(sum(_collected(flat, slot, copies, parts - copies) for flat, slot in zip(trained, slots)))
            for copies in (0, 1)
        ]
        sends = 2 if owners == 1 else 1  # an all-reduce at stage 0
        self.reduced = sends * sum(_sent(flat, slot, world) for flat, slot in zip(trained, slots))
        shards = [flat.shard_numel(owners) for flat in trained]
        self.received = float(sum(numel * slot for numel, slot in zip(shards, slots)))
        self.summed = float(sum(numel * itemsize for numel, itemsize in zip(shards, sums)))
        weights = [numel * flat.itemsize for numel, flat in zip(shards, trained)]
        self.updated = float(sum(weights))
        states = [state_of(shape, strategy, Placed(flat, kind), cpu=cpu) for flat in trained]
        self.state = float(sum(state.size_bytes for state in states))
        reread = [store for state in states for store in state.moments if store.role in shape.rule.read_twice]
        self.reread = float(total_bytes(reread))
        self.weights_read = float(sum(size for size, state in zip(weights, states) if state.reads_weights))
        # Read a gradient, read and write the state, write the weight, and read it where it is the master or a half of it.
        moved = sum(size * (2 + state.reads_weights) for size, state in zip(weights, states))
        self.traffic = 2 * self.state + moved


def _sent(flat: Flat, itemsize: int, world: int) -> float:
    """Return the bytes that a rank sends in an all-gather or a reduce-scatter."""
    return flat.padded_numel(world) * itemsize * (world - 1) / world


def _collected(flat: Flat, itemsize: int, copies: int, sums: int) -> int:
    """Return the bytes moved when gradients of a flat parameter are copied, then added, to elements of `itemsize` bytes."""
    return flat.numel * (copies * (flat.itemsize + itemsize) + sums * (flat.itemsize + 2 * itemsize))
