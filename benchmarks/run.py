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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import ENGINES, SIDE_BY_SIDE

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
DEEPSPEED = "deepspeed==0.19.8"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(SIDE_BY_SIDE), help="names, comma-separated")
    parser.add_argument("--models", default="374m,134m", help="13m, 134m, 374m, 1b, comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps per run, after --warmup")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--tokens", type=int, default=256, help="per sequence")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--save", action="store_true", help="also save, and resume in new processes")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per run")
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


@dataclass(frozen=True)
class Outcome:
    """The results of a set of ranks.

    Args:
        ranks: JSON of each rank. A rank that failed early has none.
        output: Everything that the ranks printed.
        foreign_cpu_share: Share of the machine's CPU time that other processes used.
    """

    ranks: list[dict]
    output: str
    foreign_cpu_share: float

    @property
    def error(self) -> str:
        """The last error in a rank's JSON, else the last one that was printed."""
        reported = [rank["error"] for rank in self.ranks if rank.get("error")]
        printed = [line for line in self.output.splitlines() if "Error" in line and "ChildFailed" not in line]
        return (reported or printed or [self.output])[-1][-300:]


def write_result(name: str, result: dict[str, Any], console: Console) -> None:
    """Write a result with its date as JSON, and print where it is."""
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now()
    path = folder / f"{now:%Y-%m-%d-%H%M%S}-{name}.json"
    path.write_text(json.dumps({"date": f"{now:%Y-%m-%d}", **result}, indent=1, default=str))
    console.print(f"written: {path}", highlight=False)


def run_ranks(
    module: str,
    spec: dict,
    folder: Path,
    *,
    world: int,
    timeout: float,
    python: str = sys.executable,
    enter: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Run a module in new processes, and collect the `rank*.json` that they write.

    Args:
        module: Module to run. It reads BENCH_SPEC and BENCH_STARTED.
        spec: Value of BENCH_SPEC.
        folder: Folder of the ranks' JSON files.
        world: Number of ranks.
        timeout: Limit in seconds.
        python: Interpreter.
        enter: Memory cgroup of the ranks.
        environment: Further environment variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        **os.environ,
        "BENCH_SPEC": json.dumps(spec),
        "BENCH_STARTED": str(time.time()),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
        **(environment or {}),
    }
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", module]
    if enter is not None:
        command = ["sh", "-c", f'echo $$ > {enter}/cgroup.procs && exec "$@"', "sh", *command]
    busy, own, start = busy_s(), sum(os.times()[2:4]), time.time()
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        late = ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"\nTimeoutError: not done after {timeout:.0f} s"
        finally:
            _end(process)
        log.seek(0)
        output = log.read() + late
    used, own_used = busy_s() - busy, sum(os.times()[2:4]) - own
    share = max(0.0, used - own_used) / ((os.cpu_count() or 1) * (time.time() - start))
    return Outcome([json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))], output, share)


def _end(process: subprocess.Popen) -> None:
    """Terminate a launcher. It ends its ranks, which would survive a kill."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_once(name: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine once; return its figures, or its error."""
    python = peers_python() if ENGINES[name].peer else sys.executable
    save = getattr(options, "save", False)
    limits = {"world": options.world, "timeout": options.timeout, "enter": getattr(options, "enter", None), "python": python}
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-", dir=scratch(save)) as folder:
        keys = ("batch", "warmup", "steps", "dtype", "world", "tokens")
        spec = {"engine": name, "model": model, "folder": folder, "save": save, "resume": None}
        spec |= {key: getattr(options, key) for key in keys}
        outcome = run_ranks("benchmarks.worker", spec, Path(folder), **limits)
        ranks = outcome.ranks
        if len(ranks) < options.world:
            return {"engine": name, "model": model, "error": outcome.error}
        found = figures(ranks) | {"engine": name, "model": model, "foreign_cpu_share": outcome.foreign_cpu_share}
        if not save:
            return found
        checkpoint = Path(folder, f"checkpoint-{options.warmup + options.steps}")
        found["saved_gb"] = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) / 1e9
        found["longer_s"] = sum(ranks[0]["after_s"]) - len(ranks[0]["after_s"]) * found["step_s"]
        drop_cache(checkpoint)
        for path in Path(folder).glob("rank*.json"):
            path.unlink()
        outcome = run_ranks("benchmarks.worker", {**spec, "resume": str(checkpoint)}, Path(folder), **limits)
        if len(outcome.ranks) < options.world:
            return found | {"error": f"does not resume: {outcome.error}"}
        resumed = outcome.ranks[0]
        found["resume_s"] = resumed["startup_s"] - found["startup_s"]
        pairs = zip(ranks[0]["losses"][-len(resumed["losses"]) :], resumed["losses"])
        return found | {"loss_off": max(abs(before - after) for before, after in pairs)}


def scratch(save: bool) -> Path | None:
    """Return the folder for temporary files: checkpoints belong on the drive of this repository."""
    (ROOT / "runs").mkdir(exist_ok=True)
    return ROOT / "runs" if save else None


def figures(ranks: list[dict]) -> dict[str, Any]:
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
