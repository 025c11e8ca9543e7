"""Counts and warnings of prepared rows.

`Checks` looks at each row when it becomes tokens and returns its findings as bits. A `Report` counts the rows and their
findings; it is stored beside the prepared rows. `warnings_of` writes the sentences that `ftkit data`, a notebook and
`ftkit finetune` show before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import datasets
import numpy as np
from pydantic import TypeAdapter

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
BARS = 24
"""Most bars of a histogram."""
LONGEST = 4
"""Longer samples count as this many sequences in a histogram."""
Bar = tuple[int, int, int]
"""Fewest tokens, most tokens (excluded), and the samples of these lengths."""


@dataclass(frozen=True)
class Found:
    """Rows with the same finding: their number, and file and line of the first."""

    rows: int
    places: tuple[str, ...]

    @classmethod
    def of(cls, rows: np.ndarray, places: np.ndarray) -> Found:
        """Return some rows, given their numbers and the places of all rows."""
        return cls(len(rows), tuple(str(place) for place in places[rows[:PLACES_KEPT]]))


def bars_of(tokens: np.ndarray, sequence_tokens: int) -> list[Bar]:
    """Return a histogram of the lengths of samples, shape (samples,), in tokens."""
    tokens = np.minimum(tokens, LONGEST * sequence_tokens)
    width = 2 ** (int(tokens.max()) // BARS).bit_length()
    return [(low * width, (low + 1) * width, count) for low, count in enumerate(np.bincount(tokens // width).tolist())]


@dataclass(frozen=True)
class SourceReport:
    """One source."""

    label: str  # path, or name and split
    format: str  # as detected or as given
    rows: int  # rows read, unusable ones included
    unused: tuple[str, ...] = ()  # columns with content that the format does not read


@dataclass(frozen=True)
class Report:
    """Counts of the rows of all sources."""

    sources: tuple[SourceReport, ...]
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
    longest: int  # most tokens of a sample, before cutting
    lengths: list[Bar]  # tokens per sample, before cutting
    trained_lengths: list[Bar]  # trained tokens per sample
    ends: dict[str, int]  # tokens that end answers, as text, and the samples that end with each
    found: dict[str, Found]  # findings by their names in WARNINGS
    duplicates: Found  # samples equal to an earlier one, each place `file:9, as file:2`
    rendering: str = ""  # how the answers are found, see ftkit.data.template
    day: str = ""  # day that a template with `strftime_now` wrote; "" if it writes none
    sequences: int = 0  # rows of the prepared data set: samples, or packed sequences
    packing_efficiency: float | None = None  # share of the packed sequences that holds tokens
    digest: str = ""  # checksum of all tokens and labels in their order
    cached: bool = False  # whether the prepared rows were in the cache

    @classmethod
    def of(
        cls, sources: tuple[SourceReport, ...], samples: datasets.Dataset, tokenizer: Any, sequence_tokens: int
    ) -> Report:
        """Count the samples of all sources.

        Args:
            sources: The sources, in the order of their samples.
            samples: Columns of `ftkit.data.tokenize.SAMPLE_COLUMNS`, unusable rows included.
            tokenizer: The tokenizer that made them.
            sequence_tokens: Tokens of a sequence.
        """
        names = ["tokens", "trained_tokens", "cut_tokens", "found", "end", "pieces", "digest", "place"]
        columns = samples.select_columns(names).with_format("numpy")[:]
        tokens, trained, cut, pieces = (columns[name] for name in ("tokens", "trained_tokens", "cut_tokens", "pieces"))
        good, bad = tokens > 0, np.flatnonzero(tokens == 0)
        found = {name: np.flatnonzero(columns["found"] & bit) for name, bit in BITS.items()}
        ends = Counter(columns["end"][columns["end"] >= 0].tolist())
        return cls(
            sources=sources,
            rows=sum(source.rows for source in sources),
            bad_rows=len(bad),
            bad_examples=tuple(samples.select(bad[:PLACES_KEPT])["problem"]),
            samples=int(good.sum()),
            tokens=int(tokens.sum()),
            trained_tokens=int(trained.sum()),
            truncated_rows=int((cut > 0).sum()),
            cut_tokens=int(cut.sum()),
            split_rows=int((pieces > 1).sum()),
            split_samples=int(pieces[pieces > 1].sum()),
            longest=int((tokens + cut).max()),
            lengths=bars_of((tokens + cut)[good], sequence_tokens),
            trained_lengths=bars_of(trained[good], sequence_tokens),
            ends={str(tokenizer.convert_ids_to_tokens(token)): rows for token, rows in ends.most_common()},
            found={name: Found.of(rows, columns["place"]) for name, rows in found.items() if len(rows)},
            duplicates=duplicates_of(columns["digest"][pieces > 0], columns["place"][pieces > 0]),
        )

    def remarks(self) -> list[str]:
        """Return sentences on columns that are not read, and on the day."""
        unused = [f"{source.label}: not read: {', '.join(source.unused)}" for source in self.sources if source.unused]
        return [*unused, f"date in the prompt: {self.day}"] if self.day else unused

    def __str__(self) -> str:
        """Return the report for a person."""
        lines = [f"{source.label}: {counted(source.rows, 'row')}, format {source.format}" for source in self.sources]
        lines += self.remarks()
        trained = 100 * self.trained_tokens / self.tokens
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


REPORT_JSON = TypeAdapter(Report)


@dataclass(frozen=True)
class Checks:
    """Checks of single rows."""

    tokenizer: Any
    ids: frozenset[int]  # its special tokens, and the tokens added to its vocabulary

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


def duplicates_of(digests: np.ndarray, places: np.ndarray) -> Found:
    """Return the rows that equal an earlier one, given their checksums and places, shape (rows,)."""
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    first = firsts[groups]
    later = np.flatnonzero(first != np.arange(len(digests)))
    return Found(len(later), tuple(f"{places[row]}, as {places[first[row]]}" for row in later[:PLACES_KEPT]))


@dataclass(frozen=True)
class Warned:
    """A warning about rows that can be trained on."""

    kind: str  # a name of `WARNINGS`, or unusable, other_end, duplicates, overlap
    text: str  # a sentence with the numbers
    places: tuple[str, ...] = ()  # file and line of the first rows

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
        warned.append(Warned("unusable", text, report.bad_examples))
    for kind, found in report.found.items():
        warned.append(Warned(kind, f"{found.rows} {of_samples} have {WARNINGS[kind]}", found.places))
    for name, rows in report.ends.items():
        if name not in stops:
            stops_at = f"it stops at: {', '.join(sorted(stops)) or 'none'}"
            advice = "Make it the tokenizer's eos_token, or name it in generation_config.json"
            text = f"{rows} {of_samples} end with {name}, at which generation does not stop ({stops_at}). {advice}"
            warned.append(Warned("other_end", text))
    if report.duplicates.rows:
        text = f"{report.duplicates.rows} {of_samples} are the same as an earlier one"
        warned.append(Warned("duplicates", text, report.duplicates.places))
    return warned


def overlap_warnings(train_digests: np.ndarray, held_out_digests: np.ndarray, places: np.ndarray) -> list[Warned]:
    """Return a warning if held-out rows are also trained on, given checksums and the places of the held-out rows."""
    found = Found.of(np.flatnonzero(np.isin(held_out_digests, train_digests)), places)
    if not found.rows:
        return []
    rows = counted(len(held_out_digests), "held-out sample")
    return [Warned("overlap", f"{found.rows} of {rows} are also trained on: the evaluation looks too good", found.places)]


def stops_of(generation_config: Any) -> tuple[int, ...]:
    """Return the tokens at which generation stops by a `GenerationConfig`, or by None."""
    found = getattr(generation_config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
