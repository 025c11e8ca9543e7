"""Prepared data: samples, counts, held-out rows, several sources, and the cache."""

import itertools
import subprocess
import sys
from importlib import metadata

import filelock
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from ftkit.config.recipe import Data, Eval, Source
from ftkit.data.batches import Collator
from ftkit.data.prepare import build_once
from ftkit.data.samples import ROWS_PER_WORKER
from ftkit.data.tokenize import edges_of
from ftkit.errors import UserError
from tests.data.templates import CHATML, TWO_ANSWERS, texts
from tests.worlds import PATIENCE


def test_truncation_is_counted(ready, tokenizer_of):
    rows = [{"prompt": "the cat", "completion": " sat" + " on" * count} for count in (1, 5, 9)]
    prepared = ready(rows, tokenizer_of(), sequence_tokens=6)
    lengths = [len(sample["input_ids"]) for sample in prepared.train]
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
    assert [len(sample["input_ids"]) for sample in parts.train] == [4, 4, 3, 3, 2]
    assert (parts.report.rows, parts.report.samples, parts.report.cut_tokens) == (2, 5, 0)
    assert (parts.report.split_rows, parts.report.split_samples) == (2, 5)
    assert all(sample["labels"][0] == -100 for sample in parts.train)


def test_sequence_to_sequence(ready, tokenizer_of):
    tokenizer = tokenizer_of()
    rows = [{"question": "the cat", "answer": "sat on the mat"}, {"question": "the" + " dog" * 9, "answer": "sat"}]
    prepared = ready(rows, tokenizer, task="seq2seq", sequence_tokens=6)
    first, second = prepared.train
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
    asked = ready([{"messages": TWO_ANSWERS}], tokenizer_of(CHATML), task="seq2seq").train[0]
    assert tokenizer.decode(asked["input_ids"]).endswith("the dog<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(asked["labels"]) == "on the mat</s>"
    with pytest.raises(UserError, match=r"plain text has no question and answer"):
        ready([{"text": "the cat"}], tokenizer, task="seq2seq")


def test_several_sources(ready, write, tokenizer_of):
    one = str(write([{"text": "the cat"}] * 6, "one.jsonl"))
    two = str(write([{"prompt": "the dog", "completion": " sat"}] * 2, "two.jsonl"))
    plain = ready([Source(path=one), Source(path=two)], tokenizer_of())
    assert plain.train["source"][:] == [0] * 6 + [1] * 2
    assert [source.format for source in plain.report.sources] == ["text", "prompt"]
    assert sorted(plain.order(seed=1)) == list(range(8))
    mixed = ready([Source(path=one, weight=1), Source(path=two, weight=1)], tokenizer_of())
    assert mixed.weights == (1, 1)
    assert sum(number >= 6 for number in mixed.order(seed=1)) == 4
    with pytest.raises(ValueError, match=r"a weight for all `sources` or for none"):
        Data(sources=(Source(path=one, weight=1), Source(path=two)))


@pytest.mark.parametrize("packing", [False, True])
def test_a_share_of_the_rows_is_held_out_before_packing(ready, tokenizer_of, packing):
    rows = [{"text": f"the {number} " + "cat " * number} for number in range(20)] * 2 + [{"text": "on the mat " * 30}]
    tokenizer = tokenizer_of()

    def parts(seed, share=0.1):
        prepared = ready(rows, tokenizer, packing=packing, seed=seed, sequence_tokens=50, held_out=Eval(share=share))
        held_out = set(prepared.held_out["place"])
        trained = {place for places in prepared.train["place"] for place in places.split("; ")}
        assert trained.isdisjoint(held_out)
        assert len(trained | held_out) == 41
        assert "position_ids" not in prepared.held_out.column_names, "each held-out row has a loss of its own"
        return prepared, trained, held_out

    prepared, trained, held_out = parts(seed=4)
    text_of = {f"{place}": row["text"] for place, row in zip(places_of(prepared), rows)}
    assert {text_of[place] for place in trained}.isdisjoint({text_of[place] for place in held_out}), "no text is in both"
    assert len({text_of[place] for place in held_out}) == 2
    assert prepared.report.samples == 40 + 2
    assert parts(seed=4)[2] == held_out
    assert any(parts(seed=seed)[2] != held_out for seed in (5, 6, 7))
    assert len({text_of[place] for place in parts(4, share=0.001)[2]}) == 1
    assert len({text_of[place] for place in parts(4, share=0.999)[1]}) == 1
    with pytest.raises(UserError, match=r"eval.share: .* needed: 2 different rows"):
        ready([{"text": "the cat"}] * 3, tokenizer, held_out=Eval(share=0.5))


def places_of(prepared):
    label = prepared.report.sources[0].label
    return [f"{label}:{number}" for number in range(1, 42)]


def test_held_out_rows_of_another_file(ready, write, tokenizer_of):
    other = write([{"text": "the cat"}, {"text": "the dog"}, {"text": "on the mat"}], "other.jsonl")
    prepared = ready([{"text": "the cat"}], tokenizer_of(), packing=True, held_out=Eval(path=str(other), max_rows=2))
    assert (len(prepared.held_out), prepared.held_out_report.samples) == (2, 3)
    assert "position_ids" in prepared.train.column_names
    assert "position_ids" not in prepared.held_out.column_names
    assert "1 of 3 held-out" in str(prepared.overlap[0])
    assert "overlap" in {each.kind for each in prepared.warnings(tokenizer_of())}
    share = ready([{"text": f"the {n}"} for n in range(9)], tokenizer_of(), held_out=Eval(share=0.5, max_rows=1))
    assert (len(share.train), len(share.held_out)) == (8, 1), "rows that are not measured are trained on"
    long = [{"text": f"the {n}" + " cat" * 200} for n in range(10)]
    share = ready(long, tokenizer_of(), held_out=Eval(share=0.5, max_rows=3))
    assert len(set(share.held_out["place"])) == 3, "all of a row is measured"
    assert len({*share.held_out["place"], *share.train["place"]}) == 10
    split = write([{"text": "on the mat" + " on" * 90}, {"text": "the cat"}], "split.jsonl")
    [warned] = ready([{"text": "the cat"}], tokenizer_of(), held_out=Eval(path=str(split))).overlap
    assert warned.places == (f"{split}:2",), "the long text before it is two samples"


def test_the_cache_is_named_by_content_tokenizer_and_settings(ready, monkeypatch, tokenizer_of):
    rows = [{"prompt": "the cat", "completion": "sat"}]
    first = ready(rows, tokenizer_of())
    assert not first.report.cached
    again = ready(rows, tokenizer_of())
    assert again.report.cached
    assert again.train[:] == first.train[:]
    assert str(again.report) == str(first.report)
    padded = tokenizer_of(pad_token="</s>")
    padded(["the", "the cat"], padding="max_length", max_length=9, truncation=True)
    ready(rows, tokenizer_of(pad_token="</s>"))
    assert ready(rows, padded).report.cached, "padding set by a call must not count"
    assert not ready(rows, tokenizer_of(CHATML)).report.cached
    assert not ready(rows, tokenizer_of(bos=True)).report.cached
    assert not ready(rows, tokenizer_of(), loss_on="all").report.cached
    assert not ready(rows, tokenizer_of(), sequence_tokens=63).report.cached
    assert ready(rows, tokenizer_of(), seed=5).report.cached
    monkeypatch.setattr(metadata, "version", lambda name: "another")
    assert not ready(rows, tokenizer_of()).report.cached, "another version of ftkit prepares the rows again"
    monkeypatch.undo()
    assert not ready([{"prompt": "the dog", "completion": "sat"}], tokenizer_of()).report.cached


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
        raise UserError("row 3")

    for _ in range(2):
        with pytest.raises(UserError, match=r"row 3"):
            build_once(tmp_path / "a" / "bad", fail)
    assert len(calls) == 3, "the rows may have been corrected"
    assert not list((tmp_path / "a").glob("bad*/"))
    (tmp_path / "plain").write_text("")
    with pytest.raises(UserError, match=r"cannot be written"):
        build_once(tmp_path / "plain" / "folder", build)


def test_many_rows_in_parallel_are_the_same_as_in_one_process(ready, write, tokenizer_of):
    numbers = range(2 * ROWS_PER_WORKER)
    path = write([{"prompt": f"the cat {number}", "completion": " sat" * (number % 7 + 1)} for number in numbers])
    settings = {"sequence_tokens": 32, "packing": True}
    one = ready(path, tokenizer_of(), workers=1, **settings).train[:]
    two = ready(path.rename(path.with_name("b.jsonl")), tokenizer_of(), workers=2, **settings).train[:]
    assert [place.replace("b.jsonl", path.name) for place in two["place"]] == one["place"]
    assert {**one, "place": None} == {**two, "place": None}


@pytest.mark.slow
def test_processes_that_start_at_once_prepare_once(write, tmp_path, tokenizer_of):
    tokenizer_of(CHATML).save_pretrained(tmp_path / "tokenizer")
    path = write([{"messages": TWO_ANSWERS}] * 400)
    program = f"""
import transformers
from ftkit.config.recipe import Data
from ftkit.data.prepare import prepare
tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r})
prepared = prepare(Data(path={str(path)!r}, cache_dir={str(tmp_path / "cache")!r}, workers=1), tokenizer)
print(prepared.report.cached, len(prepared.train))
"""
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60 * PATIENCE) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert sorted(output.split() for output, _ in outputs) == [["False", "400"], ["True", "400"]]
    folders = [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]
    assert len(folders) == 1


