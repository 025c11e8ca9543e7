"""`ftkit data`, its page and its notebook object: rows as the model gets them, warnings, refusals, hostile rows."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

import ftkit
from ftkit.cli import app as cli
from ftkit.config.recipe import load
from ftkit.data.faults import Marks
from ftkit.data.prepare import split
from ftkit.data.preview import pieces_of, row_at, sample_of
from ftkit.errors import UserError
from ftkit.train.build import build_model
from ftkit.train.dry_run import dry_run
from tests.tiny import TEMPLATE, make_base, make_tokenizer

HOSTILE = "<script>alert(1)</script>\x1b[31m\x07\u202e&amp;' onload=\"x"
RECIPE = """\
model: {{name: {model}}}
data: {{path: {data}, sequence_tokens: {room}, cache_dir: {cache}, packing: {packing}}}
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
    """Return a way to write rows and a recipe for them."""

    def write(rows, template=TEMPLATE, packing=False, room=32):
        if template != TEMPLATE:
            make_tokenizer(base, template)
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = tmp_path / "recipe.yaml"
        places = {"model": base, "data": data, "cache": tmp_path / "cache", "out": tmp_path / "out"}
        path.write_text(RECIPE.format(**places, room=room, batch=4 * room, packing=str(packing).lower()))
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
    assert "all of 2 rows were looked at: no warnings" in text
    assert "rows.jsonl:1: 22 tokens, 12 trained on" in text
    page = Tags(found.page())
    assert page.marked == "trained on" + "two⏎\nof them<end>" + "four<end>"


def test_packed_samples_are_apart_and_named(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two"), chat("2+2?", "four")], packing=True, room=64))
    text = printed(found)
    assert re.search(r"1 of 2 packed, \S+rows.jsonl:[12]: 1\d tokens", text)
    assert re.search(r"2 of 2 packed, \S+rows.jsonl:[12]: 1\d tokens", text)
    assert "tokens of room left" in text
    assert "packed into 1 sequence" in text
    assert found.page().count('class="edge"') == 3


def test_a_row_with_a_fault_is_shown_though_it_is_not_among_the_first(recipe):
    rows = [chat(f"{n}+1?", str(n + 1)) for n in range(9)]
    rows[7] = chat("why <pad>?", "to fill")
    for packing in (False, True):
        found = ftkit.preview(recipe(rows, packing=packing), rows=1)
        text = printed(found)
        assert "warning: 1 of 9 samples have the text of a special token" in text
        assert "special in text" in text
        assert "rows.jsonl:8: " in text
        assert "⚠" in found.page()


def test_truncation_is_told_and_drawn(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two"), chat("2+2?", "four " * 20)]))
    text = printed(found)
    assert "1 sample truncated: " in text
    assert "beyond sequence_tokens" in text
    assert "answer cut" in text
    assert "sequence_tokens: 32" in found.page()


def test_hostile_rows_stay_text(recipe, tmp_path):
    found = ftkit.preview(recipe([chat(HOSTILE, HOSTILE), chat("2+2?", "four")], room=512))
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


def test_where_nothing_is_trained_on_rows_are_shown_and_the_run_is_refused(recipe, capsys):
    rows = [chat("1+1?", "two"), chat("2+2?", "four")]
    for row in rows:
        row["messages"][-1]["weight"] = 0
    path = recipe(rows)
    with pytest.raises(SystemExit) as left:
        cli.main(["data", str(path), "--page", str(path.with_suffix(".html"))])
    assert left.value.code == 2
    said = capsys.readouterr().out
    assert "a run would not begin with these data: 2 of 2 rows cannot be used:" in said
    assert "rows.jsonl:1: has nothing to learn in its 14 tokens" in said
    assert "<begin>Q:1+1?<end>A:two<end>" in said
    assert "⟦" not in said.partition("read only")[2]
    assert "A run would not begin" in path.with_suffix(".html").read_text()
    with pytest.raises(UserError, match=r"rows.jsonl:1: has nothing to learn"):
        dry_run(load(str(path)), 1)


def test_rows_that_cannot_be_read_are_told_beside_those_that_can(recipe):
    found = ftkit.preview(recipe([chat("1+1?", ""), {"messages": 3}, chat("2+2?", "four")]))
    assert "2 of 3 rows cannot be used" in found.refused
    assert "rows.jsonl:2: `messages` must be a list" in found.refused
    text = printed(found)
    assert "A:⟦four<end>⟧" in text
    assert "warning: 2 of 3 rows cannot be used and are left out" in text
    alone = ftkit.preview(recipe([chat("1+1?", ""), {"messages": 3}]))
    assert alone.report is None
    assert "`messages` must be a list" in printed(alone)
    assert "A run would not begin" in alone._repr_html_()


def test_finetune_tells_the_same_warnings_before_the_first_step(recipe, capsys):
    path = recipe([chat(f"{n}+1?", str(n)) for n in range(7)] + [chat("why <pad>?", "to fill")])
    [fault] = ftkit.preview(path).faults
    dry_run(load(str(path)), 1)
    assert f"warning: {fault}" in capsys.readouterr().out


def test_generation_stops_where_the_run_s_model_stops(recipe, base, tmp_path):
    template = TEMPLATE.replace("+ eos_token }}{% endgeneration", "+ '<pad>' }}{% endgeneration")
    rows = [chat("1+1?", "two"), chat("2+2?", "four")]
    says = base / "generation_config.json"
    config = json.loads((base / "config.json").read_text())
    before = says.read_text()
    assert [fault.kind for fault in ftkit.preview(recipe(rows, template)).faults] == ["other_end"]
    try:
        says.unlink()
        (base / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 0]}))
        path = recipe(rows, template)
        assert ftkit.preview(path).faults == ()
        stops = build_model(load(str(path))).generation_config.eos_token_id
        assert stops == [2, 0]
    finally:
        says.write_text(before)
        (base / "config.json").write_text(json.dumps(config))


