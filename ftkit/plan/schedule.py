"""Seconds: the engine's step as events, in the order in which the engine asks for them, and how long that takes on a box.

[Note: a step]   one rank of equal ones; u: a block, in the order of execution

    forward    gather u+1 while u computes; a gather waits for the slot of u-1, and for its own update where that is
               deferred; what a slot still has of the pass before is not gathered again
    loss       head and loss together
    backward   gather u-1 while u is computed again and walked back; its gradient is collected in the slot, reduced on the
               collectives' stream and added to that of the micro-batches before; the next block's backward waits for the
               reduction, because it has the same gradient slot
    norm       what stages 0 and 1 reduce late, a pass over the gradients and one small collective; whatever reads state
               waits for it
    update     block by block in forward order: gradient down, AdamW over host memory, weight up (state on the host); what
               lies on NVMe read before and written after; or on the device
    next       begins at once: its gathers (stages 1 and 2: of whole copies, once a step) wait for their own updates
               (deferred), or its first event for all of them

Three steps in a row are simulated and the last one counts: a step's end overlaps with the next one's beginning. Rates are
those of a profile (hardware.yaml), each with its source. What is not in the model: kernel launches, what NCCL takes of a
GPU's multiprocessors, the first touch of memory. It knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ftkit.plan.events import Event, Script, Timeline, simulate
from ftkit.plan.shape import Line, Placed, Shape
from ftkit.spec.strategy import FlatKind, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME

STEPS = 3
"""The first has nothing before it, the last is measured between the ends of the last two."""

NORM_S = 1e-3
"""The collective for norm and overflow, and the host's wait for it."""

COPY_TRAFFIC = 1
"""Bytes of host memory for a byte that a device copies from or to it."""



STREAMS = {
    "compute": "the GPUs' arithmetic",
    "collectives": "collectives between GPUs",
    "up": "PCIe to the GPUs",
    "down": "PCIe from the GPUs",
    "host update": "the update in host memory",
    "nvme read": "reading state from NVMe",
    "nvme write": "writing state to NVMe",
    "nvme fetch": "reading weights and activations from NVMe",
    "nvme offload": "writing gradients and activations to NVMe",
}
"""What a stream is called for the eye."""


@dataclass(frozen=True)
class Speed:
    """What a step takes.

    Args:
        seconds: duration of a step.
        tokens: tokens of all ranks in a step.
        operations: operations of a rank in a step, recomputation counted.
        busy: share of a step that each stream works.
        timeline: timeline of the three steps.
        step: (start, end) of the last one.
        round_s: seconds that a further round of micro-batches takes; 0 where a step has one round.
    """

    seconds: float
    tokens: int
    operations: float
    busy: Mapping[str, float]
    timeline: Timeline
    step: tuple[float, float]
    round_s: float = 0.0

    def longer(self, rounds: int, more: int) -> Speed:
        """Return the speed of a step with `more` rounds like its last one; its timeline shows the first ones.

        Args:
            rounds: rounds of micro-batches of this step.
            more: rounds that are added.
        """
        return replace(
            self,
            seconds=self.seconds + more * self.round_s,
            tokens=self.tokens + more * self.tokens // rounds,
            operations=self.operations + more * self.operations / rounds,
        )

    def without_timeline(self) -> Speed:
        """Return it without its events, which are many."""
        return replace(self, timeline=Timeline((), (), ()))

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """Of a GPU, with recomputation and attention counted (Megatron's convention)."""
        return self.operations / self.seconds / 1e12

    @property
    def binds(self) -> str:
        """The stream that is busy most."""
        return max(self.busy, key=lambda stream: self.busy[stream])

    def as_dict(self) -> dict[str, object]:
        """Return it as an object for JSON."""
        return {
            "step_seconds": self.seconds,
            "step_tokens": self.tokens,
            "tokens_per_second": self.tokens_per_s,
            "tflops_per_gpu": self.tflops,
            "binds": self.binds,
            "busy": dict(self.busy),
            "measured": False,
        }


