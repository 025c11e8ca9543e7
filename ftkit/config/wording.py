"""Words around numbers, for messages a person reads."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one: `1 row`, `2 rows`.

    Args:
        number: How many there are.
        noun: The noun in the singular; its plural ends in s.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
