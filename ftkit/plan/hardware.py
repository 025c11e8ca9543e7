"""Profiles of boxes: how many GPUs, and how many GiB of each tier. The figures are in hardware.yaml, each with its source.

It refuses names that are not there, and profiles with other keys than these. What it costs: nothing.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any

import yaml

from ftkit.errors import UserError
from ftkit.plan.memory import GIB
from ftkit.plan.schedule import Rates

DEVICE_RESERVE = (6, 100)
"""Share of a GPU's memory that is never granted: fragments of torch's allocator. Measured on no V100 yet."""

HOST_RESERVE_BYTES = 4 * GIB
"""Of a box, that its system and page cache keep."""


@dataclass(frozen=True)
class Box:
    """A kind of box.

    Args:
        name: of the profile. gpus: 0: ranks compute on the host. device_gib: of each GPU.
        host_gib: of the box; None: this machine's. nvme_gib: of the box. dtype: that its GPUs compute in.
        rates: of links and arithmetic, for a plan in seconds; none: there is no such plan.
    """

    name: str
    gpus: int
    device_gib: float
    host_gib: float | None
    nvme_gib: float
    dtype: str
    rates: dict[str, Any] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """What is granted of each GPU, the reserve taken off."""
        part, whole = DEVICE_RESERVE
        total = int(self.device_gib * GIB)
        return total - total * part // whole

    def rates_of_a_rank(self) -> Rates | None:
        """Return what each GPU has for itself while all of them work; None where the profile does not say.

        Host memory is shared by all; what the profile calls `pcie` and `link` is a GPU's own.
        """
        if not self.rates:
            return None
        told = dict(self.rates)
        ranks = max(self.gpus, 1)
        shared = {name: told.pop(name) / ranks for name in ("dram", "nvme_read", "nvme_write") if name in told}
        return Rates(**told, **shared)

    @property
    def host_bytes(self) -> int | None:
        """What is granted of the host, the reserve taken off."""
        return None if self.host_gib is None else int(self.host_gib * GIB) - HOST_RESERVE_BYTES


def boxes() -> dict[str, Box]:
    """Return the profiles by name."""
    text = (resources.files("ftkit.plan") / "hardware.yaml").read_text(encoding="utf-8")
    known = {each.name for each in fields(Box)}
    found = {}
    for name, values in yaml.safe_load(text).items():
        if name.startswith("."):
            continue  # what several boxes have in common
        if unknown := set(values) - known:
            raise ValueError(f"hardware.yaml: {name} has unknown keys {sorted(unknown)}")
        found[name] = Box(name, **values)
    return found


def box(name: str) -> Box:
    """Return a profile.

    Raises:
        UserError: if there is none of that name, with the nearest one and all of them.
    """
    known = boxes()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}" if near else ""
    raise UserError(f"--hardware: no profile {name!r}{hint}? Known: {', '.join(known)}")
