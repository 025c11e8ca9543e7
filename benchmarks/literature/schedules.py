"""Peers' schedules in the plan's event language: ZeRO-Offload, ZeRO-3 offload / ZeRO-Infinity, and PatrickStar.

[Note: a step]   One rank of equal ones. Every peer waits at the end of a step, so one step is enough.

    forward     [fetch from host] [gather] compute, [checkpoint to host]                  per block
    loss        the head's product; its two gradients open the backward
    backward    [checkpoint back] [fetch] [gather] recompute and backward, [reduce], [offload to host]
    update      unscale, Adam, weights back, [gather]: one after the other

The systems differ in the bracketed parts, in what runs beside computation, and in the bytes that move. These facts come from
released sources and papers, which each function names. Not modelled: kernel launches, allocator retries, DMA's share of host
memory, imbalance between ranks.
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
"""What runs beside computation: nothing; fetches and gathers of weights; also reductions and offloads."""
SINGLE = 4
"""Bytes of an element in fp32."""
HOST_BYTES = 8 + ADAMW.traffic_bytes + 6
"""Host memory traffic of an element's update: fp32 gradient unscaled (8), Adam, fp32 master cast to an fp16 weight (6)."""
PATRICKSTAR_SHARE = 0.8
"""Share of a GPU that PatrickStar uses (`overall_gpu_mem_ratio`), and share for state of what its peak leaves
(`margin_use_ratio`)."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of the parts of a step. The peers' timers wait for the device at each boundary."""

    forward: float
    backward: float
    update: float

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.forward + self.backward + self.update


@dataclass
class Order:
    """One step that is being written.

    Args:
        work: A rank's step.
        overlap: What runs beside computation.
        gathered: Weights are gathered from all ranks.
        fetched: Bytes per element of the model that come from the host. 0: weights are on the device.
        checkpoints: Saved inputs are in host memory that is not pinned.
        script: Events so far.
        ends: Events with which forward, backward and step end, as far as they are written.
        computed: Last event of the computing stream.
    """

    work: Work
    overlap: Overlap
    gathered: bool = False
    fetched: float = 0.0
    checkpoints: bool = False
    script: Script = field(default_factory=Script)
    ends: list[int] = field(default_factory=list)
    computed: int | None = None
    brought: dict[int, int | None] = field(default_factory=dict)

    def compute(self, name: str, work: Mapping[str, float], after: Sequence[int | None] = ()) -> int:
        """Add work of the computing stream."""
        self.computed = self.script.add(name, "compute", work, after)
        return self.computed

    def move(self, name: str, stream: str, work: Mapping[str, float], after: int | None, *, beside: bool) -> int:
        """Add a move of weights or gradients, beside computation or in the computing stream."""
        return self.script.add(name, stream, work, [after]) if beside else self.compute(name, work, [after])

    def bring(self, name: str, numel: float, after: int | None = None) -> int | None:
        """Fetch and gather weights; return the event after which they are present, None if they always are."""
        if not self.fetched and not (self.gathered and self.work.gpus > 1):
            return None
        after = self.computed if after is None else after
        beside = self.overlap != "none"
        if self.fetched:
            after = self.move(f"fetch {name}", "up", {"up": self.fetched * numel}, after, beside=beside)
        if self.gathered and self.work.gpus > 1:
            size = shared(self.work, HALF * numel)
            after = self.move(f"gather {name}", "collectives", {"link": size}, after, beside=beside)
        return after

    def block(self, number: int) -> int | None:
        """Bring a block's weights, and start to bring the next block's beside its computation."""
        last = self.computed
        for each in (number, number + 1) if self.overlap != "none" else (number,):
            if each not in self.brought and each < self.work.layers:
                self.brought[each] = self.bring(str(each), self.work.block, last)
        return self.brought[number]

    def send(
        self, name: str, numel: float, offload: tuple[str, float] | None, after: int | None, scatter: bool
    ) -> int | None:
        """Reduce gradients, and move them off the device."""
        beside = self.overlap == "all"
        if self.work.gpus > 1:
            size = shared(self.work, HALF * numel) * (1 if scatter else 2)
            after = self.move(f"reduce {name}", "collectives", {"link": size}, after, beside=beside)
        if offload:
            resource, each = offload
            after = self.move(f"offload {name}", "down", {resource: each * numel}, after, beside=beside)
        return after

    def finish_part(self) -> int:
        """Wait for everything so far: a part of the step ends here."""
        self.ends.append(self.compute("wait", {}, list(range(len(self.script.events)))))
        return self.ends[-1]

    def norm(self) -> int:
        """Add the norm of the gradients."""
        return self.script.add("norm", "compute", {}, [self.ends[-1]], latency_s=NORM_S)

    def seconds(self, rates: Mapping[str, float]) -> Seconds:
        """Simulate the step."""
        timeline = simulate(self.script.events, rates)
        forward, backward, step = (timeline.ends[number] for number in self.ends)
        return Seconds(forward, backward - forward, step - backward)


def shared(work: Work, size: float) -> float:
    """Return the bytes that one rank sends to gather or to reduce `size` bytes."""
    return size * (work.gpus - 1) / work.gpus


def forward(order: Order) -> None:
    """Add the blocks from first to last, then the head, whose weights are the embedding's."""
    work = order.work
    order.bring("embedding", work.outside)
    for number in range(work.layers):
        order.compute(f"forward {number}", {"compute": work.pass_operations}, [order.block(number)])
        if order.checkpoints:
            order.compute(f"checkpoint {number}", {"pageable": work.checkpoint_bytes})
    if work.has_head:
        order.compute("head", {"compute": work.head_operations}, [order.bring("head", work.outside)])
    order.finish_part()


