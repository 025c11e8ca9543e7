"""Recipes: what is understood, what is refused, and where the refusal points."""

import json
import pickle
from typing import get_args

import pytest
import yaml

from ftkit.config import recipe
from ftkit.config.optimizer import ScheduleName
from ftkit.config.recipe import RecipeError, load, parse, split_batch
from ftkit.config.recipe_files import packaged
from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder
from ftkit.spec.strategy import OPEN
from ftkit.train.resume import compare

SMALL = """\
model: {name: some/model}
data: {name: some/set, sequence_tokens: 128}
train: {batch_tokens: 1536}
output: {dir: runs/x}
"""
SCHEDULES = "{} or {}".format(", ".join(map(repr, get_args(ScheduleName)[:-1])), repr(get_args(ScheduleName)[-1]))


def problems(text, *overrides):
    with pytest.raises(RecipeError) as caught:
        parse(text, "r.yaml", list(overrides))
    return [str(problem) for problem in caught.value.problems]


def test_defaults_and_round_trip():
    read = parse(SMALL, "r.yaml")
    assert read.optimizer.betas == (0.9, 0.95)
    assert read.engine.stage == "auto"
    assert parse(read.dump(), "resolved.yaml") == read
    assert list(yaml.safe_load(read.dump())) == list(recipe.Recipe.model_fields)
    assert pickle.loads(pickle.dumps(read)) == read
    with pytest.raises(ValueError, match="frozen"):
        read.task = "seq2seq"


def test_the_example_of_the_design():
    text = """
model:     {name: meta-llama/Llama-2-13b-hf}
data:      {path: data/alpaca.jsonl, sequence_tokens: 2048, packing: true}
train:     {batch_tokens: 262144, epochs: 3, seed: 17}
optimizer: {lr: 2.0e-5, betas: [0.9, 0.95], weight_decay: 0.1, warmup_steps: 30, schedule: cosine, max_grad_norm: 1.0}
adapter:   null
memory:    {device_gib: 14.5, host_gib: 300, nvme_dir: null}
output:    {dir: runs/llama2-13b, save_every_steps: 100, keep: 2}
"""
    read = parse(text, "r.yaml", check_files=False)
    assert read.memory.host_gib == 300
    assert read.adapter is None
    assert read.data.all_sources[0].path == "data/alpaca.jsonl"


def test_null_takes_a_key_away():
    read = parse(SMALL + "optimizer: {warmup_steps: 5, lr: 1e-3}\n", "r.yaml", ["optimizer.warmup_steps=null", "train=null"])
    assert (read.optimizer.warmup_steps, read.optimizer.lr) == (0, 1e-3)


def test_numbers_that_yaml_1_1_takes_for_text():
    read = parse(SMALL + "optimizer: {lr: 2e-5, eps: 1E-9, weight_decay: 1e+2}\n", "r.yaml", ["optimizer.lr=3e-4"])
    assert (read.optimizer.lr, read.optimizer.eps, read.optimizer.weight_decay) == (3e-4, 1e-9, 100.0)


def test_all_problems_at_once_with_their_lines():
    text = """\
model:
  name: some/model
  revison: main
data: {name: some/set, packing: maybe, sequence_tokens: -1}
trian: {epochs: 2}
optimizer:
  lr: fast
  schedule: cosin
  betas: [0.9]
"""
    found = problems(text, "engine.stage=7", "train.lr=1")
    assert found == [
        "r.yaml:1: output: is missing",
        "r.yaml:3: model.revison: unknown key (did you mean 'revision'?)",
        "r.yaml:4: data.sequence_tokens: found -1, needs greater than or equal to 3",
        "r.yaml:4: data.packing: found 'maybe', needs a valid boolean",
        "r.yaml:5: trian: unknown key (did you mean 'train'?)",
        "r.yaml:7: optimizer.lr: found 'fast', needs a valid number",
        f"r.yaml:8: optimizer.schedule: found 'cosin', needs {SCHEDULES} (did you mean 'cosine'?)",
        "r.yaml:9: optimizer.betas.1: is missing",
        "--set train.lr=1: train.lr: unknown key (did you mean 'optimizer.lr'?)",
        "--set engine.stage=7: engine.stage: found 7, needs 'auto', 0, 1, 2 or 3",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {name: a, load_in_4bit: true}", "r.yaml:1: model.load_in_4bit: quantised bases are not supported"),
        ("model: {tokenizer: t}", "model: needs either `name`"),
        ("model: {config: {model_type: llama}}", "model: a model from `config` needs a `tokenizer`"),
        ("memory: {nvme_dir: /nowhere}", "memory.nvme_dir: no such file or folder: /nowhere"),
        ("data: {sequence_tokens: 5}", "needs exactly one of `path`"),
        ("eval: {share: 0.1, metrics: [loss, bleu]}", "eval.metrics.1: found 'bleu'"),
        ("eval: {share: 0.1, patience: 3}", "eval: found `patience` without evaluations during training; set `every_steps`"),
        ("eval: {share: 0.1, every_steps: 5, patience: 0}", "eval.patience: found 0, needs greater than"),
        ("eval: {share: 0.1, best: bleu}", "eval.best: found 'bleu', needs 'loss', 'perplexity' or 'accuracy'"),
        ("eval: {early_stopping_patience: 3}", "eval.patience' (evaluations without a new best"),
        ("adapter: {rank: true}", "adapter.rank: found true, needs a number"),
        ("optimizer: {lr: .nan}", "optimizer.lr: found nan, needs a finite number"),
        ("optimizer: [1]", "optimizer: found [1], needs a valid dictionary"),
        ("train: {on_divergence: rollback}", "found 'rollback', needs 'continue', 'skip' or 'stop'"),
        ("train: {epochs: 1}\ntrain: {epochs: 2}", "r.yaml:2: train: given twice, first on line 1"),
        ("a: [", "r.yaml:1: not readable as YAML"),
        ("- a", "r.yaml:1: not readable as YAML sections: found ['a'], needs sections such as `model:`"),
        ("", "model: is missing"),
    ],
)
def test_refusals(text, words):
    found = problems(text)
    assert any(words in problem for problem in found), found


