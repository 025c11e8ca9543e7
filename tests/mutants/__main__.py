"""Plant each committed fault in a copy of the repository and see a test turn red: `make mutants`.

Two workers, each with a copy of its own in a temporary folder, take faults in turn: write the changed file, run the
fault's tests there, put the file back. First all named tests run on an unchanged copy and must be green, or a red test
would prove nothing. A fault whose tests stay green, whose text is not found exactly once, or whose tests could not run (a
wrong name, an error while collecting) fails the run. Words on the command line choose the faults whose name has one.

`--minutes N` limits the run: it takes the faults in the order of selection.py, starts none that would end too late by what
it took the last time, and prints which it skipped. A run of all faults that is green writes the record that this order
needs; commit it.

The repository's own install must not answer for the copy. A copy therefore lies as an installed package does, its mapped
folders (pyproject.toml, package-dir) linked into `ftkit/`, stands first on PYTHONPATH, and every run asks where `ftkit`
came from before it tests anything. No bytecode is written: a file changed twice in a second could pass for its old self.
Runs are forked from a process that has imported what no fault touches, once: that is half of what a run took (warm.py).
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.mutants.fault import Fault
from tests.mutants.faults import collect
from tests.mutants.selection import RECORD, Green, changed_since, commits_of, digest, git, in_order
from tests.mutants.warm import Warm

HERE = Path(__file__).parents[2]
COPIED = ("ftkit", "recipes", "data", "triton_kernels", "tests", "benchmarks", "docs")
COPIED += ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")
MAPPED = {"recipes": "recipes", "bundled": "data", "kernels": "triton_kernels"}
WORKERS = 2
FAULT_SECONDS = 180
USUAL_SECONDS = 12.0
"""What a fault takes where no record says it."""
SHARE = 0.8
"""Of a limited run, the part that is planned for planting; the rest is for the tests without a fault."""
RESERVE_SECONDS = 40.0
"""No fault is started so shortly before a limited run has to end."""
KERNELS = "tests/kernels/"
"""Tests in Triton's interpreter, which a process has from its beginning: they run apart from the others."""
RED, GREEN = 1, 0
"""What pytest returns when a test failed, and when none did; anything else means that it could not tell."""


@dataclass
class Outcome:
    """What became of a fault: whether it was caught, and the test that turned red or what went wrong."""

    fault: Fault
    seconds: float
    caught: bool
    told: str


def copy_repository(folder: Path) -> Path:
    """Copy what tests need to `folder`, laid out as an installed package."""
    for name in COPIED:
        source = HERE / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    for name, target in MAPPED.items():
        (folder / "ftkit" / name).symlink_to(Path("..") / target)
    return folder


