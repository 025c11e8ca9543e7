"""Whether a model fits the memory that was granted, and the cheapest way to hold it.

This is the minimal chooser: it adds up what a stage keeps on one rank, what a block's activations take, and the logits,
and takes the first of a short list of ways, from fast to small, that fits. It knows integers only: no torch, no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftkit.errors import UserError

GIB = 1 << 30

ACTIVATION_BYTES_FACTOR = 17
"""Elements that a kept block's graph holds for each token and hidden unit (attention, gated MLP, norms; flash-like
attention). Source: 34 bytes in 16 bit, Korthikanti et al., arXiv:2205.05198, section 4.1, without the s^2 term."""


@dataclass(frozen=True)
class Shape:
    """What the chooser knows of a run.

    Args:
        numel: all parameters. trainable_numel: those with gradients and state. widest_numel: the largest block.
        leaf_numel: the largest parameter outside blocks. blocks: their number. hidden: model width. vocabulary: rows
            of the head, 0 if it has none. tokens: of one micro-batch on one rank. itemsize: bytes of the compute dtype.
        world_size: ranks.
    """

    numel: int
    trainable_numel: int
    widest_numel: int
    leaf_numel: int
    blocks: int
    hidden: int
    vocabulary: int
    tokens: int
    itemsize: int
    world_size: int
    gradient_itemsize: int = 0  # bytes of an element of a gradient that is kept between micro-batches; 0: itemsize


@dataclass(frozen=True)
class Choice:
    """A way to hold the model, and what it is expected to take on one rank, in bytes."""

    stage: int
    activations: str
    weights: str
    expected_bytes: int


WAYS = ((2, "keep", "free"), (3, "keep", "hold"), (3, "keep", "free"), (2, "recompute", "free"), (3, "recompute", "free"))
"""(stage, activations, weights), from fast to small."""


def expected_bytes(shape: Shape, stage: int, activations: str, weights: str) -> int:
    """Return the bytes that one rank needs in training."""
    world, size = shape.world_size, shape.itemsize
    masters = 8 if size == 4 else 12  # bytes a parameter: two moments, and a master where weights are narrower
    share = [1, 1, 1, world][stage]
    total = shape.numel * size // share
    total += shape.trainable_numel * (shape.gradient_itemsize or size) // (world if stage >= 2 else 1)
    total += shape.trainable_numel * masters // (1 if stage == 0 else world)
    if stage == 3:
        held = shape.numel if weights == "hold" else 2 * shape.widest_numel
        total += held * size + 2 * shape.leaf_numel * size
    if stage >= 2:
        total += shape.widest_numel * size + shape.leaf_numel * size
    block = shape.tokens * shape.hidden * size * ACTIVATION_BYTES_FACTOR
    inputs = shape.blocks * shape.tokens * shape.hidden * size
    total += inputs + block * (shape.blocks if activations == "keep" else 1)
    total += shape.tokens * shape.vocabulary * (4 + 2 * size)
    return total


def choose(
    shape: Shape,
    granted_bytes: int,
    *,
    stage: int | None = None,
    activations: str | None = None,
    weights: str | None = None,
) -> Choice:
    """Return the fastest way that fits; what is given is forced.

    Raises:
        UserError: if no way fits, with the numbers of the smallest; a way that is forced whole is not refused.
    """
    ways = [(stage, activations, weights)] if stage is not None and activations and weights else []
    for way in WAYS:
        forced = (way[0] if stage is None else stage, activations or way[1], weights or way[2])
        if forced not in ways:
            ways.append(forced)
    choices = [Choice(s, a, w, expected_bytes(shape, s, a, w)) for s, a, w in ways if s is not None and a and w]
    for choice in choices:
        if choice.expected_bytes <= granted_bytes or len(choices) == 1:
            return choice
    least = min(choices, key=lambda choice: choice.expected_bytes)
    raise UserError(
        f"does not fit: {least.expected_bytes / GIB:.1f} GiB a rank needed at stage {least.stage} with "
        f"{least.activations} ({shape.numel / 1e9:.2f}B parameters on {shape.world_size} ranks, {shape.tokens} tokens a "
        f"micro-batch), {granted_bytes / GIB:.1f} GiB granted. Use more ranks, a smaller micro-batch, an adapter, or "
        "grant more memory (memory.device_gib)"
    )
