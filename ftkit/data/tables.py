"""Rows of tables: Parquet and Arrow files, as dictionaries, some in memory at a time.

Refused: columns, or fields of a column, with the same name (a dictionary would have the last one), and damaged files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from ftkit.errors import UserError

ROWS_AT_ONCE = 1000
UNREADABLE = (pyarrow.ArrowException, OSError, ValueError, ArithmeticError)
"""What damaged files raise, and values that Python cannot hold: text that is no UTF-8, dates after the year 9999."""


def twice_in(names: Iterable[str]) -> str | None:
    """Return the first name that is there twice, blanks around it aside, or None."""
    counts = Counter(name.strip() for name in names)
    return next((name for name, count in counts.items() if count > 1), None)


def refuse_twice(schema: Iterable[pyarrow.Field], where: str) -> None:
    """Stop where columns, or fields of a column at any depth, have the same name: a row would have the last one.

    Raises:
        UserError: with the name
    """
    fields = list(schema)
    if (twice := twice_in(field.name for field in fields)) is not None:
        raise UserError(f"{where}: has the column {twice!r} twice; rename one of them")
    for field in fields:
        kind = field.type
        while pyarrow.types.is_nested(kind) and not pyarrow.types.is_struct(kind) and kind.num_fields == 1:
            kind = kind.field(0).type
        if pyarrow.types.is_struct(kind):
            refuse_twice(kind, f"{where}, {field.name}")


def parquet_records(file: Path) -> Iterator[dict]:
    """Yield the rows of a Parquet file, a thousand in memory at a time.

    Raises:
        UserError: not a Parquet file, or a damaged one
    """
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            refuse_twice(table.schema_arrow, str(file))
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE):
                for record in batch.to_pylist():
                    number += 1
                    yield record
    except UNREADABLE as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: cannot be read as Parquet, after row {number}: {error}") from error


def arrow_records(file: Path) -> Iterator[dict]:
    """Yield the rows of an Arrow file, in the format of streams (as `datasets` writes it) or of files (Feather).

    Raises:
        UserError: not an Arrow file, or a damaged one
    """
    number = 0
    try:
        with pyarrow.memory_map(str(file)) as source:
            if source.read(6) == b"ARROW1":
                source.seek(0)
                whole = pyarrow.ipc.open_file(source)
                schema, batches = whole.schema, (whole.get_batch(each) for each in range(whole.num_record_batches))
            else:
                source.seek(0)
                stream = pyarrow.ipc.open_stream(source)
                schema, batches = stream.schema, iter(stream)
            refuse_twice(schema, str(file))
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    for record in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                        number += 1
                        yield record
    except UNREADABLE as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: cannot be read as Arrow, after row {number}: {error}") from error
