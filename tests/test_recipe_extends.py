"""Tests of recipes that extend other recipes: merging, the places in errors, refusals."""

import json

import pytest
import yaml

from docs import recipe_keys
from ftkit.cli.app import main
from ftkit.config import recipe_files
from ftkit.config.optimizer import Optimizer
from ftkit.config.recipe import RecipeError, load, parse

BASE = """\
model: {name: some/model, revision: v1}
data: {name: some/set, sequence_tokens: 128}
train:
  batch_tokens: 1536
  seed: 3
optimizer: {lr: 1e-3, betas: [0.8, 0.9]}
adapter: {rank: 4}
output: {dir: runs/base, report_to: [tensorboard, wandb]}
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a recipe beside the base and other files, and returns its path."""

    def written(text, **others):
        for name, content in {"base": BASE, **others, "child": text}.items():
            path = tmp_path / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        return str(tmp_path / "child.yaml")

    return written


def problems(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(path, list(overrides))
    return [str(problem).replace(path.removesuffix("child.yaml"), "") for problem in caught.value.problems]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    said = capsys.readouterr()
    return caught.value.code or 0, said.out if not caught.value.code else said.out + said.err


def test_sections_merge_and_other_values_are_replaced(write):
    text = "extends: base.yaml\noptimizer: {betas: [0.5, 0.6]}\noutput: {report_to: [mlflow]}\ntrain: {epochs: 2}\n"
    child = load(write(text))
    assert (child.optimizer.lr, child.optimizer.betas) == (1e-3, (0.5, 0.6))
    assert (child.output.dir, child.output.report_to) == ("runs/base", ("mlflow",))
    assert (child.train.seed, child.train.epochs) == (3, 2)
    assert child.adapter.rank == 4


def test_null_takes_a_key_of_the_base_away(write):
    text = "extends: base.yaml\nadapter:\nmodel: {revision: null}\ndata: {name: null, path: rows.jsonl}\n"
    child = load(write(text + "optimizer: {lr: null, eps: null}\n"), check_files=False)
    assert child.adapter is None
    assert child.model.revision is None
    assert (child.data.name, child.data.path, child.data.sequence_tokens) == (None, "rows.jsonl", 128)
    assert (child.optimizer.lr, child.optimizer.eps) == (Optimizer().lr, Optimizer().eps), "base.yaml has no eps"
    assert problems(write("extends: base.yaml\n\noutput: null\n")) == ["child.yaml:3: output: is missing"]


def test_a_base_may_extend_another_and_lack_required_keys(write):
    middle = "extends: ../base.yaml\noptimizer: {lr: 2e-3, betas: null}\nadapter: null\n"
    child = load(write("extends: folder/middle.yaml\nadapter: {alpha: 7}\n", **{"folder/middle": middle}))
    assert (child.optimizer.lr, child.optimizer.betas) == (2e-3, Optimizer().betas)
    assert (child.adapter.alpha, child.adapter.rank) == (7, 16), "the middle took the adapter away"
    assert load(write("extends: part.yaml\n" + BASE, part="show: {prompts: [a]}\n")).show.prompts == ("a",)


def test_an_alias_of_the_base_keeps_its_value(write):
    base = BASE.replace("{name: some/model, revision: v1}", "{config: {a: &a {x: 1, y: 1}, b: *a}, tokenizer: t}")
    child = load(write("extends: base.yaml\nmodel: {config: {a: {x: 2}}}\n", base=base))
    assert child.model.config == {"a": {"x": 2, "y": 1}, "b": {"x": 1, "y": 1}}


def test_a_dump_is_resolved_and_overrides_are_laid_over_it(write):
    child = load(write("extends: base.yaml\nranks: 2\n"), ["train.seed=5", "adapter=null"])
    assert "extends" not in yaml.safe_load(child.dump())
    assert parse(child.dump(), "resolved.yaml") == child
    assert (child.train.seed, child.ranks, child.adapter) == (5, 2, None)


def test_errors_are_placed_where_the_key_is_written(write):
    base = BASE.replace("seed: 3", "seed: x") + "trian: {epochs: 2}\neval: {share: 3}\n"
    text = "extends: base.yaml\noptimizer:\n  lr: fast\n  betas: [0.9]\nmodel: {revison: main}\neval: {metrics: [bleu]}\n"
    found = problems(write(text, base=base), "adapter.rank=no", "output={keep: 1}")
    assert [problem.rpartition(": ")[0] for problem in found] == [
        "base.yaml:5: train.seed",
        "base.yaml:9: trian",
        "base.yaml:10: eval.share",
        "child.yaml:3: optimizer.lr",
        "child.yaml:4: optimizer.betas.1",
        "child.yaml:5: model.revison",
        "child.yaml:6: eval.metrics.0",
        "--set adapter.rank=no: adapter.rank",
        "--set output={keep: 1}: output.dir",
    ]


def test_the_lines_of_a_replaced_list_are_forgotten(write):
    (found,) = problems(write("extends: base.yaml\n\noptimizer:\n  <<: {betas: [0.9, 2]}\n"))
    assert found.startswith("child.yaml:3: optimizer.betas.1: found 2")


def test_the_yaml_errors_of_all_files_are_reported(write):
    text = "extends: base.yaml\nranks: 1\nranks: 2\n"
    assert problems(write(text, base=BASE + "adapter: {rank: 8}\n")) == [
        "child.yaml:3: ranks: given twice, first on line 2; keep one of the two",
        "base.yaml:9: adapter: given twice, first on line 7; keep one of the two",
        "base.yaml:9: adapter.rank: given twice, first on line 7; keep one of the two",
    ]
    first, second = problems(write(text, base="a: ["))
    assert first.startswith("child.yaml:3: ranks: given twice")
    assert second.startswith("base.yaml:1: not readable as YAML")


@pytest.mark.parametrize("name", ["tiny-cpu", "tiny-cpu.yaml"])
def test_a_base_may_be_packaged(write, name):
    child = load(write(f"extends: {name}\ntrain: {{epochs: 2}}\n"))
    packaged = load("tiny-cpu").model_dump()
    assert child.model_dump() == {**packaged, "train": {**packaged["train"], "epochs": 2.0}}
    assert problems(write(f"extends: {name}\ntrain: {{epochs: 2}}\n"), "eval.share=0.5")[0].startswith("tiny-cpu:5: eval: ")


def test_a_base_is_searched_beside_the_file_that_names_it(write, tmp_path, monkeypatch):
    path = write("extends: base.yaml\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    child = load(path)
    assert child.output.dir == "runs/base"
    assert load("~/child.yaml") == child
    for name in (f"{tmp_path}/base.yaml", "~/base.yaml", "../base.yaml"):
        assert parse(f"extends: {name}\n", "a notebook") == child
    assert parse("extends: base.yaml\n", str(tmp_path / "text.yaml")) == child
    with pytest.raises(RecipeError, match=r"a notebook:1: extends: base\.yaml: no such file"):
        parse("extends: base.yaml\n", "a notebook")


def test_a_packaged_recipe_extends_its_neighbour(write, tmp_path, monkeypatch):
    write("extends: base\nranks: 2\n")
    monkeypatch.setattr(recipe_files.resources, "files", lambda package: tmp_path)
    assert load("child").ranks == 2
    (tmp_path / "base.yaml").write_text(BASE.replace("seed: 3", "seed: x"))
    with pytest.raises(RecipeError, match=r"\n  base:5: train\.seed: found 'x'"):
        load("child")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("tiny-cpv", "tiny-cpv: no such file, and no packaged recipe of that name (did you mean 'tiny-cpu'?)"),
        ("bass.yaml", "bass.yaml: no such file, and no packaged recipe of that name; `ftkit recipes list` shows them"),
        ("[base.yaml]", "found ['base.yaml'], needs the path of one file, or the name of a packaged recipe"),
        ("latin.yaml", "latin.yaml: not readable: 'utf-8' codec"),
        ("child.yaml", "child.yaml -> child.yaml is a cycle"),
    ],
)
def test_a_base_that_cannot_be_used(write, tmp_path, value, words):
    (tmp_path / "latin.yaml").write_bytes(b"model: {name: \xe9}")
    (found,) = problems(write(f"ranks: 1\nextends: {value}\n"))
    assert found.startswith(f"child.yaml:2: extends: {words}")