@dataclass(frozen=True)
class Rates:
    """What one rank has for itself while all of its box work, per second.

    Args:
        compute: operations, by hidden size.
        link: bytes of a collective (bus bandwidth).
        pcie: bytes each way.
        dram: bytes of host memory.
        hbm: bytes of device memory.
        nvme_read: bytes read from NVMe; 0 where there is none.
        nvme_write: bytes written to NVMe; 0 where there is none.
        collective_s: latency of a collective, in seconds.
        itemsize: bytes of an element that `compute` is of.
        in_order: collectives and updates take turns with the arithmetic, as on CPU ranks, which have no streams.
    """

    compute: Mapping[int, float]
    link: float
    pcie: float
    dram: float
    hbm: float
    nvme_read: float = 0.0
    nvme_write: float = 0.0
    collective_s: float = 20e-6
    itemsize: int = 2
    in_order: bool = False

    def operations(self, hidden: int) -> float:
        """Return the rate of matrix products in blocks of a hidden size: between those that are known, by straight lines."""
        known = sorted(self.compute)
        below = max((size for size in known if size <= hidden), default=known[0])
        above = min((size for size in known if size >= hidden), default=known[-1])
        share = (hidden - below) / (above - below) if above > below else 0.0
        return self.compute[below] + share * (self.compute[above] - self.compute[below])

    def all(self, hidden: int) -> dict[str, float]:
        """Return the rate of every resource, for a model of a hidden size."""
        return {**self.resources, "compute": self.operations(hidden)}

    def know(self, shape: Shape, strategy: Strategy) -> bool:
        """Whether a step of this can be simulated; see `missing`."""
        return self.missing(shape, strategy) is None

    def missing(self, shape: Shape, strategy: Strategy) -> str | None:
        """Say what these rates lack to simulate a step; None if nothing.

        On CPU ranks with a drive its threads and the arithmetic share cores, of which the schedule knows nothing.
        """
        if shape.itemsize != self.itemsize:
            return f"the rates are of {8 * self.itemsize}-bit arithmetic, and this run computes in {8 * shape.itemsize} bits"
        if not strategy.uses_nvme:
            return None
        if self.in_order:
            return "on CPU ranks a drive's threads and the arithmetic share cores, which is not simulated"
        return None if self.nvme_read else "the rates of the drive are missing"

    @cached_property
    def resources(self) -> dict[str, float]:
        """Rates by the names that events use, but for compute."""
        names = ("link", "dram", "hbm", "nvme_read", "nvme_write")
        shared = {name: getattr(self, name) for name in names if getattr(self, name)}
        return {**shared, "up": self.pcie, "down": self.pcie}


def speed(shape: Shape, strategy: Strategy, rates: Rates, *, rounds: int | None = None) -> Speed:
    """Return what a step takes.

    Args:
        shape: the model and what is asked of it.
        strategy: how it is held and trained.
        rates: what one rank has for itself.
        rounds: times that all blocks are passed in a step; None takes the strategy's.

    Raises:
        ValueError: if the strategy needs a resource for which `rates` has none.
    """
    rounds = rounds or strategy.rounds
    step = _Step(shape, strategy, rounds, rates.collective_s, in_order=rates.in_order)
    ends = [step.add() for _ in range(STEPS)]
    timeline = simulate(step.script.events, rates.all(shape.hidden))
    marks = [max(timeline.ends[number] for number in numbers) for numbers in ends]
    first, last = marks[-2], marks[-1]
    tokens = shape.world_size * strategy.sequences * rounds * shape.sequence_tokens
    operations = sum([event.work.get("compute", 0.0) for event in step.script.events]) / STEPS
    before, after = step.ends[-2:] if rounds > 1 else [(), ()]
    round_s = max([timeline.ends[b] - timeline.ends[a] for a, b in zip(before, after)], default=0.0)
    return Speed(last - first, tokens, operations, timeline.busy(first, last), timeline, (first, last), round_s)


