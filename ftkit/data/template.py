"""From a conversation to token ids, and to the spans of them that are answers.

Three ways, chosen by the tokenizer and reported:

    marked   its chat template has `{% generation %}` marks: the template's author says what is an answer
    prefix   its chat template has none: the conversation is rendered up to each answer (with the header that asks for
             one) and through it; the tokens between the two are the answer, its end-of-turn token included
    plain    it has no chat template: question, glue and answer follow each other as they are, then the end-of-sequence
             token: `{bos}{question}{glue}{answer}{eos}`, again for each further turn, bos only at the front

Everything is checked on tokens: a text that begins like another can still be cut into other tokens, and then the model
would be trained on a prompt that it never sees when it is asked. Where the check fails the template is refused by name;
a mask that is nearly right is silent. Two habits are understood: templates that drop the reasoning of earlier turns
(Qwen3), where an answer is found by its text and by the ending it has when it is last; and templates that put eos after
the last turn only (Phi-3).

The cost: with `prefix`, a conversation of n answers is rendered and cut into tokens 2n + 1 times.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _REASONING_FIELDS

from ftkit.data.build_once import RefusedError
from ftkit.data.columns import below, not_read, passed_over
from ftkit.data.formats import BadRowError, Conversation
from ftkit.data.roles import Owners, owners_of, structure_of
from ftkit.data.template_process import TemplateProcess
from ftkit.errors import UserError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens.

    Args:
        ids: token ids of the whole, T of them
        answers: spans [start, stop) of ids, in tokens, that the assistant said
        text: what a chat template made of it; "" where there is none
        doubled_bos: whether a second beginning-of-sequence token was dropped
        turns: numbers of the turns that each span of `answers` belongs to, where they are known
    """

    ids: list[int]
    answers: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""
    doubled_bos: bool = False
    turns: list[frozenset[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Rendering:
    """The way a tokenizer turns conversations into tokens.

    Args:
        tokenizer: a Hugging Face tokenizer, slow or fast
        way: marked | prefix | plain
        lead: special tokens that the tokenizer puts before a text (bos, or none)
        tail: special tokens that end an answer or a text (eos)
        owners: whose words the marks cover, by the structure of a conversation; filled as they come
    """

    tokenizer: Any
    way: str
    lead: tuple[int, ...]
    tail: tuple[int, ...]
    owners: dict[tuple, Owners | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def process(self) -> TemplateProcess:
        """The process that executes the template."""
        return TemplateProcess(self.tokenizer, name_of(self.tokenizer))

    @classmethod
    def of(cls, tokenizer: Any) -> Rendering:
        """Choose the way for a tokenizer.

        Raises:
            UserError: no chat template and no token that ends an answer either
        """
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        dressed = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), 0)
        lead, tail = tuple(dressed[:at]), tuple(dressed[at + len(bare) :])
        if tokenizer.eos_token_id is not None:
            tail = (tokenizer.eos_token_id,)
        if tokenizer.chat_template:
            if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
                names = ", ".join(map(repr, tokenizer.chat_template))
                raise UserError(
                    f"tokenizer {name_of(tokenizer)}: has chat templates named {names} "
                    "and none named 'default', which conversations need. Rename one of them."
                )
            template = tokenizer.get_chat_template()
            marked = GENERATION_MARK.search(template) and tokenizer.is_fast
            return cls(tokenizer, "marked" if marked else "prefix", lead, tail)
        if not tail:
            raise UserError(
                f"tokenizer {name_of(tokenizer)}: has neither a chat template nor an end-of-sequence token, so no "
                "answer would end. Set tokenizer.eos_token or tokenizer.chat_template and save the folder."
            )
        return cls(tokenizer, "plain", lead, tail)

    def text(self, text: str) -> Rendered:
        """Return plain text as tokens: bos if the tokenizer gives one, the text, eos; all of it is to be learned."""
        ids = [*self.lead, *self.cut(text)]
        if tuple(ids[-len(self.tail) :]) != self.tail:
            ids += self.tail
        found = self.without_double_bos(Rendered(ids))
        return replace(found, answers=[(0, len(found.ids))])

    def conversation(self, conversation: Conversation, *, find_answers: bool = True, compare: bool = True) -> Rendered:
        """Return a conversation as tokens, with the spans of its answers, muted ones left out.

        Args:
            conversation: turns with at least one answer
            find_answers: False where every token is trained on, but those of muted answers; then any template will do
            compare: whether the template's marks must cover the answers and nothing else

        Raises:
            BadRowError: the template refuses this row
            UserError: the template cannot be masked exactly
        """
        try:
            if not find_answers and not conversation.muted:
                if self.way == "plain":
                    whole = self.plain(conversation)
                else:
                    text = self.whole(conversation)
                    whole = Rendered(self.cut(text), [], text)
                found = self.without_double_bos(whole)
                return replace(found, answers=[(0, len(found.ids))], turns=[])
            render = {"marked": self.marked, "prefix": self.prefix, "plain": self.plain}[self.way]
            found = self.without_double_bos(render(conversation))
            if compare and find_answers and self.way == "marked":
                self.check_marks(conversation)
            return self.without_muted(found, conversation, find_answers=find_answers)
        except (jinja2.TemplateError, TypeError, UnicodeError) as error:
            raise BadRowError(f"the chat template of {name_of(self.tokenizer)} refuses it: {error}") from error

    def without_muted(self, rendered: Rendered, conversation: Conversation, *, find_answers: bool) -> Rendered:
        """Leave muted answers out of the spans; the spans are the answers, or all but the muted ones.

        Raises:
            BadRowError: which span belongs to a muted answer is not known
        """
        muted = conversation.muted
        if not muted:
            return rendered
        if len(rendered.turns) != len(rendered.answers) or any(turns & muted and turns - muted for turns in rendered.turns):
            raise BadRowError("mutes an answer that the chat template's marks do not keep apart from others")
        silent = [span for span, turns in zip(rendered.answers, rendered.turns) if turns & muted]
        if find_answers:
            return replace(rendered, answers=[span for span in rendered.answers if span not in silent])
        starts, stops = [0, *(stop for _, stop in silent)], [*(start for start, _ in silent), len(rendered.ids)]
        return replace(rendered, answers=[(start, stop) for start, stop in zip(starts, stops) if stop > start], turns=[])

    def unread_keys(self, conversation: Conversation, *, asked: int | None = None) -> list[str]:
        """Return the names of keys of turns and tools that say something and that the template does not read.

        Args:
            conversation: the conversation as it was rendered
            asked: how many turns are rendered before the template is asked for an answer; None where all turns are rendered

        Raises:
            BadRowError: the template refuses this row
        """
        column, tools = conversation.column, conversation.tools
        extras = [
            {key: value for key, value in turn.items() if key not in ("role", "content")} for turn in conversation.turns
        ]
        if not tools and not any(extras):
            return []
        shown = list(conversation.turns[:asked])
        read: list[set[str]] = [set() for _ in conversation.turns]
        read_tools: set[str] = set()
        if self.way != "plain":
            with self.refusals():
                read, read_tools = self.process.read(shown, tools, asked is not None, column)
            read += [set() for _ in conversation.turns[len(read) :]]
        unread: list[str] = []
        for extra, into in zip(extras, read):
            for key, value in extra.items():
                self.refuse_passed_over(value, below(column, key), into)
            unread += not_read(extra, column, into | _reasons_read(extra, column, into))
        self.refuse_passed_over(tools, "tools", read_tools)
        if tools and (read_tools or not isinstance(tools[0], dict)):
            unread += not_read(tools, "tools", read_tools)
        elif tools:
            unread.append("tools")
        return unread

    def refuse_passed_over(self, values: Any, name: str, read: Collection[str]) -> None:
        """Refuse a row in whose list of calls or tools the template reads some and passes others over.

        Raises:
            BadRowError: with the first of them
        """
        if missed := passed_over(values, name, read):
            raise BadRowError(
                f"has {len(values)} `{name}`, and the chat template of {name_of(self.tokenizer)} does not read number "
                f"{missed[0] + 1}. Give the tokenizer a template that reads all of them, or write the row without it"
            )

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the tokens after which the model is to answer: what it saw before an answer when it was trained."""
        if self.way == "plain":
            return self.without_double_bos(self.plain(conversation)).ids
        return self.without_double_bos(Rendered(self.cut(self.render(conversation, ask=True)))).ids

    def pair(self, conversation: Conversation) -> tuple[list[int], list[int], str]:
        """Return the encoder's tokens and the label tokens for an encoder-decoder model.

        Args:
            conversation: its last assistant turn is the answer; what comes after that is an error of the row

        Returns:
            Token ids of everything before the last answer, and of that answer with its end token; the text that a chat
            template made of the former, "" where there is none.

        Raises:
            BadRowError: the conversation does not end with an answer, or nothing precedes it
        """
        *before, last = conversation.turns
        if last["role"] != "assistant" or not before:
            raise BadRowError("must end with an answer to something, for an encoder-decoder model")
        if self.way == "plain":
            question = conversation.glue.join(turn["content"] for turn in before)
            text, source = "", self.tokenizer(question)["input_ids"]
        else:
            text = self.render(Conversation(tuple(before), conversation.tools), ask=True)
            source = self.cut(text)
        target = self.tokenizer(text_target=last["content"])["input_ids"]
        if tuple(target[-len(self.tail) :]) != self.tail:
            target = [*target, *self.tail]
        return source, target, text

    def cut(self, text: str) -> list[int]:
        """Cut a text into token ids, without any special token around it."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def render(self, conversation: Conversation, turns: int | None = None, *, ask: bool = False) -> str:
        """Return the text of the first turns of a conversation, with the header of an answer if asked."""
        with self.refusals():
            return self.process.text(list(conversation.turns[:turns]), conversation.tools, ask=ask)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn what the template raises into an error of the row."""
        try:
            yield
        except jinja2.TemplateError as error:
            raise BadRowError(f"the chat template of {name_of(self.tokenizer)} refuses it: {error}") from error

    def whole(self, conversation: Conversation) -> str:
        """Return the text of a whole conversation, `complete`."""
        return self.complete(self.render(conversation), conversation)

    def complete(self, whole: str, conversation: Conversation) -> str:
        """Return the text of a whole conversation, having checked that what the answers say is in it.

        Raises:
            UserError: it is not (templates that expect the parts of a picture leave plain text out, silently)
        """
        for number, turn in enumerate(conversation.turns, 1):
            last_words = turn["content"].strip()[-20:]
            if turn["role"] == "assistant" and "tool_calls" not in turn and last_words not in whole:
                raise UserError(
                    f"the chat template of {name_of(self.tokenizer)} leaves out what turn {number} says (near "
                    f"{last_words!r}), so the model would not be trained on it. Give the tokenizer a template for text."
                )
        return whole

    def without_double_bos(self, rendered: Rendered) -> Rendered:
        """Drop the second of two beginning-of-sequence tokens: one came from the tokenizer, one stood in the text."""
        bos, ids = self.tokenizer.bos_token_id, rendered.ids
        if bos is None or ids[:2] != [bos, bos] or bos == self.tokenizer.eos_token_id:
            return rendered
        spans = [(max(start - 1, 0), max(stop - 1, 0)) for start, stop in rendered.answers]
        return self.without_double_bos(Rendered(ids[1:], spans, rendered.text, True, rendered.turns))

    def marked(self, conversation: Conversation) -> Rendered:
        """Take the answers from the template's own marks; a token belongs to a mark that it overlaps."""
        text, marks = self.with_marks(list(conversation.turns), conversation.tools)
        whole = self.complete(text, conversation)
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = [(min(start, stop - 1), stop) for start, stop in encoded["offset_mapping"]]
        owners = self.owners_of(conversation) if conversation.muted else None
        known = owners.turns if owners is not None and len(owners.turns) == len(marks) else ()
        answers: list[tuple[int, int]] = []
        turns: list[frozenset[int]] = []
        for number, (first, last) in enumerate(marks):
            inside = [i for i, (start, stop) in enumerate(offsets) if start < last and stop > first]
            if inside:
                answers.append((inside[0], inside[-1] + 1))
                turns += known[number : number + 1]
        return Rendered(encoded["input_ids"], answers, whole, turns=turns)

    def with_marks(self, turns: list[dict], tools: list | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of turns, and the template's marks in it as characters [start, stop)."""
        with self.refusals():
            return self.process.marked([dict(turn) for turn in turns], tools)

    def owners_of(self, conversation: Conversation) -> Owners | None:
        """Return whose words the marks cover, or None where the template refuses the probe."""
        key = structure_of(conversation.turns, conversation.tools)
        if key not in self.owners:
            found = None
            for arguments in (True, False):
                with suppress(jinja2.TemplateError, TypeError, ValueError, LookupError):
                    found = owners_of(
                        conversation.turns, lambda turns: self.with_marks(turns, conversation.tools), arguments=arguments
                    )
                    break
            self.owners[key] = found
        return self.owners[key]

    def check_marks(self, conversation: Conversation) -> None:
        """Compare the template's marks with the roles of the turns.

        Raises:
            RefusedError: a mark covers what another role says, or an answer stands outside the marks
        """
        owners = self.owners_of(conversation)
        if owners is None or not (owners.foreign or owners.uncovered):
            return
        number = (owners.foreign or owners.uncovered)[0]
        what = (
            f"cover turn {number + 1} of the {conversation.turns[number]['role']}, which would be learned"
            if owners.foreign
            else f"leave out turn {number + 1} of the assistant, which would not be learned"
        )
        raise RefusedError(
            f"the {{% generation %}} marks in the chat template of {name_of(self.tokenizer)} {what}. Put them around the "
            "assistant's words and nothing else, or set data.loss_on: marks to learn what they cover."
        )

    def prefix(self, conversation: Conversation) -> Rendered:
        """Find the answers by rendering the conversation up to each of them and through it."""
        whole = self.whole(conversation)
        ids = self.cut(whole)
        answers, turns = [], []
        for number, turn in enumerate(conversation.turns):
            if turn["role"] != "assistant":
                continue
            if number == 0:
                raise BadRowError("begins with an answer to nothing; the chat template cannot be rendered before it")
            asked = self.render(conversation, number, ask=True)
            end = self.end_of_answer(conversation, number, whole, asked)
            answers.append((self.tokens_before(len(asked), whole, ids), self.tokens_before(end, whole, ids)))
            turns.append(frozenset([number]))
        return Rendered(ids, answers, whole, turns=turns)

    def end_of_answer(self, conversation: Conversation, number: int, whole: str, asked: str) -> int:
        """Return where, in characters of the whole, the answer `number` ends, its end-of-turn token included.

        Raises:
            UserError: the template renders the conversation up to the answer otherwise than inside the whole
        """
        through = self.render(conversation, number + 1)
        if not (whole.startswith(asked) and through.startswith(asked)):
            raise self.refusal(f"asks for turn {number + 1} otherwise than it renders it")
        closed = self.tokenizer.eos_token or ""
        for text in (through, through.removesuffix(closed)):  # some close the whole conversation with eos (Phi-3)
            if whole.startswith(text):
                return len(text)
        # Rewritten once another question follows: find the text, and after it the ending it has as the last answer.
        text = conversation.turns[number]["content"].strip()
        at, ending = whole.find(text, len(asked)), through[through.rfind(text) + len(text) :]
        later = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant" and i > number]
        limit = len(self.render(conversation, later[0], ask=True)) if later else len(whole)
        stop = at + len(text) + len(ending)
        found = text and text in through and at >= 0 and stop <= limit
        if found and ending and whole.startswith(ending, at + len(text)):
            return stop
        raise self.refusal(f"renders turn {number + 1} otherwise once more turns follow")

    def tokens_before(self, end: int, whole: str, ids: list[int]) -> int:
        """Return how many tokens of the whole make up its first `end` characters, having checked that they do.

        Raises:
            UserError: the tokens of the beginning are not the beginning of the tokens
        """
        head = self.cut(whole[:end])
        if ids[: len(head)] != head:
            near = whole[max(end - 20, 0) : end + 10]
            raise self.refusal(f"lets a token reach across the edge of an answer (near {near!r})")
        return len(head)

    def refusal(self, reason: str) -> UserError:
        """Return the error that names the template."""
        return UserError(
            f"the chat template of {name_of(self.tokenizer)} {reason}, so its answers cannot be separated from the "
            "questions exactly. Give the tokenizer a template with {% generation %} marks, or set data.loss_on: all."
        )

    def plain(self, conversation: Conversation) -> Rendered:
        """Put question, glue and answer one after the other, each answer closed by eos."""
        ids, answers, turns, question = list(self.lead), [], [], ""
        for number, turn in enumerate(conversation.turns):
            if turn["role"] != "assistant":
                question += turn["content"] + conversation.glue
                continue
            head = self.cut(question) if question else []
            both = self.cut(question + turn["content"])
            # Where a token would reach across the edge, the answer is cut alone: the prompt stays as it is when asked.
            said = both[len(head) :] if both[: len(head)] == head else self.cut(turn["content"])
            answers.append((len(ids) + len(head), len(ids) + len(head) + len(said) + len(self.tail)))
            ids += [*head, *said, *self.tail]
            turns.append(frozenset([number]))
            question = ""
        return Rendered(ids + (self.cut(question) if question else []), answers, turns=turns)


def _reasons_read(turn: dict, column: str, read: Collection[str]) -> set[str]:
    """Return the names for the reasoning of a turn that are read: transformers gives the first under the others' names."""
    names = {key: below(column, key) for key in _REASONING_FIELDS}
    given = [key for key in names if turn.get(key) is not None]
    if not given:
        return set()
    shown = {"reasoning_content": turn[given[0]], "thinking": turn.get("thinking", turn[given[0]]), **turn}
    said = [shown[key] for key in names if names[key] in read and key in shown]
    return {names[key] for key in given if turn[key] in said}


def name_of(tokenizer: Any) -> str:
    """Return how a tokenizer is called in a message."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
