"""Sequences as they are trained on, made fit for the eye: pieces of text, and what becomes of each.

A token need not be a whole character, and the text of a token depends on what stands before it; so a piece is one token,
or the few tokens that make up a character. Special tokens are pieces by themselves, under their names. What is shown is
read from the prepared data, so it is what the model gets.

Cost: two decodings a token, of a handful of sequences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow.compute

from ftkit.data.faults import Marks
from ftkit.data.tokenize import IGNORED_LABEL

MOST_TOKENS = 800
"""Of one sequence that are shown: more are left out in the middle."""
MOST_JOINED = 8
"""Tokens that may make up one character."""
JOINED = re.compile(r", (?!row \d)")
"""Between the places of packed samples; a place may be `file, row 3`."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """A stretch of text.

    Args:
        text: what a person reads
        tokens: number of its tokens
        trained: whether it counts in the loss
        special: whether it is a special token
    """

    text: str
    tokens: int
    trained: bool
    special: bool = False


@dataclass(frozen=True)
class Sample:
    """One row as tokens.

    Args:
        place: where the row stands, or a word for what it is
        pieces: the row's pieces, from its beginning
        tokens: number of the row's tokens
        trained_tokens: number of the tokens that count in the loss
        hidden_tokens: number of the tokens in the middle that are not in `pieces`
        hidden_at: number of the piece before which they are missing
        problem: why it cannot be trained on, or ""
    """

    place: str
    pieces: tuple[Piece, ...]
    tokens: int
    trained_tokens: int
    hidden_tokens: int = 0
    hidden_at: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Shown:
    """One row of the prepared data: a sample, or several packed ones.

    Args:
        title: which it is, and why it is shown
        samples: the samples, from left to right
        room_tokens: room of the sequence, in tokens; 0 where it is as long as its sample
    """

    title: str
    samples: tuple[Sample, ...]
    room_tokens: int = 0


def sample_of(
    marks: Marks, ids: Sequence[int], labels: Sequence[int] | None, place: str, *, most: int = MOST_TOKENS, problem: str = ""
) -> Sample:
    """Return tokens and labels as a sample.

    Args:
        marks: the tokenizer's special tokens
        ids: token ids
        labels: one label for each token id; None where none is trained on
        place: where the row stands
        most: most tokens to show
        problem: why it cannot be trained on, or ""
    """
    trained = [False] * len(ids) if labels is None else [label != IGNORED_LABEL for label in labels]
    hidden = max(0, len(ids) - most)
    if not hidden:
        pieces, at = tuple(pieces_of(marks, ids, trained)), 0
    else:
        first, last = most * 3 // 4, len(ids) - (most - most * 3 // 4)
        head = tuple(pieces_of(marks, ids[:first], trained[:first]))
        pieces, at = (*head, *pieces_of(marks, ids[last:], trained[last:])), len(head)
    return Sample(place, pieces, len(ids), sum(trained), hidden, at, problem)


def pieces_of(marks: Marks, ids: Sequence[int], trained: Sequence[bool]) -> Iterator[Piece]:
    """Yield the pieces of some tokens.

    Args:
        marks: the tokenizer's special tokens
        ids: token ids
        trained: whether each token counts in the loss
    """
    before: list[int] = []
    waiting: list[int] = []
    for place, token in enumerate(ids):
        if token in marks.ids:
            if waiting:
                yield Piece(_text(marks, before, waiting), len(waiting), trained[place - 1])
            yield Piece(marks.name(token), 1, trained[place], True)
            before, waiting = [], []
            continue
        waiting.append(token)
        text = _text(marks, before, waiting)
        ends = place + 1 == len(ids) or trained[place + 1] != trained[place] or len(waiting) >= MOST_JOINED
        if ends or not text.endswith(BROKEN):
            yield Piece(text, len(waiting), trained[place])
            before, waiting = waiting, []


def _text(marks: Marks, before: list[int], waiting: list[int]) -> str:
    """Return the text of tokens after others: alone, some would lose the blank that they begin with."""
    whole, first = _decoded(marks, [*before, *waiting]), _decoded(marks, before)
    return whole[len(first) :] if whole.startswith(first) else _decoded(marks, waiting)


def _decoded(marks: Marks, ids: list[int]) -> str:
    return marks.tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""


def sequence_of(marks: Marks, row: dict[str, Any], title: str, room_tokens: int, *, seq2seq: bool = False) -> Shown:
    """Return a row of prepared data for the eye.

    Args:
        marks: the tokenizer's special tokens
        row: columns input_ids, labels, place, and position_ids where it is packed
        title: which it is, and why it is shown
        room_tokens: room of a sequence, in tokens
        seq2seq: whether the labels are a sequence of their own
    """
    ids, labels, places = row["input_ids"], row["labels"], row["place"]
    if seq2seq:
        asked, said = (sample_of(marks, part, own, "") for part, own in ((ids, None), (labels, labels)))
        return Shown(title, tuple(_named(part, name) for part, name in ((asked, places), (said, "the answer"))))
    if "position_ids" not in row:
        return Shown(title, (sample_of(marks, ids, labels, places),))
    starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
    names = places_of(places, len(starts))
    most = max(MOST_TOKENS // len(starts), 64)
    samples = [
        sample_of(marks, ids[start:stop], labels[start:stop], name, most=most)
        for start, stop, name in zip(starts, [*starts[1:], len(ids)], names)
    ]
    return Shown(title, tuple(samples), room_tokens)


def places_of(text: str, count: int) -> list[str]:
    """Return the places of the samples of a sequence, or one for all where a name has a comma in it."""
    names = JOINED.split(text)
    return names if len(names) == count else [text] * count


def _named(sample: Sample, place: str) -> Sample:
    return Sample(place, sample.pieces, sample.tokens, sample.trained_tokens, sample.hidden_tokens, sample.hidden_at)


def row_at(dataset: datasets.Dataset, place: str) -> int | None:
    """Return the number of the first row that stands at a place, or None: it is held out, or there is none."""
    column = dataset.select_columns(["place"]).with_format("arrow")[:]["place"]  # of the chosen rows, in their order
    whole = pyarrow.compute.index(column, place).as_py()
    if whole >= 0:
        return int(whole)
    among = pyarrow.compute.match_substring(column, place).to_numpy()
    for number in among.nonzero()[0].tolist():
        if place in JOINED.split(column[number].as_py()):
            return int(number)
    return None
