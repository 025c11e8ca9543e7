"""Choose the faults of a run that has a time limit: the changed ones first, then a part that rotates with the commits.

`green.json` records the last commit at which every fault turned a test red, and the seconds that each took. A fault has
changed if the file that it breaks, the file of one of its tests or its own text has changed since. The rest is taken in a
rotating order: its start depends on the number of commits, so successive commits cover all of it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path

from tests.mutants.fault import Fault

RECORD = Path(__file__).with_name("green.json")
STRIDE = 7
"""Faults by which the rotating part advances with each commit; a session makes dozens of commits, and few of them run."""


@dataclass(frozen=True)
class Green:
    """The last run in which every fault turned a test red.

    Args:
        commit: the full hash of the commit that was tested.
        faults: digest of each fault's text, by its name.
        seconds: duration of each fault, by its name.
    """

    commit: str
    faults: dict[str, str]
    seconds: dict[str, float]

    @classmethod
    def read(cls, path: Path = RECORD) -> Green | None:
        """Return the record, or None if there is none."""
        if not path.exists():
            return None
        record = json.loads(path.read_text())
        return cls(record["commit"], record["faults"], record["seconds"])

    def write(self, path: Path = RECORD) -> None:
        """Write the record with today's date."""
        record = {"commit": self.commit, "date": datetime.now(timezone.utc).date().isoformat()}
        record |= {"faults": self.faults, "seconds": self.seconds}
        path.write_text(json.dumps(record, indent=1) + "\n")


def digest(fault: Fault) -> str:
    """Return a digest of a fault's edits and tests."""
    return sha256(repr((fault.edits, fault.tests)).encode()).hexdigest()[:16]


def files_of(fault: Fault) -> set[str]:
    """Return the files that decide whether a fault is caught: those that it breaks and those of its tests."""
    return {name for name, _, _ in fault.edits} | {test.partition("::")[0] for test in fault.tests}


def in_order(
    faults: Sequence[Fault], green: Green | None, changed_files: set[str] | None, commits: int
) -> tuple[list[Fault], int]:
    """Return all faults in the order in which a limited run takes them, and how many of them have changed.

    Args:
        faults: all committed faults.
        green: the last green run; None means that every fault counts as changed.
        changed_files: files changed since that run's commit; None if that commit is unknown, which changes everything.
        commits: the number of commits up to now.
    """

    def has_changed(fault: Fault) -> bool:
        if green is None or changed_files is None or green.faults.get(fault.name) != digest(fault):
            return True
        return bool(files_of(fault) & changed_files)

    changed = [fault for fault in faults if has_changed(fault)]
    others = [fault for fault in faults if not has_changed(fault)]
    return rotated(changed, commits) + rotated(others, commits), len(changed)


def rotated(faults: list[Fault], commits: int) -> list[Fault]:
    """Return the faults from the one whose turn it is, around to the one before it."""
    start = commits * STRIDE % len(faults) if faults else 0
    return faults[start:] + faults[:start]


def git(folder: Path, *words: str) -> str | None:
    """Return what git prints, or None if it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def changed_since(folder: Path, commit: str) -> set[str] | None:
    """Return the tracked files that differ from a commit, uncommitted edits included; None if git does not know it."""
    names = git(folder, "diff", "--name-only", commit)
    return None if names is None else set(names.splitlines())


def commits_of(folder: Path) -> int:
    """Return the number of commits up to now, 0 outside a repository."""
    return int(git(folder, "rev-list", "--count", "HEAD") or 0)
