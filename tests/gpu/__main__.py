"""`make gpu`: run the checks that need a GPU and report which claims they confirm.

    make gpu                                        with .venv
    make gpu PYTHON=/opt/venv/bin/python            with that interpreter: no set-up, no network
    make gpu PARTS="stages-1 peaks" OUT=runs/v100   some parts; the report in another folder

The interpreter needs Python >= 3.10 and the packages in `Part.needs`, not older than pyproject.toml asks for; a part
without them is not tried. Each part is a process that is killed after `LIMIT_S`. The report is `gpu.json` and `gpu.md` in
runs/gpu/: for each claim in claims.py whether it is confirmed, refuted or not tried. Parts that were tried before, with the
same files on the same machine, keep their results.

The exit code is 1 if a claim is refuted or a part failed. Without a GPU nothing is tried and the exit code is 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree import ElementTree

from tests.gpu.claims import CLAIMS, NOT_TRIED, REFUTED, Result, overlapped, verdicts
from tests.mutants.__main__ import COPIED, copy_repository

LIMIT_S = 235.0
ENGINE = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "pydantic",
    "numba",
    "safetensors",
    "psutil",
    "pyyaml",
    "xxhash",
    "triton",
)
TESTS = (*ENGINE, "pytest", "pytest-timeout", "hypothesis")
SHOWN = ("torch", "triton", "transformers", "accelerate", "peft")
MACHINE = """
import json, platform, torch
cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps({
    "cards": [{"name": card.name, "capability": [card.major, card.minor], "bytes": card.total_memory} for card in cards],
    "python": platform.python_version(), "cuda": torch.version.cuda,
}))
"""
"""Program that describes the machine. It runs in a process of its own, because it takes memory of each card."""


@dataclass(frozen=True)
class Part:
    """A check that runs in a process of its own.

    Args:
        name: Name on the command line.
        arguments: Arguments of the interpreter. `{out}` stands for the folder of the part.
        needs: Packages without which the part is not tried.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = TESTS


def _pytest(*arguments: str) -> tuple[str, ...]:
    options = ("-p", "no:cacheprovider", "-m", "gpu", "-W", "default", "--junitxml={out}/tests.xml")
    return ("-m", "pytest", *options, *arguments)


CUDA = "tests/gpu/test_cuda.py"
FOLLOWS, ANSWERS = f"{CUDA}::test_every_way_follows_plain_pytorch", f"{CUDA}::test_a_sharded_model_answers_as_the_whole_one"
GROUPS, WORLDS = ("stages", "host", "nvme"), (1, 2, 3)
MEASURED = ("-m", "tests.gpu.measured")
PARTS = (
    Part("single", _pytest(CUDA, "tests/engine/test_arena.py", "-k", "not every_way and not answers")),
    *(Part(f"{group}-{n}", _pytest(f"{FOLLOWS}[{group}-{n}]")) for group in GROUPS for n in WORLDS),
    *(Part(f"answers-{n}", _pytest(f"{ANSWERS}[{n}]"), (*TESTS, "datasets")) for n in WORLDS),
    Part("notebook", _pytest("tests/gpu/test_notebook.py"), (*TESTS, "datasets", "typer", "rich", "jinja2", "tokenizers")),
    Part("kernels", _pytest("tests/gpu/test_kernels.py")),
    Part("kernel-rates", ("-m", "benchmarks.kernels", "--out", "{out}"), ("torch", "triton", "rich")),
    Part("peaks", (*MEASURED, "peaks", "{out}/peaks.json", "0", "1", "2", "3"), ENGINE),
    Part("peaks-nvme", (*MEASURED, "peaks", "{out}/peaks.json", "4"), ENGINE),
    Part("overlap", (*MEASURED, "overlap", "{out}/overlap.json"), ENGINE),
)


