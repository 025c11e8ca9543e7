"""Rows of a data set, each with the place it came from.

A source is a local file (JSONL, JSON, CSV, TSV, Parquet, Arrow), a folder of such files, or a data set of the hub.
Whatever it is, it becomes one stream of `Row`s: where the row stands, and the row as JSON text. JSON text, because rows
of one file need not agree on their types, and because a line that is not JSON must still be counted, named and (if the
user said so) skipped; an Arrow schema guessed from the first rows can do neither. Lines of JSONL pass through unparsed:
they are parsed later, by many processes. What JSON lacks (bytes, dates, images) keeps its kind (`FOREIGN`), so that it is
never taken for text.

Refused: names that are there twice, other formats, data sets that bring code. The cost: rows of CSV, Parquet, Arrow and
of the hub are written as JSON once, and a `.json` file is read whole.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from ftkit.data.files import READ_ERRORS, Files, digest_of_file, files_of, kind_of_file, open_bytes
from ftkit.data.tables import arrow_records, parquet_records, refuse_twice, twice_in
from ftkit.data.turns import FOREIGN, BadRowError, object_of
from ftkit.errors import UserError

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
        path: a file or a folder of files, see `ftkit.data.files`
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

    def __post_init__(self) -> None:
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
        """Return a hash of the files' names, which say how they are read, and content: a cache entry is named by it.

        Cost: reads local files once.
        """
        if self.path is None:
            return digest_of_hub(load_hub(self))
        files = [f"{file.name}\0{digest_of_file(file)}" for file in self.files().read]
        return hashlib.sha256("\0".join(files).encode()).hexdigest()

    def files(self) -> Files:
        """Return the files of a local source; of a hub data set none, but those of a folder here that are not read.

        Raises:
            UserError: See `ftkit.data.files.files_of`.
        """
        return files_beside(self) if self.path is None else files_of(Path(self.path))

    def rows(self, empty: list[str] | None = None) -> Iterator[Row]:
        """Yield the rows in their order.

        Args:
            empty: gets the names of the files that hold none, once they were read

        Raises:
            UserError: a file that is missing, of an unknown kind, or broken as a whole
        """
        if self.path is None:
            loaded = load_hub(self)
            refuse_twice(loaded.features.arrow_schema, self.label)
            for number, record in enumerate(loaded, 1):
                yield Row(f"{self.label}, row {number}", as_json(record))
            return
        readers = {".jsonl": jsonl_rows, ".ndjson": jsonl_rows, ".json": json_rows}
        readers |= {".csv": csv_rows, ".tsv": csv_rows}
        tables = {".parquet": parquet_records, ".arrow": arrow_records}
        for file in self.files().read:
            kind, some = kind_of_file(file), False
            try:
                for row in readers[kind](file) if kind in readers else table_rows(file, tables[kind](file)):
                    some = True
                    yield row
            except READ_ERRORS as error:
                raise UserError(f"{file}: cannot be read: {error}") from error
            if not some and empty is not None:
                empty.append(file.name)


def files_beside(source: Source) -> Files:
    """Return what a data set that is named as one of the hub, and is a folder here, leaves unread of it."""
    name, _, configuration = str(source.name).partition(":")
    folder = Path(name)
    if not folder.is_dir():
        return Files(())
    splits = [re.split(r"[\[(]", part)[0].strip() for part in source.split.split("+")]
    known = datasets.load_dataset_builder(name, configuration or None).config.data_files or {}
    read = known.values() if "all" in splits else [known.get(split, ()) for split in splits]
    taken = {Path(file).resolve() for files in read for file in files}
    others = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.resolve() not in taken)
    names = (str(file.relative_to(folder)) for file in others)
    return Files((), tuple(name for name in names if not any(part.startswith(".") for part in Path(name).parts)))


def load_hub(source: Source) -> datasets.Dataset:
    """Load a data set of the hub, from the local cache where it lies there; HF_HUB_OFFLINE and HF_HOME are respected.

    Raises:
        UserError: not found, not reachable, no such split or configuration, or one that would need its own code
    """
    name, _, configuration = str(source.name).partition(":")
    if name in _PACKAGED_DATASETS_MODULES or Path(name).is_file():
        what = "is a file here" if Path(name).is_file() else "is a kind of files, and no data set of the hub"
        raise UserError(f"data.name: {name!r} {what}; name a file, or a folder of files, as data.path")
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
    """Write a row as JSON text; a value that JSON lacks becomes an object that names its kind."""
    return json.dumps(record, default=lambda value: {FOREIGN: type(value).__name__})


def table_rows(file: Path, records: Iterable[object]) -> Iterator[Row]:
    """Yield the records of a file as rows."""
    for number, record in enumerate(records, 1):
        yield Row(f"{file}, row {number}", as_json(record))


def jsonl_rows(file: Path) -> Iterator[Row]:
    """Yield the lines of a JSONL file, unparsed; empty lines are passed over and still counted."""
    with open_bytes(file) as lines:
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


class Doubled(dict):
    """A JSON object in which a key is given twice; the text says which."""

    problem: str = ""


def object_or_doubled(pairs: list[tuple[str, object]]) -> dict:
    """Return the object of JSON pairs, marked where a key is given twice: its row is known later."""
    try:
        return object_of(pairs)
    except BadRowError as error:
        found = Doubled(pairs)
        found.problem = str(error)
        return found


def doubled_in(value: object) -> str:
    """Return what is wrong with the first object in a value in which a key is given twice, or ""."""
    if isinstance(value, Doubled):
        return value.problem
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(doubled_in, inner)), "")


def json_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a JSON file: a list, an object that holds one list, or lines of objects as in JSONL.

    Raises:
        UserError: broken JSON, with its line and column, or JSON that holds no list of rows
    """
    try:
        with open_bytes(file) as stream:
            text = stream.read().decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=object_or_doubled)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not UTF-8 at byte {error.start + 1}") from error
    except RecursionError as error:
        raise UserError(f"{file}: is nested too deeply to be a list of rows") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.doc.lstrip().startswith("{"):
            yield from jsonl_rows(file)
            return
        raise UserError(f"{file}:{error.lineno}: broken JSON: {error.msg} (column {error.colno})") from error
    except UserError:
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise UserError(f"{file}: broken JSON: {error}") from error
    if isinstance(content, dict):
        if isinstance(content, Doubled):
            raise UserError(f"{file}: {content.problem}")
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 and len(content) == 1 else [content]
    if not isinstance(content, list):
        raise UserError(f"{file}: expected a list of rows; found {type(content).__name__}")
    for number, record in enumerate(content, 1):
        problem = doubled_in(record)
        yield Row(f"{file}, row {number}", "" if problem else as_json(record), problem)


def csv_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file; every value stays text (an answer `007` is not the number 7).

    Raises:
        UserError: no header, or text that is not UTF-8
    """
    csv.field_size_limit(CSV_FIELD_CHARACTERS)
    delimiter = "\t" if kind_of_file(file) == ".tsv" else ","
    with open_bytes(file) as plain, io.TextIOWrapper(plain, encoding="utf-8-sig", newline="") as stream:
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
                if not any(values):
                    continue
                header = values
                if (twice := twice_in(header)) is not None:
                    raise UserError(f"{place}: the header names {twice!r} twice; rename one of the columns")
            elif values == header and len(header) > 1:  # files that were put together
                yield Row(place, "", "is the header once more; remove the line")
            elif values and len(values) != len(header):
                yield Row(place, "", f"has {len(values)} fields where the header has {len(header)}")
            elif values:
                yield Row(place, as_json(dict(zip(header, values))))
