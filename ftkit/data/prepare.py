"""Prepared data: rows in, tokens and labels out, once per machine.

    sources -> formats -> template -> tokenize -> (split held-out rows) -> (pack) -> a folder in the cache

`prepare` names the folder by everything that its content depends on: rows, tokenizer, settings, day, and the versions of
ftkit and transformers. One process builds it under a file lock and renames it; the others wait on the lock and read the
result. No collective waits meanwhile, so no timeout of NCCL or gloo runs.

Cost: disk, 8 bytes per token (12 when packed) and the place of each row, twice that during the preparation; one read of each
local file to name the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import filelock
import numpy as np
import pyarrow
import transformers
import xxhash

from ftkit.config.recipe import Data, Eval, Source
from ftkit.config.wording import counted
from ftkit.data.batches import StepOrder
from ftkit.data.packing import PACKED_COLUMNS, best_fit, fill
from ftkit.data.report import (
    Report,
    Warned,
    duplicates_of,
    overlap_of,
    overlap_warning,
    warnings_of,
)
from ftkit.data.samples import mapped, refuse_bad_rows, samples_of
from ftkit.data.sources import digest
from ftkit.data.template import Template
from ftkit.errors import UserError

DIGESTS = "digests.npy"
"""File with the checksum of each row that is trained on, int64."""


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Args:
        train: Data set with columns input_ids, labels (lists of int32), place (where the row is in the sources),
            position_ids
            if packed, and source (int16) if there are several sources.
        held_out: Data set to evaluate on, never packed; or None.
        report: Counts of the rows; with `eval.share` of both parts.
        held_out_report: Counts of held-out rows that are a source of their own, or None.
        weights: One weight per source, or None if every row comes once per epoch.
        overlap: Warning about held-out rows that are trained on as well, or None.
        spare: Rows of `eval.share` beyond `eval.max_rows`.
    """

    train: datasets.Dataset
    held_out: datasets.Dataset | None
    report: Report
    held_out_report: Report | None = None
    weights: tuple[float, ...] | None = None
    overlap: Warned | None = None
    spare: int = 0

    def order(self, seed: int) -> StepOrder:
        """Return the order of samples, a function of (seed, epoch)."""
        return StepOrder.of(self.train, seed=seed, weights=self.weights)

    def warnings(self, tokenizer: Any, stops: Collection[int] = ()) -> list[Warned]:
        """Return the warnings about the rows.

        Args:
            tokenizer: The tokenizer that they were prepared with.
            stops: Token ids at which generation stops, besides the tokenizer's end-of-sequence token.
        """
        known = {token for token in (tokenizer.eos_token_id, *stops) if token is not None and token < len(tokenizer)}
        names = {str(name) for name in tokenizer.convert_ids_to_tokens(sorted(known))}
        found = warnings_of(self.report, names)
        if self.held_out_report is not None:
            found += [each.of("held-out rows") for each in warnings_of(self.held_out_report, names)]
        return found + ([self.overlap] if self.overlap is not None else [])

    def left_out(self, order: StepOrder) -> list[str]:
        """Return which rows an epoch does not reach, or nothing does; one sentence each."""
        found = [f"eval.max_rows leaves out {counted(self.spare, 'row')} of eval.share, neither trained on nor measured"]
        found = found if self.spare else []
        for source, members, count in zip(self.report.sources, order.members, order.counts()):
            if count < len(members):
                samples = counted(len(members), "sample")
                found.append(
                    f"{source.label}: by the weights an epoch takes {count} of its {samples}, the next epoch others"
                )
        return found


