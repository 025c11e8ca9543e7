"""Damaged checkpoints are passed over by name. Pickles in checkpoints of strangers are never run, links never followed.

Checksums find damage by a disk (first part). A stranger can write valid checksums, so the readers check the contents
(second part). A whole checkpoint of another recipe or of other rows is refused (third part).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from datetime import date

import pytest
import torch

from ftkit.config.recipe import parse
from ftkit.engine.checkpoint.manifest import ENGINE_FOLDER, MANIFEST
from ftkit.engine.checkpoint.sealed import CONTENTS, BrokenCheckpoint, write_contents
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError
from ftkit.hf.save.export import export_checkpoint
from ftkit.hf.trainer.checkpoints import check_folder
from ftkit.train.resume import Start, choose, first_whole
from tests.hostile import DAMAGE, opens_only
from tests.jobs import job, losses, recipe, resumed_job
from tests.tiny import write_rows
from tests.worlds import RankFailure

KINDS = [CONTENTS, f"ftkit/{MANIFEST}", "ftkit/*.weights.safetensors", "ftkit/*.exp_avg.safetensors", "trainer_state.json"]
KINDS += ["rng_state_1.pth", "config.json", "tokenizer.json", "training_args.bin"]


@pytest.fixture
def run_folder(whole, tmp_path):
    """Copy of a run with two checkpoints. Tests damage the second."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.fixture
def newest(run_folder):
    return run_folder / "checkpoint-10"


def chosen(*checkpoints):
    said = []
    return first_whole([str(path) for path in checkpoints], Communicator(torch.device("cpu")), said.append), said


def reseal(checkpoint):
    write_contents(checkpoint, apart=(ENGINE_FOLDER,))


# --- damage by a disk


def passed_over(newest, victim):
    """Assert that resume takes the older checkpoint, names the file, and refuses the newest one alone."""
    older = newest.with_name("checkpoint-8")
    path, said = chosen(newest, older)
    assert path == str(older)
    assert len(said) == 1
    assert f"passed over: {victim}" in said[0]
    with pytest.raises(UserError, match=rf"none is whole:\s+{victim}"):
        chosen(newest)


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_to_any_file_is_passed_over_by_name(kind, newest):
    assert chosen(newest) == (str(newest), [])
    victim = sorted(newest.glob(kind))[0]
    good = victim.read_bytes()
    for damage in DAMAGE.values():
        victim.write_bytes(damage(good))
        passed_over(newest, victim)
    victim.unlink()
    passed_over(newest, victim)
    victim.write_bytes(good)
    assert chosen(newest) == (str(newest), [])


# --- checkpoints of strangers


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def planted(checkpoint, name, payload, how):
    """Replace a file by a pickle with a payload and update the checksums."""
    if how == "torch":
        torch.save({"last_epoch": Payload(payload)}, checkpoint / name)
    else:
        (checkpoint / name).write_bytes(pickle.dumps({"last_epoch": Payload(payload)}, protocol=2))
    reseal(checkpoint)


@pytest.mark.parametrize("how", ["torch", "bare"])
@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state_1.pth"])
def test_a_pickle_with_a_payload_is_refused_and_not_run(name, how, newest, tmp_path):
    planted(newest, name, tmp_path / "ran", how)
    with opens_only(newest, newest.with_name("checkpoint-8")):
        passed_over(newest, newest / name)
    if how == "torch":
        with pytest.raises(BrokenCheckpoint, match=rf"{name}: not read: a pickle that names posix\.mkdir, .*it was not run"):
            check_folder(newest)
    assert not (tmp_path / "ran").exists()
    torch.load(newest / name, weights_only=False) if how == "torch" else pickle.loads((newest / name).read_bytes())
    assert (tmp_path / "ran").exists(), "it would have run, had it been unpickled"


def test_a_resume_refuses_it_too_and_never_reads_the_arguments(newest, home, whole, worlds, tmp_path):
    shutil.rmtree(newest.parent / "model")
    (newest.parent / "summary.json").unlink()
    text = recipe(home, "run", output={"dir": str(newest.parent), "save_every_steps": 4, "keep": 2})
    shutil.rmtree(newest)
    older = newest.with_name("checkpoint-8")
    planted(older, "training_args.bin", tmp_path / "ran", "torch")
    worlds[2].run(resumed_job, text, [str(older)])
    assert losses(newest.parent) == losses(whole[0])
    planted(newest, "scheduler.pt", tmp_path / "ran", "torch")
    with pytest.raises(RankFailure, match=r"UserError: .*\n.*scheduler\.pt: not read: a pickle that names posix\.mkdir"):
        worlds[2].run(resumed_job, text, [str(newest)])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["scheduler.pt", "config.json", "ftkit", CONTENTS])
