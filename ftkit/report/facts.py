"""The files of a run's folder, read defensively: a folder may come from anybody.

Links, pipes, devices and huge files are not opened. A file that cannot be read counts as absent, and a line of metrics.jsonl
that is no JSON object is skipped. `Reader` reads only the new lines of metrics.jsonl each time.
"""

from __future__ import annotations

import json
import math
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder
from ftkit.report.text import finite, items, number, record
from ftkit.report.timeline import Timeline, from_chrome
from ftkit.spec.tiers import DEVICE

MOST_FILE_BYTES = 256 << 20
MOST_STEPS = 1e12
"""A line of a later step is skipped."""

KEYS = (
    *("loss", "grad_norm", "learning_rate", "loss_scale", "tokens_per_second", "peak_device_bytes", "peak_host_bytes"),
    *("eval_loss", "eval_accuracy"),
)
JUDGED = ("loss", "grad_norm", "eval_loss")
"""Keys whose null stands for NaN or an infinity."""

GOING_ON, ENDED, ENDED_EARLY, FAILED = "going on", "ended", "ended early", "failed"


@dataclass
class Curves:
    """The numbers of metrics.jsonl: (step, value) of each key in the file's order, the highest step, the last tokens.

    A value may be NaN or infinite; None is a gap.
    """

    points: dict[str, list[tuple[float, float | None]]] = field(default_factory=lambda: {key: [] for key in KEYS})
    step: int = 0
    tokens: float | None = None

    def take(self, line: bytes) -> None:
        """Add one line."""
        content = record(_parsed(line))
        step = finite(content.get("step"))
        if step is None or abs(step) > MOST_STEPS:
            return
        self.step = max(self.step, int(step))
        self.tokens = finite(content.get("tokens")) or self.tokens
        for key in (each for each in KEYS if each in content):
            value = math.nan if content[key] is None and key in JUDGED else number(content[key])
            self.points[key].append((int(step), value))

    def known(self, key: str) -> list[float]:
        """Return the numbers of a key without gaps."""
        return [value for _, value in self.points[key] if value is not None]


