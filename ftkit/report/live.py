"""The report during a run: report.json has the status of the run, and report.html is rewritten from time to time.

`RunReport` is a callback of the HF Trainer and a context around the run: an error that leaves it ends the run early. Only
rank 0 writes. It also records one step for the timeline. An error in the report is printed once and never ends the run.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from ftkit.engine.trace import Trace
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.output.run_folder import RunFolder, write_json
from ftkit.plan.speed import Speed
from ftkit.report.facts import ENDED, ENDED_EARLY, GOING_ON
from ftkit.report.page import now, rewrite
from ftkit.report.text import literal
from ftkit.report.timeline import Part, Timeline, as_chrome, of_speed

EVERY_SECONDS = 5.0
"""Shortest time between two writings."""
REST = 50
"""A writing that took t seconds is followed by REST * t without one: the report takes at most 2 % of the run."""
TRACED_STEP = 3
"""Step of this process that is recorded: the first two allocate buffers, compile and warm up."""


@dataclass
class RunReport(TrainerCallback):
    """Writes the report of a run."""

    folder: RunFolder
    writes: bool  # whether this rank writes the report
    facts: dict[str, Any]  # content of report.json known at the start
    units: Callable[[], ShardedTransformer | None]  # returns the sharded model, or None before it exists
    samples: Callable[[], list[dict[str, Any]]]  # returns questions and answers so far
    events: Callable[[], int]  # returns a count; the report is written at once if it changes
    say: Console
    broken: bool = False  # whether an error has ended the report

    def __post_init__(self) -> None:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self.standing = {"status": GOING_ON, "why": "", "started": now(), "ended": None, "command": command, **self.facts}
        self.started_s = time.perf_counter()
        self.due_s = 0.0
        self.seen = 0
        self.traced_step: int | None = None
        self.recording: Trace | None = None
        self.began_s = 0.0

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
        """Record that the run ended, or ended early if there is a reason. Only the first call counts."""
        if self.standing["ended"] is None:
            self.standing |= {"status": ENDED if why is None else ENDED_EARLY, "why": why or "", "ended": now()}
            self._attempt(self._write)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the number of steps, the cores, and the answers before training."""
        self.standing["steps"] = state.max_steps
        units = self.units()
        if units is not None and units.affinity is not None:
            self.standing["cores_per_rank"] = [str(units.affinity)]
        if self.traced_step is None:
            self.traced_step = min(state.global_step + TRACED_STEP, state.max_steps)
        self._attempt(self._write)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to record, before the step that the timeline shows."""
        if self.writes and not self.broken and state.global_step + 1 == self.traced_step:
            units = self.units()
            if units is not None:
                self.recording = units.transfer.trace
                self.recording.start()
            self.began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the recorded step, and the report if it is due or something happened. Also after an evaluation."""
        if self.recording is not None:
            recorded, self.recording, self.traced_step = self.recording, None, -1
            seconds = time.perf_counter() - self.began_s
            # The recording stops also if the report is broken: a trace must not grow for the rest of the run.
            parts = [Part(span.stream, span.name, span.start_s, span.end_s) for span in recorded.stop()]
            seconds = max(seconds, max((part.end_s for part in parts), default=0.0))  # on CUDA the device ends later
            timeline = Timeline(parts, seconds, state.global_step, recorded.clock.device.type)
            self._attempt(write_json, self.folder.trace, as_chrome(timeline))
        happened = self.events()
        if happened != self.seen or time.perf_counter() >= self.due_s:
            self.seen = happened
            self._attempt(self._write)

    on_evaluate = on_step_end

    def _write(self) -> None:
        began = time.perf_counter()
        self.standing |= {"answers": self.samples(), "seconds": began - self.started_s}
        write_json(self.folder.standing, self.standing)
        rewrite(self.folder)
        ended = time.perf_counter()
        self.due_s = ended + max(EVERY_SECONDS, REST * (ended - began))

    def _attempt(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Call `work` on the rank that writes. An error ends the report and is printed once."""
        if not self.writes or self.broken:
            return
        try:
            work(*arguments)
        except Exception as error:  # of any kind: the run goes on
            self.broken = True
            self.say.print(literal(f"no more reports of this run: {type(error).__name__}: {error}"))


def simulated(speed: Speed | None) -> dict[str, Any] | None:
    """Return the step that the plan simulated, as a trace; None if the plan has no seconds."""
    return None if speed is None else as_chrome(of_speed(speed))
