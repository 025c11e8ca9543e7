"""From a row to a sample: token ids, labels, and what was cut.

`Tokenise` is what the worker processes run on batches of rows. A sample is at most `sequence_tokens` long; what does
not fit is cut at the end and counted. The first label of a causal sample is always -100: nothing predicts it, and in a
packed sequence the last token of another sample would. A row that cannot become a sample keeps its place and the reason
in `problem`, so that the run can stop with all of them, or count them; a template that cannot be masked exactly stops
the run at once, because it is no fault of the row.

Plain text that is longer is split into consecutive samples, unless it is to be cut or to stop the run.

Refused: a row with nothing left to learn, an answer wholly beyond the cut included.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import datasets
import numpy as np
import xxhash

from ftkit.data.build_once import RefusedError
from ftkit.data.columns import noted, without
from ftkit.data.formats import BadRowError, Conversation, parse_record, read_row, tools_of, unread_columns
from ftkit.data.report import CUT, EARLIER_ANSWERS, Checks
from ftkit.data.template import Rendered, Rendering
from ftkit.errors import UserError

IGNORED_LABEL = -100
SAMPLE_COLUMNS = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "labels": datasets.Sequence(datasets.Value("int32")),
        "place": datasets.Value("string"),
        "tokens": datasets.Value("int32"),
        "trained_tokens": datasets.Value("int32"),
        "cut_tokens": datasets.Value("int32"),
        "problem": datasets.Value("string"),
        "faults": datasets.Value("int32"),
        "end": datasets.Value("int32"),
        "digest": datasets.Value("int64"),
        "names": datasets.Value("string"),
        "pieces": datasets.Value("int32"),
    }
)


@dataclass(frozen=True)
class Tokenise:
    """Turn batches of rows into samples; called by `datasets.Dataset.map` in one process or many.

    Args:
        rendering: how the tokenizer makes tokens of conversations
        checks: how rows are checked
        format_name: a name of `ftkit.data.formats.FORMATS`
        sequence_tokens: longest sample, in tokens
        loss_on: answers | marks | all
        task: causal-lm | seq2seq
        long_text: split | cut | stop, for plain text
        ignored: names of columns and keys that are removed before a row is read
    """

    rendering: Rendering
    checks: Checks
    format_name: str
    sequence_tokens: int
    loss_on: str = "answers"
    task: str = "causal-lm"
    long_text: str = "split"
    ignored: frozenset[str] = frozenset()

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """Return the samples of a batch of rows, column by column (see `SAMPLE_COLUMNS`).

        Args:
            batch: columns `place`, `record` and `problem` of the rows

        Raises:
            UserError: the chat template cannot be masked exactly
            RefusedError: its marks do not cover the answers alone
        """
        samples = []
        for place, record, problem in zip(batch["place"], batch["record"], batch["problem"]):
            try:
                if problem:
                    raise BadRowError(problem)
                samples += [{**made, "place": place} for made in self.samples(record)]
            except BadRowError as error:
                samples.append({**sample([], [], 0, 0, 0), "place": place, "problem": f"{place}: {error}"})
            except RefusedError as error:
                raise RefusedError(f"{place}: {error}") from error
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
        return {column: [sample[column] for sample in samples] for column in SAMPLE_COLUMNS}

    def samples(self, record: str) -> list[dict]:
        """Return the samples of one row: one, or several where a long text is split.

        Raises:
            BadRowError: the row cannot be used
        """
        content, unread, matched = self.read(record)
        names = noted(unread, matched)
        if self.task == "seq2seq":
            return [{**self.pair(content), "names": names}]
        rendered, labels = self.labelled(content)
        if all(label == IGNORED_LABEL for label in labels[1:]):
            raise BadRowError(f"has nothing to learn in its {len(labels)} tokens: no answer in them, or a single token")
        size = len(labels)
        if isinstance(content, str) and self.long_text == "stop" and size > self.sequence_tokens:
            raise BadRowError(
                f"has {size} tokens, and data.sequence_tokens is {self.sequence_tokens} (data.long_text is stop)"
            )
        split = isinstance(content, str) and self.long_text == "split"
        edges = edges_of(size, self.sequence_tokens) if split else [0, size]
        made = [self.causal(rendered.ids[start:stop], labels[start:stop]) for start, stop in pairwise(edges)]
        lost = size - edges[-1]
        faults, end = self.checks.of_row(rendered, content, self.sequence_tokens, answers=self.loss_on != "all")
        if split:
            faults &= ~CUT
        # What is known of the row counts once: with its first sample.
        for number, part in enumerate(made):
            part |= {"end": end}
            if number == 0:
                part |= {"faults": faults, "names": names, "pieces": len(made), "cut_tokens": part["cut_tokens"] + lost}
        return made

    def read(self, record: str) -> tuple[Conversation | str, list[str], set[str]]:
        """Return a row's content, the names that are read by nobody, and those that are ignored.

        Raises:
            BadRowError: the row cannot be used
        """
        matched: set[str] = set()
        row = parse_record(record)
        if self.format_name != "text" and "tools" not in self.ignored and isinstance(row.get("tools"), str):
            row["tools"] = tools_of(row)  # so that names below it may be ignored
        row = without(row, self.ignored, matched)
        content = read_row(row, self.format_name)
        unread = unread_columns(row, self.format_name)
        if isinstance(content, Conversation):
            unread += content.unread
            unread += self.rendering.unread_keys(content, asked=len(content.turns) - 1 if self.task == "seq2seq" else None)
        return content, unread, matched

    def labelled(self, content: Conversation | str) -> tuple[Rendered, list[int]]:
        """Return a row for a causal model as tokens, whole, and the label of each token.

        Raises:
            BadRowError: the chat template refuses it
        """
        if isinstance(content, Conversation):
            rendered = self.rendering.conversation(
                content, find_answers=self.loss_on != "all", compare=self.loss_on == "answers"
            )
        else:
            rendered = self.rendering.text(content)
        labels = [IGNORED_LABEL] * len(rendered.ids)
        for start, stop in rendered.answers:
            labels[start:stop] = rendered.ids[start:stop]
        return rendered, labels

    def causal(self, ids: list[int], labels: list[int]) -> dict:
        """Cut one sample of a causal model to its length.

        Raises:
            BadRowError: the answer lies wholly beyond the cut
        """
        kept = labels[1 : self.sequence_tokens]
        trained_tokens = sum(label != IGNORED_LABEL for label in kept)
        if not trained_tokens:
            first = next(i for i, label in enumerate(labels) if i and label != IGNORED_LABEL)
            raise BadRowError(
                f"loses its whole answer: {first} tokens come before it, and sequence_tokens is {self.sequence_tokens}"
            )
        ids, cut_tokens = ids[: self.sequence_tokens], max(0, len(ids) - self.sequence_tokens)
        return sample(ids, [IGNORED_LABEL, *kept], len(ids), trained_tokens, cut_tokens)

    def pair(self, content: Conversation | str) -> dict:
        """Make one sample of an encoder-decoder model: the question for the encoder, the answer as labels.

        Raises:
            BadRowError: plain text, which has no question
        """
        if isinstance(content, Conversation) and len(content.turns) - 1 in content.muted:
            raise BadRowError("mutes its last answer, so that an encoder-decoder model has nothing to learn")
        if isinstance(content, str):
            raise BadRowError("plain text has no question and answer; an encoder-decoder model needs both")
        source, target, _ = self.rendering.pair(content)
        cut_tokens = 0
        for ids in (source, target):
            surplus = len(ids) - self.sequence_tokens
            if surplus > 0:
                # The last token ends a source (T5, BART) and any target: it is kept.
                del ids[-1 - surplus : -1]
                cut_tokens += surplus
        made = sample(source, target, len(source) + len(target), len(target), cut_tokens)
        answers = {number for number, turn in enumerate(content.turns) if turn["role"] == "assistant"}
        if len(answers - content.muted) > 1:
            made |= {"faults": EARLIER_ANSWERS}
        return made


def edges_of(tokens: int, most: int) -> list[int]:
    """Return where a text is split: between consecutive edges lie its samples, each of 2 tokens at least.

    Args:
        tokens: tokens of the text
        most: most tokens of a sample; with 2, a last token may be left after the last edge
    """
    edges = [*range(0, tokens, most), tokens]
    if tokens > most and tokens - edges[-2] == 1:  # nothing predicts a token that stands alone
        edges = [*edges[:-2], tokens - 2, tokens] if most > 2 else edges[:-1]
    return edges


def sample(ids: list[int], labels: list[int], tokens: int, trained_tokens: int, cut_tokens: int) -> dict:
    """Return the columns of one sample, but its place; no faults are known of it."""
    content = np.asarray([len(ids), *ids, *labels], np.int32).tobytes()
    return {
        "input_ids": ids,
        "labels": labels,
        "tokens": tokens,
        "trained_tokens": trained_tokens,
        "cut_tokens": cut_tokens,
        "problem": "",
        "faults": 0,
        "end": -1,
        "names": "",
        "pieces": 0,
        "digest": int.from_bytes(xxhash.xxh3_64_digest(content), "big", signed=True),
    }
