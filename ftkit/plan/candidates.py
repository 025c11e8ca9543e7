"""Strategies to hold and train a model, from cheap to dear.

They come in one order (`order`), cheapest first:

    1. everything on the device; then with something on the host; then with something on NVMe, where a folder was named
    2. within that, by the sum of `COSTS`: what a choice adds to a micro-batch, roughly, in percent of one that computes
       only; the state's costs come once a step, and so do all but the arithmetic's where micro-batches pass blocks together

So blocks are recomputed before anything leaves the device, state leaves it before parameters do, and NVMe takes state
first. The costs order strategies; they promise no time: where the rates of a node are known, simulated seconds choose
(search.py). They are integers from published runs on V100 nodes (reference/performance-model.md): recomputation 33 %,
offloaded activations 5 to 20 %, a host optimizer at 16K tokens a rank 15 %, parameters that are fetched twice a micro-batch
over PCIe 25 %. On a CPU rank device and host are one memory, and moving between them is left out.

It refuses choices that contradict each other. What it costs: some thousand sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ftkit.errors import UserError
from ftkit.plan.limits import Limits
from ftkit.plan.shape import Line, Shape
from ftkit.spec.strategy import AUTO, FP32, STEP, UNIT, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, KINDS, NVME, TIERS

COSTS = {
    ("activations", "recompute"): 33,
    ("activation_offload", HOST): 10,
    ("state", HOST): 15,
    ("gradients", HOST): 5,
    ("parameters", HOST): 25,
    ("state", NVME): 200,
    ("gradients", NVME): 250,
    ("parameters", NVME): 300,
    ("activation_offload", NVME): 350,
    ("micro-batch", "halved"): 8,
    ("stage", "next"): 1,  # each further entry of STAGES
    ("accumulation", "unit"): 3,
}
"""What a choice adds; see the top of this file. What is not listed adds nothing."""

STAGES = ((2, True), (3, False), (3, True))
"""(stage, reshard_after_forward), from fast to small: gathered once a step, once a micro-batch, twice a micro-batch."""


MOST_MICRO_BATCHES = 16
"""Divisors of a step that are tried: a step of short sequences has hundreds."""


def order(limits: Limits, asked: Strategy, sequences: int, preferred: int) -> Iterator[Strategy]:
    """Yield the strategies that are possible, cheapest first; nothing is left to "auto" in them.

    Args:
        limits: what may be used.
        asked: what the user decided; "auto" leaves it to the plan.
        sequences: sequences of a rank in one optimizer step.
        preferred: the largest micro-batch taken unless one is decided.

    Raises:
        UserError: if there is none, with the reason.
    """
    tiers = [DEVICE] if limits.cpu else [DEVICE, HOST]
    tiers += [NVME] if limits.nvme_bytes else []
    wanted = ((_or(asked.stage, stage), _or(asked.reshard_after_forward, reshard)) for stage, reshard in STAGES)
    stages = dict.fromkeys((stage, reshard or stage < 3) for stage, reshard in wanted)
    choices: dict[str, list[Any]] = {
        "micro_batch": micro_batches(asked, sequences, preferred),
        "stage, reshard": list(stages),
        "activations": _open(asked.activations, ["keep", "recompute"]),
        "accumulate_in": _open(asked.accumulate_in, [STEP, UNIT]),
        **{kind: _open(getattr(asked, kind), tiers) for kind in KINDS},
    }
    found: list[tuple[int, float, Strategy]] = []
    problems = []
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values))
        stage, reshard = chosen.pop("stage, reshard")
        strategy = _settled(replace(asked, stage=stage, reshard_after_forward=reshard, **chosen), limits, sequences)
        problem = strategy.problem(cpu=limits.cpu)
        idle = strategy.activations == "keep" and strategy.activation_offload != DEVICE  # no inputs are kept then
        if idle and problem is None:
            problem = (
                f"activation_offload: {strategy.activation_offload} needs activations: recompute; with keep, autograd holds "
                "the activations of a block on the device"
            )
        pointless = strategy.activations == "recompute" and not reshard and asked.reshard_after_forward == AUTO
        twice = strategy.accumulation == 1 and strategy.accumulate_in == UNIT and asked.accumulate_in == AUTO
        if problem is not None:
            problems.append(problem)
        elif not (pointless or twice):
            further = list(stages).index((stage, reshard)) * COSTS["stage", "next"] / strategy.parts
            found.append((_depth(strategy), further + cost(strategy, preferred), strategy))
    if not found:
        raise UserError(f"the choices contradict each other: {problems[0]}. Change it, or set it to auto")
    yield from (strategy for _, _, strategy in sorted(found, key=lambda each: each[:2]))


def _open(choice: Any, values: list[Any]) -> list[Any]:
    """Return the values to try for a choice: the decided one, or all."""
    return values if choice == AUTO else [choice]


def _or(choice: Any, value: Any) -> Any:
    return value if choice == AUTO else choice


def _settled(strategy: Strategy, limits: Limits, sequences: int) -> Strategy:
    """Return a strategy with what follows from the choices that are made."""
    together = max(sequences // decided(strategy.micro_batch), 1)  # micro-batches of a step
    elsewhere = strategy.state == NVME or (strategy.state == HOST and not limits.cpu)
    caches = strategy.state == NVME and strategy.state_host_bytes != AUTO
    return replace(
        strategy,
        accumulation=together,
        gradient_dtype=_or(strategy.gradient_dtype, FP32 if together > 1 else "compute"),
        update=_or(strategy.update, "deferred" if elsewhere else "now"),
        state_host_bytes=strategy.state_host_bytes if caches else 0,
    )


def micro_batches(asked: Strategy, sequences: int, preferred: int) -> list[int]:
    """Return the micro-batches to try, in sequences: the decided one, or the divisors of a step up to `preferred`."""
    return some_divisors(sequences, preferred) if asked.micro_batch == AUTO else [asked.micro_batch]


def some_divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, the largest first; of more than `MOST_MICRO_BATCHES` that many."""
    root = math.isqrt(number)
    small = [count for count in range(1, min(most, root) + 1) if number % count == 0]
    large = [] if most <= root else [number // count for count in small if root < number // count <= most]
    found = large + small[::-1]
    if len(found) <= MOST_MICRO_BATCHES:
        return found
    spread = range(MOST_MICRO_BATCHES)  # evenly over the divisors, the largest and 1 among them
    return [found[number * (len(found) - 1) // (MOST_MICRO_BATCHES - 1)] for number in spread]


def cost(strategy: Strategy, preferred: int) -> float:
    """Return the sum of `COSTS` of a strategy, its stage aside, a micro-batch.

    Args:
        strategy: the strategy.
        preferred: sequences of the largest micro-batch wanted.
    """
    times = {"state": decided(strategy.accumulation), "parameters": strategy.parts, "gradients": strategy.parts}
    chosen: dict[str, Any] = {kind: getattr(strategy, kind) for kind in KINDS}
    chosen["activations"] = "keep" if strategy.activations == "keep" else "recompute"
    total = sum(COSTS.get((kind, choice), 0) / times.get(kind, 1) for kind, choice in chosen.items())
    total += COSTS["accumulation", "unit"] if strategy.parts > 1 else 0
    return total + round(COSTS["micro-batch", "halved"] * math.log2(max(preferred / decided(strategy.micro_batch), 1)))


def _depth(strategy: Strategy) -> int:
    return max(TIERS.index(getattr(strategy, kind)) for kind in KINDS)


def larger(strategy: Strategy, micro_batch: int) -> Strategy:
    """Return the strategy with another micro-batch, and as many less of them."""
    sequences = decided(strategy.micro_batch) * decided(strategy.accumulation)
    return replace(strategy, micro_batch=micro_batch, accumulation=max(sequences // micro_batch, 1))


def with_adapter(shape: Shape) -> Shape:
    """Return the shape of the same model with only an adapter of rank 16 trained."""

    def frozen(line: Line) -> Line:
        return replace(line, trained=False)

    return replace(
        shape,
        blocks=tuple(tuple(map(frozen, lines)) for lines in shape.blocks),
        roots=tuple(map(frozen, shape.roots)),
        replicated=(*map(frozen, shape.replicated), Line(shape.adapter_numel, shape.itemsize, True)),
        peft=True,
        fresh=False,
    )
