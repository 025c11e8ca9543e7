"""What is wrong with rows that can be trained on: a run would go on, and the model would learn something else.

Rows that cannot be trained on at all are `BadRowError`s and stop a run by themselves. What is found here is told, by
`ftkit data`, in a notebook and by `ftkit finetune` before the first step, always from this one place. Most of it is seen
while a row is made into tokens (`Marks.of_row`), of every row, by the processes that do that anyway; so it is counted
exactly and kept with the prepared data. The rest follows from the counts (`faults_of`), and from the checksums of the
samples (`duplicates_of`, `overlap`).

Refused: data in which every answer of a source is empty; what is learned from them is to say nothing. The cost: some
microseconds a row, and 8 bytes a sample in the cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import _REASONING_FIELDS

from ftkit.config.wording import counted
from ftkit.data.formats import Conversation
from ftkit.data.report import Found, Report
from ftkit.data.template import Rendered
from ftkit.data.unwritten import SIGNS, Text, unwritten

FAULTS = {
    "no_end": "an answer that no token ends: the model would not learn to stop. Let the chat template close each answer "
    "with the tokenizer's eos_token, or another special token",
    "end_not_trained": "an answer whose end-of-turn token is not trained on: the model would not learn to stop. Put that "
    "token inside the template's {% generation %} marks",
    "only_end": "an answer that holds nothing but its end: the template leaves out what it says (a tool call?)",
    "left_out": "a system, user or tool turn that the chat template leaves out",
    "half_read": "an answer of which the chat template leaves out a part, which is not learned: its reasoning, or words "
    "beside its calls. Some templates drop the reasoning of all answers but the last; rows of one answer each keep it",
    "unwritten": "a value beside what turns say (a name, an argument of a call, an item of a list) that the chat template "
    "reads and does not write in full. Compare with the texts that `ftkit data` shows",
    "renamed": "a turn whose role the chat template gets under another name: developer as system, function and observation "
    "as tool. Write the role as the template has it",
    "glued": "a system text right before the prompt, with nothing between them: there is no chat template to part them. End "
    "the system text with a blank or a line break",
    "call_as_text": "a call whose arguments are JSON text, which the chat template puts in quotes once more. Write them as "
    "an object",
    "doubled_bos": "two beginning-of-sequence tokens in a row; at the front of a row one of them was dropped. Take it out "
    "of the text or of the chat template",
    "answer_cut": "an answer cut off by data.sequence_tokens, its end with it. Raise that, or shorten the rows",
    "cut": "tokens beyond data.sequence_tokens, which are lost. Raise that, or let plain text be split (data.long_text)",
    "special_in_text": "the text of a special token in a turn: the tokenizer takes it for that token. Remove it, or "
    "write it otherwise",
    "unknown": "characters that the tokenizer does not know",
    "earlier_answers": "answers before the last one, which are read and not learned: an encoder-decoder model learns "
    "the last. Write each answer that is to be learned as a row of its own, with the turns before it",
}
"""What a row can have, in the order in which it is told; the text follows `12 of 5000 rows have`."""

ALL_EMPTY = 1 << len(FAULTS)
"""The bit of a row whose answers hold nothing but their ends, all of them; `only_end` is one of some."""

CUT = 1 << list(FAULTS).index("cut")
"""The bit of a row that lost tokens at its end."""

EARLIER_ANSWERS = 1 << list(FAULTS).index("earlier_answers")
"""The bit of a row of which an encoder-decoder model learns one answer of several."""

MOST_PLACES = 3
MOST_MARKED_TEXTS = 4096
LEAST_TEXT = 3
"""Characters of a special token's text that is looked for in turns: shorter ones stand in ordinary text."""
FEW_WORDS = 3
"""Tokens up to which an answer is looked at more closely: whether there is anything in it."""
CLOSING_CHARACTERS = 20
LITTLE_TRAINED = 0.01
"""Share of tokens trained on below which it is told."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with data.

    Args:
        kind: a name of `FAULTS`, or unusable, duplicates, overlap, other_end, little_trained
        text: a sentence for a person, the numbers in it
        places: where the first such rows stand
    """

    kind: str
    text: str
    places: tuple[str, ...] = ()

    def of(self, part: str) -> Fault:
        """Return it as the fault of a part of the data, by name."""
        return replace(self, text=f"{part}: {self.text}")

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.text} ({', '.join(self.places)})" if self.places else self.text


