"""One committed fault: the code that it breaks, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: what goes wrong.
        edits: (file, old text, new text); several only where one alone is harmless.
        tests: pytest node ids, run until the first turns red.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    """Return a fault with one edit."""
    return Fault(name, ((file, old, new),), tests)
