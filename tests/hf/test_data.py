"""Rows become tokens, labels and batches: every format, every mask token by token, everything that is refused.

The tokenizer is a byte-level BPE made here; expected tokens are written as lists of texts, so that a mask can be read.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import accelerate.data_loader
import datasets
import filelock
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from ftkit.config.recipe import Data
from ftkit.data.build_once import RefusedError, build_once
from ftkit.data.formats import BadRowError, Conversation, parse_record, read_row
from ftkit.data.packing import best_fit
from ftkit.data.prepare import Collator, Source, StepOrder, check_isolation, prepare, prepare_section, prompt_tokens, split
from ftkit.data.template import Rendering
from ftkit.errors import UserError
from tests.worlds import PATIENCE

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the last answer is preceded by an empty thought, earlier ones are not.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '(think)' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_ANSWERS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "on the mat"},
]


@pytest.fixture(scope="module")
def trained():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat sat on the mat\nuser\nassistant\nthe dog sat on the cat"
    tokenizer.train_from_iterator([text] * 10, trainer)
    return tokenizer.to_str()


@pytest.fixture
def tokenizer_of(trained):
    def make(template=None, bos=False, **special):
        backend = Tokenizer.from_str(trained)
        if bos:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        special = {"bos_token": "<s>", "eos_token": "</s>", **special}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def write(tmp_path):
    def to_file(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return to_file


@pytest.fixture
def ready(write, tmp_path):
    """Prepare rows with the cache in a folder of the test."""

    def prepared(rows, tokenizer, **settings):
        path = rows if isinstance(rows, (Path, Source)) else write(rows)
        return prepare(path, tokenizer, **{"cache_dir": tmp_path / "cache", "sequence_tokens": 64, **settings})

    return prepared


def trained_texts(tokenizer, sample):
    """Texts of the tokens of a sample, those outside the loss as None."""
    pairs = zip(sample["input_ids"], sample["labels"])
    return [None if label == -100 else tokenizer.decode([token]) for token, label in pairs]


def texts(tokenizer, sample):
    return [tokenizer.decode([token]) for token in sample["input_ids"]]


# --- formats


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        ("messages", {"messages": TWO_ANSWERS}, [("user", "the cat"), ("assistant", "sat")]),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, TWO_ANSWERS[1]]},
            [("user", "a"), ("assistant", "sat")],
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [("user", "a"), ("assistant", "b")],
        ),
        ("alpaca", {"instruction": "a", "input": "", "output": "b"}, [("user", "a"), ("assistant", "b")]),
        ("alpaca", {"instruction": "a", "input": "c", "output": "b"}, [("user", "a\n\nc"), ("assistant", "b")]),
        ("alpaca", {"instruction": "a", "context": "c", "response": "b"}, [("user", "a\n\nc"), ("assistant", "b")]),
        ("prompt", {"prompt": "a", "completion": "b"}, [("user", "a"), ("assistant", "b")]),
        ("prompt", {"prompt": "a", "response": "b"}, [("user", "a"), ("assistant", "b")]),
        ("prompt", {"question": "a", "answer": "b"}, [("user", "a"), ("assistant", "b")]),
    ],
)
def test_formats_are_detected_and_read(ready, tokenizer_of, name, row, turns):
    prepared = ready([row], tokenizer_of(CHATML))
    assert prepared.report.sources[0].format == name
    assert prepared.report.rendering == "prefix"
    read = read_row(row, name)
    assert [(turn["role"], turn["content"]) for turn in read.turns[:2]] == turns


def test_plain_text(ready, tokenizer_of):
    tokenizer = tokenizer_of(CHATML)
    prepared = ready([{"text": "the cat"}], tokenizer)
    assert prepared.report.sources[0].format == "text"
    assert texts(tokenizer, prepared.dataset[0]) == ["the", " cat", "</s>"]
    assert prepared.dataset[0]["labels"] == [-100, *prepared.dataset[0]["input_ids"][1:]]


def test_the_format_asked_for_must_fit(ready, write, tokenizer_of):
    path = write([{"text": "a", "prompt": "b", "completion": "c"}])
    text = ready(Source(path=path, format="text"), tokenizer_of(), ignore_columns=["prompt", "completion"])
    assert text.report.sources[0].format == "text"
    with pytest.raises(UserError, match=r"found columns completion, prompt, text; needed columns .alpaca"):
        ready(Source(path=path, format="alpaca"), tokenizer_of())
    with pytest.raises(UserError, match=r"found columns a, b; needed columns .messages"):
        ready(write([{"a": 1, "b": 2}], "other.jsonl"), tokenizer_of())


def test_tools_and_further_keys_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    turns = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": ""}, TWO_ANSWERS[1]]
    read = read_row({"messages": turns, "tools": '[{"name": "f"}]'}, "messages")
    assert read.tools == [{"name": "f"}]
    assert read.turns[1] == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


# --- masks


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_are_masked_exactly(ready, tokenizer_of, template):
    tokenizer = tokenizer_of(template)
    prepared = ready([{"messages": TWO_ANSWERS}], tokenizer)
    sample = prepared.dataset[0]
    header = ["<|im_start|>", "user", "\n", "the"]
    asked = ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    first, second = [*header, " cat", *asked], [*header, " dog", *asked]
    said, also_said = ["sat", "<|im_end|>", "\n"], ["on", " the", " mat", "<|im_end|>", "\n"]
    assert texts(tokenizer, sample) == [*first, *said, *second, *also_said]
    expected = [None] * 10 + said + [None] * 10 + also_said
    if template == MARKED:
        expected[12] = expected[-1] = None  # its author ends the answer before the line break
        official = tokenizer.apply_chat_template(TWO_ANSWERS, return_assistant_tokens_mask=True, return_dict=True)
        assert official["input_ids"] == sample["input_ids"]
        assert official["assistant_masks"] == [int(label != -100) for label in sample["labels"]]
    assert trained_texts(tokenizer, sample) == expected
    assert prepared.report.trained_tokens == sum(text is not None for text in expected)
    assert prepared.report.rendering == ("prefix" if template == CHATML else "marked")


def test_loss_on_all_trains_every_token_but_the_first(ready, tokenizer_of):
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer_of(CHATML), loss_on="all").dataset[0]
    assert sample["labels"] == [-100, *sample["input_ids"][1:]]


def test_an_answer_the_template_rewrites_is_found_by_its_text(ready, tokenizer_of):
    tokenizer = tokenizer_of(THINKING)
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).dataset[0]
    said = [text for text in trained_texts(tokenizer, sample) if text is not None]
    assert "".join(said) == "sat<|im_end|>\n(think)on the mat<|im_end|>\n"
    tokenizer = tokenizer_of(CHATML.replace("{% if add", "{% if not add_generation_prompt %}</s>{% endif %}{% if add"))
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).dataset[0]
    said = [text for text in trained_texts(tokenizer, sample) if text is not None]
    assert "".join(said) == "sat<|im_end|>\non the mat<|im_end|>\n</s>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (THINKING.replace("+ '<|im_end|>'", "+ '!' * (loop.length - 2) * (loop.index == 2)"), "otherwise once"),
        (CHATML.replace("assistant\n", "assistant\n(think)"), "asks for turn 2 otherwise"),
        (CHATML.replace("m['content']", "m['content'][:2]"), "leaves out what turn 2 says"),
        (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            "reach across the edge of an answer",
        ),
    ],
)  # fmt: skip  (a table, one row a line)
def test_a_template_that_cannot_be_masked_is_named(ready, tokenizer_of, template, reason):
    tokenizer = tokenizer_of(template)
    tokenizer.name_or_path = "some/model"
    turns = [{"role": turn["role"], "content": "the " + turn["content"]} for turn in TWO_ANSWERS]
    with pytest.raises(UserError, match=rf"rows.jsonl:1: the chat template of some/model .*{reason}"):
        ready([{"messages": turns}], tokenizer, on_bad_row="skip")
    if "leaves out" not in reason:
        assert ready([{"messages": turns}], tokenizer, loss_on="all").report.samples == 1


def test_without_a_template_question_answer_and_eos_follow_each_other(ready, tokenizer_of):
    tokenizer = tokenizer_of(bos=True)
    sample = ready([{"prompt": "the cat", "completion": " sat"}], tokenizer).dataset[0]
    assert texts(tokenizer, sample) == ["<s>", "the", " cat", " sat", "</s>"]
    assert trained_texts(tokenizer, sample) == [None, None, None, " sat", "</s>"]
    sample = ready([{"question": "the cat", "answer": "sat"}], tokenizer).dataset[0]
    assert texts(tokenizer, sample) == ["<s>", "the", " cat", "\n", "sat", "</s>"]
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).dataset[0]
    assert "".join(texts(tokenizer, sample)) == "<s>the cat\nsat</s>the dog\non the mat</s>"
    assert "".join(text or "" for text in trained_texts(tokenizer, sample)) == "sat</s>on the mat</s>"


def test_a_token_never_reaches_from_the_plain_question_into_the_answer(ready, tokenizer_of):
    tokenizer = tokenizer_of()
    sample = ready([{"prompt": "the c", "completion": "at sat"}], tokenizer).dataset[0]
    asked = prompt_tokens(tokenizer, [{"role": "user", "content": "the c"}])
    assert sample["input_ids"][: len(asked)] == asked
    assert "".join(text or "" for text in trained_texts(tokenizer, sample)) == "at sat</s>"


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, "{{ bos_token }}" + MARKED, None])
def test_no_doubled_bos(ready, tokenizer_of, template):
    tokenizer = tokenizer_of(template, bos=True)
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).dataset[0]
    assert sample["input_ids"].count(tokenizer.bos_token_id) == 1
    assert sample["input_ids"][0] == tokenizer.bos_token_id
    sample = ready([{"text": "<s>the cat</s>"}], tokenizer).dataset[0]
    assert texts(tokenizer, sample) == ["<s>", "the", " cat", "</s>"]
    if template is None:
        sample = ready([{"prompt": "<s><s>the cat", "completion": " sat"}], tokenizer).dataset[0]
        assert texts(tokenizer, sample) == ["<s>", "the", " cat", " sat", "</s>"]
        assert trained_texts(tokenizer, sample) == [None, None, None, " sat", "</s>"]


def test_the_prompt_for_generation_is_what_preceded_the_answer(ready, tokenizer_of):
    for template in (CHATML, MARKED, None):
        tokenizer = tokenizer_of(template, bos=True)
        sample = ready([{"messages": TWO_ANSWERS[:2]}], tokenizer).dataset[0]
        asked = prompt_tokens(tokenizer, TWO_ANSWERS[:1], glue="\n")
        assert sample["input_ids"][: len(asked)] == asked
        assert trained_texts(tokenizer, sample)[len(asked)] == "sat"
        assert sample["labels"][: len(asked)] == [-100] * len(asked)


def test_a_tokenizer_without_template_and_end_is_refused(ready, tokenizer_of):
    with pytest.raises(UserError, match=r"neither a chat template nor an end-of-sequence token"):
        ready([{"text": "a"}], tokenizer_of(eos_token=None))


# --- cutting


def test_truncation_is_counted(ready, tokenizer_of):
    rows = [{"prompt": "the cat", "completion": " sat" + " on" * count} for count in (1, 5, 9)]
    prepared = ready(rows, tokenizer_of(), sequence_tokens=6)
    lengths = [len(sample["input_ids"]) for sample in prepared.dataset]
    assert lengths == [5, 6, 6]
    report = prepared.report
    assert (report.truncated_rows, report.cut_tokens, report.tokens) == (2, 3 + 7, 17)
    assert "2 samples truncated: 10 tokens cut (37.0 %)" in str(report)


def test_an_answer_cut_off_wholly_is_a_bad_row(ready, tokenizer_of):
    rows = [{"prompt": "the cat", "completion": " sat"}, {"prompt": "the" + " cat" * 6, "completion": " sat"}]
    with pytest.raises(UserError, match=r"rows.jsonl:2: loses its whole answer: 7 tokens come before it"):
        ready(rows, tokenizer_of(), sequence_tokens=7)


def test_long_text_is_cut_or_split(ready, tokenizer_of):
    rows = [{"text": "the" + " cat" * 9}, {"text": "the cat sat on"}]
    cut = ready(rows, tokenizer_of(), sequence_tokens=4, long_text="cut")
    assert (cut.report.samples, cut.report.cut_tokens) == (2, 7 + 1)
    parts = ready(rows, tokenizer_of(), sequence_tokens=4)
    assert [len(sample["input_ids"]) for sample in parts.dataset] == [4, 4, 3, 3, 2]
    assert (parts.report.rows, parts.report.samples, parts.report.cut_tokens) == (2, 5, 0)
    assert (parts.report.split_rows, parts.report.split_samples) == (2, 5)
    assert all(sample["labels"][0] == -100 for sample in parts.dataset)


# --- rows that cannot be used

BAD_ROWS = [
    ('{"prompt": "a", "completion": ', "broken JSON: Expecting value"),
    ("[1, 2]", "expected an object with columns; found list"),
    ("[" * 100_000, "broken JSON"),
    ({"prompt": "a"}, "needs columns prompt and completion"),
    ({"prompt": "a", "completion": ""}, "`completion` is empty"),
    ({"prompt": "a", "completion": " \n"}, "`completion` is empty"),
    ({"prompt": "a", "completion": 7}, "`completion` must be text; found int"),
    ({"prompt": None, "completion": "b"}, "`prompt` must be text; found nothing"),
    ('{"prompt": "a", "completion": "\\ud800"}', "`completion` is not valid Unicode"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_row_stops_with_file_and_row(ready, tokenizer_of, bad, reason):
    good = {"prompt": "the cat", "completion": "sat"}
    with pytest.raises(UserError) as stop:
        ready([good, "", bad, good], tokenizer_of())
    assert "1 of 3 rows cannot be used" in str(stop.value)
    assert "rows.jsonl:3: " + reason in str(stop.value)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "must be a list of turns; found \\[\\]"),
        ("hello", "must be a list of turns; found str"),
        (TWO_ANSWERS[:1], "has no assistant turn; found user"),
        ([{"role": "robot", "content": "x"}, TWO_ANSWERS[1]], "turn 1 has the unknown role 'robot'"),
        ([TWO_ANSWERS[0], {"role": "assistant", "content": ""}], "the assistant content of .*turn 2 is empty"),
        ([TWO_ANSWERS[0], {"role": "assistant", "content": {"a": 1}}], "turn 2 must be text; found dict"),
        ([TWO_ANSWERS[0], "sat"], "turn 2 must be an object"),
        ([{"role": "user", "content": [{"type": "image"}]}, TWO_ANSWERS[1]], "a part of type 'image'"),
        ([TWO_ANSWERS[1], TWO_ANSWERS[0]], "begins with an answer to nothing"),
    ],
)
def test_bad_chat_rows(ready, tokenizer_of, turns, reason):
    with pytest.raises(UserError, match=rf"rows.jsonl:2: .*{reason}"):
        ready([{"messages": TWO_ANSWERS}, {"messages": turns}], tokenizer_of(CHATML))


def test_rows_without_anything_to_learn(ready, tokenizer_of):
    unmarked = MARKED.replace("{{ m['content'] + '<|im_end|>' }}{% endgen", "{% endgen").replace(
        "{{ '\n' }}", "{{ m['content'] }}"
    )
    with pytest.raises(UserError, match=r"rows.jsonl:1: has nothing to learn"):
        ready([{"messages": TWO_ANSWERS}], tokenizer_of(unmarked), loss_on="marks")
    refusing = "{{ raise_exception('no system turns') }}"
    with pytest.raises(UserError, match=r"rows.jsonl:1: the chat template of .* refuses it: no system turns"):
        ready([{"messages": TWO_ANSWERS}], tokenizer_of(refusing))


def test_skipped_rows_are_counted(ready, tokenizer_of):
    good = {"prompt": "the cat", "completion": "sat"}
    prepared = ready([good, *(bad for bad, _ in BAD_ROWS), good], tokenizer_of(), on_bad_row="skip")
    assert (len(prepared.dataset), prepared.report.rows, prepared.report.bad_rows) == (2, 11, 9)
    assert prepared.report.bad_examples[0].split(": ")[0].endswith("rows.jsonl:2")
    assert "9 rows skipped" in str(prepared.report)
    with pytest.raises(UserError, match=r"2 of 2 rows cannot be used"):
        ready([{"prompt": "", "completion": "a"}] * 2, tokenizer_of(), on_bad_row="skip")


# --- files


def test_a_header_that_comes_again_is_no_row(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\nprompt,completion\nc,d\n")
    with pytest.raises(UserError, match=r"rows.csv:3: is the header once more; remove the line"):
        ready(path, tokenizer_of())
    assert ready(path, tokenizer_of(), on_bad_row="skip").report.samples == 2


def test_csv_values_stay_text(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffquestion,answer\n"the\ncat",007\nnan,NA\n', encoding="utf-8")
    tokenizer = tokenizer_of()
    samples = ready(path, tokenizer).dataset
    assert [tokenizer.decode(sample["input_ids"]) for sample in samples] == ["the\ncat\n007</s>", "nan\nNA</s>"]
    path.write_text("question,answer\na,b\n\nc\nd,e,f\n")
    with pytest.raises(UserError, match=r"(?s)2 of 3 rows.*rows.csv:4: has 1 fields .* 2\n.*rows.csv:5: has 3 fields"):
        ready(path, tokenizer)
    path.write_text('question,answer\na,"b\n')
    with pytest.raises(UserError, match=r"rows.csv:2: broken CSV"):
        ready(path, tokenizer)
    path.rename(tsv := tmp_path / "rows.tsv")
    tsv.write_text("question\tanswer\nthe cat\tsat, on\n")
    assert tokenizer.decode(ready(tsv, tokenizer).dataset[0]["input_ids"]) == "the cat\nsat, on</s>"


def test_parquet_with_nested_turns(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.parquet"
    turns = [[*TWO_ANSWERS[:1], {**TWO_ANSWERS[1], "name": "x"}], TWO_ANSWERS[:1]]
    datasets.Dataset.from_dict({"messages": turns}).to_parquet(str(path))
    with pytest.raises(UserError, match=r"rows.parquet, row 2: `messages` has no assistant turn"):
        ready(path, tokenizer_of(CHATML), ignore_columns=["messages.name"])
    assert ready(path, tokenizer_of(CHATML), on_bad_row="skip", ignore_columns=["messages.name"]).report.samples == 1
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rows.parquet: cannot be read as Parquet"):
        ready(path, tokenizer_of(CHATML))


def test_json_lists_lines_and_faults(ready, tmp_path, tokenizer_of):
    rows = [{"text": "the cat"}, {"text": "the dog"}, {"text": ""}]
    path = tmp_path / "rows.json"
    for content in (json.dumps(rows), json.dumps({"data": rows})):
        path.write_text(content)
        with pytest.raises(UserError, match=r"1 of 3 rows .*\n.*rows.json, row 3: `text` is empty"):
            ready(path, tokenizer_of())
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(UserError, match=r"rows.json:3: `text` is empty"):
        ready(path, tokenizer_of())
    path.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(UserError, match=r"rows.json:2: broken JSON: Expecting value"):
        ready(path, tokenizer_of())


def test_files_that_cannot_be_read(ready, write, tmp_path, tokenizer_of):
    tokenizer = tokenizer_of()
    for empty in ([], ["", ""]):
        with pytest.raises(UserError, match=r"rows.jsonl: holds no rows"):
            ready(empty, tokenizer)
    with pytest.raises(UserError, match=r"absent.jsonl: no such file"):
        ready(tmp_path / "absent.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"expected .jsonl, .*; found .jsonl.lz4"):
        ready(write([], "rows.jsonl.lz4"), tokenizer)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "the cat"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"latin.jsonl:2: is not UTF-8 at byte 14 of the line"):
        ready(latin, tokenizer)
    latin.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"none of the first 1 rows can be read:\n.*latin.jsonl:1: is not UTF-8"):
        ready(latin, tokenizer)


def test_folders_and_hub_names(ready, tmp_path, tokenizer_of, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    for name, text in (("b.jsonl", "the dog"), ("a.jsonl", "the cat")):
        (folder / name).write_text(json.dumps({"text": text}))
    (folder / "README.md").write_text("words")
    tokenizer = tokenizer_of()
    decoded = [tokenizer.decode(sample["input_ids"]) for sample in ready(folder, tokenizer).dataset]
    assert decoded == ["the cat</s>", "the dog</s>"]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    source = Source(name=str(folder))
    prepared = ready(source, tokenizer)
    assert prepared.report.samples == 2
    assert not prepared.report.cached
    assert ready(source, tokenizer).report.cached
    assert prepared.report.sources[0].passed_over == ("README.md",)
    (folder / "a.jsonl").rename(folder / "train.jsonl")  # which datasets takes for a split, and b.jsonl for none
    assert ready(source, tokenizer).report.sources[0].passed_over == ("README.md", "b.jsonl")
    (folder / "b.jsonl").rename(folder / "test.jsonl")
    unread_of = {"train": ("README.md", "test.jsonl"), "train[:1]+test": ("README.md",), "all": ("README.md",)}
    for part, unread in unread_of.items():
        assert ready(Source(name=str(folder), split=part), tokenizer).report.sources[0].passed_over == unread
    (folder / "test.jsonl").rename(folder / "b.jsonl")
    for name, told in (("json", "is a kind of files"), (str(folder / "b.jsonl"), "is a file here")):
        with pytest.raises(UserError, match=f"^data.name: .* {told}.*data.path"):
            ready(Source(name=name), tokenizer)
    with pytest.raises(UserError, match=r"split test"):
        ready(Source(name=str(folder), split="test"), tokenizer)
    with pytest.raises(UserError, match=r"for hub data sets"):
        Source(path=folder, split="test")
    with pytest.raises(UserError, match=r"one of `path`"):
        Source()


# --- packing


def test_best_fit_keeps_every_sample_once_and_fills_well():
    lengths = np.random.RandomState(0).randint(1, 65, 500).tolist()
    sequences = best_fit(lengths, 64, seed=3)
    assert sorted(number for members in sequences for number in members) == list(range(500))
    assert max(sum(lengths[number] for number in members) for members in sequences) <= 64
    assert sum(lengths) / (64 * len(sequences)) > 0.97
    assert sequences == best_fit(lengths, 64, seed=3)
    assert sequences != best_fit(lengths, 64, seed=4)


def test_packed_sequences(ready, tokenizer_of):
    rows = [{"text": "the" + " cat" * count} for count in (1, 2, 3, 4)]
    prepared = ready(rows, tokenizer_of(), sequence_tokens=9, packing=True)
    assert prepared.dataset.column_names == ["input_ids", "labels", "position_ids", "place"]
    for sequence in prepared.dataset:
        starts = [at for at, position in enumerate(sequence["position_ids"]) if position == 0]
        assert [at for at, label in enumerate(sequence["labels"]) if label == -100] == starts
        for start, stop in zip(starts, [*starts[1:], len(sequence["labels"])]):
            assert sequence["position_ids"][start:stop] == list(range(stop - start))
            assert sequence["labels"][start + 1 : stop] == sequence["input_ids"][start + 1 : stop]
    assert prepared.report.sequences == len(prepared.dataset) == 2
    assert prepared.report.packing_efficiency == 1.0
    with pytest.raises(UserError, match=r"encoder-decoder"):
        ready(rows, tokenizer_of(), packing=True, task="seq2seq")


def tiny_llama(attention="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=340,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def token_losses(model, batch):
    """Loss of each token that is trained on, in order; (number of trained tokens,)."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return losses[labels != -100]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_do_not_see_each_other(ready, tokenizer_of, attention):
    tokenizer, model = tokenizer_of(), tiny_llama(attention)
    assert model.config.use_cache, "the collator must turn the cache off by itself"
    rows = [{"text": text} for text in ("the cat sat", "on the mat", "the dog sat on", "user the cat", "the")]
    collate = Collator.of(tokenizer, multiple_tokens=8)
    packed = ready(rows, tokenizer, sequence_tokens=10, packing=True).dataset
    assert len(packed) == 2
    assert len({len(sequence["input_ids"]) for sequence in packed}) == 2, "one row must be padded"
    batch = collate(list(packed))
    assert batch["input_ids"].shape == (2, 16)
    alone = ready(rows, tokenizer, sequence_tokens=10).dataset
    separate = torch.cat([token_losses(model, collate([sample])) for sample in alone])
    together = token_losses(model, batch)
    torch.testing.assert_close(together.sort().values, separate.sort().values, atol=2e-5, rtol=1e-5)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, separate.mean(), atol=2e-5, rtol=1e-5)

    # Another first sample in the first row: no loss of any other sample moves.
    first_tokens = packed[0]["position_ids"].index(0, 1)
    changed = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
    changed["input_ids"][0, :first_tokens] = 77
    trained_in_first = int((batch["labels"][0, :first_tokens] != -100).sum())
    moved = token_losses(model, changed)
    assert (moved[:trained_in_first] - together[:trained_in_first]).abs().max() > 0.01
    torch.testing.assert_close(moved[trained_in_first:], together[trained_in_first:], atol=1e-6, rtol=1e-6)


