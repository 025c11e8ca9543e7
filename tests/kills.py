"""Kill `ftkit finetune` with SIGKILL at seeded times, resume it, and compare the weights.

    python -m tests.kills [--kills 20] [--seed 0]

A tiny recipe of 12 steps runs on two ranks. First it runs undisturbed, which gives the weights to compare with and the
duration of each phase. Then each kill starts it anew and kills the whole process group, in turn during start-up, steps, a
save, and the end with its export. `--resume auto` on two ranks must give the same weights bit for bit. From a copy of the
killed folder, `--resume auto` on one or three ranks must give weights within 1e-4. The exit code is 1 if one differs.

Phases begin when a file appears; the delay within a phase is drawn. Cost: three starts of the command per kill, about a
minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from tests.jobs import recipe
from tests.tiny import make_base, write_rows
from tests.worlds import PATIENCE

STEPS, SAVED_EVERY = 12, 2
RANKS, OTHER_RANKS = 2, (1, 3)
TOLERANCE = 1e-4
"""Largest difference of a weight on another number of ranks."""
RUN_SECONDS = 120 * PATIENCE
RESUMED = re.compile(r"resuming from \S+/checkpoint-(\d+)")


@dataclass(frozen=True)
class Kill:
    """One kill.

    Args:
        phase: Name of the phase.
        begins: Pattern of a file in the run's folder whose appearance begins the phase; None is the start of the command.
        delay_s: Time from there to the kill, seconds.
    """

    phase: str
    begins: str | None
    delay_s: float


@dataclass(frozen=True)
class Undisturbed:
    """The run that is not killed.

    Args:
        weights: Its weights.
        seconds: Duration of each phase.
    """

    weights: dict[str, torch.Tensor]
    seconds: dict[str, float]


class Failed(Exception):
    """A run that was resumed failed, or its weights differ."""


class Runs:
    """Runs of the recipe, each in a folder of its own.

    Args:
        home: Folder for the base model, rows, and the runs.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        make_base(home / "base")
        write_rows(home / "rows.jsonl", 50)
        write_rows(home / "held.jsonl", 7, first=60)

    def command(self, name: str, ranks: int) -> list[str]:
        """Return the command of a run in the folder `name`, with a cache of its own."""
        cache, path = self.home / f"{name.partition('-')[0]}-cache", self.home / f"{name}.yaml"
        output = {"dir": str(self.home / name), "save_every_steps": SAVED_EVERY, "keep": 2}
        data = {"path": str(self.home / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(cache)}
        path.write_text(recipe(self.home, name, output=output, data=data, train={"batch_tokens": 192, "max_steps": STEPS}))
        return [str(Path(sys.executable).with_name("ftkit")), "finetune", str(path), "--nproc", str(ranks)]

    def undisturbed(self) -> Undisturbed:
        """Run without a kill."""
        folder, seen = self.home / "whole", dict[str, float]()
        process = subprocess.Popen(self.command("whole", RANKS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        began = time.monotonic()
        while process.poll() is None:
            for pattern in ("metrics.jsonl", ".checkpoint-6.writing", "checkpoint-6", "model"):
                if pattern not in seen and (folder / pattern).exists():
                    seen[pattern] = time.monotonic() - began
            time.sleep(0.001)
        total = time.monotonic() - began
        if process.returncode:
            raise Failed(f"the undisturbed run ended with {process.returncode}")
        save = seen["checkpoint-6"] - seen.get(".checkpoint-6.writing", seen["checkpoint-6"] - 0.01)
        parts = (seen["metrics.jsonl"], seen["model"] - seen["metrics.jsonl"], save, total - seen["model"])
        return Undisturbed(self.weights("whole"), dict(zip(("start-up", "steps", "save", "end"), parts, strict=True)))

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the weights that a run exported."""
        return load_file(self.home / name / "model" / "model.safetensors")

    def kill(self, name: str, kill: Kill) -> bool:
        """Start a run and kill its process group; return whether it was still running."""
        folder = self.home / name
        process = subprocess.Popen(
            self.command(name, RANKS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while kill.begins is not None and process.poll() is None and not any(folder.glob(kill.begins)):
            time.sleep(0.001)
        time.sleep(kill.delay_s)
        if process.poll() is not None:
            return False
        ranks = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(RUN_SECONDS)
        _, alive = psutil.wait_procs(ranks, timeout=RUN_SECONDS)
        if alive:
            raise Failed(f"processes outlive the kill of their group: {alive}")
        return True

    def resume(self, name: str, ranks: int) -> str:
        """Complete a run with `--resume auto`; return what it resumed from."""
        command = [*self.command(name, ranks), "--resume", "auto"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_SECONDS)
        if done.returncode:
            raise Failed(f"--resume auto on {ranks} ranks ended with {done.returncode}:\n{done.stderr}")
        found = RESUMED.search(done.stderr)
        return f"step {found[1]}" if found else "the beginning"


def draw(number: int, chance: random.Random, seconds: dict[str, float]) -> Kill:
    """Draw the kill of a number. Phases take turns; saves are of any step."""
    saved = chance.randrange(SAVED_EVERY, STEPS + 1, SAVED_EVERY)
    phases = {"start-up": None, "steps": "metrics.jsonl", "save": f".checkpoint-{saved}.writing", "end": "model"}
    phase = list(phases)[number % len(phases)]
    shown = f"save {saved}" if phase == "save" else phase
    return Kill(shown, phases[phase], chance.uniform(0, seconds[phase]))


def difference(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of two sets of weights; infinity if their names differ or one is NaN."""
    if mine.keys() != expected.keys():
        return float("inf")
    largest = max(float((mine[name].double() - value.double()).abs().max()) for name, value in expected.items())
    return largest if largest == largest else float("inf")


def check(runs: Runs, undisturbed: Undisturbed, name: str, other_ranks: int) -> str:
    """Resume a killed run on both numbers of ranks; return a sentence on it.

    Raises:
        Failed: A resume failed, or the weights differ.
    """
    copy = f"{name}-copy"
    if (runs.home / name).exists():  # not if it was killed before it made its folder
        shutil.copytree(runs.home / name, runs.home / copy)
    found = runs.resume(name, RANKS)
    mine = runs.weights(name)
    if not all(torch.equal(mine[key], value) for key, value in undisturbed.weights.items()):
        raise Failed(f"resumed from {found} on {RANKS} ranks: differs by {difference(mine, undisturbed.weights):.1e}")
    again = runs.resume(copy, other_ranks)
    apart = difference(runs.weights(copy), undisturbed.weights)
    if apart > TOLERANCE:
        raise Failed(f"resumed from {again} on {other_ranks} ranks: differs by {apart:.1e}")
    return f"resumed from {found}: same bits on {RANKS} ranks; from {again} on {other_ranks}: within {apart:.1e}"


def main(arguments: Sequence[str]) -> int:
    """Kill and resume; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Kill runs, resume them, compare weights.")
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times")
    options = parser.parse_args(arguments)
    chance, failed, late = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="ftkit-kills-") as home:
        runs = Runs(Path(home))
        undisturbed = runs.undisturbed()
        print("undisturbed:", ", ".join(f"{name} {own:.2f} s" for name, own in undisturbed.seconds.items()), flush=True)
        for number in range(options.kills):
            kill, name = draw(number, chance, undisturbed.seconds), f"kill{number}"
            place = f"[{number + 1}/{options.kills}] {kill.phase} + {kill.delay_s:.3f} s:"
            try:
                in_time = runs.kill(name, kill)
                late += not in_time
                ended = "" if in_time else "it ended before the kill; "
                print(place, ended + check(runs, undisturbed, name, OTHER_RANKS[number % 2]), flush=True)
            except (Failed, subprocess.TimeoutExpired) as error:
                failed += 1
                print(place, f"FAILED: {error}", flush=True)
            for path in runs.home.glob(f"{name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    print(f"{options.kills - failed} of {options.kills} runs have the same weights; {late} ended before the kill")
    return 1 if failed or late == options.kills else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