def test_each_sample_knows_where_it_stands(ready, write, tokenizer_of):
    path = write([{"prompt": f"the cat {number}", "completion": " sat"} for number in range(5)])
    alone = ready(path, tokenizer_of(), sequence_tokens=32).train
    assert alone["place"][:] == [f"{path}:{line}" for line in range(1, 6)]
    packed = ready(path, tokenizer_of(), sequence_tokens=32, packing=True).train
    assert sorted(place for joined in packed["place"][:] for place in joined.split("; ")) == alone["place"][:]


@pytest.mark.parametrize("most", [3, 4, 7])
def test_no_token_of_a_split_text_is_lost(most):
    for tokens in range(2, 5 * most):
        edges = edges_of(tokens, most)
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        assert edges[0] == 0
        assert edges[-1] == tokens
        assert max(sizes) <= most
        assert min(sizes) >= 2
        assert len(sizes) <= tokens // most + 1


@pytest.mark.parametrize("words", [6, 7, 8, 14, 15, 22, 79])
@pytest.mark.parametrize("packing", [False, True])
def test_long_text_is_split_by_default(ready, tokenizer_of, words, packing):
    tokenizer, text = tokenizer_of(), "the" + " cat" * (words - 1)
    prepared = ready([{"text": text}, {"text": "the dog"}], tokenizer, sequence_tokens=8, packing=packing)
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    count = sum(map(len, prepared.train["input_ids"]))
    assert count == len(whole) + 3
    if not packing:
        assert list(itertools.chain.from_iterable(prepared.train["input_ids"][:-1])) == whole
    assert prepared.report.cut_tokens == 0
    long = len(whole) > 8
    assert prepared.report.split_rows == int(long)
    assert ("1 text longer than a sequence: split into" in str(prepared.report)) == long


