"""Every file of a folder is read or named, compressed ones too; bytes are not taken for text."""

import bz2
import gzip
import json
import lzma

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ftkit.data.build_once import RefusedError
from ftkit.data.files import files_of
from ftkit.data.prepare import Source, prepare
from ftkit.errors import UserError
from tests.tiny import make_tokenizer

LINES = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)).encode()
LIST = json.dumps([{"text": f"row {n}"} for n in range(20)]).encode()
CSV = b"text\n" + b"".join(b"row %d\n" % n for n in range(20))
PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}
ROWS = [f"row {n}" for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def texts(path):
    return [json.loads(row.record)["text"] for row in Source(path=path).rows()]


@pytest.mark.parametrize(
    ("packed", "name", "content"),
    [(".gz", "a.jsonl", LINES), (".bz2", "a.json", LIST), (".xz", "a.csv", CSV), (".zst", "A.TSV", CSV)],
)
def test_a_compressed_file_is_read_as_a_plain_one(tmp_path, packed, name, content):
    path = tmp_path / f"{name}{packed}"
    path.write_bytes(PACKERS[packed](content))
    assert texts(path) == ROWS
    assert texts(tmp_path) == ROWS
    path.write_bytes(PACKERS[packed](content)[:-9])
    with pytest.raises(UserError, match=r"(?i)a\.\w+\.\w+: cannot be read"):
        texts(path)


def test_arrow_files_are_read(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ROWS})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert texts(tmp_path / "saved") == ROWS
    assert files_of(tmp_path / "saved").passed_over == ("dataset_info.json", "state.json")
    datasets.load_from_disk(str(tmp_path / "saved")).map(lambda row: {"text": "made"})  # leaves a cache beside it
    (cache,) = (tmp_path / "saved").glob("cache-*.arrow")
    assert texts(tmp_path / "saved") == ROWS
    assert cache.name in files_of(tmp_path / "saved").passed_over
    table = pyarrow.table({"text": ROWS})
    for name, new in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with new(str(path), table.schema) as sink:
            sink.write_table(table)
        assert texts(path) == ROWS
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
        with pytest.raises(UserError, match="cannot be read as Arrow"):
            texts(path)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UserError, match=r"holds the splits train, test; name the folder of one: .*splits/train"):
        texts(tmp_path / "splits")


def test_every_file_of_a_folder_is_read_or_named(tmp_path, tokenizer):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(LINES)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "the first"}\n'))
    (folder / "c.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_text('[{"text": "the last"}]')
    for name in (".hidden.jsonl", "README.md", "LICENSE", ".cache"):
        (folder / name).write_bytes(LINES)
    assert texts(folder) == ["the first", *ROWS, "the last"]
    report = str(prepare(folder, tokenizer, cache_dir=tmp_path / "cache", workers=1).report)
    assert "3 files: a.jsonl.gz, b.jsonl, c.json" in report
    assert "not read: .cache, .hidden.jsonl, LICENSE, README.md" in report


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bytes_are_not_taken_for_text(tmp_path, tokenizer, suffix):
    path = tmp_path / f"rows{suffix}"
    table = pyarrow.table({"text": pyarrow.array([b"a b", b"c \xff"])})
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as sink:
            sink.write_table(table)
    with pytest.raises(RefusedError, match=r"row 1: `text` must be text; found bytes: write the column as text \(UTF-8\)"):
        prepare(path, tokenizer, cache_dir=tmp_path / "cache", workers=1)


def test_a_file_with_another_suffix_is_read_anew(tmp_path, tokenizer):
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / "a.csv"
    file.write_text("text\n" + "".join(f"a row, number {n}\n" for n in range(9)))
    settings = {"sequence_tokens": 32, "cache_dir": tmp_path / "cache", "workers": 1}
    with pytest.raises(RefusedError, match=r"a\.csv:2: has 2 fields where the header has 1"):
        prepare(tmp_path / "rows", tokenizer, **settings)
    file.rename(file.with_suffix(".tsv"))
    assert prepare(tmp_path / "rows", tokenizer, **settings).report.rows == 9
