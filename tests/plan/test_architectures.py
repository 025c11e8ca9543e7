"""The packaged facts are those of the models: their parameters are counted, and each is planned on the project's node."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipes import EIGHT_BIT, ONLY_8_BIT
from ftkit.config.recipe import Recipe, parse
from ftkit.plan.catalog import Architecture, architectures, find_hardware
from ftkit.train.planning import model_of, plan_recipe


def recipe_of(known: Architecture, folder: Path) -> Recipe:
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    t5 = known.config["model_type"] == "t5"
    chosen = EIGHT_BIT[known.name] if known.name in ONLY_8_BIT else {}
    text = f"""
model: {{name: {known.name}}}
task: {"seq2seq" if t5 else "causal-lm"}
data: {{path: {rows}, sequence_tokens: {512 if t5 else 2048}}}
train: {{batch_tokens: {chosen.get("batch", 131072)}, epochs: 1}}
optimizer: {{{chosen.get("rule", "")}lr: 1.0e-5}}
output: {{dir: {folder / "run"}}}
"""
    return parse(text, "recipe.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures())
def test_a_packaged_model_has_its_parameters_and_fits_the_box(name: str, tmp_path: Path) -> None:
    known = architectures()[name]
    recipe = recipe_of(known, tmp_path)
    assert sum(each.numel() for each in model_of(recipe).parameters()) == known.parameters
    eight = find_hardware("8xv100-16gb")
    plan = plan_recipe(recipe, 8, eight)
    assert plan.shape.trained_numel == plan.shape.numel == known.parameters
    assert plan.speed is not None
    assert 1800 < plan.speed.tokens_per_s < 9000
