"""From a conversation to token ids and to the spans of them that are answers.

One mechanism finds the answers: spans of characters in the text of a conversation, and the offsets of its tokens. The spans
come from one of three places, by the tokenizer:

    marked   its chat template has `{% generation %}` marks
    prefix   its chat template has none: the conversation is rendered up to each answer (with the header that asks for one)
             and through it; the text in between is the answer, with its end-of-turn token
    plain    it has no chat template: `{bos}{question}{separator}{answer}{eos}`, again for each further turn, bos in
             front only

Two habits of templates are known: some drop the reasoning of earlier turns (Qwen3), so an answer is found by its text and by
the ending that it has as the last turn; some write eos after the last turn only (Phi-3).

A template may write today's date (`strftime_now`). The date is that of the `day` of a `Template`, so that the same rows give
the same tokens on another day.

Cost: `prefix` renders a conversation of n answers 2n + 1 times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from ftkit.data.formats import BadRowError, Conversation
from ftkit.errors import UserError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATE_DIRECTIVES = "aAbBdmyYjHIMSpUWwcxX"
Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A conversation or a text as tokens.

    Args:
        ids: Token ids, T of them.
        answers: Spans [start, stop) of `ids` that count in the loss.
        doubled_bos: Whether a second beginning-of-sequence token was dropped.
    """

    ids: list[int]
    answers: list[Span]
    doubled_bos: bool = False


