"""From the rows of a source to samples, in one process or many.

Rows are written to a scratch file as text, and `datasets.map` turns them into samples with a progress bar. All rows are read
before unusable ones stop the run, so that their number is known.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from ftkit.config.recipe import Data, Source
from ftkit.data.formats import BadRowError, detect, parse_record
from ftkit.data.report import BITS, Checks, SourceReport
from ftkit.data.sources import rows
from ftkit.data.template import Template
from ftkit.data.tokenize import SAMPLE_COLUMNS, Tokenize
from ftkit.errors import UserError

ROW_COLUMNS = pyarrow.schema([(name, pyarrow.large_string()) for name in ("place", "record")])
ROWS_AT_ONCE = 1000
ROWS_EXAMINED = 200
"""Rows from whose columns the format of a source is found."""
ROWS_PER_WORKER = 500
MOST_WORKERS = 8
EXAMPLES_SHOWN = 5


def samples_of(
    source: Source, template: Template, data: Data, task: str, scratch: Path
) -> tuple[datasets.Dataset, SourceReport]:
    """Turn one source into samples.

    Args:
        source: The data set.
        template: How conversations become tokens.
        data: Settings of the recipe's `data` section.
        task: causal-lm | seq2seq.
        scratch: Folder for files that are removed later.

    Returns:
        The samples with the columns `SAMPLE_COLUMNS`; those of unusable rows have no tokens. And facts of the source.

    Raises:
        UserError: The source has no rows, its columns fit no format, or rows cannot be used and may not be skipped.
    """
    scratch.mkdir(parents=True)
    read = _write_rows(source, scratch / "rows.arrow")
    if not len(read):
        raise UserError(f"{source.label}: has no rows; at least one is needed")
    format_name = _format_of(source, read)
    tokenize = Tokenize(template, Checks.of(template.tokenizer), format_name, data, task)
    title = f"Tokenizing {Path(source.label).name}"
    samples = mapped(read, tokenize, SAMPLE_COLUMNS, data.workers, scratch / "samples.arrow", title)
    _refuse_bad_rows(source, samples, len(read), data.on_bad_row)
    unused = samples.with_format("arrow")["unused"][:].unique().to_pylist()
    names = dict.fromkeys(name for each in unused for name in each.split(", ") if name)
    return samples, SourceReport(source.label, format_name, len(read), tuple(names))


def mapped(
    read: datasets.Dataset, function: Callable, columns: datasets.Features, workers: int | None, file: Path, title: str
) -> datasets.Dataset:
    """Apply a function to batches of rows, in as many processes as are worth starting, into a file of given columns."""
    workers = workers or min(os.cpu_count() or 1, MOST_WORKERS)
    processes = min(workers, len(read) // ROWS_PER_WORKER)
    return read.map(
        function,
        batched=True,
        batch_size=ROWS_PER_WORKER,
        remove_columns=read.column_names,
        features=columns,
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(file),
        load_from_cache_file=False,
        new_fingerprint=hashlib.sha256(str(file).encode()).hexdigest()[:32],
        desc=title,
    )


def _write_rows(source: Source, file: Path) -> datasets.Dataset:
    """Write the rows of a source to an Arrow file and return them: columns place and record."""
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, ROW_COLUMNS) as stream:
        read = rows(source)
        while some := list(itertools.islice(read, ROWS_AT_ONCE)):
            stream.write_batch(pyarrow.RecordBatch.from_pylist([asdict(row) for row in some], schema=ROW_COLUMNS))
    return datasets.Dataset.from_file(str(file))


def _format_of(source: Source, read: datasets.Dataset) -> str:
    """Return the format of a source from its first rows. If none can be parsed, any format reports them all."""
    parsed = []
    for row in read.select(range(min(len(read), ROWS_EXAMINED))):
        with suppress(BadRowError):
            parsed.append(parse_record(row["record"]))
    return detect(parsed, source.label, source.format) if parsed else "text"


def _refuse_bad_rows(source: Source, samples: datasets.Dataset, read: int, on_bad_row: str) -> None:
    """Raise UserError with the first rows that cannot be used, if they may not be skipped or the source has no others."""
    columns = samples.select_columns(["tokens", "found"]).with_format("numpy")[:]
    good, bad = columns["tokens"] > 0, np.flatnonzero(columns["tokens"] == 0)
    if len(bad) and (on_bad_row == "stop" or not good.any()):
        shown = "\n".join(f"  {problem}" for problem in samples.select(bad[:EXAMPLES_SHOWN])["problem"])
        skip = ", or set data.on_bad_row: skip to leave them out" if good.any() else ": no row of the source would be left"
        raise UserError(f"{len(bad)} of {read} rows cannot be used:\n{shown}\nCorrect them{skip}.")
    if (columns["found"][good] & BITS["only_end"]).all():
        raise UserError(
            f"{source.label}: every sample has an answer with nothing but its end (first: {samples['place'][0]}). The chat "
            "template leaves out the content of the answer (a tool call?): another template is needed."
        )
