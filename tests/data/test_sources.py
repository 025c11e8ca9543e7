"""Files, folders and hub data sets: each row with its place, and errors that name file and line."""

import bz2
import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ftkit.config.recipe import Eval, Source
from ftkit.data.sources import digest, rows
from ftkit.errors import UserError
from tests.data.templates import CHATML, TWO_ANSWERS


def test_csv_values_stay_text(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffquestion,answer\n"the\ncat",007\nnan,NA\n', encoding="utf-8")
    tokenizer = tokenizer_of()
    samples = ready(path, tokenizer).train
    assert [tokenizer.decode(sample["input_ids"]) for sample in samples] == ["the\ncat\n007</s>", "nan\nNA</s>"]
    path.write_text("question,answer\na,b\n\nc\nd,e,f\n")
    with pytest.raises(UserError, match=r"rows.csv: cannot be read: .*Expected 2 fields in line 5, saw 3"):
        ready(path, tokenizer)
    path.write_text("question,answer\na,b\nc\n")
    with pytest.raises(UserError, match=r"rows.csv, row 2: `answer` is empty"):
        ready(path, tokenizer)
    path.rename(tsv := tmp_path / "rows.tsv")
    tsv.write_text("question\tanswer\nthe cat\tsat, on\n")
    assert tokenizer.decode(ready(tsv, tokenizer).train[0]["input_ids"]) == "the cat\nsat, on</s>"


def test_parquet_with_nested_turns(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.parquet"
    turns = [[*TWO_ANSWERS[:1], {**TWO_ANSWERS[1], "name": "x"}], TWO_ANSWERS[:1]]
    datasets.Dataset.from_dict({"messages": turns}).to_parquet(str(path))
    with pytest.raises(UserError, match=r"rows.parquet, row 2: `messages` has no assistant turn"):
        ready(path, tokenizer_of(CHATML))
    assert ready(path, tokenizer_of(CHATML), on_bad_row="skip").report.samples == 1
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rows.parquet: cannot be read: "):
        ready(path, tokenizer_of(CHATML))


def test_json_lists_lines_and_faults(ready, tmp_path, tokenizer_of):
    rows = [{"text": "the cat"}, {"text": "the dog"}, {"text": ""}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
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
        with pytest.raises(UserError, match=r"rows.jsonl: has no rows"):
            ready(empty, tokenizer)
    with pytest.raises(ValueError, match=r"no such file or folder: .*absent.jsonl"):
        ready(tmp_path / "absent.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"found .jsonl.lz4; needed: .jsonl"):
        ready(write([], "rows.jsonl.lz4"), tokenizer)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "the cat"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"latin.jsonl:2: is not UTF-8 at byte 14 of the line"):
        ready(latin, tokenizer)
    latin.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"latin.jsonl:1: is not UTF-8"):
        ready(latin, tokenizer)


def test_folders_and_hub_names(ready, tmp_path, tokenizer_of, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    for name, text in (("b.jsonl", "the dog"), ("a.jsonl", "the cat")):
        (folder / name).write_text(json.dumps({"text": text}))
    (folder / "README.md").write_text("words")
    tokenizer = tokenizer_of()
    decoded = [tokenizer.decode(sample["input_ids"]) for sample in ready(folder, tokenizer).train]
    assert decoded == ["the cat</s>", "the dog</s>"]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    source = Source(name=str(folder))
    prepared = ready(source, tokenizer)
    assert prepared.report.samples == 2
    assert not prepared.report.cached
    assert ready(source, tokenizer).report.cached
    (folder / "a.jsonl").rename(folder / "train.jsonl")  # which `datasets` takes for a split
    (folder / "b.jsonl").rename(folder / "test.jsonl")
    held_out = Eval(name=str(folder), split="test")
    apart = ready(source, tokenizer, held_out=held_out)
    assert [tokenizer.decode(ids) for ids in apart.held_out["input_ids"]] == ["the dog</s>"]
    with pytest.raises(UserError, match="local files as `path`"):
        ready(Source(name=str(folder / "test.jsonl")), tokenizer)
    with pytest.raises(UserError, match="Unknown split"):
        ready(Source(name=str(folder), split="other"), tokenizer)


LINES = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)).encode()
LIST = json.dumps([{"text": f"row {n}"} for n in range(20)]).encode()
ROWS = [f"row {n}" for n in range(20)]
COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}


def read(path):
    return [json.loads(row.record)["text"] for row in rows(Source(path=str(path)))]


@pytest.mark.parametrize(("suffix", "content"), [(".gz", LINES), (".bz2", LIST), (".zst", LINES)])
def test_a_compressed_file_is_read_as_a_plain_one(tmp_path, suffix, content):
    path = tmp_path / f"a.{'json' if content == LIST else 'jsonl'}{suffix}"
    path.write_bytes(COMPRESSORS[suffix](content))
    assert read(path) == read(tmp_path) == ROWS
    path.write_bytes(COMPRESSORS[suffix](content)[:-9])
    with pytest.raises(UserError, match=r"a\.\w+\.\w+: cannot be read"):
        read(path)


def test_arrow_files_are_read(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ROWS})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert read(tmp_path / "saved") == ROWS
    before = digest(Source(path=str(tmp_path / "saved")))
    datasets.Dataset.from_dict({"text": ROWS[:5]}).save_to_disk(str(tmp_path / "other"))
    assert digest(Source(path=str(tmp_path / "other"))) != before
    path = tmp_path / "stream.arrow"
    with pyarrow.ipc.new_stream(str(path), pyarrow.schema([("text", pyarrow.string())])) as sink:
        sink.write_table(pyarrow.table({"text": ROWS}))
    assert read(path) == ROWS
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UserError, match=r"several splits; name the folder of one"):
        read(tmp_path / "splits")


def test_bytes_are_not_taken_for_text(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.parquet"
    days = pyarrow.array([1, 2], pyarrow.date32())
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([b"a b", b"c \xff"]), "day": days}), path)
    with pytest.raises(UserError, match=r"row 1: `text` must be text; found {'not JSON': 'bytes'}"):
        ready(path, tokenizer_of())
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "day": days}), path)
    assert ready(path, tokenizer_of()).report.sources[0].unused == ("day",)


def test_a_row_with_more_fields_than_the_header_does_not_shift_the_columns(ready, tmp_path, tokenizer_of):
    path = tmp_path / "rows.csv"
    path.write_text("text\nHello, world\nGood, bye\n")
    with pytest.raises(UserError, match=r"rows.csv:2: has 2 fields, and the header 1; put text that contains ',' in quotes"):
        ready(path, tokenizer_of())


def test_the_name_of_a_file_is_no_pattern(tmp_path):
    for name, text in (("data1.csv", "other"), ("data[1].csv", "own")):
        (tmp_path / name).write_text(f"text\n{text}\n")
    assert read(tmp_path / "data[1].csv") == ["own"]
