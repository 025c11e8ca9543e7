"""What the memory guard leaves: guard.json, and the same as text.

    limit       bytes, used, free, and whose it is
    ranks       of this node: process, PSS, the tenants of host memory with their bytes, and what they do not explain
    others      the largest other processes that the same limit covers: name and RSS, never their arguments
    ways_out    what would make the run fit

Tenants are what the engine counts itself; the rest of a rank's PSS is Python and torch with their libraries, activations,
logits, batches and what the allocator keeps. GPU allocations are not counted.

It is made when memory is nearly gone: a process that has ended meanwhile is left out. Cost: a look at every process of
the node, some ten milliseconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ftkit.plan.host_memory import MACHINE
from ftkit.spec.tiers import NVME
from ftkit.train.memory_guard import Alarm

if TYPE_CHECKING:  # the report is also read where torch is not
    from ftkit.engine.model import ShardedModel
    from ftkit.engine.optim.optimizer import ShardedOptimizer

TENANTS = ("parameters", "gradients", "state", "slots", "staging", "activations")
MIB = 1 << 20
SHOWN_RANKS = 8
OTHERS = 5
# Other processes smaller than this share of the limit are not named.
OTHER_SHARE = 0.01


@dataclass(frozen=True)
class Seat:
    """One rank: where it is and what it holds.

    Args:
        rank: Its number.
        host: Name of its node.
        pid: Its process number.
        parent: Process number of what started it.
        step: Optimizer steps done when the tenants were counted.
        tenants: Bytes of host memory by kind, see `TENANTS`.
    """

    rank: int
    host: str
    pid: int
    parent: int
    step: int
    tenants: Mapping[str, int]

    @classmethod
    def own(cls, rank: int, step: int, tenants: Mapping[str, int]) -> Seat:
        """Return the seat of the calling process."""
        return cls(rank, socket.gethostname(), os.getpid(), os.getppid(), step, tenants)


def host_tenants(units: ShardedModel | None, optimizer: ShardedOptimizer | None) -> dict[str, int]:
    """Return the bytes of host memory that the engine holds on this rank, by kind (`TENANTS`).

    Args:
        units: The sharded model, or None before it is sharded.
        optimizer: The optimizer of these units, or None before there is one.

    Cost: a look at every store, no communication.
    """
    if units is None:
        return dict.fromkeys(TENANTS, 0)
    held, arenas = units.state_bytes(), units.tiers.arenas
    held["state"] = optimizer.state_bytes() if optimizer is not None else 0
    computes_here = units.comm.device.type == "cpu"
    tenants = {}
    for kind in ("parameters", "gradients", "state"):
        lies_here = computes_here and units.tiers.tier(kind) != NVME
        tenants[kind] = held[kind] if lies_here else arenas[kind].requested_bytes if kind in arenas else 0
    updating = optimizer.updater.staging_bytes if optimizer is not None else 0
    return {
        **tenants,
        "slots": held["slots"] if computes_here else 0,
        "staging": held["staging"] + updating,
        "activations": units.transfer.activations.host_bytes,
    }


def make_report(alarm: Alarm, seats: Sequence[Seat], *, outcome: str, step: int, checkpoint: Path | None) -> dict[str, Any]:
    """Return what guard.json holds.

    Args:
        alarm: Says which limit is near, and why the guard acts.
        seats: The ranks; those of other nodes are left out.
        outcome: `saved` or `ended`.
        step: Optimizer steps done.
        checkpoint: The checkpoint to continue from, or None.
    """
    host, reading = socket.gethostname(), alarm.reading
    here = [seat for seat in seats if seat.host == host]
    ranks = [_rank(seat) for seat in here]
    others = other_processes(here, reading.source, round(OTHER_SHARE * reading.limit))
    return {
        "outcome": outcome,
        "reason": alarm.reason,
        "step": step,
        "checkpoint": str(checkpoint) if checkpoint is not None else None,
        "host": host,
        "limit": {"source": reading.source, "bytes": reading.limit, "used_bytes": reading.used, "free_bytes": reading.free},
        "ranks": ranks,
        "others": others,
        "ways_out": ways_out(ranks, others, reading.source),
    }


def _rank(seat: Seat) -> dict[str, Any]:
    resident, tenants = _pss(seat.pid), dict(seat.tenants)
    return {
        "rank": seat.rank,
        "pid": seat.pid,
        "counted_at_step": seat.step,
        "pss_bytes": resident,
        "tenants_bytes": tenants,
        "unexplained_bytes": max(0, resident - sum(tenants.values())),
    }


def _pss(pid: int) -> int:
    """Return the resident bytes of a rank. Memory that ranks share counts once among them (PSS)."""
    try:
        info = psutil.Process(pid).memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except psutil.Error:
        return 0


def other_processes(seats: Sequence[Seat], source: str, at_least: int) -> list[dict[str, Any]]:
    """Return the largest processes that are no ranks, at most `OTHERS`: pid, name, rss_bytes, and what they are to the run.

    Args:
        seats: The ranks of this node.
        source: Where the limit comes from: the machine, or a cgroup, of which only its own processes count.
        at_least: Least RSS of a process that is listed, bytes.
    """
    ranks, launchers = {seat.pid: seat.rank for seat in seats}, {seat.parent for seat in seats}
    found = []
    for process in _processes(source):
        with suppress(psutil.Error):
            rss, parent = process.memory_info().rss, process.ppid()
            if process.pid in ranks or rss < at_least:
                continue
            kin = f"started by rank {ranks[parent]}" if parent in ranks else ""
            kin = "the launcher" if process.pid in launchers else kin
            found.append({"pid": process.pid, "name": process.name(), "rss_bytes": rss, "kin": kin})
    return sorted(found, key=lambda each: -each["rss_bytes"])[:OTHERS]


def _processes(source: str) -> Iterable[psutil.Process]:
    if source == MACHINE:
        yield from psutil.process_iter()
        return
    for path in Path(source).rglob("cgroup.procs"):
        with suppress(OSError, ValueError):
            for line in path.read_text().split():
                with suppress(psutil.Error):
                    yield psutil.Process(int(line))


def ways_out(ranks: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], source: str) -> list[str]:
    """Return what would help, most promising first.

    Args:
        ranks: What the report says of each rank; see `make_report`.
        others: What it says of the largest other processes; see `other_processes`.
        source: Where the limit comes from: the machine or a cgroup.
    """

    def total(*kinds: str) -> int:
        return sum(rank["tenants_bytes"].get(kind, 0) for rank in ranks for kind in kinds)

    moved = total("state", "gradients", "parameters", "activations")
    rest = sum(rank["unexplained_bytes"] for rank in ranks)
    foreign = sum(each["rss_bytes"] for each in others if not each["kin"])
    workers = sum(each["rss_bytes"] for each in others if each["kin"].startswith("started by"))
    limit = "use a node with more memory" if source == MACHINE else "raise the limit of the cgroup or container"
    ways = [
        (moved, f"move state, gradients and activations to disk: memory.nvme_dir ({_mib(moved)} of them are in memory)"),
        (rest, "smaller micro-batches or shorter sequences: engine.micro_batch, data.sequence_tokens, engine.activations"),
        (foreign, f"end the other processes under this limit ({_mib(foreign)})"),
        (workers, f"fewer processes that prepare data: data.workers, dataloader_num_workers ({_mib(workers)})"),
        (0, "train an adapter instead of all weights (adapter), or shard over more nodes"),
        (0, limit),
    ]
    certain = [way for size, way in sorted(ways[:4], key=lambda each: -each[0]) if size > 0]
    return [*certain, *(way for _, way in ways[4:])]


def text_of(report: Mapping[str, Any]) -> str:
    """Return a report as a person reads it: one screen."""
    limit = report["limit"]
    whose = limit["source"] if limit["source"] == MACHINE else f"the cgroup {limit['source']}"
    used = f"{_mib(limit['used_bytes'])} of {_mib(limit['bytes'])} are used, {_mib(limit['free_bytes'])} are left"
    lines = [
        f"host memory is running out on {report['host']}: {report['reason']}; the limit is that of {whose}: {used}.",
        _ending(report),
        "",
        *_table(report["ranks"]),
        "",
    ]
    for each in report["others"]:
        kin = f", {each['kin']}" if each["kin"] else ""
        lines.append(f"also there: {each['name']} (pid {each['pid']}{kin}) {_mib(each['rss_bytes'])}")
    return "\n".join([*lines, "ways out:", *(f"  - {way}" for way in report["ways_out"])])


def _ending(report: Mapping[str, Any]) -> str:
    checkpoint, step = report["checkpoint"], report["step"]
    if report["outcome"] == "saved":
        return f"The run saved {checkpoint} after step {step} and ended; --resume auto continues from it."
    lost = "The run was ended at once, before the kernel would have killed it"
    if checkpoint is None:
        return f"{lost}; there is no checkpoint to continue from."
    return f"{lost}, at step {step}; --resume auto continues from {checkpoint}."


def _table(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line a rank; of more than `SHOWN_RANKS` those that use most."""
    heads = ("rank", "PSS", *TENANTS, "unexplained")
    shown = sorted(sorted(ranks, key=lambda rank: -rank["pss_bytes"])[:SHOWN_RANKS], key=lambda rank: rank["rank"])
    rows = [
        (
            str(rank["rank"]),
            _mib(rank["pss_bytes"]),
            *(_mib(rank["tenants_bytes"].get(kind, 0)) for kind in TENANTS),
            _mib(rank["unexplained_bytes"]),
        )
        for rank in shown
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in (heads, *rows)]


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"
