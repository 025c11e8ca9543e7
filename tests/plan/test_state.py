"""Forms of the optimizer state in the plan: bytes by hand, traffic, checkpoints, and the offers of a refusal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ftkit.hf.blocks import find_blocks
from ftkit.hf.sharding import model_shape
from ftkit.plan.candidates import with_adapter
from ftkit.plan.memory import GIB, memory
from ftkit.plan.plan import Asked
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.schedule import Steps
from ftkit.plan.shape import Flat, Placed, Shape
from ftkit.plan.state import saved_bytes, state_of, states_bytes
from ftkit.plan.whatif import what_if
from ftkit.spec.strategy import AUTO, OPEN, Strategy
from ftkit.spec.tiers import KINDS
from ftkit.spec.update_rules import ADAMW, ADAMW_8BIT, LION_8BIT, STABLE_ADAMW, UpdateRule
from tests.hf import runs
from tests.plan.test_choice import LLAMA_13B, on, options

HOST = {"state": "host", "parameters": "host", "gradients": "host"}


def coded(shape: Shape, rule: UpdateRule = ADAMW_8BIT) -> Shape:
    """Return a shape whose blocks have two norms, and for the rest matrices that can be coded."""
    blocks = tuple(tuple(replace(x, coded_numel=x.numel - 2 * shape.hidden) for x in flats) for flats in shape.blocks)
    return replace(shape, blocks=blocks, rule=rule)


WIDE = coded(LLAMA_13B)


def roles(shape: Shape, strategy: Strategy, placed: Placed, *, on_cpu: bool = False) -> dict[str, tuple[int, int]]:
    """Return the (elements, bytes per element) of each store by role."""
    stores = state_of(shape, strategy, placed, cpu=on_cpu).stores
    return {store.role: (store.numel, store.itemsize) for store in stores}


def test_the_stores_of_a_block_are_those_that_the_note_names() -> None:
    """Two ranks, and a tail of 5000 elements on the second one."""
    matrices = 9217 * 128
    flat = Flat(matrices + 5000, 2, True, coded_numel=matrices)
    shape = replace(WIDE, world_size=2, blocks=((flat,),))
    shard = 593920  # half of N, up to a multiple of 4096
    expected = {
        "exp_avg.codes": (shard, 1),
        "exp_avg.scales": (5120, 4),  # 4640 groups in whole pages
        "exp_avg": (6144, 4),  # [585856, 590856) of the second rank's shard, in whole pages
    }
    expected |= {name.replace("exp_avg", "exp_avg_sq"): size for name, size in expected.items()}
    placed = Placed(flat, "block")
    assert roles(shape, Strategy.of(state="host"), placed) == {"master": (shard, 4), **expected}
    assert roles(shape, Strategy.of(**HOST, master="split"), placed) == {"residual": (shard, 2), **expected}
    lion = replace(shape, rule=LION_8BIT)
    assert len(roles(lion, Strategy.of(), placed)) == 4
    plain = Placed(replace(flat, coded_numel=0), "block")
    fp32 = {"master": (shard, 4), "exp_avg": (shard, 4), "exp_avg_sq": (shard, 4)}
    assert roles(shape, Strategy.of(), plain) == fp32
    assert roles(replace(shape, rule=ADAMW), Strategy.of(), placed) == fp32
    assert roles(shape, Strategy.of(), Placed(replace(flat, trained=False), "block")) == {}


def test_bytes_per_parameter_of_matrices() -> None:
    block, strategy = Placed(WIDE.blocks[0][0], "block"), Strategy.of(**HOST)
    for rule, master, most in ((ADAMW, "fp32", 12.0), (ADAMW_8BIT, "fp32", 6.07), (ADAMW_8BIT, "split", 4.07)):
        state = state_of(replace(WIDE, rule=rule), replace(strategy, master=master), block, cpu=False)
        assert most - 0.01 < state.size_bytes * 8 / block.flat.numel <= most * 1.0001


def test_only_weights_beside_the_state_are_split() -> None:
    replicated, root = Placed(WIDE.replicated[0], "replicated"), Placed(WIDE.roots[0], "root")
    offloaded = Strategy.of(**HOST, master="split")
    assert "master" in roles(WIDE, offloaded, replicated), "they are on the device, and their state is on the host"
    assert {"residual", "exp_avg", "exp_avg_sq"} == roles(WIDE, offloaded, root).keys()
    assert "residual" in roles(WIDE, Strategy.of(master="split"), replicated)
    assert "residual" in roles(WIDE, offloaded, replicated, on_cpu=True), "a CPU has one memory"
    fp32 = Placed(Flat(8192, 4, True), "block")
    assert roles(WIDE, offloaded, fp32).keys() == {"exp_avg", "exp_avg_sq"}, "fp32 weights are their own master"


def test_a_split_master_needs_the_weights_where_the_state_is() -> None:
    for choices in ({"state": "host"}, {"state": "nvme", "gradients": "host"}, {"state": "host", "stage": 2}):
        strategy = Strategy.of(**choices, master="split")
        problem = strategy.problem(cpu=False)
        assert problem is not None
        assert "optimizer.master: split needs the weights where the state is" in problem
        assert "Set engine.parameters to host" in problem
        assert strategy.problem(cpu=True) is None
        assert replace(strategy, master="fp32").problem(cpu=False) is None
    for choices in ({}, HOST, {**HOST, "parameters": "nvme"}):
        assert Strategy.of(**choices, master="split").problem(cpu=False) is None


def test_auto_places_the_weights_beside_the_state() -> None:
    tight = on("8xv100-16gb")
    for state in (AUTO, "host"):
        plan = Asked(WIDE, tight, Strategy(master="split", state=state), 16, 2).plan()
        assert (plan.strategy.state, plan.strategy.parameters) == ("host", "host")
    before = Asked(WIDE, tight, Strategy(), 16, 2).plan().strategy
    assert before.master == "fp32", "auto never splits"
    assert before.parameters == "device"


def test_memory_counts_each_store_once() -> None:
    strategy = Strategy.of(**HOST, master="split")
    found = memory(WIDE, strategy, cpu=False).purposes("host")
    sizes = {"master": 0, "residual": 0, "moments": 0}
    for placed, count in WIDE.counted:
        for role, (numel, itemsize) in roles(WIDE, strategy, placed).items():
            sizes[role if role in sizes else "moments"] += count * numel * itemsize
    assert {purpose: found[purpose] for purpose in sizes} == sizes
    cached = memory(WIDE, replace(strategy, state="nvme", state_host_bytes=1 << 60), cpu=False).purposes("host")
    assert sum(cached[purpose] for purpose in sizes) == sum(sizes.values())
    assert states_bytes(WIDE, strategy, cpu=False) == 8 * sum(sizes.values())


def test_staging_has_a_buffer_for_each_store_that_is_elsewhere() -> None:
    """Six slots. A piece has 2^20 elements, 2^13 scales, and less of a store that has less."""
    piece, tail = 1 << 20, 2 * WIDE.hidden + 1024
    nvme = Strategy.of(state="nvme", parameters="nvme", gradients="host")

    def staged(strategy: Strategy, rule: UpdateRule, *, replicated: bool = False) -> int:
        shape = replace(WIDE, rule=rule, roots=(), replicated=WIDE.replicated if replicated else ())
        size = memory(shape, strategy, cpu=False).purposes("host", "train")["staging"]
        rest = memory(shape.frozen(), strategy, cpu=False).purposes("host", "train")["staging"]
        offload = 2 * shape.blocks[0][0].shard_numel(8) * 2
        return (size - rest - offload) // 6

    codes = 2 * (piece + (piece // 128) * 4)
    plain = state_of(WIDE, nvme, Placed(WIDE.blocks[0][0], "block"), cpu=False).moments[2]
    assert plain.role == "exp_avg"
    assert 0 < plain.numel < tail
    assert staged(nvme, ADAMW) == (4 + 8 + 2) * piece
    assert staged(nvme, ADAMW_8BIT) == (4 + 2) * piece + codes + 2 * plain.numel * 4
    split = replace(nvme, master="split")
    assert staged(split, ADAMW_8BIT) == (2 + 2) * piece + codes + 2 * plain.numel * 4
    more = staged(split, ADAMW_8BIT, replicated=True) - staged(split, ADAMW_8BIT)
    assert more == (4 + 2) * 4096, "an fp32 master and a gradient of replicated parameters, which are on the device"


def updates(shape: Shape, strategy: Strategy) -> dict[str, dict[str, float]]:
    """Return the work of block 0's update by the first word of its events."""
    steps = Steps(shape, strategy, 1, 0.0, in_order=False)
    steps.add()
    named = {"adam 0", "read 0", "write 0", "write weights 0", "update 0"}
    return {event.name: dict(event.work) for event in steps.script.events if event.name in named}


