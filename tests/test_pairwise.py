"""The covering arrays hold what they promise, and are not much longer than they must be."""

import pytest

from tests.pairwise import all_pairs, full_product, pairs_of, pairwise

SETTINGS = {"a": "abcdefgh", "b": (1, 2, 3), "c": (0, 1, 2, 3), "d": (True, False), "e": "xy", "f": "xy", "g": "xy"}


def test_every_pair_is_in_some_row():
    rows = pairwise(SETTINGS)
    covered = set().union(*(pairs_of(row) for row in rows))
    assert covered == set(all_pairs(SETTINGS))
    assert len(rows) <= 1.25 * 8 * 4  # the two longest settings alone need 32


@pytest.mark.parametrize("settings", [{"a": (1, 2)}, {"a": (1,), "b": (1,)}])
def test_small_settings(settings):
    covered = set().union(set(), *(pairs_of(row) for row in pairwise(settings)))
    assert covered == set(all_pairs(settings))


def test_rows_are_the_same_every_time_and_keep_the_order_of_settings():
    assert pairwise(SETTINGS) == pairwise(SETTINGS)
    assert all(list(row) == list(SETTINGS) for row in pairwise(SETTINGS))


def test_full_product():
    assert len(full_product(SETTINGS)) == 8 * 3 * 4 * 2 * 2 * 2 * 2