def prepare(
    data: Data,
    tokenizer: Any,
    *,
    task: str = "causal-lm",
    seed: int = 0,
    held_out: Eval | None = None,
    day: str | None = None,
) -> Prepared:
    """Turn data sets into tokens and labels, or find them in the cache. Every rank calls this, before any collective.

    Args:
        data: The settings: a recipe's `data` section.
        tokenizer: A Hugging Face tokenizer, with its chat template if it has one.
        task: causal-lm | seq2seq (the question for the encoder, the answer as labels).
        seed: Seed of the held-out share, and of the packing order of samples of equal length.
        held_out: A recipe's `eval` section: the rows to hold out, or None.
        day: Day that a chat template with `strftime_now` writes, YYYY-MM-DD; None is today.

    Raises:
        UserError: Rows cannot be used (file and line), no rows, unreadable files, a template whose answers cannot be
            separated, or a cache that cannot be written.

    Cost: waits on a file lock while another process prepares the same; no collective.
    """
    template = Template.of(tokenizer, day)
    share = held_out.share if held_out is not None else None
    work = _Work(data.all_sources, data, template, task, share, seed)
    train, held, report, folder = work.result()
    prepared = Prepared(train, held, report, weights=_weights(data))
    if held_out is not None and held_out.source is not None:
        apart = data.model_copy(update={"packing": False})
        held, _, held_report, held_folder = _Work((held_out.source,), apart, template, task, None, seed).result()
        ours, theirs = (np.load(each / DIGESTS, mmap_mode="r") for each in (folder, held_folder))
        overlap = overlap_warning(overlap_of(ours, theirs, held["place"]), len(theirs))
        prepared = replace(prepared, held_out=held, held_out_report=held_report, overlap=overlap)
    if held is not None and held_out is not None and held_out.max_rows is not None and held_out.max_rows < len(held):
        spare = len(held) - held_out.max_rows if share is not None else 0
        prepared = replace(prepared, held_out=held.select(range(held_out.max_rows)), spare=spare)
    return prepared


def _weights(data: Data) -> tuple[float, ...] | None:
    weights = tuple(source.weight for source in data.all_sources if source.weight is not None)
    return weights or None


