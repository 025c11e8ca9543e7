"""What a cell shows while the ranks work: rank 0's output, and of a run its bar and the curves, drawn anew as it goes on.

In Jupyter a run is one output that is replaced in place: HTML with the report's own charts, in the notebook's light or dark.
Elsewhere it is lines of text, and the first one says so.

Cost: a drawing takes milliseconds, and at most a tenth of the time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ftkit.notebook.channel import Message
from ftkit.output.run_folder import RunFolder
from ftkit.report.facts import Reader
from ftkit.report.page import charts
from ftkit.report.style import embedded
from ftkit.report.text import escaped, lasted

EVERY_SECONDS = 0.5
REST = 10
"""Times what a drawing took, until the next."""
PLAIN_LINES = 20
CHARTS = 2
"""Of the report's: the loss and the gradient norm."""

ROOT = ".ftkit-run"
_RULES = """
.box{background:var(--page);color:var(--ink);border:1px solid var(--line);border-radius:10px;padding:12px 14px;
max-width:860px;font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
.head{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin:0 0 6px}
.head b{font-weight:650}
.soft{color:var(--soft);font-size:13px;font-variant-numeric:tabular-nums}
.track{height:6px;border-radius:3px;background:var(--line);overflow:hidden;margin:0 0 10px}
.fill{height:100%;border-radius:3px;background:var(--busy)}
.fill.good{background:var(--good)}
.fill.early{background:var(--bad)}
.said{margin:8px 2px 0;color:var(--soft);font-size:13px;overflow-wrap:anywhere;white-space:pre-wrap}
figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
"""
STYLE = embedded(ROOT, _RULES)


def jupyter() -> Any:
    """Return the IPython shell of this process where a Jupyter kernel runs it, else None."""
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class Output:
    """Shows what rank 0 says, as it comes.

    Args:
        calm: stderr is for notices here, which are no errors: shown as the rest is.
    """

    def __init__(self, *, calm: bool = True) -> None:
        self.calm = calm

    def take(self, message: Message) -> None:
        """Show it."""
        if "out" in message:
            stream = sys.stderr if message["stream"] == "stderr" and not self.calm else sys.stdout
            stream.write(message["out"])
            stream.flush()
        elif "display" in message:
            show(message["display"])

    def say(self, text: str) -> None:
        """Show a line of ours."""
        print(text, flush=True)


def show(data: dict[str, str]) -> None:
    """Show a bundle of MIME types: in Jupyter as it likes best, elsewhere as text."""
    if jupyter() is None:
        print(data["text/plain"])
        return
    from IPython.display import publish_display_data  # here: without Jupyter there may be no IPython

    publish_display_data(data)


class LiveRun(Output):
    """Shows a run while it goes on.

    Args:
        folder: Folder of the run: its metrics.jsonl has the curves, also those of what it continues.
        title: Title above it.
    """

    def __init__(self, folder: RunFolder, title: str) -> None:
        super().__init__()
        self.title, self.reader = title, Reader(folder)
        self.step = self.steps = 0
        self.numbers = self.held_out = ""
        self.said: list[str] = []
        self.status = ""
        self._handle: Any = None
        self._first: tuple[float, int] | None = None  # when this run began to count, and at which step
        self._due_s = 0.0
        self._told_plain = False

    def take(self, message: Message) -> None:
        """Show it; numbers of the run where the bar and the curves are."""
        if "step" not in message:
            super().take(message)
            return
        self.step, self.steps = message["step"], message.get("steps", self.steps)
        if self._first is None:
            self._first = (time.monotonic(), self.step)
        if "held_out" in message:
            found = message["held_out"]
            self.held_out = "held-out " + ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self.numbers = message.get("numbers", self.numbers)
        if jupyter() is None:
            self._print(message)
        elif time.monotonic() >= self._due_s:
            self._draw()

    def say(self, text: str) -> None:
        """Show a line of ours, under the curves once they are there."""
        if self._handle is None:
            super().say(text)
        else:
            self.said.append(text)
            self._draw()

    def end(self, status: str) -> None:
        """Show how it ended: "good", or "early"."""
        self.status = status
        if self._handle is not None:
            self._draw()

    # --- drawing

    def _draw(self) -> None:
        began = time.monotonic()
        data = {"text/html": self.html(), "text/plain": self.line()}
        if self._handle is None:
            from IPython.display import DisplayHandle  # here, as above

            self._handle = DisplayHandle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)
        ended = time.monotonic()
        self._due_s = ended + max(EVERY_SECONDS, REST * (ended - began))

    def html(self) -> str:
        """Return the run as it stands."""
        share = 100 * self.step / self.steps if self.steps else 0
        told = [f"step {self.step:,} of {self.steps:,}", self.numbers, self.held_out, self._left()]
        parts = "".join(f'<span class="soft">{escaped(each)}</span>' for each in filter(None, told))
        drawn = "".join(charts([("", self.reader.read())])[:CHARTS])
        said = "".join(f'<div class="said">{escaped(each, 2000)}</div>' for each in self.said)
        return (
            f'<div class="{ROOT[1:]}"><style>{STYLE}</style><div class="box">'
            f'<div class="head"><b>{escaped(self.title, 200)}</b>{parts}</div>'
            f'<div class="track"><div class="fill {self.status}" style="width:{share:.1f}%"></div></div>'
            f'<div class="grid-of-charts">{drawn}</div>{said}</div></div>'
        )

    def line(self) -> str:
        """Return the run as one line of text."""
        return "  ".join(filter(None, (f"step {self.step}/{self.steps}", self.numbers, self.held_out)))

    def _left(self) -> str:
        if self._first is None or self.status:
            return ""
        seconds, steps = time.monotonic() - self._first[0], self.step - self._first[1]
        return f"{lasted(seconds / steps * (self.steps - self.step))} left" if steps and self.steps > self.step else ""

    def _print(self, message: Message) -> None:
        if not self._told_plain:
            self._told_plain = True
            print("no Jupyter here: the run is shown as lines of text", flush=True)
        if "held_out" in message:
            print(f"step {self.step}/{self.steps}  {self.held_out}", flush=True)
        elif "numbers" in message and (
            self.step in (1, self.steps) or self.step % max(1, self.steps // PLAIN_LINES) == 0
        ):
            print(f"step {self.step}/{self.steps}  {self.numbers}", flush=True)
