"""The questions that a run answers before and after, so that a person can see what it learned.

They come from the recipe's `show`: written there, or taken from the first rows of a file in any of the formats that
training reads; then the answer that stands in the file is shown beside the model's. What it refuses: a file of plain
text, which holds no questions. What it costs: the first rows of the file are read in every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from ftkit.config.recipe import Show
from ftkit.data.columns import without
from ftkit.data.formats import BadRowError, Conversation, detect, parse_record, read_row, unread_columns
from ftkit.data.sources import Row, Source
from ftkit.data.template import Rendering
from ftkit.data.turns import turn_of
from ftkit.errors import UserError

ROWS_LOOKED_AT = 50


@dataclass(frozen=True)
class Question:
    """A question, and the answer that the data have for it.

    Args:
        turns: Dictionaries with role and content; the last is to be answered.
        expected: The answer in the data, or "".
        glue: What stands between question and answer where the tokenizer has no chat template.
        unread: Names of columns, and of keys of turns, that it is asked without.
    """

    turns: tuple[dict, ...]
    expected: str = ""
    glue: str = "\n"
    unread: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The last turn, as a person reads it."""
        return self.turns[-1]["content"]


def questions(
    show: Show, ignore_columns: Sequence[str] = (), *, skip: bool = False, rendering: Rendering | None = None
) -> list[Question]:
    """Return the questions of a recipe.

    Args:
        show: The section of the recipe.
        ignore_columns: Names of columns and keys to read without, as in training.
        skip: Whether rows that cannot be used are passed over.
        rendering: How turns become tokens: it knows which of their keys are read.

    Raises:
        UserError: The file has no row with a question and an answer, or one before those that cannot be used.
    """
    if show.path is None:
        return [Question(({"role": "user", "content": prompt},)) for prompt in show.prompts]
    found = list(islice(_of_file(show.path, frozenset(ignore_columns), skip, rendering), show.count))
    if not found:
        raise UserError(f"show.path: {show.path} has no row with a question and an answer; write show.prompts instead")
    return found


def _of_file(path: str, ignored: frozenset[str], skip: bool, rendering: Rendering | None) -> Iterator[Question]:
    rows = list(islice(Source(path=path).rows(), ROWS_LOOKED_AT))
    read = []
    for row in rows:
        with suppress(BadRowError):
            read.append(_read(row, ignored))
    kind = detect(read, path) if read or skip else ""
    for row in rows:
        try:
            columns = _read(row, ignored)
            content = read_row(columns, kind)
            question = _asked(content, rendering) if isinstance(content, Conversation) else None
        except BadRowError as error:
            if not skip:
                raise UserError(f"show.path: {row.place}: {error}") from error
        else:
            if question is not None:
                yield replace(question, unread=(*unread_columns(columns, kind), *question.unread))


def _asked(content: Conversation, rendering: Rendering | None) -> Question | None:
    """Return a conversation up to its last answer, without what nobody reads; None where nothing is asked.

    Raises:
        BadRowError: The chat template refuses it.
    """
    last = max(number for number, turn in enumerate(content.turns) if turn["role"] == "assistant")
    if not last:
        return None
    turns = content.turns[:last]
    asked = replace(content, turns=turns, tools=None)
    keys = rendering.unread_keys(asked, asked=last) if rendering is not None else []
    if keys:
        left = [without(turn, frozenset(keys), set(), content.column) for turn in turns]
        turns = tuple(turn_of(turn, f"`{content.column}`, turn {number}") for number, turn in enumerate(left, 1))
    unread = (*content.unread, *keys, *(["tools"] if content.tools else []))
    return Question(turns, content.turns[last]["content"], content.glue, unread)


def _read(row: Row, ignored: frozenset[str]) -> dict:
    if row.problem:
        raise BadRowError(row.problem)
    return without(parse_record(row.record), ignored, set())
