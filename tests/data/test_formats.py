"""The content of rows: five formats, roles, tool calls, and the rows that cannot be used."""

import json

import datasets
import pytest

from ftkit.config.recipe import Source
from ftkit.data.formats import BadRowError, parse_record, read_row
from ftkit.errors import UserError
from tests.data.templates import CHATML, MARKED, TEXT_CALLS, TOOLS, TWO_ANSWERS, learned, texts


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
    assert texts(tokenizer, prepared.train[0]) == ["the", " cat", "</s>"]
    assert prepared.train[0]["labels"] == [-100, *prepared.train[0]["input_ids"][1:]]


def test_the_format_asked_for_must_fit(ready, write, tokenizer_of):
    path = write([{"text": "a", "prompt": "b", "completion": "c"}])
    text = ready(Source(path=str(path), format="text"), tokenizer_of())
    assert text.report.sources[0].format == "text"
    assert text.report.sources[0].unused == ("prompt", "completion")
    assert "not read: prompt, completion" in str(text.report)
    with pytest.raises(UserError, match=r"found columns completion, prompt, text; needed columns .alpaca"):
        ready(Source(path=str(path), format="alpaca"), tokenizer_of())
    with pytest.raises(UserError, match=r"found columns a, b; needed columns .messages"):
        ready(write([{"a": 1, "b": 2}], "other.jsonl"), tokenizer_of())


def test_tools_are_read_and_empty_keys_dropped():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    turns = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": ""}, TWO_ANSWERS[1]]
    read = read_row({"messages": turns, "tools": '[{"name": "f"}]'}, "messages")
    assert read.tools == [{"name": "f"}]
    assert read.turns[1] == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


BAD_ROWS = [
    ('{"prompt": "a", "completion": ', "broken JSON: Expecting value"),
    ("[1, 2]", "expected an object with columns; found list"),
    ({"prompt": "a"}, "needs columns prompt and completion"),
    ({"prompt": "a", "completion": ""}, "`completion` is empty"),
    ({"prompt": "a", "completion": " \n"}, "`completion` is empty"),
    ({"prompt": "a", "completion": 7}, "`completion` must be text; found 7"),
    ({"prompt": None, "completion": "b"}, "`prompt` must be text; found None"),
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
        ([], "has no assistant turn; found no turn"),
        ("hello", "must be a list of turns; found 'hello'"),
        (TWO_ANSWERS[:1], "has no assistant turn; found user"),
        ([{"role": "robot", "content": "x"}, TWO_ANSWERS[1]], "turn 1 has the unknown role 'robot'"),
        ([TWO_ANSWERS[0], {"role": "assistant", "content": ""}], "the assistant content of .*turn 2 is empty"),
        ([TWO_ANSWERS[0], {"role": "assistant", "content": {"a": 1}}], "turn 2 must be text; found {'a': 1}"),
        ([TWO_ANSWERS[0], "sat"], "turn 2 must be an object"),
        ([{"role": "user", "content": [{"type": "image"}]}, TWO_ANSWERS[1]], "a part that is not text"),
        ([TWO_ANSWERS[1], TWO_ANSWERS[0]], "begins with an answer to nothing"),
    ],
)
def test_bad_chat_rows(ready, tokenizer_of, turns, reason):
    with pytest.raises(UserError, match=rf"rows.jsonl:2: .*{reason}"):
        ready([{"messages": TWO_ANSWERS}, {"messages": turns}], tokenizer_of(CHATML))


def test_skipped_rows_are_counted(ready, tokenizer_of):
    good = {"prompt": "the cat", "completion": "sat"}
    prepared = ready([good, *(bad for bad, _ in BAD_ROWS), good], tokenizer_of(), on_bad_row="skip")
    assert (len(prepared.train), prepared.report.rows, prepared.report.bad_rows) == (2, 10, 8)
    assert prepared.report.bad_examples[0].split(": ")[0].endswith("rows.jsonl:2")
    assert "8 rows skipped" in str(prepared.report)
    with pytest.raises(UserError, match=r"2 of 2 rows cannot be used"):
        ready([{"prompt": "", "completion": "a"}] * 2, tokenizer_of(), on_bad_row="skip")


def test_records_that_are_not_rows():
    for record in ("", "null", '"text"', "{"):
        with pytest.raises(BadRowError):
            parse_record(record)


USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}
EARLIER = [{"role": "user", "content": "0+1?"}, {"role": "assistant", "content": "one"}]
SYSTEM = {"role": "system", "content": "be short"}
BESIDE_TURNS = {
    "system beside messages": ({"system": "be short", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
    "system beside a prompt": ({"system": "be short", "prompt": "1+1?", "response": "two"}, [SYSTEM, USER, ANSWER]),
    "history of alpaca": (
        {"instruction": "1+1?", "output": "two", "history": [["0+1?", "one"]], "system": "be short"},
        [SYSTEM, *EARLIER, USER, ANSWER],
    ),
    "history of a prompt": ({"prompt": "1+1?", "response": "two", "history": [["0+1?", "one"]]}, [*EARLIER, USER, ANSWER]),
}


@pytest.mark.parametrize("case", BESIDE_TURNS)
def test_columns_beside_the_turns_are_read_as_turns(case):
    row, turns = BESIDE_TURNS[case]
    name = next(name for name in ("messages", "alpaca", "prompt") if {"alpaca": "instruction"}.get(name, name) in row)
    assert read_row(row, name).turns == tuple(turns)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"system": "a", "messages": [SYSTEM, USER, ANSWER]}, "another system turn"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "turn 2 has the weight 0.5; needed: 0 or 1"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "`tools` must be a list, or JSON text of one; found"),
    ],
)
def test_further_bad_rows(row, reason):
    with pytest.raises(BadRowError, match=reason):
        read_row(row, "messages")


