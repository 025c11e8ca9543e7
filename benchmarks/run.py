"""`make bench`: ftkit beside DDP, FSDP2 and DeepSpeed ZeRO-3 on the same work, in turns.

Each round runs every engine once, in new processes. Tables show medians over rounds, and ratios. Memory is a rank's peak
resident size (a page of shared memory counts in equal parts for the ranks that use it); on a GPU it is the peak that PyTorch
allocated. The share of CPU time that other processes used is printed with each run: the machine should be otherwise idle.

DeepSpeed has its own environment, .venv-peers. The first use creates it, which needs a C++ compiler and the package index.
`--engines` omits it. Results are also written as JSON to runs/bench/.

`--save` (`make bench-checkpoints`) also saves after the measured steps. "Longer" is the time that the save adds to training:
the two steps after it and everything between, less two usual steps. New processes then resume from the checkpoint. The table
shows what that adds to their start-up, and the largest difference of the losses of these two steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import site
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import ENGINES, SIDE_BY_SIDE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "bench"
PEERS = ROOT / ".venv-peers"
DEEPSPEED = "deepspeed==0.19.8"
TIMEOUT_S = 900
"""Limit of one run."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(SIDE_BY_SIDE), help="names, comma-separated")
    parser.add_argument("--models", default="374m,134m", help="names in shapes.py, comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps per run, after --warmup")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--tokens", type=int, default=256, help="per sequence")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--save", action="store_true", help="also save, and resume in new processes")
    return parser.parse_args()


def peers_python() -> str:
    """Return the Python that has DeepSpeed. Its environment is made at first use: this one, and DeepSpeed on top."""
    python = PEERS / "bin" / "python"
    if not (PEERS / ".ready").exists():
        shutil.rmtree(PEERS, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        own = next(PEERS.glob("lib/python*/site-packages"))
        (own / "ours.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", DEEPSPEED], check=True)
        (PEERS / ".ready").touch()
    return str(python)


def busy_s() -> float:
    """Return the CPU seconds that all processes of this machine have used."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def write_result(name: str, result: dict[str, Any], console: Console, folder: Path = RESULTS) -> None:
    """Write a result with its date as JSON, and print the file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now()
    path = folder / f"{now:%Y-%m-%d-%H%M%S}-{name}.json"
    path.write_text(json.dumps({"date": f"{now:%Y-%m-%d}", **result}, indent=1, default=str))
    console.print(f"written: {path}", highlight=False)


def entering(group: Path | None, command: list[str]) -> list[str]:
    """Return the command, run by a shell that first joins a cgroup if one is given."""
    if group is None:
        return command
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def run_ranks(spec: dict[str, Any], group: Path | None) -> tuple[list[dict[str, Any]], str, float]:
    """Run `benchmarks.worker` on new ranks.

    Args:
        spec: Its value of BENCH_SPEC.
        group: Memory cgroup of the ranks.

    Returns:
        JSON of each rank that ended well, everything that they printed, and the share of the machine's CPU time that other
        processes used.
    """
    folder, world = Path(spec["folder"]), spec["world"]
    python = peers_python() if ENGINES[spec["engine"]].peer else sys.executable  # installs at first use
    variables = {
        **os.environ,
        "BENCH_SPEC": json.dumps(spec),
        "BENCH_STARTED": str(time.time()),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    busy, own, start = busy_s(), sum(os.times()[2:4]), time.time()
    with open(folder / "log", "w+") as log:
        command = entering(group, [*command, "-m", "benchmarks.worker"])
        process = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        late = ""
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            late = f"\nTimeoutError: not done after {TIMEOUT_S} s"
        finally:
            process.terminate()  # the launcher ends its ranks, which would survive a kill
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read() + late
    used = busy_s() - busy - (sum(os.times()[2:4]) - own)
    share = max(0.0, used) / ((os.cpu_count() or 1) * (time.time() - start))
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))], output, share


