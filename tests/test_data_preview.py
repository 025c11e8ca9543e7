"""`ftkit data`, its page and its notebook object: rows as the model gets them, warnings, refusals, untrusted text."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

import ftkit
from ftkit.cli import app as cli
from ftkit.config.recipe import load
from ftkit.data.preview import pieces_of, row_at, sample_of
from ftkit.data.report import Checks
from ftkit.errors import UserError
from ftkit.train.planning import model_of
from ftkit.train.run import dry_run
from tests.tiny import TEMPLATE, make_base, make_tokenizer

HOSTILE = "<script>alert(1)</script>\x1b[31m\x07\u202e&amp;' onload=\"x"
RECIPE = """\
model: {{name: {model}}}
data: {{path: {data}, sequence_tokens: {tokens}, cache_dir: {cache}, packing: {packing}}}
train: {{batch_tokens: {batch}}}
output: {{dir: {out}}}
"""


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def recipe(tmp_path, base):
    """Return a function that writes rows and a recipe for them."""

    def write(rows, template=TEMPLATE, packing=False, tokens=32):
        if template != TEMPLATE:
            make_tokenizer(base, template)
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "recipe.yaml"
        places = {"model": base, "data": data, "cache": tmp_path / "cache", "out": tmp_path / "out"}
        path.write_text(RECIPE.format(**places, tokens=tokens, batch=4 * tokens, packing=str(packing).lower()))
        return path

    yield write
    make_tokenizer(base)


def printed(found, width=200):
    console = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False)
    found.show(console)
    return console.file.getvalue()


class Tags(HTMLParser):
    """What elements and texts a page has."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.marked, self.open = [], [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "mark" in self.open:
            self.marked += data


