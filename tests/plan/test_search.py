"""The search: its bounds hold, it finds what simulating every way finds, and prefers simple ways where nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftkit.plan.candidates import Request
from ftkit.plan.catalog import profiles
from ftkit.plan.limits import shortages
from ftkit.plan.memory import GIB, memory
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.schedule import speed
from ftkit.plan.search import ALIKE, bound, fastest, seconds
from ftkit.spec.strategy import Strategy
from tests.plan.made import make_plan
from tests.plan.test_choice import LLAMA_13B, llama, on

V100 = profiles()["8xv100-16gb"].rates_of_a_rank(8)
assert V100 is not None
WITH_NVME = replace(V100, nvme_read=0.8e9, nvme_write=0.7e9)
IDS = ("as published", "slow PCIe", "slow memory and links")
SHORT = llama(5120, 13824, 6, 32000)
"""13B's blocks, six of them: each way is simulated in no time."""


def candidates(shape, limits, sequences=8):
    found = Request(shape, limits, sequences=sequences, preferred=2).order()
    return [each for each in found if not shortages(memory(shape, each, cpu=False), limits)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rates",
    [
        WITH_NVME,
        pytest.param(replace(WITH_NVME, pcie=1e9), marks=pytest.mark.slow),
        pytest.param(replace(WITH_NVME, dram=5e9, link=9e9), marks=pytest.mark.slow),
    ],
    ids=IDS,
)
def test_it_finds_what_simulating_all_finds(rates):
    limits = on("8xv100-16gb", device_bytes=6 * GIB, nvme_bytes=1 << 40)
    ways = candidates(SHORT, limits)
    assert len(ways) > 50
    took = {each: speed(SHORT, each, rates).seconds for each in ways}
    assert all(bound(SHORT, each, rates) <= taken * (1 + 1e-9) for each, taken in took.items())
    for each in ways:  # rounds are alike at once, but for sums in host memory, which wait for the update before
        close = 1e-9 if each.gradients == "device" else ALIKE / 4
        assert seconds(SHORT, each, rates) == pytest.approx(took[each], rel=close), each
    (first, _), (second, _) = fastest(ways, SHORT, rates)
    best = min(took.values())
    assert first == next(each for each in ways if took[each] <= best * (1 + ALIKE))
    others = [each for each in ways if replace(each, activations="keep") != replace(first, activations="keep")]
    assert second in others
    assert took[second] <= min(took[each] for each in others) * (1 + ALIKE)


def test_a_frozen_block_waits_for_no_reduction():
    blocks = tuple((replace(flat, trained=number % 2 == 1),) for number, (flat,) in enumerate(SHORT.blocks))
    shape = replace(SHORT, blocks=blocks[:2])
    for stage in (2, 3):
        way = Strategy.of(stage=stage, activations="keep", accumulation=24, gradient_dtype="fp32")
        assert bound(shape, way, V100) <= speed(shape, way, V100).seconds * (1 + 1e-9)


def test_ways_that_are_alike_give_the_cheapest():
    limits = on("8xv100-16gb")
    compute_only = replace(V100, link=1e15, pcie=1e15, dram=1e18, hbm=1e15, collective_s=0.0)
    plan = make_plan(SHORT, limits, sequences=4, preferred=2, rates=compute_only)
    assert plan.strategy == make_plan(SHORT, limits, sequences=4, preferred=2).strategy, "nothing but arithmetic takes time"


@pytest.mark.slow
def test_as_many_blocks_are_kept_as_fit():
    limits = on("8xv100-16gb")
    plan = make_plan(LLAMA_13B, limits, sequences=8, preferred=2, rates=V100)
    kept = plan.strategy.activations
    assert isinstance(kept, int)
    assert 0 < kept < len(LLAMA_13B.blocks)
    assert plan.speed is not None
    without = make_plan(LLAMA_13B, limits, Strategy(activations="recompute"), sequences=8, preferred=2, rates=V100)
    assert without.strategy.activations == "recompute"
    assert without.speed is not None
    assert plan.speed.tokens_per_s > 1.03 * without.speed.tokens_per_s
    more = replace(plan.strategy, activations=kept * 10 // 9 + 2)
    assert shortages(memory(plan.shape, more, cpu=False), limits), "a tenth is left, not more"
    assert plan.runner_up is not None
    assert replace(plan.runner_up[0], activations=kept) != plan.strategy, "of another kind"
    assert plan.runner_up[1].seconds >= plan.speed.seconds * (1 - ALIKE)
    assert plan.why[0].startswith("fastest of ")


def test_the_next_best_way_is_of_another_kind():
    way = Strategy.of(state="host", update="deferred", activations=10, accumulation=8)
    now = replace(way, update="now")
    ways = [now, way, replace(way, activations=8)]
    assert bound(LLAMA_13B, now, V100) == bound(LLAMA_13B, way, V100), "only simulation tells them apart"
    assert [best for best, _ in fastest(ways, LLAMA_13B, V100)] == [way, now]


def test_kept_blocks_take_what_their_graphs_take_and_are_not_computed_again():
    way = make_plan(LLAMA_13B, on("8xv100-16gb"), sequences=8, preferred=1).strategy
    assert way.activations == "recompute"
    blocks = len(LLAMA_13B.blocks)
    sizes = [memory(LLAMA_13B, replace(way, activations=n), cpu=False).peak("device") for n in (1, 11, 21)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
    took = [speed(LLAMA_13B, replace(way, activations=n), V100).operations for n in ("recompute", 1, blocks - 1, "keep")]
    assert took[0] > took[1] > took[2] > took[3]
    assert took[0] - took[1] == pytest.approx(took[2] - took[3])
    assert str(replace(way, activations=3)).startswith("stage 3, activations of the last 3 blocks kept")


def test_without_rates_of_a_drive_nothing_is_said_of_it():
    limits = on("8xv100-16gb", host_bytes=40 * GIB, nvme_bytes=1 << 42)
    plan = make_plan(LLAMA_13B, limits, sequences=8, rates=V100)
    assert plan.strategy.state == "nvme"
    assert plan.speed is plan.runner_up is None
    known = make_plan(LLAMA_13B, limits, sequences=8, rates=WITH_NVME)
    assert known.speed is not None
    assert known.speed.busy["nvme write"] > 0.4


def test_what_fits_nothing_is_refused_alike():
    with pytest.raises(DoesNotFit, match="host memory"):
        make_plan(LLAMA_13B, on("8xv100-16gb", host_bytes=64 * GIB), rates=V100)


def test_a_way_with_the_state_on_nvme_is_worth_it_where_it_keeps_more_graphs():
    fast = replace(V100, nvme_read=1e12, nvme_write=1e12)
    places = {"state": "host", "gradients": "host", "update": "deferred"}
    host = Strategy.of(**places, micro_batch=2, accumulation=2, gradient_dtype="fp32")
    lower, more = replace(host, state="nvme"), replace(host, state="nvme", activations=5)
    assert [each for each, _ in fastest([host, lower], SHORT, fast)] == [host]
    found = [each for each, _ in fastest([host, lower, more], SHORT, fast)]
    assert found == [more, host], "fewer products are worth more than a drive costs that is as fast"