def test_an_override_of_a_section_is_the_place_of_its_keys():
    (found,) = problems(SMALL + "optimizer: {betas: [0.9, 0.95]}\n", "optimizer={betas: [0.9]}")
    assert found == "--set optimizer={betas: [0.9]}: optimizer.betas.1: is missing"


def test_of_two_overrides_the_last_one_wins():
    assert parse(SMALL, "r.yaml", ["train.seed=3", "train.seed=4"]).train.seed == 4


def test_checks_of_the_whole():
    (found,) = problems(SMALL, "train.batch_tokens=1000")
    assert "set train.batch_tokens to 1024" in found
    assert found.startswith("--set train.batch_tokens=1000: ")
    (found,) = problems(SMALL, "task=seq2seq", "data.packing=true")
    assert "data.packing: works with task: causal-lm only" in found


def test_overrides():
    settings = ["adapter.rank=8", "data.split=test", "model.tokenizer=~/t", "output.report_to=tensorboard"]
    read = parse(SMALL + "adapter: null\n", "r.yaml", settings, check_files=False)
    assert read.adapter.rank == 8
    assert read.data.split == "test"
    assert not read.model.tokenizer.startswith("~")
    assert read.output.report_to == ("tensorboard",)
    listed = "model: {name: m}\noutput: {dir: o}\ndata: {sources: [{name: a, weight: 1}, {name: b, weight: 2}]}\n"
    assert parse(listed, "r.yaml", ["data.sources.1.weight=3"]).data.sources[1].weight == 3
    (found,) = problems(listed, "data.sources.2.weight=3")
    assert found == "--set data.sources.2.weight=3: found no section with that key, and no list with that index"


def test_an_override_that_fits_nowhere_is_refused():
    assert any("needs the form key.sub=value" in problem for problem in problems(SMALL, "optimizer.lr"))
    assert problems(SMALL, "optimizer.lr=[") == ["--set optimizer.lr=[: expected the node content, but found '<stream end>'"]
    (found,) = problems(SMALL, "train.batch_tokens.x=3")
    assert found.startswith("--set train.batch_tokens.x=3: found no section with that key")


def test_an_empty_section_has_its_defaults():
    assert parse(SMALL + "engine:\noptimizer:\n", "r.yaml").engine == OPEN


def test_merge_keys_and_anchors_keep_their_lines():
    text = SMALL + "optimizer: &o {lr: 1e-3}\nadapter: {<<: {rank: 4}, alpha: x}\n"
    assert problems(text) == ["r.yaml:6: adapter.alpha: found 'x', needs a valid number"]


