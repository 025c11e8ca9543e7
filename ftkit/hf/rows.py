"""Rows of a data set, each with the place it came from.

A source is a local file (JSONL, JSON, CSV, TSV, Parquet), a folder of such files, or a data set of the hub. Whatever it
is, it becomes one stream of `Row`s: where the row stands, and the row as JSON text. JSON text, because rows of one file
need not agree on their types, and because a line that is not JSON must still be counted, named and (if the user said
so) skipped; an Arrow schema guessed from the first rows can do neither. Lines of JSONL pass through unparsed: they are
parsed later, by many processes.

Refused: compressed files, other formats, data sets that bring code. The cost: rows of CSV, Parquet and of the hub are
written as JSON once, and a `.json` file is read whole.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from ftkit.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
CSV_FIELD_CHARACTERS = 1 << 30


@dataclass(frozen=True)
class Row:
    """One row of a source, not yet understood.

    Args:
        place: where it stands, for messages: `file:line`, or `file, row n` where a row is not a line (n counts from 1)
        record: the row as JSON text; empty when `problem` is set
        problem: why the row cannot be read at all, or ""
    """

    place: str
    record: str
    problem: str = ""


@dataclass(frozen=True)
class Source:
    """One data set: what to read, and as what.

    Args:
        path: a file or a folder of files (.jsonl, .json, .csv, .tsv, .parquet)
        name: a data set of the hub, `owner/set` or `owner/set:configuration`; exactly one of path and name is given
        split: the split of a hub data set; a local path has only `train`
        weight: share of the drawn samples relative to the other sources' weights; None where no source has one
        format: auto | messages | sharegpt | alpaca | prompt | text
    """

    path: str | Path | None = None
    name: str | None = None
    split: str = "train"
    weight: float | None = None
    format: str = "auto"

    def __post_init__(self):
        if (self.path is None) == (self.name is None):
            raise UserError(f"a data source needs one of `path` (a file) and `name` (a hub data set); found {self}")
        if self.path is not None and self.split != "train":
            raise UserError(
                f"{self.path}: `split: {self.split}` is for hub data sets; a local file is one split. "
                "Remove it, or hold rows out with eval.share."
            )
        if self.weight is not None and not self.weight > 0:
            raise UserError(f"{self.label}: the weight must be above 0; found {self.weight}")

    @property
    def label(self) -> str:
        """The source in a message."""
        return str(self.path) if self.path is not None else f"{self.name} ({self.split})"

    def digest(self) -> str:
        """Return a hash of the content, so that a cache entry can be named by it (reads local files once)."""
        if self.path is None:
            return digest_of_hub(load_hub(self))
        return hashlib.sha256("".join(digest_of_file(file) for file in files_of(self)).encode()).hexdigest()

    def rows(self) -> Iterator[Row]:
        """Yield the rows in their order.

        Raises:
            UserError: a file that is missing, of an unknown kind, or broken as a whole
        """
        if self.path is None:
            for number, record in enumerate(load_hub(self), 1):
                yield Row(f"{self.label}, row {number}", as_json(record))
            return
        readers = {".jsonl": jsonl_rows, ".json": json_rows, ".parquet": parquet_rows}
        for file in files_of(self):
            try:
                yield from readers.get(file.suffix.lower(), csv_rows)(file)
            except OSError as error:
                raise UserError(f"{file}: cannot be read: {error}") from error


def files_of(source: Source) -> list[Path]:
    """List the files of a local source, in the order of their names.

    Raises:
        UserError: nothing there, or nothing that can be read
    """
    path = Path(source.path)
    if not path.exists():
        raise UserError(f"{path}: no such file (looked in {Path.cwd()}). Correct data.path.")
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not found or found[0].suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: expected {', '.join(SUFFIXES)}; found {path.suffix or 'no such file in the folder'}.")
    return found


def digest_of_file(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def load_hub(source: Source) -> datasets.Dataset:
    """Load a data set of the hub, from the local cache where it lies there; HF_HUB_OFFLINE and HF_HOME are respected.

    Raises:
        UserError: not found, not reachable, no such split or configuration, or one that would need its own code
    """
    name, _, configuration = str(source.name).partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UserError(
            f"data set {source.name}, split {source.split}: {error}\n"
            "A configuration is given as `name: owner/set:configuration`; local files as `path`."
        ) from error


def digest_of_hub(dataset: datasets.Dataset) -> str:
    """Return a hash of a loaded hub data set: its cached files carry the revision in their names."""
    files = sorted((file["filename"], Path(file["filename"]).stat().st_size) for file in dataset.cache_files)
    return hashlib.sha256(repr((files, dataset.num_rows, str(dataset.split))).encode()).hexdigest()


def as_json(record: object) -> str:
    """Write a row as JSON text; values that JSON lacks (dates, images) become their text."""
    return json.dumps(record, default=str)


def jsonl_rows(file: Path) -> Iterator[Row]:
    """Yield the lines of a JSONL file, unparsed; empty lines are passed over and still counted."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                yield Row(place, line.decode().strip())
            except UnicodeDecodeError as error:
                yield Row(place, "", f"is not UTF-8 at byte {error.start + 1} of the line")


def json_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list, an object that holds one list, or lines of objects as in JSONL.

    Raises:
        UserError: broken JSON, with its line and column, or JSON that holds no list of rows
    """
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 at byte {error.start + 1}") from error
    except RecursionError as error:
        raise UserError(f"{file}: is nested too deeply to be a list of rows") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.doc.lstrip().startswith("{"):
            yield from jsonl_rows(file)
            return
        raise UserError(f"{file}:{error.lineno}: broken JSON: {error.msg} (column {error.colno})") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 and len(content) == 1 else [content]
    if not isinstance(content, list):
        raise UserError(f"{file}: expected a list of rows; found {type(content).__name__}")
    for number, record in enumerate(content, 1):
        yield Row(f"{file}, row {number}", as_json(record))


def csv_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file; every value stays text (an answer `007` is not the number 7).

    Raises:
        UserError: no header, or text that is not UTF-8
    """
    csv.field_size_limit(CSV_FIELD_CHARACTERS)
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    with open(file, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        header, start = None, 1
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise UserError(f"{file}: is not UTF-8, after line {reader.line_num}: {error.reason}") from error
            except csv.Error as error:
                raise UserError(f"{file}:{start}: broken CSV: {error}") from error
            place, start = f"{file}:{start}", reader.line_num + 1
            if header is None:
                header = values
            elif values and len(values) != len(header):
                yield Row(place, "", f"has {len(values)} fields where the header has {len(header)}")
            elif values:
                yield Row(place, as_json(dict(zip(header, values))))


def parquet_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a thousand in memory at a time.

    Raises:
        UserError: not a Parquet file, or a damaged one
    """
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1000):
                for record in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}, row {number}", as_json(record))
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: cannot be read as Parquet, after row {number}: {error}") from error
