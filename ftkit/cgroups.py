"""How much host memory is left before the kernel's OOM killer acts: of the machine, and of each cgroup above this process.

The kernel acts when one of several limits is reached, and the tightest need not be the nearest: a container's, a Slurm
step's, a systemd slice's, or the machine's own memory. `HostMemory.find` looks up once which folders have a say (cgroup v2:
`memory.max`; v1: `memory.limit_in_bytes`; the process's own group and all above it that can be seen), and `read` asks each.
What the kernel can take back at once does not count as used: file cache, and in v2 reclaimable slabs. The machine's own
word for that is MemAvailable. Swap is ignored: a run that swaps is as good as dead.

A file that is missing or strange means that there is no such limit, and a system without /proc has none that this file
knows. Cost: a few small files a reading, about 0.1 ms; nothing is kept between two readings, so that threads may read at
once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MACHINE = "the machine"
# v1 has no word for "no limit": it says the largest number of whole pages below 2**63.
UNLIMITED = 1 << 62


GUARDED_SHARE = 0.03
GUARDED_LEAST_BYTES = 96 << 20
"""Of a limit, and at least: with less left than this the guard saves and ends a run (`memory_guard.SAVE`)."""


def guarded_bytes(limit: int) -> int:
    """Return the bytes of a limit that no run may count on."""
    return max(round(GUARDED_SHARE * limit), GUARDED_LEAST_BYTES)


@dataclass(frozen=True)
class Reading:
    """One limit and what is used of it.

    Args:
        source: `the machine`, or the folder of the cgroup.
        limit: bytes.
        used: bytes that the kernel cannot take back.
    """

    source: str
    limit: int
    used: int

    @property
    def free(self) -> int:
        """Bytes left."""
        return max(0, self.limit - self.used)

    @property
    def usable(self) -> int:
        """Bytes left above the mark at which the guard ends a run: what may be planned with."""
        return max(0, self.free - guarded_bytes(self.limit))


@dataclass(frozen=True)
class Names:
    """What a version of cgroups calls its files, and the lines of memory.stat that the kernel can take back."""

    limit: str
    usage: str
    reclaimable: frozenset[str]


V1 = Names("memory.limit_in_bytes", "memory.usage_in_bytes", frozenset({"total_inactive_file", "total_active_file"}))
V2 = Names("memory.max", "memory.current", frozenset({"inactive_file", "active_file", "slab_reclaimable"}))


@dataclass(frozen=True)
class Group:
    """A memory cgroup.

    Args:
        folder: Where its files are.
        names: Names of the files in its version of cgroups.
    """

    folder: Path
    names: Names

    def read(self) -> Reading | None:
        """Return limit and use, or None where there is no limit."""
        limit = _number(self.folder / self.names.limit)  # v2 says `max` where there is none
        if not limit or limit >= UNLIMITED:
            return None
        usage = _number(self.folder / self.names.usage)
        if usage is None:
            return None
        return Reading(str(self.folder), limit, max(0, usage - self._reclaimable()))

    def _reclaimable(self) -> int:
        lines = (line.split() for line in _text(self.folder / "memory.stat").splitlines())
        return sum(int(line[1]) for line in lines if line[0] in self.names.reclaimable and line[1].isdigit())


@dataclass(frozen=True)
class Machine:
    """The memory of the whole machine.

    Args:
        path: Path of meminfo.
    """

    path: Path

    def read(self) -> Reading | None:
        """Return total and used memory, or None where the kernel does not say."""
        said = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _text(self.path), re.MULTILINE))
        if len(said) < 2:
            return None
        total, available = 1024 * int(said["MemTotal"]), 1024 * int(said["MemAvailable"])
        return Reading(MACHINE, total, total - available) if total else None


@dataclass(frozen=True)
class HostMemory:
    """The limits above this process.

    Args:
        places: Cgroups, the nearest first, then the machine.
    """

    places: tuple[Group | Machine, ...]

    @classmethod
    def find(cls, root: Path = Path("/")) -> HostMemory:
        """Look up the limits of the calling process.

        Args:
            root: Where /proc and /sys are; another one in tests.
        """
        return cls((*_groups(root), Machine(root / "proc/meminfo")))

    def read(self) -> list[Reading]:
        """Return what each limit says now. Cost: about 0.1 ms."""
        return [reading for place in self.places if (reading := place.read()) is not None]


def _groups(root: Path) -> Iterator[Group]:
    """Yield the cgroups of the process and those above it, as far as they are mounted here."""
    own = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for mount_root, mount_point, names in _mounts(root):
        for number, controllers, path in own:
            if number == "0" if names is V2 else "memory" in controllers.split(","):
                yield from _above(root / mount_point.lstrip("/"), mount_root, path, names)


def _mounts(root: Path) -> Iterator[tuple[str, str, Names]]:
    """Yield (root of the mount, mount point, names) of the cgroup file systems that may hold memory limits."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield _unescaped(fields[3]), _unescaped(fields[4]), V2
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _unescaped(fields[3]), _unescaped(fields[4]), V1


def _above(mount: Path, mount_root: str, path: str, names: Names) -> Iterator[Group]:
    """Yield the group at `path` and those above it, up to the mount; of a path that is not under it, the mount alone."""
    inside = PurePosixPath(path)
    if inside.is_relative_to(mount_root) and ".." not in inside.parts:
        inside = inside.relative_to(mount_root)
    else:  # a container that sees its own group as the root, and is told the path that it has outside
        inside = PurePosixPath()
    for each in (inside, *inside.parents):
        if (mount / each).is_dir():
            yield Group(mount / each, names)


def _unescaped(field: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), field)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