def test_rows_are_shown_as_they_are_trained_on(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two\nof them"), chat("2+2?", "four")]))
    text = printed(found)
    assert "<begin>Q:1+1?<end>A:⟦two\nof them<end>⟧" in text
    assert "2 samples, " in text
    assert "all of 2 rows were checked: no warnings" in text
    assert "rows.jsonl:1: 22 tokens, 12 trained on" in text
    page = Tags(found.page())
    assert page.marked == "trained on" + "two⏎\nof them<end>" + "four<end>"


def test_packed_samples_are_apart_and_named(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two"), chat("2+2?", "four")], packing=True, tokens=64))
    text = printed(found)
    assert re.search(r"1 of 2 packed, \S+rows.jsonl:[12]: 1\d tokens", text)
    assert re.search(r"2 of 2 packed, \S+rows.jsonl:[12]: 1\d tokens", text)
    assert "tokens not filled" in text
    assert "packed into 1 sequence" in text
    assert found.page().count('class="edge"') == 3


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_with_a_warning_is_shown_though_it_is_not_among_the_first(recipe, packing):
    rows = [chat(f"{n}+1?", str(n + 1)) for n in range(9)]
    rows[7] = chat("9+1?", "ten " * 20)
    found = ftkit.preview(recipe(rows, packing=packing), rows=1)
    text = printed(found)
    assert "warning: 1 of 9 samples have an answer cut off" in text
    assert re.search(r"\w+ \d of \d · answer cut\n", text)
    assert "rows.jsonl:8: " in text
    assert "⚠" in found.page()


def test_truncation_is_shown(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two"), chat("2+2?", "four " * 20)]))
    text = printed(found)
    assert "1 sample truncated: " in text
    assert "beyond sequence_tokens" in text
    assert "answer cut" in text
    assert "before it is cut at 32" in found.page()


def test_hostile_rows_stay_text(recipe, tmp_path):
    found = ftkit.preview(recipe([chat(HOSTILE, HOSTILE), chat("2+2?", "four")], tokens=512))
    text = printed(found)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "␛[31m␇\\u202e" in text
    for page in (found.page(), found._repr_html_()):
        tags = Tags(page)
        assert not {"script", "img", "iframe", "object", "a"} & set(tags.tags)
        assert not [name for name, _ in tags.attributes if name.startswith("on")]
        assert "&lt;script&gt;alert(1)" in page.replace("</mark><mark>", "").replace("</span><span>", "")
        assert not set(page) & {"\x1b", "\x07", "\u202e"}
        assert not re.search(r"(src|href)=\"(?!data:)", page)
        assert "@import" not in page
        assert "url(" not in page


def test_rows_that_a_run_refuses_are_named_and_the_command_ends_with_2(recipe, capsys):
    rows = [chat("1+1?", "two"), chat("2+2?", "four")]
    for row in rows:
        row["messages"][-1]["weight"] = 0
    path = recipe(rows)
    with pytest.raises(SystemExit) as left:
        cli.main(["data", str(path), "--out", str(path.with_suffix(".html"))])
    assert left.value.code == 2
    said = capsys.readouterr().out
    assert "a run would refuse these data: 2 of 2 rows cannot be used:" in said
    assert "rows.jsonl:1: has nothing to learn in its 14 tokens" in said
    page = path.with_suffix(".html").read_text()
    assert "A run would refuse these data." in page
    assert "rows.jsonl:1: has nothing to learn" in page
    with pytest.raises(UserError, match=r"rows.jsonl:1: has nothing to learn"):
        dry_run(load(str(path)), 1)


def test_usable_rows_are_shown_beside_the_refusal_of_others(recipe):
    path = recipe([chat("1+1?", ""), {"messages": 3}, chat("2+2?", "four")])
    found = ftkit.preview(path)
    assert "2 of 3 rows cannot be used" in found.refused
    assert "rows.jsonl:2: `messages` must be a list" in found.refused
    text = printed(found)
    assert "A:⟦four<end>⟧" in text
    assert "warning: 2 of 3 rows cannot be used and are skipped" in text
    assert ftkit.preview(path, settings=["data.on_bad_row=skip"]).refused == ""
    alone = ftkit.preview(recipe([chat("1+1?", ""), {"messages": 3}]))
    assert (alone.report, alone.shown) == (None, ())
    assert "`messages` must be a list" in printed(alone)
    assert "A run would refuse" in alone._repr_html_()
    assert "a run would refuse" in repr(alone)


def test_a_missing_file_is_a_refusal_and_a_wrong_recipe_an_error(recipe):
    path = recipe([chat("1+1?", "two")])
    assert "recipe.yaml" in repr(ftkit.preview(path))
    with pytest.raises(UserError, match="sequence_token"):
        ftkit.preview(path, settings=["data.sequence_token=3"])
    path.with_name("rows.jsonl").write_text("")
    assert "rows.jsonl" in ftkit.preview(path).refused


def test_finetune_prints_the_same_warnings_before_the_first_step(recipe, capsys):
    path = recipe([chat(f"{n}+1?", str(n)) for n in range(7)] + [chat("9+1?", "ten " * 20)])
    [warned] = ftkit.preview(path).warnings
    dry_run(load(str(path)), 1)
    assert f"warning: {warned}" in capsys.readouterr().out


def test_generation_stops_where_the_run_s_model_stops(recipe, base, tmp_path):
    template = TEMPLATE.replace("+ eos_token }}{% endgeneration", "+ '<pad>' }}{% endgeneration")
    rows = [chat("1+1?", "two"), chat("2+2?", "four")]
    says = base / "generation_config.json"
    config = json.loads((base / "config.json").read_text())
    before = says.read_text()
    assert [warned.kind for warned in ftkit.preview(recipe(rows, template)).warnings] == ["other_end"]
    try:
        says.unlink()
        (base / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 0]}))
        path = recipe(rows, template)
        assert ftkit.preview(path).warnings == ()
        stops = model_of(load(str(path)), weights=True).generation_config.eos_token_id
        assert stops == [2, 0]
    finally:
        says.write_text(before)
        (base / "config.json").write_text(json.dumps(config))


