"""A Trainer's checkpoint that is damaged, or sealed by a stranger: passed over by name, never run, nothing beyond it read.

A disk spoils bytes, and the checksums tell (first part). A stranger seals what he likes, and the readers tell (second part):
a pickle with a payload is refused and not run, a state that would crash the run is no state. A checkpoint that is whole and
belongs to another recipe or to other rows is refused as well (third part).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from ftkit.config.continuation import check_resumed
from ftkit.config.recipe import parse
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.files.manifest import MANIFEST
from ftkit.engine.files.sealed_files import CONTENTS, BrokenCheckpoint, read_sealed, write_contents, write_sealed
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoint_files import check_random_state, check_state, load_scheduler, read_plain, read_trainer_state
from ftkit.hf.trainer.run_checkpoints import ENGINE_FOLDER, check_folder
from ftkit.hf.weights.exporting import export_checkpoint
from ftkit.train.resume import check_noted, first_whole
from tests.hostile import DAMAGE, JSON, LEAVES, examples, fuzz, mutated, opens_only, told
from tests.jobs import job, losses, recipe, resumed_job
from tests.tiny import write_rows
from tests.worlds import RankFailure

KINDS = [CONTENTS, f"ftkit/{MANIFEST}", "ftkit/*.weights.safetensors", "ftkit/*.exp_avg.safetensors"]
KINDS += ["ftkit/*.exp_avg_sq.safetensors", "trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"]
KINDS += ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
KINDS += ["training_args.bin"]


@pytest.fixture
def run_folder(whole, tmp_path):
    """A copy of a run with two checkpoints, the second of which may be spoiled."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.fixture
def newest(run_folder):
    return run_folder / "checkpoint-10"


def chosen(*checkpoints):
    said = []
    return first_whole([str(path) for path in checkpoints], Communicator(torch.device("cpu")), said.append), said


def reseal(checkpoint):
    write_contents(checkpoint, apart=(ENGINE_FOLDER,))


# --- a disk's doing


def passed_over(newest, victim):
    """Assert that the older checkpoint is taken, that the file is named, and that the newest is refused when it is named."""
    older = newest.with_name("checkpoint-8")
    path, said = chosen(newest, older)
    assert path == str(older)
    assert len(said) == 1
    assert f"passed over: {victim}" in said[0]
    with pytest.raises(UserError, match=rf"none is whole:\s+{victim}"):
        chosen(newest)


@pytest.mark.quick(8)
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


def test_all_kinds_of_files_are_damaged_above(newest):
    covered = {path for kind in KINDS for path in newest.glob(kind)}
    assert {path for path in newest.rglob("*") if path.is_file()} == covered


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_not_one_byte_of_any_file_can_change_unseen(kind, newest):
    """Of each file 200 bytes, spread over it, its first hundred among them."""
    victim = sorted(newest.glob(kind))[0]
    good = victim.read_bytes()
    for at in {*range(min(100, len(good))), *np.linspace(0, len(good) - 1, 100, dtype=int).tolist()}:
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        victim.write_bytes(bad)
        with pytest.raises(UserError, match=str(victim)):
            chosen(newest)


# --- a stranger's doing


class Payload:
    """What a pickle must not do: make a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def planted(checkpoint, name, payload, how):
    """Put a pickle that would make a folder in a file's place, and seal it."""
    if how == "torch":
        torch.save({"last_epoch": Payload(payload)}, checkpoint / name)
    else:
        (checkpoint / name).write_bytes(pickle.dumps({"last_epoch": Payload(payload)}, protocol=2))
    reseal(checkpoint)


@pytest.mark.parametrize("how", ["torch", "bare"])
@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"])
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


@examples(60, 3000)
def test_pickles_of_any_bytes(count, newest):
    random_state, scheduler = newest / "rng_state_0.pth", newest / "scheduler.pt"
    good = {random_state: random_state.read_bytes(), scheduler: scheduler.read_bytes()}
    bare = pickle.dumps({"a": [1.0, "b", None, (2, 3)], "c": {"d": True}}, protocol=2)
    data = st.one_of(st.binary(max_size=40), mutated(bare), *(mutated(each) for each in good.values()))

    def check(drawn):
        path, content = drawn
        path.write_bytes(content)
        told(path, (lambda: check_random_state(path)) if path == random_state else (lambda: read_plain(path)))

    fuzz(count, st.tuples(st.sampled_from(list(good)), data), check)


