"""A plan on a terminal and as a page: complete, escaped, and without requests or scripts."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ftkit.plan.memory import LABELS
from ftkit.plan.plan import Asked
from ftkit.report.plan_view import render, show_plan
from ftkit.spec.strategy import Strategy
from tests.plan.test_choice import on
from tests.plan.test_largest import ASKED
from tests.plan.test_state import WIDE

ASKS = pytest.mark.parametrize("asked", [ASKED, replace(ASKED, rates=None)], ids=["seconds", "bytes only"])


@ASKS
def test_a_plan_as_a_page(asked: Asked) -> None:
    plan = asked.plan()
    text = render(plan, "<script>alert(1)</script> on a node")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(src|href)=.https?:", text)
    assert ("Memory of a GPU within the step" in text) == (plan.speed is not None)
    assert text.count('class="chart') == len(plan.tiers) + 2 * (plan.speed is not None)
    for purpose in plan.memory.purposes("device", plan.memory.peak_phase("device")):
        assert LABELS.get(purpose, purpose) in text


@ASKS
def test_a_plan_on_a_terminal(asked: Asked) -> None:
    plan = asked.plan()
    out = io.StringIO()
    epoch = {"tokens": 1_000_000, "seconds": 90.0}
    show_plan(Console(file=out, width=120, soft_wrap=True, highlight=False, emoji=False), plan, epoch)
    text = out.getvalue()
    strategy = plan.strategy
    assert text.count("not measured") == 1 + (plan.speed is None)
    assert f"ZeRO stage        {strategy.stage}: " in text
    for name, kind in (("parameters", "parameters"), ("optimizer state", "state"), ("activations", "activation_offload")):
        assert re.search(rf"^{name} +on {strategy.tier(kind)}, ", text, re.MULTILINE)
    factors = re.search(
        r"^batch +(\d+) ranks x (\d+) micro-batch\S*.* x (\d+) sequences? x ([\d,]+) tokens = ([\d,]+)", text, re.M
    )
    assert factors
    ranks, accumulation, micro_batch, tokens, whole = (int(each.replace(",", "")) for each in factors.groups())
    assert (ranks, accumulation, micro_batch) == (plan.shape.world_size, strategy.accumulation, strategy.micro_batch)
    assert whole == ranks * accumulation * micro_batch * tokens
    needed = re.search(r"^needed +(.*)$", text, re.MULTILINE)
    assert needed
    assert needed.group(1).split() == [f"{plan.needed_bytes(tier) / 2**30:.2f}" for tier in plan.tiers]
    assert all(sentence in text for sentence in plan.why)
    assert "8-bit moments" not in text
    assert f"\nreason            {plan.why[0]}\n" in text
    assert len(plan.why) < 2 or f"\ndoes not fit      {plan.why[1]}\n" in text
    assert text.endswith("epoch             90 s for about 1,000,000 tokens (estimated from the file size)\n")
    assert re.search(r"^disk +\d+\.\d GiB in output.dir", text, re.MULTILINE)
    if plan.speed is None:
        assert "unknown: the rates of this machine were not measured" in text
    else:
        assert whole == plan.speed.tokens
        assert f"{plan.speed.tokens_per_s:,.0f} tokens/s, {plan.speed.tflops:.1f} TFLOPS per rank" in text
        assert plan.runner_up is not None
        assert re.search(r"^runner-up .* with (engine\.\w+=\S+)(, engine\.\w+=\S+)*$", text, re.MULTILINE)
        assert f"engine.stage={strategy.stage}" not in text, "only fields that differ"


def test_a_plan_names_the_form_of_the_state() -> None:
    plan = Asked(WIDE, on("8xv100-16gb"), Strategy(master="split"), 16, 2).plan()
    out = io.StringIO()
    show_plan(Console(file=out, width=120, soft_wrap=True, highlight=False, emoji=False), plan)
    assert "\noptimizer state   on host, 8-bit moments, split master, updated while" in out.getvalue()
    assert "16-bit residuals of master weights" in out.getvalue()
    assert "8-bit moments, split master" in render(plan, "a node")
