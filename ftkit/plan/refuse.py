"""The refusal: what is needed for which purpose where nothing fits, and the cheapest changes after which something does.

Each way out was tried before it is named. What it costs: some thousand sums of integers for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ftkit.errors import UserError
from ftkit.plan.candidates import order, some_divisors, with_adapter
from ftkit.plan.limits import Limits, Shortage, gib, gib_up, shortages
from ftkit.plan.memory import Memory, memory
from ftkit.plan.shape import Shape
from ftkit.spec.strategy import AUTO, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME


class DoesNotFit(UserError):
    """No strategy fits what is granted. Says what is needed for which purpose, and three ways out.

    Args:
        text: message for the user.
        shortages: shortages of the strategy that comes nearest.
        ways_out: ways out, a sentence each.
    """

    def __init__(self, text: str, shortages: tuple[Shortage, ...] = (), ways_out: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.shortages, self.ways_out = shortages, ways_out

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.shortages, self.ways_out)


def check_disk(taken: Memory, limits: Limits) -> None:
    """Refuse where checkpoints and model do not fit their disk.

    Raises:
        DoesNotFit: with what is needed and free.
    """
    if limits.disk_bytes is not None and taken.checkpoint_bytes > limits.disk_bytes:
        short = Shortage("disk", taken.checkpoint_bytes, limits.disk_bytes, "save")
        raise DoesNotFit(
            f"does not fit: checkpoint disk: {gib(taken.checkpoint_bytes)} GiB needed (checkpoints, one being written, the "
            f"model), {gib(limits.disk_bytes)} GiB free at output.dir. Set output.keep lower, free space, or let "
            "output.dir name another disk",
            (short,),
        )


def refusal(
    shape: Shape,
    limits: Limits,
    wanted: Strategy,
    sequences: int,
    preferred: int,
    passed: list[tuple[Strategy, tuple[Shortage, ...]]],
) -> DoesNotFit:
    """Return the error: the numbers of the strategy that comes nearest, and the cheapest changes after which one fits."""
    # what can leave the device has left it, or the numbers would be of the wrong tier
    strategy, short = min(passed, key=lambda each: (any(s.tier == DEVICE for s in each[1]), max(s.ratio for s in each[1])))
    taken = memory(shape, strategy, cpu=limits.cpu)
    lines = []
    for each in short:
        ranks = limits.ranks(each.tier)
        sizes = sorted(taken.purposes(each.tier, each.phase).items(), key=lambda item: -item[1])
        parts = ", ".join(f"{purpose} {gib(size * ranks)}" for purpose, size in sizes)
        per = " a rank" if each.tier == DEVICE else ""
        where = {DEVICE: DEVICE, HOST: "host memory", NVME: "NVMe"}[each.tier]
        lines.append(
            f"{where}: {gib(each.needed_bytes)} GiB{per} needed to {each.phase} ({parts}), "
            f"{gib(each.granted_bytes)} GiB granted by {limits.name(each.tier)}"
        )
    ways_out = tuple(_ways_out(shape, limits, wanted, sequences, preferred))[:3]
    advice = "; or ".join(ways_out) if ways_out else "use a smaller model"
    tokens = decided(strategy.micro_batch) * shape.sequence_tokens
    text = (
        f"does not fit: {'; '.join(lines)} ({shape.numel / 1e9:.2f}B parameters on {shape.world_size} "
        f"rank{'s' * (shape.world_size > 1)}, {tokens} tokens a micro-batch; {strategy}). "
        f"Ways out: {advice}"
    )
    if limits.cpu and not any("profile" in name for _, name in limits.names):
        text += ". No GPU was found here, so ranks compute in host memory; ftkit plan --hardware NAME plans for others"
    return DoesNotFit(text, short, ways_out)


def _ways_out(shape: Shape, limits: Limits, wanted: Strategy, sequences: int, preferred: int) -> Iterator[str]:
    """Yield changes, the cheapest first, after each of which a strategy fits: it was tried."""

    def fits(shape: Shape, limits: Limits, wanted: Strategy, sequences: int = sequences) -> Strategy | None:
        for strategy in order(limits, wanted, sequences, preferred):
            if not shortages(memory(shape, strategy, cpu=limits.cpu), limits):
                return strategy
        return None

    def needs(tier: str, limits: Limits) -> int | None:
        """Return the bytes of a tier with which some strategy fits."""
        unlimited: dict[str, Any] = {f"{tier}_bytes": 1 << 60}
        open_ = replace(limits, **unlimited)
        least = None
        for strategy in order(open_, wanted, sequences, preferred):
            taken = memory(shape, strategy, cpu=limits.cpu)
            if not shortages(taken, open_):
                needed = taken.peak(tier) * limits.ranks(tier)
                least = needed if least is None else min(least, needed)
        return least

    if wanted.micro_batch != AUTO and wanted.micro_batch > 1:
        for micro in some_divisors(sequences, wanted.micro_batch - 1):
            if fits(shape, limits, replace(wanted, micro_batch=micro)):
                yield f"set engine.micro_batch to {micro} (from {wanted.micro_batch})"
                break
    free = wanted.reopened()
    if wanted != free and (strategy := fits(shape, limits, free)) is not None:
        yield f"leave the choices of engine: to the plan ({strategy} fits)"
    if not limits.nvme_bytes and (size := needs(NVME, limits)):
        yield f"set memory.nvme_dir to a folder with {gib_up(size)} GiB free on each node (to plan with it: memory.nvme_gib)"
    shorter = replace(shape, sequence_tokens=max(shape.sequence_tokens // 2, 1))
    if shorter.sequence_tokens >= 64 and fits(shorter, limits, wanted):
        yield f"set data.sequence_tokens to {shorter.sequence_tokens} (from {shape.sequence_tokens})"
    if limits.nvme_bytes and (size := needs(NVME, limits)) and size > limits.nvme_bytes:
        yield f"let memory.nvme_dir have {gib_up(size)} GiB free on each node"
    if limits.host_bytes is not None and (size := needs(HOST, limits)):
        yield f"grant {gib_up(size)} GiB of host memory (memory.host_gib)"
    if not shape.peft and fits(with_adapter(shape), limits, wanted):
        yield "train an adapter (adapter: {rank: 16})"
    if not limits.cpu and limits.device_bytes is not None and (size := needs(DEVICE, limits)):
        yield f"use GPUs with {gib_up(size)} GiB each (memory.device_gib)"
    yield from _more_ranks(shape, limits, wanted, sequences, fits)


def _more_ranks(
    shape: Shape, limits: Limits, wanted: Strategy, sequences: int, fits: Callable[..., Strategy | None]
) -> Iterator[str]:
    """Yield the number of nodes like this one on which it fits."""
    for nodes in (2, 4, 8):
        more = replace(shape, world_size=shape.world_size * nodes)
        if fits(more, limits, wanted, max(sequences // nodes, 1)):
            yield f"use {nodes} nodes like this one ({more.world_size} ranks)"
            return