def lacking(needs: Iterable[str]) -> list[str]:
    """Return the packages that are missing, or older than pyproject.toml asks for."""
    found = []
    for name in needs:
        least = re.search(rf'"{name}>=([0-9.]+)', Path("pyproject.toml").read_text())
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(name)
            continue
        if least is not None and numbers(version) < numbers(least[1]):
            found.append(f"{name} >= {least[1]} ({version} is here)")
    return found


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", f"{version}.0")[:2]))


def run(part: Part, copy: Path, out: Path) -> Result:
    """Run a part in a copy of the repository, with its own folder and log in `out`."""
    if missing := lacking(part.needs):
        return Result(part.name, NOT_TRIED, f"missing: {', '.join(missing)}")
    folder = out / part.name
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    command = [sys.executable, *(argument.replace("{out}", str(folder)) for argument in part.arguments)]
    path = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=copy, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ranks that are left
        process.wait()
    result = Result(part.name, "passed", seconds=round(time.monotonic() - start, 1))
    if code != 0:
        ended = f"killed after {LIMIT_S:.0f} s" if code is None else f"exit code {code}"
        result.status, result.reason = "failed", f"{ended}\n{(folder / 'log.txt').read_text(errors='replace')[-2000:]}"
    if (folder / "tests.xml").exists():
        result.tests = outcomes(folder / "tests.xml")
    for file in folder.glob("*.json"):
        if file.name != "trace.json":
            result.figures = json.loads(file.read_text())
    return result