def script(shape: Shape, strategy: Strategy, steps: int = 1, *, in_order: bool = False) -> Script:
    """Return the events of some steps in a row: what `speed` simulates, and what tests compare the engine with."""
    step = _Step(shape, strategy, strategy.rounds, 0.0, in_order=in_order)
    for _ in range(steps):
        step.add()
    return step.script


def parts_of_step(
    shape: Shape, strategy: Strategy, *, in_order: bool = False
) -> tuple[Sequence[Event], Sequence[Event], Sequence[Event]]:
    """Return the events of a step's first round of micro-batches, of each further round, and of its update."""
    step = _Step(shape, strategy, 2, 0.0, in_order=in_order)
    step.add()
    first, second = (number + 1 for number in step.until)
    events = step.script.events
    return events[:first], events[first:second], events[second:]


class _Step:
    """Writes steps into a script, one after the other.

    Args:
        shape: the model and what is asked of it.
        strategy: how it is held and trained.
        rounds: see `speed`.
        collective_s: see `Rates`.
        in_order: see `Rates`.
    """

    def __init__(self, shape: Shape, strategy: Strategy, rounds: int, collective_s: float, *, in_order: bool) -> None:
        self.shape, self.strategy, self.rounds, self.collective_s = shape, strategy, rounds, collective_s
        self.script = Script()
        self.beside = "compute" if in_order else "collectives"
        self.world = shape.world_size
        self.owners = strategy.owners(self.world)
        self.tokens = strategy.sequences * shape.sequence_tokens
        self.written: dict[int, int] = {}  # block to the event with which its update is done; -1: what is outside blocks
        self.computed: list[int] = []  # the last computations
        self.ends: list[tuple[int, ...]] = []  # the last computation of each round, and the last move of a gradient
        self.until: list[int] = []  # the last event of each round
        self.slots: dict[int, int] = {}  # slot to the block whose weights it has
        self.reduced: int | None = None
        self.offloaded: int | None = None
        self.stored: dict[str, int] = {}  # line to the event with which its state lies on NVMe again
        self.left = 0  # bytes of host memory for lines of a state on NVMe

    def add(self) -> list[int]:
        """Add a step; return its last computation: what the next one cannot begin before."""
        if not self.strategy.deferred and self.written:
            self._wait_for_all()
        for round_ in range(self.rounds):
            self._forward(first=round_ == 0)
            self._loss()
            self._backward(first=round_ == 0)
            self.ends.append((self.computed[-1],) if self.offloaded is None else (self.computed[-1], self.offloaded))
            self.until.append(len(self.script.events) - 1)
        end = self.computed[-1]
        self._update()
        return [end] if self.strategy.deferred else [end, *self.written.values()]

    # --- forward and backward

    def _forward(self, *, first: bool) -> None:
        blocks = self.shape.blocks
        gathered = [self._gather(0, first=first)]
        for number in range(len(blocks)):
            if number + 1 < len(blocks):
                gathered.append(self._gather(number + 1, first=first))
            outside = self._outside() if first and number == 0 else []
            self._compute(f"forward {number}", self._operations(number, forward=True), [gathered[number], *outside])
            self._keep("keep", "down", number)

    def _loss(self) -> None:
        """Embedding and head: three products of the head a token (its own gradient only where it is trained); one of them
        twice where the loss is made by chunks.
        """
        shape = self.shape
        products = 2 + any(line.trained for line in shape.roots) + shape.chunked_loss
        outside = [line for line in shape.roots if self._is_gathered("root")]
        gathered = self._collective("gather head", sum(self._moved(line) for line in outside), [self.computed[-1]])
        self._compute("loss", 2.0 * products * shape.vocabulary * shape.hidden * self.tokens, [gathered])

    def _backward(self, *, first: bool) -> None:
        blocks = self.shape.blocks
        count = len(blocks)
        again = self.strategy.reshard_after_forward and (self._is_gathered("block") or self.strategy.parameters != DEVICE)
        gathered: dict[int, int | None] = {}
        if again:
            gathered[count - 1] = self._gather(count - 1, first=False)
        brought: int | None = None
        for number in reversed(range(count)):
            if again and number:
                gathered[number - 1] = self._gather(number - 1, first=False)
            name, operations = f"backward {number}", self._operations(number, forward=False)
            self._compute(name, operations, [gathered.get(number), self.reduced, brought])
            brought = self._keep("bring", "up", number - 1) if number else None
            self._collect(name, "block", blocks[number], first=first)
        self._collect("outside", "root", self.shape.roots, first=first)

    def _compute(self, name: str, operations: float, after: Sequence[int | None]) -> None:
        self.computed.append(self.script.add(name, "compute", {"compute": operations}, after))

    def _pass(self, name: str, size: float) -> None:
        """Let the last computation end with so many bytes of device memory read and written."""
        if size:
            self.computed[-1] = self.script.add(name, "compute", {"hbm": size}, [self.computed[-1]])

    def _recomputed(self, number: int) -> bool:
        """Whether a block's forward is computed again in its backward."""
        blocks = len(self.shape.blocks)
        return number < blocks - self.strategy.graphs(blocks)

    def _operations(self, number: int, *, forward: bool) -> float:
        """Return the operations of a block on a rank's micro-batch (Megatron's count, arXiv:2104.04473)."""
        lines = self.shape.blocks[number]
        numel = sum(line.numel for line in lines)
        trained = sum(line.numel for line in lines if line.trained)
        once = 2.0 * numel + 4.0 * self.shape.sequence_tokens * self.shape.hidden
        back = once + 2.0 * trained + 4.0 * self.shape.sequence_tokens * self.shape.hidden
        recomputed = once if self._recomputed(number) else 0.0
        return self.tokens * (once if forward else back + recomputed)

    def _keep(self, what: str, direction: str, number: int) -> int | None:
        """Move a block's activations away, or back, once the last computation is done; nothing where they stay."""
        if self.strategy.activation_offload == DEVICE or not self._recomputed(number):
            return None
        after = self.computed[-1]
        size = float(self.tokens * self.shape.hidden * self.shape.itemsize)
        if self.strategy.activation_offload == NVME and direction == "up":
            after = self.script.add(f"{what} from nvme", "nvme fetch", {"nvme_read": size}, [after])
        moved = self.script.add(what, direction, {direction: size, "dram": COPY_TRAFFIC * size}, [after])
        if self.strategy.activation_offload == NVME and direction == "down":
            return self.script.add(f"{what} on nvme", "nvme offload", {"nvme_write": size}, [moved])
        return moved

    # --- weights and gradients

    def _is_gathered(self, kind: str) -> bool:
        return self.strategy.stage == 3 and self.owners > 1 and kind in ("block", "root")

    def _moved(self, line: Line) -> float:
        """Return the bytes that a rank sends to gather a line."""
        return 0.0 if self.owners == 1 else self._sent(line, line.itemsize)

    def _reduced(self, line: Line, itemsize: int) -> float:
        """Return the bytes that a rank sends to reduce a line's gradient; all sums to every rank where each has the line."""
        return self._sent(line, itemsize) * (2 if self.owners == 1 else 1)

    def _sent(self, line: Line, itemsize: int) -> float:
        return line.padded_numel(self.world) * itemsize * (self.world - 1) / self.world

    def _summed(self, line: Line) -> int:
        """Return the bytes of an element of a line's gradient where micro-batches' are summed."""
        return self.strategy.gradient_itemsize(line.itemsize)

    def _collective(self, name: str, size: float, after: Sequence[int | None]) -> int | None:
        if not size:
            return None
        return self.script.add(name, self.beside, {"link": size}, after, latency_s=self.collective_s)

    def _gather(self, number: int, *, first: bool) -> int | None:
        """Bring a block's weights, from their tier and from all ranks; in the first forward of a step after their update."""
        if first and number == 0:
            self.slots.clear()  # they have the weights of before the update
        held = not self.strategy.reshard_after_forward  # in a buffer of its own, until its backward
        if self.slots.get(number % 2) == number and not held:
            return None
        self.slots[number % 2] = number
        updated = self.written.get(number) if first else None
        lines = self.shape.blocks[number]
        free = self.computed[-2] if len(self.computed) > 1 and not held else None
        fetched: int | None = None
        if self.strategy.parameters != DEVICE:
            size = float(sum(line.shard_numel(self.owners) * line.itemsize for line in lines))
            after = [free, updated]
            if self.strategy.parameters == NVME:
                after.append(self.script.add(f"read weights {number}", "nvme fetch", {"nvme_read": size}, [updated]))
            fetched = self.script.add(f"fetch {number}", "up", {"up": size, "dram": COPY_TRAFFIC * size}, after)
        if not self._is_gathered("block"):
            refreshed = self._refresh(str(number), [Placed(line, "block") for line in lines], updated)
            return next((each for each in (refreshed, fetched, updated) if each is not None), None)
        return self._collective(f"gather {number}", sum(map(self._moved, lines)), [free, updated, fetched])

    def _refresh(self, name: str, lines: Sequence[Placed], updated: int | None) -> int | None:
        """Gather whole copies of lines whose shards were updated."""
        if updated is None:
            return None
        stale = (each.line for each in lines if each.line.trained and self.strategy.resident(each.kind, self.world))
        return self._collective(f"refresh {name}", sum(map(self._moved, stale)), [updated])

    def _outside(self) -> list[int | None]:
        """Return what the first block of a step waits for: parameters outside blocks, updated and whole again."""
        lines = [Placed(line, "root") for line in self.shape.roots] + [
            Placed(line, "replicated") for line in self.shape.replicated
        ]
        updated = self.written.get(-1)
        return [updated, self._refresh("outside", lines, updated)]

    def _collect(self, name: str, kind: FlatKind, lines: Sequence[Line], *, first: bool) -> None:
        """Put a gradient where it is summed: whole, until the end of the step, or in the slot, and reduced at once."""
        trained = [line for line in lines if line.trained]
        late = [each for each in trained if self.strategy.reduced_late(kind, self.world)]
        soon = [each for each in trained if each not in late]
        parts = self.strategy.parts if kind == "block" else 1  # root parameters get the gradient of all parts at once
        size = sum(_collected(each, self.strategy.slot_itemsize(each.itemsize), 1, parts - 1) for each in soon)
        for each in late:
            size += _collected(each, self._summed(each), int(first), parts - first)
        self._pass(f"collect {name}", size)
        if soon:
            self.reduced = self._reduce(name, soon, first=first)

    def _reduce(self, name: str, trained: Sequence[Line], *, first: bool) -> int | None:
        """Reduce a gradient, and add this rank's part to those of the micro-batches before, or move it to its tier."""
        slots = [(each, self.strategy.slot_itemsize(each.itemsize)) for each in trained]
        reduced = self._collective(f"reduce {name}", sum(self._reduced(*each) for each in slots), [self.computed[-1]])
        added = float(sum(line.shard_numel(self.owners) * (size + 2 * self._summed(line)) for line, size in slots))
        if self.strategy.gradients == DEVICE and not first:
            reduced = self.script.add(f"sum {name}", self.beside, {"hbm": added}, [reduced, self.computed[-1]])
        if self.strategy.gradients != DEVICE:
            size = float(sum(line.shard_numel(self.owners) * itemsize for line, itemsize in slots))
            kept = float(sum(line.shard_numel(self.owners) * self._summed(line) for line in trained))
            after = [reduced, self.computed[-1]]
            self.offloaded = self.script.add(f"offload {name}", "down", {"down": size, "dram": COPY_TRAFFIC * size}, after)
            if not first:
                work = {"dram": added} | ({"nvme_read": kept} if self.strategy.gradients == NVME else {})
                self.offloaded = self.script.add(f"sum {name}", "host update", work, [self.offloaded])
            if self.strategy.gradients == NVME:
                after = [self.offloaded]
                self.offloaded = self.script.add(f"write gradient {name}", "nvme offload", {"nvme_write": kept}, after)
        return reduced

    # --- the update

    def _update(self) -> None:
        norm = self.script.add("norm", self.beside, self._norm_work(), self._finish(), latency_s=NORM_S)
        outside = [line for line in (*self.shape.roots, *self.shape.replicated) if line.trained]
        self.left = decided(self.strategy.state_host_bytes)
        self.written = {-1: self._update_of("outside", outside, norm)}
        for number, lines in enumerate(self.shape.blocks):
            trained = [line for line in lines if line.trained]
            if trained:
                self.written[number] = self._update_of(str(number), trained, norm)

    def _finish(self) -> list[int | None]:
        """Reduce what is whole until the end of the step; return what the norm waits for."""
        moved = 0.0
        for placed, count in self.shape.counted:
            if placed.line.trained and self.strategy.reduced_late(placed.kind, self.world):
                moved += count * self._reduced(placed.line, self._summed(placed.line))
        late = self._collective("reduce whole", moved, [self.computed[-1]])
        return [self.reduced, self.offloaded, late, self.computed[-1]]

    def _norm_work(self) -> dict[str, float]:
        """Return what the norm reads: shards on the device; elsewhere it was taken on the way there."""
        if self.strategy.gradients != DEVICE:
            return {}
        trained = [(placed.line, count) for placed, count in self.shape.counted if placed.line.trained]
        return {"hbm": float(sum(n * line.shard_numel(self.owners) * self._summed(line) for line, n in trained))}

    def _update_of(self, name: str, lines: Sequence[Line], norm: int) -> int:
        numel = float(sum(line.shard_numel(self.owners) for line in lines))
        size = float(sum(line.shard_numel(self.owners) * line.itemsize for line in lines))
        gradient = float(sum(line.shard_numel(self.owners) * self._summed(line) for line in lines))
        state, traffic = self.shape.rule.state_bytes * numel, self.shape.rule.traffic_bytes * numel
        if self.strategy.state == DEVICE:
            return self.script.add(f"update {name}", "compute", {"hbm": traffic}, [norm])
        before: list[int | None] = [norm]
        if self.strategy.gradients == DEVICE:
            work = {"down": gradient, "dram": COPY_TRAFFIC * gradient}
            before.append(self.script.add(f"down {name}", "down", work, [norm]))
        stays = self.strategy.state != NVME or state <= self.left  # whole lines, as `Tiers.state_tiers` has it
        if self.strategy.state == NVME and stays:
            self.left -= int(state)
        if self.strategy.gradients == NVME:
            before.append(self.script.add(f"read gradient {name}", "nvme read", {"nvme_read": gradient}, [norm]))
        if not stays:
            after = [norm, self.stored.get(name)]
            before.append(self.script.add(f"read {name}", "nvme read", {"nvme_read": state}, after))
        done = self.script.add(f"adam {name}", "host update", {"dram": traffic}, before)
        if not stays:
            written = {"nvme_write": state}
            self.stored[name] = self.script.add(f"write {name}", "nvme write", written, [done])
        if self.strategy.parameters == NVME:
            return self.script.add(f"write weights {name}", "nvme write", {"nvme_write": size}, [done])
        if self.strategy.parameters == HOST:
            return done
        return self.script.add(f"up {name}", "up", {"up": size, "dram": COPY_TRAFFIC * size}, [done])

    def _wait_for_all(self) -> None:
        """Let the next step begin when everything is written."""
        self.computed.append(self.script.add("wait", "compute", {}, list(self.written.values())))


def _collected(line: Line, itemsize: int, copies: int, sums: int) -> float:
    """Return the bytes that move when a line's gradients are copied, and then added, to elements of `itemsize` bytes."""
    return float(line.numel * (copies * (line.itemsize + itemsize) + sums * (line.itemsize + 2 * itemsize)))
