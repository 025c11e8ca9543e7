"""From the rows of a source to samples and their counts, in one process or many.

Rows are written to a scratch file as text, and `datasets.map` turns them into samples with a progress bar. All rows are read
before unusable ones stop the run, so that their number is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from ftkit.config.recipe import Data, Source
from ftkit.data.formats import BadRowError, detect, parse_record
from ftkit.data.report import Checks, Lengths, SourceReport, ends_of, found_of
from ftkit.data.sources import files_of, rows
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


class RefusedRows(UserError):
    """Rows that cannot be trained on, with the first of them."""


def samples_of(
    source: Source, template: Template, data: Data, task: str, scratch: Path
) -> tuple[datasets.Dataset, SourceReport]:
    """Turn one source into samples, and count them.

    Args:
        source: The data set.
        template: How conversations become tokens.
        data: Settings of the recipe's `data` section.
        task: causal-lm | seq2seq.
        scratch: Folder for files that are removed later.

    Returns:
        The samples with the columns `SAMPLE_COLUMNS`, unusable rows left out; and the counts.

    Raises:
        UserError: The source has no rows, or its columns fit no format.
    """
    scratch.mkdir(parents=True)
    read = _write_rows(source, scratch / "rows.arrow")
    if not len(read):
        raise UserError(f"{source.label}: has no rows; at least one is needed")
    format_name, checks = _format_of(source, read), Checks.of(template.tokenizer)
    tokenize = Tokenize(template, checks, format_name, data, task)
    title = f"Tokenizing {Path(source.label).name}"
    samples = mapped(read, tokenize, SAMPLE_COLUMNS, data.workers, scratch / "samples.arrow", title)
    names = ["tokens", "trained_tokens", "cut_tokens", "found", "end", "pieces"]
    numbers = samples.select_columns(names).with_format("numpy")[:]
    good, bad = np.flatnonzero(numbers["tokens"]), np.flatnonzero(numbers["tokens"] == 0)
    unused = samples.with_format("arrow")["unused"][:].unique().to_pylist()
    split = numbers["pieces"] > 1
    report = SourceReport(
        label=source.label,
        format=format_name,
        rows=len(read),
        bad_rows=len(bad),
        bad_examples=tuple(samples[int(row)]["problem"] for row in bad[:EXAMPLES_SHOWN]),
        samples=len(good),
        tokens=int(numbers["tokens"].sum()),
        trained_tokens=int(numbers["trained_tokens"].sum()),
        truncated_rows=int((numbers["cut_tokens"] > 0).sum()),
        cut_tokens=int(numbers["cut_tokens"].sum()),
        split_rows=int(split.sum()),
        split_samples=int(numbers["pieces"][split].sum()),
        found=found_of(numbers["found"], samples["place"]),
        ends=ends_of(numbers["end"], checks),
        lengths=Lengths.of((numbers["tokens"] + numbers["cut_tokens"])[good], data.sequence_tokens),
        trained_lengths=Lengths.of(numbers["trained_tokens"][good], data.sequence_tokens),
        files=_files(source),
        unused=tuple(dict.fromkeys(name for each in unused for name in each.split(", ") if name)),
    )
    return samples.select(good), report


def refuse_bad_rows(reports: Sequence[SourceReport], on_bad_row: str) -> None:
    """Stop if rows cannot be used and may not be skipped, or if a source has no others.

    Raises:
        RefusedRows: Names the first of them, with file, line and reason.
    """
    for report in reports:
        if report.samples and "only_end" in report.found and report.found["only_end"].rows == report.samples:
            places = ", ".join(report.found["only_end"].places)
            raise RefusedRows(
                f"{report.label}: every sample has an answer with nothing but its end ({places}). The chat template leaves "
                "out the content of the answer (a tool call?): another template is needed."
            )
    useless = any(report.bad_rows == report.rows for report in reports)
    bad_rows, all_rows = sum(report.bad_rows for report in reports), sum(report.rows for report in reports)
    if not bad_rows or (on_bad_row == "skip" and not useless):
        return
    examples = list(itertools.chain.from_iterable(report.bad_examples for report in reports))[:EXAMPLES_SHOWN]
    shown = "\n".join(f"  {example}" for example in examples)
    more = f"\n  … and {bad_rows - len(examples)} more" if bad_rows > len(examples) else ""
    skip = (
        "No row of a source would be left: correct them."
        if useless
        else ("Correct them, or set data.on_bad_row: skip to leave them out.")
    )
    raise RefusedRows(f"{bad_rows} of {all_rows} rows cannot be used:\n{shown}{more}\n{skip}")


def mapped(
    read: datasets.Dataset, function: Callable, columns: datasets.Features, workers: int | None, file: Path, title: str
) -> datasets.Dataset:
    """Apply a function to batches of rows, in as many processes as are worth starting, into a file of given columns."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = max(1, min(workers or min(cores, MOST_WORKERS), len(read) // ROWS_PER_WORKER))
    with _quiet_forks():
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
    """Return the format of a source from its first rows that can be parsed.

    Raises:
        UserError: None of them can be parsed, or their columns fit no format.
    """
    parsed, problems = [], []
    for row in read.select(range(min(len(read), ROWS_EXAMINED))):
        try:
            parsed.append(parse_record(row["record"]))
        except BadRowError as error:
            problems.append(f"{row['place']}: {error}")
    if not parsed:
        shown = "\n".join(f"  {problem}" for problem in problems[:EXAMPLES_SHOWN])
        raise RefusedRows(f"{source.label}: none of the first {len(problems)} rows can be read:\n{shown}")
    return detect(parsed, source.label, source.format)


def _files(source: Source) -> tuple[str, ...]:
    """Return the names of the files of a folder."""
    if source.path is None or not Path(source.path).is_dir():
        return ()
    return tuple(file.name for file in files_of(Path(source.path)))


@contextlib.contextmanager
def _quiet_forks() -> Iterator[None]:
    """Keep the tokenizers library from threads (and from its warning) while worker processes are forked."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