def schedule():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))


@examples(50, 2000)
def test_a_schedulers_state_of_anything(count, tmp_path):
    """Whatever is accepted, the schedule goes on."""
    path = tmp_path / "scheduler.pt"
    good = schedule()[1]
    keys = st.sampled_from([*good.state_dict(), "optimizer", "step", "get_lr", "__class__", "new"])

    def check(drawn):
        optimizer, scheduler = schedule()
        torch.save({**good.state_dict(), **drawn} if isinstance(drawn, dict) else drawn, path)
        if told(path, lambda: load_scheduler(path, scheduler)) is None:
            optimizer.step()
            scheduler.step()

    fuzz(count, st.dictionaries(keys, JSON, max_size=3) | JSON, check)


@pytest.mark.parametrize("part", ["python", "numpy", "cpu"])
def test_random_states_that_are_none(part, newest):
    path = newest / "rng_state_0.pth"
    state = read_plain(path)
    check_random_state(path)
    kind, words, position, *rest = state["numpy"]
    bad = {
        "python": [None, (3, (1, 2), None), (3, (2**40,) * 625, None), (3, (*state["python"][1][:-1], 10**6), None)],
        "numpy": [None, ("PCG64",), (kind, words[:9], position, *rest)] + [(kind, words, at, *rest) for at in (10**6, -1)],
        "cpu": [None, torch.zeros(9, dtype=torch.uint8), torch.zeros(5056), state["cpu"] | 255],
    }
    for value in (*bad[part], 7, "x", []):
        torch.save({**state, part: value}, path)
        with pytest.raises(BrokenCheckpoint, match=rf"{path}: not the random states of a rank"):
            check_random_state(path)


@examples(50, 2000)
def test_a_trainers_state_of_anything(count, newest):
    path = newest / "trainer_state.json"
    good = json.loads(path.read_text())
    assert read_trainer_state(path).global_step == 10
    path.write_text(json.dumps({**good, "log_history": [{"loss": float("nan"), "step": 1}]}))
    assert np.isnan(read_trainer_state(path).log_history[0]["loss"]), "a loss that was not finite is no damage"

    def check(drawn):
        path.write_text(json.dumps({**good, **drawn} if isinstance(drawn, dict) else drawn))
        told(path, lambda: check_state(newest))

    fuzz(count, st.dictionaries(st.sampled_from([*good, "new"]), JSON, min_size=1, max_size=2) | JSON, check)
    for wrong in ({"global_step": "1"}, {"global_step": -1}, {"logging_steps": -1}, {"stateful_callbacks": []}, {"new": 1}):
        path.write_text(json.dumps({**good, **wrong}))
        with pytest.raises(BrokenCheckpoint, match=rf"{path}: not a Trainer's state \(.*{next(iter(wrong))}"):
            check_state(newest)


def test_what_a_resume_needs_is_listed(newest):
    for name in ("trainer_state.json", f"ftkit/{MANIFEST}"):
        listed = {key: entry for key, entry in read_sealed(newest / CONTENTS)["files"].items() if key != name}
        write_sealed(newest / CONTENTS, {"files": listed})
        with pytest.raises(BrokenCheckpoint, match=rf"contents\.json: {name} is not listed"):
            check_folder(newest)
        reseal(newest)


@pytest.mark.parametrize("name", ["trainer_state.json", "scheduler.pt", "config.json", "ftkit", KINDS[1], CONTENTS])
def test_links_out_of_a_checkpoint_are_refused_and_not_followed(name, newest):
    outside = newest.parent / "outside"
    (newest / name).rename(outside)
    (newest / name).symlink_to(outside)
    victim = newest / name if name != "ftkit" else rf"{newest}/ftkit/\S+"
    with opens_only(newest), pytest.raises(UserError, match=f"{victim}: a link that leads out of its folder"):
        chosen(newest)
    with opens_only(newest, newest.parent / "out"), pytest.raises(UserError, match=str(newest)):
        export_checkpoint(newest, newest.parent / "out")


