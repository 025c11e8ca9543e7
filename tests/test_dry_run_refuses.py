"""`ftkit finetune --dry-run` refuses what the run would refuse, with the run's own words: both make the same parts."""

import json
import shutil

import pytest

from ftkit.config.recipe import load
from ftkit.errors import UserError
from ftkit.train.run import dry_run
from tests.tiny import make_base, write_rows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a small model, rows, and a cache of prepared ones."""
    folder = tmp_path_factory.mktemp("home")
    make_base(folder / "base")
    write_rows(folder / "rows.jsonl", 8)
    (folder / "recipe.yaml").write_text(
        f"model: {{name: {folder / 'base'}}}\n"
        f"data: {{path: {folder / 'rows.jsonl'}, sequence_tokens: 32, cache_dir: {folder / 'cache'}}}\n"
        f"train: {{batch_tokens: 128, max_steps: 2}}\noutput: {{dir: {folder / 'out'}}}\n"
    )
    return folder


@pytest.fixture
def folder(home, tmp_path):
    """Return a model's folder of this test's own."""
    shutil.copytree(home / "base", tmp_path / "own")
    return tmp_path / "own"


def refused(home, *settings, checkpoints=()):
    """Make a dry run of the recipe with settings, which must be refused; returns the words."""
    with pytest.raises(UserError) as refusal:
        dry_run(load(str(home / "recipe.yaml"), list(settings)), 1, checkpoints)
    return str(refusal.value)


def changed(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return f"model.name={folder}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("adapter={targets: [q_proj, typo_proj]}", "'typo_proj' matches no module"),
        ("eval={path: /dev/null}", "/dev/null"),
        ("engine={stage: 1, parameters: host}", "parameters"),
        ("memory.host_gib=0.001", "does not fit"),
        ("engine.state=nvme", "set memory.nvme_dir to a folder"),
        ("optimizer.schedule=warmup_stable_decay", "the schedule warmup_stable_decay needs arguments"),
        ("optimizer={schedule: polynomial, warmup_steps: 2}", "cannot decay in a run of 2 steps with a warm-up of 2"),
        ("optimizer.groups=[{match: head, lr: 1}, {match: lm_, lr: 1}]", "groups.1.match: 'lm_' matches only parameters"),
        ("optimizer.groups=[{match: typo, lr: 1}]", "'typo' matches no trained parameter; names are such as model.emb"),
    ],
)
def test_what_a_recipe_says(home, setting, words):
    assert words in refused(home, setting)


def test_a_warmup_of_all_steps_of_the_epochs(home):
    more = "optimizer={schedule: polynomial, warmup_steps: 6}"
    said = refused(home, "train={batch_tokens: 128, epochs: 3}", more)
    assert "cannot decay in a run of 6 steps with a warm-up of 6" in said


def test_the_optimizer_is_checked_before_the_rows(home):
    empty = "data.path=/dev/null"
    assert "needs arguments" in refused(home, empty, "optimizer.schedule=warmup_stable_decay")
    assert "matches no trained parameter" in refused(home, empty, "optimizer.groups=[{match: typo, lr: 1}]")


def test_groups_match_what_an_adapter_trains(home):
    said = refused(home, "adapter={rank: 2}", "optimizer.groups=[{match: lora_B, lr: 1}, {match: lm_head, lr: 1}]")
    assert "optimizer.groups.1.match: 'lm_head' matches no trained parameter" in said
    assert "q_proj.lora_A.default.weight" in said


@pytest.mark.parametrize("size", [0, -100])
def test_weights_that_are_cut_short(home, folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors: " in refused(home, f"model.name={folder}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 64}, "shapes differ from config.json"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2"),
    ],
)
def test_a_model_that_is_not_what_its_folder_says(home, folder, fields, words):
    assert words in refused(home, changed(folder, **fields))


def test_a_disk_that_is_too_small(home, monkeypatch):
    monkeypatch.setattr("ftkit.train.planning.disk_free", lambda path: 1000)
    assert "free at output.dir" in refused(home, "output.save_every_steps=1")


def test_a_checkpoint_that_is_none_or_another_runs(home, tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    said = refused(home, checkpoints=[tmp_path / "checkpoint-3"])
    assert "of the checkpoints asked for none is whole" in said
    assert "checkpoint-3" in said
