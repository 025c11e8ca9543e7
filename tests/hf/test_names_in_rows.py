"""Every column and key of a row is read, or named by `data.ignore_columns`, or stops the run."""

import json

import pytest

from ftkit.config.recipe import Show
from ftkit.data.build_once import RefusedError
from ftkit.data.formats import read_row
from ftkit.data.prepared import prepare
from ftkit.data.rendering import Rendering
from ftkit.errors import UserError
from ftkit.train.questions import questions
from ftkit.train.run_rows import prepare_rows
from tests.tiny import TEMPLATE, make_tokenizer

WITH_NAMES = TEMPLATE.replace("'Q:' +", "'Q' + (message.name or '') + ':' +")
WITH_TOOLS = "{%- for tool in tools or [] %}{{- tool.function.name }}{%- endfor %}" + TEMPLATE
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


ASKED = {"from": "human", "value": "a"}
GOOD = {"messages": TURNS}
UNREAD = {
    "a column": ({"messages": TURNS, "id": 7}, "id"),
    "a misspelled column": ({"messages": TURNS, "system_prompt": "be short"}, "system_prompt"),
    "zero says something": ({"messages": TURNS, "score": 0}, "score"),
    "a key of a turn": ({"messages": [{**USER, "name": "Ann"}, ANSWER]}, "messages.name"),
    "a mask that nobody knows": ({"messages": [USER, {**ANSWER, "loss": False}]}, "messages.loss"),
    "tool calls": ({"messages": [USER, {**ANSWER, "tool_calls": [TOOL]}]}, "messages.tool_calls"),
    "tools": ({"messages": TURNS, "tools": [TOOL]}, "tools"),
    "another format beside it": ({"messages": TURNS, "text": "more"}, "text"),
    "two words for one thing": ({"messages": [{**USER, "value": "2+2?"}, ANSWER]}, "messages.value"),
    "a part of a content": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}, ANSWER]},
        "messages.content.cache",
    ),
    "sharegpt": ({"conversations": [ASKED, {"from": "gpt", "value": "b", "x": 1}]}, "conversations.x"),
    "input and context": ({"instruction": "a", "input": "b", "context": "c", "output": "d"}, "context"),
    "output and response": ({"instruction": "a", "output": "c", "response": "d"}, "response"),
    "a rejected answer": ({"prompt": "a", "completion": "b", "rejected": "c"}, "rejected"),
    "a title beside text": ({"text": "some words", "title": "a title"}, "title"),
    "an index without a name": ({"text": "some words", "": 3}, ""),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", UNREAD)
def test_a_name_that_nobody_reads_stops(ready, case):
    bad, name = UNREAD[case]
    plain = {"messages": GOOD, "conversations": {"conversations": [ASKED, {"from": "gpt", "value": "2"}]}}
    plain |= {"instruction": {"instruction": "x", "output": "y"}, "prompt": {"prompt": "1", "completion": "2"}}
    good = next((row for column, row in plain.items() if column in bad), {"text": "the first row"})
    with pytest.raises(RefusedError) as stop:
        ready([good, good, bad])
    assert f"  {name or repr(name)}: 1 row, the first " in str(stop.value)
    assert "rows.jsonl:3" in str(stop.value)
    assert str(stop.value).endswith(f"data.ignore_columns: {json.dumps([name])}")
    with pytest.raises(RefusedError, match="would not be read"):
        ready([good, good, bad], on_bad_row="skip")
    accepted = ready([good, good, bad], ignore_columns=[name])
    assert accepted.report.sources[0].ignored[name].rows == 1
    assert "ignored: " in str(accepted.report)


def test_a_column_of_row_1000_alone_stops(ready):
    rows = [{"text": f"row {n} of them"} for n in range(1000)]
    rows[-1]["system"] = "be short"
    with pytest.raises(RefusedError, match=r"system: 1 row, the first .*rows.jsonl:1000"):
        ready(rows)


def test_columns_that_say_nothing_are_no_fault(ready):
    assert ready([{"messages": [{**USER, "name": None}, ANSWER], "id": None, "tags": [], "note": ""}]).report.samples == 1


