"""From a conversation to token ids and to the spans of them that are answers.

One mechanism finds the answers: spans of characters in the text of a conversation, and the offsets of its tokens. The spans
come from one of three places, by the tokenizer:

    marked   its chat template has `{% generation %}` marks
    prefix   its chat template has none: the conversation is rendered up to each answer (with the header that asks for one)
             and through it; the text in between is the answer, with its end-of-turn token
    plain    it has no chat template: `{bos}{question}{separator}{answer}{eos}{question}{separator}{answer}{eos}…`

Some templates drop the reasoning of earlier turns (Qwen3): such an answer begins later than it does as the last turn. Some
write eos after the last turn only (Phi-3). Some write today's date (`strftime_now`): it is the `day` of
the `Template`, so that the same rows give the same tokens on another day.

Cost: `prefix` renders a conversation that ends with its n-th answer 2n times.
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

from ftkit.data.formats import BadRowError, Conversation, with_arguments
from ftkit.errors import UserError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATE_DIRECTIVES = (*"aAbBdmyYjHIMSpUWwcxXeFD", "-d", "-m")
Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """A conversation or a text as tokens."""

    ids: list[int]
    answers: list[Span]  # spans [start, stop) of `ids` that count in the loss


@dataclass(frozen=True)
class Template:
    """How a tokenizer turns conversations into tokens."""

    tokenizer: Any
    kind: str  # marked | prefix | plain
    lead: tuple[int, ...]  # special tokens that the tokenizer puts before a text (bos, or none)
    tail: tuple[int, ...]  # special tokens that end an answer or a text (eos)
    day: str = ""  # the day that the chat template writes, YYYY-MM-DD; "" if it writes none

    @classmethod
    def of(cls, tokenizer: Any, day: str | None = None) -> Template:
        """Return the template of a tokenizer; without a `day`, it writes today's date.

        Raises:
            UserError: The tokenizer has neither a chat template nor an end-of-sequence token.
        """
        bare, dressed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        at = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
        lead, tail = tuple(dressed[:at]), tuple(dressed[at + len(bare) :])
        if tokenizer.eos_token_id is not None:
            tail = (tokenizer.eos_token_id,)
        if tokenizer.chat_template:
            source = tokenizer.get_chat_template()
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
        ids = self._closed([*self.lead, *self._cut(self._without_bos(text))])
        return Encoded(ids, [(0, len(ids))])

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

    def prompt(self, conversation: Conversation, *, seq2seq: bool = False) -> list[int]:
        """Return the tokens after which the model answers: exactly those that precede an answer in training.

        Args:
            conversation: Turns, the last of them to be answered.
            seq2seq: Whether they are for the encoder of an encoder-decoder model.
        """
        if self.kind != "plain":
            with self._refusals():
                return self._cut(self._render(conversation, ask=True))
        if seq2seq:
            return self.tokenizer(conversation.separator.join(turn["content"] for turn in conversation.turns))["input_ids"]
        return self._plain(conversation, learn_all=False).ids

    def pair(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return the encoder's tokens and the label tokens (of the last answer) for an encoder-decoder model."""
        *before, last = conversation.turns
        if last["role"] != "assistant" or not before:
            raise BadRowError("must end with an answer to something, for an encoder-decoder model")
        source = self.prompt(replace(conversation, turns=tuple(before)), seq2seq=True)
        return source, self._closed(self.tokenizer(text_target=last["content"])["input_ids"])

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn the errors of the template into errors of the row."""
        try:
            yield
        except (jinja2.TemplateError, TypeError, UnicodeError) as error:
            raise BadRowError(f"the chat template of {name_of(self.tokenizer)} refuses it: {error}") from error

    def _rendered(self, conversation: Conversation, learn_all: bool) -> Encoded:
        """Encode a conversation by the chat template."""
        if learn_all and not conversation.muted:  # no answer need be found
            ids = self._cut(self._render(conversation))
            return Encoded(ids, [(0, len(ids))])
        whole, answers = self._marked(conversation) if self.kind == "marked" else self._prefixes(conversation)
        return Encoded(*self._tokens_of(whole, _learned(conversation, answers, len(whole), learn_all)))

    def _tokens_of(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text, and the spans of tokens that are in spans of characters.

        A mark has all tokens that it overlaps, as in transformers. Without marks, such tokens are refused.
        """
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # Blank tokens may have no width.
        offsets = [(min(start, stop - 1), stop) for start, stop in encoded["offset_mapping"]]
        found: list[Span] = []
        for first, last in spans:
            inside = [i for i, (start, stop) in enumerate(offsets) if start < last and stop > first]
            if not inside:
                continue
            if self.kind == "prefix" and (offsets[inside[0]][0] < first or offsets[inside[-1]][1] > last):
                raise BadRowError(f"has a token across the edge of an answer ({text[first:last]!r:.60})")
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

    def _prefixes(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the span of characters of each answer."""
        whole = self._render(conversation)
        spans: list[Span] = []
        for number, turn in enumerate(conversation.turns):
            if turn["role"] != "assistant":
                continue
            if number == 0:
                raise BadRowError("begins with an answer to nothing; the chat template cannot be rendered before it")
            asked = self._render(conversation, number, ask=True)
            spans.append((len(asked), self._end_of_answer(conversation, number, whole, asked)))
        return whole, spans

    def _end_of_answer(self, conversation: Conversation, number: int, whole: str, asked: str) -> int:
        """Return where answer `number` ends in the whole text, with its end-of-turn token."""
        is_last = number + 1 == len(conversation.turns)
        through = whole if is_last else self._render(conversation, number + 1)
        if not (whole.startswith(asked) and through.startswith(asked)):
            raise self._refusal(f"asks for turn {number + 1} differently from how it renders it")
        for text in (through, through.removesuffix(self.tokenizer.eos_token or "")):
            if whole.startswith(text):
                return len(text)
        # The template drops the beginning of the answer, its reasoning, once another question follows.
        answer, begins = through[len(asked) :], whole[len(asked) : len(asked) + 8]
        kept = answer[answer.find(begins) :] if begins in answer else ""
        if kept and whole.startswith(kept, len(asked)) and all(each in kept for each in _spoken(conversation.turns[number])):
            return len(asked) + len(kept)
        raise self._refusal(f"renders turn {number + 1} differently once more turns follow")

    def _plain(self, conversation: Conversation, learn_all: bool) -> Encoded:
        """Put question, separator and answer one after the other, each answer closed by eos."""
        ids, question = list(self.lead), ""
        answers: list[Span] = []
        for number, turn in enumerate(conversation.turns):
            content = turn["content"] if number else self._without_bos(turn["content"])
            if turn["role"] != "assistant":
                question += content + conversation.separator
                continue
            head, both = self._cut(question) if question else [], self._cut(question + content)
            # If a token would reach across the edge, the answer is cut alone: the prompt stays as it is at inference.
            said = both[len(head) :] if both[: len(head)] == head else self._cut(content)
            start = len(ids) + len(head)
            ids += [*head, *said, *self.tail]
            answers.append((start, len(ids)))
            question = ""
        ids += self._cut(question) if question else []
        return Encoded(ids, _learned(conversation, answers, len(ids), learn_all))

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

    def _without_bos(self, text: str) -> str:
        """Return the start of a text without the bos that the tokenizer adds itself."""
        return text.removeprefix(self.tokenizer.bos_token or "") if self.lead else text

    def _closed(self, ids: list[int]) -> list[int]:
        """Return tokens that end with eos."""
        return ids if tuple(ids[-len(self.tail) :]) == self.tail else [*ids, *self.tail]

    def _refusal(self, reason: str) -> UserError:
        return UserError(
            f"the chat template of {name_of(self.tokenizer)} {reason}, so its answers cannot be separated from the "
            "questions exactly. Give the tokenizer a template with {% generation %} marks, or set data.loss_on: all."
        )


def name_of(tokenizer: Any) -> str:
    """Return the name of a tokenizer in a message."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _learned(conversation: Conversation, answers: list[Span], length: int, learn_all: bool) -> list[Span]:
    """Return the spans that count in the loss, given those of the answers in a text of some length."""
    if not conversation.muted:
        return [(0, length)] if learn_all else answers
    numbers = [number for number, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
    if len(answers) != len(numbers):
        raise BadRowError(f"mutes an answer; its {len(numbers)} answers have {len(answers)} {{% generation %}} marks")
    silent = [span for number, span in zip(numbers, answers) if number in conversation.muted]
    if learn_all:
        return list(zip([0, *(stop for _, stop in silent)], [*(start for start, _ in silent), length]))
    return [span for span in answers if span not in silent]


def _spoken(turn: dict) -> list[str]:
    """Return the text of an answer without its reasoning, and the names of the functions that it calls."""
    calls = [call.get("function", call) for call in turn.get("tool_calls", ()) if isinstance(call, dict)]
    return [turn["content"].rpartition("</think>")[2].strip(), *(str(call.get("name", "")) for call in calls)]


def _with_text_arguments(conversation: Conversation) -> Conversation:
    """Return a conversation whose tool calls have their arguments as JSON text."""
    turns = tuple(
        {**turn, "tool_calls": with_arguments(turn["tool_calls"], json.dumps)} if "tool_calls" in turn else turn
        for turn in conversation.turns
    )
    return replace(conversation, turns=turns)
