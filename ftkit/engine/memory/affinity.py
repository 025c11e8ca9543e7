"""CPU cores of a rank: its own, on the NUMA node of its device, one thread per core.

Without this, every rank of a node starts as many threads as the node has cores, and touches memory from any NUMA node. The
optimizer on the host, which runs at the speed of memory, suffers first. Ranks divide the cores before anything is
allocated; the kernel then places memory on the NUMA node of the thread that first touches it.

[Note: how cores are divided]

    1. Ranks with the same CPU mask share it. A rank with a mask of its own was bound by its launcher (Slurm, mpirun,
       numactl) and stays as it is.
    2. If the ranks' devices cover all NUMA nodes of the mask, a rank takes cores on the NUMA node of its device.
       Otherwise the ranks divide all cores in order, so that none is idle.
    3. A core goes to one rank with all its hardware threads. With less than `LEAST_CORES` per rank nothing is bound: the
       disk and update threads of a rank need a core beside the computation.

The number of threads is the number of cores, unless the user set OMP_NUM_THREADS.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads cores without torch
    from ftkit.engine.comm.communicator import Communicator

OWN_THREADS = "FTKIT_NUM_THREADS"
"""Environment variable with the OMP_NUM_THREADS that ftkit set, as opposed to the user."""

LEAST_CORES = 2
"""Cores per rank below which ranks are not bound."""


@dataclass(frozen=True)
class Core:
    """A physical core: its NUMA node and the CPUs that are its hardware threads."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Affinity:
    """Threads and cores of a rank.

    Args:
        threads: Threads of torch and of the host optimizer.
        cores: Cores on which these threads may run.
        reason: Why the rank is not bound to them; empty if it is.
    """

    threads: int
    cores: tuple[Core, ...]
    reason: str = ""

    @property
    def cpus(self) -> list[int]:
        """CPUs of the cores, sorted."""
        return sorted(cpu for core in self.cores for cpu in core.cpus)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        if self.reason:
            return f"{threads}, not bound: {self.reason}"
        nodes = sorted({core.node for core in self.cores})
        return f"{threads} on {len(self.cores)} cores of NUMA node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def take_cores(comm: Communicator) -> Affinity:
    """Bind this rank to its cores, set torch's number of threads, and return both. A collective."""
    import torch

    from ftkit.engine.comm.shared_stage import machine

    node = None
    if comm.device.type == "cuda":
        card: Any = torch.cuda.get_device_properties(comm.device)  # the stubs lack the PCI ids
        node = node_of_pci(card.pci_domain_id, card.pci_bus_id, card.pci_device_id)
    cores, mask = find_cores(), os.sched_getaffinity(0)
    claims = comm.all((machine(), mask, node))
    here = [rank for rank, (name, _, _) in enumerate(claims) if name == machine()]
    mates = [rank for rank in here if claims[rank][1] == mask]
    if len(here) == 1:
        return Affinity(torch.get_num_threads(), tuple(cores), "alone on this machine")
    if len(mates) == 1:
        own = Affinity(len(cores), tuple(cores), "its launcher chose the cores")
    else:
        own = divide(cores, [claims[rank][2] for rank in mates], mates.index(comm.rank))
    if not own.reason:
        bind(own)
    if _user_set_threads():
        return replace(own, threads=torch.get_num_threads())
    torch.set_num_threads(own.threads)
    return own


def divide(cores: Sequence[Core], nodes: Sequence[int | None], rank: int) -> Affinity:
    """Return the cores of a rank; see [Note: how cores are divided].

    Args:
        cores: Cores that the ranks share, by NUMA node.
        nodes: NUMA node of each rank's device; None if it has none.
        rank: Index of the rank among them.
    """
    mates = list(range(len(nodes)))
    if set(nodes) == {core.node for core in cores}:
        mates = [mate for mate in mates if nodes[mate] == nodes[rank]]
        cores = [core for core in cores if core.node == nodes[rank]]
    if len(cores) < LEAST_CORES * len(mates):
        return Affinity(max(len(cores) // len(mates), 1), tuple(cores), f"less than {LEAST_CORES} cores per rank")
    place = mates.index(rank)
    own = cores[place * len(cores) // len(mates) : (place + 1) * len(cores) // len(mates)]
    return Affinity(len(own), tuple(own))


def find_cores(root: Path = Path("/")) -> list[Core]:
    """Return the physical cores in the CPU mask of this process, by NUMA node."""
    mask = os.sched_getaffinity(0)
    node_of: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node_of |= dict.fromkeys(_numbers(folder / "cpulist"), int(folder.name.removeprefix("node")))
    found: dict[tuple[int, ...], int] = {}
    for cpu in sorted(mask):
        siblings = _numbers(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found[tuple(each for each in siblings if each in mask) or (cpu,)] = node_of.get(cpu, 0)
    return sorted((Core(node, cpus) for cpus, node in found.items()), key=lambda core: (core.node, core.cpus))


def node_of_pci(domain: int, bus: int, device: int, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device, or None if the system does not know it."""
    found = _numbers(root / f"sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node")
    return found[0] if found else None


def bind(affinity: Affinity) -> None:
    """Move every thread of this process to the CPUs. New threads inherit them."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(task.name), affinity.cpus)


def _user_set_threads() -> bool:
    """Return whether the user set OMP_NUM_THREADS. Values of ftkit and torchrun's default of 1 do not count."""
    threads = os.environ.get("OMP_NUM_THREADS")
    of_torchrun = threads == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return threads is not None and threads != os.environ.get(OWN_THREADS) and not of_torchrun


def _numbers(path: Path) -> list[int]:
    """Return the numbers of a kernel list such as 0-3,8; none if the file is missing, empty or -1."""
    with suppress(OSError, ValueError):
        ranges = [part.split("-") for part in path.read_text().strip().split(",")]
        return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]
    return []
