"""Counts and warnings of prepared rows: each finding is planted once and found alone, with the row's file and line."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import GenerationConfig

from ftkit.config.recipe import Data, Source
from ftkit.data.batches import Collator
from ftkit.data.prepare import prepare
from ftkit.data.report import (
    BARS,
    BITS,
    Checks,
    Found,
    Report,
    SourceReport,
    Warned,
    bars_of,
    duplicates_of,
    overlap_warnings,
    stops_of,
    warnings_of,
)
from ftkit.errors import UserError
from tests.tiny import TEMPLATE, make_tokenizer

PLAIN_ROLES = (
    "{{- bos_token }}{%- for m in messages %}{{- m['role'] + ':' + m['content'] + END }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
)
CLOSED = PLAIN_ROLES.replace("END", "eos_token")
END_OUTSIDE = TEMPLATE.replace(" + eos_token }}{% endgeneration %}", " }}{% endgeneration %}{{- eos_token }}")
LOOKS_AT_CALLS = TEMPLATE.replace(
    "{% generation %}", "{%- set calls = (message.tool_calls or []) | tojson %}{% generation %}"
)
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "now"}}]}
BEGIN, END, MORE = 1, 2, [70, 71]


def chat(question, answer, system=None):
    turns = [{"role": "system", "content": system}] if system else []
    answer = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
    return {"messages": [*turns, {"role": "user", "content": question}, answer]}


GOOD = chat("1+1?", "two", "be short")


@pytest.fixture
def ready(tmp_path):
    """Prepare rows; return the tokenizer and the prepared rows."""

    def prepared(rows, template=TEMPLATE, tokenizer=None, name="rows.jsonl", task="causal-lm", **settings):
        tokenizer = tokenizer or make_tokenizer(tmp_path / "tokenizer", template)
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"sequence_tokens": 64, "workers": 1, "cache_dir": str(tmp_path / "cache"), **settings}
        return tokenizer, prepare(Data(path=str(path), **settings), tokenizer, task=task)

    return prepared


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return Checks.of(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


SOURCE = SourceReport("rows.jsonl", "messages", 3)


def report(**changed):
    counts = {"rows": 3, "bad_rows": 0, "samples": 3, "tokens": 60, "trained_tokens": 30}
    counts |= dict.fromkeys(("truncated_rows", "cut_tokens", "split_rows", "split_samples"), 0)
    lengths = {"longest": 40, "lengths": [(0, 16, 2), (32, 48, 1)], "trained_lengths": [(0, 16, 3)]}
    rest = {"sources": (SOURCE,), "bad_examples": (), "ends": {"<end>": 3}, "found": {}, "duplicates": Found(0, ())}
    return Report(**{**counts, **lengths, **rest, **changed})


# --- one row


def checked(checks, ids, *spans, content=(), kept=64, answers=True):
    """Return the names of what is found in a row, and its end."""
    row = SimpleNamespace(ids=ids, answers=list(spans))
    bits, end = checks.of_row(row, content, kept, answers=answers)
    return {name for name, bit in BITS.items() if bits & bit}, end


def test_a_row_without_a_finding(checks):
    assert checked(checks, [BEGIN, *MORE, *MORE, END], (3, 6)) == (set(), END)
    assert checked(checks, [BEGIN, *MORE, END], (0, 4), answers=False) == (set(), END)
    assert checked(checks, [BEGIN, *MORE], (0, 3), content="a text") == (set(), -1)  # text needs no end


def test_the_end_of_an_answer_may_have_blanks_after_it(checks):
    blank = checks.tokenizer("\n")["input_ids"]
    assert checked(checks, [BEGIN, *MORE, END, *blank], (1, 4 + len(blank))) == (set(), END)
    assert checked(checks, [BEGIN, *MORE, *blank], (1, 3 + len(blank))) == ({"no_end"}, -1)


def test_each_answer_needs_an_end(checks):
    ids = [BEGIN, *MORE, *MORE, END]
    assert checked(checks, ids, (1, 3), (3, 6)) == ({"no_end"}, END)
    assert checked(checks, ids, (1, 3), (3, 6), answers=False) == (set(), END)  # the last token ends the row


def test_an_answer_that_is_empty_but_for_its_end(checks):
    blank = checks.tokenizer(" ")["input_ids"]
    for empty in ([END], [*blank, END], [END, *blank]):
        assert checked(checks, [BEGIN, *MORE, *empty], (3, 3 + len(empty))) == ({"only_end"}, END)
    assert checked(checks, [BEGIN, 0, END], (1, 3)) == (set(), END)  # a special token may be a word


def test_a_doubled_bos(checks):
    assert checked(checks, [BEGIN, *MORE, BEGIN, BEGIN, END], (3, 6))[0] == {"doubled_bos"}
    assert checked(checks, [BEGIN, *MORE, BEGIN, *MORE, END], (3, 7))[0] == set()


def test_a_cut_row(checks):
    assert checked(checks, [BEGIN, *MORE, END], (1, 4), kept=3) == ({"answer_cut"}, -1)
    assert checked(checks, [BEGIN, *MORE, END, *MORE], (1, 4), kept=4) == ({"cut"}, END)
    assert checked(checks, [BEGIN, *MORE, END], (0, 4), content="a text", kept=3) == ({"cut"}, -1)


# --- all rows


@pytest.mark.parametrize("template", [TEMPLATE, CLOSED, None], ids=["marked", "prefix", "plain"])
@pytest.mark.parametrize("packing", [False, True])
def test_good_rows_have_no_warnings(ready, template, packing):
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four")], template, packing=packing)
    assert prepared.warnings(tokenizer) == []


PLANTED = {
    "no_end": (PLAIN_ROLES.replace("END", "'\\n'"), GOOD, {}),
    "end_not_trained": (END_OUTSIDE, GOOD, {}),
    "only_end": (LOOKS_AT_CALLS, chat("what time is it?", TOOL_CALL), {}),
    "doubled_bos": (CLOSED, chat("<begin><begin>1+1?", "two"), {}),
    "answer_cut": (TEMPLATE, chat("1+1?", "two " * 20), {}),
    "cut": (TEMPLATE, {"text": "two " * 40}, {"long_text": "cut"}),
    "earlier_answers": (TEMPLATE, {"messages": 2 * chat("1+1?", "two")["messages"]}, {"task": "seq2seq"}),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_finding_is_found_with_its_row(ready, planted):
    template, bad, settings = PLANTED[planted]
    good = [chat("2+2?", "four"), chat("3+3?", "six")]
    if "text" in bad:
        good = [{"text": "2+2?"}, {"text": "3+3?"}]
    tokenizer, prepared = ready([good[0], bad, good[1]], template, **settings)
    [warned] = prepared.warnings(tokenizer)
    alone = template not in (END_OUTSIDE, PLANTED["no_end"][0])  # those templates affect every row
    assert warned.kind == ("no_end" if planted == "end_not_trained" else planted)
    assert warned.text.startswith(f"{1 if alone else 3} of 3 samples have ")
    assert warned.places[0].endswith(f"rows.jsonl:{2 if alone else 1}")
    assert str(warned).endswith(")")


def test_a_bos_that_the_template_doubles_is_reported(ready):
    template = CLOSED.replace("bos_token", "bos_token + bos_token")
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four")], template)
    [warned] = prepared.warnings(tokenizer)
    assert warned.kind == "doubled_bos"
    assert warned.text.startswith("2 of 2")


def test_an_end_at_which_generation_does_not_stop(ready, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN_ROLES.replace("END", "'<stop>'"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four")], tokenizer=tokenizer)
    [warned] = prepared.warnings(tokenizer)
    assert warned.kind == "other_end"
    assert "2 of 2 samples end with <stop>" in warned.text
    assert "stops at: <end>" in warned.text
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert prepared.warnings(tokenizer, stops_of(GenerationConfig(eos_token_id=[2, stop]))) == []
    assert stops_of(GenerationConfig(eos_token_id=2)) == (2,)
    assert stops_of(None) == stops_of(GenerationConfig()) == ()


@pytest.mark.parametrize("packing", [False, True])
def test_duplicates(ready, packing):
    tokenizer, prepared = ready([chat(f"{n}+1?", str(n + 1)) for n in (1, 2, 1, 3, 1)], packing=packing)
    [warned] = prepared.warnings(tokenizer)
    assert (warned.kind, warned.text) == ("duplicates", "2 of 5 samples are the same as an earlier one")
    assert [[part[-12:] for part in place.split(", as ")] for place in warned.places] == [
        ["rows.jsonl:3", "rows.jsonl:1"],
        ["rows.jsonl:5", "rows.jsonl:1"],
    ]


def test_duplicates_and_overlap_by_checksum():
    places = np.array(["a:1", "a:2", "a:3", "a:4"])
    assert duplicates_of(np.array([7, 8, 7, 7]), places) == Found(2, ("a:3, as a:1", "a:4, as a:1"))
    [warned] = overlap_warnings(np.array([7, 8]), np.array([9, 8, 6]), places)
    assert warned.text.startswith("1 of 3 held-out samples are also trained on")
    assert warned.places == ("a:2",)
    assert overlap_warnings(np.array([7]), np.array([9]), places) == []


def test_all_sources_are_counted_together(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    sources = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        rows = [chat(f"{name}{number}?", "two " * 40) for number in range(2)] + [chat(name, "two"), chat(name, "")]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append(Source(path=str(path)))
    settings = {"sequence_tokens": 64, "workers": 1, "cache_dir": str(tmp_path / "cache"), "on_bad_row": "skip"}
    report = prepare(Data(sources=tuple(sources), **settings), tokenizer).report
    assert (report.rows, report.bad_rows, report.samples, report.truncated_rows) == (8, 2, 6, 4)
    assert [place[-9:] for place in report.found["answer_cut"].places] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert report.found["answer_cut"].rows == 4
    assert report.ends == {"<end>": 2}
    assert [example.split(": ")[0][-9:] for example in report.bad_examples] == ["a.jsonl:4", "b.jsonl:4"]


def test_the_worst_warning_comes_first():
    found = {"cut": Found(3, ("a:1", "b:1", "b:2"))}
    bad = {"bad_rows": 1, "bad_examples": ("b:3: is bad",)}
    ends = {"<end>": 2, "<stop>": 1}
    unusable, cut, other_end, copies = warnings_of(
        report(found=found, ends=ends, duplicates=Found(1, ("a:2, as a:1",)), **bad), ["<end>"]
    )
    assert unusable == Warned("unusable", "1 of 3 rows cannot be used and are skipped", ("b:3: is bad",))
    assert cut.text.startswith("3 of 3 samples have tokens beyond")
    assert cut.places == found["cut"].places
    assert other_end.text.startswith("1 of 3 samples end with <stop>, at which generation does not stop")
    assert copies.text == "1 of 3 samples are the same as an earlier one"


# --- the report


def test_the_report_as_text():
    assert str(report()) == "rows.jsonl: 3 rows, format messages\n3 samples, 60 tokens, 50 % of them trained on"
    changed = {"sources": (SourceReport("rows.jsonl", "messages", 3, ("id", "source")), SOURCE)}
    changed |= {"cut_tokens": 20, "truncated_rows": 1, "split_rows": 1, "split_samples": 2, "day": "2026-11-28"}
    changed |= {"bad_rows": 1, "bad_examples": ("0.jsonl:3: is bad",), "sequences": 3, "packing_efficiency": 0.5}
    assert str(report(**changed)).splitlines() == [
        "rows.jsonl: 3 rows, format messages",
        "rows.jsonl: 3 rows, format messages",
        "rows.jsonl: not read: id, source",
        "date in the prompt: 2026-11-28",
        "3 samples, 60 tokens, 50 % of them trained on",
        "1 sample truncated: 20 tokens cut (25.0 %)",
        "1 text longer than a sequence: split into 2 samples",
        "1 row skipped, the first:",
        "  0.jsonl:3: is bad",
        "packed into 3 sequences, 50.0 % full",
    ]


def test_unused_columns_are_named_and_not_trained_on(ready):
    rows = [{**GOOD, "id": 7, "note": ""}, {**chat("2+2?", "four"), "id": 8, "origin": "a forum"}]
    tokenizer, prepared = ready(rows)
    assert prepared.report.sources[0].unused == ("id", "origin")
    assert "rows.jsonl: not read: id, origin\n" in str(prepared.report)
    assert "forum" not in tokenizer.decode(prepared.train[1]["input_ids"])


def test_findings_are_kept_with_the_prepared_data(ready):
    rows = [GOOD, chat("1+1?", "two " * 20), GOOD]
    tokenizer, first = ready(rows)
    _, second = ready(rows)
    assert second.report.cached
    assert not first.report.cached
    assert second.warnings(tokenizer) == first.warnings(tokenizer)
    assert {warned.kind for warned in first.warnings(tokenizer)} == {"answer_cut", "duplicates"}
    assert second.report.lengths == first.report.lengths
    assert sum(samples for _, _, samples in first.report.lengths) == 3


def test_lengths_fall_into_bars_of_one_width(ready):
    _, prepared = ready([chat("x", "y" * n) for n in (1, 9, 40, 200)], sequence_tokens=128)
    report = prepared.report
    assert report.longest == 208  # before cutting
    assert [bar for bar in report.lengths if bar[2]] == [(0, 16, 1), (16, 32, 1), (48, 64, 1), (208, 224, 1)]
    assert len(report.lengths) == 14
    assert bars_of(np.array([5, 5, 1]), 128) == [(0, 1, 0), (1, 2, 1), (2, 3, 0), (3, 4, 0), (4, 5, 0), (5, 6, 2)]
    assert bars_of(np.array([5, 1000]), 128)[-1] == (512, 544, 1)  # at most four sequences
    for longest in range(1, 2000, 7):
        assert len(bars_of(np.array([longest]), 1024)) <= BARS


# --- what is learned


def test_rows_with_all_labels_masked_are_refused_even_where_bad_rows_may_be_skipped(ready):
    muted = [chat("2+2?", {"role": "assistant", "content": "four", "train": False}) for _ in range(2)]
    for on_bad_row in ("stop", "skip"):
        with pytest.raises(UserError, match=r"2 of 2 rows cannot be used:\n.*rows.jsonl:1: has nothing to learn"):
            ready(muted, on_bad_row=on_bad_row)


def test_the_end_is_trained_on_though_padding_has_the_same_token(ready, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four hundred")], tokenizer=tokenizer)
    labels = Collator.of(tokenizer)(list(prepared.train))["labels"]
    assert labels.eq(tokenizer.eos_token_id).sum(1).tolist() == [1, 1]
