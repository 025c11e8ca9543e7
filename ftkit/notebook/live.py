"""The output of a cell while a run goes on: progress and the curves of loss and gradient norm.

In Jupyter it is one HTML output, replaced in place, with the charts of the report. Elsewhere rank 0 prints its progress.

Cost: a drawing takes milliseconds, and at most a tenth of the time.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

from ftkit.output.run_folder import RunFolder
from ftkit.report.charts import Series, line_chart
from ftkit.report.style import embedded
from ftkit.report.text import escaped
from ftkit.train.callbacks import describe

EVERY_SECONDS = 0.5
REST = 10
"""Pause before the next drawing, in multiples of the time of the last one."""
ROOT = ".ftkit-run"
STYLE = embedded(
    ROOT,
    """
.frame{background:var(--page);color:var(--ink);border:1px solid var(--line);border-radius:10px;padding:12px 14px;
max-width:860px;font:14px/1.5 system-ui,sans-serif}
.head{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin:0 0 6px}
.soft{color:var(--soft);font-size:13px;font-variant-numeric:tabular-nums}
.track{height:6px;border-radius:3px;background:var(--line);overflow:hidden;margin:0 0 10px}
.fill{height:100%;border-radius:3px;background:var(--busy)}
.fill.good{background:var(--good)}
.fill.early{background:var(--bad)}
figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
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
        self.folder = folder
        self.status = ""
        self._due_s = 0.0
        self._handle: Any = None

    def draw(self) -> None:
        """Draw the run, unless the last drawing is recent."""
        if not in_jupyter() or time.monotonic() < self._due_s:
            return
        began, records = time.monotonic(), self._records()
        data = {"text/html": self.html(records), "text/plain": describe(records[-1]) if records else "no step yet"}
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

    def _records(self) -> list[dict[str, Any]]:
        records = []
        with suppress(OSError, ValueError):  # no file yet, or the last line is being written
            for line in self.folder.metrics.read_text().splitlines():
                records.append(json.loads(line))
        return records

    def _steps(self) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads(self.folder.standing.read_text()).get("steps", 0))
        return 0

    def html(self, records: list[dict[str, Any]]) -> str:
        """Return the run as HTML.

        Args:
            records: Lines of metrics.jsonl.
        """

        def points(key: str) -> list[tuple[float, float | None]]:
            return [(each["step"], each[key]) for each in records if key in each]

        step, steps = max((each["step"] for each in records), default=0), self._steps()
        losses = [Series("training", points("loss")), Series("held out", points("eval_loss"), "dots", colour=1)]
        norm = [Series("norm", points("grad_norm"))]
        charts = line_chart("Loss", ("loss", "nats a token"), losses)
        charts += line_chart("Gradient norm", ("norm before clipping", ""), norm, log=True)
        width = f"{100 * step / max(steps, 1):.1f}%"
        parts = [f"step {step:,} of {steps:,}", *(describe(each) for each in records[-1:])]
        head = "".join(f'<span class="soft">{escaped(each)}</span>' for each in parts)
        return (
            f'<div class="{ROOT[1:]}"><style>{STYLE}</style><div class="frame">'
            f'<div class="head"><b>{escaped(self.folder.path.name, 200)}</b>{head}</div>'
            f'<div class="track"><div class="fill {self.status}" style="width:{width}"></div></div>'
            f'<div class="grid-of-charts">{charts}</div></div></div>'
        )