def test_what_is_ignored_is_gone_before_the_template_sees_it(ready):
    named = [{**USER, "name": "Ann"}, ANSWER]
    assert tokens_of(ready([{"messages": named}], WITH_NAMES)) != tokens_of(ready([GOOD], WITH_NAMES))
    ignored = ready([{"messages": named}], WITH_NAMES, ignore_columns=["messages.name"])
    assert tokens_of(ignored) == tokens_of(ready([GOOD], WITH_NAMES))


READ_BY_THE_TEMPLATE = {
    "names": (WITH_NAMES, {"messages": [{**USER, "name": "Ann"}, ANSWER]}),
    "tools as JSON": (DUMPS_TOOLS, {"messages": TURNS, "tools": [TOOL]}),
    "tools as text": (DUMPS_TOOLS, {"messages": TURNS, "tools": json.dumps([TOOL])}),
    "reasoning": (REASONS, {"messages": [USER, {**ANSWER, "reasoning_content": "1+1 is 2"}]}),
    "reasoning by another name": (REASONS, {"messages": [USER, {**ANSWER, "thinking": "1+1 is 2"}]}),
}


@pytest.mark.parametrize("case", READ_BY_THE_TEMPLATE)
def test_what_the_template_reads_is_read(ready, case):
    template, row = READ_BY_THE_TEMPLATE[case]
    assert tokens_of(ready([row], template)) != tokens_of(ready([GOOD], template))


def test_a_key_that_the_template_reads_of_other_turns_only_stops(ready):
    branch = "{%- if message['role'] == 'assistant' %}"
    of_tools = TEMPLATE.replace(branch, "{%- if message.role == 'tool' %}{{- message.name }}{% endif %}" + branch)
    tool = {"role": "tool", "name": "now", "content": "noon"}
    ready([{"messages": [USER, tool, ANSWER]}], of_tools)
    with pytest.raises(RefusedError, match=r"messages.name: 1 row"):
        ready([{"messages": [{**USER, "name": "Ann"}, tool, ANSWER]}], of_tools)
    with pytest.raises(RefusedError, match=r"tools.function.description: 1 row"):
        ready([{"messages": TURNS, "tools": [TOOL]}], WITH_TOOLS)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("Id", "'id'"), ("idd", "'id'"), ("name", "'messages.name'"), ("message.name", "'messages.name'"), ("zzz", "The rows")],
)
def test_an_ignored_name_that_matches_nothing_stops(ready, name, meant):
    with pytest.raises(UserError, match=rf"data.ignore_columns: '{name}' is in no row. .*{meant}"):
        ready([{"messages": [{**USER, "name": None}, ANSWER], "id": None}], ignore_columns=[name])


def test_a_name_below_an_ignored_one_is_said_to_be_that(ready):
    rows = [{**GOOD, "meta": {"a": 1}}]
    with pytest.raises(UserError, match=r"'meta.a' lies below 'meta', which is left out whole; remove 'meta.a'"):
        ready(rows, ignore_columns=["meta", "meta.a"])


@pytest.mark.parametrize("ignored", [["Meta"], ["*"], ["meta.a"]])
def test_what_is_proposed_to_ignore_is_accepted(ready, ignored):
    rows = [{**GOOD, "meta": {"a": 1, "b": 2}}]
    with pytest.raises(RefusedError) as stop:
        ready(rows, ignore_columns=ignored)
    proposed = json.loads(str(stop.value).rpartition("data.ignore_columns: ")[2])
    assert ready(rows, ignore_columns=proposed).report.samples == 1


USERS_ONLY = TEMPLATE.replace("{%- else %}", "{%- elif message['role'] == 'user' %}")


@pytest.mark.parametrize("row", [GOOD, {"prompt": "a", "completion": "b"}])
def test_a_system_column_that_the_template_leaves_out_stops(ready, row):
    with pytest.raises(RefusedError, match=r"system: 1 row, the first .*\(the chat template leaves it out\)"):
        ready([row, {**row, "system": "be short"}], USERS_ONLY)
    assert ready([{**row, "system": "be short"}], USERS_ONLY, ignore_columns=["system"]).report.samples == 1
    assert ready([{**row, "system": "be short"}]).report.samples == 1


def test_a_tool_turn_that_the_template_leaves_out_is_told(ready):
    row = {"messages": [USER, ANSWER, {"role": "tool", "content": "noon"}, ANSWER]}
    assert ready([row], USERS_ONLY).report.sources[0].found["left_out"].rows == 1
    assert "left_out" not in ready([row]).report.sources[0].found


