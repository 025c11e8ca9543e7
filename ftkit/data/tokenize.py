"""From a row to samples: token ids, labels, and counts of lost tokens.

`Tokenize` runs in worker processes on batches of rows. A sample has at most `sequence_tokens` tokens. A conversation that is
longer is cut at its end; plain text is split into consecutive samples, cut, or refused (`long_text`). The first label of a
causal sample is always -100: nothing predicts that token, and in a packed sequence the last token of another sample would.

A row that cannot become a sample keeps its place and the reason in `problem`, so that all such rows can be counted. A
template whose answers cannot be separated stops the run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import xxhash

from ftkit.config.recipe import Data
from ftkit.data.formats import BadRowError, Conversation, parse_record, read_row, unused_columns
from ftkit.data.report import CUT, EARLIER_ANSWERS, Checks
from ftkit.data.template import Template
from ftkit.errors import UserError

IGNORED_LABEL = -100
_INTEGER, _INTEGERS = datasets.Value("int32"), datasets.Sequence(datasets.Value("int32"))
SAMPLE_COLUMNS = datasets.Features(
    {
        **dict.fromkeys(("input_ids", "labels"), _INTEGERS),
        **dict.fromkeys(("tokens", "trained_tokens", "cut_tokens", "found", "end", "pieces"), _INTEGER),
        **dict.fromkeys(("place", "problem", "unused"), datasets.Value("string")),
        "digest": datasets.Value("int64"),
    }
)
"""Columns of a sample. Those of its row are in the first sample: found, end, unused, and pieces, the number of samples."""
NO_TOKENS: dict[str, Any] = {
    **{"input_ids": [], "labels": [], "place": "", "problem": "", "unused": "", "end": -1},
    **dict.fromkeys(("tokens", "trained_tokens", "cut_tokens", "found", "pieces", "digest"), 0),
}
"""The sample of a row that cannot be used."""


@dataclass(frozen=True)
class Tokenize:
    """Turn batches of rows into samples; `datasets.Dataset.map` calls it in one process or many."""

    template: Template
    checks: Checks
    format_name: str  # a name of `ftkit.data.formats.COLUMNS`
    settings: Data
    task: str  # causal-lm | seq2seq

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """Return the samples of a batch of rows, column by column (see `SAMPLE_COLUMNS`).

        Raises:
            UserError: The chat template does not let answers be separated.
        """
        samples = []
        for place, record in zip(batch["place"], batch["record"]):
            try:
                samples += [{**made, "place": place} for made in self.samples(record)]
            except BadRowError as error:
                samples.append({**NO_TOKENS, "place": place, "problem": f"{place}: {error}"})
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
        return {column: [sample[column] for sample in samples] for column in SAMPLE_COLUMNS}

    def samples(self, record: str) -> list[dict]:
        """Return the samples of one row: one, or several if a long text is split."""
        row = parse_record(record)
        content = read_row(row, self.format_name, tool_calls=self.template.reads_tool_calls)
        made = [self._pair(content)] if self.task == "seq2seq" else self._causal(content)
        made[0] |= {"unused": ", ".join(unused_columns(row, self.format_name)), "pieces": len(made)}
        return made

    def _causal(self, content: Conversation | str) -> list[dict]:
        """Return the samples of a row for a causal model."""
        most, is_text = self.settings.sequence_tokens, isinstance(content, str)
        learn_all = self.settings.loss_on == "all"
        if isinstance(content, str):
            encoded = self.template.text(content)
        else:
            encoded = self.template.conversation(content, learn_all=learn_all)
        ids, labels = encoded.ids, [IGNORED_LABEL] * len(encoded.ids)
        for start, stop in encoded.answers:
            labels[start:stop] = ids[start:stop]
        if all(label == IGNORED_LABEL for label in labels[1:]):
            raise BadRowError(f"has nothing to learn in its {len(labels)} tokens: no answer in them, or a single token")
        if is_text and self.settings.long_text == "stop" and len(ids) > most:
            raise BadRowError(f"has {len(ids)} tokens, and data.sequence_tokens is {most} (data.long_text is stop)")
        split = is_text and self.settings.long_text == "split"
        edges = edges_of(len(ids), most) if split else [0, len(ids)]
        # Equal samples have equal checksums; all parts of a text that is split have that of the whole.
        digest = _digest(ids, labels) if split else _digest(ids[:most], labels[:most])
        made = [self._cut(ids[start:stop], labels[start:stop]) | {"digest": digest} for start, stop in pairwise(edges)]
        found, end = self.checks.of_row(encoded, content, most, answers=not learn_all)
        made[0] |= {"found": found & ~CUT if split else found, "end": end}
        return made

    def _cut(self, ids: list[int], labels: list[int]) -> dict:
        """Return one sample of a causal model, cut to its length."""
        most = self.settings.sequence_tokens
        kept = labels[1:most]
        if all(label == IGNORED_LABEL for label in kept):
            first = next(i for i, label in enumerate(labels) if i and label != IGNORED_LABEL)
            raise BadRowError(f"loses its whole answer: {first} tokens come before it, and sequence_tokens is {most}")
        return _sample(ids[:most], [IGNORED_LABEL, *kept], max(0, len(ids) - most))

    def _pair(self, content: Conversation | str) -> dict:
        """Return one sample of an encoder-decoder model: the question for the encoder, the answer as labels."""
        if isinstance(content, str):
            raise BadRowError("plain text has no question and answer; an encoder-decoder model needs both")
        if len(content.turns) - 1 in content.muted:
            raise BadRowError("mutes its last answer, so that an encoder-decoder model has nothing to learn")
        source, target = self.template.pair(content)
        cut_tokens = 0
        for ids in (source, target):
            surplus = len(ids) - self.settings.sequence_tokens
            if surplus > 0:
                del ids[-1 - surplus : -1]  # the last token ends a source (T5, BART) and any target: it is kept
                cut_tokens += surplus
        answers = {number for number, turn in enumerate(content.turns) if turn["role"] == "assistant"} - content.muted
        counts = {"tokens": len(source) + len(target), "trained_tokens": len(target), "digest": _digest(source, target)}
        return _sample(source, target, cut_tokens) | counts | {"found": EARLIER_ANSWERS if len(answers) > 1 else 0}


def edges_of(tokens: int, most: int) -> list[int]:
    """Return where a text is split: samples of at most `most` tokens are between consecutive edges."""
    edges = [*range(0, tokens, most), tokens]
    if tokens > most and tokens - edges[-2] == 1:
        edges[-2] -= 1  # nothing predicts a token that is alone
    return edges


def _digest(ids: list[int], labels: list[int]) -> int:
    """Return a checksum of token ids and labels."""
    content = np.asarray([len(ids), *ids, *labels], np.int32).tobytes()
    return int.from_bytes(xxhash.xxh3_64_digest(content), "big", signed=True)


def _sample(ids: list[int], labels: list[int], cut_tokens: int) -> dict[str, Any]:
    trained_tokens = sum(label != IGNORED_LABEL for label in labels)
    counts = {"tokens": len(ids), "trained_tokens": trained_tokens, "cut_tokens": cut_tokens}
    return {**NO_TOKENS, "input_ids": ids, "labels": labels, **counts}
