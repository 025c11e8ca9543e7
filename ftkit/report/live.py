"""The report of a run while it goes on: report.json says how the run stands, and report.html is written anew now and then.

`RunReport` is a callback of the HF Trainer, and a context around the run: whoever leaves it by an error has ended early.
Rank 0 alone writes. It also records one step of this process (the third, or the last of fewer) for the timeline.

What goes wrong here is said once and costs the report, never the run. Cost: a writing takes milliseconds; the next one
waits for `EVERY_SECONDS` and for `REST` times what the last one took, so that a report of a million lines takes no larger
part of its run's time than one of ten.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from ftkit.engine.trace import Span, Trace
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.output.run_folder import RunFolder, write_json
from ftkit.plan.speed import Speed
from ftkit.report.facts import ENDED, ENDED_EARLY, GOING_ON, Reader
from ftkit.report.page import rewrite
from ftkit.report.simulated import of_speed
from ftkit.report.text import literal
from ftkit.report.timeline import Part, Timeline, as_chrome

EVERY_SECONDS = 5.0
"""Between two writings."""

REST = 50
"""Times what a writing took, until the next: it takes at most a fiftieth of a run's time."""

TRACED_STEP = 3
"""Of a process: the first two make buffers, compile and warm up."""


@dataclass
class RunReport(TrainerCallback):
    """Writes the report of a run.

    Args:
        folder: folder of the run.
        writes: whether this rank writes the report.
        facts: what is known at the start, for report.json.
        units: returns the sharded model, once there is one.
        samples: returns questions and answers so far.
        events: returns how often something happened that is worth a writing of its own.
        say: where a line is shown.
        broken: whether an error has ended the report.
    """

    folder: RunFolder
    writes: bool
    facts: dict[str, Any]
    units: Callable[[], ShardedTransformer | None]
    samples: Callable[[], list[dict[str, str]]]
    events: Callable[[], int]
    say: Console
    broken: bool = False
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = Reader(self.folder)
        self.standing = {"status": GOING_ON, "why": "", "started": now(), "ended": None, "command": command(), **self.facts}
        self.due_s = 0.0
        self.seen = 0
        self.traced_step: int | None = None
        self.recording: Trace | None = None
        self.began_s = 0.0

    # --- the run

    def __enter__(self) -> RunReport:
        self._attempt(self.folder.trace.unlink, True)
        self._attempt(self._write)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.end(f"{type(error).__name__}: {error}")

    def end(self, why: str | None = None) -> None:
        """Say that the run ended, or ended early if there is a reason; the first word stands."""
        if self.standing["ended"] is None:
            self.standing |= {"status": ENDED if why is None else ENDED_EARLY, "why": why or "", "ended": now()}
            self._attempt(self._write)

    # --- the callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how many steps there are, on which cores, and what the model answered before the first."""
        self.standing["steps"] = state.max_steps
        units = self.units()
        if units is not None and units.affinity is not None:
            self.standing["cores_per_rank"] = [str(units.affinity)]
        if self.traced_step is None:
            self.traced_step = min(state.global_step + TRACED_STEP, state.max_steps)
        self._attempt(self._write)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step that is to be shown."""
        if self.writes and not self.broken and state.global_step + 1 == self.traced_step:
            units = self.units()
            if units is not None:
                self.recording = units.transfer.trace
                self.recording.start()
            self.began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was recorded, and the report where it is time, or where something happened."""
        if self.recording is not None:
            recorded, self.recording, self.traced_step = self.recording, None, -1
            seconds = time.perf_counter() - self.began_s
            spans = recorded.stop()  # whatever becomes of the report: else it would record for ever
            self._attempt(self._write_trace, spans, recorded.clock.device.type, state.global_step, seconds)
        happened = self.events()
        if happened != self.seen or time.perf_counter() >= self.due_s:
            self.seen = happened
            self._attempt(self._write)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report, where it is time: an evaluation may be long."""
        if time.perf_counter() >= self.due_s:
            self._attempt(self._write)

    # --- the files

    def _write(self) -> None:
        began = time.perf_counter()
        self.standing["answers"] = self.samples()
        write_json(self.folder.standing, self.standing)
        rewrite(self.reader)
        ended = time.perf_counter()
        self.due_s = ended + max(EVERY_SECONDS, REST * (ended - began))

    def _write_trace(self, spans: list[Span], device: str, step: int, seconds: float) -> None:
        parts = [Part(span.stream, span.name, span.start_s, span.end_s) for span in spans]
        seconds = max(seconds, max((part.end_s for part in parts), default=0.0))  # on CUDA the device ends later
        write_json(self.folder.trace, as_chrome(Timeline(parts, seconds, step, device)))

    def _attempt(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Do it on the rank that writes; an error ends the report, and is said once."""
        if not self.writes or self.broken:
            return
        try:
            work(*arguments)
        except Exception as error:  # whatever it is: nobody trains for the report's sake
            self.broken = True
            self.say.print(literal(f"no more reports of this run: {type(error).__name__}: {error}"))


def now() -> str:
    """Return the present time, to the second, with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def command() -> str:
    """Return the command line of this process, without the folder that the program lies in."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def simulated(speed: Speed | None) -> dict[str, Any] | None:
    """Return the step that the plan simulated, as a trace; None where the plan knows no seconds."""
    return None if speed is None else as_chrome(of_speed(speed))