@dataclass(frozen=True)
class Marks:
    """The special tokens of a tokenizer, and how rows are looked at for faults.

    Args:
        tokenizer: a Hugging Face tokenizer
        ids: its special tokens, and those that were added to its vocabulary
        texts: finds the text of a special token, or None where there is no such text
        unknown: the token for what it does not know, or None
        template: the source of its chat template; "" where it has none
    """

    tokenizer: Any
    ids: frozenset[int]
    texts: re.Pattern[str] | None
    unknown: int | None
    template: str

    @classmethod
    def of(cls, tokenizer: Any) -> Marks:
        """Return those of a tokenizer."""
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        special |= {number: text for number, text in added.items() if tokenizer.added_tokens_decoder[number].special}
        ids = {number for number, text in (added | special).items() if text.strip()}
        texts = sorted({text for text in special.values() if len(text) >= LEAST_TEXT and text.strip()})[:MOST_MARKED_TEXTS]
        first = "".join(sorted({re.escape(text[0]) for text in texts}))
        pattern = re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, texts))})") if texts else None
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        unknown = tokenizer.unk_token_id
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        return cls(tokenizer, frozenset(ids), pattern, None if unknown in ends else unknown, template)

    def of_row(
        self, rendered: Rendered, conversation: Conversation | str, kept_tokens: int, *, answers: bool
    ) -> tuple[int, int]:
        """Look at one row.

        Args:
            rendered: what became of it, before it is cut
            conversation: what it says, or plain text
            kept_tokens: how many tokens of it are kept
            answers: whether the spans of `rendered` are answers, and not all of it

        Returns:
            The faults, as bits in the order of `FAULTS`, and `ALL_EMPTY`; and the token that ends its last answer, or -1.
        """
        found = {"doubled_bos": rendered.doubled_bos or self._doubled_bos(rendered.ids)}
        found["unknown"] = self.unknown is not None and self.unknown in rendered.ids
        end, silent = -1, False
        if isinstance(conversation, Conversation):
            if rendered.answers and rendered.answers[-1][1] > kept_tokens:
                found["answer_cut"] = True
            else:
                end = self._end(rendered.ids, rendered.answers[-1]) if rendered.answers else -1
                name = "end_not_trained" if end < 0 and self._end_follows(rendered) else "no_end"
                ends = (self._end(rendered.ids, span) for span in rendered.answers)
                found[name] = any(each < 0 for each in ends)
            empty = [self._empty(rendered.ids[slice(*span)]) for span in rendered.answers] if answers else []
            found["only_end"], silent = any(empty), bool(empty) and all(empty)
            found["left_out"] = bool(rendered.text) and self._left_out(rendered.text, conversation)
            found["half_read"] = bool(rendered.text) and self._half_read(rendered.text, conversation)
            found["unwritten"] = bool(rendered.text) and unwritten(conversation, Text(rendered.text, self.template))
            found["renamed"] = bool(rendered.text) and conversation.renamed
            found["glued"] = not rendered.text and _glued(conversation)
            found["call_as_text"] = any(quoted in rendered.text for quoted in _quoted_arguments(conversation))
            found["special_in_text"] = self.texts is not None and any(
                self.texts.search(turn["content"]) for turn in conversation.turns
            )
        found["cut"] = len(rendered.ids) > kept_tokens and not found.get("answer_cut")
        return sum(1 << place for place, name in enumerate(FAULTS) if found.get(name)) | ALL_EMPTY * silent, end

    def _end(self, ids: Sequence[int], span: tuple[int, int]) -> int:
        """Return the special token that a span ends with, blank tokens after it aside, or -1."""
        start, stop = span
        while stop > start and ids[stop - 1] not in self.ids and not self.tokenizer.decode([ids[stop - 1]]).strip():
            stop -= 1
        return ids[stop - 1] if stop > start and ids[stop - 1] in self.ids else -1

    def _end_follows(self, rendered: Rendered) -> bool:
        """Return whether the last answer is followed by a special token and no other text."""
        after = rendered.ids[rendered.answers[-1][1] :] if rendered.answers else []
        return any(token in self.ids for token in after) and not self._says(after)

    def _empty(self, span: Sequence[int]) -> bool:
        """Return whether an answer says nothing: its end token, and blanks."""
        words = [token for token in span if token not in self.ids]
        alone = len(span) - len(words)
        return alone <= 1 and len(words) <= FEW_WORDS and not self._says(words)

    def _says(self, ids: Sequence[int]) -> bool:
        """Return whether there is more than blanks and special tokens in some tokens."""
        return bool(self.tokenizer.decode([token for token in ids if token not in self.ids]).strip())

    def _doubled_bos(self, ids: Sequence[int]) -> bool:
        bos = self.tokenizer.bos_token_id
        if bos is None or bos == self.tokenizer.eos_token_id or ids.count(bos) < 2:
            return False
        return any(first == second == bos for first, second in pairwise(ids))

    def _left_out(self, text: str, conversation: Conversation) -> bool:
        """Return whether the last words of a system, user or tool turn are missing from a text, also beside their like."""
        said = [turn["content"] for turn in conversation.turns if not is_missing(turn["content"], text)]
        for turn in conversation.turns:
            words = turn["content"].strip()[-CLOSING_CHARACTERS:]
            missing = words not in text or text.count(words) < sum(each.count(words) for each in said)
            if turn["role"] != "assistant" and words and missing:
                return True
        return False

    def _half_read(self, text: str, conversation: Conversation) -> bool:
        """Return whether a part of an answer that is to be learned is missing from a text; blanks and signs aside."""
        bare = ""
        for number, turn in enumerate(conversation.turns):
            if turn["role"] != "assistant" or number in conversation.muted:
                continue
            for said in (turn["content"], *(turn.get(key) for key in _REASONING_FIELDS)):
                if isinstance(said, str) and said.strip() not in text:
                    bare = bare or SIGNS.sub("", text)
                    if SIGNS.sub("", said) not in bare:
                        return True
        return False

    def name(self, token: int) -> str:
        """Return a token as text."""
        return str(self.tokenizer.convert_ids_to_tokens(token))


