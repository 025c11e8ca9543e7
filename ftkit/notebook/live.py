"""The output of a cell while a run goes on: progress and the curves of loss and gradient norm.

In Jupyter it is one HTML output, replaced in place, with the charts of the report. Elsewhere rank 0 prints its progress.

Cost: a drawing takes milliseconds, and at most a tenth of the time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ftkit.output.run_folder import RunFolder
from ftkit.report.facts import Reader
from ftkit.report.page import charts
from ftkit.report.style import embedded
from ftkit.report.text import escaped, finite
from ftkit.train.callbacks import describe

EVERY_SECONDS = 0.5
REST = 10
"""Pause before the next drawing, in multiples of the time of the last one."""
CHARTS = 2
"""Charts of the report that are drawn: loss and gradient norm."""
ROOT = ".ftkit-run"
STYLE = embedded(
    ROOT,
    """
.frame{padding:12px 14px;max-width:860px}
.head{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin:0 0 6px}
.soft{color:var(--soft);font-size:13px;font-variant-numeric:tabular-nums}
.track{height:6px;border-radius:3px;background:var(--line);overflow:hidden;margin:0 0 10px}
.fill{height:100%;border-radius:3px;background:var(--busy)}
.fill.good{background:var(--good)}
.fill.early{background:var(--bad)}
""",
)


def ipython() -> Any:
    """Return the IPython shell of this process, or None."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def in_jupyter() -> bool:
    """Return whether a Jupyter kernel runs this process."""
    return hasattr(ipython(), "kernel")


class LiveRun:
    """Show a run in Jupyter while it goes on; elsewhere do nothing.

    Args:
        folder: Folder of the run. The curves come from its metrics.jsonl.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.reader = folder, Reader(folder)
        self.status = self.numbers = ""
        self._due_s = 0.0
        self._handle: Any = None

    def draw(self) -> None:
        """Draw the run, unless the last drawing is recent."""
        if not in_jupyter() or time.monotonic() < self._due_s:
            return
        began = time.monotonic()
        data = {"text/html": self.html(), "text/plain": self.numbers or "no step yet"}
        if self._handle is None:
            from IPython.display import DisplayHandle  # here: IPython is optional

            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)
        ended = time.monotonic()
        self._due_s = ended + max(EVERY_SECONDS, REST * (ended - began))

    def end(self, status: str) -> None:
        """Draw how it ended: "good" or "early"."""
        self.status, self._due_s = status, 0.0
        if self._handle is not None:
            self.draw()

    def html(self) -> str:
        """Read the files of the run, and return the run as HTML."""
        facts = self.reader.read()
        last = {key: points[-1] for key, points in facts.curves.points.items() if points}
        newest = max((step for step, _ in last.values()), default=0)
        self.numbers = describe({key: value for key, (step, value) in last.items() if step == newest})
        steps = finite(facts.standing.get("steps")) or 0
        width = f"{100 * newest / max(steps, 1):.1f}%"
        parts = [f"step {newest:,.0f} of {steps:,.0f}", self.numbers]
        head = "".join(f'<span class="soft">{escaped(each)}</span>' for each in parts)
        return (
            f'<div class="{ROOT[1:]}"><style>{STYLE}</style><div class="frame">'
            f'<div class="head"><b>{escaped(self.folder.path.name, 200)}</b>{head}</div>'
            f'<div class="track"><div class="fill {self.status}" style="width:{width}"></div></div>'
            f'<div class="grid-of-charts">{"".join(charts([("", facts)])[:CHARTS])}</div></div></div>'
        )
