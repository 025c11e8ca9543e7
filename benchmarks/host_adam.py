"""`python -m benchmarks.host_adam`: AdamW on the host beside memory's own speed, torch's fused AdamW and DeepSpeed's.

All run in turns on arrays far larger than the caches; reported are medians over rounds. The yardstick is a stream of the
same mix: a compiled loop that reads and writes the same arrays, as many bytes of each, with one addition an array. No AdamW
that touches each byte once can be faster than that. Peers get their gradient in fp32, which is what they take, and write
the 16-bit weight in a pass of their own (`+ copy`); `pieces` is the whole work from 16-bit gradient to 16-bit weight with
torch's own operations, in pieces that fit the cache.

GB/s are useful bytes: 28 a parameter for AdamW, whatever an implementation moves beside them. DeepSpeed lives in .venv-peers
(see benchmarks/run.py), waits its turn in a process of its own, and is left out by `--no-deepspeed`. The machine should be
otherwise idle: the share of CPU time that went to others is measured and printed. The result is also written as JSON to
runs/bench/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.adamw import adamw

from benchmarks.run import ROOT, busy_s, peers_python
from ftkit.engine.kernels.host_loops import HostLoops

NUMBERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
PIECE_NUMEL = 1 << 18  # elements that torch updates at a time, so that they stay in cache
STREAM = "stream, same mix"
USEFUL_BYTES = 28
"""Of AdamW, a parameter: 16-bit gradient in, three fp32 states in and out, 16-bit weight out."""

MARK = "SECONDS "
"""What a line of the other process's output begins with, when it is an answer and not a log."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="parameters")
    parser.add_argument("--threads", default="1,2", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--deepspeed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--serve-deepspeed", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Arrays:
    """What one step touches, n elements each: master and moments, gradients, weights, all written once beforehand."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n = n
        self.master = torch.randn(n, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.full((n,), 1e-3), torch.full((n,), 1e-5)
        self.wide = torch.randn(n, generator=generator).mul_(1e-2)
        self.gradient = {dtype: self.wide.to(dtype) for dtype in (torch.bfloat16, torch.float16)}
        self.weight = {dtype: self.master.to(dtype) for dtype in self.gradient}


@numba.jit(nopython=True, nogil=True)
def _same_mix(a: Any, b: Any, c: Any, source: Any, target: Any, one: Any) -> None:
    for i in range(a.size):
        a[i] += one
        b[i] += one
        c[i] += one
        target[i] = source[i]


@numba.jit(nopython=True, nogil=True)
def _triad(a: Any, b: Any, c: Any, one: Any) -> None:
    for i in range(a.size):
        a[i] = b[i] + one * c[i]


@numba.jit(nopython=True, nogil=True)
def _copy(a: Any, b: Any) -> None:
    for i in range(a.size):
        a[i] = b[i]


class Threads:
    """Loops over arrays, each thread on its own part of them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)

    def __call__(self, loop: Callable[..., None], *tensors: Tensor, one: float | None = None) -> None:
        """Run `loop` on parts of `tensors` (n,)."""
        arrays = [t.view(torch.int16).numpy() if t.dtype.itemsize == 2 else t.numpy() for t in tensors]
        scalars = [] if one is None else [np.float32(one)]
        part = -(-arrays[0].size // (64 * self.threads)) * 64
        starts = range(0, arrays[0].size, part)
        for done in [self.pool.submit(loop, *(a[s : s + part] for a in arrays), *scalars) for s in starts]:
            done.result()


def torch_fused(x: Arrays, piece: slice, wide: Tensor) -> None:
    """Run torch's fused AdamW on elements `piece`."""
    lists = [[t] for t in (x.master[piece], wide, x.exp_avg[piece], x.exp_avg_sq[piece])]
    adamw(*lists, [], [torch.tensor(9.0)], fused=True, amsgrad=False, maximize=False, **NUMBERS)


def torch_pieces(x: Arrays, dtype: torch.dtype) -> None:
    """Do the whole step with torch's operations, in pieces that fit the cache."""
    for start in range(0, x.n, PIECE_NUMEL):
        piece = slice(start, start + PIECE_NUMEL)
        torch_fused(x, piece, x.gradient[dtype][piece].float() * 0.5)
        x.weight[dtype][piece].copy_(x.master[piece])


def add_pieces(total: Tensor, other: Tensor) -> None:
    """Add with torch, in pieces: it widens `other` before it adds."""
    for start in range(0, len(total), PIECE_NUMEL):
        total[start : start + PIECE_NUMEL].add_(other[start : start + PIECE_NUMEL])


def contenders(x: Arrays, threads: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return what runs in this process: a name, what to call, and its useful bytes a parameter."""
    host, spread = HostLoops(threads), Threads(threads)
    bf16, fp16 = x.gradient

    total = torch.zeros(x.n)

    def ours(dtype: torch.dtype) -> None:
        states = (x.master, x.gradient[dtype], x.exp_avg, x.exp_avg_sq, x.weight[dtype])
        host.adamw(*states, factor=0.5, step=10, **NUMBERS)

    def fused_and_copy(dtype: torch.dtype) -> None:
        torch_fused(x, slice(None), x.wide)
        x.weight[dtype].copy_(x.master)

    states = (x.master, x.exp_avg, x.exp_avg_sq)
    return {
        "copy, fp32": (lambda: spread(_copy, x.master, x.wide), 8),
        "triad, fp32": (lambda: spread(_triad, x.master, x.wide, x.exp_avg, one=1e-3), 12),
        STREAM: (lambda: spread(_same_mix, *states, x.gradient[bf16], x.weight[bf16], one=1e-7), USEFUL_BYTES),
        "ftkit, bf16": (lambda: ours(bf16), USEFUL_BYTES),
        "ftkit, fp16": (lambda: ours(fp16), USEFUL_BYTES),
        "torch fused + copy, bf16": (lambda: fused_and_copy(bf16), USEFUL_BYTES),
        "torch fused + copy, fp16": (lambda: fused_and_copy(fp16), USEFUL_BYTES),
        "torch pieces, bf16": (lambda: torch_pieces(x, bf16), USEFUL_BYTES),
        "ftkit square sum, bf16": (lambda: host.square_sum(x.gradient[bf16]), 2),
        "torch vector_norm, bf16": (lambda: torch.linalg.vector_norm(x.gradient[bf16], dtype=torch.float32), 2),
        "ftkit fp32 += bf16": (lambda: host.add_(total, x.gradient[bf16]), 10),
        "torch fp32 += bf16, pieces": (lambda: add_pieces(total, x.gradient[bf16]), 10),
    }


class DeepSpeed:
    """DeepSpeedCPUAdam and the copies, in a process of its own, a step at a time."""

    def __init__(self, n: int, threads: int) -> None:
        command = [peers_python(), "-m", "benchmarks.host_adam", "--serve-deepspeed", "--millions", str(n // 10**6)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT}
        self.process = subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL)

    def seconds(self, dtype: str) -> float:
        """Have one step made, the weight copied to `dtype` ('bf16', 'fp16'); return its duration."""
        print(dtype, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith(MARK):
                return float(line.removeprefix(MARK))
        raise RuntimeError("the process with DeepSpeed ended; run it alone with --serve-deepspeed to see why")

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def serve_deepspeed(n: int) -> None:
    """Make a step whenever a line asks for it, and say how long it took."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    x = Arrays(n)
    parameter = torch.nn.Parameter(x.master)
    parameter.grad = x.wide
    betas = (NUMBERS["beta1"], NUMBERS["beta2"])
    kept = {key: NUMBERS[key] for key in ("lr", "eps", "weight_decay")}
    optimizer = DeepSpeedCPUAdam([parameter], betas=betas, adamw_mode=True, **kept)
    targets = {"bf16": x.weight[torch.bfloat16], "fp16": x.weight[torch.float16]}
    for line in sys.stdin:
        start = time.perf_counter()
        optimizer.step()
        with torch.no_grad():
            targets[line.strip()].copy_(parameter)
        print(f"{MARK}{time.perf_counter() - start}", flush=True)


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(x: Arrays, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders in turns; return seconds of every round by name, and the share of CPU time others had."""
    torch.set_num_threads(threads)
    calls: dict[str, tuple[Callable[[], float], int]] = {
        name: (lambda call=call: timed(call), size) for name, (call, size) in contenders(x, threads).items()
    }
    peer = DeepSpeed(x.n, threads) if options.deepspeed else None
    if peer:
        calls |= {f"DeepSpeed + copy, {d}": (lambda d=d: peer.seconds(d), USEFUL_BYTES) for d in ("bf16", "fp16")}
    for once, _ in calls.values():
        once()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    processes = [psutil.Process(), *([psutil.Process(peer.process.pid)] if peer else [])]
    busy, own, start = busy_s(), _cpu_s(processes), time.time()
    for _ in range(options.rounds):
        for name, (once, _) in calls.items():
            seconds[name].append(once())
    foreign = busy_s() - busy - (_cpu_s(processes) - own)
    share = max(0.0, foreign) / ((os.cpu_count() or 1) * (time.time() - start))
    if peer:
        peer.close()
    sizes = {name: size for name, (_, size) in calls.items()}
    return {"threads": threads, "seconds": seconds, "foreign_cpu_share": share, "bytes": sizes}


def report(run: dict[str, Any], n: int, console: Console) -> list[dict[str, Any]]:
    """Print one table; return its rows."""
    title = f"{n // 10**6} M parameters, {run['threads']} threads: medians (others' CPU {run['foreign_cpu_share']:.0%})"
    table = Table(title=title)
    for column in ("", "ns a parameter", "useful GB/s", "of the stream", "ftkit bf16 / it", "best", "worst"):
        table.add_column(column, justify="right" if column else "left")
    medians = {name: statistics.median(seconds) / n * 1e9 for name, seconds in run["seconds"].items()}
    rows = []
    for name, seconds in run["seconds"].items():
        ns, size = medians[name], run["bytes"][name]
        row = {"threads": run["threads"], "name": name, "ns_per_parameter": ns, "gb_per_s": size / ns}
        cells = [f"{ns:.3f}", f"{size / ns:.1f}"]
        if size == USEFUL_BYTES:
            row |= {"of_stream": medians[STREAM] / ns, "ftkit_ratio": medians["ftkit, bf16"] / ns}
            cells += [f"{row['of_stream']:.0%}", f"{row['ftkit_ratio']:.2f}"]
        else:
            cells += ["", ""]
        rows.append(row)
        table.add_row(name, *cells, f"{min(seconds) / n * 1e9:.3f}", f"{max(seconds) / n * 1e9:.3f}")
    console.print(table)
    return rows


def main() -> None:
    """Measure with each number of threads, print the tables, write the JSON."""
    options = parse()
    n = options.millions * 10**6
    if options.serve_deepspeed:
        serve_deepspeed(n)
        return
    console = Console(width=120)
    x = Arrays(n)
    runs = [measure(x, int(threads), options) for threads in options.threads.split(",")]
    medians = [row for run in runs for row in report(run, n, console)]
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now()
    path = folder / f"{now:%Y-%m-%d-%H%M%S}-host-adam.json"
    result = {"date": f"{now:%Y-%m-%d}", "options": vars(options), "medians": medians, "runs": runs}
    path.write_text(json.dumps(result, indent=1))
    console.print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
