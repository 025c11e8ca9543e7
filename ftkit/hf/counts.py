"""What became of the rows: read, skipped, cut, trained on, packed.

Numbers that a user should see before the first step, kept with the prepared data so that a cached preparation reports
the same. Counts of samples and tokens are those after cutting; `cut_tokens` is what is missing from them.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass

from ftkit.words import counted


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


@dataclass(frozen=True)
class Report:
    """What became of the rows of all sources.

    Args:
        sources: one report a source
        rendering: marked | prefix | plain, see `ftkit.hf.rendering`
        sequences: rows of the prepared data set: samples, or packed sequences of them
        packing_efficiency: share of the packed sequences' room that holds tokens, or None
        digest: checksum of all tokens and labels in their order; empty where an earlier version of ftkit prepared them
        cached: whether the prepared data were there already
    """

    sources: tuple[SourceReport, ...]
    rendering: str
    sequences: int
    packing_efficiency: float | None
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

    def __str__(self) -> str:
        """Return the report as lines for a person."""
        lines = [f"{source.label}: {counted(source.rows, 'row')}, format {source.format}" for source in self.sources]
        trained = 100 * self.trained_tokens / max(self.tokens, 1)
        lines.append(
            f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')}, {trained:.0f} % of them trained on"
        )
        if self.cut_tokens:
            share = 100 * self.cut_tokens / (self.tokens + self.cut_tokens)
            cut = counted(self.cut_tokens, "token")
            lines.append(f"{counted(self.truncated_rows, 'sample')} truncated: {cut} cut ({share:.1f} %)")
        if self.bad_rows:
            lines.append(f"{counted(self.bad_rows, 'row')} skipped, the first:")
            lines += [f"  {example}" for example in self.bad_examples]
        if self.packing_efficiency is not None:
            lines.append(f"packed into {counted(self.sequences, 'sequence')}, {100 * self.packing_efficiency:.1f} % full")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        sources = [{**source, "bad_examples": tuple(source["bad_examples"])} for source in fields.pop("sources")]
        return cls(sources=tuple(SourceReport(**source) for source in sources), **fields)
