"""What a publication says of a run: the GPT that was trained, and the machine, each as the few numbers that a step takes.

It refuses conventions of counting that it does not know. It knows no schedule: peers.py writes those, and published.py reads
the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftkit.plan.speed import Rates
from ftkit.spec.update_rules import ADAMW

HALF = 2
"""Bytes of an element in fp16."""


@dataclass(frozen=True)
class Work:
    """A GPT as the papers have it, and what one step asks of one rank.

    Args:
        layers: number of blocks of the model.
        hidden: hidden size of the model.
        sequences: sequences of a rank in a step, one micro-batch.
        gpus: number of all GPUs.
        sequence_tokens: tokens of one sequence.
        vocabulary: size of the vocabulary, padded.
        model_parallel: ranks that share each layer's matrices.
        has_head: whether the head's product over the vocabulary is computed.
        heads: number of attention heads.
    """

    layers: int
    hidden: int
    sequences: int
    gpus: int
    sequence_tokens: int = 1024
    vocabulary: int = 50304
    model_parallel: int = 1
    has_head: bool = True
    heads: int = 16

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        return self.sequences * self.sequence_tokens

    @property
    def block(self) -> float:
        """Elements of one block on one rank: four matrices of attention, two of the MLP, biases and norms."""
        return (12 * self.hidden**2 + 13 * self.hidden) / self.model_parallel

    @property
    def outside(self) -> float:
        """Elements of embeddings on one rank; the head is tied."""
        return (self.vocabulary + self.sequence_tokens) * self.hidden / self.model_parallel

    @property
    def numel(self) -> float:
        """Elements of one replica's rank."""
        return self.layers * self.block + self.outside

    @property
    def replicas(self) -> int:
        """Ranks that share a line of elements."""
        return self.gpus // self.model_parallel

    @property
    def pass_operations(self) -> float:
        """Operations of one block's forward on a rank."""
        return self.tokens * (2 * self.block + 4 * self.sequence_tokens * self.hidden / self.model_parallel)

    @property
    def head_operations(self) -> float:
        """Operations of the head's one product on a rank."""
        return 2.0 * self.tokens * self.vocabulary * self.hidden / self.model_parallel if self.has_head else 0.0

    @property
    def checkpoint_bytes(self) -> float:
        """Of one block's kept input on a rank."""
        return HALF * self.tokens * self.hidden / self.model_parallel

    def counted(self, convention: str) -> float:
        """Return the operations of a rank that a publication divides by seconds.

        Args:
            convention: "8N": 8 operations a parameter and token, embeddings too, attention not (DeepSpeed's examples,
                PatrickStar, BigScience). "megatron": 96 B s l h^2 (1 + s / 6h + V / 16lh) (arXiv:2104.04473).

        Raises:
            ValueError: for another convention.
        """
        if convention == "8N":
            return 8 * self.numel * self.tokens
        if convention == "megatron":
            s, h, layers = self.sequence_tokens, self.hidden, self.layers
            share = 1 + s / (6 * h) + self.vocabulary / (16 * layers * h)
            return 96 * self.tokens * layers * h**2 * share / self.model_parallel
        raise ValueError(f"no convention {convention!r}: 8N or megatron")


@dataclass(frozen=True)
class Machine:
    """Constants of a machine, per second; one set for all that was measured on it.

    Args:
        gpus: GPUs of a node.
        compute: operations of a GPU, by hidden size.
        link: bytes of a collective in a node (bus bandwidth).
        pcie: bytes each way of one GPU alone.
        pcie_box: bytes each way of all GPUs of a node together.
        pageable: bytes of a blocking copy between a GPU and memory that is not pinned.
        adam: elements that Adam updates on a whole host.
        network: bytes of one ring between nodes; 0 where there is one node.
        nvme: bytes of a node, reads and writes mixed; 0 where there is no NVMe.
        thread: bytes of host memory that one thread streams.
        hbm: bytes of a GPU's memory.
    """

    gpus: int
    compute: Mapping[int, float]
    link: float
    pcie: float
    pcie_box: float
    pageable: float
    adam: float
    network: float = 0.0
    nvme: float = 0.0
    thread: float = 0.0
    hbm: float = 750e9

    def rates(self, work: Work, *, one_thread: bool = False) -> dict[str, float]:
        """Return what one rank has for itself while all of its node work.

        Args:
            work: the model and what a step asks of a rank.
            one_thread: host arithmetic of a rank has one thread, as torchrun's default leaves it.
        """
        ranks = min(self.gpus, work.gpus)
        outside_box = work.gpus > self.gpus
        rings = min(work.model_parallel, ranks)  # that cross a node's edge side by side
        dram = self.adam * ADAMW.traffic_bytes / ranks
        known = {
            "compute": Rates(self.compute, self.link, self.pcie, dram, self.hbm).operations(work.hidden),
            "link": min(self.link, self.network / rings) if outside_box else self.link,
            "lane": self.pcie,  # of a rank that moves while the others do not
            "up": min(self.pcie, self.pcie_box / ranks),
            "down": min(self.pcie, self.pcie_box / ranks),
            "pageable": min(self.pageable, self.pcie_box / ranks),
            "dram": min(dram, self.thread) if one_thread else dram,
            "hbm": self.hbm,
        }
        return {**known, "nvme": self.nvme / ranks} if self.nvme else known
