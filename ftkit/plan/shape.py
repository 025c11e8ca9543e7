"""What the plan knows of a run: a model as lines of elements, and a way to hold it. Integers and names only.

[Note: lines]   as the engine makes them (engine/core/shard.py), counted and not made

    block     a block's parameters of one dtype, all trained or all frozen: one line or two
    leaf      one large parameter outside blocks (embedding, head)
    whole     small parameters outside blocks, and adapters: replicated, their optimizer state sharded

A line of N elements on W ranks has shards of S elements, a multiple of 4096 (spec/layout.py); W*S is what a gather
fills. The plan asks that file for the rounding, so the two cannot differ.

It refuses what the engine refuses: parameters below the device under stage 3, gradients below it under stage 2. What
it costs: the activations of a block are estimated from its linear layers; everything else is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ftkit.plan.attention import Attention
from ftkit.spec.layout import SHARD_ALIGNMENT
from ftkit.spec.tiers import DEVICE, TIERS, Tier
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
    """A line with its place in the model: 'block', 'leaf' or 'whole'."""

    line: Line
    kind: str


@dataclass(frozen=True)
class Shape:
    """A model and what is asked of it.

    Args:
        blocks: for each block its lines.
        leaves: lines of large parameters outside blocks, one each.
        whole: lines of small parameters outside blocks and of adapters, which are replicated.
        hidden: width between blocks, elements a token.
        vocabulary: logits of a token; 0 if the model has none.
        block_elements: a token's elements that autograd keeps of the widest block, without its attention scores.
        widest_tensor: elements of the largest tensor in a block.
        sequence_tokens: tokens of one sequence.
        itemsize: bytes of the compute dtype.
        world_size: number of ranks.
        score_elements: a token's elements kept for each token that it attends to; 0 where attention is fused.
        adapter_numel: elements that an adapter of rank 16 on all linear layers would have.
        gradient_itemsize: bytes of an element of a gradient shard; 0 takes the weights'.
        fresh: weights are initialised, not read: their exact values are kept until the first step.
        peft: whether adapters are saved, not the whole model.
        checkpoints: number of checkpoints kept on disk beside the one being written; None: none are saved.
        chunked_loss: head and loss are made together, a part of the logits at a time (ftkit/hf/models/head.py).
        attention: attention of the widest block, where a fused kernel of a GPU computes it; None counts no workspace.
        packed: rows hold several samples, whose boundaries attention gets.
        rule: the update rule, which says how much state an element has.
    """

    blocks: tuple[tuple[Line, ...], ...]
    leaves: tuple[Line, ...]
    whole: tuple[Line, ...]
    hidden: int
    vocabulary: int
    block_elements: int
    widest_tensor: int
    sequence_tokens: int
    itemsize: int
    world_size: int
    score_elements: int = 0
    adapter_numel: int = 0
    gradient_itemsize: int = 0
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
        found.update(Placed(line, "leaf") for line in self.leaves)
        found.update(Placed(line, "whole") for line in self.whole)
        return tuple(found.items())

    @cached_property
    def numel(self) -> int:
        """All parameters."""
        return sum(placed.line.numel * count for placed, count in self.counted)

    @cached_property
    def trained_numel(self) -> int:
        """Parameters with gradient and state."""
        return sum(placed.line.numel * count for placed, count in self.counted if placed.line.trained)


@dataclass(frozen=True)
class Way:
    """How a model is held and trained; see `ftkit.engine.core.flat_parameter.Policy`.

    Args:
        stage: 0 to 3, as in ZeRO.
        activations: 'recompute' or 'keep'; n: the last n blocks keep their graphs, the others are recomputed.
        weights: at stage 3, 'free' a block's weights after its forward, or 'hold' them until its backward.
        parameters: tier of the weight shards.
        gradients: tier of the gradient shards.
        state: tier of the optimizer state.
        kept: tier of the kept inputs of blocks.
        deferred: the update runs under the next forward.
        parts: micro-batches that pass each block together.
        micro_batch: sequences of a rank in one forward.
        state_host_bytes: bytes of a rank's state that stay in host memory where the state lies on NVMe.
    """

    stage: int = 3
    activations: str | int = "recompute"
    weights: str = "free"
    parameters: Tier = DEVICE
    gradients: Tier = DEVICE
    state: Tier = DEVICE
    kept: Tier = DEVICE
    deferred: bool = False
    parts: int = 1
    micro_batch: int = 1
    state_host_bytes: int = 0

    def problem(self, *, cpu: bool) -> str | None:
        """Say why the engine cannot do this; None if it can.

        Args:
            cpu: the rank's device is the host.
        """
        if self.parameters != DEVICE and self.stage < 3:
            return f"parameters on the {self.parameters} tier need stage 3"
        if self.gradients != DEVICE and self.stage < 2:
            return f"gradients on the {self.gradients} tier need stage 2 or 3"
        if self.activations == "keep" and self.kept != DEVICE:
            return f"activation offload (kept: {self.kept}) requires activation checkpointing, and activations are kept"
        if not cpu and self.state == DEVICE and (self.parameters, self.gradients) != (DEVICE, DEVICE):
            return "optimizer state on the device needs parameters and gradients there"
        return None

    def graphs(self, blocks: int) -> int:
        """Return how many of so many blocks keep their graphs from forward to backward: the last ones."""
        if isinstance(self.activations, int):
            return min(self.activations, blocks)
        return blocks if self.activations == "keep" else 0

    def owners(self, world_size: int) -> int:
        """Return how many ranks share a line: stage 0 replicates."""
        return 1 if self.stage == 0 else world_size

    def resident(self, placed: Placed, world_size: int) -> bool:
        """Whether every rank has the line whole for good."""
        alone = self.owners(world_size) == 1 and self.parameters == DEVICE
        return self.stage < 3 or placed.kind == "whole" or alone

    def reduced_late(self, placed: Placed, world_size: int) -> bool:
        """Whether the line's gradient is reduced at the end of the step, and whole on every rank until then."""
        alone = self.owners(world_size) == 1 and self.gradients == DEVICE
        return self.stage < 2 or placed.kind == "whole" or alone

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"stage {self.stage}"
        if isinstance(self.activations, str):
            yield {"keep": "activations kept", "recompute": "blocks recomputed"}[self.activations]
        else:
            yield f"activations of the last {self.activations} blocks kept, the others recomputed"
        if self.stage == 3:
            yield {"free": "weights freed after use", "hold": "weights held until backward"}[self.weights]
        for tier in TIERS[1:]:
            kinds = [kind for kind in ("parameters", "gradients", "state", "kept") if getattr(self, kind) == tier]
            if kinds:
                yield f"{' and '.join(kinds).replace('kept', 'kept inputs')} on {tier}"
        if self.state_host_bytes:
            yield f"{self.state_host_bytes / 2**30:.1f} GiB of each rank's state cached in host memory"
        if self.parts > 1:
            yield f"{self.parts} micro-batches through each block together"
        if self.deferred:
            yield "update under the next forward"
        yield f"{self.micro_batch} sequence{'s' * (self.micro_batch > 1)} a micro-batch"
