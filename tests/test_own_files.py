"""Output folders: which are refused, what --overwrite removes, how checkpoints replace each other, and which stay."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from ftkit.cli import app as cli
from ftkit.config.recipe import parse
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoints import complete, rotate
from ftkit.output.run_folder import RunFolder, publish, remove_unfinished
from tests.jobs import job, recipe


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def saved(home, worlds, tmp_path_factory):
    """Run of one step with a checkpoint and a model."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    output = {"dir": str(folder), "save_every_steps": 1}
    worlds[1].run(job, recipe(home, "unused", eval=None, output=output), ("train.max_steps=1",))
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "recipe.yaml", "checkpoint-500/pytorch_model.bin", "model/mine.bin"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, name):
    folder = RunFolder(tmp_path / "out")
    for resume, overwrite in ((None, False), (None, True), ("auto", False)):
        folder.prepare(resume, overwrite=overwrite)  # it does not exist yet
    with folder.lock():  # the lock file, a hidden file and `ftkit verify` make no folder of a user's
        (folder.path / ".gitkeep").touch()
        (folder.path / "verify").mkdir()
    folder.check(None)
    (folder.path / name).parent.mkdir(exist_ok=True)
    (folder.path / name).write_text("mine")
    before = contents(folder.path)
    told = rf"out is not a run of ftkit: it holds {name.partition('/')[0]}.*--set output\.dir=PATH"
    for resume, overwrite in ((None, False), (None, True), ("auto", False)):
        for act in (folder.prepare, folder.check):
            with pytest.raises(UserError, match=told):
                act(resume, overwrite=overwrite)
    with pytest.raises(UserError, match=told), folder.lock():
        pass
    assert contents(folder.path) == before


def test_a_refused_folder_gets_no_lock_file(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt,"), RunFolder(tmp_path).lock():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(saved, tmp_path):
    folder = RunFolder(shutil.copytree(saved, tmp_path / "run"))
    (folder.path / "notes.txt").write_text("mine")
    (folder.path / ".checkpoint-2.writing").mkdir()
    with pytest.raises(
        UserError, match=r"holds checkpoint-1 and summary\.json of an earlier run; continue it with --resume auto"
    ):
        folder.prepare(None)
    assert folder.prepare("auto") == [folder.path / "checkpoint-1"]
    assert folder.prepare(None, overwrite=True) == []
    assert sorted(contents(folder.path)) == [".lock", "notes.txt", "recipe.yaml"]
    assert folder.prepare(None) == [], "it is still a run of ftkit"


@pytest.mark.parametrize("read", ["model", "model/config.json", "checkpoint-1", "by a link"])
def test_overwrite_does_not_remove_what_the_run_reads(saved, tmp_path, read):
    folder = RunFolder(shutil.copytree(saved, tmp_path / "run"))
    (tmp_path / "by a link").symlink_to(folder.model)
    name = str(tmp_path / read if read == "by a link" else folder.path / read)
    before = contents(folder.path)
    for act in (folder.prepare, folder.check):
        with pytest.raises(UserError, match=rf"--overwrite would remove .*, and the recipe reads {name}"):
            act(None, overwrite=True, inputs=["owner/name", name])
    assert contents(folder.path) == before
    folder.prepare(None, overwrite=True, inputs=["owner/name", str(tmp_path)])


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(each) for each in arguments])
    text = capsys.readouterr().err
    assert caught.value.code == 2, text
    assert "Traceback" not in text
    return " ".join(text.split())


def test_verify_removes_its_trials_and_nothing_else(home, tmp_path):
    from ftkit.cli.verify import TRIALS, verify

    for name in (f"{TRIALS}/killed", "mine"):
        (tmp_path / "verify" / name).mkdir(parents=True)
    facts = parse(recipe(home, "unused", eval=None, show=None), "recipe.yaml")
    ended = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        verify(facts, 1, 1, tmp_path / "verify", ended, steps=4, say=str)
    assert [path.name for path in (tmp_path / "verify").iterdir()] == ["mine"]
    assert str(tmp_path / "verify" / TRIALS) in str(ended.call_args)


@pytest.mark.parametrize("fault", ["a file there", "a full disk", "damaged"])
def test_a_refused_export_leaves_nothing(capsys, saved, tmp_path, monkeypatch, fault):
    out, source = tmp_path / "new" / "out", saved / "checkpoint-1"
    if fault == "a file there":
        out.mkdir(parents=True)
        (out / "config.json").write_text("mine")
    elif fault == "a full disk":
        full = OSError(28, "No space left on device")
        monkeypatch.setattr("ftkit.hf.save.export.create_file", lambda *_: (_ for _ in ()).throw(full))
    else:
        source = shutil.copytree(source, tmp_path / "damaged")
        (source / "config.json").write_text("{}")
    before = contents(out)
    said = refusal(capsys, "export", source, "-o", out)
    assert {"a file there": "config.json already", "a full disk": "No space left"}.get(fault, "damaged") in said
    assert contents(out) == before


