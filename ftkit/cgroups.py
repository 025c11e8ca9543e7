"""Host memory that is left before the kernel's OOM killer acts: of the machine, and of each cgroup above this process.

The kernel acts when one of several limits is reached: of a container, a Slurm step, a systemd slice, or the machine. The
tightest limit need not be the nearest. Memory that the kernel can reclaim at once does not count as used: file cache, and in
cgroup v2 reclaimable slabs. For the machine that is MemAvailable. Swap is ignored. A missing file means no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MACHINE = "the machine"
UNLIMITED = 1 << 62  # v1 has no name for "no limit": it reports the largest number of whole pages below 2**63

GUARDED_SHARE = 0.03
GUARDED_LEAST_BYTES = 96 << 20
"""The guard saves and ends a run if less is free than the larger of this share of a limit and these bytes."""


def guarded_bytes(limit: int) -> int:
    """Return the bytes of a limit that no run may use."""
    return max(round(GUARDED_SHARE * limit), GUARDED_LEAST_BYTES)


@dataclass(frozen=True)
class Reading:
    """One limit and its use, in bytes.

    Args:
        source: `the machine`, or the folder of the cgroup.
        limit: The limit.
        used: Bytes that the kernel cannot reclaim.
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
        """Bytes left above the mark at which the guard ends a run."""
        return max(0, self.free - guarded_bytes(self.limit))


@dataclass(frozen=True)
class Names:
    """Names of a cgroup version's files, and the keys of memory.stat that the kernel can reclaim."""

    limit: str
    usage: str
    reclaimable: frozenset[str]


V1 = Names("memory.limit_in_bytes", "memory.usage_in_bytes", frozenset({"total_inactive_file", "total_active_file"}))
V2 = Names("memory.max", "memory.current", frozenset({"inactive_file", "active_file", "slab_reclaimable"}))


@dataclass(frozen=True)
class HostMemory:
    """The limits above this process.

    Args:
        groups: (folder, names of its files) of each memory cgroup, the nearest first.
        meminfo: Path of /proc/meminfo.
    """

    groups: tuple[tuple[Path, Names], ...]
    meminfo: Path

    @classmethod
    def find(cls, root: Path = Path("/")) -> HostMemory:
        """Look up the limits of the calling process.

        Args:
            root: Folder with /proc and /sys; another one in tests.
        """
        return cls(tuple(_groups(root)), root / "proc/meminfo")

    def read(self) -> list[Reading]:
        """Return the limits and their present use, the machine's last. Cost: about 0.1 ms."""
        readings = [*(_read_group(folder, names) for folder, names in self.groups), _read_machine(self.meminfo)]
        return [reading for reading in readings if reading is not None]


def _read_group(folder: Path, names: Names) -> Reading | None:
    """Return a cgroup's limit and use, or None if there is no limit."""
    limit, usage = _number(folder / names.limit), _number(folder / names.usage)  # v2 says `max` for no limit
    if not limit or limit >= UNLIMITED or usage is None:
        return None
    fields = (line.split() for line in _text(folder / "memory.stat").splitlines())
    reclaimable = sum(int(field[1]) for field in fields if field[0] in names.reclaimable and field[1].isdigit())
    return Reading(str(folder), limit, max(0, usage - reclaimable))


def _read_machine(path: Path) -> Reading | None:
    """Return the machine's total and used memory, or None if the kernel does not report them."""
    found = {name: 1024 * int(kib) for name, kib in re.findall(r"(?m)^(MemTotal|MemAvailable):\s+(\d+) kB", _text(path))}
    return Reading(MACHINE, found["MemTotal"], found["MemTotal"] - found["MemAvailable"]) if len(found) == 2 else None


def _groups(root: Path) -> Iterator[tuple[Path, Names]]:
    """Yield the memory cgroups of the process and those above it, as far as they are mounted."""
    own = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        names = {"cgroup2": V2, "cgroup": V1}.get(kind[0])
        if names is None or (names is V1 and "memory" not in kind[2].split(",")):
            continue
        for number, controllers, path in own:
            if number == "0" if names is V2 else "memory" in controllers.split(","):
                for folder in _above(root / fields[4].lstrip("/"), fields[3], path):
                    yield folder, names


def _above(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    """Yield the folders of the group at `path` and above, up to the mount. Only the mount if the path is not under it."""
    inside = PurePosixPath(path)
    if inside.is_relative_to(mount_root) and ".." not in inside.parts:
        inside = inside.relative_to(mount_root)
    else:  # a container sees its own group as the root, but reads the path that it has outside
        inside = PurePosixPath()
    yield from (mount / each for each in (inside, *inside.parents) if (mount / each).is_dir())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
