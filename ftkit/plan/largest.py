"""The largest model of a kind that fits: the same blocks, more of them.

It refuses a model of which not even one block fits, as the plan does. What it costs: some twenty plans without seconds, and
one with them.
"""

from __future__ import annotations

from dataclasses import replace

from ftkit.plan.choice import Asked, Plan
from ftkit.plan.shape import Shape

MOST_BLOCKS = 1 << 14


def largest(asked: Asked) -> Plan:
    """Return the plan of the largest model with these blocks that fits what is granted.

    Raises:
        DoesNotFit: if not even one block does.
    """
    low, high = 1, MOST_BLOCKS
    while low < high:
        middle = (low + high + 1) // 2
        fits = replace(asked, shape=with_blocks(asked.shape, middle)).fits()
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(asked, shape=with_blocks(asked.shape, low)).plan()


def with_blocks(shape: Shape, count: int) -> Shape:
    """Return the shape with so many blocks, in the proportion in which it has kinds of them."""
    known = len(shape.blocks)
    blocks = tuple(shape.blocks[number * known // count] for number in range(count))
    replicated = shape.replicated
    if shape.peft:  # adapters lie outside the blocks' lines, and there is one for each block
        replicated = tuple(
            replace(x, numel=max(x.numel * count // known, 1)) if x.trained else x for x in replicated
        )
    return replace(shape, blocks=blocks, replicated=replicated, adapter_numel=shape.adapter_numel * count // known)
