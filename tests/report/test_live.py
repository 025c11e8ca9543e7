"""The report of a run that goes on: when it is written, what is recorded, and that it never ends a run."""

import io
import json
import os
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from ftkit.engine.streams import Streams
from ftkit.output.run_folder import RunFolder
from ftkit.plan.schedule import speed
from ftkit.plan.shape import Flat, Shape
from ftkit.plan.speed import Rates
from ftkit.report import live
from ftkit.report.live import RunReport
from ftkit.report.timeline import from_chrome
from ftkit.spec.strategy import Strategy


class Run:
    """Steps of a run that never was, at a clock that is set."""

    def __init__(self, path, monkeypatch, *, steps=5, writes=True, begun_at=0):
        self.path, self.said, self.events, self.now = path, io.StringIO(), 0, 0.0
        path.mkdir(exist_ok=True)
        self.trace = Streams(torch.device("cpu")).trace
        self.state = SimpleNamespace(global_step=begun_at, max_steps=steps)
        monkeypatch.setattr(live.time, "perf_counter", lambda: self.now)
        say, facts = Console(file=self.said), {"device": "cpu"}
        units = SimpleNamespace(transfer=SimpleNamespace(trace=self.trace), affinity="2 threads")
        shown = (lambda: units, lambda: [], lambda: self.events)
        self.report = RunReport(RunFolder(path), writes, facts, *shown, say)

    def step(self, seconds=1.0):
        self.report.on_step_begin(None, self.state, None)
        with self.trace.span("compute", f"forward {self.state.global_step}"):
            self.now += seconds
        self.state.global_step += 1
        self.report.on_step_end(None, self.state, None)

    @property
    def written(self):
        return os.stat(self.path / "report.html").st_ino  # each writing is a new file


def test_it_is_written_now_and_then_and_where_something_happened(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", monkeypatch, steps=100)
    with run.report:
        run.report.on_train_begin(None, run.state, None)
        first = run.written
        run.step(4.9)
        assert run.written == first
        run.step(0.2)
        second = run.written
        assert second != first
        run.events += 1
        run.step(0.1)
        assert run.written != second
        standing = json.loads((run.path / "report.json").read_text())
        assert (standing["status"], standing["seconds"]) == ("running", pytest.approx(4.9 + 0.2 + 0.1))
        run.report.end()
    assert json.loads((run.path / "report.json").read_text())["status"] == "finished"
    assert ">finished<" in (run.path / "report.html").read_text()


@pytest.mark.parametrize(("steps", "begun_at", "traced"), [(5, 0, 3), (2, 0, 2), (10, 4, 7)])
def test_one_step_is_traced(tmp_path, monkeypatch, steps, begun_at, traced):
    run = Run(tmp_path / "run", monkeypatch, steps=steps, begun_at=begun_at)
    with run.report:
        run.report.on_train_begin(None, run.state, None)
        while run.state.global_step < steps:
            run.step()
        run.report.on_train_begin(None, run.state, None)  # again
        run.report.end()
    shown = json.loads((run.path / "trace.json").read_text())
    spans = [(event["name"], event["dur"]) for event in shown["traceEvents"] if event["ph"] == "X"]
    assert spans == [(f"forward {traced - 1}", 1e6)]
    assert shown["otherData"] == {"step": traced, "seconds": 1.0, "device": "cpu"}
    assert not run.trace.recording


def test_an_error_ends_the_report_and_not_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", monkeypatch)
    with run.report:
        (run.path / "report.html").unlink()
        (run.path / "report.html").mkdir()
        for _ in range(5):
            run.step(10.0)
        run.report.end()
    assert run.said.getvalue().count("no more reports of this run: IsADirectoryError") == 1


def test_a_run_that_breaks_ended_early(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", monkeypatch)
    with pytest.raises(ZeroDivisionError), run.report:
        raise ZeroDivisionError("by zero")
    page = (run.path / "report.html").read_text()
    assert "ended early<" in page
    assert "ZeroDivisionError: by zero" in page


def test_the_simulated_step_is_a_timeline_from_its_beginning_to_its_end():
    line = (Flat(1 << 20, 2, trained=True),)
    shape = Shape((line,) * 4, line, line, 32, 97, 100, 100, 8, 2, 2)
    shown = speed(shape, Strategy.of(stage=3, accumulation=2), Rates({1: 1e12}, link=1e9, pcie=1e9, dram=1e10, hbm=1e11))
    timeline = from_chrome(live.simulated(shown))
    assert timeline.seconds == shown.seconds
    assert all(0 <= part.start_s < part.end_s <= shown.seconds * 1.001 for part in timeline.parts)
    names = [part.name for part in timeline.parts if part.stream == "compute" and part.name.startswith(("forward", "back"))]
    assert len(names) >= 2 * 2 * 4
    assert live.simulated(None) is None


def test_other_ranks_write_and_record_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", monkeypatch, writes=False)
    with run.report:
        run.report.on_train_begin(None, run.state, None)
        for _ in range(4):
            run.step()
            assert not run.trace.recording
    assert not list(run.path.iterdir())


def test_a_report_that_broke_records_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", monkeypatch)
    with run.report:
        run.report.on_train_begin(None, run.state, None)
        run.step()
        run.step()
        run.report.on_step_begin(None, run.state, None)
        assert run.trace.recording
        run.report.broken = True
        run.report.on_step_end(None, run.state, None)
        assert not run.trace.recording
        again = Run(tmp_path / "again", monkeypatch)
        again.report.broken = True
        again.report.on_train_begin(None, again.state, None)
        for _ in range(4):
            again.report.on_step_begin(None, again.state, None)
            assert not again.trace.recording
            again.state.global_step += 1
