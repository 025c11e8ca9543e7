"""Which cores a rank computes on: its own, on the NUMA node of its device, with one thread for each.

Ranks of one machine that are left alone each start as many threads as the machine has cores, on any of them, and touch their
memory from whichever node they happen to be on. The optimizer on the host is the first to feel it: it costs what memory
costs. So the ranks of a machine divide its cores before anything is allocated; memory then comes from the node of the thread
that first touches it, which is the kernel's default.

[Note: how cores are divided]

    1. Ranks with one and the same mask share it; a rank whose mask is its own was bound by its launcher (Slurm, mpirun,
       numactl) and is left alone, as is any rank for which the user told OpenMP where to run.
    2. Where every rank has a device and the devices lie on all of the nodes, a rank goes to the node of its device, and
       the ranks of a node divide its cores.
    3. Else the ranks divide all cores, node after node, so that none is idle.
    4. Cores go whole, with all their hardware threads. With less than `LEAST_CORES` each, ranks stay unbound: a rank's
       disk and update threads must not stand in line behind its computation.

Threads are as many as a rank's cores, unless the user said OMP_NUM_THREADS (torchrun's own default of 1 is not the
user's word). A rank that is alone on its machine is left as it is.

Where the system does not tell or allow, ranks stay unbound, and `str(affinity)` says so. Cost: a few small files, once;
an exchange of a line between ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ftkit.engine.comm.communicator import Communicator, machine
from ftkit.engine.memory.cores import OWN_THREADS, Core, find_cores, listed, node_of_pci, own_mask, tasks

LEAST_CORES = 2
"""Cores below which a rank does not get its own."""

OPENMP_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables with which a user tells OpenMP where threads run."""


@dataclass(frozen=True)
class Claim:
    """What one rank of a machine brings: its present mask, and the node of its device, None where there is none."""

    mask: frozenset[int]
    node: int | None


@dataclass(frozen=True)
class Affinity:
    """Where a rank computes.

    Args:
        threads: number of threads of torch and of the host's optimizer.
        cpus: CPUs on which these threads may run.
        nodes: NUMA nodes of those CPUs.
        binds: whether the rank is to be bound to them.
        reason: a clause that says why the rank is not bound; empty where it is.
    """

    threads: int
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    binds: bool
    reason: str = ""

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        if not self.binds:
            return f"{threads}, not bound: {self.reason}"
        node = f"NUMA node{'s' * (len(self.nodes) > 1)} {listed(self.nodes)}"
        return f"{threads} on CPU{'s' * (len(self.cpus) > 1)} {listed(self.cpus)} of {node}"


def take_cores(comm: Communicator) -> Affinity:
    """Bind this rank to its cores, with a thread for each, and return them. A collective, before anything is allocated."""
    node = None
    if comm.device.type == "cuda":
        card = torch.cuda.get_device_properties(comm.device)
        domain, bus, device = (getattr(card, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
        node = node_of_pci(domain, bus, device) if min(domain, bus, device) >= 0 else None  # an older torch does not say
    told = comm.all((machine(), comm.rank, Claim(own_mask(), node)))
    here = [(rank, claim) for name, rank, claim in told if name == machine()]
    own = divide([claim for _, claim in here], [rank for rank, _ in here].index(comm.rank))
    if said := [name for name in OPENMP_PLACES if name in os.environ]:
        own = replace(own, binds=False, reason=f"{said[0]} says where threads run")
    if own.binds and not bind(own):
        own = replace(own, binds=False, reason="the system refuses")
    if len(here) == 1 or said or threads_are_said(os.environ):
        return replace(own, threads=torch.get_num_threads())
    torch.set_num_threads(own.threads)
    return own


def divide(claims: Sequence[Claim], rank: int, cores: Callable[[frozenset[int]], list[Core]] = find_cores) -> Affinity:
    """Return where a rank computes; see [Note: how cores are divided].

    Args:
        claims: claims of all ranks of this machine, the same list on each rank.
        rank: index of this rank among the claims.
        cores: returns the physical cores of a mask, by node.
    """
    claim = claims[rank]
    mates = [index for index, other in enumerate(claims) if other.mask == claim.mask]
    found = cores(claim.mask)
    if len(mates) == 1:
        reason = f"CPUs {listed(sorted(claim.mask))} from its launcher" if len(claims) > 1 else "alone on this machine"
        return _affinity(found, len(found), reason)
    if {claims[index].node for index in mates} == {core.node for core in found}:
        mates = [index for index in mates if claims[index].node == claim.node]
        found = [core for core in found if core.node == claim.node]
    if len(found) // len(mates) < LEAST_CORES:
        reason = f"{len(mates)} ranks share {len(found)} core{'s' * (len(found) > 1)}"
        return _affinity(found, max(len(found) // len(mates), 1), reason)
    place = mates.index(rank)
    own = found[place * len(found) // len(mates) : (place + 1) * len(found) // len(mates)]
    return _affinity(own, len(own))


def _affinity(cores: Sequence[Core], threads: int, reason: str = "") -> Affinity:
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    return Affinity(threads, cpus, tuple(sorted({core.node for core in cores})), not reason, reason)


def bind(affinity: Affinity) -> bool:
    """Move every thread of this process to its CPUs; return whether the system let it.

    Threads that are started later inherit it, and so do child processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, affinity.cpus)
    except OSError:
        return False
    for task in tasks():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(task, affinity.cpus)
    return True


def threads_are_said(environ: Mapping[str, str]) -> bool:
    """Return whether the user chose the number of threads; what ftkit or torchrun set by itself does not count."""
    said = environ.get("OMP_NUM_THREADS")
    of_torchrun = "TORCHELASTIC_RUN_ID" in environ and int(environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    return said is not None and said != environ.get(OWN_THREADS) and not (said == "1" and of_torchrun)