def backward(order: Order, offload: tuple[str, float] | None = None, scatter: bool = True) -> None:
    """Add the head, then the blocks from last to first. One block is reduced and offloaded beside the next, if at all.

    Args:
        order: The step.
        offload: Resource over which gradients leave the device, and bytes per element of the model. None: they stay.
        scatter: Each rank receives its share of the sums, not all of them, which is twice the bytes.
    """
    work = order.work
    order.brought.clear()
    order.compute("head back", {"compute": 2 * work.head_operations}, [order.bring("outside", work.outside)])
    left = before = None
    for number in range(work.layers):
        if order.checkpoints:
            order.compute(f"checkpoint back {number}", {"pageable": work.checkpoint_bytes})
        operations = 3 * work.pass_operations  # forward again, and twice that backward
        done = order.compute(f"backward {number}", {"compute": operations}, [order.block(number), before])
        before, left = left, order.send(str(number), work.block, offload, done, scatter)
    order.send("outside", work.outside, offload, order.computed, scatter)
    order.finish_part()


# --- the systems


def zero_offload(work: Work, *, overlap: Overlap = "none", checkpoints: bool = True) -> Order:
    """ZeRO-Offload: gradients reduced to shards, fp32 gradients and state on the host; whole weights on every device.

    In the released order a rank's shard is one run of the model. A block's gradients go to one owner and cross its PCIe lane
    alone, as fp32. Weights return as fp32 after Adam.

    Source: arXiv:2101.06840, section 4; DeepSpeed 0.3.0, runtime/zero/stage2.py, ops/adam, csrc/adam; `overlap_comm` (off by
    default) is "all"; `cpu_checkpointing` is `checkpoints`.
    """
    order = Order(work, overlap, checkpoints=checkpoints)
    forward(order)
    backward(order, ("lane", SINGLE))
    shard = work.numel / work.gpus
    unscaled = order.compute("unscale", {"dram": 8 * shard}, [order.norm()])
    adam = order.compute("adam", {"dram": ADAMW.traffic_bytes * shard}, [unscaled])
    up = order.compute("weights up", {"up": SINGLE * shard}, [adam])
    order.compute("gather weights", {"link": shared(work, HALF * work.numel)}, [up])
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

    Every rank fetches and offloads its own shard, over all PCIe lanes. Gradients leave as fp32. Weights on the device are
    cast on the host and copied from memory that is not pinned. NVMe reads (16 bytes per element), Adam and writes (12)
    overlap.

    Args:
        work: A rank's step.
        overlap: "gathers" before DeepSpeed PR #1453 (November 2021), "all" since.
        parameters: Tier of the weights, "device" or "host".
        state: Tier of the optimizer state, "device", "host" or "nvme".
        checkpoints: Saved inputs on the host, not pinned.
        scatter: False where gradients are all-reduced: `reduce_scatter`, False by default in DeepSpeed 0.3.16 and 0.3.17.

    Source: arXiv:2104.07857, sections 5 and 6; DeepSpeed 0.3.12 to 0.3.17, runtime/zero/stage3.py, partition_parameters.py.
    """
    order = Order(work, overlap, gathered=True, checkpoints=checkpoints)
    order.fetched = HALF / work.gpus if parameters == "host" else 0.0
    forward(order)
    backward(order, None if state == "device" else ("down", SINGLE / work.gpus), scatter)
    shard, norm = work.numel / work.gpus, order.norm()
    if state == "device":
        order.compute("update", {"hbm": ADAMW.traffic_bytes * shard}, [norm])
    elif state == "nvme":
        moved = {"nvme": (2 * ADAMW.state_bytes + SINGLE) * shard, "dram": HOST_BYTES * shard}
        order.compute("update", moved, [norm])
    else:
        cast = order.compute("update", {"dram": HOST_BYTES * shard}, [norm])
        if parameters == "device":
            order.compute("weights up", {"pageable": HALF * shard}, [cast])
    order.finish_part()
    return order


def patrickstar(work: Work, *, device_bytes: float = 32510 * 2**20) -> Order:
    """PatrickStar: weights in chunks shared by all ranks and gathered on use; fp16 gradients replace them.

    Collectives and moves of a chunk wait for each other (`async_move` is off by default). Adam runs after the backward, on
    the device for the state that fits there (`use_hybrid_adam`), else on the host.

    The peak is checkpoints, one block's activations (34 h + 5 a s bytes per token, arXiv:2205.05198, section 4.1), two
    gathered blocks and a shard.

    Source: arXiv:2108.05818; Tencent/PatrickStar v0.4.3, INSIDE.md, doc/optimization_options.md, ops/fp16_cpu_adam.py.
    """
    order = Order(work, "none", gathered=True)
    forward(order)
    backward(order)
    shard = work.numel / work.gpus
    activations = work.tokens * (34 * work.hidden + 5 * work.heads * work.sequence_tokens)
    peak = work.layers * work.checkpoint_bytes + activations + HALF * (2 * work.block + shard)
    free = PATRICKSTAR_SHARE * (PATRICKSTAR_SHARE * device_bytes - peak)
    near = min(shard, max(0.0, free / ADAMW.state_bytes))
    there = order.compute("adam on device", {"hbm": ADAMW.traffic_bytes * near}, [order.norm()])
    down = order.compute("gradients down", {"down": HALF * (shard - near)}, [there])
    adam = order.compute("adam", {"dram": ADAMW.traffic_bytes * (shard - near)}, [down])
    order.compute("weights up", {"up": HALF * (shard - near)}, [adam])
    order.finish_part()
    return order
