"""Counts and warnings of prepared rows.

`Checks` looks at each row when it becomes tokens and returns its findings as bits. A `SourceReport` has the counts of one
source, a `Report` those of all sources. It is stored beside the prepared rows. `warnings_of` writes the sentences that
`ftkit data`, a notebook and `ftkit finetune` show before the first step.

Rows that cannot be trained on are errors (`BadRowError`) and are only counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ftkit.config.wording import counted

WARNINGS = {
    "no_end": "an answer whose last trained token is not a special token: the model does not learn to stop. Let the chat "
    "template close each answer with the tokenizer's eos_token, inside the {% generation %} marks if it has any",
    "only_end": "an answer that is empty except for its end: the chat template omits its content (a tool call?)",
    "doubled_bos": "two beginning-of-sequence tokens in a row. Remove one from the text or from the chat template",
    "answer_cut": "an answer cut off by data.sequence_tokens, together with its end. Raise it, or shorten the rows",
    "cut": "tokens beyond data.sequence_tokens, which are lost. Raise it, or let plain text be split (data.long_text)",
    "earlier_answers": "answers before the last one, which are not learned: an encoder-decoder model learns the last. "
    "Write each answer as a row of its own, with the turns before it",
}
"""Findings of a row, in the order of their bits; the text follows `12 of 5000 samples have`."""

BITS = {name: 1 << place for place, name in enumerate(WARNINGS)}
CUT, EARLIER_ANSWERS = BITS["cut"], BITS["earlier_answers"]
PLACES_KEPT = 3
FILES_SHOWN = 6
LONGEST = 4
"""Longer samples count as this many sequences in `Lengths`."""
LITTLE_TRAINED = 0.01
"""Share of trained tokens below which there is a warning."""


@dataclass(frozen=True)
class Found:
    """Rows with the same finding: their number, and file and line of the first."""

    rows: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Lengths:
    """Distribution of sample lengths: (tokens, samples) for each length that occurs, ascending."""

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tokens: np.ndarray, sequence_tokens: int) -> Lengths:
        """Count the lengths of samples, shape (samples,), in tokens."""
        lengths, samples = np.unique(np.minimum(tokens, LONGEST * sequence_tokens), return_counts=True)
        return cls(tuple(zip(lengths.tolist(), samples.tolist())))

    @classmethod
    def sum(cls, parts: Sequence[Lengths]) -> Lengths:
        """Return the lengths of several sources together."""
        total: Counter[int] = Counter()
        for part in parts:
            total.update(dict(part.counts))
        return cls(tuple(sorted(total.items())))

    @property
    def most(self) -> int:
        """Longest sample, in tokens."""
        return self.counts[-1][0] if self.counts else 0

    def at(self, share: float) -> int:
        """Return the length that a share of the samples does not exceed, in tokens."""
        lengths, samples = np.array(self.counts).T
        return int(lengths[np.searchsorted(np.cumsum(samples), share * samples.sum())])

    def classes(self, most: int) -> list[tuple[int, int, int]]:
        """Return a histogram of at most `most` bars of a round width: (low, high, samples), high excluded."""
        widths = (step * 10**power for power in count() for step in (1, 2, 5))
        width = next(each for each in widths if each * most > self.most)
        bars = [0] * (self.most // width + 1)
        for tokens, samples in self.counts:
            bars[tokens // width] += samples
        return [(place * width, (place + 1) * width, samples) for place, samples in enumerate(bars)]


@dataclass(frozen=True)
class SourceReport:
    """Counts of one source."""

    label: str  # path, or name and split
    format: str  # as detected or as given
    rows: int  # rows read, unusable ones included
    bad_rows: int  # unusable rows, which are skipped
    bad_examples: tuple[str, ...]  # the first of them, each `place: reason`
    samples: int
    tokens: int  # tokens of the samples, after cutting
    trained_tokens: int  # tokens that count in the loss
    truncated_rows: int  # samples that were cut
    cut_tokens: int  # tokens cut off
    split_rows: int  # plain texts longer than a sequence
    split_samples: int  # samples made of those
    lengths: Lengths  # tokens per sample, before cutting
    trained_lengths: Lengths  # trained tokens per sample
    ends: dict[str, int]  # tokens that end answers, as text, and the samples that end with each
    found: dict[str, Found]  # findings by their names in WARNINGS
    files: tuple[str, ...] = ()  # names of the files read, where the source is a folder
    unused: tuple[str, ...] = ()  # columns with content that the format does not read


class Total:
    """A count of `SourceReport`, summed over the sources of a `Report`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, report: Report, owner: type) -> int:
        return sum(getattr(source, self.name) for source in report.sources)


