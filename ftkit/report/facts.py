"""What the files of a run's folder say, read so that nothing in them can hurt: they may be anybody's.

It refuses a folder that is none. A line of metrics.jsonl that is no JSON object, or is longer than `MOST_LINE_BYTES`, is
passed over and counted; a JSON file that cannot be read is as good as absent. What it costs: one pass over metrics.jsonl;
of each line a few numbers are kept.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder
from ftkit.report.text import finite, items, number, record
from ftkit.report.timeline import Timeline, from_chrome
from ftkit.spec.tiers import DEVICE

MOST_LINE_BYTES = 1 << 16
MOST_LINES = 2_000_000
MOST_FILE_BYTES = 32 << 20
"""Of a file that is read as a whole."""

KEYS = (
    *("loss", "grad_norm", "learning_rate", "loss_scale", "tokens_per_second", "peak_device_bytes", "peak_host_bytes"),
    *("eval_loss", "eval_accuracy", "eval_perplexity"),
)
JUDGED = ("loss", "grad_norm", "eval_loss")
"""Of which null is a number that JSON has no word for: NaN or an infinity."""

GOING_ON, ENDED, ENDED_EARLY, FAILED = "going on", "ended", "ended early", "failed"


MOST_STEPS = 1e12
"""A line of a later step is no line of a run."""

PER_NODE = ("node",)
"""Marks of a plan's tier that the ranks of a node share; the second is that of plans before 25 Nov 2026."""


@dataclass
class Curves:
    """The numbers of metrics.jsonl.

    Args:
        points: key to (step, value), in the file's order; a value may be NaN or infinite, None is a gap.
        last: the last number of each key.
        step: the highest step so far.
        tokens: the last number of tokens; None where there is none.
        unread: number of lines that could not be used.
    """

    points: dict[str, list[tuple[float, float | None]]] = field(default_factory=lambda: {key: [] for key in KEYS})
    last: dict[str, float] = field(default_factory=dict)
    step: float = 0.0
    tokens: float | None = None
    unread: int = 0

    def take(self, line: bytes) -> None:
        """Take one line."""
        content = _parsed(line) if len(line) <= MOST_LINE_BYTES else None
        step = finite(content.get("step")) if isinstance(content, dict) else None
        if not isinstance(content, dict) or step is None or abs(step) > MOST_STEPS:
            self.unread += 1
            return
        self.step = max(self.step, step)
        self.tokens = finite(content.get("tokens")) or self.tokens
        for key in KEYS:
            if key not in content:
                continue
            value = number(content[key])
            if value is None and content[key] is None and key in JUDGED:
                value = math.nan
            if value is not None:
                self.last[key] = value
            self.points[key].append((step, value))


