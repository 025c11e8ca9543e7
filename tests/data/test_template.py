"""Masks token by token, whatever says where the answers are; prompts, dates, and templates that are refused."""

from datetime import date

import pytest

from ftkit.data.formats import BadRowError, Conversation, read_row
from ftkit.data.template import Template
from ftkit.errors import UserError
from tests.data.templates import CHATML, MARKED, THINKING, TWO_ANSWERS, learned, texts, trained_texts


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_are_masked_exactly(ready, tokenizer_of, template):
    tokenizer = tokenizer_of(template)
    prepared = ready([{"messages": TWO_ANSWERS}], tokenizer)
    sample = prepared.train[0]
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
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer_of(CHATML), loss_on="all").train[0]
    assert sample["labels"] == [-100, *sample["input_ids"][1:]]


def test_an_answer_the_template_rewrites_is_found_by_its_text(ready, tokenizer_of):
    tokenizer = tokenizer_of(THINKING)
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).train[0]
    said = [text for text in trained_texts(tokenizer, sample) if text is not None]
    assert "".join(said) == "sat<|im_end|>\n(think)on the mat<|im_end|>\n"
    tokenizer = tokenizer_of(CHATML.replace("{% if add", "{% if not add_generation_prompt %}</s>{% endif %}{% if add"))
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).train[0]
    said = [text for text in trained_texts(tokenizer, sample) if text is not None]
    assert "".join(said) == "sat<|im_end|>\non the mat<|im_end|>\n</s>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (THINKING.replace("+ '<|im_end|>'", "+ '!' * (loop.length - 2) * (loop.index == 2)"), "differently once"),
        (CHATML.replace("assistant\n", "assistant\n(think)"), "asks for turn 2 differently"),
    ],
)  # fmt: skip  (a table, one row per line)
def test_a_template_that_cannot_be_masked_is_named(ready, tokenizer_of, template, reason):
    tokenizer = tokenizer_of(template)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(UserError, match=rf"rows.jsonl:1: the chat template of some/model .*{reason}"):
        ready([{"messages": TWO_ANSWERS}], tokenizer, on_bad_row="skip")
    assert ready([{"messages": TWO_ANSWERS}], tokenizer, loss_on="all").report.samples == 1


def test_a_token_across_the_edge_of_an_answer_is_refused(ready, tokenizer_of):
    tokenizer = tokenizer_of(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    turns = [{"role": turn["role"], "content": "the " + turn["content"]} for turn in TWO_ANSWERS]
    with pytest.raises(UserError, match=r"rows.jsonl:1: has a token across the edge of an answer \('the sat"):
        ready([{"messages": turns}], tokenizer)


def test_without_a_template_question_answer_and_eos_follow_each_other(ready, tokenizer_of):
    tokenizer = tokenizer_of(bos=True)
    sample = ready([{"prompt": "the cat", "completion": " sat"}], tokenizer).train[0]
    assert texts(tokenizer, sample) == ["<s>", "the", " cat", " sat", "</s>"]
    assert trained_texts(tokenizer, sample) == [None, None, None, " sat", "</s>"]
    sample = ready([{"question": "the cat", "answer": "sat"}], tokenizer).train[0]
    assert texts(tokenizer, sample) == ["<s>", "the", " cat", "\n", "sat", "</s>"]
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).train[0]
    assert "".join(texts(tokenizer, sample)) == "<s>the cat\nsat</s>the dog\non the mat</s>"
    assert "".join(text or "" for text in trained_texts(tokenizer, sample)) == "sat</s>on the mat</s>"


def prompt_of(tokenizer, turn, separator):
    return Template.of(tokenizer).prompt(Conversation((turn,), separator=separator))


def test_a_token_never_reaches_from_the_plain_question_into_the_answer(ready, tokenizer_of):
    tokenizer = tokenizer_of()
    sample = ready([{"prompt": "the c", "completion": "at sat"}], tokenizer).train[0]
    asked = prompt_of(tokenizer, {"role": "user", "content": "the c"}, separator="")
    assert sample["input_ids"][: len(asked)] == asked
    assert "".join(text or "" for text in trained_texts(tokenizer, sample)) == "at sat</s>"


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, "{{ bos_token }}" + MARKED, None])
def test_no_doubled_bos(ready, tokenizer_of, template):
    tokenizer = tokenizer_of(template, bos=True)
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer).train[0]
    assert sample["input_ids"].count(tokenizer.bos_token_id) == 1
    assert sample["input_ids"][0] == tokenizer.bos_token_id
    sample = ready([{"text": "<s>the cat</s>"}], tokenizer).train[0]
    assert texts(tokenizer, sample) == ["<s>", "the", " cat", "</s>"]
    if template is None:
        sample = ready([{"prompt": "<s>the cat", "completion": " sat"}], tokenizer).train[0]
        assert texts(tokenizer, sample) == ["<s>", "the", " cat", " sat", "</s>"]
        assert trained_texts(tokenizer, sample) == [None, None, None, " sat", "</s>"]


