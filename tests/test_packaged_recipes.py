"""Every packaged recipe says what the planner says of it, fits its node, and trains a narrow copy of its model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recipes import GPTS, INDEX, TINY, entries, index_text
from ftkit.cli.recipes import index
from ftkit.config.recipe import parse
from ftkit.config.recipe_files import packaged, resolve
from ftkit.plan.catalog import architectures, find_hardware
from ftkit.plan.refuse import DoesNotFit
from ftkit.train.planning import plan_recipe
from tests.jobs import job

ALL = {entry.name: entry for entry in entries()}
FITTING = [name for name in ALL if name in packaged()]
QUICK = ("llama-2-13b-full-8xv100-16gb", "t5-11b-lora-8xv100-16gb")
NAMES: list[Any] = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FITTING]


def _name(each: Any) -> str:
    return each if isinstance(each, str) else each.values[0]


NARROW = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 256,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "vocab_size": 4096, "max_position_embeddings": 256,
    "word_embed_proj_dim": 32, "ffn_dim": 48, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "pad_token_id": 0,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}


def narrow(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the same flags and small sizes."""
    heads = config.get("num_attention_heads", 0)
    made = {key: NARROW[key] if key in NARROW and value is not None else value for key, value in config.items()}
    if config.get("num_key_value_heads") == heads:
        made["num_key_value_heads"] = NARROW["num_attention_heads"]
    return {**made, **TOKENS}


def test_all_of_them_are_there() -> None:
    assert set(packaged()) <= {*ALL, "tiny-cpu"}
    here = {name for name in ALL if name.endswith("8xv100-16gb")}
    assert here <= set(packaged()), "all fit the node that the project is for"
    assert len(here) >= 2 * len(architectures()) + len(GPTS)


@pytest.mark.slow
def test_what_is_not_there_does_not_fit() -> None:
    for name in ALL.keys() - packaged().keys():
        with pytest.raises(DoesNotFit):
            _ = ALL[name].header


def test_the_index_has_every_recipe_with_the_numbers_of_its_first_line() -> None:
    assert index()[-1] == TINY
    assert INDEX.read_text(encoding="utf-8") == index_text(index())
    rows = {row["name"]: row for row in index()}
    assert rows.keys() == packaged().keys()
    for name in FITTING:
        row, first = rows[name], packaged()[name].read_text(encoding="utf-8").partition("\n")[0]
        numbers = f"{row['device_gib']:.1f} GiB a GPU, {row['host_gib']} GiB host, {row['tokens_per_s']:,} tokens/s."
        assert f", {row['method']}, on " in first
        assert numbers in first, name
        assert (row["model"], row["hardware"]) == (ALL[name].model, ALL[name].hardware)


@pytest.mark.parametrize(
    "name", [name if name == QUICK[0] else pytest.param(name, marks=pytest.mark.slow) for name in FITTING]
)
def test_a_recipe_says_what_the_planner_says(name: str) -> None:
    assert packaged()[name].read_text(encoding="utf-8") == ALL[name].text, "write them again: make recipes"
    assert ALL[name].row in index()


BOXES = re.compile("-[0-9]+x[a-z0-9]+-[0-9]+gb$")
ONE_OF_A_KIND = {BOXES.sub("", name): name for name in reversed(FITTING)}
"""Recipes that differ in their hardware alone train the same."""


@pytest.mark.parametrize("name", [each for each in NAMES if _name(each) in ONE_OF_A_KIND.values()])
def test_a_recipe_trains_a_narrow_copy_of_its_model(name: str, worlds: Any, tmp_path: Path) -> None:
    facts = resolve(packaged()[name].read_text(encoding="utf-8"), name, packaged()[name]).values
    rows = [{"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = ALL[name]
    config = facts["model"]["config"] if entry.model in GPTS else architectures()[entry.model].config
    facts["model"] = {"config": narrow(config), "tokenizer": "bundled/tiny-base"}
    facts["data"] |= {"path": str(tmp_path / "rows.jsonl"), "sequence_tokens": 64, "cache_dir": str(tmp_path / "cache")}
    facts["train"] |= {"batch_tokens": 128, "max_steps": 2}
    facts |= {"ranks": 1, "output": {"dir": str(tmp_path / "run")}}
    summary = worlds[1].run(job, json.dumps(facts))[0]
    assert summary["steps"] == 2
    assert 0 < summary["train_loss"] < 20


def test_a_recipe_that_cannot_fit_is_refused() -> None:
    text = packaged()[QUICK[0]].read_text(encoding="utf-8")
    with pytest.raises(DoesNotFit, match="host memory"):
        plan_recipe(parse(text + "memory: {host_gib: 64}\n", "recipe.yaml"), 8, find_hardware("8xv100-16gb"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "goal", "bound"),
    [("llama-2-13b-full-8xv100-16gb", 4200, 5100), ("gpt-10b-full-8xv100-16gb", 5800, 6600)],
)
def test_goals_of_the_box(name: str, goal: int, bound: int) -> None:
    """Tokens per second with 128K tokens per step, and bounds at 70 TFLOPS per GPU (see docs/rates.md)."""
    plan = plan_recipe(parse(packaged()[name].read_text(encoding="utf-8"), name), 8, find_hardware("8xv100-16gb"))
    assert plan.speed is not None
    assert plan.speed.tokens == 131072
    assert plan.speed.tokens_per_s >= max(goal, 0.9 * bound)
    assert plan.speed.binds == "compute"