@pytest.mark.parametrize("name", ["trainer_state.json", "scheduler.pt", "rng_state_0.pth", "config.json", CONTENTS])
def test_pipes_do_not_keep_a_resume_waiting(name, newest):
    (newest / name).unlink()
    os.mkfifo(newest / name)
    with pytest.raises(UserError, match=f"{newest / name}: is no file"):
        chosen(newest)
    with pytest.raises(UserError, match=str(newest)):
        export_checkpoint(newest, newest.parent / "out")


# --- export


@examples(15, 300)
def test_exports_of_any_configuration(count, newest, tmp_path):
    path = newest / "config.json"
    good = json.loads(path.read_text())
    values = st.sampled_from([-1, 0, 1, 3, 10**9, 10**30, 0.5, "x", None, True, [], {}, "../x", [1]]) | LEAVES
    drawn = st.dictionaries(st.sampled_from([*good, "auto_map", "quantization_config", "text_config"]), values, max_size=2)

    def check(fields):
        path.write_text(json.dumps({**good, **fields} if isinstance(fields, dict) else fields))
        reseal(newest)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        told(newest, lambda: export_checkpoint(newest, tmp_path / "out"))

    fuzz(count, drawn | JSON, check)


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
        ({"model": {"config": {"model_type": "llama"}, "tokenizer": "another/model"}}, r"model\.config"),
        ({"adapter": {"rank": 4}}, "adapter: none"),
        ({"data.path": "held.jsonl"}, r"data\.path"),
        ({"data.sequence_tokens": 64}, r"data\.sequence_tokens: 32 in .*, now 64"),
        ({"train.batch_tokens": 384}, r"train\.batch_tokens: 192"),
        ({"train.seed": 3}, r"train\.seed: 17"),
        ({"eval": {"share": 0.2}}, r"eval\.share: none"),
        ({"task": "seq2seq"}, "task: causal-lm"),
    ],
)
def test_another_recipe_is_refused_by_what_the_checkpoint_notes(changes, says, home, newest):
    facts = json.loads(recipe(home, "run"))
    for key, value in changes.items():
        section, _, name = key.partition(".")
        facts[section] = {**facts[section], name: str(home / value) if name == "path" else value} if name else value
    with pytest.raises(UserError, match=f"ftkit/{MANIFEST}|recipe has changed") as refused:
        check_noted(str(newest), parse(json.dumps(facts), "recipe.yaml"), "")
    assert refused.match(says)


def test_what_may_change_is_said_and_what_cannot_be_told_too(home, newest, tmp_path):
    facts = json.loads(recipe(home, "run"))
    facts["optimizer"] |= {"betas": [0.5, 0.6]}
    facts["train"] |= {"dtype": "bf16"}
    now = parse(json.dumps(facts), "recipe.yaml")
    line = check_resumed(now, newest.parent / "recipe.yaml")
    assert "optimizer.betas [0.9, 0.95] -> [0.5, 0.6] (ignored: it comes from the checkpoint)" in line
    assert "train.dtype auto -> bf16 (in effect from here on)" in line
    check_noted(str(newest), now, "")
    for content in ("", "[1]", "model: [", "\0", "a: &a [*a]"):
        (tmp_path / "recipe.yaml").write_text(content)
        line = check_resumed(now, tmp_path / "recipe.yaml")
        assert line.startswith(f"the changes since the run began are unknown ({tmp_path / 'recipe.yaml'}"), content
    (tmp_path / "recipe.yaml").write_text("model: 3\ndata: []\neval: x\ntrain: null\noptimizer: {lr: []}\n")
    with pytest.raises(UserError, match="model: 3 in"):
        check_resumed(now, tmp_path / "recipe.yaml")


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


@pytest.mark.slow
def test_how_often_to_save_is_the_recipes_and_not_the_checkpoints(newest, home, worlds):
    shutil.rmtree(newest)
    output = {"dir": str(newest.parent), "save_every_steps": 1, "logging_steps": 2}
    worlds[2].run(job, recipe(home, "run", output=output), (), str(newest.with_name("checkpoint-8")))
    assert {path.name for path in newest.parent.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9", "checkpoint-10"}
