"""Words around numbers, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2 rows`.

    Args:
        number: A count.
        noun: A noun in the singular, with a plural in s.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