def test_families_that_let_samples_see_each_other_are_refused():
    model = tiny_llama().train()
    check_isolation(model)
    assert model.training
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32
    )
    with pytest.raises(UserError, match=r"data.packing: opt with .* attention does not keep packed samples apart"):
        check_isolation(OPTForCausalLM(config))


# --- batches


def test_the_collator_pads_to_the_longest():
    collate = Collator(pad_token_id=9)
    batch = collate([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "source": 1}, {"input_ids": [4], "labels": [-100]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    packed = [{"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "position_ids": [0, 1, 0]}]
    batch = collate([*packed, {"input_ids": [1], "labels": [-100], "position_ids": [0]}])
    assert batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch
    assert Collator(9, multiple_tokens=8)([{"input_ids": [1], "labels": [1]}])["labels"].shape == (1, 8)


def test_the_collator_keeps_the_mask_of_rows_that_are_padded_themselves():
    left = {"input_ids": [9, 9, 5], "labels": [-100, -100, 5], "attention_mask": [0, 0, 1]}
    right = {"input_ids": [4, 9], "labels": [4, -100], "attention_mask": [1, 0]}
    batch = Collator(9)([left, right, {"input_ids": [1, 2], "labels": [1, 2]}])
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 0, 0], [1, 1, 0]]
    with pytest.raises(UserError, match=r"a row has 3 input_ids and an attention_mask of \[2\]"):
        Collator(9)([{**left, "attention_mask": [0, 1]}])
    positions = {**left, "position_ids": [0, 1, 2]}
    with pytest.raises(UserError, match="position_ids, and an attention_mask with zeros"):
        Collator(9)([positions])
    assert "attention_mask" not in Collator(9)([{**positions, "attention_mask": [1, 1, 1]}])


def test_a_masked_row_has_the_loss_of_the_row_alone():
    model = tiny_llama()
    alone = {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}
    ids, labels = [9, 9, 9, *alone["input_ids"]], [-100, -100, -100, -100, *alone["labels"][1:]]
    padded = {"input_ids": ids, "labels": labels, "attention_mask": [0] * 3 + [1] * 4}
    losses = [token_losses(model, Collator(9)([row])) for row in (alone, padded)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    unmasked = {name: value for name, value in padded.items() if name != "attention_mask"}
    assert (token_losses(model, Collator(9)([unmasked])) - losses[0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input_ids": [1], "lables": [1]}, "a row has no 'labels'; did you mean 'lables'"),
        ({"input_id": [1], "labels": [1]}, "a row has no 'input_ids'; did you mean 'input_id'"),
        ({"input_ids": [1], "labels": [1], "attention_maks": [1]}, "'attention_maks', .*did you mean 'attention_mask'"),
        ({"input_ids": [1], "labels": [1], "token_type_ids": [1]}, "rows have 'token_type_ids', of which .*makes nothing"),
    ],
)
def test_a_column_that_no_batch_is_made_of_stops(row, told):
    with pytest.raises(UserError, match=told):
        Collator(9)([row])


def test_the_padding_token(tokenizer_of):
    assert Collator.of(tokenizer_of()).pad_token_id == tokenizer_of().eos_token_id
    assert Collator.of(tokenizer_of(pad_token="<|im_start|>")).pad_token_id == 2
    with pytest.raises(UserError, match=r"neither a padding nor"):
        Collator.of(tokenizer_of(eos_token=None))


def test_sequence_to_sequence(ready, tokenizer_of):
    tokenizer = tokenizer_of()
    rows = [{"question": "the cat", "answer": "sat on the mat"}, {"question": "the" + " dog" * 9, "answer": "sat"}]
    prepared = ready(rows, tokenizer, task="seq2seq", sequence_tokens=6)
    first, second = prepared.dataset
    assert texts(tokenizer, first) == ["the", " cat"]
    assert tokenizer.decode(first["labels"]) == "sat on the mat</s>"
    assert (len(second["input_ids"]), prepared.report.cut_tokens, prepared.report.truncated_rows) == (6, 4, 1)
    batch = Collator.of(tokenizer)([first, second])
    assert batch["input_ids"].shape == (2, 6)
    assert batch["labels"].shape == (2, 5)
    config = T5Config(
        vocab_size=340, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    assert torch.isfinite(T5ForConditionalGeneration(config)(**batch).loss)
    asked = ready([{"messages": TWO_ANSWERS}], tokenizer_of(CHATML), task="seq2seq").dataset[0]
    assert tokenizer.decode(asked["input_ids"]).endswith("the dog<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(asked["labels"]) == "on the mat</s>"
    with pytest.raises(UserError, match=r"plain text has no question and answer"):
        ready([{"text": "the cat"}], tokenizer, task="seq2seq")


def test_the_order_is_a_function_of_seed_and_epoch():
    order = StepOrder(20, seed=17)
    first, again = list(order), list(StepOrder(20, seed=17))
    assert first == again
    assert first == [0, 11, 2, 7, 13, 9, 3, 5, 17, 4, 15, 16, 6, 14, 10, 19, 12, 8, 1, 18], "resuming needs it frozen"
    assert sorted(first) == list(range(20))
    order.set_epoch(1)
    assert list(order) != first
    assert sorted(order) == list(range(20))
    assert list(StepOrder(20, seed=18)) != first
    assert list(StepOrder(20, seed=17 + 2**32)) != first
    assert len(order) == 20


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(world_size):
    global_batch, micro_batch = 6, 6 // world_size
    order = StepOrder(24, seed=5)
    order.set_epoch(2)
    expected = [sorted(list(order)[start : start + global_batch]) for start in range(0, 24, global_batch)]
    ranks = []
    for rank in range(world_size):
        batches = torch.utils.data.BatchSampler(order, micro_batch, drop_last=False)
        ranks.append(list(accelerate.data_loader.BatchSamplerShard(batches, world_size, rank)))
    assert [sorted(itertools.chain(*batches)) for batches in zip(*ranks)] == expected


def test_weights_are_shares_of_the_samples():
    sources = [0] * 900 + [1] * 100
    order = StepOrder(1000, seed=3, sources=sources, weights=[1, 3])
    drawn = np.asarray(list(order))
    assert len(drawn) == len(order) == 1000
    small = drawn[drawn >= 900]
    assert len(small) == 750
    assert set(np.bincount(small - 900).tolist()) == {7, 8}
    assert len(set(drawn[drawn < 900].tolist())) == 250
    order.set_epoch(1)
    assert set(order) != set(drawn.tolist())
    assert list(StepOrder(1000, seed=3, sources=sources, weights=[1, 3])) == drawn.tolist()
    thirds = list(StepOrder(10, seed=3, sources=[0, 1, 1, 1, 1, 2, 2, 2, 2, 2], weights=[1, 1, 1]))
    shares = (thirds.count(0), sum(1 <= number < 5 for number in thirds), sum(number >= 5 for number in thirds))
    assert shares == (4, 3, 3)
    with pytest.raises(UserError, match=r"source 1"):
        StepOrder(2, seed=0, sources=[0, 0], weights=[1, 1])


def test_several_sources(ready, write, tmp_path, tokenizer_of):
    one = write([{"text": "the cat"}] * 6, "one.jsonl")
    two = write([{"prompt": "the dog", "completion": " sat"}] * 2, "two.jsonl")
    where = {"cache_dir": tmp_path / "cache", "sequence_tokens": 64}
    plain = prepare([Source(path=one), Source(path=two)], tokenizer_of(), **where)
    assert plain.dataset["source"][:] == [0] * 6 + [1] * 2
    assert [source.format for source in plain.report.sources] == ["text", "prompt"]
    assert sorted(plain.order(seed=1)) == list(range(8))
    mixed = prepare([Source(path=one, weight=1), Source(path=two, weight=1)], tokenizer_of(), **where)
    assert sum(number >= 6 for number in mixed.order(seed=1)) == 4
    with pytest.raises(UserError, match=r"a weight for all or for none"):
        prepare([Source(path=one, weight=1), Source(path=two)], tokenizer_of(), **where)


def test_a_share_is_held_out(ready, tokenizer_of):
    dataset = ready([{"text": "the" + " cat" * count} for count in range(1, 21)], tokenizer_of()).dataset
    kept, held = split(dataset, 0.1, seed=4)
    assert (len(kept), len(held)) == (18, 2)
    numbers = sorted(len(sample["input_ids"]) for part in (kept, held) for sample in part)
    assert numbers == list(range(3, 23))
    assert held[:] == split(dataset, 0.1, seed=4)[1][:]
    assert held[:] != split(dataset, 0.1, seed=5)[1][:]
    assert len(split(dataset, 0.001, seed=4)[1]) == 1
    for share in (0, 1, -0.5):
        with pytest.raises(UserError, match=r"eval.share"):
            split(dataset, share, seed=4)


def test_a_recipe_section(write, tmp_path, tokenizer_of):
    path = write([{"text": "the cat"}] * 3)
    section = Data.model_validate({"path": str(path), "sequence_tokens": 8, "cache_dir": str(tmp_path / "cache")})
    prepared = prepare_section(section, tokenizer_of(), seed=1)
    assert (prepared.report.samples, prepared.weights) == (3, None)
    several = [{"path": str(path), "weight": 2.0}, {"path": str(path), "weight": 1.0}]
    section = Data.model_validate({"sources": several, "cache_dir": str(tmp_path / "cache")})
    assert prepare_section(section, tokenizer_of(), seed=1).weights == (2.0, 1.0)


# --- the cache


def test_the_cache_is_named_by_content_tokenizer_and_settings(ready, write, tokenizer_of):
    rows = [{"prompt": "the cat", "completion": "sat"}]
    first = ready(rows, tokenizer_of())
    assert not first.report.cached
    again = ready(rows, tokenizer_of())
    assert again.report.cached
    assert again.dataset[:] == first.dataset[:]
    assert str(again.report) == str(first.report)
    padded = tokenizer_of(pad_token="</s>")
    padded(["the", "the cat"], padding="max_length", max_length=9, truncation=True)
    ready(rows, tokenizer_of(pad_token="</s>"))
    assert ready(rows, padded).report.cached, "what a call leaves in the tokenizer must not count"
    assert not ready(rows, tokenizer_of(CHATML)).report.cached
    assert not ready(rows, tokenizer_of(bos=True)).report.cached
    assert not ready(rows, tokenizer_of(), loss_on="all").report.cached
    assert not ready(rows, tokenizer_of(), sequence_tokens=63).report.cached
    assert ready(rows, tokenizer_of(), seed=5).report.cached
    assert not ready([{"prompt": "the dog", "completion": "sat"}], tokenizer_of()).report.cached


def test_a_damaged_cache_says_so(ready, tmp_path, tokenizer_of):
    rows = [{"text": "the cat"}]
    ready(rows, tokenizer_of())
    next((tmp_path / "cache").glob("*/report.json")).write_text("{")
    with pytest.raises(UserError, match=r"the prepared data are damaged .* Delete the folder"):
        ready(rows, tokenizer_of())


def test_a_folder_is_built_once_and_whole(tmp_path):
    folder, calls = tmp_path / "a" / "folder", []

    def build(place):
        calls.append(place)
        (place / "file").write_text("whole")

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "folder.partial").mkdir()
    (tmp_path / "a" / "folder.partial" / "left-over").write_text("by a process that was killed")
    assert build_once(folder, build) is False
    assert build_once(folder, build) is True
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert len(calls) == 1
    filelock.FileLock(tmp_path / "a" / "folder.lock").acquire(timeout=0).lock.release()

    def fail(place):
        calls.append(place)
        raise RefusedError("row 3")

    for _ in range(2):
        with pytest.raises(RefusedError, match=r"row 3"):
            build_once(tmp_path / "a" / "bad", fail)
    assert len(calls) == 2, "a refusal is remembered"
    (tmp_path / "plain").write_text("")
    with pytest.raises(UserError, match=r"cannot be written"):
        build_once(tmp_path / "plain" / "folder", build)


def test_many_rows_in_parallel_are_the_same_as_in_one_process(ready, write, tokenizer_of):
    path = write([{"prompt": f"the cat {number}", "completion": " sat" * (number % 7 + 1)} for number in range(1000)])
    settings = {"sequence_tokens": 32, "packing": True}
    one = ready(path, tokenizer_of(), workers=1, **settings).dataset[:]
    two = ready(path.rename(path.with_name("b.jsonl")), tokenizer_of(), workers=2, **settings).dataset[:]
    assert [place.replace("b.jsonl", path.name) for place in two["place"]] == one["place"]
    assert {**one, "place": None} == {**two, "place": None}


@pytest.mark.slow
def test_processes_that_start_at_once_prepare_once(write, tmp_path, tokenizer_of):
    tokenizer_of(CHATML).save_pretrained(tmp_path / "tokenizer")
    path = write([{"messages": TWO_ANSWERS}] * 400)
    program = f"""
import transformers
from ftkit.data.prepare import prepare
tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r})
prepared = prepare({str(path)!r}, tokenizer, cache_dir={str(tmp_path / "cache")!r}, workers=1)
print(prepared.report.cached, len(prepared.dataset))
"""
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60 * PATIENCE) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert sorted(output.split() for output, _ in outputs) == [["False", "400"], ["True", "400"]]
    folders = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert len(folders) == 1


def test_marks_at_the_edge_of_a_byte_sequence(tokenizer_of):
    tokenizer = tokenizer_of(MARKED)
    turns = [{"role": "user", "content": "the é"}, {"role": "assistant", "content": "sat 猫"}]
    bare = MARKED.replace("m['content'] + '<|im_end|>' }}{% endgen", "m['content'] }}{% endgen")
    tokenizer.chat_template = bare
    rendered = Rendering.of(tokenizer).conversation(read_row({"messages": turns}, "messages"))
    said = [token for start, stop in rendered.answers for token in rendered.ids[start:stop]]
    assert tokenizer.decode(said) == "sat 猫", "every byte of the last character is the answer's"


def test_a_token_across_the_edge_of_a_mark_is_the_answers(tokenizer_of):
    template = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    turns = ({"role": "assistant", "content": "sat"},)
    rendered = Rendering.of(tokenizer).conversation(Conversation(turns))
    said = [tokenizer.decode(rendered.ids[start:stop]) for start, stop in rendered.answers]
    assert said == [" sat"]
    official = tokenizer.apply_chat_template(list(turns), return_assistant_tokens_mask=True, return_dict=True)
    assert [at for at, mark in enumerate(official["assistant_masks"]) if mark] == [rendered.answers[0][0]]


@pytest.mark.parametrize("code", ["messages.append(1)", "''.__class__.__mro__[1].__subclasses__()", "1 / 0"])
def test_a_template_runs_in_the_sandbox_and_its_errors_name_it(tokenizer_of, code):
    turns = ({"role": "user", "content": "the"}, {"role": "assistant", "content": "sat"})
    with pytest.raises((UserError, BadRowError), match=r"the chat template of .* refuses it"):
        Rendering.of(tokenizer_of("{{ " + code + " }}")).conversation(Conversation(turns))


def test_records_that_are_not_rows():
    for record in ("", "null", '"text"', "{"):
        with pytest.raises(BadRowError):
            parse_record(record)


def test_each_sample_knows_where_it_stands(ready, write, tokenizer_of):
    path = write([{"prompt": f"the cat {number}", "completion": " sat"} for number in range(5)])
    alone = ready(path, tokenizer_of(), sequence_tokens=32).dataset
    assert alone["place"][:] == [f"{path}:{line}" for line in range(1, 6)]
    packed = ready(path, tokenizer_of(), sequence_tokens=32, packing=True).dataset
    assert sorted(place for joined in packed["place"][:] for place in joined.split(", ")) == alone["place"][:]
