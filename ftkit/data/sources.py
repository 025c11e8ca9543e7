"""Rows of a data set, each with its place in the source.

A source (`ftkit.config.recipe.Source`) is a file, a folder of files or a hub data set. It becomes a stream of `Row`s: the
place of a row, and the row as JSON text. Text, because the rows of one file need not agree on their types, and because a
line that is not JSON must still be counted and named. JSONL and JSON are read here; `datasets` reads everything else.

Columns of Parquet and of the hub hold the union of all rows' keys: absent keys come out as nulls, which are dropped. A value
that JSON lacks (bytes, a date, an image) becomes an object that names its type, so that it is never taken for text.
"""

from __future__ import annotations

import codecs
import csv
import glob
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow
from datasets.exceptions import DatasetsError

from ftkit.config.recipe import Source
from ftkit.errors import UserError

JSON_LINES = (".jsonl", ".ndjson")
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
SUFFIXES = (*JSON_LINES, ".json", *TABLES)
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Suffixes of JSON files that are decompressed while they are read."""
READ_ERRORS = (OSError, ValueError, pyarrow.ArrowException, DatasetsError)
"""Errors that damaged files raise while they are read."""


@dataclass(frozen=True)
class Row:
    """One row of a source, not yet parsed."""

    place: str  # `file:line`, or `file, row n` where a row is not a line (n counts from 1)
    record: str  # the row as JSON text


def rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source in their order.

    Raises:
        UserError: A file is missing, of an unknown kind or damaged; or the hub data set cannot be loaded.
    """
    loaded = _load(source)
    if loaded is not None:
        yield from _numbered(source.label, loaded)
        return
    for file in files_of(Path(source.label)):
        try:
            yield from _rows_of(file)
        except UserError:
            raise
        except READ_ERRORS as error:
            raise UserError(f"{file}: cannot be read: {error}") from error


def digest(source: Source) -> str:
    """Return a hash of a source's content, by which prepared rows are found again.

    Cost: reads local files once, those of a hub data set in the cache of `datasets`.
    """
    loaded = _load(source)
    files = files_of(Path(source.label)) if loaded is None else [Path(file["filename"]) for file in loaded.cache_files]
    content = hashlib.sha256()
    for file in files:
        content.update(f"\0{file.name}\0".encode())
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
    return content.hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return a file, or the data files of a folder by name; hidden files and subfolders are not read."""
    needed = f"{', '.join(SUFFIXES)}, the JSON files also with {', '.join(COMPRESSED)}"
    if path.is_dir():
        found = [each for each in sorted(path.iterdir()) if each.is_file() and _kind(each) and not each.name.startswith(".")]
        if not found:
            raise UserError(f"{path}: has no data file; needed: {needed}")
        return found
    if not _kind(path):
        raise UserError(f"{path}: found {''.join(path.suffixes[-2:]) or 'no suffix'}; needed: {needed}. Convert the file.")
    return [path]


def _load(source: Source) -> datasets.Dataset | None:
    """Load a hub data set, or a folder that `save_to_disk` wrote; None for other files."""
    path = Path(source.path or "")
    try:
        if source.path is None:
            name, _, configuration = str(source.name).partition(":")
            return datasets.load_dataset(name, configuration or None, split=source.split)
        if (path / "dataset_dict.json").is_file():
            raise ValueError("it has several splits; name the folder of one")
        return datasets.load_from_disk(source.path) if (path / "state.json").is_file() else None
    except (*READ_ERRORS, RuntimeError) as error:
        raise UserError(
            f"data set {source.label} cannot be loaded: {error}\n"
            "A configuration is given as `name: owner/set:configuration`; local files as `path`."
        ) from error


def _kind(file: Path) -> str:
    """Return the suffix that decides how a file is read, without that of a compression; "" if it cannot be read."""
    suffix = file.suffix.lower()
    if suffix in COMPRESSED:
        suffix = Path(file.stem).suffix.lower()
        return suffix if suffix in (*JSON_LINES, ".json") else ""
    return suffix if suffix in SUFFIXES else ""


def _rows_of(file: Path) -> Iterator[Row]:
    kind = _kind(file)
    if kind in JSON_LINES:
        return _json_lines(file)
    if kind == ".json":
        return _json_list(file)
    options = _csv_options(file, "\t" if kind == ".tsv" else ",") if TABLES[kind] == "csv" else {}
    # Brackets and stars in a name would be a pattern.
    table = datasets.load_dataset(TABLES[kind], data_files=glob.escape(str(file)), split="train", streaming=True, **options)
    return _numbered(str(file), table)


def _csv_options(file: Path, separator: str) -> dict[str, Any]:
    """Return options that keep columns as text: an answer `007` is not the number 7, and `NA` is not missing."""
    with open(file, encoding="utf-8-sig", newline="") as stream:
        records = csv.reader(stream, delimiter=separator)
        names, first = next(records, []), next(records, [])
    if len(first) > len(names):  # pandas would take the surplus for row labels
        fields = f"has {len(first)} fields, and the header {len(names)}"
        raise UserError(f"{file}:2: {fields}; put text that contains {separator!r} in quotes")
    columns = datasets.Features({name: datasets.Value("string") for name in names})
    return {"sep": separator, "features": columns, "keep_default_na": False}


def _numbered(label: str, records: Iterable[Any]) -> Iterator[Row]:
    for number, record in enumerate(records, 1):
        yield Row(f"{label}, row {number}", as_json(without_nulls(record)))


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys whose values are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_json(record: object) -> str:
    """Return a record as JSON text; a value that JSON lacks becomes an object with the name of its type."""
    return json.dumps(record, default=lambda value: {"not JSON": type(value).__name__})


def _json_lines(file: Path) -> Iterator[Row]:
    """Yield the lines of a JSONL file, unparsed; empty lines are skipped and counted in the numbers."""
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            try:
                record = line.decode().strip()
            except UnicodeDecodeError as error:
                raise UserError(f"{file}:{number}: is not UTF-8 at byte {error.start + 1} of the line") from error
            if record:
                yield Row(f"{file}:{number}", record)


def _json_list(file: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list, or lines of objects as in JSONL."""
    with _open(file) as stream:
        text = stream.read().decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _json_lines(file)
        return
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: broken JSON: {error.msg} (column {error.colno})") from error
    for number, record in enumerate(records, 1):
        yield Row(f"{file}, row {number}", as_json(record))


def _open(file: Path) -> IO[bytes]:
    """Open a file for reading, decompressed if its suffix says so."""
    return io.BufferedReader(pyarrow.input_stream(str(file), compression=COMPRESSED.get(file.suffix.lower())))
