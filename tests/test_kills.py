"""Killed at any moment: SIGKILL of one rank or of all, in training or inside a save; `--resume auto` then ends the run.

A moment is drawn from a seed: a phase, and how often it is entered before the kill. Each ends with the weights of a run that
nobody killed: bit for bit on as many ranks, up to rounding on others. What was drawn is printed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ftkit.engine.checkpoint import saving
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.files.pieces import PieceWriter
from ftkit.engine.optim.updater import Updater
from ftkit.hf.trainer import run_checkpoints, trainer
from ftkit.output.run_folder import RunFolder
from ftkit.train.progress import EndOnRequest
from ftkit.train.recipe_trainer import RecipeTrainer
from ftkit.train.resume import first_whole
from tests.jobs import job, losses, recipe, resumed_job
from tests.worlds import RankFailure

IN_SAVES: dict[str, tuple[Any, str]] = {
    "a save begins": (trainer.TrainerMixin, "_save_checkpoint"),
    "files are created": (saving, "create_file"),
    "half of a piece": (PieceWriter, "_transfer"),
    "a range is synced": (PieceWriter, "_end"),
    "the engine's folder is synced": (saving, "sync_folder"),
    "the manifest": (saving, "write_sealed"),
    "random numbers": (trainer.Trainer, "_save_rng_state"),
    "a save is looked after": (saving.Saving, "poll"),
    "the contents": (run_checkpoints, "write_contents"),
    "the checkpoint is synced": (run_checkpoints, "sync_tree"),
    "its name is synced": (run_checkpoints, "sync_folder"),
    "older ones are removed": (RecipeTrainer, "retire_checkpoints"),
    "a file is removed": (os, "unlink"),
}
OUTSIDE: dict[str, tuple[Any, str]] = {
    "a forward": (trainer.TrainerMixin, "compute_loss"),
    "an update": (Updater, "submit"),
    "a piece of an update": (Updater, "_compute"),
    "a step's end": (EndOnRequest, "on_step_end"),
    "an evaluation": (trainer.TrainerMixin, "prediction_step"),
}
PHASES = IN_SAVES | OUTSIDE
AT_ANY_TIME = "at some time"
PLACES = {
    "device": {"stage": 3},
    "nvme": {
        **{"stage": 3, "update": "deferred", "state_host_bytes": 0},
        **dict.fromkeys(("parameters", "gradients", "state"), "nvme"),
    },
}
SLOW_KILLS, FAST_KILLS = 48, 4


class Moment(NamedTuple):
    """Where a rank is killed: when it enters `phase` the `nth` time; with all others, or alone."""

    seed: int
    place: str
    phase: str
    nth: int
    seconds: float
    victim: int
    tree: bool
    resumed_on: int


def doomed_job(text: str, folder: str, moment: Moment | None, ranks: int) -> dict[str, int] | None:
    """Be a rank that is killed at a moment, or that counts how often it enters each phase, from checkpoint-2 on."""
    rank, entered = int(os.environ["RANK"]), Counter[str]()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    began = Path(folder, "checkpoint-2")

    def kill() -> None:
        others = [int(Path(folder, f"pid-{other}").read_text()) for other in range(ranks) if other != rank]
        for pid in (others if moment.tree else []):
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(phase: str, act: Any) -> Any:
        def enter(*args: Any, **kwargs: Any) -> Any:
            if entered["begun"] or began.exists():  # it is removed again when there are enough others
                entered["begun"] = 1
                entered[phase] += 1
                if moment is not None and (moment.victim, moment.phase, moment.nth) == (rank, phase, entered[phase]):
                    if phase == "half of a piece":
                        handle, data, at = args
                        os.pwrite(handle, data[: data.nbytes // 8192 * 4096], at)
                    kill()
            return act(*args, **kwargs)

        return staticmethod(enter) if phase == "half of a piece" else enter

    def kill_later() -> None:
        while not began.exists():
            time.sleep(0.001)
        time.sleep(moment.seconds)
        kill()

    if moment is not None and moment.phase == AT_ANY_TIME and moment.victim == rank:
        threading.Thread(target=kill_later, daemon=True).start()
    with ExitStack() as stack:
        for phase, (owner, name) in PHASES.items():
            stack.enter_context(mock.patch.object(owner, name, counted(phase, getattr(owner, name))))
        job(text)
    if moment is not None:  # the run was over before its time had come: it is killed all the same
        if moment.victim == rank and moment.phase != AT_ANY_TIME:
            kill()
        time.sleep(60)
    return dict(entered)


def text_of(home: Path, out: str, place: str) -> str:
    nvme = home / "nvme"
    nvme.mkdir(exist_ok=True)
    output = {"dir": str(home / out), "save_every_steps": 2, "keep": 2}
    memory = {"nvme_dir": str(nvme)} if place == "nvme" else {}
    return recipe(home, out, output=output, engine=PLACES[place], memory=memory)


@pytest.fixture(scope="module")
def unharmed(home, worlds):
    """For each place: how often each rank enters each phase in a run that nobody kills, how long it takes, its weights."""
    found = {}
    for place in PLACES:
        folder = home / f"unharmed-{place}"
        folder.mkdir()
        began = time.monotonic()
        entered = worlds[2].run(doomed_job, text_of(home, folder.name, place), str(folder), None, 2)
        found[place] = entered, time.monotonic() - began, load_file(folder / "model" / "model.safetensors"), losses(folder)
    return found


def drawn(seed: int, unharmed: Any) -> Moment:
    """Draw a moment: two of three inside a save, every third of the others at some time."""
    chance = random.Random(seed)
    place = chance.choice(list(PLACES))
    entered, seconds, *_ = unharmed[place]
    inside = chance.random() < 0.66
    phases = list(IN_SAVES) if inside else [*OUTSIDE, AT_ANY_TIME]
    phase = phases[seed % len(phases)]
    victim = chance.choice([rank for rank in range(2) if phase == AT_ANY_TIME or entered[rank].get(phase)])
    nth = chance.randint(1, entered[victim][phase]) if phase != AT_ANY_TIME else 0
    tree, resumed_on = chance.random() < 0.5, chance.choice((2, 2, 1, 3))
    return Moment(seed, place, phase, nth, chance.uniform(0, seconds), victim, tree, resumed_on)


def chosen(folder: str) -> str | None:
    found = [str(path) for path in RunFolder(Path(folder)).checkpoints()[::-1]]
    return first_whole(found, Communicator(torch.device("cpu")), print)


def kill_and_resume(moment: Moment, home, unharmed, worlds) -> None:
    print(moment)
    folder = home / f"killed-{moment.seed}"
    folder.mkdir()
    text = text_of(home, folder.name, moment.place)
    with pytest.raises(RankFailure, match="died with exit code -9"):
        worlds[2].run(doomed_job, text, str(folder), moment, 2, seconds=40.0)
    checkpoints = worlds[moment.resumed_on].run(chosen, str(folder))
    assert checkpoints[0] is not None, "a valid checkpoint is there"
    found = [str(path) for path in RunFolder(folder).prepare("auto")]  # as the command does
    worlds[moment.resumed_on].run(resumed_job, text, found)
    _, _, expected, expected_losses = unharmed[moment.place]
    weights = load_file(folder / "model" / "model.safetensors")
    if moment.resumed_on == 2:
        assert losses(folder) == expected_losses
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    else:
        for mine, other in zip(losses(folder), expected_losses, strict=True):
            assert mine == pytest.approx(other, rel=1e-5)
        for name, value in expected.items():
            assert float((weights[name] - value).norm()) <= 1e-5 * float(value.norm()), name
    left = [path.name for path in folder.iterdir() if "checkpoint" in path.name]
    assert sorted(left) == ["checkpoint-10", "checkpoint-8"], "no debris"


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(FAST_KILLS))
def test_a_killed_run_goes_on(seed, home, unharmed, worlds):
    kill_and_resume(drawn(seed, unharmed), home, unharmed, worlds)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + SLOW_KILLS))
def test_a_run_that_is_killed_anywhere_goes_on(seed, home, unharmed, worlds):
    kill_and_resume(drawn(seed, unharmed), home, unharmed, worlds)


@pytest.mark.slow
def test_half_of_the_moments_lie_in_a_save(unharmed):
    moments = [drawn(seed, unharmed) for seed in range(100, 100 + SLOW_KILLS)]
    inside = [moment for moment in moments if moment.phase in IN_SAVES]
    assert len(inside) >= len(moments) / 2
    assert {moment.phase for moment in moments} == {*PHASES, AT_ANY_TIME}
    assert {moment.tree for moment in inside} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_command_and_all_its_processes_are_killed(seed, home, unharmed):
    """The real thing: the launcher dies with its ranks; nobody is left to tell, and nothing holds the folder's lock."""
    folder, chance = home / f"command-{seed}", random.Random(seed)
    path = home / f"command-{seed}.yaml"
    path.write_text(text_of(home, folder.name, "device"))
    command = [str(Path(sys.executable).with_name("ftkit")), "finetune", str(path), "--nproc", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (folder / "checkpoint-2").exists():
        assert process.poll() is None
        time.sleep(0.002)
    seconds = chance.uniform(0, 0.8)
    time.sleep(seconds)
    everyone = [process.pid, *(each.pid for each in psutil.Process(process.pid).children(recursive=True))]
    print(f"seed {seed}: killed {seconds:.3f} s after checkpoint-2")
    for pid in everyone:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    if (folder / "summary.json").exists():  # the run was over by then
        (folder / "summary.json").unlink()
    done = subprocess.run([*command, "--resume", "auto"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = unharmed["device"][2]
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
