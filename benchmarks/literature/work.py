"""A published run as numbers: the GPT that was trained, and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftkit.plan.speed import Rates
from ftkit.spec.update_rules import ADAMW

HALF = 2
"""Bytes of an element in fp16."""


@dataclass(frozen=True)
class Work:
    """A GPT, and one step of one rank.

    Args:
        layers: Number of blocks.
        hidden: Hidden size.
        sequences: Sequences of a rank in a step, one micro-batch.
        gpus: Number of all GPUs.
        sequence_tokens: Tokens of one sequence.
        vocabulary: Size of the vocabulary, padded.
        has_head: Whether the head's product over the vocabulary is computed.
        heads: Number of attention heads.
    """

    layers: int
    hidden: int
    sequences: int
    gpus: int
    sequence_tokens: int = 1024
    vocabulary: int = 50304
    has_head: bool = True
    heads: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.sequences * self.sequence_tokens

    @property
    def block(self) -> float:
        """Elements of one block: four matrices of attention, two of the MLP, biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def outside(self) -> float:
        """Elements of the embeddings. The head is tied."""
        return (self.vocabulary + self.sequence_tokens) * self.hidden

    @property
    def numel(self) -> float:
        """Elements of the model."""
        return self.layers * self.block + self.outside

    @property
    def pass_operations(self) -> float:
        """Operations of one block's forward."""
        return self.tokens * (2 * self.block + 4 * self.sequence_tokens * self.hidden)

    @property
    def head_operations(self) -> float:
        """Operations of the head's one product."""
        return 2.0 * self.tokens * self.vocabulary * self.hidden if self.has_head else 0.0

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of one block's saved input."""
        return HALF * self.tokens * self.hidden

    def counted(self, convention: str) -> float:
        """Return the operations of a rank that a publication divides by seconds.

        Args:
            convention: "8N": 8 operations per parameter and token, embeddings included, attention not (DeepSpeed's examples,
                PatrickStar, BigScience). "megatron": 96 B s l h^2 (1 + s / 6h + V / 16lh) (arXiv:2104.04473).
        """
        if convention == "8N":
            return 8 * self.numel * self.tokens
        assert convention == "megatron", convention
        share = 1 + self.sequence_tokens / (6 * self.hidden) + self.vocabulary / (16 * self.layers * self.hidden)
        return 96 * self.tokens * self.layers * self.hidden**2 * share


@dataclass(frozen=True)
class Machine:
    """Constants of a machine, per second.

    Args:
        gpus: GPUs of a node.
        compute: Operations of a GPU, by hidden size.
        link: Bytes of a collective in a node (bus bandwidth).
        pcie: Bytes in each direction of one GPU alone.
        pcie_node: Bytes in each direction of all GPUs of a node together.
        pageable: Bytes of a blocking copy between a GPU and memory that is not pinned.
        adam: Elements that Adam updates on a whole host.
        network: Bytes of one ring between nodes. 0 for a single node.
        nvme: Bytes of a node, reads and writes mixed. 0 without NVMe.
        thread: Bytes of host memory that one thread streams.
        hbm: Bytes of a GPU's memory.
    """

    gpus: int
    compute: Mapping[int, float]
    link: float
    pcie: float
    pcie_node: float
    pageable: float
    adam: float
    network: float = 0.0
    nvme: float = 0.0
    thread: float = 0.0
    hbm: float = 750e9

    def rates(self, work: Work, *, one_thread: bool = False) -> dict[str, float]:
        """Return the rates of one rank while all ranks of its node work.

        Args:
            work: The model and a rank's step.
            one_thread: Host arithmetic of a rank has one thread, torchrun's default.
        """
        ranks = min(self.gpus, work.gpus)
        dram = self.adam * ADAMW.traffic_bytes / ranks
        found = {
            "compute": Rates(self.compute, self.link, self.pcie, dram, self.hbm).operations(work.hidden),
            "link": min(self.link, self.network) if work.gpus > self.gpus else self.link,
            "lane": self.pcie,  # of a rank that moves data while the others do not
            "up": min(self.pcie, self.pcie_node / ranks),
            "down": min(self.pcie, self.pcie_node / ranks),
            "pageable": min(self.pageable, self.pcie_node / ranks),
            "dram": min(dram, self.thread) if one_thread else dram,
            "hbm": self.hbm,
        }
        return {**found, "nvme": self.nvme / ranks} if self.nvme else found
