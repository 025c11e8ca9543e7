"""What the `{% generation %}` marks of a chat template cover is compared with the roles of the turns."""

import json

import pytest

from ftkit.errors import UserError
from ftkit.hf.data import prepare
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
}


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
