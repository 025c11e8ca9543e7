"""Measure the host's AdamW and the NVMe tier against the limits of memory and drive.

    python -m benchmarks.host adam    ftkit and torch's fused AdamW, beside a loop with the same reads and writes;
                                      also DeepSpeed's and bitsandbytes' 8-bit AdamW where they are installed
    python -m benchmarks.host disk    the NVMe tier, beside plain O_DIRECT loops on the same file

All contenders run in turns. Each round starts with another contender. The first round is not counted; tables show medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numba
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.adamw import adamw

from benchmarks.run import ROOT, busy_s, write_result
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.arena import Arena
from ftkit.engine.memory.disk import Disk
from ftkit.engine.memory.flat_file import FlatFile
from ftkit.plan.memory import GIB, MIB
from ftkit.spec.sizes import PIECE_NUMEL

NUMBERS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
STREAM = "stream of the same reads and writes"
RAW = [(threads, block * MIB) for threads in (1, 2) for block in (1, 4, 16)]
"""(threads, bytes of a block) of the plain loops."""
Calls = dict[str, Callable[[], float]]
"""Contenders by name. A call returns its seconds."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("adam", "disk"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--millions", type=int, default=100, help="adam: parameters")
    parser.add_argument("--threads", default="1,2", help="adam: comma-separated")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="disk: on the drive to measure")
    parser.add_argument("--gib", type=int, default=2, help="disk: size of each file, and of host memory")
    return parser.parse_args()


def measure(calls: Calls, rounds: int, console: Console) -> dict[str, float]:
    """Run all contenders in turns, and return the median seconds of each."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    busy = own = start = 0.0
    for number in range(rounds + 1):
        if number == 1:
            busy, own, start = busy_s(), sum(os.times()[:4]), time.time()
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(calls[name]())
    others = busy_s() - busy - (sum(os.times()[:4]) - own)
    share = others / ((os.cpu_count() or 1) * (time.time() - start))
    console.print(f"CPU share of other processes: {max(share, 0):.0%}", highlight=False)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# --- AdamW


@numba.jit(nopython=True, nogil=True)
def _same_mix(a: Any, b: Any, c: Any, source: Any, target: Any) -> None:
    for i in range(a.size):
        a[i] += 1e-7
        b[i] += 1e-7
        c[i] += 1e-7
        target[i] = source[i]


def adam_calls(n: int, threads: int) -> Calls:
    """Return the contenders in this process: each updates n fp32 masters and writes n 16-bit weights."""
    master, wide = torch.randn(n), torch.randn(n) / 100
    moments = torch.full((n,), 1e-3), torch.full((n,), 1e-5)
    gradients = {"bf16": wide.bfloat16(), "fp16": wide.half()}
    weights = {name: each.clone() for name, each in gradients.items()}
    loops, pool = HostLoops(threads), ThreadPoolExecutor(threads)
    arrays = [t.numpy() for t in (master, *moments)]
    arrays += [each["bf16"].view(torch.int16).numpy() for each in (gradients, weights)]
    part = -(-n // threads)

    def stream() -> None:
        for done in [pool.submit(_same_mix, *(a[s : s + part] for a in arrays)) for s in range(0, n, part)]:
            done.result()

    def update(dtype: str) -> None:
        loops.adamw(master, gradients[dtype], *moments, weights[dtype], factor=0.5, step=10, **NUMBERS)

    def fused(dtype: str) -> None:
        lists = [[master], [wide], [moments[0]], [moments[1]], [], [torch.tensor(9.0)]]
        adamw(*lists, fused=True, amsgrad=False, maximize=False, **NUMBERS)
        weights[dtype].copy_(master)

    found: Calls = {STREAM: lambda: timed(stream)}
    for dtype in gradients:
        found[f"ftkit, {dtype}"] = lambda dtype=dtype: timed(lambda: update(dtype))
        found[f"torch fused + copy, {dtype}"] = lambda dtype=dtype: timed(lambda: fused(dtype))
    return found | coded_calls(loops, master, gradients, weights) | peer_calls(master, wide, weights["bf16"])


def coded_calls(loops: HostLoops, master: Tensor, gradients: dict[str, Tensor], weights: dict[str, Tensor]) -> Calls:
    """Return the contenders with 8-bit moments, with an fp32 and with a split master weight."""
    m = loops.encode(torch.full_like(master, 1e-3), signed=True)
    s = loops.encode(torch.full_like(master, 3e-3), signed=False)
    residual = torch.zeros(master.numel(), dtype=torch.int16)

    def update(dtype: str, own: Tensor | None, left: Tensor | None) -> None:
        tensors = own, gradients[dtype], *m, *s, weights[dtype], left
        loops.adamw_8bit(*tensors, factor=0.5, step=10, **NUMBERS)

    found: Calls = {}
    for dtype in gradients:
        found[f"ftkit 8-bit, {dtype}"] = lambda dtype=dtype: timed(lambda: update(dtype, master, None))
        found[f"ftkit 8-bit, split master, {dtype}"] = lambda dtype=dtype: timed(lambda: update(dtype, None, residual))
    return found


def peer_calls(master: Tensor, wide: Tensor, weight: Tensor) -> Calls:
    """Return the optimizers of other packages that are installed, each with a copy to the bf16 weight."""
    settings = {"lr": NUMBERS["lr"], "weight_decay": NUMBERS["weight_decay"]}
    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {}
    with suppress(ImportError):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        makers["DeepSpeedCPUAdam"] = lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, **settings)
    with suppress(ImportError):
        from bitsandbytes.optim import AdamW8bit

        makers["bitsandbytes AdamW8bit"] = lambda params: AdamW8bit(params, **settings)

    def call(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], float]:
        param = torch.nn.Parameter(master.clone())
        param.grad = wide
        optimizer = make([param])

        def step() -> None:
            optimizer.step()
            weight.copy_(param.detach())

        return lambda: timed(step)

    return {f"{name} + copy, bf16": call(make) for name, make in makers.items()}


def adam(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare AdamW with the stream for each number of threads."""
    n = options.millions * 10**6
    result: dict[str, Any] = {}
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        seconds = measure(adam_calls(n, threads), options.rounds, console)
        table = Table("", "ns per parameter", "speed, share of the stream", title=f"AdamW, {threads} threads")
        for name, each in seconds.items():
            table.add_row(name, f"{each / n * 1e9:.3f}", f"{seconds[STREAM] / each:.0%}")
        console.print(table)
        result[f"{threads} threads"] = seconds
    return result


