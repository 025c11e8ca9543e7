"""`make bench-plan`: memory and seconds of real runs beside their plan.

Each run is `ftkit finetune`: a few steps of a Llama from a bf16 safetensors folder.

    peaks     Runs of different shapes, tiers and world sizes: 85 % of the plan <= measured <= the plan. The peak is a rank's
              largest resident size on a CPU, the bytes that PyTorch allocated on a GPU.
    seconds   Five CPU runs, planned with a profile that `ftkit measure` makes first. The median step, without the first
              one, is within 20 % of the plan. Nothing is fitted.

Cost: ten minutes on two otherwise idle cores, 2 GiB of memory, 4 GiB of disk; on a GPU a minute per run, and 23 GiB of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.run import entering
from benchmarks.shapes import write_model
from ftkit.config.recipe import parse
from ftkit.plan.catalog import find_hardware
from ftkit.plan.memory import MIB
from ftkit.train.planning import plan_recipe

LEAST = 0.85
WITHIN = 0.20
STEPS = 8
"""Steps of a run whose seconds are measured."""
ROWS = 400


@dataclass(frozen=True)
class Case:
    """One run: a Llama of `shapes`, ranks, tokens per sequence, sequences per rank, and forced choices."""

    llama: str
    ranks: int
    dtype: str
    sequence_tokens: int
    micro_batch: int
    engine: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    save: bool = False

    def __str__(self) -> str:
        forced = ", ".join(f"{key} {value}" for key, value in self.engine.items())
        return f"{self.llama} x{self.ranks} {self.dtype} {self.micro_batch}x{self.sequence_tokens} {forced or 'auto'}"


RECOMPUTE = {"stage": 3, "activations": "recompute"}
TIERS = ("parameters", "gradients", "state", "activation_offload")
NVME, HOST = (RECOMPUTE | dict.fromkeys(TIERS, tier) for tier in ("nvme", "host"))
CASES = (
    Case("12m", 1, "fp32", 256, 4),
    Case("34m", 2, "fp32", 256, 2, save=True),
    Case("134m", 2, "bf16", 256, 1, RECOMPUTE),
    Case("134m", 1, "fp32", 256, 2, {"activations": "recompute"}),
    Case("34m", 2, "bf16", 256, 2, RECOMPUTE | {"state": "nvme"}, save=True),
    Case("70m", 2, "bf16", 256, 1, NVME),
    Case("70m", 3, "bf16", 128, 1, {"stage": 1, "activations": "keep"}, 2),
    Case("34m", 3, "fp32", 256, 1, {"stage": 3, "activations": "keep", "reshard_after_forward": False}),
    Case("70m", 2, "bf16", 256, 1, RECOMPUTE | {"stage": 2, "gradients": "host", "activation_offload": "host"}, 2),
    Case("34m", 1, "fp32", 1024, 1, {"activations": "keep"}),
)
GPU_CASES = (
    Case("1.1b", 1, "fp16", 2048, 2),
    Case("1.1b", 1, "fp16", 2048, 2, RECOMPUTE),
    Case("1.1b", 1, "fp16", 2048, 2, RECOMPUTE | {"gradients": "host", "state": "host"}, 4),
    Case("1.1b", 1, "fp16", 2048, 2, HOST, 4, save=True),
    Case("1.1b", 1, "fp16", 2048, 2, NVME, 4),
)
TIMED_CASES = (
    Case("34m", 2, "fp32", 512, 1, RECOMPUTE),
    Case("70m", 2, "fp32", 256, 2, {"stage": 2, "activations": "keep"}),
    Case("134m", 2, "fp32", 256, 1, RECOMPUTE | {"reshard_after_forward": False}, 2),
    Case("70m", 1, "fp32", 512, 1, {"activations": "recompute"}),
    Case("34m", 1, "fp32", 1024, 1, {"activations": "keep"}, 2),
)


def recipe_of(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """Return the recipe of a run."""
    sequences = case.ranks * case.micro_batch * case.accumulation
    return {
        "ranks": case.ranks,
        "model": {"name": str(folder / "model"), "tokenizer": "bundled/tiny-base"},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "sequence_tokens": case.sequence_tokens,
            "packing": True,
            "on_bad_row": "skip",
            "cache_dir": str(folder / "cache"),
        },
        "train": {"batch_tokens": sequences * case.sequence_tokens, "max_steps": steps, "dtype": case.dtype},
        "memory": {"nvme_dir": str(folder)} if "nvme" in case.engine.values() else {},
        "engine": {**case.engine, "micro_batch": case.micro_batch, "accumulation": case.accumulation},
        "output": {"dir": str(folder / "run"), **({"save_every_steps": 1, "keep": 1} if case.save else {})},
    }


def prepare(case: Case, folder: Path, steps: int = 2) -> Path:
    """Write the model, rows and recipe of a run into a folder; return the recipe's path."""
    write_model(case.llama, folder / "model")
    rows = (Path(__file__).parent.parent / "data" / "python-docs.jsonl").read_text().splitlines()[:ROWS]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(case, folder, steps)))
    return path


