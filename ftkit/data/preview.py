"""Prepared rows as pieces of text, for the terminal, a page and a notebook.

A piece is one token, or the few tokens that make up one character. Everything is read from the prepared data, so it is
what the model gets. Cost: two decodings per token, of a handful of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from ftkit.data.packing import PLACES
from ftkit.data.report import Checks, Report, Warned
from ftkit.data.tokenize import IGNORED_LABEL

MOST_TOKENS = 800
"""Tokens of a row that are shown; more are left out in the middle."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """Text of one or a few tokens, or a gap, whose text says how many tokens are not shown."""

    text: str
    trained: bool = False  # whether they count in the loss
    special: bool = False  # whether it is a special token
    gap: bool = False


@dataclass(frozen=True)
class Sample:
    """One sample as pieces."""

    place: str
    pieces: tuple[Piece, ...]
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class Shown:
    """One row of the prepared data: a sample, or several packed ones; `sequence_tokens` is 0 if it is not packed."""

    title: str
    samples: tuple[Sample, ...]
    sequence_tokens: int = 0


@dataclass(frozen=True)
class Findings:
    """Facts of a recipe's data before training."""

    title: str  # name of the data
    report: Report | None  # None if there are no usable rows
    held_out: Report | None  # of held-out rows that are a source of their own
    warnings: tuple[Warned, ...]  # the worst first
    refused: str  # why a run would not start with these data, or ""
    shown: tuple[Shown, ...]  # some rows as the model gets them
    sequence_tokens: int  # longest sequence, in tokens


def sample_of(checks: Checks, ids: Sequence[int], labels: Sequence[int], place: str, most: int = MOST_TOKENS) -> Sample:
    """Return tokens and their labels as a sample of at most `most` visible tokens."""
    trained = [label != IGNORED_LABEL for label in labels]
    if len(ids) <= most:
        pieces = [*pieces_of(checks, ids, trained)]
    else:
        first, last = most - most // 4, len(ids) - most // 4
        gap = Piece(f"… {last - first:,} tokens not shown …", gap=True)
        pieces = [*pieces_of(checks, ids[:first], trained[:first]), gap, *pieces_of(checks, ids[last:], trained[last:])]
    return Sample(place, tuple(pieces), len(ids), sum(trained))


def pieces_of(checks: Checks, ids: Sequence[int], trained: Sequence[bool]) -> Iterator[Piece]:
    """Yield tokens as pieces, given whether each counts in the loss."""
    before: list[int] = []
    joined: list[int] = []
    for place, token in enumerate(ids):
        joined.append(token)
        if token in checks.ids:
            yield Piece(str(checks.tokenizer.convert_ids_to_tokens(token)), trained[place], special=True)
            before, joined = [], []
            continue
        text = _text(checks.tokenizer, before, joined)
        ends = place + 1 == len(ids) or ids[place + 1] in checks.ids or trained[place + 1] != trained[place]
        if ends or not text.endswith(BROKEN):
            yield Piece(text, trained[place])
            before, joined = joined, []


def _text(tokenizer: Any, before: list[int], joined: list[int]) -> str:
    """Return the text of tokens after others: alone, some lose the blank that they begin with."""
    whole, first = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in ([*before, *joined], before))
    return whole[len(first) :]


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
    most = max(MOST_TOKENS // len(starts), 64)
    spans = zip(place.split(PLACES), starts, [*starts[1:], len(ids)])
    samples = (sample_of(checks, ids[start:stop], labels[start:stop], own, most) for own, start, stop in spans)
    return Shown(title, tuple(samples), sequence_tokens)


def row_at(dataset: datasets.Dataset, place: str) -> int | None:
    """Return the number of the first row that has a sample of a place, or None."""
    rows = (number for number, places in enumerate(dataset["place"][:]) if place in places.split(PLACES))
    return next(rows, None)
