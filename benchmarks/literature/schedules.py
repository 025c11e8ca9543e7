"""Peers' schedules in the event language: one step of ZeRO-2, ZeRO-Offload, ZeRO-3 offload / ZeRO-Infinity and PatrickStar.

They are here so that published results can be simulated (published.py): if the event language with one set of constants a
machine reproduces what others measured, its seconds for the engine's own order (schedule.py) deserve some trust.

[Note: a step]   one rank of equal ones; every peer waits for all of a step before the next begins, so one step is enough

    forward     [fetch from host] [gather] compute, [checkpoint to host]                  block by block
    loss        the head's product; its two gradients open the backward
    backward    [checkpoint back] [fetch] [gather] recompute and walk back, [reduce], [offload to host]
    update      unscale, Adam, weights back, [gather]: one after the other

What differs is what a system has of these, what runs beside what, and how many bytes cross. Those facts were read in the
peers' released sources and papers; each function names them. Facts only: no code of theirs is here.

What is not in the model: kernel launches, allocator retries, DMA's share of host memory, imbalance between ranks.
It knows no torch and no YAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.literature.work import HALF, Work
from ftkit.plan.events import Script, simulate
from ftkit.plan.schedule import NORM_S
from ftkit.spec.update_rules import ADAMW

Overlap = Literal["none", "gathers", "all"]
"""What runs beside computation: nothing; weights on their way in; also reductions and offloads."""

SINGLE = 4
"""Bytes of an element in fp32."""

UNSCALE_BYTES = 8
"""Of host memory that DeepSpeed's pass over fp32 gradients before Adam moves for an element: read, multiplied, written."""

CAST_BYTES = 6
"""Of host memory for an element whose fp32 master becomes an fp16 weight: read 4, write 2."""

PATRICKSTAR_SHARE = 0.8
"""Of a GPU, that PatrickStar uses (`overall_gpu_mem_ratio`), and of what its peak leaves, for state (`margin_use_ratio`)."""


@dataclass(frozen=True)
class Seconds:
    """How long the parts of a step take, as the peers' timers cut it (each waits for the device)."""

    forward: float
    backward: float
    update: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.update


@dataclass
class Order:
    """One step being written: a script, and where its parts end.

    Args:
        work: what the step asks of a rank.
        overlap: what runs beside computation.
        script: the events so far.
        ends: events with which forward, backward and step end, as far as they are written.
        computed: the last event of the computing stream.
    """

    work: Work
    overlap: Overlap
    script: Script = field(default_factory=Script)
    ends: list[int] = field(default_factory=list)
    computed: int | None = None

    def compute(self, name: str, work: Mapping[str, float], after: Sequence[int | None] = ()) -> int:
        """Add something that the computing stream does or waits for."""
        self.computed = self.script.add(name, "compute", work, after)
        return self.computed

    def inward(self, name: str, stream: str, work: Mapping[str, float], after: Sequence[int | None]) -> int:
        """Add a move of weights to where they are computed with."""
        return self._add(name, "compute" if self.overlap == "none" else stream, work, after)

    def outward(self, name: str, stream: str, work: Mapping[str, float], after: Sequence[int | None]) -> int:
        """Add a move of gradients away from where they were computed."""
        return self._add(name, stream if self.overlap == "all" else "compute", work, after)

    def _add(self, name: str, stream: str, work: Mapping[str, float], after: Sequence[int | None]) -> int:
        return self.compute(name, work, after) if stream == "compute" else self.script.add(name, stream, work, after)

    def finish_part(self) -> int:
        """Wait for everything so far: a part of the step ends here."""
        self.ends.append(self.compute("wait", {}, list(range(len(self.script.events)))))
        return self.ends[-1]

    def seconds(self, rates: Mapping[str, float]) -> Seconds:
        """Simulate it."""
        timeline = simulate(self.script.events, rates)
        forward, backward, step = (timeline.ends[number] for number in self.ends)
        return Seconds(forward, backward - forward, step - backward)


# --- the systems


def zero2(work: Work, *, overlap: Overlap = "all") -> Order:
    """ZeRO stage 2: whole weights, gradients reduced to shards, Adam on the device, weights gathered once.

    Source: arXiv:1910.02054, section 5; reduction beside the backward is DeepSpeed's `overlap_comm`.
    """
    order = Order(work, overlap)
    _forward(order)
    _backward(order)
    update = order.compute("update", {"hbm": ADAMW.traffic_bytes * work.numel / work.replicas}, [_norm(order)])
    order.compute("gather weights", {"link": _shared(work, HALF * work.numel)}, [update])
    order.finish_part()
    return order