@dataclass(frozen=True)
class Report:
    """Counts of all sources."""

    sources: tuple[SourceReport, ...]
    rendering: str  # how the answers are found, see ftkit.data.template
    sequences: int  # rows of the prepared data set: samples, or packed sequences
    packing_efficiency: float | None  # share of the packed sequences that holds tokens
    duplicates: Found  # samples equal to an earlier one, each place `file:9, as file:2`
    digest: str = ""  # checksum of all tokens and labels in their order
    cached: bool = False  # whether the prepared rows were in the cache
    day: str = ""  # day that a template with `strftime_now` wrote; "" if it writes none

    rows, bad_rows, samples, split_rows, split_samples = Total(), Total(), Total(), Total(), Total()
    tokens, trained_tokens, truncated_rows, cut_tokens = Total(), Total(), Total(), Total()

    @property
    def bad_examples(self) -> tuple[str, ...]:
        """The first unusable rows of each source."""
        return tuple(example for source in self.sources for example in source.bad_examples)

    @property
    def lengths(self) -> Lengths:
        """Tokens per sample of all sources, before cutting."""
        return Lengths.sum([source.lengths for source in self.sources])

    @property
    def trained_lengths(self) -> Lengths:
        """Trained tokens per sample of all sources."""
        return Lengths.sum([source.trained_lengths for source in self.sources])

    def remarks(self) -> list[str]:
        """Return sentences on columns that are not read, and on the day."""
        unused = [f"{source.label}: not read: {', '.join(source.unused)}" for source in self.sources if source.unused]
        return [*unused, f"date in the prompt: {self.day}"] if self.day else unused

    def __str__(self) -> str:
        """Return the report for a person."""
        lines = []
        for source in self.sources:
            lines.append(f"{source.label}: {counted(source.rows, 'row')}, format {source.format}")
            if source.files:
                names = [*source.files[:FILES_SHOWN], *["…"][: len(source.files) - FILES_SHOWN]]
                lines.append(f"  {counted(len(source.files), 'file')}: {', '.join(names)}")
        lines += self.remarks()
        trained = 100 * self.trained_tokens / max(self.tokens, 1)
        lines.append(
            f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')}, {trained:.0f} % of them trained on"
        )
        if self.cut_tokens:
            share = 100 * self.cut_tokens / (self.tokens + self.cut_tokens)
            cut = counted(self.cut_tokens, "token")
            lines.append(f"{counted(self.truncated_rows, 'sample')} truncated: {cut} cut ({share:.1f} %)")
        if self.split_rows:
            samples = counted(self.split_samples, "sample")
            lines.append(f"{counted(self.split_rows, 'text')} longer than a sequence: split into {samples}")
        if self.bad_rows:
            lines.append(f"{counted(self.bad_rows, 'row')} skipped, the first:")
            lines += [f"  {example}" for example in self.bad_examples]
        if self.packing_efficiency is not None:
            lines.append(f"packed into {counted(self.sequences, 'sequence')}, {100 * self.packing_efficiency:.1f} % full")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read the text of `to_json`.

        Raises:
            ValueError: The text is not a report.
        """
        try:
            return _JSON.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not a report: {error.errors()[0]['msg']}") from error


_JSON = TypeAdapter(Report)


@dataclass(frozen=True)
class Checks:
    """Checks of single rows.

    Args:
        tokenizer: A Hugging Face tokenizer.
        ids: Its special tokens, and the tokens added to its vocabulary.
    """

    tokenizer: Any
    ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Checks:
        """Return the checks for a tokenizer."""
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
        return cls(tokenizer, frozenset(added.union(tokenizer.all_special_ids)))

    def of_row(self, encoded: Any, content: object, kept_tokens: int, *, answers: bool) -> tuple[int, int]:
        """Check one row.

        Args:
            encoded: The row before cutting: `ids` and the spans `answers`.
            content: The row's text, or its turns.
            kept_tokens: Tokens of the row that are kept.
            answers: Whether the spans are answers; False where all tokens are trained on.

        Returns:
            The findings as bits (`BITS`), and the token that ends the last answer, or -1.
        """
        ids, bos = encoded.ids, self.tokenizer.bos_token_id
        spans = encoded.answers if answers else encoded.answers[-1:]
        if isinstance(content, str):  # text needs no end
            spans = []
        answer_cut = bool(spans) and spans[-1][1] > kept_tokens
        ends = [] if answer_cut else [self._end(ids[start:stop]) for start, stop in spans]
        doubled = bos not in (None, self.tokenizer.eos_token_id) and (bos, bos) in pairwise(ids)
        found = {
            "no_end": -1 in ends,
            "only_end": answers and any(self._is_empty(ids[start:stop]) for start, stop in spans),
            "doubled_bos": doubled,
            "answer_cut": answer_cut,
            "cut": len(ids) > kept_tokens and not answer_cut,
        }
        return sum(BITS[name] for name, is_found in found.items() if is_found), ends[-1] if ends else -1

    def _end(self, answer: Sequence[int]) -> int:
        """Return the special token that an answer ends with, blanks after it aside, or -1."""
        last = next(self._not_blank(reversed(answer)), -1)
        return last if last in self.ids else -1

    def _is_empty(self, answer: Sequence[int]) -> bool:
        first = list(islice(self._not_blank(answer), 2))
        return not first or (len(first) == 1 and first[0] in self.ids)

    def _not_blank(self, tokens: Iterable[int]) -> Iterator[int]:
        return (token for token in tokens if token in self.ids or self.tokenizer.decode([token]).strip())

    def name(self, token: int) -> str:
        """Return a token as text."""
        return str(self.tokenizer.convert_ids_to_tokens(token))


def found_of(flags: np.ndarray, places: Sequence[str]) -> dict[str, Found]:
    """Return the findings in rows, given their bits, shape (rows,), and their places."""
    found = {name: np.flatnonzero(flags & bit) for name, bit in BITS.items()}
    return {name: _found(rows, places) for name, rows in found.items() if len(rows)}


def ends_of(ends: np.ndarray, checks: Checks) -> dict[str, int]:
    """Return the names of tokens that end rows and how many rows each ends, given the tokens, shape (rows,), or -1."""
    tokens = Counter(ends[ends >= 0].tolist())
    return {checks.name(token): rows for token, rows in tokens.most_common()}


def duplicates_of(digests: np.ndarray, places: Sequence[str]) -> Found:
    """Return the samples that equal an earlier one, given their checksums, shape (samples,), and their places."""
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    first = firsts[groups]
    later = np.flatnonzero(first != np.arange(len(digests)))
    shown = later[:PLACES_KEPT].tolist()
    return Found(len(later), tuple(f"{places[row]}, as {places[int(first[row])]}" for row in shown))


def overlap_of(train_digests: np.ndarray, held_out_digests: np.ndarray, places: Sequence[str]) -> Found:
    """Return the held-out samples that are also trained on, given checksums and the places of the held-out samples."""
    return _found(np.flatnonzero(np.isin(held_out_digests, train_digests)), places)


def _found(rows: np.ndarray, places: Sequence[str]) -> Found:
    return Found(len(rows), tuple(places[row] for row in rows[:PLACES_KEPT].tolist()))


@dataclass(frozen=True)
class Warned:
    """A warning about rows that can be trained on.

    Args:
        kind: A name of `WARNINGS`, or unusable, other_end, duplicates, little_trained, overlap.
        text: A sentence with the numbers.
        places: File and line of the first rows.
    """

    kind: str
    text: str
    places: tuple[str, ...] = ()

    def of(self, part: str) -> Warned:
        """Return the warning with the name of a part of the data before it."""
        return replace(self, text=f"{part}: {self.text}")

    def __str__(self) -> str:
        return f"{self.text} ({', '.join(self.places)})" if self.places else self.text


def warnings_of(report: Report, stops: Collection[str]) -> list[Warned]:
    """Return the warnings for prepared rows, the worst first.

    Args:
        report: Counts and findings.
        stops: Tokens at which generation stops, as text.
    """
    of_samples = f"of {counted(report.samples, 'sample')}"
    warned = []
    if report.bad_rows:
        text = f"{report.bad_rows} of {counted(report.rows, 'row')} cannot be used and are skipped"
        warned.append(Warned("unusable", text, report.bad_examples[:PLACES_KEPT]))
    for kind, text in WARNINGS.items():
        found = [source.found[kind] for source in report.sources if kind in source.found]
        places = tuple(place for each in found for place in each.places)[:PLACES_KEPT]
        if found:
            warned.append(Warned(kind, f"{sum(each.rows for each in found)} {of_samples} have {text}", places))
    ends = sum((Counter(source.ends) for source in report.sources), Counter[str]())
    for name, rows in ends.items():
        if name not in stops:
            stops_at = f"it stops at: {', '.join(sorted(stops)) or 'none'}"
            advice = "Make it the tokenizer's eos_token, or name it in generation_config.json"
            text = f"{rows} {of_samples} end with {name}, at which generation does not stop ({stops_at}). {advice}"
            warned.append(Warned("other_end", text))
    if report.duplicates.rows:
        text = f"{report.duplicates.rows} {of_samples} are the same as an earlier one"
        warned.append(Warned("duplicates", text, report.duplicates.places))
    trained = report.trained_tokens / max(report.tokens, 1)
    if trained < LITTLE_TRAINED:
        text = f"only {100 * trained:.2g} % of the tokens are trained on: the answers are short"
        warned.append(Warned("little_trained", text))
    return warned


def overlap_warning(found: Found, held_out_rows: int) -> Warned | None:
    """Return the warning for held-out samples that are also trained on, or None."""
    if not found.rows:
        return None
    text = f"{found.rows} of {counted(held_out_rows, 'held-out sample')} are also trained on: the evaluation looks too good"
    return Warned("overlap", text, found.places)


def stops_of(generation_config: Any) -> tuple[int, ...]:
    """Return the tokens at which generation stops by a `GenerationConfig`, or by None."""
    found = getattr(generation_config, "eos_token_id", None)
    return tuple(found) if isinstance(found, (list, tuple)) else () if found is None else (int(found),)
