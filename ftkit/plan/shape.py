"""What the plan knows of a run: a model as lines of elements. Integers and names only.

[Note: lines]   as the engine makes them (engine/core/shard.py), counted and not made

    block     a block's parameters of one dtype, all trained or all frozen: one line or two
    root      one large parameter outside blocks (embedding, head)
    replicated  small parameters outside blocks, and adapters; their optimizer state is sharded

A line of N elements on W ranks has shards of S elements, a multiple of 4096 (spec/layout.py); W*S is what a gather
fills. The plan asks that file for the rounding, so the two cannot differ.

The activations of a block are estimated from its linear layers; everything else is exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ftkit.plan.attention import Attention
from ftkit.spec.layout import SHARD_ALIGNMENT
from ftkit.spec.strategy import FlatKind
from ftkit.spec.update_rules import ADAMW, UpdateRule


@dataclass(frozen=True)
class Line:
    """One flat parameter.

    Args:
        numel: N, elements.
        itemsize: bytes of an element in use.
        trained: whether it has a gradient and state.
    """

    numel: int
    itemsize: int
    trained: bool

    def shard_numel(self, owners: int) -> int:
        """Return S: elements of one of `owners` shards."""
        return -(-self.numel // (owners * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT

    def padded_numel(self, owners: int) -> int:
        """Return what a gather fills, in elements."""
        return owners * self.shard_numel(owners)


@dataclass(frozen=True)
class Placed:
    """A line with its place in the model: 'block', 'root' or 'replicated'."""

    line: Line
    kind: FlatKind


@dataclass(frozen=True)
class Shape:
    """A model and what is asked of it.

    Args:
        blocks: for each block its lines.
        roots: lines of large parameters outside blocks, one each.
        replicated: lines of small parameters outside blocks and of adapters, which are replicated.
        hidden: width between blocks, elements a token.
        vocabulary: logits of a token; 0 if the model has none.
        block_elements: a token's elements that autograd keeps of the widest block, without its attention scores.
        widest_tensor: elements of the largest tensor in a block.
        sequence_tokens: tokens of one sequence.
        itemsize: bytes of the compute dtype.
        world_size: number of ranks.
        score_elements: a token's elements kept for each token that it attends to; 0 where attention is fused.
        adapter_numel: elements that an adapter of rank 16 on all linear layers would have.
        fresh: weights are initialised, not read: their exact values are kept until the first step.
        peft: whether adapters are saved, not the whole model.
        checkpoints: number of checkpoints kept on disk beside the one being written; None: none are saved.
        chunked_loss: head and loss are made together, a part of the logits at a time (ftkit/hf/kernels/head.py).
        attention: attention of the widest block, where a fused kernel of a GPU computes it; None counts no workspace.
        packed: rows hold several samples, whose boundaries attention gets.
        rule: the update rule, which says how much state an element has.
    """

    blocks: tuple[tuple[Line, ...], ...]
    roots: tuple[Line, ...]
    replicated: tuple[Line, ...]
    hidden: int
    vocabulary: int
    block_elements: int
    widest_tensor: int
    sequence_tokens: int
    itemsize: int
    world_size: int
    score_elements: int = 0
    adapter_numel: int = 0
    fresh: bool = False
    peft: bool = False
    checkpoints: int | None = None
    chunked_loss: bool = False
    attention: Attention | None = None
    packed: bool = False
    rule: UpdateRule = ADAMW

    @cached_property
    def groups(self) -> tuple[tuple[tuple[Line, ...], int], ...]:
        """Blocks that are alike, with their number: most models have one or two kinds."""
        return tuple(Counter(self.blocks).items())

    @cached_property
    def counted(self) -> tuple[tuple[Placed, int], ...]:
        """Every line with its kind, and how often there is one like it."""
        found: Counter[Placed] = Counter()
        for lines, count in self.groups:
            for line in lines:
                found[Placed(line, "block")] += count
        found.update(Placed(line, "root") for line in self.roots)
        found.update(Placed(line, "replicated") for line in self.replicated)
        return tuple(found.items())

    @cached_property
    def _wide_roots(self) -> list[int]:
        """Numbers of the root parameters that have a row for each token of the vocabulary."""
        return [number for number, flat in enumerate(self.roots) if flat.numel >= self.vocabulary * self.hidden]

    @property
    def tied(self) -> bool:
        """Whether the head and the embedding are one root parameter."""
        return len(self._wide_roots) == 1

    @property
    def head(self) -> list[Line]:
        """The root parameter that the loss reads; none if there is no wide one."""
        return [self.roots[number] for number in self._wide_roots[-1:]]

    @property
    def embedding(self) -> list[Line]:
        """The root parameters that are read before the first block, a tied head included."""
        return [flat for number, flat in enumerate(self.roots) if self.tied or number not in self._wide_roots[-1:]]

    @cached_property
    def numel(self) -> int:
        """All parameters."""
        return sum(placed.line.numel * count for placed, count in self.counted)

    @cached_property
    def trained_numel(self) -> int:
        """Parameters with gradient and state."""
        return sum(placed.line.numel * count for placed, count in self.counted if placed.line.trained)