def test_an_ignored_name_may_be_in_the_held_out_file_alone(ready, tmp_path, tokenizers):
    from ftkit.config.recipe import Recipe

    for name, rows in (("train.jsonl", [GOOD]), ("held.jsonl", [{**GOOD, "id": 1}])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {
        "model": {"name": "a/b"},
        "data": {"path": str(tmp_path / "train.jsonl"), "cache_dir": str(tmp_path / "cache"), "workers": 1},
        "eval": {"path": str(tmp_path / "held.jsonl")},
        "output": {"dir": "x"},
    }
    with pytest.raises(UserError, match=r"id: 1 row, the first .*held.jsonl:1"):
        prepare_rows(Recipe.model_validate(facts), tokenizers(TEMPLATE))
    facts["data"]["ignore_columns"] = "id"
    prepare_rows(Recipe.model_validate(facts), tokenizers(TEMPLATE))
    facts["data"]["ignore_columns"] = ["id", "ids"]
    with pytest.raises(UserError, match=r"'ids' is in no row"):
        prepare_rows(Recipe.model_validate(facts), tokenizers(TEMPLATE))


EARLIER = [{"role": "user", "content": "0+1?"}, {"role": "assistant", "content": "one"}]
SYSTEM = {"role": "system", "content": "be short"}
SAME = {
    "system beside messages": ({"system": "be short", "messages": TURNS}, [SYSTEM, *TURNS]),
    "system twice, the same": ({"system": "be short", "messages": [SYSTEM, *TURNS]}, [SYSTEM, *TURNS]),
    "system beside conversations": (
        {"system": "be short", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "two"}]},
        [SYSTEM, *TURNS],
    ),
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


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "plain"])
@pytest.mark.parametrize("case", SAME)
def test_what_stands_beside_the_turns_is_read_as_turns(ready, case, template):
    row, turns = SAME[case]
    assert tokens_of(ready([row], template)) == tokens_of(ready([{"messages": turns}], template))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"system": "a", "messages": [SYSTEM, *TURNS]}, "another system turn"),
        ({"system": 7, "messages": TURNS}, "`system` must be text; found int"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "`history`, pair 1 must be a list of a question and"),
        ({"instruction": "a", "output": "b", "history": {"q": "a"}}, "`history` must be a list of pairs; found dict"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight 0.5; only 0 and 1"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "train 'no'; needed: true or false"),
        ({"messages": [USER, {**ANSWER, "train": True, "weight": 0}]}, "contradict each other"),
        ({"messages": [{**USER, "train": True}, ANSWER]}, "a user turn that is to be learned"),
        ({"messages": [{**USER, "role": "asistant"}, ANSWER]}, r"did you mean assistant\?"),
    ],
)
def test_what_cannot_be_read_so_is_a_bad_row(ready, row, reason):
    with pytest.raises(UserError, match=rf"rows.jsonl:1: .*{reason}"):
        ready([row])


TALK = [USER, ANSWER, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]


@pytest.mark.quick(6)
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


def test_columns_that_no_format_reads_are_named_with_the_nearest(ready):
    with pytest.raises(UserError, match=r"mesages \(did you mean `messages`\?\)"):
        ready([{"mesages": TURNS}])
    with pytest.raises(UserError, match=r"Text \(did you mean `text`\?\)"):
        ready([{"Text": "words"}])


def test_keys_given_twice_stop_with_file_and_line(ready, tmp_path, tokenizers):
    for twice in ('{"text": "a b", "text": "c d"}', '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}'):
        path = tmp_path / "twice.jsonl"
        path.write_text('{"text": "the first"}\n' + twice + "\n")
        with pytest.raises(UserError, match=r"twice.jsonl:2: has the key '(text|role)' twice in one object"):
            prepare(path, tokenizers(TEMPLATE), cache_dir=tmp_path / "cache", workers=1)
        whole = tmp_path / "twice.json"
        whole.write_text('[{"text": "the first"},\n' + twice + "]")
        with pytest.raises(UserError, match=r"twice.json, row 2: has the key '(text|role)' twice in one object"):
            prepare(whole, tokenizers(TEMPLATE), cache_dir=tmp_path / "cache", workers=1)
    (tmp_path / "twice.json").write_text('{"rows": [{"text": "a b"}], "rows": [{"text": "c d"}]}')
    with pytest.raises(UserError, match=r"twice.json: has the key 'rows' twice"):
        prepare(tmp_path / "twice.json", tokenizers(TEMPLATE), cache_dir=tmp_path / "cache", workers=1)
    tools = {"messages": TURNS, "tools": '[{"name": "f", "name": "g"}]'}
    with pytest.raises(UserError, match=r"rows.jsonl:1: `tools` has the key 'name' twice"):
        ready([tools], DUMPS_TOOLS)