class Place:
    """A copy of the repository and the processes that run its tests: plain ones, and such as interpret kernels."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_repository(folder)
        self._warm: dict[bool, Warm] = {}

    def run(self, tests: tuple[str, ...], seconds: float = FAULT_SECONDS) -> tuple[int | None, str]:
        """Run tests, all interpreted or none; see `Warm.run`."""
        interpreted = all(test.startswith(KERNELS) for test in tests)
        if interpreted not in self._warm:
            environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
            # as tests/conftest.py sets them, which comes after the imports here
            environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._warm[interpreted] = Warm(environ | ({"TRITON_INTERPRET": "1"} if interpreted else {}))
        return self._warm[interpreted].run(self.folder, tests, seconds)

    def close(self) -> None:
        """End the processes."""
        for warm in self._warm.values():
            warm.close()


def plant(fault: Fault, place: Place) -> Outcome:
    """Write the fault, run its tests, put the files back."""
    start = time.monotonic()
    originals: dict[Path, str] = {}
    try:
        for name, old, new in fault.edits:
            path = place.folder / name
            text = path.read_text()
            originals.setdefault(path, text)
            if text.count(old) != 1:
                return Outcome(fault, 0.0, False, f"its text is found {text.count(old)} times in {name}:\n{old}")
            path.write_text(text.replace(old, new))
        code, printed = place.run(fault.tests)
    finally:
        for path, text in originals.items():
            path.write_text(text)
    red = [line.removeprefix("FAILED ").partition(" - ")[0] for line in printed.splitlines() if line.startswith("FAILED ")]
    told: dict[int | None, str] = {GREEN: "SURVIVED: " + " ".join(fault.tests)}
    told[RED] = " ".join(red) or f"no test ran:\n{printed}"
    told[None] = f"its tests take more than {FAULT_SECONDS} s"
    return Outcome(
        fault, time.monotonic() - start, code == RED and bool(red), told.get(code, f"pytest ended with {code}:\n{printed}")
    )


def choose(minutes: float | None, words: list[str]) -> list[Fault]:
    """Return the faults of this run in their order; print how they were chosen where time is limited."""
    faults = [fault for fault in collect() if not words or any(word in fault.name for word in words)]
    if minutes is None:
        return faults
    green = Green.read()
    ordered, changed = in_order(faults, green, green and changed_since(HERE, green.commit), commits_of(HERE))
    since = f"since {green.commit[:9]}, the last commit recorded as green" if green else "(no commit is recorded as green)"
    print(f"{changed} of {len(faults)} faults have changed {since}; then the others in turn, {minutes:g} minutes in all")
    return ordered


def fitting(faults: list[Fault], seconds: float) -> tuple[list[Fault], list[Fault]]:
    """Divide faults into those that will fit into `seconds`, by their last durations, and the rest."""
    green = Green.read()
    known = green.seconds if green else {}
    usual = sorted(known.values())[len(known) // 2] if known else USUAL_SECONDS
    budget, taken = seconds * WORKERS, 0
    for fault in faults:
        budget -= known.get(fault.name, usual)
        if budget < 0:
            break
        taken += 1
    return faults[:taken], faults[taken:]


def main(arguments: list[str]) -> int:
    """Run the faults; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plant faults; each must turn a test red.")
    parser.add_argument("words", nargs="*", help="only faults whose name has one of these")
    parser.add_argument("--minutes", type=float, help="limit the run: changed faults first, then others in turn")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    until = start + options.minutes * 60 if options.minutes else float("inf")
    faults, skipped = choose(options.minutes, options.words), []
    if not faults:
        parser.error(f"no fault has one of these in its name: {' '.join(options.words)}")
    if options.minutes:
        faults, skipped = fitting(faults, options.minutes * 60 * SHARE)
    outcomes = plant_all(faults, until)
    if outcomes is None:
        return 1
    planted = {outcome.fault.name for outcome in outcomes}
    missed = [outcome.fault.name for outcome in outcomes if not outcome.caught]
    print(f"\n{len(outcomes) - len(missed)} of {len(outcomes)} faults turned a test red, {time.monotonic() - start:.0f} s")
    if left := [fault.name for fault in (*faults, *skipped) if fault.name not in planted]:
        print(f"SKIPPED for lack of time ({len(left)}; `make mutants` runs all):", *left, sep="\n  ")
    if missed:
        print("NOT CAUGHT:", *missed, sep="\n  ")
    elif not options.words and not left:
        record(outcomes)
    return 1 if missed else 0


def plant_all(faults: list[Fault], until: float) -> list[Outcome] | None:
    """Run the tests without a fault, then with each; return the outcomes, None where tests are red without one.

    Args:
        faults: in the order in which they are planted.
        until: the monotonic clock's time at which all of it should have ended.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftkit-mutants-")))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        places = [stack.enter_context(closing(Place(folder / str(number)))) for number in range(WORKERS)]
        free: queue.Queue[Place] = queue.Queue()
        for place in places:
            free.put(place)

        def on_a_copy(fault: Fault) -> Outcome | None:
            place = free.get()
            try:
                return plant(fault, place) if time.monotonic() < until - RESERVE_SECONDS else None
            finally:
                free.put(place)

        named = tuple(dict.fromkeys(test for fault in faults for test in fault.tests))
        kernels = tuple(test for test in named if test.startswith(KERNELS))
        others = tuple(test for test in named if test not in kernels)
        shares = [tests for tests in (kernels, *(others[number::WORKERS] for number in range(WORKERS))) if tests]
        for code, printed in pool.map(lambda place, tests: place.run(tests, seconds=600), cycle(places), shares):
            if code != GREEN:
                print(f"without a fault the tests are not green, a red one would prove nothing (pytest: {code})\n{printed}")
                return None
        print(f"{len(named)} tests are green without a fault ({time.monotonic() - start:.0f} s)\n", flush=True)
        width = max((len(fault.name) for fault in faults), default=0)
        outcomes = []
        for outcome in pool.map(on_a_copy, faults):
            if outcome is not None:
                print(f"{outcome.fault.name:{width}}  {outcome.seconds:5.1f} s  {outcome.told}", flush=True)
                outcomes.append(outcome)
    return outcomes


def record(outcomes: list[Outcome]) -> None:
    """Write the record of a green run of all faults, unless the tree differs from its commit."""
    commit = git(HERE, "rev-parse", "HEAD")
    if commit is None or git(HERE, "status", "--porcelain", "--untracked-files=no"):
        print(f"not recorded in {RECORD.name}: the working tree is not a commit")
        return
    Green(
        commit.strip(),
        {outcome.fault.name: digest(outcome.fault) for outcome in outcomes},
        {outcome.fault.name: round(outcome.seconds, 1) for outcome in outcomes},
    ).write()
    print(f"recorded in {RECORD.relative_to(HERE)}: commit it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
