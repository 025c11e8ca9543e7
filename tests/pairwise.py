"""Covering arrays: a few rows in which every two values of different settings meet.

The full product of nine settings is thousands of runs; nearly all faults need one setting, or two together. A greedy
generator (AETG: Cohen et al., IEEE TSE 23(7), 1997, without its random candidates) writes rows until no pair is left:
each row starts from an uncovered pair, then gives every other setting the value that covers most open pairs, and among
equals the first: list cheap values first. It is deterministic, so that a failing row has the same name tomorrow.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
_Tuple = tuple[tuple[str, Hashable], ...]


def tuples_of(row: Mapping[str, Hashable], width: int) -> set[_Tuple]:
    """Return the sets of `width` (setting, value) that meet in `row`."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), width))


def all_tuples(settings: Mapping[str, Sequence[Hashable]], width: int) -> list[_Tuple]:
    """Return every `width` values of different settings, in a fixed order."""
    return [
        tuple(zip(names, values))
        for names in combinations(sorted(settings), width)
        for values in product(*(settings[name] for name in names))
    ]


def covering(settings: Mapping[str, Sequence[Hashable]], width: int) -> list[Row]:
    """Return rows that hold every `width` values of different settings at least once."""
    open_tuples = dict.fromkeys(all_tuples(settings, width))  # a set that remembers its order
    by_member: dict[tuple[str, Hashable], set[_Tuple]] = {}
    for each in open_tuples:
        for member in each:
            by_member.setdefault(member, set()).add(each)
    rows: list[Row] = []
    while open_tuples:
        row: Row = dict(next(iter(open_tuples)))
        for name in sorted(settings, key=lambda n: -len(settings[n])):
            if name not in row:
                gains = [_gain(row, (name, value), by_member) for value in settings[name]]
                row[name] = settings[name][gains.index(max(gains))]
        for each in tuples_of(row, width):
            if each in open_tuples:
                del open_tuples[each]
                for member in each:
                    by_member[member].discard(each)
        rows.append({name: row[name] for name in settings})
    return rows


def _gain(row: Row, member: tuple[str, Hashable], by_member: Mapping[tuple[str, Hashable], set[_Tuple]]) -> int:
    """Return how many open tuples a value would close in a row that is not full yet."""
    have = set(row.items())
    return sum(all(other in have or other == member for other in each) for each in by_member.get(member, ()))


def pairwise(settings: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Return rows that hold every pair of values of two settings at least once."""
    return covering(settings, 2)
