"""Plant committed faults in a copy of the repository; each must turn a test red.

    python -m tests.mutants [--since REF] [WORD ...]

Two workers each have a copy of the repository in a temporary folder. A worker writes the changed file, runs the fault's
tests in a new process, and restores the file. Before that, the named tests run on an unchanged copy: if one of them is
red, a red test would prove nothing. The run fails if a fault's tests stay green, if its text does not occur exactly once,
or if its tests cannot run (unknown name, error during collection, timeout).

The copy is laid out as an installed package: its mapped folders (pyproject.toml, package-dir) are linked into `ftkit/`, it
comes first on PYTHONPATH, and each run checks that `ftkit` was imported from it. Bytecode is not written, because a file
that changes twice within a second could be mistaken for its old version.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.mutants.fault import Fault
from tests.mutants.faults import collect

HERE = Path(__file__).parents[2]
COPIED = ("ftkit", "recipes", "data", "triton_kernels", "tests", "benchmarks", "docs", "notebooks")
COPIED += ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")
MAPPED = {"recipes": "recipes", "bundled": "data", "kernels": "triton_kernels"}
WORKERS = 2
FAULT_SECONDS = 300
CLEAN_SECONDS = 3600
KERNELS = "tests/kernels/"
"""Tests that need Triton's interpreter, which a process has from its start or not at all."""
RED, GREEN = 1, 0
"""Exit codes of pytest: a test failed; all passed. Any other code is an error of the run."""
RUN = """
import pathlib, sys, pytest
import ftkit, ftkit.engine, ftkit.hf, ftkit.recipes, ftkit.bundled, ftkit.kernels
here = pathlib.Path.cwd()
for module in (ftkit, ftkit.engine, ftkit.hf, ftkit.recipes, ftkit.bundled, ftkit.kernels):
    assert here in pathlib.Path(module.__file__).parents, f"{module.__name__} comes from {module.__file__}, not the copy"
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *sys.argv[1:]]))
"""


@dataclass
class Outcome:
    """Result of a planted fault.

    Args:
        fault: The fault.
        seconds: Time that it took.
        caught: Whether a test turned red.
        text: The red tests, or the problem.
    """

    fault: Fault
    seconds: float
    caught: bool
    text: str


def copy_repository(folder: Path) -> Path:
    """Copy the files that tests need to `folder`, laid out as an installed package."""
    for name in COPIED:
        source = HERE / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    for name, target in MAPPED.items():
        (folder / "ftkit" / name).symlink_to(Path("..") / target)
    return folder


def run_tests(folder: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run tests, all of kernels or none, on a copy; return pytest's exit code (None after the limit) and the output."""
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    if all(test.startswith(KERNELS) for test in tests):
        environ["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", RUN, *tests]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ranks that a fault left running
        process.wait(30)
        output.seek(0)
        return code, output.read()


def plant(fault: Fault, folder: Path) -> Outcome:
    """Write the fault into a copy, run its tests, and restore the files."""
    start = time.monotonic()
    originals: dict[Path, str] = {}
    try:
        for name, old, new in fault.edits:
            path = folder / name
            text = path.read_text()
            originals.setdefault(path, text)
            if text.count(old) != 1:
                return Outcome(fault, 0.0, False, f"its text occurs {text.count(old)} times in {name}:\n{old}")
            path.write_text(text.replace(old, new))
        code, output = run_tests(folder, fault.tests, FAULT_SECONDS)
    finally:
        for path, text in originals.items():
            path.write_text(text)
    red = [line.removeprefix("FAILED ").partition(" - ")[0] for line in output.splitlines() if line.startswith("FAILED ")]
    texts: dict[int | None, str] = {GREEN: "SURVIVED: " + " ".join(fault.tests)}
    texts[RED] = " ".join(red) or f"no test ran:\n{output}"
    texts[None] = f"its tests take more than {FAULT_SECONDS} s"
    caught = code == RED and bool(red)
    return Outcome(fault, time.monotonic() - start, caught, texts.get(code, f"pytest ended with {code}:\n{output}"))


def choose(since: str | None, words: Sequence[str]) -> list[Fault]:
    """Return the faults whose name has one of the words and whose file differs from commit `since`, where they are given."""
    faults = [fault for fault in collect() if not words or any(word in fault.name for word in words)]
    if since is None:
        return faults
    command = ["git", "-C", str(HERE), "diff", "--name-only", since, "--"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    changed = set(done.stdout.splitlines())
    return [fault for fault in faults if any(name in changed for name, _, _ in fault.edits)]


def green_without_fault(faults: Sequence[Fault], pool: ThreadPoolExecutor, folders: Sequence[Path]) -> bool:
    """Run the tests of all faults on unchanged copies; print the output where one is red."""
    named = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    kernels = [test for test in named if test.startswith(KERNELS)]
    others = [test for test in named if test not in kernels]
    shares = [share for share in (kernels, *(others[number::WORKERS] for number in range(WORKERS))) if share]
    results = list(pool.map(lambda folder, share: run_tests(folder, share, CLEAN_SECONDS), cycle(folders), shares))
    for code, output in results:
        if code != GREEN:
            print(f"Without a fault the tests are not green (pytest: {code}).\n{output}")
            return False
    print(f"{len(named)} tests are green without a fault.\n", flush=True)
    return True


def main(arguments: Sequence[str]) -> int:
    """Plant the faults; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plant faults; each must turn a test red.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only faults whose name contains one of these words")
    parser.add_argument("--since", metavar="REF", help="only faults whose file differs from this commit")
    options = parser.parse_args(arguments)
    faults = choose(options.since, options.words)
    if not faults:
        print("No fault was selected.")
        return 0 if options.since else 1
    start = time.monotonic()
    missed = []
    with tempfile.TemporaryDirectory(prefix="ftkit-mutants-") as root, ThreadPoolExecutor(WORKERS) as pool:
        folders = [copy_repository(Path(root, str(number))) for number in range(WORKERS)]
        if not green_without_fault(faults, pool, folders):
            return 1
        free: queue.Queue[Path] = queue.Queue()
        for folder in folders:
            free.put(folder)

        def on_free_copy(fault: Fault) -> Outcome:
            folder = free.get()  # there are as many copies as threads
            try:
                return plant(fault, folder)
            finally:
                free.put(folder)

        width = max(len(fault.name) for fault in faults)
        for number, outcome in enumerate(pool.map(on_free_copy, faults), 1):
            count = f"[{number}/{len(faults)}]"
            print(f"{count} {outcome.fault.name:{width}}  {outcome.seconds:5.1f} s  {outcome.text}", flush=True)
            missed += [] if outcome.caught else [outcome.fault.name]
    print(f"\n{len(faults) - len(missed)} of {len(faults)} faults turned a test red, {time.monotonic() - start:.0f} s")
    if missed:
        print("NOT CAUGHT:", *missed, sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