@dataclass(frozen=True)
class _Work:
    """The preparation of some sources.

    Args:
        sources: Data sets to read.
        data: Settings of the recipe's `data` section.
        template: How conversations become tokens.
        task: causal-lm | seq2seq.
        share: Share of the rows to hold out, or None.
        seed: See `prepare`.
    """

    sources: tuple[Source, ...]
    data: Data
    template: Template
    task: str
    share: float | None
    seed: int

    def result(self) -> tuple[Any, Any, Report, Path]:
        """Return the rows to train on, those of the share that is held out, the report, and the folder with all of it."""
        cache = self.data.cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "ftkit"
        folder = Path(os.path.expanduser(cache)) / self.fingerprint()
        cached = build_once(folder, self.build)
        try:
            train = datasets.load_from_disk(str(folder / "train"))
            held_out = datasets.load_from_disk(str(folder / "held_out")) if self.share is not None else None
            report = Report.from_json((folder / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{folder}: the prepared data are damaged ({error}). Delete the folder and start again."
            ) from error
        return train, held_out, replace(report, cached=cached), folder

    def fingerprint(self) -> str:
        """Return the name of the result: a hash of everything that it depends on; places contain the labels of sources."""
        tokenizer = self.template.tokenizer
        if tokenizer.is_fast:
            vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
            vocabulary = {key: value for key, value in vocabulary.items() if key not in ("padding", "truncation")}
        else:
            vocabulary = [tokenizer.get_vocab(), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
        settings = ("sequence_tokens", "packing", "loss_on", "on_bad_row", "long_text")
        parts = [
            (metadata.version("ftkit"), transformers.__version__, self.template.day),
            [getattr(self.data, name) for name in settings],
            (self.task, self.share, self.seed if self.data.packing or self.share is not None else None),
            [(source.label, source.format, digest(source)) for source in self.sources],
            [type(tokenizer).__name__, vocabulary, tokenizer.chat_template, tokenizer.special_tokens_map],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def build(self, folder: Path) -> None:
        """Fill an empty folder with the prepared data sets, the checksums of the rows and the report."""
        scratch = folder / "scratch"
        made = [
            samples_of(source, self.template, self.data, self.task, scratch / str(number))
            for number, source in enumerate(self.sources)
        ]
        parts, reports = [part for part, _ in made], tuple(report for _, report in made)
        refuse_bad_rows(reports, self.data.on_bad_row)
        samples = datasets.concatenate_datasets([part.select_columns(["place", "digest", "pieces"]) for part in parts])
        columns = samples.with_format("numpy")[:]
        first, digests = columns["pieces"] > 0, columns["digest"]
        duplicates = duplicates_of(digests[first], columns["place"][first])
        if self.share is not None:
            chosen = held_out_digests(digests, self.share, self.seed)
            masks = [np.isin(part.with_format("numpy")["digest"][:], chosen) for part in parts]
            held_out = [part.select(np.flatnonzero(mask)) for part, mask in zip(parts, masks)]
            _joined(held_out, ["input_ids", "labels", "place"]).save_to_disk(str(folder / "held_out"))
            parts = [part.select(np.flatnonzero(~mask)) for part, mask in zip(parts, masks)]
        tokens = sum(int(part.with_format("numpy")["tokens"][:].sum()) for part in parts)
        checksum = xxhash.xxh3_64_hexdigest(_joined(parts, ["digest"]).with_format("numpy")["digest"][:].tobytes())
        if self.data.packing:
            parts = [self.packed(part, scratch / f"packed-{number}.arrow") for number, part in enumerate(parts)]
        names = list(PACKED_COLUMNS) if self.data.packing else ["input_ids", "labels", "place"]
        if len(parts) > 1:
            parts = [part.add_column("source", np.full(len(part), number, np.int16)) for number, part in enumerate(parts)]
            names.append("source")
        train = _joined(parts, names)
        train.save_to_disk(str(folder / "train"))
        np.save(folder / DIGESTS, digests[first])
        efficiency = tokens / (len(train) * self.data.sequence_tokens) if self.data.packing else None
        report = Report(reports, self.template.kind, len(train), efficiency, duplicates, checksum, day=self.template.day)
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        shutil.rmtree(scratch)

    def packed(self, samples: datasets.Dataset, file: Path) -> datasets.Dataset:
        """Pack the samples of one source into sequences."""
        sequences = best_fit(samples.with_format("numpy")["tokens"][:], self.data.sequence_tokens, self.seed)
        tokens = samples.select_columns(["input_ids", "labels", "place"]).with_format("numpy")
        members = datasets.Dataset.from_dict({"members": sequences})
        return mapped(members, partial(fill, samples=tokens), PACKED_COLUMNS, self.data.workers, file, "Packing")


def held_out_digests(digests: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Choose the rows to hold out by their content, so that no text is in both sets.

    Args:
        digests: (N,) checksums of the rows; equal rows have equal ones.
        share: Share to hold out, between 0 and 1; at least one row is held out, and at least one remains.
        seed: Seed of the choice, which is the same whenever the data and the seed are.

    Raises:
        UserError: There are fewer than two different rows.
    """
    different = digests[np.sort(np.unique(digests, return_index=True)[1])]  # in the order of the rows
    if len(different) < 2:
        raise UserError("eval.share: a share of 1 row cannot be held out; needed: 2 different rows or more")
    count = min(max(round(share * len(different)), 1), len(different) - 1)
    return different[np.random.RandomState([seed % 2**32, len(different)]).permutation(len(different))[:count]]


def build_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Build a folder unless it is there; safe if many processes ask at once.

    Args:
        folder: Where it will be; its name states everything that its content depends on.
        build: Fills the empty folder that it is given.

    Returns:
        Whether the folder was there, or another process built it meanwhile.

    Raises:
        UserError: The folder cannot be written.
    """
    partial_folder = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
            if folder.is_dir():
                return True
            shutil.rmtree(partial_folder, ignore_errors=True)
            partial_folder.mkdir()
            try:
                build(partial_folder)
                os.replace(partial_folder, folder)
            finally:
                shutil.rmtree(partial_folder, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder.parent}: prepared data cannot be written: {error}. Free some space or set data.cache_dir."
        ) from error
    return False


def _joined(parts: list[datasets.Dataset], names: list[str]) -> datasets.Dataset:
    return datasets.concatenate_datasets(parts).select_columns(names)