def test_an_update_moves_the_bytes_of_its_form() -> None:
    block = WIDE.blocks[0][0]
    shard = block.shard_numel(8)
    for rule, master, per in ((ADAMW, "fp32", 28.0), (ADAMW_8BIT, "fp32", 16.125), (ADAMW_8BIT, "split", 14.125)):
        shape = replace(WIDE, rule=rule)
        host, nvme = (Strategy.of(**(HOST | {"state": tier}), master=master) for tier in ("host", "nvme"))
        size = state_of(shape, nvme, Placed(block, "block"), cpu=False).size_bytes
        assert updates(shape, host)["adam 0"]["dram"] == pytest.approx(per * shard, rel=2e-3)
        moved = updates(shape, nvme)
        assert moved["read 0"]["nvme_read"] == moved["write 0"]["nvme_write"] == size
        lower = updates(shape, replace(nvme, parameters="nvme"))
        assert lower["read 0"]["nvme_read"] == size + 2 * shard * (master == "split")
        assert lower["write weights 0"]["nvme_write"] == 2 * shard
    device = updates(WIDE, Strategy.of())["update 0"]["hbm"]
    assert device == pytest.approx(16.125 * shard, rel=2e-3)


def test_stable_adamw_rereads_one_moment() -> None:
    steps = Steps(replace(WIDE, rule=STABLE_ADAMW), Strategy.of(state="host"), 1, 0.0, in_order=False)
    steps.add()
    work = next(event.work for event in steps.script.events if event.name == "norm of tensors")
    numel = sum(placed.flat.shard_numel(8) * count for placed, count in WIDE.counted)
    assert work["dram"] == (4 + 2) * numel