def ftkit(*words: object, group: Path | None = None) -> None:
    """Run an `ftkit` command in a process of its own, in a cgroup if one is given.

    Raises:
        SystemExit: It failed.
    """
    command = [sys.executable, "-c", "from ftkit.cli.app import main; main()", *map(str, words)]
    done = subprocess.run(entering(group, command), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ftkit {words[0]}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def peaks(cases: tuple[Case, ...], key: str, folder: Path) -> int:
    """Run the cases and print measured and planned peaks; return the number outside."""
    failed = 0
    print(f"{'measured':>8} {'planned':>8} {'share':>6}  MiB per rank")
    for number, case in enumerate(cases):
        own = folder / f"peak-{number}"
        ftkit("finetune", prepare(case, own))
        summary = json.loads((own / "run" / "summary.json").read_text())
        measured = max(each[key] for each in summary["peaks_per_rank"])
        planned = summary["planned_per_rank"][key]
        good = LEAST <= measured / planned <= 1
        failed += not good
        numbers = f"{measured / MIB:8.0f} {planned / MIB:8.0f} {measured / planned:6.1%}"
        print(f"{numbers}  {case}{'' if good else '  <- outside'}", flush=True)
    return failed


def seconds(cases: tuple[Case, ...], folder: Path) -> int:
    """Run the cases and print planned and measured seconds; return the number outside."""
    failed, profiles = 0, {}
    for ranks in sorted({case.ranks for case in cases}):
        path = folder / f"{ranks}-ranks.yaml"
        ftkit("measure", "-o", path, "--nproc", ranks)
        profiles[ranks] = find_hardware(str(path))
    print(f"{'planned':>8} {'measured':>8} {'error':>6}  seconds per step")
    for number, case in enumerate(cases):
        own = folder / f"timed-{number}"
        recipe = prepare(case, own, STEPS)
        plan = plan_recipe(parse(recipe.read_text(), str(recipe)), case.ranks, profiles[case.ranks])
        assert plan.speed is not None
        ftkit("finetune", recipe)
        records = [json.loads(record) for record in (own / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if "loss" in record]
        took = statistics.median(
            (now["tokens"] - last["tokens"]) / now["tokens_per_second"] for last, now in pairwise(steps)
        )
        error = plan.speed.seconds / took - 1
        good = abs(error) <= WITHIN
        failed += not good
        numbers = f"{plan.speed.seconds:8.3f} {took:8.3f} {error:+6.1%}"
        print(f"{numbers}  {case}, {case.accumulation} micro-batches{'' if good else '  <- outside'}", flush=True)
    return failed


def main() -> None:
    """Run the cases and exit with 1 if one is outside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peaks", "seconds", "all"), nargs="?", default="all")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases, from 0")
    options = parser.parse_args()

    def chosen(cases: tuple[Case, ...]) -> tuple[Case, ...]:
        return cases if not options.only else tuple(cases[number] for number in options.only)

    cuda, failed = torch.cuda.is_available(), 0
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-plan-") as name:
        if options.what != "seconds":
            failed += peaks(chosen(GPU_CASES if cuda else CASES), "device_bytes" if cuda else "host_bytes", Path(name))
        if options.what != "peaks" and not cuda:
            failed += seconds(chosen(TIMED_CASES), Path(name))
    print("all within" if not failed else f"{failed} outside")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
