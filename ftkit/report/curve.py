"""The memory of a GPU within a step, over the simulated time.

    static     parameters, gradients and state of this tier, slots, runtime: for the whole run
    dynamic    activations and kept graphs, from a block's forward to its backward; workspace of the current computation

Sizes are the plan's, times the schedule's. The largest sum is the plan's peak in training, apart from purposes that the plan
adds although they do not coincide.
"""

from __future__ import annotations

from ftkit.plan.memory import ACTIVATIONS, graph_bytes, kept_bytes
from ftkit.plan.plan import Plan
from ftkit.plan.speed import Speed
from ftkit.spec.tiers import DEVICE

COMES_AND_GOES = (ACTIVATIONS, "workspace", "logits", "root parameters")


def curve(plan: Plan, speed: Speed) -> tuple[int, list[tuple[float, int]]]:
    """Return the memory of one rank's device in a step.

    Returns:
        Static bytes; (seconds since the step began, dynamic bytes) at the start and the end of each computation.
    """
    shape, strategy, blocks = plan.shape, plan.strategy, len(plan.shape.blocks)
    purposes = plan.memory.purposes(DEVICE, "train")
    static = sum(size for purpose, size in purposes.items() if purpose not in COMES_AND_GOES)
    graph = strategy.parts * graph_bytes(shape, strategy)
    kept = kept_bytes(shape, strategy) if strategy.activation_offload == DEVICE else 0
    head = purposes.get("logits", 0) + purposes.get("root parameters", 0)
    recomputed = blocks - strategy.graphs(blocks)
    first, last = speed.step
    timeline = speed.timeline
    found: list[tuple[float, int]] = []
    stored = 0
    for event, start, end in zip(timeline.events, timeline.starts, timeline.ends):
        if event.stream != "compute" or end <= first or start >= last or end <= start:
            continue
        what, _, number = event.name.partition(" ")
        block = int(number) if number.isdigit() else None
        own = head if what == "loss" else 0
        if block is not None and block < recomputed and what in ("recompute", "backward"):
            own = graph
        found.append((max(start, first) - first, stored + own))
        found.append((min(end, last) - first, stored + own))
        if block is not None and what != "recompute":
            size = kept if block < recomputed else graph
            stored = stored + size if what == "forward" else max(stored - size, 0)
            found.append((min(end, last) - first, stored))
    return static, found