def test_the_prompt_for_generation_is_what_preceded_the_answer(ready, tokenizer_of):
    for template in (CHATML, MARKED, None):
        tokenizer = tokenizer_of(template, bos=True)
        sample = ready([{"messages": TWO_ANSWERS[:2]}], tokenizer).train[0]
        asked = prompt_of(tokenizer, TWO_ANSWERS[0], separator="\n")
        assert sample["input_ids"][: len(asked)] == asked
        assert trained_texts(tokenizer, sample)[len(asked)] == "sat"
        assert sample["labels"][: len(asked)] == [-100] * len(asked)


def test_a_tokenizer_without_template_and_end_is_refused(ready, tokenizer_of):
    with pytest.raises(UserError, match=r"neither a chat template nor an end-of-sequence token"):
        ready([{"text": "a"}], tokenizer_of(eos_token=None))


def test_rows_without_anything_to_learn(ready, tokenizer_of):
    unmarked = MARKED.replace("{{ m['content'] + '<|im_end|>' }}{% endgen", "{% endgen").replace(
        "{{ '\n' }}", "{{ m['content'] }}"
    )
    with pytest.raises(UserError, match=r"rows.jsonl:1: has nothing to learn"):
        ready([{"messages": TWO_ANSWERS}], tokenizer_of(unmarked))
    refusing = "{{ raise_exception('no system turns') }}"
    with pytest.raises(UserError, match=r"rows.jsonl:1: the chat template of .* refuses it: no system turns"):
        ready([{"messages": TWO_ANSWERS}], tokenizer_of(refusing))


# As Qwen3: reasoning is written for the last answer only, also before a call.
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% set said = m['content'].split('</think>')[-1] %}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>' + (m['content'].split('</think>')[0] if '</think>' in "
    "m['content'] else '') + '</think>' }}{% endif %}{{ said }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_reasoning_that_the_template_drops_is_no_part_of_an_earlier_answer(ready, tokenizer_of):
    tokenizer = tokenizer_of(QWEN)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    turns = [
        TWO_ANSWERS[0],
        {"role": "assistant", "content": "the mat</think>sat"},
        {"role": "user", "content": "the dog"},
        call,
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "on</think>on the mat"},
    ]
    said = learned(tokenizer, ready([{"messages": turns}], tokenizer, sequence_tokens=200).train[0])
    calls = '<call>{"name": "weather", "arguments": {}}</call>'
    assert said == f"sat<|im_end|>\n{calls}<|im_end|>\n<think>on</think>on the mat<|im_end|>\n"


UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [MARKED, UNMARKED, None], ids=["marked", "prefix", "plain"])
@pytest.mark.parametrize(("mark", "muted"), [({"weight": 0}, 1), ({"train": False}, 3)])
@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_a_muted_answer_is_read_and_not_learned(ready, tokenizer_of, template, mark, muted, loss_on):
    tokenizer = tokenizer_of(template)
    turns = [{**turn, **mark} if number == muted else turn for number, turn in enumerate(TWO_ANSWERS)]
    quiet = ready([{"messages": turns}], tokenizer, loss_on=loss_on).train[0]
    loud = ready([{"messages": TWO_ANSWERS}], tokenizer, loss_on=loss_on).train[0]
    answers = ready([{"messages": TWO_ANSWERS}], tokenizer).train[0]["labels"]
    first = len(ready([{"messages": TWO_ANSWERS[:2]}], tokenizer).train[0]["input_ids"])
    silent = [label != -100 and (place < first) == (muted == 1) for place, label in enumerate(answers)]
    assert quiet["input_ids"] == loud["input_ids"]
    assert quiet["labels"] == [-100 if mute else label for mute, label in zip(silent, loud["labels"])]
    assert any(silent)


