"""What became of the rows: read, skipped, cut, trained on, packed.

Numbers that a user should see before the first step, kept with the prepared data so that a cached preparation reports
the same. Counts of samples and tokens are those after cutting; `cut_tokens` is what is missing from them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ftkit.config.wording import counted

FILES_SHOWN = 6


def some_of(names: tuple[str, ...]) -> str:
    """Return the first of some names, and how many there are beyond them."""
    more = f" and {len(names) - FILES_SHOWN} more" if len(names) > FILES_SHOWN else ""
    return f"{', '.join(names[:FILES_SHOWN])}{more}"


@dataclass(frozen=True)
class Found:
    """Rows that have something in common.

    Args:
        rows: number of the rows
        places: where the first of these rows stand
    """

    rows: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Lengths:
    """How long the samples of a source are, before anything was cut.

    Args:
        unit: width of a class, in tokens
        counts: (class, samples) by class, ascending: the class n is of n * unit to (n + 1) * unit - 1 tokens
    """

    unit: int
    counts: tuple[tuple[int, int], ...]

    @classmethod
    def sum(cls, parts: list[Lengths]) -> Lengths:
        """Return those of several sources, whose classes are the same."""
        both: dict[int, int] = {}
        for part in parts:
            for number, count in part.counts:
                both[number] = both.get(number, 0) + count
        return cls(parts[0].unit, tuple(sorted(both.items())))

    def classes(self, most: int) -> list[tuple[int, int, int]]:
        """Return (low, high, samples) of at most about so many classes of a round width: from low up to high, in tokens."""
        widest = (self.most + 1) / most
        wide = next(step * self.unit for step in _round_steps() if step * self.unit >= widest)
        found: dict[int, int] = {}
        for number, count in self.counts:
            place = number * self.unit // wide
            found[place] = found.get(place, 0) + count
        return [(place * wide, (place + 1) * wide, found.get(place, 0)) for place in range(max(found, default=-1) + 1)]

    @property
    def most(self) -> int:
        """The longest, in tokens, to its class."""
        return (self.counts[-1][0] + 1) * self.unit - 1 if self.counts else 0

    def at(self, share: float) -> int:
        """Return the length, to its class, that a share of the samples does not exceed."""
        left = share * sum(count for _, count in self.counts)
        for number, count in self.counts:
            left -= count
            if left <= 0:
                return (number + 1) * self.unit - 1
        return self.most


def _round_steps() -> Iterator[int]:
    yield from (step * 10**power for power in itertools.count() for step in (1, 2, 5))


@dataclass(frozen=True)
class SourceReport:
    """What became of one source.

    Args:
        label: the source: its path, or its name and split
        format: the format of its rows, as detected or as asked for
        rows: rows read, unusable ones included
        bad_rows: rows skipped as unusable
        bad_examples: the first of them, each `place: reason`
        samples: samples made of the rows
        tokens: tokens kept
        trained_tokens: tokens that count in the loss
        truncated_rows: samples that were cut
        cut_tokens: tokens cut off
        found: what `ftkit.data.faults` found in the rows, by the names of its `FAULTS`
        empty_samples: samples whose answers hold nothing but their ends, all of them
        ends: the tokens that end answers, as text, and how many samples they end
        lengths: lengths of the samples, in tokens
        trained_lengths: number of trained tokens in each sample
        split_rows: plain texts longer than a sequence that became several samples
        split_samples: the samples that they became
        unread: names of columns and keys that say something and that nobody reads, see `ftkit.data.columns`
        ignored: names of `data.ignore_columns` that were there
        columns: all names in the first rows
        files: names of the files that were read, where the source is a folder
        passed_over: names of the files in the folder that hold no rows and were not read
        empty: names of those that were read and hold none
    """

    label: str
    format: str
    rows: int
    bad_rows: int
    bad_examples: tuple[str, ...]
    samples: int
    tokens: int
    trained_tokens: int
    truncated_rows: int
    cut_tokens: int
    found: dict[str, Found]
    empty_samples: int
    ends: dict[str, int]
    lengths: Lengths
    trained_lengths: Lengths
    split_rows: int = 0
    split_samples: int = 0
    unread: dict[str, Found] = field(default_factory=dict)
    ignored: dict[str, Found] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> SourceReport:
        """Return what `dataclasses.asdict` made plain, once it was JSON."""
        found = {
            kind: {name: Found(each["rows"], tuple(each["places"])) for name, each in fields[kind].items()}
            for kind in ("found", "unread", "ignored")
        }
        names = {name: tuple(fields[name]) for name in ("bad_examples", "columns", "files", "passed_over", "empty")}
        lengths = {
            name: Lengths(fields[name]["unit"], tuple(tuple(pair) for pair in fields[name]["counts"]))
            for name in ("lengths", "trained_lengths")
        }
        return cls(**{**fields, **names, **found, **lengths})


@dataclass(frozen=True)
class Report:
    """What became of the rows of all sources.

    Args:
        sources: one report for each source
        rendering: marked | prefix | plain, see `ftkit.data.template`
        sequences: rows of the prepared data set: samples, or packed sequences of them
        packing_efficiency: share of the packed sequences' room that holds tokens, or None
        duplicates: samples that are the same as an earlier one, each place `file:9, as file:2`
        digest: checksum of all tokens and labels in their order; empty where an earlier version of ftkit prepared them
        cached: whether the prepared data were there already
    """

    sources: tuple[SourceReport, ...]
    rendering: str
    sequences: int
    packing_efficiency: float | None
    duplicates: Found
    digest: str = ""
    cached: bool = False

    @property
    def rows(self) -> int:
        """Rows read, unusable ones included."""
        return sum(source.rows for source in self.sources)

    @property
    def bad_rows(self) -> int:
        """Rows skipped as unusable."""
        return sum(source.bad_rows for source in self.sources)

    @property
    def bad_examples(self) -> tuple[str, ...]:
        """The first skipped rows of each source, `place: reason`."""
        return tuple(itertools.chain.from_iterable(source.bad_examples for source in self.sources))

    @property
    def samples(self) -> int:
        """Samples made of the rows."""
        return sum(source.samples for source in self.sources)

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return sum(source.tokens for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        """Tokens that count in the loss."""
        return sum(source.trained_tokens for source in self.sources)

    @property
    def truncated_rows(self) -> int:
        """Samples that were cut."""
        return sum(source.truncated_rows for source in self.sources)

    @property
    def cut_tokens(self) -> int:
        """Tokens cut off."""
        return sum(source.cut_tokens for source in self.sources)

    @property
    def split_rows(self) -> int:
        """Plain texts that became several samples."""
        return sum(source.split_rows for source in self.sources)

    @property
    def split_samples(self) -> int:
        """Samples that plain texts were split into."""
        return sum(source.split_samples for source in self.sources)

    def __str__(self) -> str:
        """Return the report as lines for a person."""
        lines = []
        for source in self.sources:
            lines.append(f"{source.label}: {counted(source.rows, 'row')}, format {source.format}")
            if source.files:
                lines.append(f"  {counted(len(source.files), 'file')}: {some_of(source.files)}")
            if source.passed_over:
                lines.append(f"  not read: {some_of(source.passed_over)}")
            if source.empty:
                lines.append(f"  without a row: {some_of(source.empty)}")
            if source.ignored:
                lines.append(f"  ignored: {', '.join(f'{name} ({each.rows})' for name, each in source.ignored.items())}")
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

    @property
    def lengths(self) -> Lengths:
        """How long the samples of all sources are."""
        return Lengths.sum([source.lengths for source in self.sources])

    @property
    def trained_lengths(self) -> Lengths:
        """How much is trained on in each sample of all sources."""
        return Lengths.sum([source.trained_lengths for source in self.sources])

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        sources = tuple(SourceReport.of(source) for source in fields.pop("sources"))
        duplicates = fields.pop("duplicates")
        return cls(sources=sources, duplicates=Found(duplicates["rows"], tuple(duplicates["places"])), **fields)
