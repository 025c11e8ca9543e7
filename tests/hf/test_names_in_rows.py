"""Columns and keys of rows: what is read as turns, what is learned of them, and what nobody reads."""

import json

import pytest

from ftkit.data.build_once import RefusedError
from ftkit.data.formats import read_row
from ftkit.data.prepare import prepare
from ftkit.errors import UserError
from tests.tiny import TEMPLATE, make_tokenizer

WITH_NAMES = TEMPLATE.replace("'Q:' +", "'Q' + (message.name or '') + ':' +")
DUMPS_TOOLS = "{%- if tools %}{{- tools | tojson }}{%- endif %}" + TEMPLATE
REASONS = TEMPLATE.replace("{% generation %}", "{% generation %}{{- message.reasoning_content or '' }}")
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two"}
TURNS = [USER, ANSWER]
TOOL = {"type": "function", "function": {"name": "now", "description": "the time"}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}

    def of(template):
        if template not in made:
            made[template] = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
        return made[template]

    return of


@pytest.fixture
def ready(tmp_path, tokenizers):
    def prepared(rows, template=TEMPLATE, name="rows.jsonl", **settings):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"sequence_tokens": 128, "workers": 1, "cache_dir": tmp_path / "cache", **settings}
        return prepare(path, tokenizers(template), **settings)

    return prepared


def tokens_of(prepared):
    return [(row["input_ids"], row["labels"]) for row in prepared.dataset]


GOOD = {"messages": TURNS}
UNREAD = {
    "a misspelled column": ({"messages": TURNS, "system_prompt": "be short"}, "system_prompt"),
    "zero says something": ({"messages": TURNS, "score": 0}, "score"),
    "a key of a turn": ({"messages": [{**USER, "name": "Ann"}, ANSWER]}, "messages.name"),
    "tools": ({"messages": TURNS, "tools": [TOOL]}, "tools"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_name_that_nobody_reads_stops(ready, case):
    bad, name = UNREAD[case]
    with pytest.raises(RefusedError) as stop:
        ready([GOOD, GOOD, bad])
    assert f"  {name}: 1 row, the first " in str(stop.value)
    assert "rows.jsonl:3" in str(stop.value)
    assert str(stop.value).endswith(f"data.ignore_columns: {json.dumps([name])}")
    with pytest.raises(RefusedError, match="would not be read"):
        ready([GOOD, GOOD, bad], on_bad_row="skip")
    accepted = ready([GOOD, GOOD, bad], ignore_columns=[name])
    assert accepted.report.sources[0].ignored[name].rows == 1
    assert "ignored: " in str(accepted.report)


def test_what_is_ignored_is_gone_before_the_template_sees_it(ready):
    named = [{**USER, "name": "Ann"}, ANSWER]
    assert tokens_of(ready([{"messages": named}], WITH_NAMES)) != tokens_of(ready([GOOD], WITH_NAMES))
    ignored = ready([{"messages": named}], WITH_NAMES, ignore_columns=["messages.name"])
    assert tokens_of(ignored) == tokens_of(ready([GOOD], WITH_NAMES))


READ_BY_THE_TEMPLATE = {
    "tools as text": (DUMPS_TOOLS, {"messages": TURNS, "tools": json.dumps([TOOL])}),
    "reasoning": (REASONS, {"messages": [USER, {**ANSWER, "reasoning_content": "1+1 is 2"}]}),
}


@pytest.mark.parametrize("case", READ_BY_THE_TEMPLATE)
def test_what_the_template_reads_is_read(ready, case):
    template, row = READ_BY_THE_TEMPLATE[case]
    assert tokens_of(ready([row], template)) != tokens_of(ready([GOOD], template))


EARLIER = [{"role": "user", "content": "0+1?"}, {"role": "assistant", "content": "one"}]
SYSTEM = {"role": "system", "content": "be short"}
SAME = {
    "system beside messages": ({"system": "be short", "messages": TURNS}, [SYSTEM, *TURNS]),
    "system beside a prompt": ({"system": "be short", "prompt": "1+1?", "response": "two"}, [SYSTEM, *TURNS]),
    "system of alpaca": ({"system": "be short", "instruction": "1+1?", "output": "two"}, [SYSTEM, *TURNS]),
    "history of alpaca": (
        {"instruction": "1+1?", "output": "two", "history": [["0+1?", "one"], ["and?", "no"]], "system": "be short"},
        [SYSTEM, *EARLIER, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "no"}, *TURNS],
    ),
    "history of a prompt": (
        {"prompt": "1+1?", "response": "two", "history": [["0+1?", "one"]]},
        [*EARLIER, *TURNS],
    ),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "plain"])
@pytest.mark.parametrize("case", SAME)
def test_what_stands_beside_the_turns_is_read_as_turns(ready, case, template):
    row, turns = SAME[case]
    assert tokens_of(ready([row], template)) == tokens_of(ready([{"messages": turns}], template))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"system": "a", "messages": [SYSTEM, *TURNS]}, "another system turn"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "`history`, pair 1 must be a list of a question and"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight 0.5; only 0 and 1"),
        ({"messages": [USER, {**ANSWER, "train": True, "weight": 0}]}, "contradict each other"),
        ({"messages": [{**USER, "role": "asistant"}, ANSWER]}, r"did you mean assistant\?"),
    ],
)
def test_what_cannot_be_read_so_is_a_bad_row(ready, row, reason):
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{reason}"):
        ready([row])


TALK = [USER, ANSWER, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]


@pytest.mark.quick(5)
@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED, None], ids=["marked", "prefix", "plain"])
@pytest.mark.parametrize(("mark", "muted"), [({"weight": 0}, 1), ({"train": False}, 3)])
@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_a_muted_answer_is_read_and_not_learned(ready, template, mark, muted, loss_on):
    turns = [{**turn, **mark} if number == muted else turn for number, turn in enumerate(TALK)]
    [(ids, labels)] = tokens_of(ready([{"messages": turns}], template, loss_on=loss_on))
    [(all_ids, all_labels)] = tokens_of(ready([{"messages": TALK}], template, loss_on=loss_on))
    [(_, answers)] = tokens_of(ready([{"messages": TALK}], template))
    assert ids == all_ids
    other = tokens_of(ready([{"messages": TALK[:2]}], template))[0][0]
    first = [place < len(other) for place in range(len(ids))]  # the tokens of the first question and answer
    gone = [label != -100 and first[place] == (muted == 1) for place, label in enumerate(answers)]
    assert labels == [-100 if mute else label for mute, label in zip(gone, all_labels)]
    assert any(gone)


def test_a_row_alone_is_read_as_before():
    read = read_row({"messages": [USER, {**ANSWER, "weight": 1, "train": None}]}, "messages")
    assert read.turns == (USER, ANSWER)
    assert read.muted == frozenset()


def test_each_marked_part_of_an_answer_is_learned(ready, tokenizers):
    marked = "{{- message['content'] }}{% endgeneration %}{% generation %}{{- eos_token }}"
    template = TEMPLATE.replace("{{- message['content'] + eos_token }}", marked)
    muted = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    samples = tokens_of(ready([{"messages": TALK}, {"messages": muted}], template))
    learned = [tokenizers(template).decode([label for label in labels if label != -100]) for _, labels in samples]
    assert learned == ["two<end>four<end>", "four<end>"]
