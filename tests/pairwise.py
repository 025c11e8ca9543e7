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
_Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def pairs_of(row: Mapping[str, Hashable]) -> set[_Pair]:
    """Return the pairs of (setting, value) that meet in `row`."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def all_pairs(settings: Mapping[str, Sequence[Hashable]]) -> list[_Pair]:
    """Return every pair of values of two settings, in a fixed order."""
    names = sorted(settings)
    return [
        ((one, first), (two, second))
        for one, two in combinations(names, 2)
        for first, second in product(settings[one], settings[two])
    ]


def pairwise(settings: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Return rows that hold every pair of values of two settings at least once."""
    order = list(settings)
    open_pairs = dict.fromkeys(all_pairs(settings))  # a set that remembers its order
    rows: list[Row] = []
    while open_pairs:
        row: Row = dict(next(iter(open_pairs)))
        for name in sorted(order, key=lambda n: -len(settings[n])):
            if name not in row:
                gains = [
                    sum(pair in open_pairs for pair in pairs_of({**row, name: value}) if (name, value) in pair)
                    for value in settings[name]
                ]
                row[name] = settings[name][gains.index(max(gains))]
        for pair in pairs_of(row):
            open_pairs.pop(pair, None)
        rows.append({name: row[name] for name in order})
    return rows


def full_product(settings: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Return every combination of the settings' values."""
    return [dict(zip(settings, values)) for values in product(*settings.values())]
