"""`make bench-seconds`: seconds that the plan says of CPU runs beside those that they take, on this machine's own profile.

The node is measured first, with each number of ranks (`ftkit measure`); then five runs of different shapes are
planned with that profile, and made, as a user starts them. A run passes if its median step, the first one left out, is
within 20 % of the plan. Nothing is fitted: what the profile does not know (the Trainer's own work, the data loader) is in
the difference.

Cost: some five minutes on two cores that do nothing else.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import yaml

from benchmarks.plan_against_runs import Case, prepare
from ftkit.config.recipe import parse
from ftkit.plan.catalog import find_hardware
from ftkit.train.planning import plan_recipe

STEPS = 8
WITHIN = 0.20
RECOMPUTE = {"stage": 3, "activations": "recompute"}
CASES = (
    Case("34M", 2, "fp32", 512, 1, RECOMPUTE),
    Case("70M", 2, "fp32", 256, 2, {"stage": 2, "activations": "keep"}),
    Case("134M", 2, "fp32", 256, 1, {**RECOMPUTE, "reshard_after_forward": False}, accumulation=2),
    Case("70M", 1, "fp32", 512, 1, {"activations": "recompute"}),
    Case("34M", 1, "fp32", 1024, 1, {"activations": "keep"}, accumulation=2),
)


def measured(case: Case, folder: Path) -> float:
    """Return the median seconds of a step of a run, the first left out."""
    start = f"from ftkit.cli.app import main; main(['finetune', {str(folder / 'recipe.yaml')!r}])"
    told = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    if told.returncode:
        raise SystemExit(f"{case}: exit code {told.returncode}\n{told.stdout}{told.stderr}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    took = [(now["tokens"] - last["tokens"]) / now["tokens_per_second"] for last, now in pairwise(steps)]
    return statistics.median(took)


def main() -> None:
    """Measure the node, then plan and make the runs."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ftkit-bench-seconds-") as name:
        profiles = {}
        for ranks in sorted({case.ranks for case in CASES}):
            path = Path(name, f"ranks-{ranks}.yaml")
            start = f"from ftkit.cli.app import main; main(['measure', '-o', {str(path)!r}, '--nproc', '{ranks}'])"
            subprocess.run([sys.executable, "-c", start], capture_output=True)
            profiles[ranks] = find_hardware(str(path))
            print(f"profile with {ranks} ranks: {json.dumps(yaml.safe_load(path.read_text())['rates'])}", flush=True)
        print(f"{'planned':>8} {'measured':>8} {'off':>6}  seconds a step")
        for number, case in enumerate(CASES):
            folder = Path(name, str(number))
            folder.mkdir()
            recipe = prepare(case, folder, STEPS)
            plan = plan_recipe(parse(recipe.read_text(), str(recipe)), case.ranks, profiles[case.ranks])
            assert plan.speed is not None
            took = measured(case, folder)
            off = plan.speed.seconds / took - 1
            good = abs(off) <= WITHIN
            failed += not good
            line = f"{plan.speed.seconds:8.3f} {took:8.3f} {off:+6.1%}  {case}, {case.accumulation} micro-batches"
            print(line + ("" if good else "  <- outside"), flush=True)
    print("all within 20 %" if not failed else f"{failed} of {len(CASES)} outside")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
