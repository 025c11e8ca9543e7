"""Prepared rows as pieces of text, for the terminal, a page and a notebook.

A piece is one token, or the few tokens that make up one character. Everything is read from the prepared data, so it is
what the model gets. Cost: two decodings per token, of a handful of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow.compute

from ftkit.data.report import Checks, Report, Warned
from ftkit.data.tokenize import IGNORED_LABEL

MOST_TOKENS = 800
"""Tokens of a row that are shown; more are left out in the middle."""
JOINED = re.compile(r", (?!row \d)")
"""Separates the places of packed samples; a place may be `file, row 3`."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """Text of one or a few tokens."""

    text: str
    tokens: int
    trained: bool  # whether they count in the loss
    special: bool  # whether it is a special token


@dataclass(frozen=True)
class Sample:
    """One sample as pieces; `hidden_tokens` are missing before the piece `hidden_at`."""

    place: str
    pieces: tuple[Piece, ...]
    tokens: int
    trained_tokens: int
    hidden_tokens: int
    hidden_at: int


@dataclass(frozen=True)
class Shown:
    """One row of the prepared data: a sample, or several packed ones; `sequence_tokens` is 0 if it is not packed."""

    title: str
    samples: tuple[Sample, ...]
    sequence_tokens: int = 0


@dataclass(frozen=True)
class Findings:
    """What is known of a recipe's data before training.

    Args:
        title: Name of the data.
        report: Counts; None if there are no usable rows.
        held_out: Counts of the held-out rows; None if they are a share of the others, or if there are none.
        warnings: The worst first.
        refused: Why a run would not start with these data, or "".
        shown: Some rows as the model gets them.
        sequence_tokens: Longest sequence, in tokens.
    """

    title: str
    report: Report | None
    held_out: Report | None
    warnings: tuple[Warned, ...]
    refused: str
    shown: tuple[Shown, ...]
    sequence_tokens: int


def sample_of(checks: Checks, ids: Sequence[int], labels: Sequence[int], place: str, most: int = MOST_TOKENS) -> Sample:
    """Return tokens and their labels as a sample of at most `most` visible tokens."""
    trained = [label != IGNORED_LABEL for label in labels]
    first, last = len(ids), len(ids)
    if len(ids) > most:
        first, last = most * 3 // 4, len(ids) - (most - most * 3 // 4)
    head = tuple(pieces_of(checks, ids[:first], trained[:first]))
    tail = tuple(pieces_of(checks, ids[last:], trained[last:]))
    return Sample(place, head + tail, len(ids), sum(trained), last - first, len(head))


def pieces_of(checks: Checks, ids: Sequence[int], trained: Sequence[bool]) -> Iterator[Piece]:
    """Yield tokens as pieces, given whether each counts in the loss."""
    before: list[int] = []
    joined: list[int] = []
    for place, token in enumerate(ids):
        joined.append(token)
        special = token in checks.ids
        text = checks.name(token) if special else _text(checks.tokenizer, before, joined)
        ends = place + 1 == len(ids) or ids[place + 1] in checks.ids or trained[place + 1] != trained[place]
        if ends or not text.endswith(BROKEN):
            yield Piece(text, len(joined), trained[place], special)
            before, joined = [] if special else joined, []


def _text(tokenizer: Any, before: list[int], joined: list[int]) -> str:
    """Return the text of tokens after others: alone, some lose the blank that they begin with."""
    parts = ([*before, *joined], before, joined)
    whole, first, alone = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in parts)
    return whole[len(first) :] if whole.startswith(first) else alone


def sequence_of(checks: Checks, row: dict[str, Any], title: str, sequence_tokens: int, *, seq2seq: bool = False) -> Shown:
    """Return a row of the prepared data as pieces.

    Args:
        checks: Knows the tokenizer and its special tokens.
        row: Columns input_ids, labels, place, and position_ids if it is packed.
        title: Which row it is, and why it is shown.
        sequence_tokens: Length of a packed sequence.
        seq2seq: Whether the labels are a sequence of their own.
    """
    ids, labels, place = row["input_ids"], row["labels"], row["place"]
    if seq2seq:
        question = sample_of(checks, ids, [IGNORED_LABEL] * len(ids), place)
        return Shown(title, (question, sample_of(checks, labels, labels, "the answer")))
    if "position_ids" not in row:
        return Shown(title, (sample_of(checks, ids, labels, place),))
    starts = [start for start, position in enumerate(row["position_ids"]) if position == 0]
    places = JOINED.split(place) if len(JOINED.split(place)) == len(starts) else [place] * len(starts)
    most = max(MOST_TOKENS // len(starts), 64)
    spans = zip(places, starts, [*starts[1:], len(ids)])
    samples = (sample_of(checks, ids[start:stop], labels[start:stop], own, most) for own, start, stop in spans)
    return Shown(title, tuple(samples), sequence_tokens)


def row_at(dataset: datasets.Dataset, place: str) -> int | None:
    """Return the number of the first row that has a sample of a place, or None."""
    column = dataset.select_columns(["place"]).with_format("arrow")[:]["place"]
    for number in pyarrow.compute.match_substring(column, place).to_numpy().nonzero()[0].tolist():
        places = column[number].as_py()
        if place == places or place in JOINED.split(places):
            return int(number)
    return None