# --- the drive


def ours(file: FlatFile, memory: Tensor, what: str) -> None:
    """Move `memory` by the tier, in requests of 64 MiB."""
    call = file.write if what == "write" else file.read
    numel = 16 * PIECE_NUMEL
    for request in [call(start, memory[start : start + numel]) for start in range(0, memory.numel(), numel)]:
        request.wait()


def raw(path: Path, memory: Tensor, threads: int, block: int, what: str) -> float:
    """Move `memory` by plain system calls: each thread moves its part, block after block. Return the seconds."""
    data = memory.view(torch.uint8).numpy()
    part = data.nbytes // threads
    call = os.pwritev if what == "write" else os.preadv
    handle = os.open(path, os.O_RDWR | os.O_DIRECT)
    short: list[int] = []

    def move(first: int) -> None:
        short.extend(at for at in range(first, first + part, block) if call(handle, [data[at : at + block]], at) != block)

    runners = [threading.Thread(target=move, args=(number * part,)) for number in range(threads)]
    start = time.perf_counter()
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    seconds = time.perf_counter() - start
    os.close(handle)
    assert not short, f"short transfers at {short}"
    return seconds


def disk(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare the tier with plain loops, writing and reading whole files."""
    size = options.gib * GIB
    options.folder.mkdir(parents=True, exist_ok=True)
    with closing(Disk(options.folder, f"bench-{os.getpid()}")) as drive:
        if not drive.direct:
            raise SystemExit(f"{options.folder} ({drive.filesystem}) has no O_DIRECT: nothing to compare with")
        memory = Arena(size).take(size // 4, torch.float32)
        memory.view(torch.int64).random_()
        file = drive.file("ours", memory.numel(), memory.dtype)
        names = {"ftkit": lambda what: timed(lambda: ours(file, memory, what))}
        for threads, block in RAW:
            name = f"O_DIRECT loop, {threads} threads, {block // MIB} MiB"
            names[name] = lambda what, threads=threads, block=block: raw(file.path, memory, threads, block, what)
        calls: Calls = {}
        for name, move in names.items():
            calls |= {f"{name}: {what}": lambda move=move, what=what: move(what) for what in ("write", "read")}
        seconds = measure(calls, options.rounds, console)
    table = Table("GB/s", "write", "read", title=f"{options.gib} GiB per file, {drive.filesystem}")
    for name in names:
        table.add_row(name, *(f"{size / seconds[f'{name}: {what}'] / 1e9:.2f}" for what in ("write", "read")))
    console.print(table)
    return seconds


def main() -> None:
    """Measure, print a table, and write JSON to runs/bench/."""
    options = parse()
    console = Console(width=120)
    found = (adam if options.what == "adam" else disk)(options, console)
    write_result(f"host-{options.what}", {"options": vars(options), "seconds": found}, console)


if __name__ == "__main__":
    main()
