"""`make bench-checkpoints`: saving and loading of ftkit on three tiers beside FSDP2 with torch DCP and DeepSpeed ZeRO-3.

Two ranks train a few steps of a Llama, save it (at once, and while training goes on), and end. Fresh processes load it,
two of them, then one, then three, and take the next two steps, whose losses must be those of the run that was not broken
off. All files are synced on the save's time and dropped from the page cache before each load, alike for all; before each the
machine is brought to rest (benchmarks/warm.py). The marks are taken in the same run on the same folder: plain O_DIRECT loops
(benchmarks/disk.py), again before each engine, because a drive's rate changes within minutes; before each load over the very
files that are loaded, twice, because some drives give what was just written slowly the first time; and XXH3 over memory.
"Of raw" is the time that those loops need for all that has to be moved, over the time taken: state on NVMe is read and
written, by a save and by a load. Then `ftkit export` of a 3B model that is larger than the memory it gets (big_export.py).

Goals (374M): a save and a load take at most 3 s, or reach 70 % of the plain loops' rate; checksums are made at 10 GB/s or
more; a save under way holds training up for at most 10 % of its time; memory stays within training's peak and two units
(a load's within that of a whole run, its first steps too: what the model was built from still lies in memory at both);
the 3B export stays under 3 GiB. Needs about 40 GB of disk, all of which is free again at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import big_export
from benchmarks.checkpoint_tables import report
from benchmarks.disk import RAW, raw, reserved, turns, uncached
from benchmarks.run import PEERS, ROOT, peers_python, run_ranks
from benchmarks.savers import SAVERS
from benchmarks.shapes import SHAPES
from benchmarks.warm import read_rate, settle, warm_memory
from ftkit.engine.checkpoint.safetensors import DATA_START, PIECE_BYTES
from ftkit.engine.checkpoint.sealed import checksum
from ftkit.engine.memory.arena import Arena

BUILD = ROOT / "runs" / "bench-extensions"
"""Where DeepSpeed compiles its C++ at the first run (minutes), for this benchmark alone."""
EXPORT_CAP_BYTES = 3 << 30
RAW_BYTES = 2 << 30


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(SAVERS), help="names, comma-separated")
    parser.add_argument("--model", default="374m", choices=SHAPES)
    parser.add_argument("--export", default="3b", help="size of the model to export within 3 GiB; '' leaves it out")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind")
    parser.add_argument("--warmup", type=int, default=2, help="steps before anything is measured")
    parser.add_argument("--steps", type=int, default=8, help="steps that say what one takes without a save")
    parser.add_argument("--world", type=int, default=2, help="ranks that save, and load first")
    parser.add_argument("--worlds", default="1,3", help="other numbers of ranks that load")
    parser.add_argument("--rows", type=int, default=6, help="sequences of all ranks; every number of ranks must divide it")
    parser.add_argument("--tokens", type=int, default=64, help="a sequence")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="on the drive to be measured")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a set of ranks")
    return parser.parse_args()


def raw_rates(folder: Path, console: Console) -> dict[str, Any]:
    """Return what the best plain O_DIRECT loop writes and reads, and XXH3 over memory, in bytes a second."""
    memory = Arena(RAW_BYTES).take(RAW_BYTES // 4, torch.float32)
    memory.view(torch.int64).random_()
    found = drive_rates(folder, memory, RAW, 3, console)
    data = memory.view(torch.uint8).numpy()
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        for at in range(0, data.nbytes, PIECE_BYTES):
            checksum(data[at : at + PIECE_BYTES])
        rates.append(data.nbytes / (time.perf_counter() - began))
    return {**found, "checksum": statistics.median(rates)}


def drive_rates(
    folder: Path, memory: torch.Tensor, cases: list[tuple[int, int]], rounds: int, console: Console
) -> dict[str, Any]:
    """Return what the best plain O_DIRECT loop writes and reads of `memory`, in bytes a second, and which it was.

    Args:
        cases: (threads, bytes of a block) of each loop.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-raw-", dir=folder) as scratch:
        path = reserved(Path(scratch) / "file", DATA_START + RAW_BYTES)
        try:
            rows = turns([raw(path, memory, *case) for case in cases], RAW_BYTES, rounds, console)
        except OSError as error:
            sys.exit(f"{folder}: no O_DIRECT ({error.strerror}): nothing to compare with")
        for what in ("write", "read"):
            best = max(rows, key=lambda row: row[what])
            found[what], found[f"{what}_by"] = best[what] * 1e9, best["name"]
    return found