def test_a_cycle_names_the_extends_that_closes_it(write, tmp_path):
    again = f"../{tmp_path.name}/one.yaml"
    others = {"one": "\nextends: two.yaml\n", "two": f"ranks: 2\n\nextends: {again}\n"}
    (found,) = problems(write("extends: one.yaml\n", **others))
    assert found == f"two.yaml:3: extends: child.yaml -> one.yaml -> two.yaml -> {again} is a cycle; remove one `extends`"


def test_extends_is_a_key_of_files_alone(write):
    words = "extends: is a key at the top of a recipe's file; write it there, not in a section and not in --set"
    assert problems(write(BASE), "extends=tiny-cpu") == [f"--set extends=tiny-cpu: {words}"]
    assert problems(write("extends: base.yaml\n"), "extends=tiny-cpu") == [f"--set extends=tiny-cpu: {words}"]
    assert problems(write(BASE + "memory: {extends: tiny-cpu}\n")) == [f"child.yaml:9: memory.{words}"]
    assert problems(write(BASE + "extend: tiny-cpu\n")) == ["child.yaml:9: extend: unknown key (did you mean 'extends'?)"]
    assert load(write(BASE + "extends:\n")) == load(write("extends: base.yaml\n"))
    assert "| `extends` | text |" in recipe_keys.page()


def test_a_resolved_recipe_is_shown(write, capsys, tmp_path):
    path = write("output: {keep: 2}\nextends: middle.yaml\nadapter: null\n", middle="extends: base.yaml\nranks: 2\n")
    code, shown = run(capsys, "recipes", "show", path)
    assert code == 0
    expected = f"""\
# {path} extends {tmp_path}/middle.yaml extends {tmp_path}/base.yaml
ranks: 2
model: {{name: some/model, revision: v1}}
data: {{name: some/set, sequence_tokens: 128}}
train: {{batch_tokens: 1536, seed: 3}}
optimizer:
  lr: 0.001
  betas: [0.8, 0.9]
output:
  dir: runs/base
  report_to: [tensorboard, wandb]
  keep: 2
"""
    assert shown == expected
    assert parse(shown, "shown.yaml") == load(path)
    assert run(capsys, "recipes", "show", f"{tmp_path}/base.yaml") == (0, BASE)
    code, said = run(capsys, "recipes", "show", write("extends: nothing.yaml\n"))
    assert code == 2
    assert "no such file" in said


def test_a_file_that_extends_another_is_planned(write, capsys):
    path = write("extends: tiny-cpu\nranks: 4\n")
    code, said = run(capsys, "plan", path, "--set", "train.batch_tokens=2816", "--json")
    assert code == 0
    assert json.loads(said)["ranks"] == 4
