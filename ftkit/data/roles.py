"""Whose words the `{% generation %}` marks of a chat template cover.

A mark says which characters are learned, and nothing says whose they are. So the conversation is rendered a second time
with a word of its own for what each turn says (a probe): its content, its reasoning, the name and the arguments of each of
its calls. Where those words stand, inside marks or outside, shows the turn behind each mark. Conversations of the same
structure share one probe.

Not found: marks that depend on what a turn says. The cost: one rendering for each structure of conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import _REASONING_FIELDS

ARGUMENTS = "arguments"
"""The key of a call with what the function is given."""
Span = tuple[int, int]
Render = Callable[[list[dict]], tuple[str, list[Span]]]
"""Renders turns: the text, and the marks in it as characters [start, stop)."""


@dataclass(frozen=True)
class Owners:
    """Whose words stand inside the marks of one conversation.

    Args:
        turns: for each mark, in order, the numbers from 0 of the assistant turns that it belongs to
        foreign: numbers of the turns inside a mark that are no answers
        uncovered: numbers of the assistant turns outside all marks
    """

    turns: tuple[frozenset[int], ...]
    foreign: tuple[int, ...]
    uncovered: tuple[int, ...]


def structure_of(turns: Sequence[dict], tools: list | None) -> tuple:
    """Return what conversations that share a probe have in common."""
    shapes = [(turn["role"], bool(turn["content"].strip()), *sorted(map(str, turn))) for turn in turns]
    calls = [str(_shape(turn["tool_calls"])) for turn in turns if turn.get("tool_calls")]
    return (*shapes, *calls, bool(tools))


def _shape(value: Any) -> Any:
    """Return a value of a call without its words, and of its arguments the kind alone."""
    if isinstance(value, dict):
        return {
            key: (type(inner).__name__, bool(inner)) if key == ARGUMENTS else _shape(inner) for key, inner in value.items()
        }
    return [_shape(inner) for inner in value] if isinstance(value, list) else type(value).__name__


def owners_of(turns: Sequence[dict], render: Render, *, arguments: bool = True) -> Owners:
    """Return whose words a template's marks cover.

    Args:
        turns: dictionaries with role and content
        render: renders such turns
        arguments: whether arguments of tool calls get words as well; some templates refuse that
    """
    probes = [_Probe(number, arguments) for number in range(len(turns))]
    text, marks = render([probe.turn(turn) for probe, turn in zip(probes, turns)])
    foreign, uncovered, places = [], [], []
    for number, turn in enumerate(turns):
        answer = turn["role"] == "assistant"
        for word in probes[number].words:
            found = _places(text, word)
            inside = [place for place in found if any(start < place[1] and place[0] < stop for start, stop in marks)]
            covered = [place for place in found if any(start <= place[0] and place[1] <= stop for start, stop in marks)]
            if answer:
                places += [(place, number) for place in found]
            if not answer and inside:
                foreign.append(number)
            if answer and found and not covered:
                uncovered.append(number)
    turns_of_marks = tuple(_owners(mark, sorted(places)) for mark in marks)
    return Owners(turns_of_marks, tuple(dict.fromkeys(foreign)), tuple(dict.fromkeys(uncovered)))


def _owners(mark: Span, places: Sequence[tuple[Span, int]]) -> frozenset[int]:
    """Return the turns whose words a mark covers; of a mark without words, the turn before it, or else the first."""
    start, stop = mark
    inside = {number for place, number in places if start < place[1] and place[0] < stop}
    before = [number for place, number in places if place[1] <= start]
    return frozenset(inside or before[-1:] or [number for _, number in places[:1]])


def _places(text: str, word: str) -> list[Span]:
    lowered, found, at = text.lower(), [], -1
    while (at := lowered.find(word, at + 1)) >= 0:
        found.append((at, at + len(word)))
    return found


class _Probe:
    """A turn with words of its own for what it says.

    Args:
        number: number of the turn, from 0
        arguments: whether arguments of tool calls get words as well
    """

    def __init__(self, number: int, arguments: bool):
        self.number, self.arguments = number, arguments
        self.words: list[str] = []

    def turn(self, turn: dict) -> dict:
        """Return a turn that says such words, and calls functions of such names with such arguments."""
        said = {"content": self._word()} if turn["content"].strip() else {}
        if turn["role"] == "assistant":
            said |= {key: self._word() for key in _REASONING_FIELDS if isinstance(turn.get(key), str)}
        calls = {"tool_calls": self._called(turn["tool_calls"])} if "tool_calls" in turn else {}
        return {**turn, **said, **calls}

    def _word(self) -> str:
        self.words.append(f"zq{self.number}x{len(self.words)}qz")
        return self.words[-1]

    def _called(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._of_call(key, inner) for key, inner in value.items()}
        return [self._called(inner) for inner in value] if isinstance(value, list) else value

    def _of_call(self, key: str, value: Any) -> Any:
        if key == "name" and isinstance(value, str):
            return self._word()
        if key == ARGUMENTS and self.arguments and value:
            # JSON text stays JSON text: templates may read it. The names of arguments stay as they are.
            if isinstance(value, dict):
                return {name: self._word() for name in value}
            return json.dumps({"it": self._word()}) if isinstance(value, str) else value
        return self._called(value)
