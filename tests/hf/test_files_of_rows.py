"""Every file of a folder is read or named, compressed ones too; what is not text is not taken for text."""

import bz2
import gzip
import json
import lzma
import os
import socket
from contextlib import nullcontext

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ftkit.config.recipe import Show
from ftkit.data.build_once import RefusedError
from ftkit.data.files import files_of
from ftkit.data.prepared import Source, prepare
from ftkit.errors import UserError
from ftkit.train.questions import questions
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


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(("name", "content"), [("a.jsonl", LINES), ("a.json", LIST), ("a.csv", CSV), ("A.TSV", CSV)])
def test_a_compressed_file_is_read_as_a_plain_one(tmp_path, packed, name, content):
    path = tmp_path / f"{name}{packed}"
    path.write_bytes(PACKERS[packed](content))
    assert texts(path) == ROWS
    assert texts(tmp_path) == ROWS
    path.write_bytes(PACKERS[packed](content)[:-9])
    with pytest.raises(UserError, match=r"(?i)a\.\w+\.\w+: cannot be read"):
        texts(path)


def test_several_compressed_members_are_all_read(tmp_path):
    for packed, pack in PACKERS.items():
        path = tmp_path / f"a.jsonl{packed}"
        path.write_bytes(pack(LINES[: LINES.index(b"\n") + 1]) + pack(LINES[LINES.index(b"\n") + 1 :]))
        assert texts(path) == ROWS, packed


