"""The memory that a run may use on a node, and where it falls short.

It knows no torch. It refuses nothing: `shortages` says what does not fit, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftkit.plan.memory import GIB, Memory
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS


@dataclass(frozen=True)
class Limits:
    """What may be used. Bytes; None: not limited (nvme: there is no such tier).

    Args:
        device_bytes: memory of each rank's device.
        host_bytes: host memory of a node.
        nvme_bytes: NVMe of a node.
        disk_bytes: room for checkpoints, on the disk of `output.dir`.
        ranks_per_node: ranks that share host and NVMe.
        cpu: whether ranks compute on the host.
        nvme_dir: folder of the NVMe tier on a rank's own node; None where there is none, or the node is another one.
        names: what granted each tier, for messages.
    """

    device_bytes: int | None
    host_bytes: int | None
    nvme_bytes: int | None = None
    disk_bytes: int | None = None
    ranks_per_node: int = 1
    cpu: bool = False
    nvme_dir: str | None = None
    names: tuple[tuple[str, str], ...] = ()

    def granted(self, tier: str) -> int | None:
        """Return what is granted on a tier: per rank on the device, per node elsewhere."""
        return {DEVICE: self.device_bytes, HOST: self.host_bytes, NVME: self.nvme_bytes or 0}[tier]

    def name(self, tier: str) -> str:
        """Return what granted a tier."""
        return dict(self.names).get(tier, f"memory.{'nvme_dir' if tier == NVME else f'{tier}_gib'}")

    def ranks(self, tier: str) -> int:
        """Return how many ranks share what is granted on a tier."""
        return 1 if tier == DEVICE else self.ranks_per_node


@dataclass(frozen=True)
class Shortage:
    """A tier on which something does not fit: bytes needed and granted, in a phase."""

    tier: str
    needed_bytes: int
    granted_bytes: int
    phase: str

    @property
    def ratio(self) -> float:
        """How many times what is granted is needed."""
        return self.needed_bytes / max(self.granted_bytes, 1)

    def __str__(self) -> str:
        short = self.needed_bytes - self.granted_bytes
        where = {DEVICE: "device memory a rank", HOST: "host memory", NVME: "NVMe"}[self.tier]
        if self.tier == NVME and not self.granted_bytes:
            return f"{gib(self.needed_bytes)} GiB of NVMe needed, none granted"
        return f"{where}: {gib(short)} GiB short ({gib(self.needed_bytes)} needed, {gib(self.granted_bytes)} granted)"


def shortages(taken: Memory, limits: Limits) -> tuple[Shortage, ...]:
    """Return the tiers on which a strategy does not fit."""
    found = []
    for tier in TIERS:
        granted, needed = limits.granted(tier), taken.peak(tier) * limits.ranks(tier)
        if granted is not None and needed > granted:
            found.append(Shortage(tier, needed, granted, taken.peak_phase(tier)))
    return tuple(found)


def gib(size_bytes: int) -> str:
    """Return GiB, with two digits where one would say nothing."""
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.2f}"


def gib_up(size_bytes: int) -> str:
    """Return GiB rounded up, so that what is granted by this number fits."""
    tenths = -(-size_bytes * 10 // GIB)
    return f"{tenths / 10:.1f}"