def run_once(name: str, model: str, options: argparse.Namespace, group: Path | None = None) -> dict[str, Any]:
    """Run one engine once, in a memory cgroup if one is given; return its figures, or its error."""
    found: dict[str, Any] = {"engine": name, "model": model}
    (ROOT / "runs").mkdir(exist_ok=True)  # checkpoints belong on the drive of this repository
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-", dir=ROOT / "runs" if options.save else None) as folder:
        keys = ("batch", "warmup", "steps", "dtype", "world", "tokens", "save")
        spec = {**found, "folder": folder, "resume": None, **{key: getattr(options, key) for key in keys}}
        ranks, output, found["foreign_cpu_share"] = run_ranks(spec, group)
        if len(ranks) < options.world:
            return found | {"error": error_in(output)}
        found |= figures(ranks)
        if not options.save:
            return found
        checkpoint = Path(folder, f"checkpoint-{options.warmup + options.steps}")
        found["saved_gb"] = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) / 1e9
        found["longer_s"] = sum(ranks[0]["after_s"]) - len(ranks[0]["after_s"]) * found["step_s"]
        drop_cache(checkpoint)
        for path in Path(folder).glob("rank*.json"):
            path.unlink()
        again, output, _ = run_ranks({**spec, "resume": str(checkpoint)}, group)
        if len(again) < options.world:
            return found | {"error": f"does not resume: {error_in(output)}"}
        found["resume_s"] = again[0]["startup_s"] - found["startup_s"]
        pairs = zip(ranks[0]["losses"][-len(again[0]["losses"]) :], again[0]["losses"])
        return found | {"loss_off": max(abs(before - after) for before, after in pairs)}


def error_in(output: str) -> str:
    """Return the last error that ranks printed."""
    printed = [line for line in output.splitlines() if "Error" in line and "ChildFailed" not in line]
    return (printed or [output])[-1][-300:]


def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run from its ranks' records."""
    return {
        "step_s": statistics.median(ranks[0]["steps_s"]),
        "startup_s": ranks[0]["startup_s"],
        "peak_gb": max(rank.get("peak_device_bytes", rank["peak_bytes"]) for rank in ranks) / 1e9,
        "loss": ranks[0]["losses"][-1],
        "wrapped": ranks[0]["wrapped"],
    }


def drop_cache(folder: Path) -> None:
    """Sync the files in `folder` and drop them from the page cache: the next reader reads the drive."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


COLUMNS = {
    "step_s": "step s",
    "peak_gb": "peak GB per rank",
    "startup_s": "start-up s",
    "saved_gb": "saved GB",
    "longer_s": "longer s",
    "resume_s": "resume s",
    "loss": "loss",
    "loss_off": "loss off",
}


def report(runs: list[dict], console: Console) -> list[dict]:
    """Print medians per model, with the first engine's figure over each; return the medians."""
    medians = []
    for model in dict.fromkeys(run["model"] for run in runs):
        keys = [key for key in COLUMNS if any(key in run for run in runs)]
        table = Table("engine", *(COLUMNS[key] for key in keys), title=f"Llama {model}: medians (first engine / this one)")
        first: dict[str, Any] = {}
        for name in dict.fromkeys(run["engine"] for run in runs):
            good = [run for run in runs if (run["model"], run["engine"]) == (model, name) and "error" not in run]
            if not good:
                table.add_row(name, "failed")
                continue
            row = {key: statistics.median(run[key] for run in good) for key in keys}
            first = first or row
            shown = [f"{row[key]:.3f}" for key in keys]
            for place, key in enumerate(keys):
                if key in ("step_s", "peak_gb", "startup_s"):
                    shown[place] += f" ({first[key] / row[key]:.2f})"
            table.add_row(name, *shown)
            medians.append({"model": model, "engine": name, **row})
        console.print(table)
    return medians


def main() -> None:
    """Run all rounds, print tables, and write JSON to runs/bench/."""
    options = parse()
    console = Console(width=120)
    names = options.engines.split(",")
    if unknown := set(names) - set(ENGINES):
        sys.exit(f"unknown engines {sorted(unknown)}; known: {', '.join(ENGINES)}")
    runs = []
    for model in options.models.split(","):
        for number in range(options.rounds):
            for name in names:
                run = run_once(name, model, options)
                runs.append(run)
                figures = "{step_s:.3f} s per step, {peak_gb:.2f} GB, start {startup_s:.1f} s"
                others = " (others' CPU {foreign_cpu_share:.0%})"
                text = run.get("error") or (figures + others).format(**run)
                console.print(f"round {number + 1}  {model}  {name}: {text}", highlight=False, markup=False)
    write_result("engines", {"options": vars(options), "medians": report(runs, console), "runs": runs}, console)


if __name__ == "__main__":
    main()
