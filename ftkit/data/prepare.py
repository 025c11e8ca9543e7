"""Prepared data: rows in, tokens and labels out, once a machine.

`prepare` reads the sources (`rows`), understands their formats (`formats`), makes tokens of them (`rendering`,
`samples`), packs them if asked (`packing`), and keeps the result on disk under a name made of the content, the
tokenizer and the settings. Every rank calls it before its first collective: one of them does the work (`preparation`),
the others wait on a file lock (`once`) and read the result. What a step sees of it is `batches`.

Refused: streaming (an order that is a function of (seed, epoch), and a count of what was cut, need all the rows); code
that data sets bring. The cost: disk, 8 bytes a token (12 when packed) and the place of each row in `cache_dir`, twice
that while preparing, and reading each local file once to name the result.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow

from ftkit.data.batches import Collator, StepOrder
from ftkit.data.build_once import build_once
from ftkit.data.columns import refuse_marks
from ftkit.data.formats import BadRowError, Conversation
from ftkit.data.packing import check_isolation
from ftkit.data.preparation import DIGESTS, Settings, build, fingerprint
from ftkit.data.report import Report, SourceReport, Warned, overlap_of, overlap_warning, warnings_of
from ftkit.data.sources import Source
from ftkit.data.template import Rendering
from ftkit.errors import UserError

__all__ = [
    "Collator",
    "Prepared",
    "Report",
    "Source",
    "SourceReport",
    "StepOrder",
    "check_isolation",
    "prepare",
    "prepare_section",
    "prompt_tokens",
    "split",
]

MOST_WORKERS = 8


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Args:
        dataset: columns input_ids, labels (lists of int32), place (where in the sources it stands), position_ids if
            packed, and source (int16, which source a row came from) if there are several
        report: what became of the rows
        weights: one weight for each source, or None where every row comes once an epoch
        folder: where the data lie on the disk, with the checksums of their samples; None where that is not known
    """

    dataset: datasets.Dataset
    report: Report
    weights: tuple[float, ...] | None = None
    folder: Path | None = None

    def order(self, seed: int) -> StepOrder:
        """Return the order of samples, a function of (seed, epoch)."""
        return StepOrder.of(self.dataset, seed=seed, weights=self.weights)

    def warnings(self, tokenizer: Any, stops: Collection[int] = (), *, shared: bool = False) -> list[Warned]:
        """Return the warnings for data that can be trained on.

        Args:
            tokenizer: the one that they were prepared with
            stops: token ids at which generation stops, beside the tokenizer's end of sequence
            shared: whether a share of the rows is held out
        """
        known = {token for token in (tokenizer.eos_token_id, *stops) if token is not None and token < len(tokenizer)}
        names = {str(name) for name in tokenizer.convert_ids_to_tokens(sorted(known))}
        return warnings_of(self.report, names, shared=shared)

    def overlap(self, held_out: Prepared) -> Warned | None:
        """Return the warning of samples of `held_out`, not packed, that are in these as well, or None."""
        if self.folder is None or held_out.folder is None:
            return None
        ours, theirs = (np.load(folder / DIGESTS, mmap_mode="r") for folder in (self.folder, held_out.folder))
        return overlap_warning(overlap_of(ours, theirs, held_out.dataset["place"]), len(theirs))


