"""`make bench`: ftkit beside DDP, FSDP2 and DeepSpeed ZeRO-3, one after the other, in turns, on the same work.

Each round runs every engine once, in a fresh set of rank processes; reported are medians over rounds, and ratios. Memory is
a rank's peak resident size (a page of shared memory counts in equal parts for the ranks that use it), on a GPU the most that
PyTorch allocated. The machine should be otherwise idle: the share of CPU time that went to others is measured and printed
with each run.
DeepSpeed lives in an environment of its own (.venv-peers, made at first use, which needs a C++ compiler and the package
index); `--engines` leaves it out. The result is also written as JSON, with the date, to runs/bench/.
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
    parser.add_argument("--models", default="374m,134m", help="13m, 134m, 374m, comma-separated")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="measured steps a run, after --warmup")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank and step")
    parser.add_argument("--tokens", type=int, default=256, help="a sequence")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run")
    return parser.parse_args()


def peers_python() -> str:
    """Return the Python that has DeepSpeed, making its environment first: ours, and DeepSpeed on top."""
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
    """What a set of ranks left behind.

    Args:
        ranks: the JSON that each wrote; of one that failed early there is none. said: all that they printed.
        foreign_cpu_share: of the machine's CPU time meanwhile, what went to others.
    """

    ranks: list[dict]
    said: str
    foreign_cpu_share: float

    @property
    def error(self) -> str:
        """The last error that a rank spoke of, else the last that was printed."""
        told = [rank["error"] for rank in self.ranks if rank.get("error")]
        lines = [line for line in self.said.splitlines() if "Error" in line and "ChildFailed" not in line]
        return (told or lines or [self.said])[-1][-300:]


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
    """Run a module in `world` fresh processes, and gather the `rank*.json` that they write to `folder`.

    Args:
        module: reads BENCH_SPEC and BENCH_STARTED. spec: what BENCH_SPEC says, as JSON.
        enter: a cgroup whose limits the run must keep. environment: more of it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    everything = {
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
        process = subprocess.Popen(command, env=everything, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        late = ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"\nTimeoutError: not done after {timeout:.0f} s"
        finally:
            _end(process)
        log.seek(0)
        said = log.read() + late
    used, own_used = busy_s() - busy, sum(os.times()[2:4]) - own
    share = max(0.0, used - own_used) / ((os.cpu_count() or 1) * (time.time() - start))
    return Outcome([json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))], said, share)


def _end(process: subprocess.Popen) -> None:
    """End a launcher so that it ends its ranks, which would outlive it if it were killed."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_once(name: str, model: str, options: argparse.Namespace) -> dict:
    """Run one engine once; return its figures, or what it said when it failed."""
    python = peers_python() if ENGINES[name].peer else sys.executable
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-") as folder:
        keys = ("batch", "warmup", "steps", "dtype", "world", "tokens")
        spec = {"engine": name, "model": model, "folder": folder, **{key: getattr(options, key) for key in keys}}
        limits = {"world": options.world, "timeout": options.timeout, "enter": getattr(options, "enter", None)}
        outcome = run_ranks("benchmarks.worker", spec, Path(folder), python=python, **limits)
    ranks = outcome.ranks
    if len(ranks) < options.world:
        return {"engine": name, "model": model, "error": outcome.error}
    return {
        "engine": name,
        "model": model,
        "step_s": statistics.median(ranks[0]["steps_s"]),
        "startup_s": ranks[0]["startup_s"],
        "peak_gb": max(rank.get("peak_device_bytes", rank["peak_bytes"]) for rank in ranks) / 1e9,
        "loss": ranks[0]["losses"][-1],
        "wrapped": ranks[0]["wrapped"],
        "foreign_cpu_share": outcome.foreign_cpu_share,
    }


def report(runs: list[dict], console: Console) -> list[dict]:
    """Print medians and ratios a model; return the medians."""
    medians = []
    for model in dict.fromkeys(run["model"] for run in runs):
        table = Table(title=f"Llama {model}: medians over rounds (ratio: the first / engine; below 1: the first is better)")
        for column in ("engine", "step s", "ratio", "peak GB a rank", "ratio", "ratio zero3", "start-up s", "ratio", "loss"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        rows = {}
        for name in dict.fromkeys(run["engine"] for run in runs if run["model"] == model):
            good = [run for run in runs if run["model"] == model and run["engine"] == name and "error" not in run]
            keys = ("step_s", "peak_gb", "startup_s", "loss")
            rows[name] = {key: statistics.median(run[key] for run in good) for key in keys} if good else None
        ours, zero3 = rows.get("ftkit") or next(iter(rows.values())), rows.get("ftkit-zero3")
        for name, row in rows.items():
            if row is None:
                error = next(run["error"] for run in runs if run["engine"] == name and "error" in run)
                table.add_row(name, error[:60])
                continue
            medians.append({"model": model, "engine": name, **row})
            ratio = {key: f"{ours[key] / row[key]:.2f}" if ours else "" for key in row}
            lean = f"{zero3['peak_gb'] / row['peak_gb']:.2f}" if zero3 else ""
            cells = [f"{row['step_s']:.3f}", ratio["step_s"], f"{row['peak_gb']:.2f}", ratio["peak_gb"], lean]
            table.add_row(name, *cells, f"{row['startup_s']:.1f}", ratio["startup_s"], f"{row['loss']:.4f}")
        console.print(table)
    return medians


def main() -> None:
    """Run all rounds and print the tables."""
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
                figures = "{step_s:.3f} s a step, {peak_gb:.2f} GB, start {startup_s:.1f} s"
                others = " (others' CPU {foreign_cpu_share:.0%})"
                said = run.get("error") or (figures + others).format(**run)
                console.print(f"round {number + 1}  {model}  {name}: {said}", highlight=False)
    medians = report(runs, console)
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now()
    path = folder / f"{now:%Y-%m-%d-%H%M%S}.json"
    result = {"date": f"{now:%Y-%m-%d}", "options": vars(options), "medians": medians, "runs": runs}
    path.write_text(json.dumps(result, indent=1))
    console.print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
