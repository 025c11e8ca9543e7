"""The packaged facts are those of the models: their parameters are counted, and each is planned on the project's box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftkit.config.recipe import Recipe, parse
from ftkit.errors import UserError
from ftkit.plan.architectures import Architecture, architectures
from ftkit.plan.hardware import box
from ftkit.train.planning import model_of, plan_recipe

QUICK = ("meta-llama/Llama-2-13b-hf",)
NAMES: list[Any] = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in architectures()]


def recipe_of(known: Architecture, folder: Path) -> Recipe:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    t5 = known.config["model_type"] == "t5"
    text = f"""
model: {{name: {known.name}}}
task: {"seq2seq" if t5 else "causal-lm"}
data: {{path: {rows}, sequence_tokens: {512 if t5 else 2048}}}
train: {{batch_tokens: 131072, epochs: 1}}
optimizer: {{lr: 1.0e-5}}
output: {{dir: {folder / "run"}}}
"""
    return parse(text, "recipe.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_model_has_its_parameters_and_fits_the_box(name: str, tmp_path: Path) -> None:
    known = architectures()[name]
    recipe = recipe_of(known, tmp_path)
    assert sum(each.numel() for each in model_of(recipe).parameters()) == known.parameters
    eight = box("8xv100-16gb")
    plan = plan_recipe(recipe, 8, eight)
    assert plan.shape.trained_numel == plan.shape.numel == known.parameters
    assert plan.speed is not None
    assert 2000 < plan.speed.tokens_per_s < 9000


def test_a_folder_has_its_own_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = architectures()["meta-llama/Llama-2-13b-hf"]
    (tmp_path / "meta-llama" / "Llama-2-13b-hf").mkdir(parents=True)
    with pytest.raises(Exception, match="no model configuration that transformers can read"):
        model_of(recipe_of(known, tmp_path))


def test_a_dtype_that_the_box_does_not_have(tmp_path: Path) -> None:
    recipe = recipe_of(architectures()[QUICK[0]], tmp_path)
    train = {dtype: recipe.train.model_copy(update={"dtype": dtype}) for dtype in ("bf16", "fp32")}
    asked = {dtype: recipe.model_copy(update={"train": each}) for dtype, each in train.items()}
    with pytest.raises(UserError, match="have no bf16"):
        plan_recipe(asked["bf16"], 8, box("8xv100-16gb"))
    wide = plan_recipe(asked["fp32"], 8, box("8xv100-32gb"))
    assert wide.speed is None
