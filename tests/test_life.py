"""Life of a run's folder and processes: what is removed, what a restart resumes from, and what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ftkit.cli import training
from ftkit.config.recipe import parse
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.errors import RESUME_ME, RankError
from ftkit.launch import ranks as launch
from ftkit.output.run_folder import RunFolder, append_line
from ftkit.spec.strategy import Strategy
from ftkit.train.callbacks import EndOnRequest
from ftkit.train.planning import ask
from tests.engine.test_checkpoint import load_and_tell, make, write
from tests.jobs import losses, recipe
from tests.worlds import PATIENCE


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    (path / "ftkit").mkdir(parents=True)
    (path / "ftkit" / "root.weights.safetensors").write_bytes(bytes(1 << 16))
    return path


def test_only_the_process_that_holds_the_lock_removes_anything(tmp_path):
    """A second outer job with --overwrite: its rank 0 is refused the lock, the others must not touch what is there."""
    kept, unfinished = checkpoint(tmp_path, 20), tmp_path / ".checkpoint-40.writing"
    unfinished.mkdir()
    folder = RunFolder(tmp_path)
    folder.write_recipe("")
    assert folder.prepare(None, overwrite=True, owner=False) == []
    assert folder.prepare("auto", owner=False) == [kept]
    assert unfinished.exists(), "it may be another rank's that is just written"
    assert folder.prepare("auto") == [kept]
    assert not unfinished.exists()
    folder.prepare(None, overwrite=True)
    assert not kept.exists()


def started(facts, folder, resume, outcomes, restarts=1):
    """Run the door's loop on ranks that end as `outcomes` say; return what they were given to continue from."""
    given = []

    def start(entry, arguments, ranks, **options):
        given.append(arguments[1])
        outcome = outcomes.pop(0)
        if callable(outcome):
            outcome()
        raise RankError(1, "died") if outcomes else SystemExit

    with mock.patch.object(launch, "start", start), pytest.raises(SystemExit):
        training.train(facts, folder, 2, resume, overwrite=False, restarts=restarts, joined=False)
    return given


def test_a_restart_goes_on_from_what_was_saved_since_or_from_what_the_user_said(home, tmp_path):
    facts = parse(recipe(home, "life", output={"dir": str(tmp_path / "run"), "save_every_steps": 4}), "recipe.yaml")
    named, folder = checkpoint(tmp_path / "other", 100), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_recipe("")
    given = started(facts, folder, str(named), [None, lambda: checkpoint(folder.path, 4), None], restarts=2)
    assert given == [[str(named)], [str(named)], [str(folder.path / "checkpoint-4"), str(named)]]
    checkpoint(folder.path, 8)
    given = started(facts, folder, str(folder.path / "checkpoint-4"), [None, None])
    assert given == [[str(folder.path / "checkpoint-4")]] * 2, "later ones were passed over by the user"


def test_a_run_that_was_asked_to_end_is_not_started_again(home, tmp_path):
    facts = parse(recipe(home, "life", output={"dir": str(tmp_path / "run"), "save_every_steps": 4}), "recipe.yaml")
    error = RankError(1, "died")
    error.asked = True
    with mock.patch.object(launch, "start", side_effect=error) as start, pytest.raises(RankError):
        training.train(facts, RunFolder(tmp_path / "run"), 2, None, overwrite=False, restarts=3, joined=False)
    assert start.call_count == 1


@pytest.mark.slow
def test_a_signal_to_the_whole_group_saves(home, tmp_path):
    """systemd and Slurm send SIGTERM to the ranks as well as to the command."""
    folder, path = home / "group", home / "group.yaml"
    path.write_text(recipe(home, "group", eval=None, output={"dir": str(folder), "save_every_steps": 2}))
    command = [str(Path(sys.executable).with_name("ftkit")), "finetune", str(path), "--nproc", "2", "--max-restarts", "1"]
    command += ["--set", "train.max_steps=100000", "--set", "optimizer.schedule=constant"]
    with (tmp_path / "printed").open("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True)
        try:
            deadline = time.monotonic() + 90 * PATIENCE
            while not (folder / "checkpoint-2").exists():
                assert process.poll() is None, (tmp_path / "printed").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60 * PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == RESUME_ME, (tmp_path / "printed").read_text()
    assert (folder / f"checkpoint-{losses(folder)[-1][0]}" / "contents.json").exists()


def test_what_a_run_has_on_its_disk_is_room_for_it(home, tmp_path, monkeypatch):
    facts = parse(recipe(home, "life", output={"dir": str(tmp_path)}), "recipe.yaml")
    for step in (4, 8):
        checkpoint(tmp_path, step)
    monkeypatch.setattr("ftkit.train.planning.disk_free", lambda path: 1000)
    assert ask(facts, 1).limits.disk_bytes == 1000 + RunFolder(tmp_path).disk_bytes() > 1000


def test_who_asked_to_end_does_not_wait_for_an_evaluation():
    finished = []
    checkpoints = SimpleNamespace(finish=lambda: finished.append(True))
    trainer = SimpleNamespace(engine=SimpleNamespace(comm=SimpleNamespace(any=bool)), checkpoints=checkpoints)
    end = EndOnRequest(trainer, lambda: True)
    control = SimpleNamespace(should_evaluate=True, should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=3, max_steps=10)
    assert end.on_epoch_end(None, state, control).should_evaluate, "not asked yet"
    end.on_step_end(None, state, control)
    assert not end.on_epoch_end(None, state, control).should_evaluate
    assert finished == [True]


def test_a_full_disk_costs_a_line_and_not_the_run(caplog):
    append_line(Path("/dev/full"), {"step": 1})
    assert "/dev/full: a line could not be written: No space left on device" in caplog.text


def test_ranks_that_read_whole_pieces_do_not_go_on_without_the_one_that_does_not(world2, tmp_path):
    folder = tmp_path / "save"
    world2.run(write, str(folder), Strategy.of(stage=3))
    victim = max(folder.glob("*.exp_avg.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1  # of rank 1's share
    victim.write_bytes(data)
    for told in world2.run(load_and_tell, str(folder)):
        assert f"{victim}: bytes" in told


def fail_at_the_end(folder: str) -> str:
    units, optimizer = make(Strategy.of(stage=3))
    full = mock.patch("ftkit.engine.checkpoint.saving.write_sealed", side_effect=OSError("No space left on device"))
    with full, pytest.raises(ValueError, match="could not be written") as told:
        save_checkpoint(folder, units, optimizer)
    save_checkpoint(folder, units, optimizer)
    return str(told.value)


def test_a_save_that_fails_at_its_manifest_leaves_nothing(world2, tmp_path):
    for told in world2.run(fail_at_the_end, str(tmp_path / "save")):
        assert "No space left on device" in told
    assert [path.name for path in tmp_path.iterdir()] == ["save"]
