"""The schedule: a training step as events, in the order and on the streams on which the engine issues them.

[Note: a step]   one of W equal ranks; blocks 0 to L-1, in order of execution

    forward    gather embedding, gather 0, [gather 1, forward 0], [gather 2, forward 1], ..., [gather head, forward L-1].
               A gather waits for the last reader of its slot. A slot that still has a block's weights is not gathered again.
               In the first micro-batch after a deferred update, gather u+1 is issued after forward u, because it waits for
               the update of block u+1. The head's is issued after forward L-1, as always if it is on NVMe.
    loss       the head's products, forward and backward; then the head's gradient is reduced, and the next block waits
    backward   gather u-1, recompute u, backward u, reduce u. Only backward u writes to the gradient slot, so only it waits
               for the reduction of block u+1. A block that keeps its graph has no recomputation. Offloaded gradients are
               reduced to a buffer; the next reduction waits until the buffer is copied to the host.
               At stages 0 and 1, blocks are reduced in the backward of the last micro-batch.
    norm       reductions of the remaining full gradients, a pass over the gradients, one small collective. The update
               waits for the collective. StableAdamW reads gradients and second moments once more before any update.
    update     block by block in forward order. State on the device: one event. State on the host: the gradient is copied
               down, AdamW runs in host memory, and the weights are copied up. State on NVMe: the state is also read before
               AdamW and written after it.
    next step  starts at once. If updates are deferred, each gather waits for the update of its own block (stages 1 and 2
               gather full copies, once per step). Otherwise the first event waits for all updates.

Weights in host memory are copied to the slot on the stream `up` before their all-gather. On CPU ranks everything runs in
this order, on the stream `compute`.

`speed` simulates three steps in a row and measures the last one, because the end of a step overlaps with the start of the
next. Not modelled: kernel launches, multiprocessors that NCCL occupies, the first touch of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftkit.plan.events import Event, Script, simulate
from ftkit.plan.shape import Flat, Shape
from ftkit.plan.speed import Rates, Speed
from ftkit.plan.traffic import Group
from ftkit.spec.strategy import FlatKind, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME

STEPS = 3
"""Simulated steps. The duration of a step is the time between the ends of the last two."""

NORM_S = 1e-3
"""Seconds of the collective for norm and overflow, and of the host's wait for it."""

OUTSIDE = -1
"""Stands for the parameters outside blocks where a block's number is expected."""


def speed(shape: Shape, strategy: Strategy, rates: Rates, *, rounds: int | None = None) -> Speed:
    """Return the speed of a step of `rounds` passes over all blocks, or of the strategy's."""
    rounds = rounds or strategy.rounds
    step = Steps(shape, strategy, rounds, rates.collective_s, in_order=rates.in_order)
    ends = [step.add() for _ in range(STEPS)]
    timeline = simulate(step.script.events, rates.all(shape.hidden))
    marks = [max(timeline.ends[number] for number in numbers) for numbers in ends]
    first, last = marks[-2], marks[-1]
    tokens = shape.world_size * strategy.sequences * rounds * shape.sequence_tokens
    operations = sum([event.work.get("compute", 0.0) for event in step.script.events]) / STEPS
    back = 2 + strategy.reduced_late("block", shape.world_size)  # only the last round reduces full gradients
    before, after = step.ends[-back:][:2] if rounds >= back else [(), ()]
    round_s = max([timeline.ends[b] - timeline.ends[a] for a, b in zip(before, after)], default=0.0)
    return Speed(last - first, tokens, operations, timeline.busy(first, last), timeline, (first, last), round_s)


