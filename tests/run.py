"""Run `make test` or, with `--slow`, the tests of `make test-all`, and repeat the tests that failed.

    python -m tests.run [--slow]

A run has three phases: the tests in parallel, then those marked `clock` one at a time, then the Triton kernels in the
interpreter. Each test that failed is repeated alone in a fresh process, twice, if at most ten failed. It is forgiven, and
named as FLAKY in the last lines, if both repeats pass and it is marked `clock` or `ranks` (it uses a world of ranks).
Timing decides such tests on a busy machine. All other failures are final.

This module is also the pytest plugin that records failures: `-p tests.run --failures FILE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

WORKERS = ("-n", "2", "--dist", "loadfile")
MOST_REPEATED = 10
REPEATS = 2
FORGIVABLE = ("clock", "ranks")
FAILED, NO_TESTS = 1, 5
"""Exit codes of pytest: a test failed; no test was selected, which only the phase of the clock may do."""


@dataclass(frozen=True)
class Phase:
    """One pytest process.

    Args:
        arguments: Arguments of pytest.
        environ: Environment variables in addition to the current ones.
        may_be_empty: Whether it is fine that no test is selected.
    """

    arguments: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    may_be_empty: bool = False

    def run(self, more: Sequence[str] = ()) -> int:
        """Run pytest and return its exit code."""
        command = [sys.executable, "-m", "pytest", *self.arguments, *more]
        return subprocess.run(command, env={**os.environ, **self.environ}, check=False).returncode


def phases(slow: bool) -> tuple[Phase, ...]:
    """Return the phases of the quick or of the slow tests."""
    chosen = "slow" if slow else "not slow"
    interpreted = {"TRITON_INTERPRET": "1"}
    return (
        Phase(("-m", f"{chosen} and not (gpu or browser or clock)", *WORKERS)),
        Phase(("-m", f"{chosen} and clock and not (gpu or browser)"), may_be_empty=True),
        Phase(("tests/kernels", "-m", f"{chosen} and not gpu", *WORKERS), interpreted),
    )


def main(slow: bool) -> int:
    """Run all phases and the repeats; return the exit code."""
    red, failures = False, {}
    with tempfile.TemporaryDirectory(prefix="ftkit-tests-") as folder:
        for number, phase in enumerate(phases(slow)):
            path = Path(folder, f"failures-{number}")
            code = phase.run(["-p", "tests.run", "--failures", str(path)])
            found = dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}
            failures |= {test: (phase, forgivable) for test, forgivable in found.items()}
            expected = (0, FAILED, NO_TESTS) if phase.may_be_empty else (0, FAILED)
            red |= code not in expected or (code == FAILED and not found)
    if len(failures) > MOST_REPEATED:
        print(f"{len(failures)} tests failed, more than the {MOST_REPEATED} that are repeated.")
        return 1
    flaky = []
    for test, (phase, forgivable) in failures.items():
        limit = ("-o", "timeout=600") if slow else ()  # alone, a case that quick(n) made slow counts as quick
        alone = Phase((test, *limit), phase.environ)
        passed = sum(alone.run() == 0 for _ in range(REPEATS))
        kind = "forgivable" if forgivable else "not forgivable"
        print(f"{test}: passed {passed} of {REPEATS} repeats, {kind}", flush=True)
        if passed == REPEATS and forgivable:
            flaky.append(test)
        else:
            red = True
    for test in flaky:
        print(f"FLAKY: {test}")
    return int(red)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the plugin."""
    parser.addoption("--failures", type=Path, help="append failed tests to this file, as JSON lines [test, forgivable]")


def pytest_configure(config: pytest.Config) -> None:
    """Record failures in the main process, which receives the reports of all workers."""
    path = config.getoption("failures")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """Append each failed test to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed set-up, call or tear-down."""
        if report.failed:
            with self.path.open("a") as file:
                print(json.dumps([report.nodeid, any(name in report.keywords for name in FORGIVABLE)]), file=file)


if __name__ == "__main__":
    sys.exit(main("--slow" in sys.argv[1:]))