def prepare(
    sources: str | Path | Source | Sequence[Source],
    tokenizer: Any,
    *,
    sequence_tokens: int = 1024,
    packing: bool = False,
    loss_on: str = "answers",
    on_bad_row: str = "stop",
    task: str = "causal-lm",
    long_text: str = "split",
    ignore_columns: Sequence[str] = (),
    must_match: bool = True,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    workers: int | None = None,
) -> Prepared:
    """Turn data sets into tokens and labels, or find them in the cache; every rank calls it before any collective.

    Args:
        sources: a file, or one or more `Source`
        tokenizer: a Hugging Face tokenizer; with its chat template, if it has one
        sequence_tokens: longest sample (and room of a packed sequence), in tokens
        packing: put several samples into one sequence; call `check_isolation` on the model
        loss_on: answers (assistant turns) | marks (what the template marks, whoever says it) | all
        on_bad_row: stop | skip, for rows that cannot be used
        task: causal-lm | seq2seq (the question for the encoder, the answer as labels)
        long_text: what becomes of plain text longer than sequence_tokens: split makes several samples of it, cut drops its
            end, stop treats it like a row that cannot be used
        ignore_columns: names of columns, and of keys below them (`messages.name`), that are removed before rows are read
        must_match: whether each of those names must be in some row, and marks in some; False where another file may have it
        seed: orders samples of equal length when packing; without packing it changes nothing here
        cache_dir: where the result is kept; default: a folder in the cache of `datasets`
        workers: processes that make tokens; default: one a core, at most 8

    Returns:
        The data set with its report.

    Raises:
        UserError: rows that cannot be used (with file and row), columns or keys that nobody reads, no rows at all,
            unreadable files, a template that cannot be masked exactly, a cache that cannot be written

    Cost: host waits on a file lock while another process prepares the same; no collective.
    """
    listed = [sources] if isinstance(sources, (str, Path, Source)) else list(sources)
    listed = [source if isinstance(source, Source) else Source(path=source) for source in listed]
    weights = tuple(source.weight for source in listed)
    if not listed or (None in weights and set(weights) != {None}):
        raise UserError(f"data.sources: needs one source or more, and a weight for all or for none; found {weights}")
    settings = Settings(
        sequence_tokens,
        packing,
        loss_on,
        on_bad_row,
        task,
        long_text,
        seed if packing and task != "seq2seq" else None,
        tuple(ignore_columns),
    )
    rendering = Rendering.of(tokenizer)
    if loss_on == "marks" and rendering.way != "marked":
        raise UserError(
            "data.loss_on is marks, and the chat template has no {% generation %} marks; set data.loss_on: answers"
        )
    place = Path(cache_dir) if cache_dir is not None else Path(datasets.config.HF_DATASETS_CACHE) / "ftkit"
    folder = place / fingerprint(listed, tokenizer, settings)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or min(cores, MOST_WORKERS)
    cached = build_once(folder, partial(build, listed, rendering, settings, workers))
    try:
        dataset = datasets.load_from_disk(str(folder / "dataset"))
        report = Report.from_json((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{folder}: the prepared data are damaged ({error}). Delete the folder and start again.") from error
    if must_match:
        refuse_marks(loss_on, [report])
    known = tuple(weight for weight in weights if weight is not None)
    return Prepared(dataset, replace(report, cached=cached), known if len(known) == len(weights) else None, folder)


def prepare_section(
    section: Any, tokenizer: Any, *, seed: int, task: str = "causal-lm", must_match: bool = True
) -> Prepared:
    """Prepare what a recipe's `data` section describes; a weight counts only where the recipe states it.

    Args:
        section: `ftkit.config.recipe.Data`, or anything with its attributes
        tokenizer: a Hugging Face tokenizer
        seed: the run's seed
        task: causal-lm | seq2seq
        must_match: see `prepare`
    """
    return prepare(
        sources_of(section),
        tokenizer,
        sequence_tokens=section.sequence_tokens,
        packing=section.packing,
        loss_on=section.loss_on,
        on_bad_row=section.on_bad_row,
        task=task,
        long_text=section.long_text,
        ignore_columns=section.ignore_columns,
        must_match=must_match,
        seed=seed,
        cache_dir=section.cache_dir,
        workers=section.workers,
    )


def sources_of(section: Any) -> list[Source]:
    """Return the data sets that a recipe's `data` section names; a weight counts only where the recipe states it."""
    return [
        Source(
            path=source.path,
            name=source.name,
            split=source.split,
            format=source.format,
            weight=source.weight if "weight" in source.model_fields_set else None,
        )
        for source in section.all_sources
    ]


def split(dataset: datasets.Dataset, share: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Hold a share of the rows out, the same ones whenever the data and the seed are the same.

    Args:
        dataset: N rows, at least 2
        share: share held out, between 0 and 1; at least one row, and at least one remains
        seed: the run's seed

    Returns:
        The rows to train on and the rows held out, both in their old order.

    Raises:
        UserError: a share outside (0, 1), or fewer than two rows
    """
    rows = len(dataset)
    if not 0 < share < 1 or rows < 2:
        raise UserError(
            f"eval.share: {share} of {rows} rows cannot be held out; needed: a share in (0, 1) of 2 rows or more"
        )
    held_rows = min(max(round(share * rows), 1), rows - 1)
    shuffled = np.random.RandomState([seed % 2**32, rows]).permutation(rows)
    return dataset.select(np.sort(shuffled[held_rows:])), dataset.select(np.sort(shuffled[:held_rows]))


def prompt_tokens(tokenizer: Any, turns: Sequence[dict], *, tools: list | None = None, glue: str = "") -> list[int]:
    """Return the tokens after which a model answers: exactly what preceded an answer in training.

    Args:
        tokenizer: a Hugging Face tokenizer
        turns: dictionaries with role and content, the last of them to be answered
        tools: given to the chat template
        glue: without a chat template, what stood between question and answer: "" for prompt/completion rows, a line
            break for the other formats

    Raises:
        UserError: the chat template refuses the turns
    """
    try:
        return Rendering.of(tokenizer).prompt(Conversation(tuple(turns), tools, glue))
    except BadRowError as error:
        raise UserError(str(error)) from error