def test_a_muted_answer_needs_a_mark_of_its_own(ready, tokenizer_of):
    apart = "m['content'] }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}"
    twice = MARKED.replace("m['content'] + '<|im_end|>' }}", apart)
    tokenizer = tokenizer_of(twice)
    assert learned(tokenizer, ready([{"messages": TWO_ANSWERS}], tokenizer).train[0]) == "sat<|im_end|>on the mat<|im_end|>"
    muted = [TWO_ANSWERS[0], {**TWO_ANSWERS[1], "weight": 0}, *TWO_ANSWERS[2:]]
    with pytest.raises(UserError, match=r"rows.jsonl:1: mutes an answer; its 2 answers have 4 .* marks"):
        ready([{"messages": muted}], tokenizer)


DATED = (
    "{{ strftime_now('%d %b %Y') }}{{ strftime_now(' %-d/%-m %F') }}"
    "{% set kind = '%Y-%m-%d' %}{{ ' ' + strftime_now(kind) + '\n' }}" + CHATML
)


def test_the_date_of_a_template_belongs_to_the_prepared_rows(ready, tokenizer_of):
    rows, tokenizer = [{"messages": TWO_ANSWERS}], tokenizer_of(DATED)
    first = ready(rows, tokenizer, day="2026-02-03")
    assert tokenizer.decode(first.train[0]["input_ids"]).startswith(
        "03 Feb 2026 3/2 2026-02-03 2026-02-03\n<|im_start|>user"
    )
    assert first.report.day == "2026-02-03"
    assert "2026-02-03" in str(first.report)
    assert ready(rows, tokenizer, day="2026-02-03").report.cached
    today = ready(rows, tokenizer)
    assert not today.report.cached, "rows of another day are not used"
    assert today.report.day == date.today().isoformat()
    assert today.report.digest != first.report.digest
    undated = ready(rows, tokenizer_of(CHATML), day="2026-02-03")
    assert undated.report.day == ""
    assert ready(rows, tokenizer_of(CHATML)).report.cached, "a day that no template writes makes no difference"


def test_a_date_leaves_the_marks_of_a_template_in_their_places(ready, tokenizer_of):
    tokenizer = tokenizer_of("\n{{ strftime_now('%Y') }}" + MARKED)
    sample = ready([{"messages": TWO_ANSWERS}], tokenizer, day="2026-02-03").train[0]
    assert tokenizer.decode(sample["input_ids"]).startswith("\n2026<|im_start|>")
    assert learned(tokenizer, sample) == "sat<|im_end|>on the mat<|im_end|>"


def test_marks_at_the_edge_of_a_byte_sequence(tokenizer_of):
    tokenizer = tokenizer_of(MARKED)
    turns = [{"role": "user", "content": "the é"}, {"role": "assistant", "content": "sat 猫"}]
    bare = MARKED.replace("m['content'] + '<|im_end|>' }}{% endgen", "m['content'] }}{% endgen")
    tokenizer.chat_template = bare
    rendered = Template.of(tokenizer).conversation(read_row({"messages": turns}, "messages"))
    said = [token for start, stop in rendered.answers for token in rendered.ids[start:stop]]
    assert tokenizer.decode(said) == "sat 猫", "every byte of the last character is the answer's"


def test_a_token_across_the_edge_of_a_mark_is_the_answers(tokenizer_of):
    template = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    turns = ({"role": "assistant", "content": "sat"},)
    rendered = Template.of(tokenizer).conversation(Conversation(turns))
    said = [tokenizer.decode(rendered.ids[start:stop]) for start, stop in rendered.answers]
    assert said == [" sat"]
    official = tokenizer.apply_chat_template(list(turns), return_assistant_tokens_mask=True, return_dict=True)
    assert [at for at, mark in enumerate(official["assistant_masks"]) if mark] == [rendered.answers[0][0]]


@pytest.mark.parametrize("code", ["messages.append(1)", "''.__class__.__mro__[1].__subclasses__()"])
def test_a_template_runs_in_the_sandbox_and_its_errors_name_it(tokenizer_of, code):
    turns = ({"role": "user", "content": "the"}, {"role": "assistant", "content": "sat"})
    with pytest.raises((UserError, BadRowError), match=r"the chat template of .* refuses it"):
        Template.of(tokenizer_of("{{ " + code + " }}")).conversation(Conversation(turns))
