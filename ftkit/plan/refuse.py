"""The error if nothing fits: the bytes needed for each purpose, and the cheapest changes after which a strategy fits.

Each change was planned before it is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from ftkit.errors import UserError
from ftkit.plan.candidates import Request, in_8_bits, some_divisors, with_adapter
from ftkit.plan.limits import Limits, Shortage, gib, gib_up
from ftkit.plan.memory import LABELS, Memory
from ftkit.plan.state import states_bytes
from ftkit.spec.strategy import AUTO, SPLIT, Strategy, decided
from ftkit.spec.tiers import DEVICE, HOST, NVME


class DoesNotFit(UserError):
    """No strategy fits. `shortages` are those of the strategy that comes nearest."""

    def __init__(self, text: str, shortages: tuple[Shortage, ...] = ()) -> None:
        super().__init__(text)
        self.shortages = shortages


def check_disk(taken: Memory, limits: Limits) -> None:
    """Raise DoesNotFit if checkpoints and model do not fit their disk."""
    if limits.disk_bytes is not None and taken.checkpoint_bytes > limits.disk_bytes:
        short = Shortage("disk", taken.checkpoint_bytes, limits.disk_bytes, "save")
        raise DoesNotFit(
            f"does not fit: checkpoint disk: {gib(taken.checkpoint_bytes)} GiB needed (checkpoints, one being written, the "
            f"model), {gib(limits.disk_bytes)} GiB free at output.dir. Set output.keep lower, free space, or let "
            "output.dir name another disk",
            (short,),
        )


def refusal(asked: Request, passed: Sequence[tuple[Strategy, tuple[Shortage, ...]]]) -> DoesNotFit:
    """Return the error for a request that no strategy fits, of all possible strategies with their shortages."""
    shape, limits = asked.shape, asked.limits

    # Strategies that use the device least come first, because the numbers of others would blame the wrong tier.
    def distance(each: tuple[Strategy, tuple[Shortage, ...]]) -> tuple[bool, float]:
        ratios = [short.needed_bytes / max(short.granted_bytes, 1) for short in each[1]]
        return any(short.tier == DEVICE for short in each[1]), max(ratios)

    strategy, short = min(passed, key=distance)
    taken = asked.memory(strategy)
    tiers = []
    for each in short:
        ranks = limits.ranks(each.tier)
        sizes = sorted(taken.purposes(each.tier, each.phase).items(), key=lambda item: -item[1])
        parts = ", ".join(f"{LABELS.get(purpose, purpose)} {gib(size * ranks)}" for purpose, size in sizes)
        per = " per rank" if each.tier == DEVICE else ""
        where = {DEVICE: DEVICE, HOST: "host memory", NVME: "NVMe"}[each.tier]
        tiers.append(
            f"{where}: {gib(each.needed_bytes)} GiB{per} needed to {each.phase} ({parts}), "
            f"{gib(each.granted_bytes)} GiB granted by {limits.name(each.tier)}"
        )
    here = " this machine, which has no GPU" if limits.cpu and not any("profile" in name for _, name in limits.names) else ""
    options = "; or ".join(islice(_options(asked, strategy), 3)) or "use a smaller model"
    tokens = decided(strategy.micro_batch) * shape.sequence_tokens
    text = (
        f"does not fit{here}: {'; '.join(tiers)} ({shape.numel / 1e9:.2f}B parameters on {shape.world_size} "
        f"rank{'s' * (shape.world_size > 1)}, {tokens} tokens per micro-batch; {strategy}). "
        f"Options: {options}"
    )
    if here:
        text += ". To plan for another machine: ftkit plan --hardware NAME"
    return DoesNotFit(text, short)


def _options(asked: Request, nearest: Strategy) -> Iterator[str]:
    """Yield changes after each of which a strategy fits, the cheapest first. `nearest` comes nearest without one."""
    shape, limits, wanted = asked.shape, asked.limits, asked.wanted
    if wanted.micro_batch != AUTO and wanted.micro_batch > 1:
        for micro in some_divisors(asked.sequences, wanted.micro_batch - 1):
            if replace(asked, wanted=replace(wanted, micro_batch=micro)).first_fit():
                yield f"set engine.micro_batch to {micro} (from {wanted.micro_batch})"
                break
    free = wanted.reopened()
    if wanted != free and (strategy := replace(asked, wanted=free).first_fit()) is not None:
        yield f"leave the choices of engine: to the plan ({strategy} fits)"
    if (size := _needed(asked, NVME)) and size > (limits.nvme_bytes or 0):
        yield f"set memory.nvme_dir to a folder with {gib_up(size)} GiB free on each node (to plan with it: memory.nvme_gib)"
    yield from islice(_smaller_states(asked, nearest), 1)
    shorter = replace(shape, sequence_tokens=max(shape.sequence_tokens // 2, 1))
    if shorter.sequence_tokens >= 64 and replace(asked, shape=shorter).first_fit():
        yield f"set data.sequence_tokens to {shorter.sequence_tokens} (from {shape.sequence_tokens})"
    if limits.host_bytes is not None and (size := _needed(asked, HOST)):
        yield f"grant {gib_up(size)} GiB of host memory (memory.host_gib)"
    if not shape.peft and replace(asked, shape=with_adapter(shape)).first_fit():
        yield "train an adapter (adapter: {rank: 16})"
    if not limits.cpu and limits.device_bytes is not None and (size := _needed(asked, DEVICE)):
        yield f"use GPUs with {gib_up(size)} GiB each (memory.device_gib)"


def _smaller_states(asked: Request, nearest: Strategy) -> Iterator[str]:
    """Yield smaller forms of the optimizer state with which a strategy fits, the nearest form first."""
    coded = in_8_bits(asked.shape)
    forms = [(coded, asked.wanted.master)] if coded else []
    if asked.wanted.master != SPLIT and asked.shape.itemsize == 2:
        forms.append((coded or asked.shape, SPLIT))
    for shape, master in forms:
        other = replace(asked, shape=shape, wanted=replace(asked.wanted, master=master))
        with suppress(UserError):  # a split master contradicts weights that the user placed elsewhere
            if (strategy := other.first_fit()) is not None:
                before = states_bytes(asked.shape, nearest, cpu=asked.limits.cpu)
                after = states_bytes(shape, strategy, cpu=asked.limits.cpu)
                changes = [f"optimizer.name to {shape.rule.name}"] * (shape.rule != asked.shape.rule)
                changes += ["optimizer.master to split"] * (master != asked.wanted.master)
                yield f"set {' and '.join(changes)} ({gib(after)} GiB of state instead of {gib(before)})"


def _needed(asked: Request, tier: str) -> int | None:
    """Return the smallest limit of a tier with which some strategy fits."""
    unlimited: dict[str, Any] = {f"{tier}_bytes": 1 << 60}
    opened = replace(asked, limits=replace(asked.limits, **unlimited))
    peaks = [opened.memory(strategy).peak(tier) for strategy in opened.order() if not opened.short(strategy)]
    return min(peaks) * asked.limits.ranks(tier) if peaks else None
