"""The physical cores of a machine, by NUMA node, as Linux tells them.

Where the system does not say, every CPU is a core of its own and all lie on node 0. Cost: a few small files. What
containers grant in CPU time (quotas) is no matter of this file: those are not cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OWN_THREADS = "FTKIT_NUM_THREADS"
"""Environment variable: the OMP_NUM_THREADS that ftkit itself has set, not the user."""


@dataclass(frozen=True)
class Core:
    """A physical core: its NUMA node, and the CPUs that are its hardware threads."""

    node: int
    cpus: tuple[int, ...]


def find_cores(mask: frozenset[int] | None = None, root: Path = Path("/")) -> list[Core]:
    """Return the physical cores of a mask, by node.

    Args:
        mask: CPUs to look at; None takes those that this process may use.
        root: folder in which /sys is; tests give another one.
    """
    mask = own_mask() if mask is None else mask
    node_of = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        for cpu in _numbers(folder / "cpulist"):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    found: dict[tuple[int, ...], int] = {}
    for cpu in sorted(mask):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _numbers(topology / "core_cpus_list") or _numbers(topology / "thread_siblings_list") or [cpu]
        found.setdefault(tuple(each for each in siblings if each in mask) or (cpu,), node_of.get(cpu, 0))
    return sorted((Core(node, cpus) for cpus, node in found.items()), key=lambda core: (core.node, core.cpus))


def own_mask() -> frozenset[int]:
    """Return the CPUs that the threads of this process may use together: OpenMP may have pinned the one that asks."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    mask = set(os.sched_getaffinity(0))
    for task in tasks():
        with suppress(OSError):  # it has ended
            mask |= os.sched_getaffinity(task)
    return frozenset(mask)


def tasks() -> list[int]:
    """Return the numbers of this process's threads."""
    return [int(task.name) for task in Path("/proc/self/task").glob("[0-9]*")]


def node_of_pci(domain: int, bus: int, device: int, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device, None where the system does not say."""
    folder = root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0"
    text = _text(folder / "numa_node")
    return int(text) if text.isdigit() else None  # -1: unknown


def listed(numbers: Sequence[int]) -> str:
    """Return sorted numbers as the kernel lists them: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _numbers(path: Path) -> list[int]:
    """Return the numbers of a list such as 0-3,8; none where the file is missing or strange."""
    found: list[int] = []
    for part in _text(path).split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
