"""Prepared data: rows in, tokens and labels out, once per machine.

    sources -> formats -> template -> tokenize -> (split held-out rows) -> (pack) -> a folder in the cache

`prepare` names the folder by everything that its content depends on: rows, tokenizer, settings, day, and the versions of
ftkit and transformers. One process builds it under a file lock and renames it; the others wait on the lock and read the
result. No collective waits meanwhile, so no timeout of NCCL or gloo runs.

Cost: disk, 8 bytes per token (12 when packed) and the place of each row; one read of each
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
import transformers
import xxhash

from ftkit.config.recipe import Data, Eval
from ftkit.data.batches import StepOrder
from ftkit.data.packing import PACKED_COLUMNS, best_fit, fill
from ftkit.data.report import REPORT_JSON, Report, Warned, overlap_warnings, warnings_of
from ftkit.data.samples import mapped, samples_of
from ftkit.data.sources import digest
from ftkit.data.template import Template
from ftkit.errors import UserError

COLUMNS = ["input_ids", "labels", "place"]


@dataclass(frozen=True)
class Prepared:
    """Data ready for training."""

    train: datasets.Dataset  # input_ids, labels, place; position_ids if packed; source if there are several
    held_out: datasets.Dataset | None  # rows to evaluate on, never packed
    report: Report  # with `eval.share` of both parts
    held_out_report: Report | None = None  # of held-out rows that are a source of their own
    weights: tuple[float, ...] | None = None  # one per source; None if every row comes once per epoch
    overlap: tuple[Warned, ...] = ()  # warnings about held-out rows that are trained on as well

    def order(self, seed: int) -> StepOrder:
        """Return the order of samples, a function of (seed, epoch)."""
        sources = self.train["source"][:] if self.weights is not None else None
        return StepOrder(len(self.train), seed=seed, sources=sources, weights=self.weights)

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
            apart = warnings_of(self.held_out_report, names)
            found += [replace(each, text=f"held-out rows: {each.text}") for each in apart]
        return [*found, *self.overlap]


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
    weights = tuple(source.weight for source in data.all_sources if source.weight is not None) or None
    split = held_out if held_out is not None and held_out.share is not None else None
    train, apart, report, digests = _Work(data, template, task, seed, split).result()
    if held_out is None:
        return Prepared(train, None, report, weights=weights)
    held_out_report, overlap = None, []
    if held_out.source is not None:
        settings = data.model_copy(update={"sources": (held_out.source,), "packing": False})
        apart, _, held_out_report, others = _Work(settings, template, task, seed, None).result()
        overlap = overlap_warnings(digests, others, apart.with_format("numpy")["place"][:])
    # Of a share, `max_rows` decides which rows are held out, and all of these are measured.
    most = len(apart) if split is not None else held_out.max_rows or len(apart)
    measured = apart.select(range(min(most, len(apart))))
    return Prepared(train, measured, report, held_out_report, weights, tuple(overlap))


@dataclass(frozen=True)
class _Work:
    """The preparation of some sources."""

    data: Data
    template: Template
    task: str
    seed: int
    split: Eval | None  # the recipe's `eval` section if it holds out a share of these rows

    def result(self) -> tuple[datasets.Dataset, Any, Report, np.ndarray]:
        """Return the rows to train on, those of the share that is held out or None, the report, and the rows' checksums."""
        cache = self.data.cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "ftkit"
        folder = Path(os.path.expanduser(cache)) / self.fingerprint()
        cached = build_once(folder, self.build)
        train = datasets.load_from_disk(str(folder / "train"))
        held_out = datasets.load_from_disk(str(folder / "held_out")) if self.split is not None else None
        report = REPORT_JSON.validate_json((folder / "report.json").read_bytes())
        return train, held_out, replace(report, cached=cached), np.load(folder / "digests.npy", mmap_mode="r")

    def fingerprint(self) -> str:
        """Return the name of the result: a hash of everything that it depends on; places contain the labels of sources."""
        tokenizer = self.template.tokenizer
        backend = {"vocabulary": tokenizer.get_vocab(), "settings": repr(tokenizer.init_kwargs)}
        if tokenizer.is_fast:  # a call leaves its padding and truncation there
            backend = {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
        settings = ("sequence_tokens", "packing", "loss_on", "on_bad_row", "long_text")
        parts = [
            (metadata.version("ftkit"), transformers.__version__, self.template.day),
            [getattr(self.data, name) for name in settings],
            (self.task, self.seed if self.data.packing or self.split is not None else None),
            (self.split.share, self.split.max_rows) if self.split is not None else None,
            [(source.label, source.format, digest(source)) for source in self.data.all_sources],
            [type(tokenizer).__name__, backend, tokenizer.chat_template, tokenizer.special_tokens_map],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def build(self, folder: Path) -> None:
        """Fill an empty folder with the prepared data sets, the checksums of the rows and the report."""
        scratch, tokenizer, length = folder / "scratch", self.template.tokenizer, self.data.sequence_tokens
        made = [
            samples_of(source, self.template, self.data, self.task, scratch / str(number))
            for number, source in enumerate(self.data.all_sources)
        ]
        samples = datasets.concatenate_datasets([part for part, _ in made])
        sources = np.repeat(np.arange(len(made)), [len(part) for part, _ in made])
        columns = samples.select_columns(["tokens", "digest"]).with_format("numpy")[:]
        tokens, digests = columns["tokens"], columns["digest"]
        chosen = usable = tokens > 0
        if self.split is not None and self.split.share is not None:
            apart = held_out_digests(digests[usable], self.split.share, self.split.max_rows, self.seed)
            held_out = usable & np.isin(digests, apart)
            samples.select(np.flatnonzero(held_out)).select_columns(COLUMNS).save_to_disk(str(folder / "held_out"))
            chosen = usable & ~held_out
        chosen_sources = np.unique(sources[chosen])  # a share may hold out all rows of a source
        parts = [samples.select(np.flatnonzero(chosen & (sources == number))) for number in chosen_sources]
        names = [*COLUMNS]
        if self.data.packing:
            parts = [self.packed(part, scratch / f"packed-{number}.arrow") for number, part in enumerate(parts)]
            names = list(PACKED_COLUMNS)
        if len(made) > 1:
            numbered = zip(chosen_sources, parts)
            parts = [part.add_column("source", np.full(len(part), number, np.int16)) for number, part in numbered]
            names.append("source")
        train = datasets.concatenate_datasets(parts).select_columns(names)
        train.save_to_disk(str(folder / "train"))
        np.save(folder / "digests.npy", digests[usable])
        report = replace(
            Report.of(tuple(report for _, report in made), samples, tokenizer, length),
            rendering=self.template.kind,
            day=self.template.day,
            sequences=len(train),
            packing_efficiency=int(tokens[chosen].sum()) / (len(train) * length) if self.data.packing else None,
            digest=xxhash.xxh3_64_hexdigest(digests[chosen].tobytes()),
        )
        (folder / "report.json").write_bytes(REPORT_JSON.dump_json(report))
        shutil.rmtree(scratch)

    def packed(self, samples: datasets.Dataset, file: Path) -> datasets.Dataset:
        """Pack the samples of one source into sequences."""
        sequences = best_fit(samples.with_format("numpy")["tokens"][:], self.data.sequence_tokens, self.seed)
        function = partial(fill, samples=samples.select_columns(COLUMNS).with_format("numpy"))
        members = datasets.Dataset.from_dict({"members": sequences})
        return mapped(members, function, PACKED_COLUMNS, self.data.workers, file, "Packing")


def held_out_digests(digests: np.ndarray, share: float, most: int | None, seed: int) -> np.ndarray:
    """Choose the rows to hold out by their content, so that no text is in both sets.

    Args:
        digests: (N,) checksums of the rows; equal rows have equal ones.
        share: Share to hold out, between 0 and 1; at least one row is held out, and at least one remains.
        most: Most rows to hold out, or None.
        seed: Seed of the choice, which is the same whenever the data and the seed are.

    Raises:
        UserError: There are fewer than two different rows.
    """
    different = digests[np.sort(np.unique(digests, return_index=True)[1])]  # in the order of the rows
    if len(different) < 2:
        raise UserError("eval.share: a share of 1 row cannot be held out; needed: 2 different rows or more")
    count = min(max(round(share * len(different)), 1), len(different) - 1, most or len(different))
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
