"""`make bench-collectives`: rates of collectives between CPU ranks, compared with a plain copy, in GB/s.

Every round runs each operation once, one after the other, so that a disturbance affects all of them alike. The table gives
the slowest rank's rate: the median over rounds, and the best round. The result is also written as JSON to runs/bench/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

from benchmarks.run import ROOT
from ftkit.engine.comm.communicator import Communicator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--numel", type=int, default=16_000_000, help="elements of the full tensor")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def operations(comm: Communicator, numel: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return the operations on a full tensor of `numel` elements, by name."""
    full, copy = torch.randn(numel).to(dtype), torch.zeros(numel, dtype=dtype)
    private = torch.zeros(numel // comm.world_size, dtype=dtype)
    result = {
        "copy": lambda: copy.copy_(full),
        "all-gather, staged": lambda: comm.all_gather(copy, private),
        "reduce-scatter, staged": lambda: comm.reduce_scatter_mean(private, full),
        "all-reduce": lambda: comm.all_reduce_mean(copy),
    }
    shared = comm.share(full.nbytes)
    if shared is not None:
        in_place = shared.view(dtype).copy_(full)
        result["all-gather, in place"] = lambda: comm.all_gather(copy, in_place[: private.numel()])
        result["reduce-scatter, in place"] = lambda: comm.reduce_scatter_mean(private, in_place)
    return result


def measure(comm: Communicator, numel: int, rounds: int) -> list[dict[str, object]]:
    """Return the rates of all operations in all dtypes. The first round is not counted: it compiles and touches memory."""
    numel -= numel % comm.world_size
    results: list[dict[str, object]] = []
    for name, dtype in DTYPES.items():
        cases = operations(comm, numel, dtype)
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(rounds + 1):
            for case, run in cases.items():
                comm.barrier()
                begin = time.perf_counter()
                run()
                seconds[case].append(max(comm.all(time.perf_counter() - begin)))
        size_gb = numel * dtype.itemsize / 1e9
        for case, each in seconds.items():
            rates = [size_gb / second for second in each[1:]]
            results.append({"dtype": name, "operation": case, "median": statistics.median(rates), "best": max(rates)})
    return results


def rank_main(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 reports."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.world)
    results = measure(Communicator(torch.device("cpu")), options.numel, options.rounds)
    if rank == 0:
        report(results, options)


def report(results: list[dict[str, object]], options: argparse.Namespace) -> None:
    """Print a table, and write the results to runs/bench/."""
    console = Console(width=100)
    table = Table(title=f"{options.world} ranks, {options.numel:,} elements: GB/s of the full tensor, median (best)")
    for column in ("operation", *DTYPES):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for case in dict.fromkeys(each["operation"] for each in results):
        rates = [each for each in results if each["operation"] == case]
        table.add_row(str(case), *(f"{each['median']:.2f} ({each['best']:.2f})" for each in rates))
    console.print(table)
    path = ROOT / "runs" / "bench" / f"collectives-{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"date": path.stem[12:22], "options": vars(options), "results": results}, indent=1))
    console.print(f"written: {path.relative_to(ROOT)}")


def main() -> None:
    """Start the ranks."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-") as folder:
        torch.multiprocessing.spawn(rank_main, (folder, options), nprocs=options.world)


if __name__ == "__main__":
    main()
