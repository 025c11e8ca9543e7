"""Words around numbers, values and misspelt names, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def brief(value: Any) -> str:
    """Write a value in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint at the nearest of some words, or the empty text. A mapping has the text to write for each."""
    nearest = difflib.get_close_matches(word, known, 1, cutoff=0.7)
    if not nearest:
        return ""
    return f" (did you mean '{known[nearest[0]] if isinstance(known, dict) else nearest[0]}'?)"
