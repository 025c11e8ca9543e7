"""The compatibility table: what it says is what the cases find."""

from __future__ import annotations

import re

import pytest

from tests.compat.case import Found, judge
from tests.compat.page import CASES, FILE, cell

SAMPLE = ("Models: two scalars, two predictions", "Optimizers: optim='adafactor'")
"""Cases that `make test` runs; the others are slow."""


def committed() -> dict[str, Found]:
    """Return the table of the page, by case."""
    found, group = {}, ""
    for line in FILE.read_text().splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        row = re.fullmatch(r"\| (.*) \| (same|differs|refused|wrong) \| (.*) \|", line)
        if row and group:
            found[f"{group}: {row[1]}"] = Found(row[2], row[3].strip())
    return found


@pytest.mark.parametrize(
    "name", [c.name if c.name in SAMPLE else pytest.param(c.name, marks=pytest.mark.slow) for c in CASES]
)
def test_the_table_says_what_a_case_finds(name):
    case = next(case for case in CASES if case.name == name)
    found = judge(case)
    listed = committed()[f"{case.group}: {cell(case.feature)}"]
    assert found.outcome == listed.outcome, found.reason
    assert found.outcome != "wrong", found.reason


def test_nothing_in_the_table_is_wrong_and_each_case_is_in_it():
    listed = committed()
    assert sorted(listed) == sorted(f"{case.group}: {cell(case.feature)}" for case in CASES)
    for name, found in listed.items():
        assert found.outcome in ("same", "differs", "refused"), name
        assert found.outcome == "same" or len(found.reason) > 20, f"{name}: no sentence of advice"
