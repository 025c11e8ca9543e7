"""Recipes of any text: read, or refused with file and line, in a moment; no other error comes out."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import strategies as st

from ftkit.config.recipe import RecipeError, parse
from ftkit.output.run_folder import RunFolder
from tests.hostile import JSON, LEAVES, examples, fuzz, mutated, told

GOOD = """
model: {name: a/b}
data: {path: rows.jsonl, sequence_tokens: 32, packing: true}
eval: {share: 0.1, metrics: [loss, perplexity]}
train: {batch_tokens: 192, seed: 17}
optimizer: {lr: 2e-5, betas: [0.9, 0.95]}
adapter: {rank: 16, targets: [q_proj]}
output: {dir: runs/x}
"""
NAMES = [*("model", "data", "eval", "train", "optimizer", "adapter", "memory", "engine", "output", "show", "task", "ranks")]
KEYS = ["name", "config", "path", "sources", "share", "batch_tokens", "sequence_tokens", "epochs", "lr", "betas", "rank"]
KEYS += ["targets", "micro_batch", "stage", "dir", "prompts", "metrics", "nvme_dir", "model_type"]


def parsed(text, overrides=()):
    try:
        parse(text, "odd.yaml", list(overrides), check_files=False)
    except RecipeError as error:
        return str(error)
    return None


def test_the_good_one_is_good():
    assert parsed(GOOD) is None


@examples(100, 5000)
def test_any_text(count):
    tags = ["&a", "*a", "<<: ", "!!int ", "!!timestamp ", "!!bool ", "!!set ", "!!python/object:os.x "]
    words = st.sampled_from([*"[]{}:,-&*!|>?#%@\n \t'\"", *tags])
    texts = st.one_of(
        st.text(max_size=60),
        st.lists(words | st.sampled_from(NAMES + KEYS), max_size=20).map("".join),
        mutated(GOOD.encode()).map(lambda data: data.decode(errors="replace")),
    )
    fuzz(count, texts, lambda text: told("odd.yaml", lambda: parse(text, "odd.yaml", check_files=False)))


@examples(40, 1000)
def test_any_values(count):
    """JSON is YAML: any values under any keys, known ones for the most part."""
    section = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), LEAVES | JSON, max_size=4) | JSON
    document = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), section, max_size=5) | JSON

    def check(values):
        told("odd.yaml", lambda: parse(json.dumps(values), "odd.yaml", check_files=False))
        good = {"model": {"name": "a/b"}, "data": {"path": "x"}, "output": {"dir": "x"}}
        both = {**good, **values} if isinstance(values, dict) else good
        told("odd.yaml", lambda: parse(json.dumps(both), "odd.yaml", check_files=False))

    fuzz(count, document, check)


@examples(40, 1000)
def test_any_override(count):
    path = st.lists(st.sampled_from([*NAMES, *KEYS, "0", "²", "٣", "-1", ""]), max_size=4).map(".".join)
    values = st.one_of(st.text(max_size=20), st.sampled_from(["²", "!!int ''", "[" * 600, "&a [*a]", "2001-99-99", "."]))
    override = st.tuples(path, values).map("=".join) | st.text(max_size=10)
    fuzz(count, override, lambda drawn: parsed(GOOD, [drawn]))


def doubled(first, line, times):
    """Return a text whose aliases double what they stand for, again and again."""
    lines = [first, *(line.format(new=n, old=n - 1) for n in range(1, times))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (doubled("a0: &a0 [x]", "a{new}: &a{new} [*a{old}, *a{old}]", 60), "aliases stand for more than"),
        (doubled("a0: &a0 {k: x}", "a{new}: &a{new} {{<<: [*a{old}, *a{old}]}}", 60), "aliases stand for more than"),
        ("a: &a [*a]", "contains it"),
        ("a: &a {<<: *a}", "contains it"),
        ("a: &a {? *a : x}", "contains it"),
        ("[" * 2000, "not readable"),
        ("{" * 2000, "not readable"),
        ("a: !!int ''", "not readable"),
        ("a: !!bool x", "not readable"),
        ("a: !!timestamp x", "not readable"),
        ("a: 2001-99-99", "not readable"),
        ("a: !!python/object/apply:os.mkdir [x]", "could not determine a constructor"),
        ("data: {sequence_tokens: 7}\ntrain: {batch_tokens: 1" + "0" * 400 + "}", "needs less than|missing"),
        ("? [a]\n: b", "not readable"),
        ("1: 2\n2.5: 3\nnull: 4\ntrue: 5", "odd.yaml:1"),
    ],
)
def test_texts_that_would_take_for_ever_or_raise_something_else(text, says):
    began = time.monotonic()
    with pytest.raises(RecipeError, match=rf"odd\.yaml:\d+[\s\S]*({says})"):
        parse(text, "odd.yaml", check_files=False)
    assert time.monotonic() - began < 5


def test_a_step_of_more_tokens_than_a_float_can_count():
    text = GOOD.replace("192", "1" + "0" * 400).replace("sequence_tokens: 32", "sequence_tokens: 7")
    with pytest.raises(RecipeError, match=r"train\.batch_tokens: found 1000.*needs less than or equal to"):
        parse(text, "odd.yaml", check_files=False)


def test_metrics_of_a_crashed_run_are_kept_as_far_as_they_can_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    good = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    bad = [b'{"step": "x"}', b'{"step": [1]}', b'{"step": 1' + b"0" * 400 + b"}"]
    bad += [b"\xff\xfe", b"\0" * 20, b"[" * 100_000, b"[1]"]
    folder.metrics.write_bytes(b"\n".join([good[0].encode(), *bad, good[1].encode(), good[2].encode()]))
    folder.keep_metrics_until(2)
    assert folder.metrics.read_text().splitlines() == good[:2]
