"""`make bench-cap`: full fine-tuning of a 2B Llama by two ranks whose process tree may use 6 GiB.

The model is a safetensors folder with random weights. The run is `ftkit finetune` with parameters, gradients and optimizer
state on the NVMe tier. The cap is a memory cgroup (v1 or v2, needs root) and includes page cache. `--peers` also trains
growing models with DDP, FSDP2 and DeepSpeed under the same cap until one fails.

Needs 45 GB of disk at 2B, all of it freed at the end. The result is also written as JSON to runs/bench/.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.plan_against_runs import RECOMPUTE, Case, ftkit, prepare
from benchmarks.run import run_once, write_result
from benchmarks.shapes import GROWING, SHAPES
from ftkit.plan.memory import GIB

CGROUPS = Path("/sys/fs/cgroup")
VERSION_1 = CGROUPS / "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
PARENT, LIMIT, PEAK = VERSION_1 if VERSION_1[0].is_dir() else (CGROUPS, "memory.max", "memory.peak")
ENGINE = RECOMPUTE | {"reshard_after_forward": True, "parameters": "nvme", "gradients": "nvme"}
ENGINE |= {"state": "nvme", "state_host_bytes": 0}
PEERS = ("ddp", "fsdp2", "deepspeed-zero3", "deepspeed-nvme")


@contextmanager
def memory_group(cap_gib: float) -> Iterator[Path]:
    """Make a memory cgroup with a limit, and remove it afterwards.

    Raises:
        OSError: This process may not make one.
    """
    group = PARENT / f"ftkit-cap-{os.getpid()}"
    group.mkdir()
    try:
        (group / LIMIT).write_text(str(int(cap_gib * GIB)))
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # its last process is still ending
                time.sleep(0.2)


def train(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run `ftkit finetune` under the cap; return its figures."""
    recipe = prepare(Case(options.model, 2, "bf16", options.tokens, 1, ENGINE), folder, options.steps)
    with memory_group(options.cap_gib) as group:
        began = time.time()
        ftkit("finetune", recipe, group=group)
        seconds, peak_gib = time.time() - began, int((group / PEAK).read_text()) / GIB
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": seconds, "peak_gib": peak_gib, "steps": [record for record in records if "loss" in record]}


def largest(name: str, options: argparse.Namespace, console: Console) -> str:
    """Return the largest size that a peer trains under the cap, or "none"."""
    found = "none"
    for size in GROWING:
        fixed = {"batch": 1, "warmup": 0, "steps": 3, "world": 2, "dtype": "bf16", "save": False}
        with memory_group(options.cap_gib) as group:
            outcome = run_once(name, size, argparse.Namespace(**fixed, tokens=options.tokens), group)
        if "error" in outcome:
            console.print(f"{name} {size}: {outcome['error'][:150]}", highlight=False, markup=False)
            return found
        console.print(f"{name} {size}: {outcome['step_s']:.1f} s per step", highlight=False)
        found = size
    return found


def main() -> None:
    """Train under the cap, print, and write JSON to runs/bench/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="2b", choices=SHAPES)
    parser.add_argument("--cap-gib", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="per sequence; one sequence per rank")
    parser.add_argument("--peers", action="store_true", help="also find the largest model of each peer under the cap")
    options, console = parser.parse_args(), Console(width=120)
    runs = Path(__file__).parents[1] / "runs"  # a drive: /tmp may be in memory
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cap-", dir=runs) as folder:
        result = train(Path(folder), options)
    for step in result["steps"]:
        speed = f"{step['tokens_per_second']:.0f} tokens/s"
        console.print(
            f"step {step['step']}: loss {step['loss']:.4f}, norm {step['grad_norm']:.3f}, {speed}", highlight=False
        )
    peak = f"peak {result['peak_gib']:.2f} GiB (page cache included)"
    console.print(f"{options.model} under {options.cap_gib} GiB: {result['seconds']:.0f} s, {peak}", highlight=False)
    if options.peers:
        result["peers"] = {name: largest(name, options, console) for name in PEERS}
        for name, size in result["peers"].items():
            console.print(f"{name}: largest under the cap: {size}", highlight=False)
    write_result("cap", {"options": vars(options), **result}, console)


if __name__ == "__main__":
    main()
