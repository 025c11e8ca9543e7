"""Peers' schedules against numbers worked out by hand, and published results against the model, in three roles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.literature.published import ROLES, compare, constants, machines, runs
from benchmarks.literature.schedules import Order, patrickstar, patrickstar_peak, zero2, zero3, zero_offload
from benchmarks.literature.work import Machine, Work
from benchmarks.published import FILE, badness, text
from ftkit.plan.events import simulate

ROUND = Machine(
    gpus=8, compute={4096: 50e12}, link=100e9, pcie=10e9, pcie_box=40e9, pageable=2e9, adam=4e9, network=10e9, nvme=16e9
)
TEN_B = Work(layers=50, hidden=4096, sequences=10, gpus=1)
EIGHT = replace(TEN_B, gpus=8)

USED = {"V1", "V15", "V3", "V11", "V18c", "V18d", "V18e"}
HELD_BACK = {"V7", "V8", "V12", "V14"}


# --- by hand: 10.28e9 parameters, 10 240 tokens: 217.9e12 operations a forward, 871e12 a step (performance-model.md, C1)


def test_operations_and_conventions() -> None:
    assert TEN_B.numel == pytest.approx(10.28e9, rel=1e-3)
    assert TEN_B.counted("megatron") == pytest.approx(85.1e9 * 10240, rel=0.01)
    assert TEN_B.counted("8N") == pytest.approx(8 * 10.28e9 * 10240, rel=1e-3)
    done = sum(event.work.get("compute", 0.0) for event in zero2(TEN_B).script.events)
    assert done == pytest.approx(TEN_B.counted("megatron"), rel=0.001)
    with pytest.raises(ValueError, match="no convention '6N'"):
        TEN_B.counted("6N")


def test_the_order_of_zero_offload_on_one_gpu() -> None:
    """Nothing beside anything: forward 4.36 + checkpoints 4.19 GB at 2 GB/s; backward 13.06 + checkpoints + 41.1 GB down;
    update: 8 and 28 bytes a parameter at 112 GB/s, then 41.1 GB up."""
    made = zero_offload(TEN_B).seconds(ROUND.rates(TEN_B))
    assert made.forward == pytest.approx(4.36 + 2.10, rel=0.01)
    assert made.backward == pytest.approx(13.06 + 2.10 + 4.11, rel=0.01)
    assert made.update == pytest.approx(10.28e9 * 36 / 112e9 + 4.11, rel=0.01)


def test_drains_beside_the_backward() -> None:
    """With overlap only the embedding's gradient, which comes last, is waited for: 0.21e9 parameters, 0.84 GB."""
    made = zero_offload(TEN_B, overlap="all", checkpoints=False).seconds(ROUND.rates(TEN_B))
    assert made.backward == pytest.approx(13.06 + 0.08 + 4.03 / 50, rel=0.01)
    slow = replace(ROUND, pcie=1e9)  # 41.1 s of offloads are more than there is to compute
    assert zero_offload(TEN_B, overlap="all").seconds(slow.rates(TEN_B)).backward == pytest.approx(41.1, rel=0.03)


def test_an_owner_drains_over_one_lane_and_shards_over_all() -> None:
    def offloaded(order: Order, resource: str) -> float:
        return sum(event.work.get(resource, 0.0) for event in order.script.events)

    assert (
        offloaded(zero_offload(EIGHT), "lane") == offloaded(zero_offload(TEN_B), "lane") == pytest.approx(41.1e9, rel=0.001)
    )
    assert offloaded(zero3(EIGHT, overlap="all"), "down") == pytest.approx(41.1e9 / 8, rel=0.001)
    rates = ROUND.rates(EIGHT)
    assert (rates["lane"], rates["down"], rates["dram"]) == (10e9, 5e9, 14e9)
    assert ROUND.rates(replace(EIGHT, gpus=16))["link"] == 10e9  # between boxes
    assert ROUND.rates(EIGHT, one_thread=True)["dram"] == 0.0  # of a machine whose threads are not known
    assert replace(ROUND, thread=12e9).rates(EIGHT, one_thread=True)["dram"] == 12e9


def test_gathers_beside_computation() -> None:
    """A gather is 17.99 GB a pass at 100 GB/s and hides; at 1 GB/s it is all that there is."""
    alone = zero3(EIGHT, overlap="none", state="device").seconds(ROUND.rates(EIGHT))
    hidden = zero3(EIGHT, overlap="all", state="device").seconds(ROUND.rates(EIGHT))
    outside = 2 * 0.21e9 * 7 / 8 / 100e9
    assert alone.forward == pytest.approx(4.36 + 0.18 + outside, rel=0.01)
    assert hidden.forward == pytest.approx(4.36 + 2 * outside + 0.18 / 50, rel=0.01)
    slow = replace(ROUND, link=1e9).rates(EIGHT)
    assert zero3(EIGHT, overlap="all", state="device").seconds(slow).forward == pytest.approx(18.0, rel=0.04)


def test_before_pr_1453_reductions_and_drains_are_beside_nothing() -> None:
    """Reductions 17.99 GB at 100 GB/s and offloads 5.14 GB at 5 GB/s, on top of what "all" takes."""
    rates = ROUND.rates(EIGHT)
    before, since = (zero3(EIGHT, overlap=each).seconds(rates).backward for each in ("gathers", "all"))
    assert before - since == pytest.approx(0.18 + 1.03, rel=0.06)