def test_the_held_out_file_is_looked_at_as_well(recipe, tmp_path, capsys):
    path = recipe([chat(f"{n}+1?", str(n)) for n in range(8)])
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in (chat("3+1?", "3"), chat("why <pad>?", "to fill"))))
    found = ftkit.preview(path, settings=[f"eval.path={held}"])
    assert [fault.text.split(" samples")[0] for fault in found.faults] == ["held out: 1 of 2", "1 of 2 held-out"]
    assert "held.jsonl:1" in found.faults[1].places[0]
    assert "held out: " in printed(found)


def test_an_encoder_decoder_gets_question_and_answer_apart(recipe):
    found = ftkit.preview(recipe([chat("1+1?", "two"), chat("2+2?", "")]), settings=["task=seq2seq"])
    text = printed(found)
    assert "<begin>Q:1+1?<end>A:\n" in text
    assert "── the answer: 4 tokens, 4 trained on\n⟦two<end>⟧" in text
    assert "rows.jsonl:2: the assistant content of `messages`, turn 2 is empty" in found.refused
    alone = ftkit.preview(recipe([chat("2+2?", "")]), settings=["task=seq2seq"])
    assert "is empty" in printed(alone)


def test_pieces_are_whole_characters_and_keep_their_blanks(tmp_path):
    marks = Marks.of(make_tokenizer(tmp_path))
    ids = marks.tokenizer("<begin>a é 漢 b<end>")["input_ids"]
    pieces = list(pieces_of(marks, ids, [False] * 3 + [True] * (len(ids) - 3)))
    assert "".join(piece.text for piece in pieces) == "<begin>a é 漢 b<end>"
    assert sum(piece.tokens for piece in pieces) == len(ids)
    assert [piece.text for piece in pieces if piece.special] == ["<begin>", "<end>"]
    assert {"é", "漢"} <= {piece.text for piece in pieces}
    broken = list(pieces_of(marks, ids[:7], [True] * 7))
    assert sum(piece.tokens for piece in broken) == 7


def test_long_samples_are_shown_at_both_ends(tmp_path):
    marks = Marks.of(make_tokenizer(tmp_path))
    sample = sample_of(marks, marks.tokenizer("x" * 900 + "y" * 100)["input_ids"], None, "rows:1", most=100)
    assert (sample.tokens, sample.hidden_tokens) == (1000, 900)
    assert "".join(piece.text for piece in sample.pieces) == "x" * 75 + "y" * 25
    assert sample.hidden_at == 75


def test_a_row_is_found_among_those_that_are_not_held_out(recipe):
    import datasets

    places = ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3, a.jsonl:4", "a.jsonl:5"]
    kept = datasets.Dataset.from_dict({"place": places}).select([2, 3, 0])
    found = [row_at(kept, place) for place in ("a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "a.jsonl:5")]
    assert found == [2, None, 0, 1]
    parts = split(datasets.Dataset.from_dict({"number": range(9)}), 0.5, 17)
    for part, shows in zip(parts, (1, 0)):  # the faulty row is trained on, and not the first; it is held out
        number = part[len(part) - 1]["number"]
        rows = [chat("why <pad>?", "to fill") if n == number else chat(f"{n}+1?", str(n)) for n in range(9)]
        shown = ftkit.preview(recipe(rows), settings=["eval.share=0.5", "train.seed=17"], rows=0).shown
        expected = [f"rows.jsonl:{number + 1}"] * shows
        assert [sample.place.rpartition("/")[2] for each in shown for sample in each.samples] == expected