@dataclass(frozen=True)
class Template:
    """How a tokenizer turns conversations into tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.
        kind: marked | prefix | plain.
        lead: Special tokens that the tokenizer puts before a text (bos, or none).
        tail: Special tokens that end an answer or a text (eos).
        day: The day that the chat template writes, YYYY-MM-DD; "" if it writes none.
    """

    tokenizer: Any
    kind: str
    lead: tuple[int, ...]
    tail: tuple[int, ...]
    day: str = ""

    @classmethod
    def of(cls, tokenizer: Any, day: str | None = None) -> Template:
        """Return the template of a tokenizer.

        Args:
            tokenizer: A Hugging Face tokenizer.
            day: The day that the chat template writes, YYYY-MM-DD; None is today.

        Raises:
            UserError: The tokenizer has neither a chat template nor an end-of-sequence token.
        """
        bare, dressed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        at = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
        lead, tail = tuple(dressed[:at]), tuple(dressed[at + len(bare) :])
        if tokenizer.eos_token_id is not None:
            tail = (tokenizer.eos_token_id,)
        if tokenizer.chat_template:
            try:
                source = tokenizer.get_chat_template()
            except ValueError as error:  # several templates and none named "default"
                raise UserError(f"tokenizer {name_of(tokenizer)}: {error}") from error
            kind = "marked" if GENERATION_MARK.search(source) else "prefix"
            return cls(tokenizer, kind, lead, tail, (day or date.today().isoformat()) if "strftime_now" in source else "")
        if not tail:
            raise UserError(
                f"tokenizer {name_of(tokenizer)}: has neither a chat template nor an end-of-sequence token, so no "
                "answer would end. Set tokenizer.eos_token or tokenizer.chat_template and save the folder."
            )
        return cls(tokenizer, "plain", lead, tail)

    @property
    def reads_tool_calls(self) -> bool:
        """Whether the chat template writes `tool_calls`."""
        return self.kind != "plain" and "tool_calls" in str(self.tokenizer.chat_template)

    def text(self, text: str) -> Encoded:
        """Return plain text as tokens: bos if the tokenizer gives one, the text, eos; all of it is learned."""
        ids = [*self.lead, *self._cut(text)]
        if tuple(ids[-len(self.tail) :]) != self.tail:
            ids += self.tail
        found = self._without_double_bos(ids, [])
        return replace(found, answers=[(0, len(found.ids))])

    def conversation(self, conversation: Conversation, *, learn_all: bool = False) -> Encoded:
        """Return a conversation as tokens, with the spans of its answers without the muted ones.

        Args:
            conversation: Turns with at least one answer.
            learn_all: Whether all tokens are learned, except those of muted answers.

        Raises:
            BadRowError: The template refuses this row, or a token reaches across the edge of an answer.
            UserError: The template does not let answers be separated.
        """
        encode = self._plain if self.kind == "plain" else self._rendered
        with self._refusals():
            try:
                return encode(conversation, learn_all)
            except TypeError:
                # Most templates expect the arguments of a call as an object; some concatenate them as text.
                return encode(_with_text_arguments(conversation), learn_all)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens after which the model answers: those that precede an answer in training."""
        if self.kind == "plain":
            return self._plain(conversation, learn_all=False).ids
        with self._refusals():
            return self._without_double_bos(self._cut(self._render(conversation, ask=True)), []).ids

    def pair(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return the encoder's tokens and the label tokens for an encoder-decoder model.

        Args:
            conversation: Its last turn is the answer.

        Raises:
            BadRowError: The conversation does not end with an answer, or nothing precedes it.
        """
        *before, last = conversation.turns
        if last["role"] != "assistant" or not before:
            raise BadRowError("must end with an answer to something, for an encoder-decoder model")
        if self.kind == "plain":
            source = self.tokenizer(conversation.separator.join(turn["content"] for turn in before))["input_ids"]
        else:
            with self._refusals():
                source = self._cut(self._render(replace(conversation, turns=tuple(before)), ask=True))
        target = self.tokenizer(text_target=last["content"])["input_ids"]
        if tuple(target[-len(self.tail) :]) != self.tail:
            target = [*target, *self.tail]
        return source, target

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn the errors of the template into errors of the row."""
        try:
            yield
        except (jinja2.TemplateError, TypeError, UnicodeError) as error:
            raise BadRowError(f"the chat template of {name_of(self.tokenizer)} refuses it: {error}") from error

    def _rendered(self, conversation: Conversation, learn_all: bool) -> Encoded:
        """Encode a conversation by the chat template."""
        whole, spans = self._marked(conversation) if self.kind == "marked" else self._prefixes(conversation, learn_all)
        answers = [number for number, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
        muted = conversation.muted & set(answers)
        if muted and len(spans) != len(answers):
            raise BadRowError(f"mutes an answer; its {len(answers)} answers have {len(spans)} {{% generation %}} marks")
        silent = [span for number, span in zip(answers, spans) if number in muted]
        if learn_all and not silent:
            ids = self._cut(whole)
            return self._without_double_bos(ids, [(0, len(ids))])
        spans = _between(silent, len(whole)) if learn_all else [span for span in spans if span not in silent]
        ids, found = self._tokens_of(whole, spans)
        return self._without_double_bos(ids, found)

    def _tokens_of(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text, and the spans of tokens that are in spans of characters.

        Raises:
            BadRowError: Without marks, a token reaches across the edge of a span. A mark has the tokens that it overlaps, as
                in transformers.
        """
        if not self.tokenizer.is_fast:
            raise UserError(
                f"tokenizer {name_of(self.tokenizer)}: answers are found by character offsets, which need a fast tokenizer"
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = [
            (min(start, stop - 1), stop) for start, stop in encoded["offset_mapping"]
        ]  # blank tokens may have no width
        found: list[Span] = []
        for first, last in spans:
            inside = [i for i, (start, stop) in enumerate(offsets) if start < last and stop > first]
            if not inside:
                continue
            if self.kind == "prefix" and (offsets[inside[0]][0] < first or offsets[inside[-1]][1] > last):
                edge = first if offsets[inside[0]][0] < first else last
                raise BadRowError(f"has a token across the edge of an answer (near {text[max(edge - 20, 0) : edge + 10]!r})")
            joins = found and found[-1][1] == inside[0]  # two marks of one answer
            found.append((found.pop()[0] if joins else inside[0], inside[-1] + 1))
        return encoded["input_ids"], found

    def _marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans of characters that the template marks."""
        tools = conversation.tools
        rendered: Any = render_jinja_template(
            conversations=[list(conversation.turns)],
            tools=tools,
            chat_template=self._source(tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return rendered[0][0], rendered[1][0]

    def _prefixes(self, conversation: Conversation, learn_all: bool) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the span of characters of each answer."""
        whole = self._render(conversation)
        spans: list[Span] = []
        if learn_all and not conversation.muted:
            return whole, spans
        for number, turn in enumerate(conversation.turns):
            if turn["role"] != "assistant":
                continue
            if number == 0:
                raise BadRowError("begins with an answer to nothing; the chat template cannot be rendered before it")
            asked = self._render(conversation, number, ask=True)
            spans.append((len(asked), self._end_of_answer(conversation, number, whole, asked)))
        return whole, spans

    def _end_of_answer(self, conversation: Conversation, number: int, whole: str, asked: str) -> int:
        """Return where answer `number` ends in the whole text, with its end-of-turn token.

        Raises:
            UserError: The template renders the conversation up to the answer differently from the whole.
        """
        through = self._render(conversation, number + 1)
        if not (whole.startswith(asked) and through.startswith(asked)):
            raise self._refusal(f"asks for turn {number + 1} differently from how it renders it")
        for text in (through, through.removesuffix(self.tokenizer.eos_token or "")):
            if whole.startswith(text):
                return len(text)
        # The template rewrites the turn once another question follows: find its text, and the ending it has as the last
        # turn.
        text = conversation.turns[number]["content"].strip()
        at, ending = whole.find(text, len(asked)), through[through.rfind(text) + len(text) :]
        later = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant" and i > number]
        limit = len(self._render(conversation, later[0], ask=True)) if later else len(whole)
        stop = at + len(text) + len(ending)
        if text and text in through and at >= 0 and stop <= limit and ending and whole.startswith(ending, at + len(text)):
            return stop
        raise self._refusal(f"renders turn {number + 1} differently once more turns follow")

    def _plain(self, conversation: Conversation, learn_all: bool) -> Encoded:
        """Put question, separator and answer one after the other, each answer closed by eos."""
        ids, question = list(self.lead), ""
        answers: list[Span] = []
        silent: list[Span] = []
        for number, turn in enumerate(conversation.turns):
            if turn["role"] != "assistant":
                question += turn["content"] + conversation.separator
                continue
            head, both = self._cut(question) if question else [], self._cut(question + turn["content"])
            # If a token would reach across the edge, the answer is cut alone: the prompt stays as it is at inference.
            said = both[len(head) :] if both[: len(head)] == head else self._cut(turn["content"])
            start = len(ids) + len(head)
            ids += [*head, *said, *self.tail]
            (silent if number in conversation.muted else answers).append((start, len(ids)))
            question = ""
        ids += self._cut(question) if question else []
        return self._without_double_bos(ids, _between(silent, len(ids)) if learn_all else answers)

    def _render(self, conversation: Conversation, turns: int | None = None, *, ask: bool = False) -> str:
        """Return the text of the first turns of a conversation, with the header of an answer if asked."""
        tools = conversation.tools
        return self.tokenizer.apply_chat_template(
            list(conversation.turns[:turns]),
            tools=tools,
            chat_template=self._source(tools),
            tokenize=False,
            add_generation_prompt=ask,
        )

    def _source(self, tools: list | None) -> str:
        """Return the Jinja source, in which `strftime_now` is a macro that writes the day."""
        source: str = self.tokenizer.get_chat_template(tools=tools)
        if not self.day:
            return source
        midnight = datetime.combine(date.fromisoformat(self.day), time())
        parts = "".join(f".replace('%{each}', '{midnight.strftime(f'%{each}')}')" for each in DATE_DIRECTIVES)
        return f"{{% macro strftime_now(format) %}}{{{{ format{parts} }}}}{{% endmacro +%}}{source}"

    def _cut(self, text: str) -> list[int]:
        """Cut a text into token ids, without special tokens around it."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _without_double_bos(self, ids: list[int], answers: list[Span]) -> Encoded:
        """Drop repeated beginning-of-sequence tokens: the tokenizer adds one, and the text may have one."""
        bos, dropped = self.tokenizer.bos_token_id, 0
        if bos is not None and bos != self.tokenizer.eos_token_id:
            while ids[dropped : dropped + 2] == [bos, bos]:
                dropped += 1
        spans = [(max(start - dropped, 0), max(stop - dropped, 0)) for start, stop in answers]
        return Encoded(ids[dropped:], spans, dropped > 0)

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"the chat template of {name_of(self.tokenizer)} {reason}, so its answers cannot be separated from the "
            "questions exactly. Give the tokenizer a template with {% generation %} marks, or set data.loss_on: all."
        )


def prompt_tokens(tokenizer: Any, turns: Sequence[dict], *, separator: str = "") -> list[int]:
    """Return the tokens after which a model answers: exactly those that precede an answer in training.

    Args:
        tokenizer: A Hugging Face tokenizer.
        turns: Dictionaries with role and content, the last of them to be answered.
        separator: Text between question and answer if there is no chat template: "" as for prompt/completion rows, a line
            break as for the other formats.

    Raises:
        UserError: The chat template refuses the turns.
    """
    try:
        return Template.of(tokenizer).prompt(Conversation(tuple(turns), separator=separator))
    except BadRowError as error:
        raise UserError(str(error)) from error


def name_of(tokenizer: Any) -> str:
    """Return the name of a tokenizer in a message."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _between(silent: Sequence[Span], length: int) -> list[Span]:
    """Return the spans of [0, length) outside some spans."""
    return list(zip([0, *(stop for _, stop in silent)], [*(start for start, _ in silent), length]))


def _with_text_arguments(conversation: Conversation) -> Conversation:
    """Return a conversation whose tool calls have their arguments as JSON text."""

    def as_text(value: Any) -> Any:
        if isinstance(value, list):
            return [as_text(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        return {key: json.dumps(inner) if key == "arguments" else as_text(inner) for key, inner in value.items()}

    turns = tuple(
        {**turn, **{key: as_text(turn[key]) for key in ("tool_calls",) if key in turn}} for turn in conversation.turns
    )
    return replace(conversation, turns=turns)
