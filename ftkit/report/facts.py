"""A run as the files of its folder describe it.

A missing file counts as empty. Text that is no JSON object is skipped, such as a line that a kill cut off. Other values are
used as ftkit wrote them.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder
from ftkit.plan.memory import LABELS
from ftkit.spec.tiers import DEVICE

JUDGED = ("loss", "grad_norm", "eval_loss")
"""Keys of metrics.jsonl whose null stands for NaN or an infinity."""

GOING_ON, ENDED, ENDED_EARLY, FAILED = "running", "finished", "ended early", "failed"


@dataclass(frozen=True)
class Facts:
    """The content of a run's folder at one time."""

    folder: RunFolder
    recipe: str  # its text
    metrics: list[dict[str, Any]]  # lines of metrics.jsonl
    divergences: list[dict[str, Any]]  # lines of divergences.jsonl
    summary: dict[str, Any]  # of summary.json
    standing: dict[str, Any]  # of report.json
    trace: dict[str, Any]  # of trace.json
    is_locked: bool  # whether a run is active in the folder

    @property
    def status(self) -> tuple[str, str]:
        """The run's status, and the reason or ""."""
        status, why = self.standing.get("status"), self.standing.get("why", "")
        if status == GOING_ON and not self.is_locked:
            return ENDED_EARLY, "the run ended without a message: no process has its folder locked"
        if status != GOING_ON and (problem := self.summary.get("problem")):
            return FAILED, problem
        if status is not None:
            return status, why
        return (ENDED, "") if self.summary else (ENDED_EARLY, "no file of the folder says how the run ended")

    @property
    def stopped_early(self) -> str:
        """Sentence about an early stop by `eval.patience`, or ""."""
        return (self.summary.get("stopped_early") or {}).get("text", "")

    def fact(self, key: str) -> Any:
        """Return a value of summary.json, else of report.json."""
        return self.summary.get(key) or self.standing.get(key)

    def points(self, key: str) -> list[tuple[int, float | None]]:
        """Return (step, value) of each line of metrics.jsonl that has a key. A value may be NaN; None is a gap."""
        missing = math.nan if key in JUDGED else None
        return [(line["step"], missing if line[key] is None else line[key]) for line in self.metrics if key in line]

    def known(self, key: str) -> list[float]:
        """Return the values of a key of metrics.jsonl without gaps."""
        return [value for _, value in self.points(key) if value is not None]

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, or {}."""
        return self.fact("plan") or {}

    @property
    def ranks(self) -> int:
        """Number of ranks; 1 if unknown."""
        return self.summary.get("world_size") or self.plan.get("ranks", 1)

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self.summary.get("steps") or max((line["step"] for line in self.metrics), default=0)

    @property
    def tokens(self) -> float | None:
        """Tokens trained on."""
        return self.summary.get("tokens") or max(self.known("tokens"), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the whole run, or of the last logging step."""
        return self.summary.get("tokens_per_second") or next(iter(self.known("tokens_per_second")[::-1]), None)

    def peak_bytes(self, tier: str) -> float | None:
        """Return the measured peak of the fullest rank on a tier. During the run, that of rank 0."""
        ranks = [each[f"{tier}_bytes"] for each in self.summary.get("peaks_per_rank", ())]
        return max(ranks or self.known(f"peak_{tier}_bytes"), default=None)

    def planned_bytes(self, tier: str) -> float:
        """Return the planned peak of a rank on a tier. On the device, torch's allocator only."""
        return sum(size for _, size in self.purposes(tier))

    def purposes(self, tier: str) -> list[tuple[str, float]]:
        """Return a rank's planned bytes on a tier by purpose. Memory outside torch's allocator is not measured: omitted."""
        found, sharing = self._tier(tier)
        outside = "runtime" if tier == DEVICE else None
        sizes = found.get("purposes", {}).items()
        return [(LABELS.get(name, name), size / sharing) for name, size in sizes if size and name != outside]

    def granted_bytes(self, tier: str) -> float | None:
        """Return the bytes granted to a rank on a tier; None without a limit."""
        found, sharing = self._tier(tier)
        granted = found.get("granted_bytes")
        return None if granted is None else granted / sharing

    def _tier(self, tier: str) -> tuple[dict[str, Any], int]:
        """Return a tier of the plan, and the number of ranks that share it."""
        found = self.plan.get("tiers", {}).get(tier, {})
        return found, self.plan["ranks_per_node"] if found.get("per") == "node" else 1

    def losses(self) -> tuple[str, float | None, float | None]:
        """Return the name of the loss, its first and its last value: of held-out rows if there are any.

        The last value may be NaN.
        """
        before, after = (self.summary.get(f"eval_loss_{when}") for when in ("before", "after"))
        if after is not None:
            return "held-out loss", before, after
        name, known = "held-out loss", self.known("eval_loss")
        if not known or (len(known) < 2 and self.status[0] == GOING_ON):
            name, known = "training loss", self.known("loss") or known
        return name, known[0] if known else None, known[-1] if len(known) > 1 else None


def read(folder: RunFolder) -> Facts:
    """Return the present content of a run's folder."""
    return Facts(
        folder=folder,
        recipe=_text(folder.recipe),
        metrics=[line for line in _lines(folder.metrics) if "step" in line],
        divergences=_lines(folder.divergences),
        summary=_parsed(_text(folder.summary)),
        standing=_parsed(_text(folder.standing)),
        trace=_parsed(_text(folder.trace)),
        is_locked=folder.is_locked(),
    )


def read_run(path: Path) -> Facts:
    """Return the content of a folder that a user named.

    Raises:
        UserError: The path is no folder of a run.
    """
    folder = RunFolder(path)
    if not any(each.is_file() for each in (folder.recipe, folder.metrics, folder.summary, folder.standing)):
        names = "recipe.yaml, metrics.jsonl, summary.json or report.json"
        raise UserError(f"{path} has no {names}; name the folder of a run (output.dir of its recipe)")
    return read(folder)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [found for line in _text(path).splitlines() if (found := _parsed(line))]


def _parsed(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    return {}
