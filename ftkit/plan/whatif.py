"""What if: plans of the same model with larger GPUs, a drive, 8-bit moments, an adapter, or shorter sequences; the largest.

Questions that do not apply are left out: no larger GPUs than the present ones, no adapter for an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ftkit.plan.candidates import in_8_bits, last_true, with_adapter
from ftkit.plan.catalog import find_hardware
from ftkit.plan.memory import GIB
from ftkit.plan.plan import Asked, Plan
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.shape import Shape

LARGER = "8xv100-32gb"
"""The hardware profile with the GPUs and drives of the questions."""

MOST_BLOCKS = 1 << 14
"""Blocks at which the search for the largest model ends."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a plan, or the reason why there is none."""

    question: str
    plan: Plan | None
    problem: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return an object for JSON."""
        return {"question": self.question, "problem": self.problem, "plan": self.plan and self.plan.as_dict()}


def what_if(asked: Asked) -> Iterator[Answer]:
    """Yield an answer to each question that applies."""
    for question, other in _questions(asked):
        try:
            yield Answer(question, other.plan(next_best=False))
        except DoesNotFit as error:
            yield Answer(question, None, " and ".join(map(str, error.shortages)))


def _questions(asked: Asked) -> Iterator[tuple[str, Asked]]:
    shape, limits, known = asked.shape, asked.limits, find_hardware(LARGER)
    if limits.device_bytes is not None and limits.device_bytes < known.device_bytes:
        yield f"GPUs of {known.device_gib:.0f} GiB", replace(asked, limits=replace(limits, device_bytes=known.device_bytes))
    if not limits.nvme_bytes and not limits.cpu and known.rates is not None:
        size = int(known.nvme_gib * GIB)
        read, write = (rate / limits.ranks_per_node for rate in (known.rates.nvme_read, known.rates.nvme_write))
        rates = None if asked.rates is None else replace(asked.rates, nvme_read=read, nvme_write=write)
        yield f"NVMe of {known.nvme_gib:,.0f} GiB", replace(asked, limits=replace(limits, nvme_bytes=size), rates=rates)
    if (coded := in_8_bits(shape)) is not None:
        yield f"8-bit moments ({coded.rule.name})", replace(asked, shape=coded)
    if not shape.peft:
        yield "LoRA, rank 16 (estimate)", replace(asked, shape=with_adapter(shape))
    half = shape.sequence_tokens // 2
    if half >= 64:
        shorter = replace(shape, sequence_tokens=half)
        yield (
            f"sequences of {half:,}",
            replace(asked, shape=shorter, sequences=2 * asked.sequences, preferred=2 * asked.preferred),
        )


def largest(asked: Asked) -> Plan:
    """Return the plan of the largest model with these blocks that fits, or raise DoesNotFit if one block does not."""

    def fits(count: int) -> bool:
        other = replace(asked, shape=with_blocks(asked.shape, count))
        strategy = other.first_fit()
        disk = asked.limits.disk_bytes
        return strategy is not None and (disk is None or other.memory(strategy).checkpoint_bytes <= disk)

    count = last_true(1, MOST_BLOCKS, fits)
    return replace(asked, shape=with_blocks(asked.shape, count)).plan()


def with_blocks(shape: Shape, count: int) -> Shape:
    """Return the shape with `count` blocks, its kinds of blocks in the same proportion."""
    known = len(shape.blocks)
    blocks = tuple(shape.blocks[number * known // count] for number in range(count))
    replicated = shape.replicated
    if shape.peft:  # adapters are replicated, and each block has one
        replicated = tuple(replace(x, numel=max(x.numel * count // known, 1)) if x.trained else x for x in replicated)
    return replace(shape, blocks=blocks, replicated=replicated, adapter_numel=shape.adapter_numel * count // known)
