"""The page of a plan: all of it there, escaped, and without anything that a browser would fetch or run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ftkit.plan.plan import Asked
from ftkit.report.plan_view import render
from tests.plan.test_largest import ASKED


@pytest.mark.parametrize("asked", [ASKED, replace(ASKED, rates=None)], ids=["seconds", "bytes only"])
def test_a_plan_as_a_page(asked: Asked) -> None:
    plan = asked.plan()
    text = render(plan, "<script>alert(1)</script> on a node")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(src|href)=.https?:", text)
    assert ("Memory of a GPU within the step" in text) == (plan.speed is not None)
    assert text.count('class="chart') == len(plan.tiers) + 2 * (plan.speed is not None)
    for purpose in plan.memory.purposes("device", plan.memory.peak_phase("device")):
        assert purpose in text