def test_a_row_alone_is_read_as_before():
    read = read_row({"messages": [USER, {**ANSWER, "weight": 1, "train": None}]}, "messages")
    assert read.turns == (USER, ANSWER)
    assert read.muted == frozenset()


def test_the_reasoning_of_a_turn_is_read_under_each_of_its_names_or_stops(ready):
    reasons = {"reasoning_content": "because A", "reasoning": "because B", "thinking": "because C"}
    named = {f"messages.{key}" for key in reasons}

    def unread(template, *keys, **others):
        turns = [USER, {**ANSWER, **{key: reasons[key] for key in keys}, **others}]
        try:
            ready([{"messages": turns}], template)
        except RefusedError as error:
            return set(json.loads(str(error).rpartition("data.ignore_columns: ")[2]))
        return set()

    assert all(not unread(REASONS, key) for key in reasons)
    assert unread(REASONS, *reasons) == {"messages.reasoning", "messages.thinking"}
    assert unread(REASONS, "thinking", "reasoning") == {"messages.reasoning"}  # transformers hands the first over
    assert not unread(REASONS, "reasoning_content", thinking="because A")
    assert unread(REASONS.replace("reasoning_content", "thinking"), *reasons) == named - {"messages.thinking"}
    both = REASONS.replace("message.reasoning_content or ''", "message.reasoning_content + message.thinking")
    assert unread(both, *reasons) == {"messages.reasoning"}
    assert unread(TEMPLATE, *reasons) == named


def test_a_system_column_that_the_template_leaves_out_stops_for_an_encoder_and_decoder(ready):
    rows = [{"prompt": "a", "completion": "b", "system": "be short"}]
    with pytest.raises(RefusedError, match=r"system: 1 row, the first .*\(the chat template leaves it out\)"):
        ready(rows, USERS_ONLY, task="seq2seq")
    for template in (TEMPLATE, None):
        assert ready(rows, template, task="seq2seq").report.samples == 1


def test_answers_that_an_encoder_and_decoder_does_not_learn_are_told(ready, tokenizers):
    def told(turns, **settings):
        prepared = ready([{"messages": turns}], **settings)
        return [fault.text for fault in prepared.faults(tokenizers(TEMPLATE)) if fault.kind == "earlier_answers"]

    turns = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?"}, ANSWER]
    (text,) = told(turns, task="seq2seq")
    assert text.startswith("1 of 1 sample have answers before the last one")
    assert told(TURNS, task="seq2seq") == []
    assert told([USER, {**turns[1], "weight": 0}, *turns[2:]], task="seq2seq") == []
    assert told(turns) == []


def test_what_is_proposed_to_ignore_of_tools_that_are_text_is_accepted(ready):
    row = {"messages": TURNS, "tools": json.dumps([{**TOOL, "strict": True}])}
    with pytest.raises(RefusedError) as stop:
        ready([row], WITH_TOOLS)
    proposed = json.loads(str(stop.value).rpartition("data.ignore_columns: ")[2])
    assert proposed == ["tools.function.description", "tools.strict", "tools.type"]
    accepted = ready([row], WITH_TOOLS, ignore_columns=proposed)
    assert tokens_of(accepted) == tokens_of(ready([{**row, "tools": [{"function": {"name": "now"}}]}], WITH_TOOLS))
    broken = {"messages": TURNS, "tools": "[{"}
    assert ready([broken], ignore_columns=["tools"]).report.samples == 1


