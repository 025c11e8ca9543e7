"""The memory that a run may use on a node, and the shortages of a strategy that needs more."""

from __future__ import annotations

from dataclasses import dataclass

from ftkit.plan.memory import GIB, Memory
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS


@dataclass(frozen=True)
class Limits:
    """Memory that a run may use, in bytes. None: not limited (nvme: there is no such tier)."""

    device_bytes: int | None  # memory of each rank's device
    host_bytes: int | None  # host memory of a node
    nvme_bytes: int | None = None  # NVMe of a node
    disk_bytes: int | None = None  # space for checkpoints, on the disk of `output.dir`
    ranks_per_node: int = 1  # ranks that share host memory and NVMe
    cpu: bool = False  # ranks compute on the host
    nvme_dir: str | None = None  # folder of the NVMe tier on a rank's own node
    names: tuple[tuple[str, str], ...] = ()  # (tier, source of its limit), for messages

    def granted(self, tier: str) -> int | None:
        """Return the limit of a tier: per rank on the device, per node elsewhere."""
        return {DEVICE: self.device_bytes, HOST: self.host_bytes, NVME: self.nvme_bytes or 0}[tier]

    def name(self, tier: str) -> str:
        """Return the source of a tier's limit."""
        return dict(self.names).get(tier, f"memory.{'nvme_dir' if tier == NVME else f'{tier}_gib'}")

    def ranks(self, tier: str) -> int:
        """Return how many ranks share the limit of a tier."""
        return 1 if tier == DEVICE else self.ranks_per_node


@dataclass(frozen=True)
class Shortage:
    """A tier that is too small: bytes needed and granted, in a phase."""

    tier: str
    needed_bytes: int
    granted_bytes: int
    phase: str

    def __str__(self) -> str:
        short = self.needed_bytes - self.granted_bytes
        where = {DEVICE: "device memory", HOST: "host memory", NVME: "NVMe"}[self.tier]
        if self.tier == NVME and not self.granted_bytes:
            return f"{gib(self.needed_bytes)} GiB of NVMe needed, no drive granted"
        return f"{gib(self.needed_bytes)} GiB of {where} needed, {gib(short)} above the limit"


def shortages(taken: Memory, limits: Limits) -> tuple[Shortage, ...]:
    """Return the tiers that are too small for a strategy's memory."""
    found = []
    for tier in TIERS:
        granted, needed = limits.granted(tier), taken.peak(tier) * limits.ranks(tier)
        if granted is not None and needed > granted:
            found.append(Shortage(tier, needed, granted, taken.peak_phase(tier)))
    return tuple(found)


def gib(size_bytes: int) -> str:
    """Return GiB, with two digits below 1 GiB."""
    return f"{size_bytes / GIB:.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.2f}"


def gib_up(size_bytes: int) -> str:
    """Return GiB rounded up, so that a limit of this size is enough."""
    tenths = -(-size_bytes * 10 // GIB)
    return f"{tenths / 10:.1f}"
