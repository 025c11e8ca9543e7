"""The work of preparing data, done by one process for all: sources → rows → samples → sequences → a folder.

Rows go to a scratch file as text, are turned into samples by `datasets.map` in one process or many (a progress bar each
source), packed source by source, and written to the folder together with the report. The name of the folder says all
that its content depends on (`fingerprint`).

Refused: a data set of which no row can be used, and, unless skipping is allowed, one of which any row cannot: all rows
are looked at first, so that the user sees how many there are. The cost: disk for rows and samples at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import transformers
import xxhash

from ftkit.data.build_once import RefusedError
from ftkit.data.columns import found_in, without
from ftkit.data.formats import BadRowError, detect, parse_record
from ftkit.data.packing import PACKED_COLUMNS, best_fit, fill
from ftkit.data.report import Checks, Lengths, Report, SourceReport, duplicates_of, ends_of, found_of
from ftkit.data.sources import Source
from ftkit.data.template import Rendering
from ftkit.data.tokenize import SAMPLE_COLUMNS, Tokenise
from ftkit.errors import UserError

CACHE_LAYOUT = 10  # raise it when the same settings come to mean other tokens, or the folder holds something else
ROW_COLUMNS = pyarrow.schema([(name, pyarrow.large_string()) for name in ("place", "record", "problem")])
ROWS_AT_ONCE = 1000
ROWS_LOOKED_AT = 200
ROWS_PER_WORKER = 500
EXAMPLES_SHOWN = 5
DIGESTS = "digests.npy"
"""The checksum of each sample, in their order; int64."""


@dataclass(frozen=True)
class Settings:
    """What determines the tokens, beside content and tokenizer; `prepare` explains each."""

    sequence_tokens: int
    packing: bool
    loss_on: str
    on_bad_row: str
    task: str
    long_text: str
    seed: int | None
    ignore_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choices = {
            "loss_on": ("answers", "marks", "all"),
            "on_bad_row": ("stop", "skip"),
            "task": ("causal-lm", "seq2seq"),
            "long_text": ("split", "cut", "stop"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}: found {getattr(self, name)!r}; needed: {' or '.join(allowed)}")
        if len(set(self.ignore_columns)) < len(self.ignore_columns):
            raise UserError(f"data.ignore_columns: names a column twice: {', '.join(self.ignore_columns)}")
        if self.sequence_tokens < 2:
            raise UserError(f"data.sequence_tokens: found {self.sequence_tokens}; needed: at least 2")
        if self.packing and self.task == "seq2seq":
            raise UserError("data.packing: an encoder-decoder model cannot keep packed samples apart; set it to false")


def fingerprint(sources: Sequence[Source], tokenizer: Any, settings: Settings) -> str:
    """Return the name of a preparation: content, places (they stand in messages), tokenizer, settings, versions."""
    if tokenizer.is_fast:
        vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = {key: value for key, value in vocabulary.items() if key not in ("padding", "truncation")}
    else:
        vocabulary = [tokenizer.get_vocab(), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    parts = [
        CACHE_LAYOUT,
        transformers.__version__,
        asdict(settings),
        [(source.label, source.format, source.digest()) for source in sources],
        [type(tokenizer).__name__, vocabulary, tokenizer.chat_template, tokenizer.special_tokens_map],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def build(sources: Sequence[Source], rendering: Rendering, settings: Settings, workers: int, folder: Path) -> None:
    """Fill a folder with the prepared data set (`dataset/`) and its report (`report.json`).

    Args:
        sources: what to read
        rendering: how the tokenizer makes tokens of conversations
        settings: see `ftkit.data.prepare.prepare`
        workers: most processes to use
        folder: an empty folder

    Raises:
        RefusedError: rows that cannot be used, or none that can
        UserError: unreadable files, unknown columns, a template that cannot be masked exactly
    """
    scratch = folder / "scratch"
    places = [scratch / str(number) for number in range(len(sources))]
    made = [samples_of(source, rendering, settings, workers, place) for source, place in zip(sources, places)]
    parts, reports = [part for part, _ in made], tuple(report for _, report in made)
    refuse_bad_rows(reports, settings.on_bad_row)
    samples = datasets.concatenate_datasets([part.select_columns(["place", "digest"]) for part in parts])
    digests = samples.with_format("numpy")["digest"][:]
    np.save(folder / DIGESTS, digests)
    duplicates = duplicates_of(digests, samples["place"])
    if settings.packing:
        parts = [packed(part, settings, workers, place, source.label) for part, place, source in zip(parts, places, sources)]
    columns = list(PACKED_COLUMNS) if settings.packing else ["input_ids", "labels", "place"]
    if len(parts) > 1:
        parts = [part.add_column("source", np.full(len(part), number, np.int16)) for number, part in enumerate(parts)]
        columns.append("source")
    dataset = datasets.concatenate_datasets(parts).select_columns(columns)
    dataset.save_to_disk(str(folder / "dataset"))
    tokens = sum(report.tokens for report in reports)
    efficiency = tokens / (len(dataset) * settings.sequence_tokens) if settings.packing else None
    report = Report(reports, rendering.way, len(dataset), efficiency, duplicates, digest_of(dataset))
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    shutil.rmtree(scratch)


def digest_of(dataset: datasets.Dataset) -> str:
    """Return the checksum of the tokens and labels of all rows, in their order. Cost: one read of them."""
    columns = ("input_ids", "labels")
    found = {(name, part): xxhash.xxh3_64() for name in columns for part in ("lengths", "values")}
    for table in dataset.with_format("arrow").iter(ROWS_AT_ONCE):
        for name in columns:
            for rows in table[name].chunks:  # where they are cut depends on the processes that wrote them
                found[name, "lengths"].update(rows.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                found[name, "values"].update(rows.flatten().to_numpy(zero_copy_only=False).tobytes())
    return xxhash.xxh3_64_hexdigest(b"".join(each.digest() for each in found.values()))


def refuse_bad_rows(reports: Sequence[SourceReport], on_bad_row: str) -> None:
    """Stop where rows cannot be used and may not be skipped, or where a source has no others.

    Raises:
        RefusedError: with the first of them, file, row and reason
    """
    useless = any(report.bad_rows == report.rows for report in reports)
    bad_rows, rows = sum(report.bad_rows for report in reports), sum(report.rows for report in reports)
    if not bad_rows or (on_bad_row == "skip" and not useless):
        return
    examples = list(itertools.chain.from_iterable(report.bad_examples for report in reports))[:EXAMPLES_SHOWN]
    shown = "\n".join(f"  {example}" for example in examples)
    more = f"\n  … and {bad_rows - len(examples)} more" if bad_rows > len(examples) else ""
    skip = ", or set data.on_bad_row: skip to leave them out"
    advice = "No row of a file would be left: correct them." if useless else f"Correct them{skip}."
    raise RefusedError(f"{bad_rows} of {rows} rows cannot be used:\n{shown}{more}\n{advice}")


def samples_of(
    source: Source, rendering: Rendering, settings: Settings, workers: int, scratch: Path
) -> tuple[datasets.Dataset, SourceReport]:
    """Turn one source into samples: columns input_ids, labels, place and tokens, and the report.

    Raises:
        UserError: no rows, unreadable files, unknown columns, a template that cannot be masked
    """
    scratch.mkdir(parents=True)
    files = source.files()
    rows = write_rows(source, scratch / "rows.arrow")
    if not len(rows):
        raise UserError(f"{source.label}: holds no rows; at least one is needed")
    ignored = frozenset(settings.ignore_columns)
    format_name = format_of(source, rows, ignored)
    checks = Checks.of(rendering.tokenizer)
    tokenise = Tokenise(
        rendering,
        checks,
        format_name,
        settings.sequence_tokens,
        settings.loss_on,
        settings.task,
        settings.long_text,
        ignored,
    )
    samples = mapped(
        rows, tokenise, SAMPLE_COLUMNS, workers, scratch / "samples.arrow", f"Tokenising {Path(source.label).name}"
    )
    numbers = samples.select_columns(["tokens", "trained_tokens", "cut_tokens", "faults", "end", "pieces"]).with_format(
        "numpy"
    )[:]
    good, bad = np.flatnonzero(numbers["tokens"]), np.flatnonzero(numbers["tokens"] == 0)
    unread, _ = found_in(samples.select_columns(["names"]).with_format("arrow")[:]["names"], samples["place"])
    split = numbers["pieces"] > 1
    report = SourceReport(
        label=source.label,
        format=format_name,
        rows=len(rows),
        bad_rows=len(bad),
        bad_examples=tuple(samples[int(row)]["problem"] for row in bad[:EXAMPLES_SHOWN]),
        samples=len(good),
        tokens=int(numbers["tokens"].sum()),
        trained_tokens=int(numbers["trained_tokens"].sum()),
        truncated_rows=int((numbers["cut_tokens"] > 0).sum()),
        cut_tokens=int(numbers["cut_tokens"].sum()),
        found=found_of(numbers["faults"], samples["place"]),
        ends=ends_of(numbers["end"], checks),
        lengths=Lengths.of((numbers["tokens"] + numbers["cut_tokens"])[good], settings.sequence_tokens),
        trained_lengths=Lengths.of(numbers["trained_tokens"][good], settings.sequence_tokens),
        split_rows=int(split.sum()),
        split_samples=int(numbers["pieces"][split].sum()),
        files=tuple(file.name for file in files.read) if len(files.read) > 1 else (),
        unused=tuple(name for name in unread if "." not in name),
    )
    kept = samples if len(good) == len(samples) else samples.select(good)
    return kept.select_columns(["input_ids", "labels", "place", "tokens", "digest"]), report


def write_rows(source: Source, file: Path) -> datasets.Dataset:
    """Write the rows of a source to an Arrow file and return them: columns place, record and problem.

    Args:
        source: what to read
        file: the Arrow file
    """
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, ROW_COLUMNS) as stream:
        rows = source.rows()
        while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
            stream.write_batch(pyarrow.RecordBatch.from_pylist([asdict(row) for row in some], schema=ROW_COLUMNS))
    return datasets.Dataset.from_file(str(file))


def format_of(source: Source, rows: datasets.Dataset, ignored: frozenset[str]) -> str:
    """Return the format of a source, from its first rows that can be read.

    Raises:
        UserError: none of them can be read, or their columns fit no format
    """
    looked_at, problems = [], []
    for row in rows.select(range(min(len(rows), ROWS_LOOKED_AT))):
        try:
            if row["problem"]:
                raise BadRowError(row["problem"])
            looked_at.append(parse_record(row["record"]))
        except BadRowError as error:
            problems.append(f"{row['place']}: {error}")
    if not looked_at:
        shown = "\n".join(f"  {problem}" for problem in problems[:EXAMPLES_SHOWN])
        raise RefusedError(f"{source.label}: none of the first {len(problems)} rows can be read:\n{shown}")
    return detect([without(row, ignored, set()) for row in looked_at], source.label, source.format)


def mapped(
    rows: datasets.Dataset, function: Callable, columns: datasets.Features, workers: int, file: Path, title: str
) -> datasets.Dataset:
    """Apply a function to batches of rows, in as many processes as are worth starting, into a file of given columns."""
    processes = max(1, min(workers, len(rows) // ROWS_PER_WORKER))
    with quiet_forks():
        return rows.map(
            function,
            batched=True,
            batch_size=ROWS_PER_WORKER,
            remove_columns=rows.column_names,
            features=columns,
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(file),
            load_from_cache_file=False,
            new_fingerprint=hashlib.sha256(str(file).encode()).hexdigest()[:32],
            desc=title,
        )


def packed(samples: datasets.Dataset, settings: Settings, workers: int, scratch: Path, label: str) -> datasets.Dataset:
    """Pack the samples of one source into sequences: columns input_ids, labels, position_ids and place."""
    assert settings.seed is not None  # of packed samples it is known: it is a part of them
    lengths = samples.with_format("numpy")["tokens"][:]
    sequences = best_fit(lengths, settings.sequence_tokens, settings.seed)
    members = datasets.Dataset.from_dict({"members": sequences})
    tokens = samples.select_columns(["input_ids", "labels", "place"]).with_format("numpy")
    return mapped(
        members,
        partial(fill, samples=tokens),
        PACKED_COLUMNS,
        workers,
        scratch / "packed.arrow",
        f"Packing {Path(label).name}",
    )


@contextlib.contextmanager
def quiet_forks() -> Iterator[None]:
    """Keep the tokenizers library from threads (and from its warning) while worker processes are forked."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