def test_an_ignored_name_may_be_in_a_skipped_row_alone(ready):
    rows = [GOOD, {"messages": [], "id": 7}]
    assert ready(rows, ignore_columns=["id"], on_bad_row="skip").report.bad_rows == 1
    with pytest.raises(UserError, match=r"'idd' is in no row. Did you mean 'id'"):
        ready(rows, ignore_columns=["idd"], on_bad_row="skip")


@pytest.mark.parametrize("row", ['{"messages": ', '{"messages": []}', '{"messages": [{"role": "user", "content": "a"}]}'])
def test_a_row_to_show_that_cannot_be_used_stops(tmp_path, row):
    path = tmp_path / "shown.jsonl"
    good = json.dumps(GOOD)
    path.write_text(f"{good}\n{row}\n{good}\n")
    assert len(questions(Show(path=str(path), count=1))) == 1
    assert len(questions(Show(path=str(path)), skip=True)) == 2
    with pytest.raises(UserError, match=r"show.path: .*shown.jsonl:2: "):
        questions(Show(path=str(path)))
    path.write_text(f"{row}\n")
    for skip in (False, True):
        with pytest.raises(UserError, match=r"shown.jsonl"):
            questions(Show(path=str(path)), skip=skip)


def test_what_a_row_to_show_is_asked_without_is_named(tmp_path):
    path = tmp_path / "shown.jsonl"
    rows = [GOOD, {**GOOD, "id": 1, "system": "be short"}, {**GOOD, "tools": [TOOL], "note": ""}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.unread for each in questions(Show(path=str(path)))] == [(), ("id",), ("tools",)]
    assert [each.unread for each in questions(Show(path=str(path)), ["id", "tools"])] == [(), (), ()]


def test_keys_of_turns_that_a_row_to_show_is_asked_without_are_named(tmp_path, tokenizers):
    path = tmp_path / "shown.jsonl"
    rows = [{"messages": [{**USER, "name": "Ann", "images": ["a.png"]}, {**ANSWER, "note": 1}]}, GOOD]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for template, unread in (
        (TEMPLATE, ("messages.name", "messages.images")),
        (WITH_NAMES, ("messages.images",)),
        (None, ("messages.name", "messages.images")),
    ):
        asked = questions(Show(path=str(path)), rendering=Rendering.of(tokenizers(template)))
        assert [each.unread for each in asked] == [unread, ()]
        assert asked[0].turns == ({**USER, **({"name": "Ann"} if "messages.name" not in unread else {})},)
    called = [USER, {"role": "assistant", "content": "", "tool_calls": [TOOL]}, *TURNS]
    path.write_text(json.dumps({"messages": called}) + "\n")
    with pytest.raises(UserError, match=r"shown.jsonl:1: the assistant content of `messages`, turn 2 is empty"):
        questions(Show(path=str(path)), rendering=Rendering.of(tokenizers(TEMPLATE)))


FIRST_CALL = TEMPLATE.replace(
    "{% generation %}", "{% generation %}{%- if message.tool_calls %}{{- message.tool_calls[0] | tojson }}{%- endif %}"
)
FIRST_TOOL = "{%- if tools %}{{- tools[0] | tojson }}{%- endif %}" + TEMPLATE
ALL_CALLS = FIRST_CALL.replace("tool_calls[0]", "tool_calls")
CALLS = {"messages": [USER, {**ANSWER, "tool_calls": [TOOL, TOOL]}]}
TOOLS = {"messages": TURNS, "tools": [TOOL, TOOL]}


@pytest.mark.parametrize(
    ("template", "row", "name"), [(FIRST_CALL, CALLS, "messages.tool_calls"), (FIRST_TOOL, TOOLS, "tools")]
)
def test_a_call_or_a_tool_that_the_template_passes_over_stops(ready, template, row, name):
    with pytest.raises(RefusedError, match=rf"rows.jsonl:2: has 2 `{name}`, and .* does not read number 2\."):
        ready([GOOD, row], template)
    assert ready([GOOD, row], template, on_bad_row="skip").report.bad_rows == 1


@pytest.mark.parametrize(("template", "row"), [(ALL_CALLS, CALLS), (DUMPS_TOOLS, TOOLS)])
def test_a_template_may_read_all_calls_and_tools(ready, template, row):
    assert ready([GOOD, row], template, sequence_tokens=400).report.samples == 2