def zero_offload(work: Work, *, overlap: Overlap = "none", checkpoints: bool = True) -> Order:
    """ZeRO-Offload: ZeRO-2 with fp32 gradients and state on the host; whole weights on every device.

    In the released order (DeepSpeed 0.3.0: runtime/zero/stage2.py, ops/adam, csrc/adam) a rank's shard is one run of the
    model, so a block's gradients go to one owner and cross that one's PCIe lane alone, as fp32; Adam hands weights up as
    fp32 through pinned buffers, here after Adam: the log of V3 has about the sum of both as `optimizer_step`.

    Args:
        work: what the step asks of a rank.
        overlap: "all" with `overlap_comm`; "none", its default: reductions and offloads are on the computing stream.
        checkpoints: activations in host memory that is not pinned (`cpu_checkpointing`, activation_checkpointing/).

    Source: arXiv:2101.06840, section 4.
    """
    order = Order(work, overlap)
    _forward(order, checkpoints=checkpoints)
    _backward(order, checkpoints=checkpoints, offload=("lane", SINGLE))
    shard = work.numel / work.replicas
    before = order.compute("unscale", {"dram": UNSCALE_BYTES * shard}, [_norm(order)])
    adam = order.compute("adam", {"dram": ADAMW.traffic_bytes * shard}, [before])
    up = order.compute("weights up", {"up": SINGLE * shard}, [adam])
    order.compute("gather weights", {"link": _shared(work, HALF * work.numel)}, [up])
    order.finish_part()
    return order


def zero3(
    work: Work,
    *,
    overlap: Overlap,
    parameters: str = "device",
    state: str = "host",
    checkpoints: bool = False,
    scatter: bool = True,
) -> Order:
    """ZeRO stage 3 with offload: ZeRO-3 Offload and ZeRO-Infinity.

    Every rank fetches and offloads its own shard, so all PCIe lanes are used. Gradients leave as fp32. Weights on the device
    are cast on the host and copied from memory that is not pinned; weights on the host are cast there. NVMe reads, Adam and
    writes run beside each other: 16 bytes in, 12 out, an element.

    Args:
        work: what the step asks of a rank.
        overlap: "gathers" before DeepSpeed PR #1453 (2021-11: each fetch waits for the whole device, so a gather runs beside
            the computation of the module before it, reductions and offloads beside nothing); "all" since.
        parameters: tier of the weights, "device" or "host".
        state: tier of the optimizer state, "device", "host" or "nvme".
        checkpoints: activations on the host, not pinned.
        scatter: False where gradients are all-reduced and each rank keeps its share: `reduce_scatter`, by default False in
            DeepSpeed 0.3.16 and 0.3.17, else True.

    Source: arXiv:2104.07857, sections 5 and 6; DeepSpeed 0.3.12 to 0.3.17, runtime/zero/stage3.py, partition_parameters.py.
    """
    order = Order(work, overlap)
    fetched = HALF / work.replicas if parameters == "host" else 0.0
    offload = None if state == "device" else ("down", SINGLE / work.replicas)
    _forward(order, checkpoints=checkpoints, gathered=True, fetched=fetched)
    _backward(order, checkpoints=checkpoints, gathered=True, fetched=fetched, offload=offload, scatter=scatter)
    shard = work.numel / work.replicas
    norm = _norm(order)
    if state == "device":
        order.compute("update", {"hbm": ADAMW.traffic_bytes * shard}, [norm])
    elif state == "nvme":
        order.compute("update", {"nvme": (2 * ADAMW.state_bytes + SINGLE) * shard, "dram": _host_bytes(shard)}, [norm])
    else:
        cast = order.compute("update", {"dram": _host_bytes(shard)}, [norm])
        if parameters == "device":
            order.compute("weights up", {"pageable": HALF * shard}, [cast])
    order.finish_part()
    return order


def patrickstar(work: Work, *, device_bytes: float = 32510 * 2**20) -> Order:
    """PatrickStar: weights in chunks shared by all ranks, gathered when they are touched; fp16 gradients take their place.

    A chunk's collective and its moves wait for each other (`async_move` is off by default, and for one GPU only). Adam runs
    after the backward, chunk by chunk: on the device for the state that has room there (`use_hybrid_adam`, on by default),
    else gradient down, Adam on the host, weight up.

    Args:
        work: what the step asks of a rank.
        device_bytes: memory of a GPU; a V100-32GB's by default.

    Source: arXiv:2108.05818; Tencent/PatrickStar v0.4.3, INSIDE.md, doc/optimization_options.md, ops/fp16_cpu_adam.py.
    """
    order = Order(work, "none")
    _forward(order, gathered=True)
    _backward(order, gathered=True)
    shard = work.numel / work.replicas
    room = PATRICKSTAR_SHARE * (PATRICKSTAR_SHARE * device_bytes - patrickstar_peak(work))
    near = min(shard, max(0.0, room / ADAMW.state_bytes))
    there = order.compute("adam on device", {"hbm": ADAMW.traffic_bytes * near}, [_norm(order)])
    down = order.compute("gradients down", {"down": HALF * (shard - near)}, [there])
    adam = order.compute("adam", {"dram": ADAMW.traffic_bytes * (shard - near)}, [down])
    order.compute("weights up", {"up": HALF * (shard - near)}, [adam])
    order.finish_part()
    return order


