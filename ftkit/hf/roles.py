"""Whose words the `{% generation %}` marks of a chat template cover.

A mark says which characters are learned, and nothing says whose they are. So the conversation is rendered a second time
with a word of its own for what each turn says (a probe); where those words stand, inside marks or outside, shows the turn
behind each mark. Conversations of the same structure share one probe.

Not found: marks that depend on what a turn says. The cost: one rendering for each structure of conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
Render = Callable[[list[dict]], tuple[str, list[Span]]]
"""Renders turns: the text, and the marks in it as characters [start, stop)."""


@dataclass(frozen=True)
class Owners:
    """Whose words stand inside the marks of one conversation.

    Args:
        turns: of each mark, in order: numbers from 0 of the assistant turns that it belongs to
        foreign: numbers of the turns inside a mark that are no answers
        uncovered: numbers of the assistant turns outside all marks
    """

    turns: tuple[frozenset[int], ...]
    foreign: tuple[int, ...]
    uncovered: tuple[int, ...]


def structure_of(turns: Sequence[dict], tools: list | None) -> tuple:
    """Return what conversations that share a probe have in common."""
    shapes = [(turn["role"], bool(turn["content"].strip()), *sorted(map(str, turn))) for turn in turns]
    calls = [len(turn["tool_calls"]) for turn in turns if isinstance(turn.get("tool_calls"), list)]
    return (*shapes, *calls, bool(tools))


def owners_of(turns: Sequence[dict], render: Render) -> Owners:
    """Return whose words a template's marks cover.

    Args:
        turns: dictionaries with role and content
        render: renders such turns
    """
    text, marks = render([_probe(turn, number) for number, turn in enumerate(turns)])
    foreign, uncovered, places = [], [], []
    for number, turn in enumerate(turns):
        answer = turn["role"] == "assistant"
        for word in (_word(number), _call(number)):
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


def _word(number: int) -> str:
    return f"zq{number}qz"


def _call(number: int) -> str:
    return f"zq{number}cz"


def _places(text: str, word: str) -> list[Span]:
    lowered, found, at = text.lower(), [], -1
    while (at := lowered.find(word, at + 1)) >= 0:
        found.append((at, at + len(word)))
    return found


def _probe(turn: dict, number: int) -> dict:
    """Return a turn that says a word of its own, and calls a function of such a name."""
    said = {"content": _word(number)} if turn["content"].strip() else {}
    calls = {"tool_calls": _renamed(turn["tool_calls"], _call(number))} if "tool_calls" in turn else {}
    return {**turn, **said, **calls}


def _renamed(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {
            key: name if key == "name" and isinstance(inner, str) else _renamed(inner, name) for key, inner in value.items()
        }
    return [_renamed(inner, name) for inner in value] if isinstance(value, list) else value
