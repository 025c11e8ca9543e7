"""Files in output folders: what --overwrite removes, and what refused or failed commands leave behind."""

import os
import shutil
from unittest import mock

import pytest

from ftkit.cli import app as cli
from ftkit.config.recipe import parse
from ftkit.engine.checkpoint.sealed import write_sealed
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoints import publish
from ftkit.output.ownership import is_ours
from ftkit.output.run_folder import RunFolder, write, write_json
from ftkit.report.page import page
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


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint-500/pytorch_model.bin", "model/mine.bin"])
def test_a_file_that_no_run_wrote_stops_the_run(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for options in ({"resume": None}, {"resume": None, "overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=f"no run of ftkit wrote .*{name.partition('/')[0]}"):
            RunFolder(tmp_path).prepare(options["resume"], overwrite=options.get("overwrite", False))
    assert (tmp_path / name).read_text() == "mine"


def test_overwrite_removes_the_files_of_a_run(saved, tmp_path):
    folder = RunFolder(shutil.copytree(saved, tmp_path / "run"))
    assert folder.prepare("auto") == [folder.path / "checkpoint-1"]
    assert folder.prepare(None, overwrite=True) == []
    assert contents(folder.path) == {}


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(each) for each in arguments])
    text = capsys.readouterr().err
    assert caught.value.code == 2, text
    assert "Traceback" not in text
    return " ".join(text.split())


def test_a_link_beside_a_page_is_not_written_through(tmp_path):
    mine, target = tmp_path / "mine", tmp_path / "page.html"
    mine.write_text("mine")
    (tmp_path / f".page.html.{os.getpid()}.partial").symlink_to(mine)
    write(target, page("ours", []))
    assert mine.read_text() == "mine"
    assert is_ours(target)


def test_verify_removes_what_a_killed_one_left_and_nothing_else(home, tmp_path):
    from ftkit.cli.verify import TRIALS, verify

    names = ["resumed-5", "../mine", "mine", 7, None]
    for name in ("verify/resumed-5", "verify/7", "verify/mine", "mine"):
        (tmp_path / name).mkdir(parents=True)
    write_json(tmp_path / "verify" / TRIALS, {"trials": names})
    facts = parse(recipe(home, "unused", eval=None, show=None), "recipe.yaml")
    with pytest.raises(KeyboardInterrupt):
        verify(facts, 1, 1, tmp_path / "verify", mock.Mock(side_effect=KeyboardInterrupt), steps=4, say=str)
    assert [path.name for path in (tmp_path / "verify").iterdir()] == ["mine"]
    assert (tmp_path / "mine").is_dir()


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
    said = refusal(capsys, "export", source, out)
    assert {"a file there": "config.json already", "a full disk": "No space left"}.get(fault, "damaged") in said
    assert contents(out) == before


def new_checkpoint(folder):
    """Leave a checkpoint that has no name yet."""
    temporary = folder / ".checkpoint-2.writing" / "checkpoint-2"
    (temporary / "ftkit").mkdir(parents=True)
    for name in ("trainer_state.json", "config.json", "ftkit/whole.master.safetensors"):
        (temporary / name).write_text("new")
    write_sealed(temporary / "ftkit" / "manifest.json", {"files": {"whole.master.safetensors": []}})
    return temporary


@pytest.mark.parametrize("former", [{}, {"trainer_state.json": "{}", "model.safetensors": "old", "optimizer.pt": "old"}])
def test_a_checkpoint_replaces_a_folder_and_keeps_the_files_of_the_user(tmp_path, former):
    final = tmp_path / "checkpoint-2"
    final.mkdir()
    for name, text in {**former, "notes.txt": "mine"}.items():
        (final / name).write_text(text)
    publish(new_checkpoint(tmp_path), final)
    assert (final / "notes.txt").read_text() == "mine"
    assert not {"model.safetensors", "optimizer.pt"} & {path.name for path in final.iterdir()}
    assert (final / "trainer_state.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
