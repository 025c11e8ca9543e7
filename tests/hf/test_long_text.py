"""Plain text longer than a sequence is split, cut or refused; nothing of it is lost unsaid."""

import itertools
import json

import pytest

from ftkit.data.prepare import prepare
from ftkit.data.tokenize import edges_of
from ftkit.errors import UserError
from tests.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def ready(tmp_path, tokenizer):
    def prepared(rows, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prepare(path, tokenizer, **{"cache_dir": tmp_path / "cache", "workers": 1, "sequence_tokens": 8, **settings})

    return prepared


@pytest.mark.parametrize("most", [2, 3, 4, 7])
def test_no_token_of_a_split_text_is_lost(most):
    for tokens in range(2, 5 * most):
        edges = edges_of(tokens, most)
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        assert edges[0] == 0
        assert tokens - edges[-1] == (1 if most == 2 and tokens % 2 else 0)  # nothing can be learned of a token alone
        assert max(sizes) <= most
        assert min(sizes) >= 2
        assert len(sizes) <= tokens // most + 1


@pytest.mark.parametrize("letters", [5, 6, 7, 8, 14, 15, 22, 79])
def test_long_text_is_split_by_default(ready, tokenizer, letters):
    text = "ab cd ef gh "[: letters % 12] + "xyz " * 20
    text = text[:letters]
    prepared = ready([{"text": text}, {"text": "ab"}])
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    samples = [row["input_ids"] for row in prepared.dataset][:-1]
    assert list(itertools.chain.from_iterable(samples)) == whole
    assert all(len(sample) == 8 for sample in samples[:-2])
    for row in prepared.dataset:
        assert row["labels"] == [-100, *row["input_ids"][1:]]
    assert prepared.report.cut_tokens == 0
    long = len(whole) > 8
    assert (prepared.report.split_rows, prepared.report.split_samples) == ((1, len(samples)) if long else (0, 0))
    assert ("1 text longer than a sequence: split into" in str(prepared.report)) == long
    assert {fault.kind for fault in prepared.warnings(tokenizer)} <= {"duplicates"}


def test_packed_pieces_have_all_tokens(ready):
    rows = [{"text": "ab " * count} for count in range(1, 9)]
    packed, plain = ready(rows, packing=True), ready(rows)
    sorted_tokens = [
        sorted(itertools.chain.from_iterable(row["input_ids"] for row in each.dataset)) for each in (packed, plain)
    ]
    assert sorted_tokens[0] == sorted_tokens[1]
    assert packed.report.split_rows == plain.report.split_rows > 0


def test_long_text_that_is_cut_is_told(ready, tokenizer):
    prepared = ready([{"text": "ab"}, {"text": "x" * 40}], long_text="cut")
    assert (prepared.report.truncated_rows, prepared.report.cut_tokens) == (1, 33)
    assert "1 sample truncated: 33 tokens cut" in str(prepared.report)
    [fault] = prepared.warnings(tokenizer)
    assert fault.kind == "cut"
    assert "1 of 2 samples have tokens beyond data.sequence_tokens" in str(fault)
    assert "rows.jsonl:2" in str(fault)


def test_long_text_may_stop_the_run(ready):
    rows = [{"text": "ab"}, {"text": "x" * 40}]
    with pytest.raises(UserError, match=r"1 of 2 rows .*\n.*rows.jsonl:2: has 41 tokens, and data.sequence_tokens is 8"):
        ready(rows, long_text="stop")
    assert ready(rows[:1], long_text="stop").report.samples == 1


def test_what_follows_the_last_kept_answer_is_told_when_it_is_cut(ready, tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c" * 20}]
    prepared = ready([{"messages": turns}], sequence_tokens=10)
    assert prepared.report.cut_tokens > 10
    assert [fault.kind for fault in prepared.warnings(tokenizer)] == ["cut"]