def _glued(conversation: Conversation) -> bool:
    """Return whether a system text and the question after it would run together where there is no chat template."""
    first, second = conversation.turns[:2]
    edge = first["content"][-1:] + conversation.glue + second["content"][:1]
    return first["role"] == "system" and len(edge) == 2 and not any(each.isspace() for each in edge)


def _quoted_arguments(conversation: Conversation) -> Iterator[str]:
    """Yield the arguments of calls that are JSON text of an object as they stand within JSON."""
    for turn in conversation.turns:
        calls = turn.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            said = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(said, str) and '"' in said:
                yield json.dumps(said, ensure_ascii=False)


def is_missing(said: str, text: str) -> bool:
    """Return whether the last words of what is said are not in a text."""
    words = said.strip()
    return bool(words) and words[-CLOSING_CHARACTERS:] not in text


def found_of(flags: np.ndarray, places: Any) -> dict[str, Found]:
    """Return what rows have, by kind.

    Args:
        flags: (rows,) integers, what `Marks.of_row` returned for each row
        places: where each row stands, as text
    """
    found = {}
    for bit, name in enumerate(FAULTS):
        rows = np.flatnonzero(flags & (1 << bit))
        if len(rows):
            found[name] = Found(len(rows), tuple(places[int(row)] for row in rows[:MOST_PLACES]))
    return found