def parts_of_step(shape: Shape, strategy: Strategy, *, in_order: bool = False) -> tuple[Sequence[Event], ...]:
    """Return the events of a step's first round of micro-batches, of each further round, and of its end.

    Full gradients are reduced only in the last round. Their reductions are part of the end.
    """
    step = Steps(shape, strategy, 2, 0.0, in_order=in_order)
    step.add()
    first, second = (number + 1 for number in step.until)
    events = step.script.events
    late = strategy.reduced_late("block", shape.world_size)
    once = {n for n in range(first, second) if late and events[n].name.startswith("reduce ")}
    further = [events[n] for n in range(first, second) if n not in once]
    return events[:first], further, [*(events[n] for n in sorted(once)), *events[second:]]


class Steps:
    """A script of consecutive steps. Arguments as in `speed` and `Rates`. Tests compare its events with the engine's."""

    def __init__(self, shape: Shape, strategy: Strategy, rounds: int, collective_s: float, *, in_order: bool) -> None:
        self.shape, self.strategy, self.rounds, self.collective_s = shape, strategy, rounds, collective_s
        self.script = Script()
        self.in_order = in_order
        self.beside = "compute" if in_order else "collectives"
        self.world = shape.world_size
        self.tokens = strategy.sequences * shape.sequence_tokens
        self.recomputed = len(shape.blocks) - strategy.graphs(len(shape.blocks))  # blocks, from the first on

        def group(flats: Sequence[Flat], kind: FlatKind) -> Group:
            return Group(flats, kind, shape, strategy, cpu=in_order)

        kinds = {flats: group(flats, "block") for flats, _ in shape.groups}
        self.blocks = [kinds[flats] for flats in shape.blocks]
        self.embedding, self.head = group(shape.embedding, "root"), group(shape.head, "root")
        self.roots, self.replicated = group(shape.roots, "root"), group(shape.replicated, "replicated")
        self.written: dict[int, int] = {}  # block to the event after which its updated weights are complete
        self.computed: int | None = None  # the last computation
        self.ends: list[tuple[int, ...]] = []  # the last computation of each round, and the last offload of a gradient
        self.until: list[int] = []  # the last event of each round
        self.slots: dict[int, int] = {}  # slot to the block whose weights it has
        self.readers: dict[int, int] = {}  # slot to the last computation that reads it
        self.reduced: int | None = None  # the last reduction that reads the gradient slot
        self.copied: int | None = None  # the last copy out of the offload buffer
        self.offloaded: int | None = None  # the last event of the last offload
        self.stored: dict[int, int] = {}  # block to the event after which its state is on NVMe again
        self.left = 0  # bytes of host memory for the part of an NVMe state that stays there

    def add(self) -> list[int]:
        """Append a step. Return its last events, before which the next step cannot start."""
        if not self.strategy.deferred and self.written:
            self._wait_for_all()
        for number in range(self.rounds):
            first, last = number == 0, number == self.rounds - 1
            self._loss(self._forward(first=first), first=first)
            self._backward(first=first, last=last)
            end = self._last()
            self.ends.append((end,) if self.offloaded is None else (end, self.offloaded))
            self.until.append(len(self.script.events) - 1)
        self._update()
        return [end] if self.strategy.deferred else [end, *self.written.values()]

    # --- forward and backward

    def _forward(self, *, first: bool) -> int | None:
        """Append a forward pass of all blocks. Return the gather of the head."""
        count = len(self.blocks)
        updated = self._updated(OUTSIDE) if first else None
        before = [updated, self._gather_roots("embedding", self.embedding, updated)]
        head: int | None = None
        gathered = [self._gather(0, first=first)]
        for number in range(count):
            later = first and self.strategy.deferred and number + 1 in self.written
            late_head = self.strategy.parameters == NVME or (first and self.strategy.deferred and updated is not None)
            if number + 1 == count and not late_head:
                head = self._gather_roots("head", self.head, updated)
            elif not later and number + 1 < count:
                gathered.append(self._gather(number + 1, first=first))
            operations, _ = self._operations(self.blocks[number])
            self._compute(f"forward {number}", operations, [gathered[number], *(before if number == 0 else [])])
            self.readers[number % 2] = self._last()
            self._keep("keep", "down", number)
            if later and number + 1 < count:
                gathered.append(self._gather(number + 1, first=first))
            if late_head and number + 1 == count:
                head = self._gather_roots("head", self.head, updated)
        return head

    def _loss(self, gathered: int | None, *, first: bool) -> None:
        """Append the head and the loss.

        A token needs two matrix products with the head, a third if the head is trained, and one more for a loss in chunks.
        """
        shape = self.shape
        products = 2 + any(flat.trained for flat in shape.roots) + shape.chunked_loss
        self._compute("loss", 2.0 * products * shape.vocabulary * shape.hidden * self.tokens, [gathered])
        self._collect("head", self.head, first=first)

    def _backward(self, *, first: bool, last: bool) -> None:
        count, parts = len(self.blocks), self.strategy.parts
        again = self.strategy.reshard_after_forward and not self.strategy.resident("block", self.world)
        gathered = self._gather(count - 1, first=False) if again else None
        brought: int | None = None
        for number in reversed(range(count)):
            block, ready = self.blocks[number], [gathered, brought]
            gathered = self._gather(number - 1, first=False) if again and number else None
            forward, backward = self._operations(block)
            if number < self.recomputed:  # of several micro-batches, only the first needs no gradient slot
                self._compute(f"recompute {number}", forward / parts, ready)
                backward += forward * (parts - 1) / parts
            self._compute(f"backward {number}", backward, [*ready, self.reduced if block.trained_numel else None])
            brought = self._keep("bring", "up", number - 1) if number else None
            self._collect(f"backward {number}", block, first=first, last=last)
            self.readers[number % 2] = self._last()
        first = first and not self.shape.tied  # a tied embedding's gradient is added to the head's
        self._collect("embedding", self.embedding, first=first)

    def _last(self) -> int:
        assert self.computed is not None
        return self.computed

    def _compute(self, name: str, operations: float, after: Sequence[int | None]) -> None:
        self.computed = self.script.add(name, "compute", {"compute": operations}, after)

    def _operations(self, block: Group) -> tuple[float, float]:
        """Return a block's operations in forward, and in backward without recomputation (arXiv:2104.04473)."""
        attention = 4.0 * self.shape.sequence_tokens * self.shape.hidden
        forward = 2.0 * block.numel + attention
        return self.tokens * forward, self.tokens * (forward + 2.0 * block.trained_numel + attention)

    def _keep(self, what: str, direction: str, number: int) -> int | None:
        """Offload a block's activations after the last computation, or fetch them. None if they stay."""
        if self.strategy.activation_offload == DEVICE or number >= self.recomputed:
            return None
        after = self.computed
        size = float(self.tokens * self.shape.hidden * self.shape.itemsize)
        if self.strategy.activation_offload == NVME and direction == "up":
            after = self.script.add(f"{what} from nvme", "nvme fetch", {"nvme_read": size}, [after])
        moved = self._copy(what, direction, size, [after])
        if self.strategy.activation_offload == NVME and direction == "down":
            return self.script.add(f"{what} on nvme", "nvme offload", {"nvme_write": size}, [moved])
        return moved

    def _copy(self, name: str, direction: str, size: float, after: Sequence[int | None]) -> int:
        """Copy between the device and the host: `direction` is "up" to the device, or "down"."""
        return self.script.add(name, direction, {direction: size, "dram": size}, after)

    # --- weights

    def _collective(self, name: str, size: float, after: Sequence[int | None]) -> int | None:
        if not size:
            return None
        return self.script.add(name, self.beside, {"link": size}, after, latency_s=self.collective_s)

    def _gather(self, number: int, *, first: bool) -> int | None:
        """Gather a block's weights unless they are there. Return the event after which they can be read, if any."""
        slot, block = number % 2, self.blocks[number]
        updated = self._updated(number) if first else None
        own = not self.strategy.reshard_after_forward  # a buffer of the block's own, until its backward
        there = self.slots.get(slot) == number and updated is None and not own
        if there or block.resident:
            return updated
        self.slots[slot] = number
        return self._fill(str(number), block, [updated, None if own else self.readers.get(slot)])

    def _gather_roots(self, name: str, group: Group, updated: int | None) -> int | None:
        """Gather root parameters into new memory. None: every rank has them."""
        return None if group.resident or group.empty else self._fill(name, group, [updated, self.computed])

    def _fill(self, name: str, group: Group, after: Sequence[int | None]) -> int | None:
        """Copy shards from their tier, and gather them. Return the event after which all weights can be read.

        `after` has the event of the update, and the event after which the memory may be written.
        """
        fetched: int | None = None
        if self.strategy.parameters != DEVICE:
            read: int | None = None
            if self.strategy.parameters == NVME:
                read = self.script.add(f"read weights {name}", "nvme fetch", {"nvme_read": group.shard}, after[:1])
            fetched = self._copy(f"fetch {name}", "up", group.shard, [*after, read])
        gathered = self._collective(f"gather {name}", group.gathered, [*after, fetched])
        return fetched if gathered is None else gathered

    def _updated(self, number: int) -> int | None:
        """Return the event after which the weights of a block (or `OUTSIDE`) are updated and full copies are gathered."""
        return self._refresh(number) if self.strategy.deferred else self.written.get(number)

    def _refresh(self, number: int) -> int | None:
        """Gather the full copies of a block (or `OUTSIDE`) after its update, if it has one."""
        updated = self.written.get(number)
        if updated is None:
            return None
        if number == OUTSIDE:
            name, stale = "outside", self.roots.refreshed + self.replicated.refreshed
        else:
            name, stale = str(number), self.blocks[number].refreshed
        refreshed = self._collective(f"refresh {name}", stale, [updated])
        return updated if refreshed is None else refreshed

    def _wait_for_all(self) -> None:
        """Start a step after all updates, and gather full copies at once."""
        self.computed = self.script.add("wait", "compute", {}, list(self.written.values()))
        for number in self.written:
            self.written[number] = self.computed
            self.written[number] = self._refresh(number) or self.computed

    # --- gradients

    def _collect(self, name: str, group: Group, *, first: bool, last: bool = False) -> None:
        """Collect a gradient in the slot and reduce it, or sum it in full until the last micro-batch or the norm reduces it.

        `last` is a block's backward in the last micro-batch of a step. Full gradients are then reduced too.
        """
        if not group.trained_numel:
            return
        traffic = group.collected[first or not group.late]
        self.computed = self.script.add(f"collect {name}", "compute", {"hbm": traffic}, [self.computed])
        if not group.late:
            self._reduce(name, group, first=first)
        elif last:
            self._collective(f"reduce {name}", group.reduced, [self.computed])

    def _reduce(self, name: str, group: Group, *, first: bool) -> None:
        """Reduce a gradient, and add this rank's part to those of earlier micro-batches, on its tier."""
        buffer = None if self.in_order else self.copied
        reduced = self._collective(f"reduce {name}", group.reduced, [self.computed, buffer])
        if reduced is None:  # one rank copies its gradient to the buffer
            reduced = buffer
        after = [reduced, self.computed]
        if self.strategy.gradients != DEVICE:
            self.copied = self._offload(name, group, after, first=first)
        elif not first:
            reduced = self.script.add(f"sum {name}", self.beside, {"hbm": group.received + 2 * group.summed}, after)
        if group.kind == "block":
            self.reduced = reduced
        elif reduced is not None:  # the next block reuses the memory of the full gradient
            self.computed = self.script.add(f"await {name}", "compute", {}, [self.computed, reduced])

    def _offload(self, name: str, group: Group, after: Sequence[int | None], *, first: bool) -> int:
        """Copy a reduced gradient to the host, and sum or write it there. Return the copy."""
        copied = self.offloaded = self._copy(f"offload {name}", "down", group.received, after)
        if not first:
            work = {"dram": group.received + 2 * group.summed}
            work |= {"nvme_read": group.summed} if self.strategy.gradients == NVME else {}
            self.offloaded = self.script.add(f"sum {name}", "host update", work, [self.offloaded])
        if self.strategy.gradients == NVME:
            work = {"nvme_write": group.summed}
            self.offloaded = self.script.add(f"write gradient {name}", "nvme offload", work, [self.offloaded])
        return copied

    # --- the update

    def _update(self) -> None:
        everything = [*self.blocks, self.roots, self.replicated]
        # On other tiers the offload has computed the norm.
        work = {"hbm": sum(group.summed for group in everything)} if self.strategy.gradients == DEVICE else {}
        moved = sum(group.reduced for group in (self.roots, self.replicated) if group.late)
        self._collective("finish gradients", moved, [self.computed])
        norm = self.script.add("norm", self.beside, work, [self.offloaded, self.computed], latency_s=NORM_S)
        if self.shape.rule.read_twice:
            norm = self._norm_of_tensors(everything, norm)
        self.left = decided(self.strategy.state_host_bytes)
        self.written = {OUTSIDE: self._update_of(OUTSIDE, [self.roots, self.replicated], norm)}
        for number, block in enumerate(self.blocks):
            if block.trained_numel:
                self.written[number] = self._update_of(number, [block], norm)

    def _norm_of_tensors(self, groups: Sequence[Group], norm: int) -> int:
        """Read gradients and some moments once more before any update, as StableAdamW does; return the event after it."""
        state = sum(group.reread for group in groups)
        gradients = sum(group.summed for group in groups)
        if self.strategy.state == DEVICE:
            return self.script.add("norm of tensors", "compute", {"hbm": state + gradients}, [norm])
        before = self._copy("down", "down", gradients, [norm]) if self.strategy.gradients == DEVICE else norm
        files = (self.strategy.state == NVME) * state + (self.strategy.gradients == NVME) * gradients
        work = {"dram": state + gradients} | ({"nvme_read": files} if files else {})
        return self.script.add("norm of tensors", "host update", work, [before])

    def _update_of(self, number: int, groups: Sequence[Group], norm: int) -> int:
        """Update a block (or `OUTSIDE`); return the event after which its weights are complete."""
        name = "outside" if number == OUTSIDE else str(number)
        weights, gradient = sum(group.updated for group in groups), sum(group.summed for group in groups)
        state, traffic = sum(group.state for group in groups), sum(group.traffic for group in groups)
        if self.strategy.state == DEVICE:
            return self.script.add(f"update {name}", "compute", {"hbm": traffic}, [norm])
        before: list[int | None] = [norm]
        if self.strategy.gradients == DEVICE:
            before.append(self._copy(f"down {name}", "down", gradient, [norm]))
        stays = self.strategy.state != NVME or state <= self.left  # all or nothing, as in `Tiers.state_tiers`
        if self.strategy.state == NVME and stays:
            self.left -= int(state)
        if self.strategy.gradients == NVME:
            before.append(self.script.add(f"read gradient {name}", "nvme read", {"nvme_read": gradient}, [norm]))
        files = 0.0 if stays else state
        if self.strategy.parameters == NVME:
            files += sum(group.weights_read for group in groups)
        if files:
            after = [norm, self.stored.get(number)]
            before.append(self.script.add(f"read {name}", "nvme read", {"nvme_read": files}, after))
        done = self.script.add(f"adam {name}", "host update", {"dram": traffic}, before)
        if not stays:
            self.stored[number] = self.script.add(f"write {name}", "nvme write", {"nvme_write": state}, [done])
        if self.strategy.parameters == NVME:
            return self.script.add(f"write weights {name}", "nvme write", {"nvme_write": weights}, [done])
        if self.strategy.parameters == HOST:
            return done
        return self._copy(f"up {name}", "up", weights, [done])
