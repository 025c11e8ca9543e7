"""Small jobs of `ftkit finetune` for tests: a recipe of ten steps on a tiny model, and one rank of its run."""

from __future__ import annotations

import json
import os

import psutil
from accelerate.state import AcceleratorState, GradientState

from ftkit.config.recipe import parse
from ftkit.train.run import run


class Asked:
    """Requests the end of a run at the given reading. The run reads once per step."""

    rank = property(lambda self: int(os.environ["RANK"]))

    def leave(self, error):
        raise error

    def __init__(self, at: int | None):
        self.readings, self.at = 0, at

    @property
    def asked(self) -> bool:
        self.readings += 1
        return self.readings == self.at


def job(text, settings=(), checkpoint=None, end_at=None):
    """Run one rank of a job. Only the last rank is requested to end."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop = Asked(end_at if rank == ranks - 1 else None)
    return run(stop, parse(text, "recipe.yaml", list(settings)), [checkpoint] if checkpoint else [], ranks)


def recipe(home, out, **sections):
    """Return the text of a recipe: 10 steps of 6 sequences."""
    facts = {
        "model": {"name": str(home / "base")},
        "data": {"path": str(home / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(home / "cache")},
        "eval": {"path": str(home / "held.jsonl"), "metrics": ["perplexity", "accuracy"], "every_steps": 5},
        "train": {"batch_tokens": 192, "max_steps": 10},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "output": {"dir": str(home / out), "save_every_steps": 4, "keep": 2},
        "engine": {"stage": 3},
    }
    return json.dumps({**facts, **sections})  # JSON is YAML


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lines(folder):
    return [record for record in records(folder) if "loss" in record]


def losses(folder):
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines(folder)]


def resumed_job(text, checkpoints):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return run(Asked(None), parse(text, "recipe.yaml", []), checkpoints, int(os.environ["WORLD_SIZE"]))


def ranks_of(pid):
    """Return the process ids of the ranks, which the launcher starts in order."""
    return sorted(each.pid for each in psutil.Process(pid).children() if "spawn_main" in " ".join(command_of(each)))


def command_of(process):
    """Return a process's command line, empty if it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
