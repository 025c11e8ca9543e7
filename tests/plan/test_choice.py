"""The choice: the fastest way that fits, what is forced stays forced, and refusals have numbers and options that work."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest

from ftkit.plan.candidates import COSTS, Request, cost, with_adapter
from ftkit.plan.catalog import find_hardware
from ftkit.plan.limits import Limits, shortages
from ftkit.plan.memory import GIB, MIB, graph_bytes, kept_bytes, memory
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.shape import Flat, Shape
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import KINDS
from tests.plan.made import make_plan


def llama(hidden, inner, layers, vocabulary, world=8, itemsize=2, sequence=2048):
    block = Flat(4 * hidden * hidden + 3 * hidden * inner + 2 * hidden, itemsize, True)
    return Shape(
        blocks=((block,),) * layers,
        roots=(Flat(vocabulary * hidden, itemsize, True),) * 2,
        replicated=(Flat(hidden, itemsize, True),),
        hidden=hidden,
        vocabulary=vocabulary,
        block_elements=(8 * hidden + 3 * (hidden + inner)) * 5 // 4,
        widest_tensor=hidden * inner,
        sequence_tokens=sequence,
        itemsize=itemsize,
        world_size=world,
        adapter_numel=16 * layers * (8 * hidden + 3 * (hidden + inner)),
    )


LLAMA_13B = llama(5120, 13824, 40, 32000)
SMALL = llama(256, 1024, 8, 8000, world=2, itemsize=4, sequence=256)
MIDDLE = llama(2048, 5632, 18, 32000, world=2, itemsize=4, sequence=256)


def on(name, **changes):
    """Return the limits of a node by name."""
    known = find_hardware(name)
    limits = Limits(known.device_bytes, known.host_bytes, None, ranks_per_node=known.gpus or 1)
    return replace(limits, **changes)


def cpu(host_gib, ranks=2, nvme_gib=0):
    return Limits(None, int(host_gib * GIB), nvme_gib * GIB or None, ranks_per_node=ranks, cpu=True)


# --- the bytes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_states_follow_the_zero_papers_bytes(world):
    """arXiv:1910.02054, section 5: 2N weights, 2N gradients, 12N state, cut into W parts as the stage says."""
    shape = replace(LLAMA_13B, world_size=world)
    numel = shape.numel
    expected = [16 * numel, 4 * numel + 12 * numel // world, 2 * numel + 14 * numel // world, 16 * numel // world]
    for stage, size in enumerate(expected):
        found = memory(shape, Strategy.of(stage=stage), cpu=False).purposes("device")
        state = sum(found[purpose] for purpose in ("parameters", "gradients", "master", "moments"))
        assert state == pytest.approx(size, rel=1e-3)


def test_state_on_the_host_takes_twelve_bytes_a_parameter():
    """And no more than two blocks of staging (issue 3, done when 3), over all ranks of the node."""
    way = Strategy.of(state="host", gradients="device", update="deferred")
    found = memory(LLAMA_13B, way, cpu=False).purposes("host")
    assert 8 * (found["master"] + found["moments"]) <= 12.1 * LLAMA_13B.numel
    assert found["staging"] <= 2 * LLAMA_13B.blocks[0][0].numel * 2


def test_on_a_cpu_device_and_host_are_one_memory():
    for way in (Strategy.of(), Strategy.of(state="host", gradients="host", parameters="host")):
        found = memory(SMALL, way, cpu=True)
        assert found.peak("device") == 0
        assert found.peak("host") > 640 * MIB


def test_every_tier_takes_from_the_device_what_it_holds():
    base = memory(LLAMA_13B, Strategy.of(), cpu=False)
    for kind in ("parameters", "gradients", "state", "activation_offload"):
        for tier in ("host", "nvme"):
            moved = memory(LLAMA_13B, replace(Strategy.of(), **{kind: tier}), cpu=False)
            assert moved.at("device", "train") < base.at("device", "train")
            assert moved.at(tier, "train") > base.at(tier, "train")


def test_more_of_anything_takes_more():
    for way in (Strategy.of(), Strategy.of(stage=2, activations="keep"), Strategy.of(activation_offload="host")):
        sizes = [memory(LLAMA_13B, replace(way, micro_batch=n), cpu=False).at("device", "train") for n in (1, 2, 4)]
        assert sizes == sorted(set(sizes))


def test_weights_that_are_not_read_keep_their_first_values():
    fresh, read = (memory(replace(LLAMA_13B, fresh=f), Strategy.of(state="host"), cpu=False) for f in (True, False))
    assert fresh.at("host", "load") - read.at("host", "load") == pytest.approx(4 * LLAMA_13B.numel / 8, rel=1e-3)


# --- the choice


def test_where_everything_fits_the_device_the_choice_is_as_it_was():
    """The five ways of the first engine, in its order, as the memory granted shrinks."""
    seen = []
    for gib in range(200, 30, -3):
        try:
            way = make_plan(LLAMA_13B, Limits(gib * GIB, None, ranks_per_node=8)).strategy
        except DoesNotFit:
            break
        if (
            way.state == way.activation_offload == "device"
            and (way.stage, way.activations, way.reshard_after_forward) not in seen
        ):
            seen.append((way.stage, way.activations, way.reshard_after_forward))
    every = [(2, "keep", True), (3, "keep", False), (3, "keep", True), (2, "recompute", True)]
    every.append((3, "recompute", True))
    assert seen[0] == every[0]
    assert seen[-1] == every[-1]
    assert [every.index(way) for way in seen] == sorted(every.index(way) for way in seen)


def test_forced_stage_three_frees_first_as_it_did():
    forced = Strategy(stage=3)
    assert make_plan(SMALL, cpu(100), forced).strategy.reshard_after_forward is True
    assert make_plan(SMALL, cpu(100)).strategy == Strategy.of(stage=2, activations="keep")


def test_less_memory_never_buys_a_faster_way():
    costs = []
    for gib in (200, 90, 60, 40, 20, 14, 10, 8):
        try:
            way = make_plan(LLAMA_13B, on("8xv100-16gb", device_bytes=gib * GIB)).strategy
        except DoesNotFit:
            break
        depth = max(("device", "host", "nvme").index(getattr(way, k)) for k in KINDS)
        stage = [(2, True), (3, False), (3, True)].index((way.stage, way.reshard_after_forward))
        costs.append((depth, cost(way, 1) + stage * COSTS["stage", "next"]))
    assert len(costs) >= 4
    assert costs == sorted(costs)


def test_nothing_leaves_the_device_for_the_host_on_a_cpu():
    for way in Request(SMALL, cpu(1, nvme_gib=100), sequences=4, preferred=4).order():
        assert "host" not in (way.parameters, way.gradients, way.state, way.activation_offload)


def test_every_way_is_one_that_the_engine_takes():
    for way in Request(SMALL, on("8xv100-16gb", nvme_bytes=GIB), sequences=8, preferred=4).order():
        assert way.problem(cpu=False) is None
        assert way.parameters == "device" or way.stage == 3
        assert way.gradients == "device" or way.stage >= 2
        assert way.state != "device" or way.parameters == way.gradients == "device"


@pytest.mark.parametrize("activations", ["recompute", 3])
def test_kept_inputs_that_turn_out_twice_as_wide(activations: str | int):
    plan = make_plan(LLAMA_13B, on("8xv100-16gb"), Strategy(activation_offload="device", activations=activations))
    plan.check_wide_inputs()
    graphs = 0 if activations == "recompute" else activations * kept_bytes(plan.shape, plan.strategy)
    kept = plan.memory.purposes("device")["activations"] + graphs
    limits = replace(plan.limits, device_bytes=plan.memory.at("device", "train") + kept - 1)
    tight = replace(plan, asked=replace(plan.asked, limits=limits))
    with pytest.raises(DoesNotFit, match=rf"activations take {kept / GIB:.2f} GiB more"):
        tight.check_wide_inputs()


def test_writes_to_nvme_in_a_step():
    nvme = dict.fromkeys(("parameters", "gradients", "state", "activation_offload"), "nvme")
    wanted = Strategy(**nvme, stage=3, activations="recompute", state_host_bytes=0, micro_batch=1, accumulate_in="step")
    for shape, share in ((SMALL, 1.0), (SMALL.frozen(), 0.0)):
        plan = make_plan(shape, cpu(13, nvme_gib=100), wanted, sequences=2)
        stored, written = plan.memory.purposes("nvme"), plan.nvme_wear
        assert plan.strategy.rounds == 2
        assert written["activations"] == 2 * stored["activations"] > 0
        assert written.get("gradients", 0) == 2 * stored.get("gradients", 0)
        assert written.get("parameters", 0) == share * stored["parameters"]
        assert written.get("moments", 0) == stored.get("moments", 0)


def test_nvme_is_used_when_the_host_is_too_small():
    plan = make_plan(MIDDLE, cpu(13, nvme_gib=100))
    assert plan.strategy.state == "nvme"
    assert plan.strategy.deferred
    assert any(re.search("optimizer state on device: .* GiB of host memory needed", sentence) for sentence in plan.why)
    forced = make_plan(MIDDLE, cpu(13, nvme_gib=100), Strategy(state="nvme", state_host_bytes=0))
    assert forced.strategy.state_host_bytes == 0, "the user said where all of it lies"
    assert forced.needed_bytes("nvme") >= 8 * MIDDLE.numel
    assert forced.nvme_wear["moments"] == pytest.approx(8 * MIDDLE.numel / 2, rel=0.01)


def test_what_is_left_of_the_host_keeps_a_part_of_the_state_off_the_drive():
    limits = cpu(13, nvme_gib=100)
    plan, all_there = make_plan(MIDDLE, limits), make_plan(MIDDLE, limits, Strategy(state="nvme", state_host_bytes=0))
    spare = limits.host_bytes - all_there.needed_bytes("host")
    part = spare // 2 * 9 // 10
    assert plan.strategy.state_host_bytes == part > GIB // 2
    assert plan.needed_bytes("host") == all_there.needed_bytes("host") + 2 * part < limits.host_bytes
    widest = max(line.shard_numel(2) * 8 for line in (*MIDDLE.roots, *MIDDLE.replicated, *sum(MIDDLE.blocks, ())))
    saved = all_there.needed_bytes("nvme") - plan.needed_bytes("nvme")
    assert saved == 2 * (part - widest)
    assert plan.nvme_wear["moments"] == all_there.nvme_wear["moments"] - part + widest
    assert "of each rank's state cached in host memory" in str(plan.strategy)
    said = make_plan(MIDDLE, limits, Strategy(state="nvme", state_host_bytes=GIB)).strategy
    assert (said.state, said.state_host_bytes) == ("nvme", GIB)


def test_of_a_state_that_the_user_puts_on_nvme_two_units_stay_where_they_fit():
    block, embedding = sum(line.shard_numel(2) * 8 for line in MIDDLE.blocks[0]), MIDDLE.roots[0].shard_numel(2) * 8
    assert embedding > block, "the embedding and the head are the widest"
    plan = make_plan(MIDDLE, cpu(24, nvme_gib=100), Strategy(state="nvme"))
    assert plan.strategy.state_host_bytes == 2 * embedding
    unlimited = make_plan(MIDDLE, replace(plan.limits, host_bytes=None), Strategy(state="nvme"))
    assert unlimited.strategy.state_host_bytes == 0, "nobody knows what is left"
    bare = make_plan(MIDDLE, cpu(24, nvme_gib=100), Strategy(state="nvme", state_host_bytes=0))
    assert plan.largest_micro_batch == bare.largest_micro_batch, "what stays makes way for a larger one"
    assert plan.why == bare.why
    tied = replace(MIDDLE, roots=MIDDLE.roots[:1])
    assert make_plan(tied, cpu(24, nvme_gib=100), Strategy(state="nvme")).strategy.state_host_bytes == embedding + block
    adapter = make_plan(with_adapter(MIDDLE), cpu(24, nvme_gib=100), Strategy(state="nvme"))
    assert adapter.strategy.state_host_bytes == 0, "no block, embedding or head is trained"
    needed = make_plan(MIDDLE, cpu(24, nvme_gib=100), Strategy(state="nvme", state_host_bytes=0)).needed_bytes("host")
    tight = Limits(None, needed + embedding, 100 * GIB, ranks_per_node=2, cpu=True)
    assert make_plan(MIDDLE, tight, Strategy(state="nvme")).strategy.state_host_bytes == embedding // 2 * 9 // 10


@pytest.mark.parametrize("half_gib", range(12, 29, 4))
def test_a_16_bit_state_uses_what_is_left_of_the_host_too(half_gib):
    narrow = llama(2048, 5632, 18, 32000, world=2, itemsize=2, sequence=256)
    try:
        plan = make_plan(narrow, cpu(half_gib / 2, nvme_gib=100))
    except DoesNotFit:
        return
    if plan.strategy.state == "nvme":
        spare = plan.limits.host_bytes - plan.needed_bytes("host")
        assert 0 <= spare <= GIB // 2 or plan.needed_bytes("nvme") < GIB
        assert plan.strategy.state_host_bytes > 0


def test_the_order_of_tiers_does_not_depend_on_how_micro_batches_pass():
    for sequences in (1, 8):
        plan = make_plan(MIDDLE, cpu(18, nvme_gib=100), Strategy(micro_batch=1), sequences=sequences)
        assert (plan.strategy.state, plan.strategy.parameters, plan.strategy.gradients) == ("nvme", "device", "device")


def test_micro_batches_pass_blocks_together_where_weights_come_from_afar():
    limits = on("8xv100-16gb")
    far = Strategy(parameters="host", state="host", micro_batch=1)
    plan = make_plan(LLAMA_13B, limits, far, sequences=4)
    assert (plan.strategy.parts, plan.strategy.rounds) == (4, 1)
    assert "4 micro-batches through each block together" in str(plan.strategy)
    assert make_plan(LLAMA_13B, limits, replace(far, accumulate_in="step"), sequences=4).strategy.parts == 1
    near = make_plan(LLAMA_13B, limits, Strategy(parameters="device", micro_batch=1), sequences=4)
    assert (near.strategy.parts, near.strategy.rounds) == (1, 4)


def test_micro_batches_are_divisors_of_a_step():
    for wanted, tried in ((Strategy(), {6, 4, 3, 2, 1}), (Strategy(micro_batch=5), {5})):
        request = Request(SMALL, cpu(1), wanted, sequences=12, preferred=8)
        assert {each.micro_batch for each in request.order()} == tried


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    limits = on("8xv100-16gb")
    plan = make_plan(LLAMA_13B, limits, sequences=16, preferred=2)
    largest = replace(plan.strategy, micro_batch=plan.largest_micro_batch)
    assert not shortages(memory(plan.shape, largest, cpu=False), limits)
    assert shortages(memory(plan.shape, replace(largest, micro_batch=largest.micro_batch + 1), cpu=False), limits)


def test_gradients_are_summed_in_fp32_where_several_are():
    limits = on("8xv100-16gb")
    assert make_plan(LLAMA_13B, limits, sequences=16, preferred=2).strategy.gradient_itemsize(2) == 4
    assert make_plan(LLAMA_13B, limits, sequences=1).strategy.gradient_itemsize(2) == 2
    whole = make_plan(LLAMA_13B, limits, Strategy(accumulate_in="unit"), sequences=2, preferred=1)
    assert (whole.strategy.parts, whole.strategy.rounds, whole.strategy.gradient_itemsize(2)) == (2, 1, 4)
    narrow = make_plan(LLAMA_13B, limits, Strategy(gradient_dtype="compute"), sequences=16)
    assert narrow.strategy.gradient_itemsize(2) == 2


# --- the refusal


def options(error: DoesNotFit) -> list[str]:
    return str(error).split("Options: ")[1].split("; or ")


def test_the_refusal_has_numbers_for_each_purpose_and_three_options():
    with pytest.raises(DoesNotFit) as caught:
        make_plan(LLAMA_13B, on("8xv100-16gb", host_bytes=100 * GIB), sequences=16, preferred=2)
    text = str(caught.value)
    assert "host memory: " in text
    assert "needed to " in text
    assert "moments 97.0" in text
    assert "100.0 GiB granted by memory.host_gib" in text
    assert len(options(caught.value)) == 3
    assert "memory.nvme_dir" in text
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), DoesNotFit)


def test_each_way_out_leads_out():
    limits = cpu(9)
    with pytest.raises(DoesNotFit) as caught:
        make_plan(MIDDLE, limits)
    nvme, host = (next(text for text in options(caught.value) if part in text) for part in ("nvme_dir", "host memory"))
    assert make_plan(MIDDLE, replace(limits, nvme_bytes=int(float(nvme.split()[6]) * GIB)))
    granted = float(host.split()[1])
    assert make_plan(MIDDLE, cpu(granted))
    with pytest.raises(DoesNotFit):
        make_plan(MIDDLE, cpu(granted - 0.2))


def test_just_above_the_limit_is_refused():
    forced = Strategy(stage=3, activations="recompute", reshard_after_forward=True)
    needed = make_plan(SMALL, cpu(100), forced).needed_bytes("host")
    assert make_plan(SMALL, cpu(needed / GIB), forced)
    with pytest.raises(DoesNotFit, match="host memory"):
        make_plan(SMALL, replace(cpu(1), host_bytes=needed - 1), forced)


def test_a_full_checkpoint_disk_is_refused():
    with pytest.raises(DoesNotFit, match=r"checkpoint disk: .* needed"):
        make_plan(replace(SMALL, checkpoints=2), replace(cpu(100), disk_bytes=50 * MIB))


def test_offloaded_gradients_leave_through_a_buffer_on_a_gpu():
    """It is as wide as the widest shard, of a block or of a root parameter."""
    host, device = (Strategy.of(state="host", gradients=tier) for tier in ("host", "device"))
    block = LLAMA_13B.blocks[0][0]
    root = replace(block, numel=4 * block.numel)
    for shape, widest in ((LLAMA_13B, block), (replace(LLAMA_13B, roots=(root,)), root)):
        slots = [memory(shape, each, cpu=False).purposes("device")["slots"] for each in (host, device)]
        assert slots[0] - slots[1] == widest.shard_numel(8) * 2
    slots = [memory(LLAMA_13B, each, cpu=True).purposes("host")["slots"] for each in (host, device)]
    assert slots[0] == slots[1]


def test_the_head_is_gathered_beside_the_last_blocks_forward():
    """With a wide frozen head and a loss by chunks, no other instant needs as much."""
    wide = llama(5120, 13824, 40, 131072, sequence=1024)
    frozen = tuple(replace(line, trained=False) for line in wide.roots)
    shape = replace(wide, roots=frozen, chunked_loss=True, block_elements=60 * wide.hidden)
    strategy = Strategy.of()
    found = memory(shape, strategy, cpu=False).purposes("device")
    head = 8 * frozen[0].shard_numel(8) * 2
    assert found["root parameters"] == head
    assert found["workspace"] == graph_bytes(shape, strategy) // 2


def test_a_loss_by_chunks_has_no_logits():
    """With a vocabulary of 128K and 8192 tokens: 128 MiB and the hidden states' sums, not 12 GiB."""
    wide = llama(5120, 13824, 40, 131072, sequence=8192)
    whole, chunked = (memory(replace(wide, chunked_loss=each), Strategy.of(), cpu=False) for each in (False, True))
    assert whole.purposes("device")["logits"] > 12 * GIB
    assert chunked.purposes("device")["logits"] < GIB
    assert whole.peak("device") - chunked.peak("device") > 6 * GIB
    short = replace(wide, sequence_tokens=16, chunked_loss=True)
    both = (memory(replace(short, chunked_loss=each), Strategy.of(), cpu=True) for each in (True, False))
    here, there = (each.purposes("host")["logits"] for each in both)
    copies = 4 * 131072 * 5120  # of the head's 16-bit weights, in fp32
    assert here - copies == pytest.approx(there, rel=0.02), "what is less than a chunk is there at once"
