"""Sample prompts (`show`), and the model's answers before training, at each evaluation and after training.

Checkpoints note the answers, so a resumed run keeps the earlier ones. Generation is greedy and restores the random state:
the answers do not change the training.

Cost: at each evaluation, up to `show.max_new_tokens` forwards per batch of questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ftkit.config.recipe import Show, Source
from ftkit.data.formats import BadRowError, detect, parse_record, read_row
from ftkit.data.sources import rows
from ftkit.errors import UserError
from ftkit.hf.generate.generation import generate

if TYPE_CHECKING:
    from ftkit.train.trainer import RecipeTrainer

QUESTION_ROWS = 50
"""First rows of `show.path` in which questions are looked for."""


@dataclass(frozen=True)
class Question:
    """A sample prompt, and the answer that the data have for it.

    Args:
        turns: Chat messages with role and content. The model answers the last one.
        expected: The answer in the data, or "".
        separator: Text between question and answer if the tokenizer has no chat template.
    """

    turns: tuple[dict, ...]
    expected: str = ""
    separator: str = "\n"

    @property
    def text(self) -> str:
        """The content of the last message."""
        return self.turns[-1]["content"]


def questions(show: Show) -> list[Question]:
    """Return the sample prompts of a recipe, or those of the first rows of a file.

    Raises:
        UserError: The file has no row with a question and an answer.
    """
    if show.path is None:
        return [Question(({"role": "user", "content": prompt},)) for prompt in show.prompts]
    found = list(islice(_of_file(show.path), show.count))
    if not found:
        raise UserError(f"show.path: {show.path} has no row with a question and an answer; write show.prompts instead")
    return found


def _of_file(path: str) -> Iterator[Question]:
    """Yield each conversation of the first rows up to its last answer. Skip rows that cannot be used."""
    records = []
    for row in islice(rows(Source(path=path)), QUESTION_ROWS):
        with suppress(BadRowError):
            records.append(parse_record(row.record))
    kind = detect(records, path)
    for record in records:
        with suppress(BadRowError):
            conversation = read_row(record, kind)
            if isinstance(conversation, str):
                continue
            turns = conversation.turns
            last = max(number for number, turn in enumerate(turns) if turn["role"] == "assistant")
            if last:
                yield Question(turns[:last], turns[last]["content"], conversation.separator)


class ShowAnswers(TrainerCallback):
    """Answer the recipe's questions before the first step, at each evaluation, and after the last step.

    Args:
        trainer: Trainer of the run. Its checkpoints note the answers.
        questions: The questions.
        max_new_tokens: Most tokens of an answer.

    Attributes:
        records: Per question its text, the expected answer, the answers before and after, and in `during` the step and the
            answer of each evaluation.
    """

    def __init__(self, trainer: RecipeTrainer, questions: Sequence[Question], max_new_tokens: int):
        self.trainer, self.questions, self.max_new_tokens = trainer, questions, max_new_tokens
        self.records: list[dict[str, Any]] = [
            {"question": each.text, "expected": each.expected, "before": "", "during": [], "after": ""} for each in questions
        ]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Answer with the model as it was loaded. A resumed run takes the answers that its checkpoint notes."""
        for record, earlier in zip(self.records, self.trainer.answers):
            if (record["question"], record["expected"]) == (earlier["question"], earlier["expected"]):
                record |= {"before": earlier["before"], "during": earlier["during"]}
        self.trainer.answers = self.records
        if state.global_step == 0:
            for record, answer in zip(self.records, self._answers(model)):
                record["before"] = answer

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Answer once per step. The answers of step 0 are those before training."""
        step = state.global_step
        if step == 0 or self._has_answers_of(step):
            return
        for record, answer in zip(self.records, self._answers(model)):
            record["during"].append({"step": step, "answer": answer})

    def finish(self, model: Any, step: int) -> None:
        """Record the answers after training, which an evaluation of the last step may have given. A collective."""
        known = self._has_answers_of(step)
        last = [record["during"][-1]["answer"] for record in self.records] if known else self._answers(model)
        for record, answer in zip(self.records, last):
            record["after"] = answer

    def _has_answers_of(self, step: int) -> bool:
        return all(record["during"] and record["during"][-1]["step"] == step for record in self.records)

    def _answers(self, model: Any) -> list[str]:
        if not self.questions:
            return []
        turns, separators = [each.turns for each in self.questions], [each.separator for each in self.questions]
        return generate(
            model, self.trainer.processing_class, turns, max_new_tokens=self.max_new_tokens, separator=separators
        )