def test_long_text_may_stop_the_run(ready, tokenizer_of):
    rows = [{"text": "the"}, {"text": "the" + " cat" * 40}]
    with pytest.raises(UserError, match=r"1 of 2 rows .*\n.*rows.jsonl:2: has 42 tokens, and data.sequence_tokens is 8"):
        ready(rows, tokenizer_of(), long_text="stop", sequence_tokens=8)
    assert ready(rows[:1], tokenizer_of(), long_text="stop", sequence_tokens=8).report.samples == 1


def test_answers_that_the_template_leaves_out_stop_the_run(ready, tokenizer_of):
    with pytest.raises(UserError, match=r"rows.jsonl: every sample has an answer with nothing but its end .*rows.jsonl:1\)"):
        ready([{"messages": TWO_ANSWERS}], tokenizer_of(CHATML.replace("m['content']", "''")))


def test_rows_that_are_equal_once_they_are_cut_are_on_one_side(ready, tokenizer_of):
    rows = [{"prompt": "the cat", "completion": " sat" * 9 + f" {number}"} for number in range(20)]
    rows += [{"prompt": f"the cat {number}", "completion": " sat" * 9} for number in range(3)]
    prepared = ready(rows, tokenizer_of(), sequence_tokens=6, held_out=Eval(share=0.3))
    held_out, trained = (set(map(tuple, part["input_ids"][:])) for part in (prepared.held_out, prepared.train))
    assert held_out.isdisjoint(trained)
    assert prepared.report.duplicates.rows == 19


def test_a_worker_that_refuses_the_template_ends_the_rank(tmp_path, write, tokenizer_of):
    """Workers of a rank must not take SIGTERM for a request to end the run: their pool would never end."""
    template = CHATML.replace("assistant\n", "assistant\n(think)")
    tokenizer_of(template).save_pretrained(tmp_path / "tokenizer")
    path = write([{"messages": TWO_ANSWERS}] * (2 * ROWS_PER_WORKER))
    program = f"""
import transformers
from ftkit.config.recipe import Data
from ftkit.data.prepare import prepare
from ftkit.launch.ranks import Stop
Stop().listen()
tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r})
prepare(Data(path={str(path)!r}, cache_dir={str(tmp_path / "cache")!r}, workers=2), tokenizer)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert "asks for turn 2 differently" in ended.stderr
    assert ended.returncode != 0


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("weight", [None, 1])
def test_a_share_may_hold_out_all_rows_of_a_source(ready, write, tokenizer_of, packing, weight):
    files = [write([{"text": f"{count} {n}"} for n in range(count)], f"{count}.jsonl") for count in (3, 1)]
    sources = [Source(path=str(file), weight=weight) for file in files]
    for seed in range(9):
        prepared = ready(sources, tokenizer_of(), seed=seed, packing=packing, held_out=Eval(share=0.25))
        if str(files[1]) in prepared.held_out["place"][0]:
            break
    assert set(prepared.train["source"][:]) == {0}
    assert sorted(prepared.order(seed=1)) == list(range(len(prepared.train)))