def test_a_checkpoint_has_an_fp32_master_and_moments_in_their_form() -> None:
    flat = Flat(1000 * 128 + 7, 2, True, coded_numel=1000 * 128)
    assert saved_bytes(ADAMW, flat) == 12 * flat.numel
    assert saved_bytes(ADAMW_8BIT, flat) == 4 * flat.numel + 2 * (1000 * (128 + 4) + 7 * 4)
    shape = replace(WIDE, checkpoints=1)
    sizes = [memory(shape, Strategy.of(**HOST, master=each), cpu=False).checkpoint_bytes for each in ("fp32", "split")]
    assert sizes[0] == sizes[1]
    saved = sum(saved_bytes(ADAMW_8BIT, placed.flat) * count for placed, count in WIDE.counted)
    assert sizes[0] == 2 * saved + 2 * WIDE.numel


def test_matrices_of_trained_blocks_can_be_coded() -> None:
    model = runs.llama(vocab_size=128)
    blocks = find_blocks(model)
    shape = model_shape(model, blocks, 2, None, 64, cpu=True)
    tensors = list(blocks[0][1].parameters())
    assert shape.blocks[0][0].coded_numel == sum(t.numel() for t in tensors if t.dim() == 2 and t.numel() % 128 == 0) > 0
    assert shape.blocks[0][0].numel > shape.blocks[0][0].coded_numel, "norms"
    assert {flat.coded_numel for flat in (*shape.roots, *shape.replicated)} == {0}
    for parameter in model.parameters():
        parameter.requires_grad = False
    frozen = model_shape(model, blocks, 2, None, 64, cpu=True)
    assert {flat.coded_numel for flats in frozen.blocks for flat in flats} == {0}