# --- checkpoints


def checkpoint(path, text, at=None):
    """Write a checkpoint with one file; `at` is the time when it was written."""
    path.mkdir(parents=True)
    for name in ("trainer_state.json", "contents.json"):
        (path / name).write_text(text)
        if at is not None:
            os.utime(path / name, (at, at))
    return path


def texts(folder):
    return {path.name: (path / "trainer_state.json").read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("killed_at", [None, 0, 1])
def test_a_checkpoint_replaces_one_of_its_name(tmp_path, monkeypatch, killed_at):
    """A kill before either rename leaves the former checkpoint, and no debris once the run is started again."""
    final = checkpoint(tmp_path / "checkpoint-2", "old")
    temporary = checkpoint(tmp_path / ".checkpoint-2.writing" / "checkpoint-2", "new")
    renames, rename = [], Path.rename

    def killed(path, target):
        if len(renames) == killed_at:
            raise KeyboardInterrupt
        renames.append(path)
        return rename(path, target)

    if killed_at is None:
        complete(temporary, final)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                publish(temporary, final)
        remove_unfinished(tmp_path)
    assert texts(tmp_path) == {"checkpoint-2": "new" if killed_at is None else "old"}


def test_a_kill_before_the_former_checkpoint_is_removed(tmp_path):
    final = checkpoint(tmp_path / "checkpoint-2", "old")
    publish(checkpoint(tmp_path / ".checkpoint-2.writing" / "checkpoint-2", "new"), final)
    assert len(list(tmp_path.iterdir())) == 3
    remove_unfinished(tmp_path)
    assert texts(tmp_path) == {"checkpoint-2": "new"}


def test_checkpoints_are_ordered_by_when_they_were_written(tmp_path):
    for step, at in ((4, 10), (12, 20), (8, 30), (20, 5), (16, 5)):
        checkpoint(tmp_path / f"checkpoint-{step}", "", at)
    (tmp_path / "checkpoint-old").mkdir()
    folder = RunFolder(tmp_path)
    folder.write_recipe("")
    assert [path.name for path in folder.checkpoints()] == [f"checkpoint-{step}" for step in (16, 20, 4, 12, 8)]
    assert folder.prepare("auto") == folder.checkpoints()[::-1]


@pytest.mark.parametrize(
    ("limit", "best", "stay"),
    [
        (None, None, {4, 8, 12, 5}),
        (4, None, {4, 8, 12, 5}),
        (2, None, {12, 5}),
        (1, None, {5}),
        (1, 4, {4, 5}),
        (2, 4, {4, 5}),
        (3, 4, {4, 12, 5}),
        (1, 5, {5}),
        (1, 99, {5}),
    ],
)
@pytest.mark.parametrize("apart_s", [100, 0.01])
def test_after_a_resume_from_an_older_step_the_newest_and_the_best_stay(tmp_path, limit, best, stay, apart_s):
    for number, step in enumerate((4, 8, 12, 5)):
        checkpoint(tmp_path / f"checkpoint-{step}", "", 1e9 + number * apart_s)
    rotate(tmp_path / "checkpoint-5", limit, best and f"elsewhere/checkpoint-{best}")
    assert set(texts(tmp_path)) == {f"checkpoint-{step}" for step in stay}


def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half_of_it(tmp_path, monkeypatch):
    for step in (4, 8):
        checkpoint(tmp_path / f"checkpoint-{step}", "")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rotate(tmp_path / "checkpoint-8", 1, None)
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["checkpoint-8"]
    remove_unfinished(tmp_path)
    assert set(texts(tmp_path)) == {"checkpoint-8"}


def test_a_copy_of_a_recipe_does_not_make_a_folder_a_run(tmp_path):
    RunFolder(tmp_path / "run").path.mkdir()
    RunFolder(tmp_path / "run").write_recipe("")
    own = RunFolder(tmp_path / "own")
    (own.path / "model").mkdir(parents=True)
    (own.path / "model" / "mine.bin").write_text("weights")
    shutil.copy(tmp_path / "run" / "recipe.yaml", own.recipe)
    for options in ({"resume": None}, {"resume": None, "overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match="is not a run of ftkit: it holds model and recipe"):
            own.prepare(**options)
    assert (own.path / "model" / "mine.bin").exists()