@dataclass(frozen=True)
class Facts:
    """A run as its files describe it."""

    folder: RunFolder
    recipe: str  # its text, or ""
    curves: Curves
    divergences: list[dict[str, Any]]
    summary: dict[str, Any]  # of summary.json, or {}
    standing: dict[str, Any]  # of report.json, or {}
    trace: Timeline | None  # of a recorded step
    simulated: Timeline | None  # of the step that the plan simulated
    locked: bool | None  # whether a process has locked the folder; None if unknown

    @property
    def status(self) -> tuple[str, str]:
        """The run's status, and the reason or ""."""
        status, why = self.standing.get("status"), self.standing.get("why")
        if status == GOING_ON and self.locked is False:
            return ENDED_EARLY, "the run ended without a message: no process has its folder locked"
        if status != GOING_ON and isinstance(problem := self.summary.get("problem"), str):
            return FAILED, problem
        if status in (GOING_ON, ENDED, ENDED_EARLY):
            return str(status), why if isinstance(why, str) else ""
        return (ENDED, "") if self.summary else (ENDED_EARLY, "no file of the folder says how the run ended")

    def fact(self, key: str) -> Any:
        """Return a value of report.json, else of summary.json."""
        return self.standing.get(key) or self.summary.get(key)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, or {}."""
        return record(self.standing.get("plan")) or record(self.summary.get("plan"))

    @property
    def ranks(self) -> int:
        """Number of ranks; 1 if unknown."""
        return int(finite(self.summary.get("world_size")) or finite(self.plan.get("ranks")) or 1)

    @property
    def steps(self) -> float:
        """Optimizer steps done."""
        return finite(self.summary.get("steps")) or self.curves.step

    @property
    def tokens(self) -> float | None:
        """Tokens trained on."""
        return finite(self.summary.get("tokens")) or self.curves.tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the whole run, or of the last logging step."""
        last = self.curves.known("tokens_per_second")[-1:] or [math.nan]
        return finite(self.summary.get("tokens_per_second")) or finite(last[0])

    def peak_bytes(self, tier: str) -> float | None:
        """Return the measured peak of the fullest rank on a tier. During the run, that of rank 0."""
        ranks = [finite(record(each).get(f"{tier}_bytes")) for each in items(self.summary.get("peaks_per_rank"))]
        found = [each for each in ranks if each is not None] or self.curves.known(f"peak_{tier}_bytes")
        return finite(max(found, default=None))

    def planned_bytes(self, tier: str) -> float | None:
        """Return the planned peak of a rank on a tier. On the device, torch's allocator only."""
        of_rank = finite(record(self.summary.get("planned_per_rank")).get(f"{tier}_bytes"))
        return of_rank or sum(size for _, size in self.purposes(tier)) or None

    def purposes(self, tier: str) -> list[tuple[str, float]]:
        """Return a rank's planned bytes on a tier by purpose. Memory outside torch's allocator is not measured: omitted."""
        found, sharing = self._tier(tier)
        sizes = [(str(name), finite(size)) for name, size in record(found.get("purposes")).items()]
        outside = "runtime" if tier == DEVICE else None
        return [(name, size / sharing) for name, size in sizes if size is not None and size > 0 and name != outside]

    def granted_bytes(self, tier: str) -> float | None:
        """Return the bytes granted to a rank on a tier; None without a limit."""
        found, sharing = self._tier(tier)
        granted = finite(found.get("granted_bytes"))
        return None if granted is None else granted / sharing

    def _tier(self, tier: str) -> tuple[dict[str, Any], float]:
        """Return a tier of the plan, and the number of ranks that share it."""
        found = record(record(self.plan.get("tiers")).get(tier))
        ranks = finite(self.plan.get("ranks_per_node")) or self.ranks
        return found, max(ranks, 1.0) if found.get("per") == "node" else 1.0

    def losses(self) -> tuple[str, float | None, float | None]:
        """Return the name of the loss, its first and its last value: of held-out rows if there are any.

        The last value may be NaN or infinite.
        """
        before, after = (finite(self.summary.get(f"eval_loss_{when}")) for when in ("before", "after"))
        if after is not None:
            return "held-out loss", before, after
        name, known = "held-out loss", self.curves.known("eval_loss")
        if not known or (len(known) < 2 and self.status[0] == GOING_ON):
            name, known = "training loss", self.curves.known("loss") or known
        return name, known[0] if known else None, known[-1] if len(known) > 1 else None


class Reader:
    """Reads the folder of a run repeatedly."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.curves = Curves()
        self._at = 0
        self._file: int | None = None  # inode: a resume writes a new file

    def read(self, *, locked: bool | None = None) -> Facts:
        """Return the present content of the files."""
        with suppress(OSError):
            self._read_metrics()
        standing = record(_parsed(_read_text(self.folder.standing)))
        divergences = map(_parsed, _read_text(self.folder.divergences).splitlines())
        return Facts(
            self.folder,
            _read_text(self.folder.recipe),
            self.curves,
            [each for each in divergences if isinstance(each, dict)],
            record(_parsed(_read_text(self.folder.summary))),
            standing,
            from_chrome(_parsed(_read_text(self.folder.trace))),
            from_chrome(standing.get("simulated")),
            locked,
        )

    def _read_metrics(self) -> None:
        with _open(self.folder.metrics) as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._at:
                self.curves, self._at, self._file = Curves(), 0, found.st_ino
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._at += len(line)
                self.curves.take(line)


def read(path: Path) -> Facts:
    """Return the content of a run's folder.

    Raises:
        UserError: The path is no folder of a run.
    """
    folder = RunFolder(path)
    if not any(each.is_file() for each in (folder.recipe, folder.metrics, folder.summary, folder.standing)):
        names = "recipe.yaml, metrics.jsonl, summary.json or report.json"
        raise UserError(f"{path} has no {names}; name the folder of a run (output.dir of its recipe)")
    return Reader(folder).read(locked=folder.is_locked())


def _open(path: Path) -> Any:
    """Open a file for reading.

    Raises:
        OSError: The path is a link, a pipe or a device, or the file is larger than any of ftkit's.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_FILE_BYTES:
        os.close(handle)
        raise OSError(f"{path} is no regular file, or too large")
    return os.fdopen(handle, "rb")


def _parsed(line: bytes | str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_text(path: Path) -> str:
    with suppress(OSError), _open(path) as file:
        return str(file.read(), "utf-8", "replace")
    return ""
