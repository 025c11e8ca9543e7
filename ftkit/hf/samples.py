"""From a row to a sample: token ids, labels, and what was cut.

`Tokenise` is what the worker processes run on batches of rows. A sample is at most `sequence_tokens` long; what does
not fit is cut at the end and counted. The first label of a causal sample is always -100: nothing predicts it, and in a
packed sequence the last token of another sample would. A row that cannot become a sample keeps its place and the reason
in `problem`, so that the run can stop with all of them, or count them; a template that cannot be masked exactly stops
the run at once, because it is no fault of the row.

Refused: a row with nothing left to learn, an answer wholly beyond the cut included. Plain text may be `split` into
consecutive samples instead of being cut; nothing of it is lost then but a last piece of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import datasets
import numpy as np
import xxhash

from ftkit.errors import UserError
from ftkit.hf.faults import Marks
from ftkit.hf.formats import BadRowError, Conversation, parse_record, read_row
from ftkit.hf.rendering import Rendered, Rendering

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
    }
)


@dataclass(frozen=True)
class Tokenise:
    """Turn batches of rows into samples; called by `datasets.Dataset.map` in one process or many.

    Args:
        rendering: how the tokenizer makes tokens of conversations
        marks: how rows are looked at for faults
        format_name: a name of `ftkit.hf.formats.FORMATS`
        sequence_tokens: longest sample, in tokens
        loss_on: answers | all
        task: causal-lm | seq2seq
        long_text: cut | split, for plain text
    """

    rendering: Rendering
    marks: Marks
    format_name: str
    sequence_tokens: int
    loss_on: str = "answers"
    task: str = "causal-lm"
    long_text: str = "cut"

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """Return the samples of a batch of rows, column by column (see `SAMPLE_COLUMNS`).

        Args:
            batch: columns `place`, `record` and `problem` of the rows

        Raises:
            UserError: the chat template cannot be masked exactly
        """
        samples = []
        for place, record, problem in zip(batch["place"], batch["record"], batch["problem"]):
            try:
                if problem:
                    raise BadRowError(problem)
                samples += [{**made, "place": place} for made in self.samples(record)]
            except BadRowError as error:
                samples.append({**sample([], [], 0, 0, 0), "place": place, "problem": f"{place}: {error}"})
            except UserError as error:
                raise UserError(f"{place}: {error}") from error
        return {column: [sample[column] for sample in samples] for column in SAMPLE_COLUMNS}

    def samples(self, record: str) -> list[dict]:
        """Return the samples of one row: one, or several where a long text is split.

        Raises:
            BadRowError: the row cannot be used
        """
        content = read_row(parse_record(record), self.format_name)
        if self.task == "seq2seq":
            return [self.pair(content)]
        rendered, labels = self.labelled(content)
        if all(label == IGNORED_LABEL for label in labels[1:]):
            raise BadRowError(f"has nothing to learn in its {len(labels)} tokens: no answer in them, or a single token")
        step, size = self.sequence_tokens, len(labels)
        if isinstance(content, str) and self.long_text == "split":
            starts = [start for start in range(0, size, step) if size - start > 1]
        else:
            starts, step = [0], size
        made = [self.causal(rendered.ids[start : start + step], labels[start : start + step]) for start in starts]
        faults, end = self.marks.of_row(rendered, content, self.sequence_tokens, answers=self.loss_on == "answers")
        # The faults are the row's, so that they count once: with its first sample.
        return [{**each, "faults": 0 if place else faults, "end": end} for place, each in enumerate(made)]

    def labelled(self, content: Conversation | str) -> tuple[Rendered, list[int]]:
        """Return a row for a causal model as tokens, whole, and the label of each token.

        Raises:
            BadRowError: the chat template refuses it
        """
        if isinstance(content, Conversation):
            rendered = self.rendering.conversation(content, find_answers=self.loss_on == "answers")
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
        if isinstance(content, str):
            raise BadRowError("plain text has no question and answer; an encoder-decoder model needs both")
        source, target = self.rendering.pair(content)
        cut_tokens = 0
        for ids in (source, target):
            surplus = len(ids) - self.sequence_tokens
            if surplus > 0:
                # The last token ends a source (T5, BART) and any target: it is kept.
                del ids[-1 - surplus : -1]
                cut_tokens += surplus
        return sample(source, target, len(source) + len(target), len(target), cut_tokens)


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
        "digest": int.from_bytes(xxhash.xxh3_64_digest(content), "big", signed=True),
    }
