"""Rates of one rank's hardware, and the speed of a step at those rates.

`Rates` come from a profile (hardware.yaml) or from measurement (`ftkit measure`). `Speed` is the result of a
simulation (schedule.py). This file needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ftkit.plan.events import Timeline
from ftkit.plan.shape import Shape
from ftkit.spec.strategy import Strategy

STREAMS = {
    "compute": "the GPUs' arithmetic",
    "collectives": "collectives between GPUs",
    "up": "PCIe to the GPUs",
    "down": "PCIe from the GPUs",
    "host update": "the update in host memory",
    "nvme read": "reading state from NVMe",
    "nvme write": "writing state to NVMe",
    "nvme fetch": "reading weights and activations from NVMe",
    "nvme offload": "writing gradients and activations to NVMe",
}
"""Names of streams, and their labels in reports."""


@dataclass(frozen=True)
class Speed:
    """The duration of a step.

    Args:
        seconds: Duration of a step.
        tokens: Tokens of all ranks in a step.
        operations: Operations of a rank in a step, recomputation counted.
        busy: Share of a step during which each stream works.
        timeline: Timeline of the simulated steps.
        step: (start, end) of the last simulated step, in seconds.
        round_s: Seconds of one more round of micro-batches. 0 if the step has fewer than two rounds (three if blocks are
            reduced once per step).
    """

    seconds: float
    tokens: int
    operations: float
    busy: Mapping[str, float]
    timeline: Timeline
    step: tuple[float, float]
    round_s: float = 0.0

    def longer(self, rounds: int, more: int) -> Speed:
        """Return the speed of a step of `rounds` rounds with `more` rounds added. The timeline stays the same."""
        return replace(
            self,
            seconds=self.seconds + more * self.round_s,
            tokens=self.tokens + more * self.tokens // rounds,
            operations=self.operations + more * self.operations / rounds,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """TFLOPS of one GPU. Recomputation and attention are counted (Megatron's convention)."""
        return self.operations / self.seconds / 1e12

    @property
    def binds(self) -> str:
        """The busiest stream."""
        return max(self.busy, key=lambda stream: self.busy[stream])

    def as_dict(self) -> dict[str, object]:
        """Return an object for JSON."""
        return {
            "step_seconds": self.seconds,
            "step_tokens": self.tokens,
            "tokens_per_second": self.tokens_per_s,
            "tflops_per_gpu": self.tflops,
            "binds": self.binds,
            "busy": dict(self.busy),
            "measured": False,
        }


@dataclass(frozen=True)
class Rates:
    """Rates of one rank while all ranks of its node work, per second.

    Args:
        compute: Operations, by hidden size.
        link: Bytes of a collective (bus bandwidth).
        pcie: Bytes in each direction.
        dram: Bytes of host memory.
        hbm: Bytes of device memory.
        nvme_read: Bytes read from NVMe. 0 without a drive.
        nvme_write: Bytes written to NVMe. 0 without a drive.
        collective_s: Latency of a collective, in seconds.
        itemsize: Bytes per element of the arithmetic that `compute` describes.
        in_order: Collectives and device updates alternate with the arithmetic. CPU ranks have no streams.
    """

    compute: Mapping[int, float] = field(hash=False)  # compared, but a dictionary has no hash
    link: float
    pcie: float
    dram: float
    hbm: float
    nvme_read: float = 0.0
    nvme_write: float = 0.0
    collective_s: float = 20e-6
    itemsize: int = 2
    in_order: bool = False

    def operations(self, hidden: int) -> float:
        """Return the rate of matrix products in blocks of a hidden size, interpolated between the known sizes."""
        known = sorted(self.compute)
        below = max((size for size in known if size <= hidden), default=known[0])
        above = min((size for size in known if size >= hidden), default=known[-1])
        share = (hidden - below) / (above - below) if above > below else 0.0
        return self.compute[below] + share * (self.compute[above] - self.compute[below])

    def all(self, hidden: int) -> dict[str, float]:
        """Return the rate of every resource that events use, for a model of a hidden size."""
        rates = {name: getattr(self, name) for name in ("link", "dram", "hbm", "nvme_read", "nvme_write")}
        rates |= {"up": self.pcie, "down": self.pcie, "compute": self.operations(hidden)}
        return {name: rate for name, rate in rates.items() if rate}

    def missing(self, shape: Shape, strategy: Strategy) -> str | None:
        """Return why these rates cannot simulate a step, or None."""
        if shape.itemsize != self.itemsize:
            return f"the rates are of {8 * self.itemsize}-bit arithmetic, and this run computes in {8 * shape.itemsize} bits"
        if not strategy.uses_nvme:
            return None
        if self.in_order:
            return "on CPU ranks a drive's threads and the arithmetic share cores, which is not simulated"
        return None if self.nvme_read else "the rates of the drive are missing"