@pytest.mark.parametrize("packed", PACKERS)
def test_what_follows_a_compressed_member_is_read_or_stops(tmp_path, packed):
    path, pack, cut = tmp_path / f"a.jsonl{packed}", PACKERS[packed], LINES.index(b"\n") + 1
    first, second = pack(LINES[:cut]), pack(LINES[cut:])
    damaged = second[:1] + bytes([second[1] ^ 255]) + second[2:]
    for after in (LINES[cut:], damaged, second[: len(second) // 2], b"x"):
        path.write_bytes(first + after)
        with pytest.raises(UserError, match=r"a\.jsonl\.\w+: cannot be read"):
            texts(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read") if packed in (".bz2", ".xz") else nullcontext():
        texts(path)


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz"])
def test_zeros_between_and_after_compressed_members_are_padding(tmp_path, packed):
    path, pack, cut = tmp_path / f"a.jsonl{packed}", PACKERS[packed], LINES.index(b"\n") + 1
    path.write_bytes(pack(LINES[:cut]) + bytes(8) + pack(LINES[cut:]) + bytes(200_000))
    assert texts(path) == ROWS


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


def fifo(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as here:
        os.chdir(path.parent)  # the name of a socket is short
        here.bind(path.name)


NOT_READ = {
    "part.txt": (lambda path: path.write_bytes(LINES), 'one {"text": "…"} a line'),
    "rows.parquet.gz": (lambda path: path.write_bytes(LINES), "Convert it"),
    "rows.jsonl.lz4": (lambda path: path.write_bytes(LINES), "Convert it"),
    "rows.zip": (lambda path: path.write_bytes(LINES), "Unpack it first"),
    "rows": (lambda path: path.write_bytes(LINES), "give it the suffix of its real format"),
    "test": (lambda path: path.mkdir(), "is a folder"),
    "more.jsonl": (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which cannot be read"),
    "loop.jsonl": (lambda path: path.symlink_to("loop.jsonl"), "is a link to loop.jsonl"),
    "pipe.jsonl": (fifo, "is a FIFO"),
    "socket.jsonl": (listening, "is a socket"),
    "null.jsonl": (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_file_that_cannot_be_read_stops_and_is_named(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    make, reason = NOT_READ[name]
    make(tmp_path / name)
    with pytest.raises(UserError) as stop:
        texts(tmp_path)
    assert f"  {name}: " in str(stop.value)
    assert reason in str(stop.value)
    if name == "test":
        return
    with pytest.raises(UserError) as stop:
        texts(tmp_path / name)
    assert name in str(stop.value)


def test_a_pipe_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"pipe.jsonl: is a FIFO; .* write them to a file"):
        Source(path=tmp_path / "pipe.jsonl").digest()
    with pytest.raises(UserError, match=r"pipe.jsonl: is a FIFO"):
        questions(Show(path=str(tmp_path / "pipe.jsonl")))


TEXT, BYTES = pyarrow.array(["a b", "c d"]), pyarrow.array([b"a b", b"c \xff"])
BINARY = {
    "binary": BYTES,
    "large": BYTES.cast(pyarrow.large_binary()),
    "fixed": BYTES.cast(pyarrow.binary(3)),
    "dictionary": BYTES.dictionary_encode(),
}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bytes_are_not_taken_for_text(tmp_path, tokenizer, kind, suffix):
    def write(columns):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}{suffix}"
        table = pyarrow.table(columns)
        if suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as sink:
                sink.write_table(table)
        return path

    def refused(columns, **settings):
        with pytest.raises(RefusedError) as stop:
            prepare(write(columns), tokenizer, cache_dir=tmp_path / "cache", workers=1, **settings)
        return str(stop.value)

    told = refused({"text": BINARY[kind]})
    assert "row 1: `text` must be text; found bytes: write the column as text (UTF-8)" in told
    assert "found bytes" in refused({"text": BINARY[kind]}, on_bad_row="skip")
    assert "  image: 2 rows, the first " in refused({"text": TEXT, "image": BINARY[kind]})
    if kind != "binary":
        return
    asked = pyarrow.array(["q", "q"])
    roles = [pyarrow.array([role] * 2) for role in ("user", "assistant")]
    turns = pyarrow.StructArray.from_arrays([roles[1], BYTES], ["role", "content"])
    nested = pyarrow.ListArray.from_arrays([0, 1, 2], turns)
    assert "the assistant content of `messages`, turn 1 must be text; found bytes" in refused({"messages": nested})
    named = pyarrow.StructArray.from_arrays([roles[1], asked, BYTES], ["role", "content", "picture"])
    nested = pyarrow.ListArray.from_arrays([0, 1, 2], named)
    assert "has a `picture` that is neither text nor" in refused({"messages": nested})


def test_dates_are_not_taken_for_text(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([1, 2], pyarrow.timestamp("s"))}), path)
    with pytest.raises(RefusedError, match="`text` must be text; found datetime"):
        prepare(path, tokenizer, cache_dir=tmp_path / "cache", workers=1)


@pytest.mark.parametrize(
    "header", ["question,answer,answer", "question, answer,answer", "answer,question,question ", "question,,", ",question, "]
)
def test_a_header_that_names_a_column_twice_stops(tmp_path, tokenizer, header):
    path = tmp_path / "rows.csv"
    path.write_text(f"\n{header}\na,b,c\n")
    with pytest.raises(UserError, match=r"rows.csv:2: the header names '(question|answer|)' twice"):
        prepare(path, tokenizer, cache_dir=tmp_path / "cache", workers=1)


def test_a_table_that_names_a_column_twice_stops(tmp_path):
    twice = pyarrow.Table.from_arrays([TEXT, TEXT], names=["text", "text"])
    path = tmp_path / "rows.arrow"
    with pyarrow.ipc.new_stream(str(path), twice.schema) as sink:
        sink.write_table(twice)
    with pytest.raises(UserError, match=r"rows.arrow: has the column 'text' twice"):
        list(Source(path=path).rows())
    inner = pyarrow.StructArray.from_arrays([TEXT, TEXT], ["role", "role"])
    nested = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1, 2], inner)})
    with pyarrow.ipc.new_stream(str(path), nested.schema) as sink:
        sink.write_table(nested)
    with pytest.raises(UserError, match=r"rows.arrow, messages: has the column 'role' twice"):
        list(Source(path=path).rows())