def duplicates_of(digests: np.ndarray, places: Any) -> Found:
    """Return the samples that are the same as an earlier one.

    Args:
        digests: (samples,) checksums
        places: where each sample stands, as text
    """
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    first = firsts[groups]
    late = np.flatnonzero(first != np.arange(len(digests)))
    shown = late[:MOST_PLACES].tolist()
    return Found(len(late), tuple(f"{places[row]}, as {places[int(first[row])]}" for row in shown))


def overlap_of(train: np.ndarray, held_out: np.ndarray, places: Any) -> Found:
    """Return the held-out samples that are trained on as well.

    Args:
        train: (samples,) checksums of the samples that are trained on
        held_out: (samples,) checksums of the held-out samples
        places: where each held-out sample stands, as text
    """
    rows = np.flatnonzero(np.isin(held_out, train))
    return Found(len(rows), tuple(places[int(row)] for row in rows[:MOST_PLACES]))


def faults_of(report: Report, stops: Collection[str], *, shared: bool = False) -> list[Fault]:
    """Return what is wrong with prepared data, the worst first.

    Args:
        report: what became of the rows
        stops: the tokens, as text, at which generation stops: the tokenizer's eos, the model's others
        shared: whether a share of the rows is held out
    """
    return list(_faults_of(report, stops, shared))


def _faults_of(report: Report, stops: Collection[str], shared: bool) -> Iterator[Fault]:
    if report.bad_rows:
        text = f"{report.bad_rows:,} of {counted(report.rows, 'row')} cannot be used and are left out"
        yield Fault("unusable", text, report.bad_examples[:MOST_PLACES])
    for kind, text in FAULTS.items():
        found = [source.found[kind] for source in report.sources if kind in source.found]
        if rows := sum(each.rows for each in found):
            places = tuple(place for each in found for place in each.places)[:MOST_PLACES]
            yield Fault(kind, f"{rows:,} of {counted(report.samples, 'sample')} have {text}", places)
    ends: dict[str, int] = {}
    for source in report.sources:
        for name, rows in source.ends.items():
            ends[name] = ends.get(name, 0) + rows
    for name, rows in ends.items():
        if name not in stops:
            known = ", ".join(sorted(stops)) or "none"
            yield Fault(
                "other_end",
                f"{rows:,} of {counted(report.samples, 'sample')} end with {name}, at which generation does not stop (it "
                f"stops at: {known}). Make it the tokenizer's eos_token, or name it in generation_config.json",
            )
    if report.duplicates.rows:
        also = "; with eval.share, some may be held out and trained on" if shared else ""
        text = f"{report.duplicates.rows:,} of {counted(report.samples, 'sample')} are the same as an earlier one{also}"
        yield Fault("duplicates", text, report.duplicates.places)
    if report.tokens and report.trained_tokens / report.tokens < LITTLE_TRAINED:
        share = 100 * report.trained_tokens / report.tokens
        yield Fault("little_trained", f"only {share:.2g} % of the tokens are trained on: the answers are short")


def stops_of(generation: Any) -> tuple[int, ...]:
    """Return the token ids at which generation stops by a `GenerationConfig`, or by None."""
    found = getattr(generation, "eos_token_id", None)
    return tuple(found) if isinstance(found, (list, tuple)) else () if found is None else (int(found),)


def overlap_fault(overlap: Found, held_out: int) -> Fault | None:
    """Return the fault of held-out samples that are trained on as well, or None.

    Args:
        overlap: what `overlap_of` returned
        held_out: number of held-out samples
    """
    if not overlap.rows:
        return None
    many = counted(held_out, "held-out sample")
    text = f"{overlap.rows:,} of {many} are trained on as well, so that the evaluation flatters"
    return Fault("overlap", text, overlap.places)
