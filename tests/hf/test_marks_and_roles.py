"""What the `{% generation %}` marks of a chat template cover is compared with the roles of the turns."""

import json

import pytest

from ftkit.data.prepared import prepare
from ftkit.errors import UserError
from tests.tiny import TEMPLATE, make_tokenizer

MARK, END = "{% generation %}", "{% endgeneration %}"
BARE = TEMPLATE.replace(MARK, "").replace(END, "")
ALL = "{{- bos_token }}{%- for message in messages %}{% generation %}{{- message.role[0] + ':' + message.content }}"
ALL += "{% endgeneration %}{{- eos_token }}{%- endfor %}{%- if add_generation_prompt %}{{- 'a:' }}{% endif %}"
TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
]
TOOL_TALK = [*TALK, {"role": "tool", "content": "noon"}, TALK[-1]]
EACH = "{%- for call in message.tool_calls or [] %}"
NAMES = EACH + "{{- call.function.name }}{%- endfor %}"
ARGUMENTS = EACH + "{{- call.function.arguments | tojson }}{%- endfor %}"
CALL = {"name": "now", "arguments": {"at": 7}}
WRONG = {
    "the user's turns": (
        BARE.replace("{{- 'Q:' + message['content'] + eos_token }}", MARK + "{{- 'Q:' + message.content }}" + END),
        TALK,
        "turn 1 of the system",
    ),
    "questions alone": (TEMPLATE.replace("== 'assistant'", "== 'user'"), TALK, "turn 2 of the user"),
    "everything": (ALL, TALK, "turn 1 of the system"),
    "tools' answers": (TEMPLATE.replace("== 'assistant'", "in ('assistant', 'tool')"), TOOL_TALK, "turn 6 of the tool"),
    "the last answer alone": (
        TEMPLATE.replace("== 'assistant' %}", "== 'assistant' and loop.last %}"),
        TALK,
        "turn 3 of the assistant",
    ),
    "half of an answer": (
        TEMPLATE.replace(
            MARK + "{{- message['content']", "{{- message['content'][:1] }}" + MARK + "{{- message['content'][1:]"
        ),
        TALK,
        "turn 3 of the assistant",
    ),
    "no word": (
        TEMPLATE.replace(
            MARK + "{{- message['content'] + eos_token }}" + END,
            "{{- message['content'] }}" + MARK + "{{- eos_token }}" + END,
        ),
        TALK,
        "turn 3 of the assistant",
    ),
    "a call": (
        TEMPLATE.replace(MARK, "{%- for call in message.tool_calls or [] %}{{- call.function.name }}{% endfor %}" + MARK),
        [TALK[1], {**TALK[2], "tool_calls": [{"function": {"name": "now"}}]}],
        "turn 2 of the assistant",
    ),
    "the arguments of a call": (
        TEMPLATE.replace(END, NAMES + END + ARGUMENTS),
        [TALK[1], {**TALK[2], "tool_calls": [{"function": CALL}]}],
        "turn 2 of the assistant",
    ),
    "the arguments of a call as text": (
        TEMPLATE.replace(END, NAMES + END + ARGUMENTS),
        [TALK[1], {**TALK[2], "tool_calls": [{"function": {**CALL, "arguments": '{"at": 7}'}}]}],
        "turn 2 of the assistant",
    ),
    "the second call": (
        TEMPLATE.replace(END, NAMES.replace("or []", "[:1]") + END + NAMES.replace("or []", "[1:]")),
        [TALK[1], {**TALK[2], "tool_calls": [{"function": {"name": name}} for name in ("now", "then")]}],
        "turn 2 of the assistant",
    ),
    "reasoning": (
        TEMPLATE.replace(MARK, "{{- message.reasoning_content or '' }}" + MARK),
        [TALK[1], {**TALK[2], "reasoning_content": "1+1 is 2"}],
        "turn 2 of the assistant",
    ),
    "reasoning by another name": (
        TEMPLATE.replace(MARK, "{{- message.reasoning_content or '' }}" + MARK),
        [TALK[1], {**TALK[2], "thinking": "1+1 is 2"}],
        "turn 2 of the assistant",
    ),
}


@pytest.mark.quick(7)
@pytest.mark.parametrize("case", WRONG)
def test_marks_that_do_not_cover_the_answers_stop(tmp_path, case):
    template, turns, told = WRONG[case]
    assert template.count(MARK) == 1
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    settings = {"cache_dir": tmp_path / "cache", "workers": 1}
    with pytest.raises(UserError, match=rf"rows.jsonl:1: the {{% generation %}} marks .*{told}.*set data.loss_on: marks"):
        prepare(path, tokenizer, **settings)
    if case != "no word":  # an end alone is refused anyway
        assert prepare(path, tokenizer, loss_on="marks", **settings).report.trained_tokens > 0
    prepare(path, tokenizer, loss_on="all", **settings)


def test_marks_that_are_asked_for_must_be_there(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n")
    with pytest.raises(UserError, match=r"data.loss_on is marks, and the chat template has no"):
        prepare(path, make_tokenizer(tmp_path / "tokenizer", BARE), loss_on="marks", cache_dir=tmp_path / "cache")


def test_marks_of_plain_text_are_none(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    text, talk = tmp_path / "text.jsonl", tmp_path / "talk.jsonl"
    text.write_text('{"text": "some words"}\n')
    talk.write_text(json.dumps({"messages": TALK}) + "\n")
    settings = {"loss_on": "marks", "cache_dir": tmp_path / "cache", "workers": 1}
    with pytest.raises(UserError, match=r"data.loss_on is marks, and all rows are plain text"):
        prepare(text, tokenizer, **settings)
    assert prepare([text, talk], tokenizer, **settings).report.samples == 2


def test_marks_around_each_part_of_an_answer_are_fine(tmp_path):
    two = "{{- message['content'] }}" + END + MARK + "{{- eos_token }}"
    parts = TEMPLATE.replace("{{- message['content'] + eos_token }}", two)
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": turns}) + "\n" for turns in (TALK, [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]))
    )
    tokenizer = make_tokenizer(tmp_path / "tokenizer", parts)
    whole, muted = prepare(path, tokenizer, cache_dir=tmp_path / "cache", workers=1).dataset
    learned = [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in (whole, muted)]
    assert learned == ["two<end>four<end>", "four<end>"]


FINE = {
    "all of it": TEMPLATE.replace(END, "{{- message.reasoning_content or '' }}" + NAMES + ARGUMENTS + END),
    "arguments that must be a number": TEMPLATE.replace(
        END, "{{- message.reasoning_content or '' }}" + NAMES + ARGUMENTS.replace("| tojson", ".at + 81") + END
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_marks_around_reasoning_and_calls_are_fine(tmp_path, case):
    turns = [TALK[1], {**TALK[2], "reasoning_content": "1+1 is 2", "tool_calls": [{"function": CALL}, {"function": CALL}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", FINE[case])
    row = prepare(path, tokenizer, cache_dir=tmp_path / "cache", workers=1).dataset[0]
    learned = tokenizer.decode([label for label in row["labels"] if label != -100])
    assert "1+1 is 2" in learned
    assert "nownow" in learned
    assert ("7" if case == "all of it" else "88") in learned
