"""Plant each committed fault in a copy of the repository and see a test turn red: `make mutants`.

Two workers, each with a copy of its own in a temporary folder, take faults in turn: write the changed file, run the
fault's tests there, put the file back. First all named tests run on an unchanged copy and must be green, or a red test
would prove nothing. A fault whose tests stay green, whose text is not found exactly once, or whose tests could not run (a
wrong name, an error while collecting) fails the run. Words on the command line choose the faults whose name has one.

The repository's own install must not answer for the copy. A copy therefore lies as an installed package does, its mapped
folders (pyproject.toml, package-dir) linked into `ftkit/`, stands first on PYTHONPATH, and every run asks where `ftkit`
came from before it tests anything. No bytecode is written: a file changed twice in a second could pass for its old self.
Runs are forked from a process that has imported what no fault touches, once: that is half of what a run took (warm.py).
"""

from __future__ import annotations

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

from tests.mutants.faults import FAULTS, Fault
from tests.mutants.warm import Warm

HERE = Path(__file__).parents[2]
COPIED = ("ftkit", "recipes", "data", "triton_kernels", "tests", "benchmarks", "docs")
COPIED += ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")
MAPPED = {"recipes": "recipes", "bundled": "data", "kernels": "triton_kernels"}
WORKERS = 2
FAULT_SECONDS = 180
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
    told: dict[int | None, str] = {RED: " ".join(red), GREEN: "SURVIVED: " + " ".join(fault.tests)}
    told[None] = f"its tests take more than {FAULT_SECONDS} s"
    return Outcome(
        fault, time.monotonic() - start, code == RED and bool(red), told.get(code, f"pytest ended with {code}:\n{printed}")
    )


def main(words: list[str]) -> int:
    """Run the faults; return the exit code."""
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    start = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftkit-mutants-")))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        places = [stack.enter_context(closing(Place(folder / str(number)))) for number in range(WORKERS)]
        free: queue.Queue[Place] = queue.Queue()
        for place in places:
            free.put(place)

        def on_a_copy(fault: Fault) -> Outcome:
            place = free.get()
            try:
                return plant(fault, place)
            finally:
                free.put(place)

        named = tuple(dict.fromkeys(test for fault in faults for test in fault.tests))
        kernels = tuple(test for test in named if test.startswith(KERNELS))
        others = tuple(test for test in named if test not in kernels)
        shares = [tests for tests in (kernels, *(others[number::WORKERS] for number in range(WORKERS))) if tests]
        for code, printed in pool.map(lambda place, tests: place.run(tests, seconds=600), cycle(places), shares):
            if code != GREEN:
                print(f"without a fault the tests are not green, a red one would prove nothing (pytest: {code})\n{printed}")
                return 1
        print(f"{len(named)} tests are green without a fault ({time.monotonic() - start:.0f} s)\n", flush=True)
        width = max(len(fault.name) for fault in faults)
        outcomes = []
        for outcome in pool.map(on_a_copy, faults):
            print(f"{outcome.fault.name:{width}}  {outcome.seconds:5.1f} s  {outcome.told}", flush=True)
            outcomes.append(outcome)
    missed = [outcome.fault.name for outcome in outcomes if not outcome.caught]
    print(f"\n{len(outcomes) - len(missed)} of {len(outcomes)} faults turned a test red, {time.monotonic() - start:.0f} s")
    if missed:
        print("NOT CAUGHT:", *missed, sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