def ranks_do(name: str, what: str, world: int, folder: Path, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Let fresh ranks save or load; return {'ranks': their figures} or {'error': what the first said}."""
    saver = SAVERS[name]
    keys = ("model", "rounds", "warmup", "steps", "rows", "tokens")
    environment = dict(saver.environment)
    python = sys.executable
    if saver.peer:
        python = peers_python()
        environment["PATH"] = f"{PEERS / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"  # its build needs ninja
        environment["TORCH_EXTENSIONS_DIR"] = str(BUILD)
        for lock in BUILD.glob("*/*/lock"):  # of a run that ended while it compiled: the next would wait for it for ever
            lock.unlink()
    with (
        tempfile.TemporaryDirectory(prefix="results-", dir=folder) as results,
        tempfile.TemporaryDirectory(prefix="nvme-", dir=folder) as nvme,  # DeepSpeed never empties its own
    ):
        spec = {"engine": name, "do": what, "folder": str(folder), "results": results, "nvme": nvme, **more}
        spec |= {key: getattr(options, key) for key in keys}
        how = {"world": world, "timeout": options.timeout, "python": python, "environment": environment}
        outcome = run_ranks("benchmarks.checkpoint_rank", spec, Path(results), **how)
    if len(outcome.ranks) < world or any("error" in rank for rank in outcome.ranks):
        return {"error": outcome.error}
    return {"ranks": outcome.ranks, "foreign_cpu_share": outcome.foreign_cpu_share}


def size_of(folder: Path) -> int:
    """Return the bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Let one engine save, then load with each number of ranks; return all its figures."""
    memory = Arena(RAW_BYTES).take(RAW_BYTES // 4, torch.float32)
    memory.view(torch.int64).random_()
    rates = drive_rates(options.folder, memory, RAW[-2:], 2, console)
    del memory
    settle(options.folder, rates["write"])
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", dir=options.folder) as folder_name:
        folder = Path(folder_name)
        result: dict[str, Any] = {"engine": name, "title": SAVERS[name].title, "raw": rates}
        result["save"] = ranks_do(name, "save", options.world, folder, options)
        if "error" in result["save"]:
            console.print(f"{name}: does not save: {result['save']['error']}", highlight=False, markup=False)
            return result
        saved = Path(result["save"]["ranks"][0]["saved"])
        result["bytes"] = size_of(saved)
        result["loads"] = {}
        for world in (options.world, *map(int, filter(None, options.worlds.split(",")))):
            uncached(saved)
            marks = [read_rate(saved) for _ in range(2)]
            result["loads"][str(world)] = ranks_do(name, "load", world, folder, options, saved=str(saved))
            result["loads"][str(world)]["raw_read"] = marks
        if SAVERS[name].ours:
            result["command_export"] = big_export.export(saved, folder / "exported")
    shutil.rmtree(folder, ignore_errors=True)
    console.print(f"{name}: {_said(result)}", highlight=False, markup=False)
    return result


def _said(result: dict[str, Any]) -> str:
    seconds = statistics.median(save["seconds"] for save in result["save"]["ranks"][0]["saves"])
    loads = (
        f"{world}: {told['error'][:80]}" if "error" in told else f"{world}: {told['ranks'][0]['load']['seconds']:.2f} s"
        for world, told in result["loads"].items()
    )
    share = result["save"]["foreign_cpu_share"]
    return f"saved in {seconds:.2f} s; loaded by ranks {', '.join(loads)} (others' CPU {share:.0%})"


def measure_export(size: str, folder: Path, console: Console) -> dict[str, Any]:
    """Write a large checkpoint and export it; return seconds, bytes and peaks."""
    with tempfile.TemporaryDirectory(prefix="bench-export-", dir=folder) as scratch:
        checkpoint, out = Path(scratch) / "checkpoint-1", Path(scratch) / "model"
        began = time.perf_counter()
        numel = big_export.write_checkpoint(checkpoint, size)
        seconds, wrote = time.perf_counter() - began, size_of(checkpoint)
        console.print(f"{size}: {numel:,} parameters, {wrote / 1e9:.1f} GB written in {seconds:.0f} s", highlight=False)
        result = big_export.export(checkpoint, out, EXPORT_CAP_BYTES)
        result |= {"model": size, "parameters": numel, "read_bytes": wrote}
        if "error" not in result:
            result["wrong_tensors"] = big_export.wrong_values(out)
    return result


def machine(folder: Path) -> dict[str, Any]:
    """Return what the figures depend on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    memory = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.machine()),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "free_disk_gb": round(shutil.disk_usage(folder).free / 1e9, 1),
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure everything, print tables and bounds, write JSON to runs/bench/."""
    options = parse()
    console = Console(width=120)
    names = options.engines.split(",") if options.engines else []
    if unknown := set(names) - set(SAVERS):
        sys.exit(f"unknown engines {sorted(unknown)}; known: {', '.join(SAVERS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    now = datetime.datetime.now()
    result: dict[str, Any] = {
        "date": f"{now:%Y-%m-%d}",
        "command": " ".join(["python -m benchmarks.checkpoints", *sys.argv[1:]]),
        "machine": machine(options.folder),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
    }
    del result["options"]["folder"]
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoints-{now:%Y-%m-%d-%H%M%S}.json"
    console.print(f"{warm_memory():.0f} GB of memory touched once, so that the host has given it", highlight=False)
    result["raw"] = raw_rates(options.folder, console)
    result["engines"] = []
    for name in names:
        result["engines"].append(measure(name, options, console))
        path.write_text(json.dumps(result, indent=1))  # what was measured stays, whatever becomes of the next
    if options.export:
        result["big_export"] = measure_export(options.export, options.folder, console)
    result["seconds"] = time.time() - began
    result["bounds"] = report(result, options.world, console)
    path.write_text(json.dumps(result, indent=1))
    console.print(f"written: {path.relative_to(ROOT)}, after {result['seconds'] / 60:.0f} minutes")


if __name__ == "__main__":
    main()
