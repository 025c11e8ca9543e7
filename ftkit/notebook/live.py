"""The output of a cell while a run goes on: progress and the curves of loss and gradient norm.

In Jupyter it is one HTML output, replaced in place, with the charts of the report. Elsewhere rank 0 prints its progress.

Cost: a drawing takes milliseconds, for a run of 20,000 steps 0.7 s, and at most a tenth of the time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ftkit.output.run_folder import RunFolder
from ftkit.report.facts import read
from ftkit.report.page import charts
from ftkit.report.style import embedded
from ftkit.report.text import escaped
from ftkit.train.callbacks import describe

EVERY_SECONDS = 0.5
REST = 10
"""Pause before the next drawing, in multiples of the time of the last one."""
CHARTS = 2
"""Charts of the report that are drawn: loss and gradient norm."""
ROOT = ".ftkit-run"
RULES = ".frame { max-width: 860px; padding-top: 10px; } progress { width: 100%; margin: 6px 0 10px; }"
STYLE = embedded(ROOT, RULES)


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
        self.folder = folder
        self._due_s = 0.0
        self._handle: Any = None

    def draw(self) -> None:
        """Draw the run, unless the last drawing is recent."""
        if not in_jupyter() or time.monotonic() < self._due_s:
            return
        began = time.monotonic()
        data = {"text/html": self.html(), "text/plain": f"the run in {self.folder.path}"}
        if self._handle is None:
            from IPython.display import DisplayHandle  # here: IPython is optional

            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)
        ended = time.monotonic()
        self._due_s = ended + max(EVERY_SECONDS, REST * (ended - began))

    def end(self) -> None:
        """Draw the end of the run, if it was drawn before."""
        self._due_s = 0.0
        if self._handle is not None:
            self.draw()

    def html(self) -> str:
        """Read the files of the run, and return the run as HTML."""
        facts = read(self.folder)
        last: dict[str, Any] = {}
        for line in facts.metrics:  # an evaluation adds to the numbers of its step
            last = {**last, **line} if line["step"] == last.get("step") else line
        step, steps = last.get("step", 0), facts.standing.get("steps", 0)
        numbers = escaped(describe(last)), escaped(facts.stopped_early)
        head = (f"<b>{escaped(self.folder.path.name)}</b>", f"step {step:,} of {steps:,}", *filter(None, numbers))
        return (
            f'<div class="{ROOT[1:]}"><style>{STYLE}</style><div class="frame">{"&#8195;".join(head)}'
            f'<progress value="{step}" max="{max(steps, 1)}"></progress>'
            f'<div class="grid-of-charts">{"".join(charts([("", facts)])[:CHARTS])}</div></div></div>'
        )