def test_a_table_with_two_columns_without_a_name_stops(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([TEXT, TEXT, TEXT], names=["text", "", ""]), path)
    with pytest.raises(UserError, match=r"rows.parquet: has the column '' twice"):
        list(Source(path=path).rows())


UNREADABLE = {
    "no UTF-8": pyarrow.StringArray.from_buffers(2, *BYTES.buffers()[1:], BYTES.buffers()[0]),
    "the year 146138": pyarrow.array([0, 1 << 62], pyarrow.timestamp("us")),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_values_of_a_table_that_cannot_be_read_stop(tmp_path, kind, suffix):
    path = tmp_path / f"rows{suffix}"
    table = pyarrow.table({"text": UNREADABLE[kind]})
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as sink:
            sink.write_table(table)
    with pytest.raises(UserError, match=rf"rows{suffix}: cannot be read as (Parquet|Arrow), after row 0: "):
        list(Source(path=path).rows())


def test_a_number_of_too_many_digits_stops(tmp_path, tokenizer):
    for name, text in (("a.json", '[{"text": "a", "n": %s}]'), ("a.jsonl", '{"text": "a", "n": %s}')):
        path = tmp_path / name
        path.write_text(text % ("1" * 5000))
        with pytest.raises(UserError, match=rf"{name}.*broken JSON: Exceeds the limit"):
            prepare(path, tokenizer, cache_dir=tmp_path / "cache", workers=1)


@pytest.mark.parametrize("row", [r'{"text": "a", "x\ud83d": 1}', r'{"text": "a", "x": {"\udc00": 1}}'])
def test_a_key_that_no_utf8_holds_stops_with_its_row(tmp_path, tokenizer, row):
    good = '{"text": "b", "x\U0001f600": 1}'
    settings = {"cache_dir": tmp_path / "cache", "workers": 1, "ignore_columns": ["x\U0001f600"]}
    for name, text in (("a.jsonl", f"{good}\n{row}\n"), ("a.json", f"[{good}, {row}]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(RefusedError, match=r"a.json(l:|, row )2: has the key '.*ud.*', which is not valid Unicode"):
            prepare(tmp_path / name, tokenizer, **settings)
        assert prepare(tmp_path / name, tokenizer, on_bad_row="skip", **settings).report.bad_rows == 1


def test_a_file_with_a_name_that_is_no_utf8_stops(tmp_path, tokenizer):
    path = tmp_path / os.fsdecode(b"rows\xff.jsonl")
    path.write_text('{"text": "a"}\n')
    for named in (path, tmp_path):
        with pytest.raises(UserError, match=r"rows\\udcff.jsonl: has a name that is not UTF-8; rename it"):
            prepare(named, tokenizer, cache_dir=tmp_path / "cache", workers=1)


def test_files_of_a_folder_without_a_row_are_named(tmp_path, tokenizer):
    folder = tmp_path / "set"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXT}).slice(0, 0), folder / "e.parquet")
    for name, content in (("a.jsonl", LINES), ("b.jsonl", b"\n"), ("c.csv", b"text\n"), ("d.json", b"[]")):
        (folder / name).write_bytes(content)
    for _ in range(2):
        report = str(prepare(folder, tokenizer, cache_dir=tmp_path / "cache", workers=1).report)
        assert "  without a row: b.jsonl, c.csv, d.json, e.parquet\n" in report


def test_a_file_with_another_suffix_is_read_anew(tmp_path, tokenizer):
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / "a.csv"
    file.write_text("text\n" + "".join(f"a row, number {n}\n" for n in range(9)))
    settings = {"sequence_tokens": 32, "cache_dir": tmp_path / "cache", "workers": 1}
    with pytest.raises(RefusedError, match=r"a\.csv:2: has 2 fields where the header has 1"):
        prepare(tmp_path / "rows", tokenizer, **settings)
    file.rename(file.with_suffix(".tsv"))
    assert prepare(tmp_path / "rows", tokenizer, **settings).report.rows == 9