def test_paths(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "model: {name: bundled/tiny-base}\ndata: {path: ~/rows.jsonl}\noutput: {dir: o}\n"
    read = parse(text, "r.yaml")
    assert read.data.path == str(tmp_path / "rows.jsonl")
    assert problems(text.replace("rows", "others"))[0].startswith("r.yaml:2: data.path: no such file or folder: ")
    assert parse(text.replace("~/", ""), "r.yaml").data.path == "rows.jsonl"
    assert read.model.name.endswith("tiny-base")
    assert not read.model.name.startswith("bundled")
    assert yaml.safe_load(read.dump())["model"]["name"] == "bundled/tiny-base"


def test_several_data_sets():
    sources = "[{name: a, weight: 1}, {name: b, weight: 2}]"
    read = parse(f"model: {{name: m}}\noutput: {{dir: o}}\ndata: {{sources: {sources}}}", "r.yaml")
    assert [source.name for source in read.data.all_sources] == ["a", "b"]
    single = parse(SMALL, "r.yaml").data.all_sources
    assert [source.name for source in single] == ["some/set"]
    assert single[0].weight is None


def test_files_and_names(tmp_path):
    with pytest.raises(RecipeError, match=r"no packaged recipe of that name \(did you mean 'tiny-cpu'\?\)"):
        load("tiny-cpv")
    with pytest.raises(RecipeError, match="no such file"):
        load(str(tmp_path))
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"model: {name: \xe9}")
    with pytest.raises(RecipeError, match="not readable"):
        load(str(path))
    with pytest.raises(RecipeError) as caught:
        load("nothing-of-this")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_run_is_continued_by_the_same_recipe():
    before = load("tiny-cpu").model_dump(mode="json")

    def message_of(*changes):
        return compare(load("tiny-cpu", list(changes)), before, "checkpoint-4")

    assert message_of() == ""
    assert message_of("output.keep=2", "engine.stage=1", "ranks=1", "show=null", "eval.max_rows=3", "data.workers=1") == ""
    line = message_of("optimizer.lr=1", "train.epochs=2")
    assert "optimizer.lr 0.0015 -> 1.0 (ignored: it comes from the checkpoint)" in line
    assert "train.epochs 1.0 -> 2.0" in line
    for change, words in [
        ("train.seed=3", r"train\.seed: 17 in checkpoint-4, now 3"),
        ("train.batch_tokens=176", r"train\.batch_tokens: 2112"),
        ("data.packing=false", r"data\.packing: True in .*, now False"),
        ("adapter.rank=8", "adapter: None"),
    ]:
        with pytest.raises(UserError, match=words):
            message_of(change)
    for name, converts, goes_on in [
        ("adamw_8bit", "true", True),
        ("adamw_8bit", "false", False),
        ("stable_adamw", "true", False),
    ]:
        changes = f"optimizer.name={name}", f"optimizer.convert_state={converts}"
        if goes_on:
            assert f"optimizer.name adamw -> {name}" in message_of(*changes)
        else:
            with pytest.raises(UserError, match=rf"optimizer\.name: adamw in checkpoint-4, now {name}"):
                message_of(*changes)
    del before["data"]["long_text"], before["show"]
    assert message_of("data.long_text=cut", "show=null") == "", "an earlier version had no such key"


def test_packaged_recipes_are_found_and_valid():
    assert "tiny-cpu" in packaged()
    for name in packaged():
        load(name)


@pytest.mark.parametrize(
    ("forced", "ranks", "expected"),
    [
        ({}, 1, (12, 1)),
        ({}, 3, (4, 1)),
        ({"micro_batch": 2}, 2, (2, 3)),
        ({"accumulation": 3}, 2, (2, 3)),
        ({"micro_batch": 3, "accumulation": 2}, 2, (3, 2)),
    ],
)
def test_the_batch_is_divided(forced, ranks, expected):
    settings = [f"engine.{key}={value}" for key, value in forced.items()]
    assert split_batch(parse(SMALL, "r.yaml", settings), ranks) == expected


def test_long_sequences_accumulate():
    text = SMALL.replace("128", "2048").replace("1536", str(2048 * 12))
    assert split_batch(parse(text, "r.yaml"), 1) == (2, 6)


@pytest.mark.parametrize(
    ("forced", "ranks", "words"),
    [
        ({}, 5, r"12 sequences .*1536 / .*128.*5 ranks x micro_batch auto x accumulation auto.* to 1280"),
        ({"micro_batch": 5}, 2, r"micro_batch 5.* to 1280"),
        ({"micro_batch": 2, "accumulation": 2}, 2, r"2 ranks x micro_batch 2 x accumulation 2.* to 1024"),
    ],
)
def test_batches_that_cannot_be_divided(forced, ranks, words):
    settings = [f"engine.{key}={value}" for key, value in forced.items()]
    with pytest.raises(UserError, match=words):
        split_batch(parse(SMALL, "r.yaml", settings), ranks)


def test_code_in_a_recipe_is_refused():
    (found,) = problems("a: !!python/object/apply:os.mkdir [x]")
    assert "r.yaml:1: not readable as YAML sections: could not determine a constructor" in found


def test_the_metrics_of_a_killed_run_are_kept_up_to_its_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    good = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    bad = [b'{"step": "x"}', b"\xff\xfe", b"\0" * 20, b"[1]"]
    folder.metrics.write_bytes(b"\n".join([good[0].encode(), *bad, good[1].encode(), good[2].encode()]))
    assert folder.keep_metrics_until(2) == {"step": 2, "loss": 1.0}
    assert folder.metrics.read_text().splitlines() == good[:2]
    assert folder.keep_metrics_until(0) == {}


def test_aliases_that_multiply_are_refused():
    lines = ["a0: &a0 [x, x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 9))]
    assert problems(SMALL + "\n".join(lines) + "\n") == [
        "r.yaml:1: not readable as YAML sections: found more than 20 aliases (*name), which multiply; write their values out"
    ]