def test_held_out_rows_are_checked_too(recipe, tmp_path):
    path = recipe([chat(f"{n}+1?", str(n)) for n in range(8)])
    other = tmp_path / "held-out.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in (chat("3+1?", "3"), chat("9+1?", "ten " * 20))))
    found = ftkit.preview(path, settings=[f"eval.path={other}"])
    assert [warned.text.split(" samples")[0] for warned in found.warnings] == ["held-out rows: 1 of 2", "1 of 2 held-out"]
    assert "held-out.jsonl:1" in found.warnings[1].places[0]
    assert found.held_out.rows == 2
    assert f"held-out rows: {other}: 2 rows" in printed(found)
    assert ftkit.preview(path, settings=["eval.share=0.5"]).held_out is None


def test_an_encoder_decoder_gets_question_and_answer_apart(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two"), chat("2+2?", "")]), settings=["task=seq2seq"])
    text = printed(found)
    assert "<begin>Q:1+1?<end>A:\n" in text
    assert "── the answer: 4 tokens, 4 trained on\n⟦two<end>⟧" in text
    assert "rows.jsonl:2: the assistant content of `messages`, turn 2 is empty" in found.refused


def test_unused_columns_and_the_day_are_shown(recipe):
    found = ftkit.preview(recipe([{**chat("1+1?", "two"), "<id>": 7}, chat("2+2?", "four")]))
    assert found.report.day == ""
    dated = replace(found, report=replace(found.report, day="2026-11-28"))
    assert "rows.jsonl: not read: <id>\ndate in the prompt: 2026-11-28\n" in printed(dated)
    for page in (dated.page(), dated._repr_html_()):
        assert "rows.jsonl: not read: &lt;id&gt;</p>" in page
        assert "date in the prompt: 2026-11-28</p>" in page


def test_pieces_are_whole_characters_and_keep_their_blanks(tmp_path):
    checks = Checks.of(make_tokenizer(tmp_path))
    ids = checks.tokenizer("<begin>a é 漢 b<end>")["input_ids"]
    pieces = list(pieces_of(checks, ids, [False] * 3 + [True] * (len(ids) - 3)))
    assert "".join(piece.text for piece in pieces) == "<begin>a é 漢 b<end>"
    assert [piece.text for piece in pieces if piece.special] == ["<begin>", "<end>"]
    assert {"é", "漢"} <= {piece.text for piece in pieces}
    halved = list(pieces_of(checks, ids, [False] * 5 + [True] * (len(ids) - 5)))
    assert [piece.trained for piece in halved] == sorted(piece.trained for piece in halved)


def test_long_samples_are_shown_at_both_ends(tmp_path):
    checks = Checks.of(make_tokenizer(tmp_path))
    ids = checks.tokenizer("x" * 900 + "y" * 100)["input_ids"]
    sample = sample_of(checks, ids, [-100] * 990 + ids[990:], "rows:1", most=100)
    assert (sample.tokens, sample.trained_tokens) == (1000, 10)
    assert [piece.trained for piece in sample.pieces] == [False] * 91 + [True] * 10
    assert "".join(piece.text for piece in sample.pieces) == "x" * 75 + "… 900 tokens not shown …" + "y" * 25
    assert [piece.gap for piece in sample.pieces].index(True) == 75


def test_a_row_is_found_among_those_that_are_not_held_out(recipe):
    import datasets

    places = ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3; a.jsonl:4", "a.jsonl:5"]
    kept = datasets.Dataset.from_dict({"place": places}).select([2, 3, 0])
    found = [row_at(kept, place) for place in ("a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "a.jsonl:5")]
    assert found == [2, None, 0, 1]


def test_a_row_with_a_warning_is_shown_only_if_it_is_trained_on(recipe):
    rows = [chat(f"{n}+1?", str(n + 1)) for n in range(9)]
    rows[7] = chat("9+1?", "ten " * 20)
    path, cases = recipe(rows), set()
    for seed in range(4):
        settings = ["eval.share=0.5", f"train.seed={seed}"]
        first, everything = (ftkit.preview(path, settings=settings, rows=count).shown for count in (0, 9))
        trained = any(sample.place.endswith("rows.jsonl:8") for each in everything for sample in each.samples)
        assert len(first) == trained
        cases.add(trained)
    assert cases == {True, False}