# --- offers of a refusal, and what-if questions


def refused(asked: Asked) -> list[str]:
    with pytest.raises(DoesNotFit) as caught:
        asked.plan()
    return options(caught.value)


TWICE = replace(coded(LLAMA_13B, ADAMW), blocks=coded(LLAMA_13B).blocks * 2)
"""25.6B parameters."""


def test_a_refusal_offers_eight_bits_before_an_adapter() -> None:
    asked = Asked(TWICE, on("8xv100-16gb"), OPEN, 16, 2)
    found = refused(asked)
    offered = next(each for each in found if "optimizer.name" in each)
    numbers = re.fullmatch(r"set optimizer.name to adamw_8bit \(([\d.]+) GiB of state instead of ([\d.]+)\)", offered)
    assert numbers
    after, before = (float(each) * GIB / TWICE.numel for each in numbers.groups())
    assert (round(after, 1), round(before, 1)) == (6.1, 12.0)
    assert found.index(offered) < next(n for n, each in enumerate([*found, "adapter"]) if "adapter" in each)
    plan = replace(asked, shape=replace(TWICE, rule=ADAMW_8BIT)).plan()
    assert plan.strategy.master == "fp32"
    states = [plan.memory.purposes(tier, "train") for tier in ("device", "host")]
    total = sum(size for each in states for purpose, size in each.items() if purpose in ("master", "moments"))
    assert f"{8 * total / GIB:.1f}" == numbers.group(1)


def test_a_refusal_offers_a_split_master_where_eight_bits_are_not_enough() -> None:
    three = replace(TWICE, blocks=TWICE.blocks[:40] * 3)
    asked = Asked(three, on("8xv100-16gb"), Strategy(gradient_dtype="compute"), 16, 2)
    offered = next(each for each in refused(asked) if "optimizer.name" in each)
    words = r"set optimizer.name to adamw_8bit and optimizer.master to split \([\d.]+ GiB of state instead of [\d.]+\)"
    assert re.fullmatch(words, offered)
    eight = replace(asked, shape=replace(three, rule=ADAMW_8BIT))
    assert any(re.fullmatch(r"set optimizer.master to split \(.*\)", each) for each in refused(eight))
    split = replace(eight, wanted=replace(asked.wanted, master="split"))
    assert split.plan().strategy.parameters == "host"
    placed = replace(asked, wanted=replace(asked.wanted, parameters="device", state="host"))
    assert not any("split" in each for each in refused(placed)), "the user placed the weights on the device"


def test_a_refusal_offers_no_form_that_does_not_help() -> None:
    adapters = replace(with_adapter(TWICE), rule=ADAMW)
    for shape in (adapters, replace(TWICE, rule=STABLE_ADAMW), LLAMA_13B):
        found = refused(Asked(shape, on("8xv100-16gb", host_bytes=16 * GIB), OPEN, 16, 2))
        assert not any("optimizer.name" in each for each in found)


def test_what_if_the_moments_had_eight_bits() -> None:
    asked = Asked(coded(LLAMA_13B, ADAMW), on("8xv100-16gb"), OPEN, 16, 2)
    plans = {each.question: each.plan for each in what_if(asked)}
    found = plans["8-bit moments (adamw_8bit)"]
    assert found is not None
    assert found.memory.purposes("host")["moments"] < 0.3 * asked.plan().memory.purposes("host")["moments"]
    for shape in (WIDE, LLAMA_13B, with_adapter(WIDE), replace(WIDE, rule=STABLE_ADAMW)):
        assert not any("8-bit" in each.question for each in what_if(replace(asked, shape=shape)))


def test_the_form_does_not_move_tiers_by_itself() -> None:
    """With room for everything, each form is on the device."""
    for master in ("fp32", "split"):
        plan = Asked(WIDE, on("8xv100-16gb", device_bytes=200 * GIB), Strategy(master=master), 16, 2).plan()
        assert {plan.strategy.tier(kind) for kind in KINDS} == {"device"}
    assert "split master weights" in str(Strategy.of(master="split"))