def outcomes(path: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit file: passed, failed, skipped or error."""
    kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
    found: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name, reports = case.attrib["name"], [child for child in case if child.tag in kinds]
        outcome = kinds[reports[0].tag] if reports else "passed"
        if outcome == "failed" and "pytest-timeout" in reports[0].get("message", ""):
            outcome = "error"  # a slow machine refutes nothing
        if found.get(name) != "failed":  # a teardown that fails is a second report
            found[name] = outcome
    return found


def describe() -> tuple[dict[str, Any], str]:
    """Return this machine with its cards, and why nothing can be tried ("" if it can)."""
    if missing := lacking(["torch"]):
        return {"cards": []}, f"missing: {missing[0]}"
    process = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True)
    if process.returncode:
        return {"cards": []}, [f"exit code {process.returncode}", *process.stderr.strip().splitlines()][-1]
    machine: dict[str, Any] = json.loads(process.stdout)
    machine |= {name: metadata.version(name) for name in SHOWN if not lacking([name])}
    return machine, "" if machine["cards"] else "torch sees no CUDA device"


def page(record: dict[str, Any]) -> str:
    """Return the page of a record, in Markdown."""
    machine, results = record["machine"], [Result(**each) for each in record["parts"]]
    names = ", ".join(card["name"] for card in machine["cards"]) or "no GPU"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "cuda", *SHOWN) if machine.get(name))
    blocks = ["# GPU report", f"{record['date']}, commit {record['commit']}: {names}. {versions}"]
    blocks.append(table(("claim", "of", ""), [(each["claim"], each["where"], each["verdict"]) for each in record["claims"]]))
    rows = []
    for result in results:
        failed = [name for name, how in result.tests.items() if how == "failed"]
        reasons = "; ".join([*result.reason.splitlines()[:1], *failed])
        rows.append((result.part, result.status, f"{result.seconds:.0f}", reasons))
    blocks.append(table(("part", "", "s", ""), rows))
    found = {result.part: result.figures for result in results if result.figures}
    if peaks := {**found.get("peaks", {}), **found.get("peaks-nvme", {})}:
        keys = ("allocated", "planned", "reserved", "used", "planned_with_runtime")
        rows = [(name, *(f"{case[key] / 2**20:,.0f}" for key in keys)) for name, case in peaks.items()]
        blocks.append("Peak device memory, MiB. `used` is reserved memory plus the CUDA context:")
        blocks.append(table(("run", "allocated", "planned", "reserved", "used", "planned with CUDA's runtime"), rows))
    if seconds := found.get("overlap"):
        totals = ", ".join(f"{name.removesuffix('_s')} {value:.3f} s" for name, value in seconds.items())
        blocks.append(
            f"Two micro-batches with all tiers on the host: {totals} (both: {overlapped(seconds):.0%} of the shorter)."
        )
    if rates := found.get("kernel-rates"):
        peers = ("ftkit", "eager", "compile", "liger")
        cells = [(name, *map(microseconds, map(case["seconds"].get, peers))) for name, case in rates["cases"].items()]
        blocks.append("Kernels, forward and backward, microseconds:")
        blocks.append(table(("", *peers), cells))
    return "\n\n".join(blocks) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def microseconds(seconds: float | str | None) -> str:
    """Return a time for the table; an error as it is."""
    return f"{seconds * 1e6:.0f}" if isinstance(seconds, float) else seconds or ""


def commit() -> str:
    """Return the commit that is tried; "unknown" outside a git checkout."""
    described = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(described, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def digest() -> str:
    """Return a digest of the files that are copied."""
    found = hashlib.sha256()
    for path in sorted(path for name in COPIED for path in (Path(name), *Path(name).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def write(out: Path, machine: dict[str, Any], results: Iterable[Result]) -> dict[str, Any]:
    """Write gpu.json and gpu.md; parts without a result are not tried. Return the record."""
    by_part = {part.name: Result(part.name, NOT_TRIED) for part in PARTS} | {result.part: result for result in results}
    decided = zip(CLAIMS, verdicts(by_part, machine["cards"]), strict=True)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "digest": digest(),
        "machine": machine,
        "claims": [{"claim": claim.text, "where": claim.where, "verdict": verdict} for claim, verdict in decided],
        "parts": [asdict(result) for result in by_part.values()],
    }
    (out / "gpu.json").write_text(json.dumps(record, indent=1))
    (out / "gpu.md").write_text(page(record))
    return record


def earlier(out: Path, machine: dict[str, Any]) -> list[Result]:
    """Return the results in `out` that are of these files and this machine."""
    if not (out / "gpu.json").exists():
        return []
    record = json.loads((out / "gpu.json").read_text())
    same = (record["digest"], record["machine"]) == (digest(), machine)
    return [Result(**each) for each in record["parts"] if each["status"] != NOT_TRIED] if same else []


def stop(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit on a signal, so that `run` kills its process."""
    sys.exit(128 + number)


def main() -> int:
    """Run the parts, and write the report after each of them."""
    parser = argparse.ArgumentParser(prog="make gpu", description="Run the checks that need a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args()
    if unknown := set(options.parts).difference(part.name for part in PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; known: {', '.join(part.name for part in PARTS)}")
    signal.signal(signal.SIGTERM, stop)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine, problem = describe()
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    if problem:
        print(f"not tried: {problem}")
        if (out / "gpu.json").exists() and json.loads((out / "gpu.json").read_text())["machine"]["cards"]:
            print(f"the report of a machine with a GPU is kept: {out / 'gpu.md'}")
            return 0
        record = write(out, machine, [Result(part.name, NOT_TRIED, problem) for part in chosen])
    else:
        results = earlier(out, machine)
        with tempfile.TemporaryDirectory(prefix="ftkit-gpu-") as folder:
            copy = copy_repository(Path(folder))
            installed = copy / "ftkit-0.dist-info"  # a run's summary has ftkit's version
            installed.mkdir()
            (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ftkit\nVersion: 0+{commit()}\n")
            for part in chosen:
                result = run(part, copy, out)
                print(f"{part.name:14} {result.status:10} {result.seconds:6.1f} s  {result.reason}", flush=True)
                results.append(result)
                record = write(out, machine, results)
    for claim in record["claims"]:
        print(f"{claim['verdict']:10} {claim['claim']}")
    print(f"written: {out / 'gpu.md'}")
    refuted = any(claim["verdict"] == REFUTED for claim in record["claims"])
    return int(refuted or any(part["status"] == "failed" for part in record["parts"]))


if __name__ == "__main__":
    sys.exit(main())