def test_history_is_a_list_of_pairs():
    with pytest.raises(BadRowError, match="`history` must be a list of pairs"):
        read_row({"prompt": "a", "response": "b", "history": [["q"]]}, "prompt")


# --- tool calls, as public data sets have them

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}


def call(arguments, name="weather"):
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    return [{"role": "user", "content": "the cat"}, asked, {"role": "tool", "content": "sat"}, ANSWER]


@pytest.mark.parametrize("template", [TOOLS, TEXT_CALLS], ids=["template of objects", "template of text"])
def test_arguments_and_tools_as_json_text_give_the_text_of_objects(ready, tokenizer_of, template):
    tokenizer = tokenizer_of(template)
    arguments = {"city": "Zürich", "days": 3}
    objects = {"messages": call(arguments), "tools": [TOOL]}
    as_text = {"messages": call(json.dumps(arguments)), "tools": json.dumps([TOOL])}
    tools_as_texts = {"messages": call(json.dumps(arguments)), "tools": [json.dumps(TOOL)]}
    rows = ready([objects, as_text, tools_as_texts], tokenizer, sequence_tokens=400).train
    assert rows["input_ids"][0] == rows["input_ids"][1] == rows["input_ids"][2]
    assert rows["labels"][0] == rows["labels"][1]
    assert '\\\\"' not in tokenizer.decode(rows["input_ids"][0])
    assert '"city":' in learned(tokenizer, rows[0])


def test_union_columns_of_parquet_leave_no_nulls(ready, write, tmp_path, tokenizer_of):
    tokenizer = tokenizer_of(TOOLS)
    rows = [
        {"messages": call({"city": "Zug"}), "tools": [TOOL]},
        {"messages": call({"date": "now", "days": 3}, "calendar"), "tools": [TOOL]},
        {"messages": [USER, ANSWER], "tools": []},
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    columns = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "hub"))
    assert columns[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["days"] is None, "the case has nulls"
    tables = ready(path, tokenizer, sequence_tokens=400).train
    lines = ready(write(rows), tokenizer, sequence_tokens=400).train
    assert tables["input_ids"][:] == lines["input_ids"][:]
    assert "null" not in tokenizer.decode(tables["input_ids"][0])


SHAREGPT = [
    {"from": "human", "value": "the cat"},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Zug"}}'},
    {"from": "observation", "value": "the dog"},
    {"from": "gpt", "value": "on the mat"},
]


@pytest.mark.parametrize("template", [TOOLS, CHATML, MARKED, None], ids=["tools", "chatml", "marked", "plain"])
def test_function_calls_of_sharegpt_are_learned_and_observations_are_not(ready, tokenizer_of, template):
    tokenizer = tokenizer_of(template)
    prepared = ready([{"conversations": SHAREGPT, "tools": json.dumps([TOOL])}], tokenizer, sequence_tokens=400)
    said = learned(tokenizer, prepared.train[0])
    assert '{"name": "weather", "arguments": {"city": "Zug"}}' in said
    assert "on the mat" in said
    assert "the dog" not in said
    assert "the dog" in tokenizer.decode(prepared.train[0]["input_ids"])
    as_calls = read_row({"conversations": SHAREGPT}, "sharegpt").turns[1]
    assert as_calls["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Zug"}}


def test_a_mixture_of_formats_and_key_orders_gives_the_samples_of_each_file_alone(ready, write, tmp_path, tokenizer_of):
    tokenizer = tokenizer_of(TOOLS)
    files = [
        write([{"messages": call({"city": "Zug", "days": 3})}, {"messages": call({"days": 3, "city": "Zug"})}], "a.jsonl"),
        write([{"output": "b", "instruction": "a"}, {"instruction": "a", "input": "c", "output": "d"}], "b.jsonl"),
        tmp_path / "c.csv",
        tmp_path / "d.json",
    ]
    files[2].write_text("question,answer\nwhat,007\n")
    files[3].write_text(json.dumps([{"conversations": SHAREGPT}]))
    sources = [Source(path=str(file)) for file in files]
    mixed = ready(sources, tokenizer, sequence_tokens=400).train
    alone = [ready(file, tokenizer, sequence_tokens=400).train for file in files]
    assert mixed["input_ids"][:] == [ids for each in alone for ids in each["input_ids"]]
    assert mixed["labels"][:] == [labels for each in alone for labels in each["labels"]]
    assert mixed["input_ids"][0] != mixed["input_ids"][1], "the order of keys is that of the row"
