"""A model as the plan knows it: flat parameters counted, not allocated. Integers and names only.

[Note: kinds of flat parameters]   those of the engine (`ftkit.engine.core.partition`)

    block       a block's parameters of one dtype, all trained or all frozen: one or two flat parameters per block
    root        one large parameter outside blocks (embedding, head)
    replicated  small parameters outside blocks, and adapters. Their optimizer state is sharded

A flat parameter of N elements on W ranks has shards of S elements (`ftkit.spec.layout`). A gather fills W*S elements.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from ftkit.plan.attention import Attention
from ftkit.spec.layout import SHARD_ALIGNMENT
from ftkit.spec.strategy import FlatKind
from ftkit.spec.update_rules import ADAMW, UpdateRule


@dataclass(frozen=True)
class Flat:
    """One flat parameter.

    Args:
        numel: N, in elements.
        itemsize: Bytes of an element in use.
        trained: It has a gradient and optimizer state.
        coded_numel: Elements of its matrices whose moments can be stored in 8 bits; they come first.
    """

    numel: int
    itemsize: int
    trained: bool
    coded_numel: int = 0

    def shard_numel(self, owners: int) -> int:
        """Return S: elements of one of `owners` shards."""
        return -(-self.numel // (owners * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT

    def padded_numel(self, owners: int) -> int:
        """Return the elements that a gather fills."""
        return owners * self.shard_numel(owners)


@dataclass(frozen=True)
class Placed:
    """A flat parameter with its kind."""

    flat: Flat
    kind: FlatKind


@dataclass(frozen=True)
class Shape:
    """A model and its data.

    Args:
        blocks: The flat parameters of each block.
        roots: Flat parameters of large parameters outside blocks, one each.
        replicated: Flat parameters of small parameters outside blocks, and of adapters.
        hidden: Width between blocks, in elements per token.
        vocabulary: Logits per token. 0 if the model has none.
        block_elements: Elements per token that autograd keeps of the widest block, without its attention scores.
        widest_tensor: Elements of the largest tensor in a block.
        sequence_tokens: Tokens of one sequence.
        itemsize: Bytes of the compute dtype.
        world_size: Number of ranks.
        score_elements: Elements per token kept for each token that it attends to. 0 if attention is fused.
        adapter_numel: Elements of an adapter of rank 16 on all linear layers.
        fresh: Weights are initialised, not read. Their exact values are kept until the first step.
        peft: Adapters are saved, not the whole model.
        checkpoints: Checkpoints kept on disk beside the one being written. None: none are saved.
        chunked_loss: Head and loss are computed together, for a part of the logits at a time.
        attention: Attention of the widest block, if a fused kernel of a GPU computes it. None counts no workspace.
        packed: Rows store several samples, whose boundaries attention gets.
        rule: The update rule, which defines the optimizer state per element.
    """

    blocks: tuple[tuple[Flat, ...], ...]
    roots: tuple[Flat, ...]
    replicated: tuple[Flat, ...]
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
    def groups(self) -> tuple[tuple[tuple[Flat, ...], int], ...]:
        """Distinct blocks, with the number of each. Most models have one or two kinds."""
        return tuple(Counter(self.blocks).items())

    @cached_property
    def counted(self) -> tuple[tuple[Placed, int], ...]:
        """Distinct flat parameters with their kinds, and the number of each."""
        found: Counter[Placed] = Counter()
        for flats, count in self.groups:
            for flat in flats:
                found[Placed(flat, "block")] += count
        found.update(Placed(flat, "root") for flat in self.roots)
        found.update(Placed(flat, "replicated") for flat in self.replicated)
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
    def head(self) -> list[Flat]:
        """The root parameter that the loss reads. Empty if there is no wide one."""
        return [self.roots[number] for number in self._wide_roots[-1:]]

    @property
    def embedding(self) -> list[Flat]:
        """The root parameters that are read before the first block, a tied head included."""
        return [flat for number, flat in enumerate(self.roots) if self.tied or number not in self._wide_roots[-1:]]

    def frozen(self) -> Shape:
        """Return the same model without gradients and optimizer state."""
        blocks, roots, replicated = tuple(map(_frozen, self.blocks)), _frozen(self.roots), _frozen(self.replicated)
        return replace(self, blocks=blocks, roots=roots, replicated=replicated, fresh=False)

    @cached_property
    def numel(self) -> int:
        """All parameters."""
        return sum(placed.flat.numel * count for placed, count in self.counted)

    @cached_property
    def trained_numel(self) -> int:
        """Parameters with gradient and optimizer state."""
        return sum(placed.flat.numel * count for placed, count in self.counted if placed.flat.trained)


def _frozen(flats: tuple[Flat, ...]) -> tuple[Flat, ...]:
    return tuple(replace(flat, trained=False) for flat in flats)
