"""What a user keeps in an output folder is never replaced or removed; what runs wrote there carries a mark."""

import json
import os
import shutil
import subprocess
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ftkit.cli import app as cli
from ftkit.config.recipe import parse
from ftkit.engine.files.sealed_files import check_contents, reseal, write_contents, write_sealed
from ftkit.errors import UserError
from ftkit.hf.trainer.run_checkpoints import publish
from ftkit.output import ownership
from ftkit.output.ownership import is_ours, refuse_foreign_page, strangers_in_checkpoint
from ftkit.output.replacing import remove_unfinished
from ftkit.output.run_folder import RunFolder, append_line, write, write_json
from ftkit.report.page import page
from ftkit.train.recipe_trainer import RecipeTrainer
from ftkit.train.start import checkpoints_to_try
from ftkit.train.summary import _lines
from tests.jobs import job, recipe

NAMES = [
    *("recipe.yaml", "metrics.jsonl", "divergences.jsonl", "summary.json", "eval_per_example.json", "guard.json"),
    *("report.json", "report.html", "trace.json", "model-files.json", "line.json"),
]
TRAINING = {"step": 1, "epoch": 0.1, "loss": 2.0, "tokens": 8, "divergences": 0, "peak_host_bytes": 1}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def a_run(path):
    """Leave what a run leaves."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_recipe("task: causal-lm\n")
    for name in ("summary.json", "report.json", "trace.json", "eval_per_example.json"):
        write_json(path / name, {"steps": 3})
    append_line(folder.metrics, TRAINING)
    write(folder.report, page("a run", []))
    (path / "checkpoint-3" / "ftkit").mkdir(parents=True)
    (path / "checkpoint-3" / "ftkit" / "whole.weights.safetensors").write_text("weights")
    write_sealed(path / "checkpoint-3" / "contents.json", {"files": {"config.json": [2, ""]}})
    (path / "checkpoint-3" / "config.json").write_text("{}")
    folder.list_model(whole=False)
    (path / "model" / "config.json").write_text("{}")
    folder.list_model(whole=True)
    return folder


@pytest.fixture(scope="module")
def saved(home, worlds, tmp_path_factory):
    """A checkpoint of a full run, and one of an adapter's."""
    folder = tmp_path_factory.mktemp("saved")
    for name, adapter in (("full", None), ("lora", {"rank": 2, "alpha": 4})):
        output = {"dir": str(folder / name), "save_every_steps": 1}
        text = recipe(home, "unused", eval=None, output=output, adapter=adapter)
        worlds[1].run(job, text, ("train.max_steps=1",))
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["a file", "a folder", "a link", "a broken link"])
def test_a_file_of_the_users_under_a_name_of_ours_stops_the_run(tmp_path, name, how):
    out, mine = tmp_path / "out", tmp_path / "mine"
    out.mkdir()
    mine.write_text('{"step": 1, "loss": 2.0}\n')
    if how == "a folder":
        (out / name).mkdir()
    elif how == "a file":
        shutil.copy(mine, out / name)
    else:
        (out / name).symlink_to(mine if how == "a link" else "nowhere")
    before = contents(tmp_path)
    for options in ({"resume": None}, {"resume": None, "overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=f"no run of ftkit wrote .*{name}"):
            RunFolder(out).prepare(options["resume"], overwrite=options.get("overwrite", False))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["checkpoint-500/pytorch_model.bin", "checkpoint-7/notes/diary.txt", "model/mine.bin"])
def test_a_folder_of_the_users_under_a_name_of_ours_stops_the_run(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("mine")
    for options in ({"resume": None}, {"resume": None, "overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=f"no run of ftkit wrote .*{name.partition('/')[0]}"):
            RunFolder(tmp_path).prepare(options["resume"], overwrite=options.get("overwrite", False))
    assert (tmp_path / name).read_text() == "mine"


ADDED = ["model/README.md", "model/config.json", "checkpoint-3/notes.txt", "recipe.yaml", "report.html"]


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_the_user_added_or_changed_after_a_run_is_not_removed(tmp_path, name):
    folder = a_run(tmp_path)
    with open(tmp_path / name, "a") as file:
        file.write("mine: 1")
    if name == "report.html":
        (tmp_path / name).write_text("<html>mine</html>")
    with pytest.raises(UserError, match=f"no run of ftkit wrote .*{name}"):
        folder.prepare(None, overwrite=True)
    assert "mine" in (tmp_path / name).read_text()
    assert folder.summary.exists(), "nothing was removed before it was refused"


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_file_of_the_model_that_was_edited_without_changing_its_size_is_not_replaced(tmp_path, monkeypatch, size):
    monkeypatch.setattr(ownership, "WHOLE_BYTES", ownership.WHOLE_BYTES if size == "small" else 1 << 10)
    folder = a_run(tmp_path)
    path = folder.model / "model.safetensors"
    path.write_bytes(bytes(1 << 20))
    folder.list_model(whole=True)
    assert folder.prepare("auto") == [folder.path / "checkpoint-3"]
    with open(path, "r+b") as file:
        file.seek(1 << 19)
        file.write(b"m" * (8 << 10))
    for options in ({"resume": None, "overwrite": True}, {"resume": "auto"}):
        with pytest.raises(UserError, match=r"no run of ftkit wrote .*model\.safetensors, or it was changed since"):
            folder.prepare(**options)
    sizes = {each.name: each.stat().st_size for each in folder.model.iterdir()}
    write_json(folder.model_list, {"folder": "model", "files": sizes})  # of an earlier version
    assert folder.prepare(None, overwrite=True) == []
    assert not folder.model.exists()


def test_what_a_run_left_is_known_wherever_it_is_moved(tmp_path):
    a_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    folder = RunFolder(tmp_path / "copy")
    assert folder.prepare("auto") == [folder.path / "checkpoint-3"]
    assert folder.prepare(None, overwrite=True) == []
    assert contents(folder.path) == {}


def test_a_run_that_was_killed_while_it_wrote_its_model_is_replaced(tmp_path):
    folder = a_run(tmp_path)
    folder.list_model(whole=False)
    (folder.model / "model.safetensors.writing").write_text("half")
    assert folder.prepare(None, overwrite=True) == []
    assert not folder.model.exists()


def test_another_name_of_a_file_that_lines_are_added_to_stays_as_it_is(tmp_path):
    folder, backup = a_run(tmp_path / "run"), tmp_path / "backup.jsonl"
    os.link(folder.metrics, backup)
    before = backup.read_bytes()
    folder.prepare("auto")
    append_line(folder.metrics, TRAINING)
    assert backup.read_bytes() == before
    assert folder.metrics.read_bytes() != before


def facts(home, out, **changes):
    return parse(recipe(home, "unused", eval=None, output={"dir": str(out)}, **changes), "recipe.yaml")


@pytest.mark.parametrize("name", ["metrics.jsonl", "model/rows.jsonl", "checkpoint-3/rows.jsonl"])
@pytest.mark.parametrize("link", [None, "symbolic"])
def test_what_a_run_reads_is_not_where_it_writes(home, tmp_path, name, link):
    """Whatever name it has on the command line."""
    out, rows = tmp_path / "out", tmp_path / "out" / name
    rows.parent.mkdir(parents=True)
    (out / "checkpoint-3" / "ftkit").mkdir(parents=True, exist_ok=True)
    shutil.copy(home / "rows.jsonl", rows)
    before, path = rows.read_bytes(), rows
    if link is not None:
        path = tmp_path / "rows.jsonl"
        path.symlink_to(rows)
    told = facts(home, out, data={"path": str(path), "sequence_tokens": 32})
    for options in ({"overwrite": False}, {"overwrite": True}):
        with pytest.raises(UserError, match=r"reads|no run of ftkit wrote"):
            checkpoints_to_try(told, RunFolder(out), None, first=True, say=print, **options)
    assert rows.read_bytes() == before


def test_rows_are_not_read_from_the_folder_that_the_run_writes(home, tmp_path):
    shutil.copy(home / "rows.jsonl", tmp_path)
    told = facts(home, tmp_path, data={"path": str(tmp_path), "sequence_tokens": 32})
    with pytest.raises(UserError, match="would be read as rows"):
        checkpoints_to_try(told, RunFolder(tmp_path), None, first=True, say=print, overwrite=False)


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(each) for each in arguments])
    text = capsys.readouterr().err
    assert caught.value.code == 2, text
    assert "Traceback" not in text
    return " ".join(text.split())


def test_a_recipe_beside_its_own_output_stops_the_run(capsys, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(recipe(home, "unused", eval=None, output={"dir": "."}))
    before = contents(tmp_path)
    for options in ((), ("--overwrite",), ("--resume", "auto"), ("--dry-run",)):
        assert "no run of ftkit wrote recipe.yaml" in refusal(capsys, "finetune", "recipe.yaml", *options)
    assert contents(tmp_path).keys() - {".lock"} == before.keys()
    assert Path("recipe.yaml").read_bytes() == before["recipe.yaml"]


def test_pages_replace_pages_only(capsys, home, tmp_path):
    mine, path = tmp_path / "mine.html", tmp_path / "recipe.json"
    path.write_text(recipe(home, "run", eval=None))
    mine.write_text("<html>mine</html>")
    a_run(tmp_path / "run")
    commands = {
        "--page": [("plan", path, "--page", mine), ("data", path, "--page", mine)],
        "--out": [("report", tmp_path / "run", "--out", mine), ("report", *[tmp_path / "run"] * 2, "--out", mine)],
    }
    for option, each in commands.items():
        for command in each:
            assert f"{option}: {mine} is there and ftkit did not write it" in refusal(capsys, *command)
    (tmp_path / "run" / "report.html").write_text("<html>mine</html>")
    assert "ftkit did not write it" in refusal(capsys, "report", tmp_path / "run")
    assert (tmp_path / "run" / "report.html").read_text() == mine.read_text() == "<html>mine</html>"
    write(mine, page("ours", []))
    for command in commands["--page"][1:] + commands["--out"][:1]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(each) for each in command])
        assert caught.value.code == 0
        assert is_ours(mine)


def test_a_page_is_known_under_any_suffix(tmp_path):
    for name in ("plan.htm", "plan.txt", "plan"):
        refuse_foreign_page(tmp_path / name, "--page")
        write(tmp_path / name, page("ours", []))
        refuse_foreign_page(tmp_path / name, "--page")
    (tmp_path / "plan.txt").write_text("mine")
    with pytest.raises(UserError, match="ftkit did not write it"):
        refuse_foreign_page(tmp_path / "plan.txt", "--page")


def test_a_list_that_is_sealed_again_is_on_the_disk_under_its_name(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("{}")
    write_contents(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    reseal(tmp_path, ["a.json"])
    assert synced[-1] == tmp_path.stat().st_ino
    assert check_contents(tmp_path) == ["a.json"]


def test_a_link_beside_a_page_is_not_written_through(tmp_path):
    mine, target = tmp_path / "mine", tmp_path / "page.html"
    mine.write_text("mine")
    (tmp_path / f".page.html.{os.getpid()}.partial").symlink_to(mine)
    write(target, page("ours", []))
    assert mine.read_text() == "mine"
    assert is_ours(target)


def test_a_real_run_knows_its_own_files(saved, tmp_path):
    folder = RunFolder(shutil.copytree(saved / "full", tmp_path / "run"))
    assert folder.prepare("auto") == [folder.path / "checkpoint-1"]
    (folder.model / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"no run of ftkit wrote .*notes\.txt"):
        folder.prepare(None, overwrite=True)
    (folder.model / "notes.txt").unlink()
    assert folder.prepare(None, overwrite=True) == []
    assert contents(folder.path) == {}


def test_verify_removes_no_folder_of_the_users(home, tmp_path):
    from ftkit.cli.verify import _claim

    (tmp_path / "stock").mkdir()
    with pytest.raises(UserError, match=r"no `ftkit verify` wrote .*stock"):
        _claim(tmp_path, ["0", "stock"])
    (tmp_path / "stock").rmdir()
    _claim(tmp_path, ["0", "stock"])
    (tmp_path / "stock").mkdir()
    _claim(tmp_path, ["0", "stock"])  # of one that was killed
    (tmp_path / "verify.json").write_text("{}")
    with pytest.raises(UserError, match=r"verify\.json"):
        _claim(tmp_path, ["0"])


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


def test_a_model_of_an_earlier_end_is_not_told_as_this_runs(saved):
    folder = RunFolder(saved / "full")
    summary = json.loads(folder.summary.read_text())
    assert dict(_lines(summary, folder))["model"] == str(folder.model)
    told = dict(_lines({**summary, "problem": "training failed", "model_written": False}, folder))
    assert told["model"] == f"none was written; {folder.model} is of an earlier run"


@pytest.mark.slow
def test_a_name_in_other_letters_is_the_same_name_where_the_file_system_says_so(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["chattr", "+F", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip("this file system knows no folders without upper and lower case")
    (disk / "Metrics.JSONL").write_text("mine")
    with pytest.raises(UserError, match="no run of ftkit wrote"):
        RunFolder(disk).prepare(None)


@pytest.mark.parametrize("options", [("full",), ("lora", "--merge-adapter")])
@pytest.mark.parametrize("fault", ["a file there", "a full disk", "damaged"])
def test_a_refused_export_leaves_nothing(capsys, saved, tmp_path, monkeypatch, options, fault):
    out, source = tmp_path / "new" / "out", saved / options[0] / "checkpoint-1"
    if fault == "a file there":
        out.mkdir(parents=True)
        (out / "config.json").write_text("mine")
    elif fault == "a full disk":
        full = OSError(28, "No space left on device")
        monkeypatch.setattr("ftkit.hf.weights.exporting.create_file", lambda *_: (_ for _ in ()).throw(full))
    else:
        source = shutil.copytree(source, tmp_path / "damaged")
        (source / "config.json" if options[0] == "full" else source / "adapter_config.json").write_text("{}")
    before = contents(out)
    told = refusal(capsys, "export", source, out, *options[1:])
    assert {"a file there": "config.json already", "a full disk": "No space left"}.get(fault, "damaged") in told
    assert contents(out) == before
    assert out.parent.exists() == (fault == "a file there"), "folders that were made are removed again"


@pytest.mark.parametrize("damage", ["", "cut", "gone", "theirs"])
@pytest.mark.parametrize("name", ["notes.txt", "ftkit/notes.txt", "ftkit/deep/a.safetensors", "plots/config.json"])
def test_files_of_the_users_are_known_in_a_damaged_checkpoint(tmp_path, name, damage):
    folder = a_run(tmp_path)
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "rng_state_1.pth").write_text("" if damage else "mine")
    if damage:
        listing = checkpoint / "contents.json"
        listing.write_bytes({"cut": listing.read_bytes()[:30], "theirs": b'{"files": {"notes.txt": []}}'}.get(damage, b""))
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_text("mine")
    expected = {name} | ({"contents.json"} if damage == "theirs" else set()) | (set() if damage else {"rng_state_1.pth"})
    assert {path.relative_to(checkpoint).as_posix() for path in strangers_in_checkpoint(checkpoint)} == expected
    before = contents(tmp_path)
    with pytest.raises(UserError, match="no run of ftkit wrote"):
        folder.prepare(None, overwrite=True)
    assert contents(tmp_path) == before


def new_checkpoint(folder):
    """Leave a checkpoint that has no name yet."""
    temporary = folder / ".checkpoint-2.writing" / "checkpoint-2"
    (temporary / "ftkit").mkdir(parents=True)
    for name in ("trainer_state.json", "config.json", "ftkit/whole.master.safetensors"):
        (temporary / name).write_text("new")
    write_sealed(temporary / "ftkit" / "manifest.json", {"files": {"whole.master.safetensors": []}})
    return temporary


STOCK = {"trainer_state.json": "{}", "model.safetensors": "old", "optimizer.pt": "old", "rng_state.pth": "old"}
MINE = {"notes.txt": "mine", "plots/a.png": "mine", "ftkit/notes.txt": "mine"}


@pytest.mark.parametrize("former", [{}, STOCK, {"trainer_state.json": "mine"}, {"contents.json": '{"checksum":"12'}])
def test_a_checkpoint_takes_a_folders_place_and_the_users_files_stay(tmp_path, former):
    final = tmp_path / "checkpoint-2"
    for name, text in {**former, **MINE}.items():
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        (final / name).write_text(text)
    for _ in range(3):  # what was kept once is not taken for a checkpoint's own
        publish(new_checkpoint(tmp_path), final)
        assert {name: (final / name).read_text() for name in MINE} == MINE
        assert not {path.name for path in final.iterdir()} & (STOCK.keys() - {"trainer_state.json"})
        assert (final / "trainer_state.json").read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("links", [True, False])
def test_links_and_copies_of_the_users_do_not_keep_the_former_checkpoint(tmp_path, links):
    (tmp_path / "elsewhere").write_text("mine")
    folder = tmp_path / "run"
    final = folder / "checkpoint-2"
    (final / "plots").mkdir(parents=True)
    (final / "plots" / "a.png").write_text("mine")
    for name, target in (("link", "../../elsewhere"), ("broken", "nowhere")):
        (final / name).symlink_to(target)
    refused = mock.patch.object(os, "link", side_effect=PermissionError(1, "Operation not permitted"))
    for _ in range(2):
        with nullcontext() if links else refused:
            publish(new_checkpoint(folder), final)
        assert [path.name for path in folder.iterdir()] == ["checkpoint-2"]
        assert (final / "plots" / "a.png").read_text() == (final / "link").read_text() == "mine"
        assert os.readlink(final / "broken") == "nowhere"


@pytest.mark.parametrize("name", ["", "contents.json", "ftkit/manifest.json", "config.json/old.txt"])
def test_what_is_in_the_way_of_a_checkpoint_stops_the_save_and_stays(tmp_path, name):
    final = tmp_path / "checkpoint-2"
    (final / name).parent.mkdir(parents=True, exist_ok=True)
    (final / name).write_text("mine")
    temporary = new_checkpoint(tmp_path)
    with pytest.raises((UserError, OSError), match="checkpoint-2"):
        publish(temporary, final)
    assert (final / name).read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("fails", ["link", "rename", "replace", "mkdir", "fsync"])
@pytest.mark.parametrize("calls", range(4))
def test_files_of_the_users_outlive_a_save_that_ends_anywhere(tmp_path, fails, calls):
    final = tmp_path / "checkpoint-2"
    (final / "plots").mkdir(parents=True)
    for name in ("notes.txt", "plots/a.png"):
        (final / name).write_text("mine")
    temporary, left, call = new_checkpoint(tmp_path), [calls], getattr(os, fails)

    def killed(*names, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return call(*names, **options)

    with mock.patch.object(os, fails, killed), suppress(KeyboardInterrupt):
        publish(temporary, final)
    remove_unfinished(tmp_path)  # as the next run does
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert (final / "notes.txt").read_text() == (final / "plots" / "a.png").read_text() == "mine"


def test_a_checkpoint_with_a_file_of_the_users_is_not_retired(tmp_path):
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        write_sealed(folder / "contents.json", {"files": {"trainer_state.json": []}})
        (folder / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    trainer = SimpleNamespace(damaged=set(), keep=1, evaluated={})
    RecipeTrainer.retire_checkpoints(trainer, tmp_path / "checkpoint-6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]
    assert (tmp_path / "checkpoint-2" / "notes.txt").read_text() == "mine"


def test_a_long_line_of_a_divergence_is_ours(tmp_path):
    path = tmp_path / "divergences.jsonl"
    record = {"step": 1, "reason": "nan", "loss": None, "grad_norm": 1.0, "action": "skip", "places": ["row"] * 40_000}
    path.write_text(json.dumps(record) + "\n")
    assert path.stat().st_size > 1 << 17
    assert is_ours(path)
    path.write_text("[" + json.dumps(record))
    assert not is_ours(path)
