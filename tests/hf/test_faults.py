"""Each fault that a template, a mask or rows can have is planted once: it is found, alone, with the row's file and line."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ftkit.data.batches import Collator
from ftkit.data.build_once import RefusedError
from ftkit.data.faults import stops_of
from ftkit.data.prepare import prepare
from tests.tiny import TEMPLATE, make_tokenizer

PLAIN_ROLES = (
    "{{- bos_token }}{%- for m in messages %}{{- m['role'] + ':' + m['content'] + END }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"
)
CLOSED = PLAIN_ROLES.replace("END", "eos_token")
END_OUTSIDE = TEMPLATE.replace(" + eos_token }}{% endgeneration %}", " }}{% endgeneration %}{{- eos_token }}")
READS_CALLS = "{%- set calls = (message.tool_calls or []) | tojson %}{% generation %}"
LOOKS_AT_CALLS = TEMPLATE.replace("{% generation %}", READS_CALLS)
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "now"}}]}


def chat(question, answer, system=None):
    turns = [{"role": "system", "content": system}] if system else []
    answer = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
    return {"messages": [*turns, {"role": "user", "content": question}, answer]}


GOOD = chat("1+1?", "two", "be short")


@pytest.fixture
def ready(tmp_path):
    def prepared(rows, template=TEMPLATE, tokenizer=None, name="rows.jsonl", **settings):
        tokenizer = tokenizer or make_tokenizer(tmp_path / "tokenizer", template)
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"sequence_tokens": 64, "workers": 1, "cache_dir": tmp_path / "cache", **settings}
        return tokenizer, prepare(path, tokenizer, **settings)

    return prepared


def with_stop(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    return tokenizer


@pytest.mark.parametrize("template", [TEMPLATE, CLOSED, None], ids=["marked", "prefix", "plain"])
@pytest.mark.parametrize("packing", [False, True])
def test_good_rows_have_no_faults(ready, template, packing):
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four")], template, packing=packing)
    assert prepared.faults(tokenizer) == []


PLANTED = {
    "no_end": (PLAIN_ROLES.replace("END", "'\\n'"), GOOD, {}),
    "end_not_trained": (END_OUTSIDE, GOOD, {}),
    "only_end": (LOOKS_AT_CALLS, chat("what time is it?", TOOL_CALL), {}),
    "doubled_bos": (CLOSED, chat("<begin><begin>1+1?", "two"), {}),
    "answer_cut": (TEMPLATE, chat("1+1?", "two " * 20), {}),
    "cut": (TEMPLATE, {"text": "two " * 40}, {"long_text": "cut"}),
    "special_in_text": (TEMPLATE, chat("what is <pad> for?", "to fill"), {}),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found_with_its_row(ready, kind):
    template, bad, settings = PLANTED[kind]
    good = [chat("2+2?", "four"), chat("3+3?", "six")]
    if "text" in bad:
        good = [{"text": "2+2?"}, {"text": "3+3?"}]
    tokenizer, prepared = ready([good[0], bad, good[1]], template, **settings)
    found = {fault.kind: fault for fault in prepared.faults(tokenizer)}
    alone = kind not in ("no_end", "end_not_trained")  # those are the template's, in every row
    beside = {"doubled_bos": {"special_in_text"}, "only_end": {"unwritten"}}
    assert set(found) == {kind, *beside.get(kind, ())}
    assert found[kind].text.startswith(f"{1 if alone else 3} of 3 samples have ")
    assert found[kind].places[0].endswith(f"rows.jsonl:{2 if alone else 1}")
    assert str(found[kind]).endswith(")")


def test_a_bos_that_was_dropped_is_told(ready):
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four")], CLOSED.replace("bos_token", "bos_token + bos_token"))
    [fault] = prepared.faults(tokenizer)
    assert fault.kind == "doubled_bos"
    assert fault.text.startswith("2 of 2")
    assert prepared.dataset[0]["input_ids"].count(tokenizer.bos_token_id) == 1


def test_characters_that_the_tokenizer_does_not_know(ready):
    words = {"a": 0, "b": 1, "<unk>": 2, "<end>": 3}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", eos_token="<end>")
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}]
    tokenizer, prepared = ready(rows, tokenizer=tokenizer)
    [fault] = prepared.faults(tokenizer)
    assert (fault.kind, fault.places[0][-12:]) == ("unknown", "rows.jsonl:2")
    texts = [{"text": "a b a b a"}, {"text": "c b a b a"}]
    tokenizer, prepared = ready(texts, tokenizer=tokenizer, sequence_tokens=3)
    assert prepared.report.samples == 4
    [fault] = [each for each in prepared.faults(tokenizer) if each.kind == "unknown"]
    assert fault.text.startswith("1 of 4 samples have")


def test_an_end_at_which_generation_does_not_stop(ready, tmp_path):
    tokenizer = with_stop(make_tokenizer(tmp_path / "tokenizer", PLAIN_ROLES.replace("END", "'<stop>'")))
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four")], tokenizer=tokenizer)
    [fault] = prepared.faults(tokenizer)
    assert fault.kind == "other_end"
    assert "2 of 2 samples end with <stop>" in fault.text
    assert "stops at: <end>" in fault.text
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    assert prepared.faults(tokenizer, stops_of(GenerationConfig(eos_token_id=[2, stop]))) == []
    assert stops_of(None) == stops_of(GenerationConfig()) == ()


def test_duplicates_and_what_is_held_out_and_trained_on(ready):
    rows = [chat(f"{n}+1?", str(n + 1)) for n in (1, 2, 1, 3, 1)]
    for packing in (False, True):
        tokenizer, prepared = ready(rows, packing=packing)
        [fault] = prepared.faults(tokenizer)
        assert fault.kind == "duplicates"
        assert fault.text == "2 of 5 samples are the same as an earlier one"
        assert [[part[-12:] for part in place.split(", as ")] for place in fault.places] == [
            ["rows.jsonl:3", "rows.jsonl:1"],
            ["rows.jsonl:5", "rows.jsonl:1"],
        ]
        assert "may be held out" in prepared.faults(tokenizer, shared=True)[0].text
        _, held_out = ready([chat("9+1?", "10"), chat("3+1?", "4")], name="held.jsonl")
        overlap = prepared.overlap(held_out)
        assert overlap.text.startswith("1 of 2 held-out samples are trained on as well")
        assert overlap.places[0].endswith("held.jsonl:2")
        _, apart = ready([chat("9+1?", "10")], name="apart.jsonl")
        assert prepared.overlap(apart) is None


def test_answers_that_are_all_empty_are_refused(ready):
    rows = [chat("what time is it?", TOOL_CALL), chat("and now?", TOOL_CALL)]
    with pytest.raises(RefusedError, match=r"the answers of all 2 samples hold nothing but their end \(.*rows.jsonl:1"):
        ready(rows, LOOKS_AT_CALLS)
    ready([*rows, GOOD], LOOKS_AT_CALLS)
    answered = [{"messages": [*row["messages"], {"role": "assistant", "content": "noon"}]} for row in rows]
    tokenizer, prepared = ready(answered, LOOKS_AT_CALLS)  # a tool call, then an answer
    faults = prepared.faults(tokenizer)
    assert [fault.kind for fault in faults] == ["only_end", "unwritten"]
    assert faults[0].text.startswith("2 of 2 samples have")


def test_labels_that_are_all_masked_are_refused_even_where_bad_rows_may_be_skipped(ready):
    muted = [chat("2+2?", {"role": "assistant", "content": "four", "train": False}) for _ in range(2)]
    for on_bad_row in ("stop", "skip"):
        with pytest.raises(RefusedError, match=r"2 of 2 rows cannot be used:\n.*rows.jsonl:1: has nothing to learn"):
            ready(muted, on_bad_row=on_bad_row)


def test_the_end_is_trained_on_though_padding_has_the_same_token(ready, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer, prepared = ready([GOOD, chat("2+2?", "four hundred")], tokenizer=tokenizer)
    labels = Collator.of(tokenizer)(list(prepared.dataset))["labels"]
    assert labels.eq(tokenizer.eos_token_id).sum(1).tolist() == [1, 1]


def test_what_was_found_is_kept_with_the_prepared_data(ready):
    rows = [GOOD, chat("what is <pad> for?", "to fill"), GOOD]
    tokenizer, first = ready(rows)
    _, second = ready(rows)
    assert second.report.cached
    assert not first.report.cached
    assert second.faults(tokenizer) == first.faults(tokenizer)
    assert {fault.kind for fault in first.faults(tokenizer)} == {"special_in_text", "duplicates"}
    assert second.report.lengths == first.report.lengths
    assert sum(count for _, count in first.report.lengths.counts) == 3


def test_lengths_fall_into_round_classes(ready):
    rows = [chat("x", "y" * n) for n in (1, 9, 40, 200)]
    _, prepared = ready(rows, sequence_tokens=128)
    lengths = prepared.report.lengths
    assert lengths.unit == 1
    assert [number for number, _ in lengths.counts] == [9, 17, 48, 208]  # of the whole, what is cut included
    assert [each for each in lengths.classes(12) if each[2]] == [(0, 20, 2), (40, 60, 1), (200, 220, 1)]
    assert len(lengths.classes(12)) == 11
    assert lengths.at(0.5) == 17
    assert lengths.most == 208