@dataclass(frozen=True)
class Facts:
    """A run as its files tell it.

    Args:
        folder: folder of the run.
        recipe: text of the recipe, or "".
        curves: numbers of metrics.jsonl.
        divergences: objects of divergences.jsonl.
        summary: the object of summary.json; empty where there is no such file.
        standing: the object of report.json; empty where there is no such file.
        trace: the recorded timeline of a step; None where there is none.
        simulated: the timeline of the step that the plan simulated; None where there is none.
        held: whether a process holds the folder's lock now; None where that was not asked.
    """

    folder: RunFolder
    recipe: str
    curves: Curves
    divergences: list[dict[str, Any]]
    summary: dict[str, Any]
    standing: dict[str, Any]
    trace: Timeline | None
    simulated: Timeline | None
    held: bool | None = None

    @property
    def status(self) -> tuple[str, str]:
        """How the run stands, and a sentence on it, or ""."""
        told, why = self.standing.get("status"), self.standing.get("why")
        why = why if isinstance(why, str) else ""
        if told == GOING_ON and self.held is False:
            return ENDED_EARLY, "it ended without a message: no process has its folder locked"
        if told != GOING_ON and isinstance(problem := self.summary.get("problem"), str):
            return FAILED, problem
        if told in (GOING_ON, ENDED, ENDED_EARLY):
            return str(told), why
        return (ENDED, "") if self.summary else (ENDED_EARLY, "nothing in its folder says how it ended")

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, of report.json or of the summary."""
        return record(self.standing.get("plan")) or record(self.summary.get("plan"))

    @property
    def ranks(self) -> int:
        """How many there were, 1 if nothing says so."""
        return int(finite(self.summary.get("world_size")) or finite(self.plan.get("ranks")) or 1)

    def peak_bytes(self, tier: str) -> float | None:
        """Return the measured peak of the fullest rank on the device or the host; while it goes on, of rank 0."""
        key = f"{tier}_bytes"
        ranks = [finite(record(each).get(key)) for each in items(self.summary.get("peaks_per_rank"))]
        known = [each for each in ranks if each is not None]
        last = finite(self.curves.last.get(f"peak_{key}"))
        return max(known) if known else last

    def planned_bytes(self, tier: str) -> float | None:
        """Return what was planned for a rank there, without what is outside torch's allocator on a device."""
        of_rank = finite(record(self.summary.get("planned_per_rank")).get(f"{tier}_bytes"))
        if of_rank is not None:
            return of_rank
        return sum(size for name, size in self.purposes(tier) if tier != DEVICE or name != "runtime") or None

    def purposes(self, tier: str) -> list[tuple[str, float]]:
        """Return what was planned for a rank on a tier, by purpose."""
        found = record(record(self.plan.get("tiers")).get(tier))
        sharing = 1.0 if found.get("per") not in PER_NODE else max(self._ranks_of_a_node(), 1.0)
        sizes = [(str(name), finite(size)) for name, size in record(found.get("purposes")).items()]
        return [(name, size / sharing) for name, size in sizes if size is not None and size > 0]

    def _ranks_of_a_node(self) -> float:
        return finite(self.plan.get("ranks_per_node")) or finite(self.plan.get("ranks_per_box")) or self.ranks

    def granted_bytes(self, tier: str) -> float | None:
        """Return what was granted to a rank on a tier; None without a limit."""
        found = record(record(self.plan.get("tiers")).get(tier))
        sharing = 1.0 if found.get("per") not in PER_NODE else max(self._ranks_of_a_node(), 1.0)
        granted = finite(found.get("granted_bytes"))
        return None if granted is None else granted / sharing

    def losses(self, *, held_out: bool = True) -> tuple[str, float | None, float | None]:
        """Return what the loss is of, and its first and last value: held-out rows if there are any and they are wanted.

        A value may be NaN or infinite: what a run ended with is not replaced by what it had before.
        """
        before, after = (finite(self.summary.get(f"eval_loss_{when}")) for when in ("before", "after"))
        if held_out and after is not None:
            return "held-out loss", before, after
        for name, key in (("held-out loss", "eval_loss"), ("training loss", "loss"))[not held_out :]:
            known = [value for _, value in self.curves.points[key] if value is not None]
            if known:
                return name, known[0], known[-1] if len(known) > 1 else None
        return "loss", None, None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the whole run, or of the last logging step."""
        return finite(self.summary.get("tokens_per_second")) or finite(self.curves.last.get("tokens_per_second"))


class Reader:
    """Reads a folder again and again, of metrics.jsonl only what is new.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.curves = Curves()
        self._at = 0
        self._file: int | None = None  # which one: a resume writes it anew

    def read(self, *, held: bool | None = None) -> Facts:
        """Return what the files say now."""
        self._read_metrics()
        standing = record(_read_json(self.folder.standing))
        return Facts(
            self.folder,
            _read_text(self.folder.recipe),
            self.curves,
            [each for each in map(_parsed, _read_text(self.folder.divergences).splitlines()) if isinstance(each, dict)],
            record(_read_json(self.folder.summary)),
            standing,
            from_chrome(_read_json(self.folder.trace)),
            from_chrome(standing.get("simulated")),
            held,
        )

    def _read_metrics(self) -> None:
        try:
            with _open(self.folder.metrics) as file:
                told = _identity(file)
                if told[0] != self._file or told[1] < self._at:
                    self.curves, self._at, self._file = Curves(), 0, told[0]
                file.seek(self._at)
                for line in _lines(file):
                    self._at += len(line)
                    self.curves.take(line)
        except OSError:
            pass


def read(path: Path) -> Facts:
    """Return what a run's folder says.

    Raises:
        UserError: It is not a folder of a run.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name the folder of a run (output.dir of its recipe)")
    if not any(each.is_file() for each in (folder.recipe, folder.metrics, folder.summary, folder.standing)):
        raise UserError(
            f"{path} holds none of recipe.yaml, metrics.jsonl and summary.json; name the folder of a run (output.dir of its "
            "recipe)"
        )
    return Reader(folder).read(held=folder.is_locked())


def _open(path: Path) -> Any:
    """Open a regular file for reading.

    Raises:
        OSError: It is a link, a pipe or a device: a folder may be a stranger's.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return os.fdopen(handle, "rb")


def _identity(file: Any) -> tuple[int, int]:
    told = os.fstat(file.fileno())
    return told.st_ino, told.st_size


def _lines(file: Any) -> Iterator[bytes]:
    """Yield whole lines; of one that is too long its pieces, each of which is too long to be taken."""
    for _ in range(MOST_LINES):
        line = file.readline(2 * MOST_LINE_BYTES)
        if not line.endswith(b"\n") and len(line) < 2 * MOST_LINE_BYTES:
            return  # nothing more, or half a line that is being written
        yield line


def _parsed(line: bytes | str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_text(path: Path) -> str:
    try:
        with _open(path) as file:
            return file.read(MOST_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _read_json(path: Path) -> Any:
    return _parsed(_read_text(path))