def test_the_update_of_zero_infinity_is_bound_by_nvme() -> None:
    """28 bytes a parameter at 2 GB/s a rank: 18.0 s; on the host 42 bytes at 14 GB/s: 3.85 s."""
    nvme, host = (
        zero3(EIGHT, overlap="all", parameters="host", state=state).seconds(ROUND.rates(EIGHT)).update
        for state in ("nvme", "host")
    )
    assert nvme == pytest.approx(18.0, rel=0.01)
    assert host == pytest.approx(3.85, rel=0.01)
    with pytest.raises(ValueError, match="nvme"):
        zero3(EIGHT, overlap="all", state="nvme").seconds(replace(ROUND, nvme=0.0).rates(EIGHT))


def test_patrickstar_waits_for_each_move() -> None:
    """Three passes of 18 GB at 100 GB/s, then 2.57 GB down, 28 bytes a parameter at 14 GB/s, 2.57 GB up."""
    work = replace(EIGHT, has_head=False)
    made = patrickstar(work, device_bytes=0).seconds(ROUND.rates(work))
    computed = (TEN_B.counted("megatron") - 6 * 50304 * 4096 * 10240) / 50e12
    assert made.forward + made.backward == pytest.approx(computed + 3 * 0.18, rel=0.01)
    assert made.update == pytest.approx(0.514 + 2.57 + 0.514, rel=0.01)


def test_patrickstar_keeps_state_where_it_has_room() -> None:
    """With 64 GB a GPU all of 15.4 GB of state fits: 28 bytes of each of 1.285e9 parameters at 750 GB/s."""
    made = patrickstar(EIGHT, device_bytes=64e9).seconds(ROUND.rates(EIGHT))
    assert made.update == pytest.approx(0.048, rel=0.05)


def test_batches_that_are_not_published_follow_their_rules() -> None:
    """PatrickStar: of its scripts'. ZeRO-3 Offload: of the authors' table, with checkpoints on the GPU, 1e9 live weights,
    and the wider of a block's activations (arXiv:2205.05198, 32 heads) and logits (fp16 and fp32, with gradients)."""
    device_bytes = 32510 * 2**20

    def zero3_peak(work: Work) -> float:
        block = 34 * work.hidden + 5 * 32 * work.sequence_tokens
        kept = work.layers * work.checkpoint_bytes
        return kept + work.tokens * max(block, 12 * work.vocabulary) + 2e9 + 2 * 2 * work.block

    for run in runs():
        if run.system == "patrickstar":
            fitting = [n for n in (4, 8, 16, 32) if patrickstar_peak(replace(run.work, sequences=n)) <= 0.8 * device_bytes]
        elif run.id.startswith("V8 Z3"):
            fitting = [n for n in (4, 8, 10, 16, 32) if zero3_peak(replace(run.work, sequences=n)) <= device_bytes]
        else:
            continue
        assert run.work.sequences == max(fitting), run.id


def test_no_stream_and_no_resource_gives_more_than_it_has() -> None:
    rates = ROUND.rates(EIGHT)
    orders = [zero2(EIGHT), zero_offload(EIGHT, overlap="all"), patrickstar(EIGHT)]
    orders += [zero3(EIGHT, overlap=each, parameters="host", checkpoints=True) for each in ("none", "gathers", "all")]
    for order in orders:
        timeline = simulate(order.script.events, rates)
        total = max(timeline.ends)
        assert all(share <= 1 + 1e-9 for share in timeline.busy(0.0, total).values())
        for name, rate in rates.items():
            assert sum(event.work.get(name, 0.0) for event in order.script.events) <= rate * total * (1 + 1e-6)
        assert order.seconds(rates).step == pytest.approx(total)


# --- against what was published


def test_constants_lie_in_their_ranges() -> None:
    for machine, known in constants().items():
        for each in known:
            assert each.low <= each.value <= each.high, (machine, each)
            assert each.how in ("fitted", "start", "published"), (machine, each)
            assert each.source, (machine, each)


def test_the_roles_of_points() -> None:
    found = {role: {run.id.split()[0] for run in runs() for each in run.figures if each.role == role} for role in ROLES}
    assert found["used"] == USED
    assert found["held back"] == HELD_BACK
    assert {"V2", "V10"} <= found["reported"]
    assert not any(each.role != "used" for run in runs() if run.id.startswith("V11") for each in run.figures)
    fitted = {machine for machine, known in constants().items() for each in known if each.how == "fitted"}
    assert fitted == {run.machine for run in runs() for each in run.figures if each.role == "used"}


def test_fitted_constants_have_no_better_neighbour() -> None:
    for machine, known in constants().items():
        least = badness(machines(), machine) if any(each.how == "fitted" for each in known) else 0.0
        for each in known:
            near = [value for value in (0.985 * each.value, 1.015 * each.value) if each.low <= value <= each.high]
            for value in near if each.how == "fitted" else []:
                assert badness(machines({(machine, each.name): value}), machine) > least, (machine, each.name, value)


def test_figures_held_back_are_reproduced() -> None:
    held = [each for each in compare() if each.figure.role == "held back"]
    assert all(each.holds for each in held), {each.run.id: round(each.error, 3) for each in held}


def test_the_document_is_written_anew() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "make published"
