"""Rates of one rank's hardware, and the speed of a step at those rates.

`Rates` come from a profile (hardware.yaml) or from `ftkit measure`. `Speed` is the result of a simulation (schedule.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from ftkit.plan.events import Timeline
from ftkit.plan.shape import Shape
from ftkit.spec.strategy import Strategy

STREAMS = {
    "compute": "GPU compute",
    "collectives": "collectives",
    "up": "host to GPU",
    "down": "GPU to host",
    "host update": "CPU update",
    "nvme read": "reading state from NVMe",
    "nvme write": "writing state to NVMe",
    "nvme fetch": "reading weights and activations from NVMe",
    "nvme offload": "writing gradients and activations to NVMe",
}
"""Names of streams, and their labels in reports."""


@dataclass(frozen=True)
class Speed:
    """The duration of a step."""

    seconds: float  # duration of a step
    tokens: int  # tokens of all ranks in a step
    operations: float  # operations of a rank in a step, recomputation counted
    busy: Mapping[str, float]  # share of a step during which each stream works
    timeline: Timeline  # timeline of the simulated steps
    step: tuple[float, float]  # (start, end) of the last simulated step, in seconds
    round_s: float = 0.0  # seconds of one more round of micro-batches. 0 if the step has too few rounds

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
        }


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Rates:
    """Rates of one rank while all ranks of its node work, per second."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    compute: Annotated[Mapping[int, Rate], Field(min_length=1)] = field(hash=False)  # operations, by hidden size
    link: Rate  # bytes of a collective (bus bandwidth)
    pcie: Rate  # bytes in each direction
    dram: Rate  # bytes of host memory
    hbm: Rate  # bytes of device memory
    nvme_read: Size = 0.0  # bytes read from NVMe. 0 without a drive
    nvme_write: Size = 0.0  # bytes written to NVMe. 0 without a drive
    network: Size = 0.0  # bytes of a collective between nodes. 0 with one node
    collective_s: Size = 20e-6  # latency of a collective, in seconds
    itemsize: int = 2  # bytes per element of the arithmetic that `compute` describes
    in_order: bool = False  # collectives and device updates alternate with the arithmetic. CPU ranks have no streams

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