def test_links_out_of_a_checkpoint_are_refused_and_not_followed(name, newest):
    outside = newest.parent / "outside"
    (newest / name).rename(outside)
    (newest / name).symlink_to(outside)
    victim = newest / name if name != "ftkit" else rf"{newest}/ftkit/\S+"
    with opens_only(newest), pytest.raises(UserError, match=f"{victim}: a link that leads out of its folder"):
        chosen(newest)
    with opens_only(newest, newest.parent / "out"), pytest.raises(UserError, match=str(newest)):
        export_checkpoint(newest, newest.parent / "out")


# --- export


def test_an_export_takes_listed_files_only_and_no_pickles(newest, tmp_path):
    (newest / "planted.json").symlink_to("/etc/passwd")
    (newest / "unlisted.json").write_text("{}")
    export_checkpoint(newest, tmp_path / "first")
    assert not {"planted.json", "unlisted.json"} & {path.name for path in (tmp_path / "first").iterdir()}
    (newest / "planted.json").unlink()
    (newest / "pytorch_model.bin").write_bytes(b"pickle")
    reseal(newest)
    export_checkpoint(newest, tmp_path / "second")
    names = {path.name for path in (tmp_path / "second").iterdir()}
    assert "unlisted.json" in names
    assert "pytorch_model.bin" not in names


# --- another recipe, other rows


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"name": "another/model"}}, r"model\.name"),
        ({"adapter": {"rank": 4}}, "adapter: None"),
        ({"data.path": "held.jsonl"}, r"data\.path"),
        ({"train.batch_tokens": 384}, r"train\.batch_tokens: 192"),
    ],
)
def test_another_recipe_is_refused_by_what_the_checkpoint_notes(changes, says, home, newest):
    facts = json.loads(recipe(home, "run"))
    for key, value in changes.items():
        section, _, name = key.partition(".")
        facts[section] = {**facts[section], name: str(home / value) if name == "path" else value} if name else value
    with pytest.raises(UserError, match="recipe has changed in keys that define a step") as refused:
        choose([str(newest)], parse(json.dumps(facts), "recipe.yaml"), None, print)
    assert refused.match(says)


def test_what_may_change_is_said_in_one_sentence(home, newest):
    facts = json.loads(recipe(home, "run"))
    facts["optimizer"] |= {"betas": [0.5, 0.6]}
    facts["train"] |= {"dtype": "bf16"}
    facts["eval"] |= {"every_steps": 3}
    said = []
    start = choose([str(newest)], parse(json.dumps(facts), "recipe.yaml"), None, said.append)
    assert start.checkpoint == str(newest)
    assert said == [
        "changed since the checkpoint was saved: train.dtype auto -> bf16, optimizer.betas [0.9, 0.95] -> [0.5, 0.6] "
        "(ignored: it comes from the checkpoint)"
    ]


def test_the_day_of_the_rows_is_the_checkpoints(home, newest, monkeypatch):
    facts = parse(recipe(home, "run"), "recipe.yaml")
    notes = {"recipe": facts.model_dump(mode="json"), "rows": "digest", "day": "2026-01-05"}
    monkeypatch.setattr("ftkit.train.resume.read_manifest", lambda folder: {"extra": notes})
    assert choose([str(newest)], facts, None, print) == Start("2026-01-05", str(newest), "digest")
    notes["day"] = None
    assert choose([str(newest)], facts, None, print).day == Start(date.today().isoformat()).day
    monkeypatch.setattr("ftkit.train.resume.read_manifest", lambda folder: {"extra": {}})
    assert choose([str(newest)], facts, None, print) == Start(date.today().isoformat(), str(newest))


def test_other_rows_under_the_same_name_are_refused(newest, home, worlds):
    facts = json.loads(recipe(home, "run", output={"dir": str(newest.parent), "save_every_steps": 4, "keep": 2}))
    rows = home / "rows.jsonl"
    good = rows.read_bytes()
    write_rows(rows, 50, first=1)
    try:
        with pytest.raises(RankFailure, match="checkpoint-8 was trained on other rows: the checksum of their tokens was"):
            worlds[2].run(job, json.dumps(facts), (), str(newest.with_name("checkpoint-8")))
    finally:
        rows.write_bytes(good)