def patrickstar_peak(work: Work) -> float:
    """Return what a GPU has at the peak of a step: checkpoints, one block's activations, two gathered blocks, a shard.

    Source: activations of a block 34 h + 5 a s bytes a token (arXiv:2205.05198, section 4.1).
    """
    activations = work.tokens * (34 * work.hidden + 5 * work.heads * work.sequence_tokens)
    return work.layers * work.checkpoint_bytes + activations + HALF * (2 * work.block + work.numel / work.replicas)


# --- what they have in common


def _forward(order: Order, *, checkpoints: bool = False, gathered: bool = False, fetched: float = 0.0) -> None:
    """Blocks from first to last, then the head, whose weights are the embedding's."""
    work = order.work
    weights = _Weights(order, gathered, fetched)
    weights.bring("embedding", work.outside)
    for number in range(work.layers):
        order.compute(f"forward {number}", {"compute": work.pass_operations}, [weights.block(number)])
        if checkpoints:
            order.compute(f"checkpoint {number}", {"pageable": work.checkpoint_bytes})
    if work.has_head:
        order.compute("head", {"compute": work.head_operations}, [weights.bring("head", work.outside)])
    order.finish_part()


def _backward(
    order: Order,
    *,
    checkpoints: bool = False,
    gathered: bool = False,
    fetched: float = 0.0,
    offload: tuple[str, float] | None = None,
    scatter: bool = True,
) -> None:
    """Head, then blocks from last to first; reductions and offloads may run beside the next block, one block's at a time.

    Args:
        order: the step that is being written.
        checkpoints: activations come back from host memory.
        gathered: weights are gathered from all replicas.
        fetched: bytes of an element of the model that come from the host; 0 where nothing does.
        offload: the resource over which gradients leave the device, and bytes of an element of the model; None: they stay.
        scatter: each rank receives its share of the sums, not all of them, which is twice the bytes.
    """
    work = order.work
    weights = _Weights(order, gathered, fetched)
    order.compute("head back", {"compute": 2 * work.head_operations}, [weights.bring("outside", work.outside)])
    left: int | None = None
    before: int | None = None
    for step in range(work.layers):
        if checkpoints:
            order.compute(f"checkpoint back {step}", {"pageable": work.checkpoint_bytes})
        operations = 3 * work.pass_operations  # once more forward, twice that backward
        done = order.compute(f"backward {step}", {"compute": operations}, [weights.block(step), before])
        before, left = left, _send(order, str(step), work.block, offload, done, scatter)
    _send(order, "outside", work.outside, offload, order.computed, scatter)
    order.finish_part()


def _send(
    order: Order, name: str, numel: float, offload: tuple[str, float] | None, after: int | None, scatter: bool
) -> int | None:
    """Reduce some gradients, and take them off the device."""
    if order.work.replicas > 1:
        size = _shared(order.work, HALF * numel) * (1 if scatter else 2)
        after = order.outward(f"reduce {name}", "collectives", {"link": size}, [after])
    if offload:
        resource, each = offload
        after = order.outward(f"offload {name}", "down", {resource: each * numel}, [after])
    return after


class _Weights:
    """Brings weights to where they are computed with: blocks one ahead of their computation.

    Args:
        order: the step that is being written.
        gathered: weights are gathered from all replicas.
        fetched: bytes of an element of the model that come from the host; 0 where nothing does.
    """

    def __init__(self, order: Order, gathered: bool, fetched: float) -> None:
        self.order, self.gathered, self.fetched = order, gathered and order.work.replicas > 1, fetched
        self.found: dict[int, int | None] = {}

    def block(self, number: int) -> int | None:
        """Return the event with which a block's weights are there; the next block's begin to come beside this one's work."""
        last = self.order.computed
        ahead = (number, number + 1) if self.order.overlap != "none" else (number,)
        for each in ahead:
            if each not in self.found and each < self.order.work.layers:
                self.found[each] = self.bring(str(each), self.order.work.block, last)
        return self.found[number]

    def bring(self, name: str, numel: float, after: int | None = None) -> int | None:
        """Fetch and gather some weights; return the event with which they are there, None where they always are."""
        if not self.fetched and not self.gathered:
            return None
        after = self.order.computed if after is None else after
        if self.fetched:
            after = self.order.inward(f"fetch {name}", "up", {"up": self.fetched * numel}, [after])
        if self.gathered:
            size = _shared(self.order.work, HALF * numel)
            after = self.order.inward(f"gather {name}", "collectives", {"link": size}, [after])
        return after


def _norm(order: Order) -> int:
    return order.script.add("norm", "compute", {}, [order.ends[-1]], latency_s=NORM_S)


def _shared(work: Work, size: float) -> float:
    """Return the bytes that one rank sends to gather or to reduce `size` bytes."""
    return size * (work.replicas - 1) / work.replicas


def _host_bytes(shard: float) -> float:
    """Return the host memory that an update moves: gradients unscaled, Adam, masters cast to weights."""
    return (UNSCALE_BYTES + ADAMW.traffic_bytes + CAST_BYTES) * shard
