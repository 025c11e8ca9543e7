"""The plan's permanent bytes against the engine's own: weights, gradients, state, slots, staging, room for activations.

Every stage, tier and world size on a small Llama, after a step; they must be equal, not close.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from ftkit.hf.memory import shape as shapes
from ftkit.hf.sharding import shard
from ftkit.hf.trainer.optimizers import SHARDED
from ftkit.plan.memory import kept_bytes, memory, widest_states_bytes
from ftkit.spec.update_rules import ADAMW, ADAMW_8BIT, ADEMAMIX, LION_8BIT, SGD

SEQUENCE, VOCABULARY = 16, 1024
DEVICE = {"parameters": "device", "gradients": "device", "state": "device", "activation_offload": "device"}


def build(tied: bool, adapter: bool):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")) if adapter else model


def live(settings, tied, adapter, accumulation, parts, rule):
    """On every rank: what lives after a step, and what was planned, by purpose."""
    model = build(tied, adapter)
    units = shard(
        model,
        settings | {"accumulate_in": "unit" if parts > 1 else "step"},
        device=torch.device("cpu"),
        micro_batch_tokens=2 * SEQUENCE,
        accumulation_steps=accumulation * parts,
        rule=rule,
    )
    optimizer = SHARDED[rule.name](units, **rule.settings)
    assert optimizer.rule == rule
    for _ in range(accumulation):
        ids = torch.randint(0, VOCABULARY, (2 * parts, SEQUENCE))
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.settle()
    told = units.state_bytes()
    told["state"] = optimizer.state_bytes()
    told["staging"] += optimizer.updater.staging_bytes
    offload = units.transfer.activations
    told["kept"] = offload.host_bytes if offload.tier == "host" else 0
    told["staging"] += offload.host_bytes if offload.tier == "nvme" else 0
    way, shape = units.plan.strategy, units.plan.shape
    found = memory(shape, way, cpu=True)
    both = {tier: found.purposes(tier, "train") for tier in ("host", "nvme")}
    planned = {
        purpose: sum(both[tier].get(name, 0) for tier in both for name in names)
        for purpose, names in {
            "parameters": ["parameters"],
            "gradients": ["gradients"],
            "state": ["master", "residual", "moments"],
            "slots": ["slots"],
            "staging": ["staging"],
        }.items()
    }
    if way.activation_offload == "host" and way.activations == "recompute":
        planned["kept"] = len(shape.blocks) * kept_bytes(shape, way)
    units.tiers.close()
    return {k: v for k, v in told.items() if v}, {k: v for k, v in planned.items() if v}


WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]


def check(world, settings, *, tied=False, adapter=False, accumulation=1, parts=1, rule=ADAMW):
    for told, planned in world.run(live, settings, tied, adapter, accumulation, parts, rule):
        assert told == planned, settings


@pytest.mark.quick(2)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(worlds, world, stage):
    for dtype, accumulation, tied in (("bf16", 1, False), ("bf16", 2, True), ("fp32", 1, False)):
        settings = {"stage": stage, "activations": "recompute", "dtype": dtype, "activation_offload": "device"}
        check(worlds[world], settings, tied=tied, accumulation=accumulation)


TIERS = [
    {"state": "host"},
    {"state": "nvme", "state_host_bytes": 0},
    {"gradients": "host", "state": "host"},
    {"gradients": "nvme"},
    {"parameters": "host"},
    {"parameters": "nvme"},
    {"parameters": "nvme", "gradients": "nvme", "state": "nvme", "state_host_bytes": 0},
    {"parameters": "nvme", "gradients": "nvme", "state": "nvme", "state_host_bytes": 0, "activation_offload": "nvme"},
    {"parameters": "host", "gradients": "host", "state": "host", "activation_offload": "host"},
    {"activation_offload": "host"},
    {"activation_offload": "nvme"},
]


@pytest.mark.quick(4)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tiers", TIERS, ids=lambda tiers: "-".join(f"{k}.{v}" for k, v in tiers.items()))
def test_tiers(worlds, world, tiers, tmp_path):
    for dtype, accumulation, parts in (("bf16", 2, 1), ("fp32", 1, 2)):
        settings = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "dtype": dtype, "update": "now"}
        settings |= {**DEVICE, **tiers, "nvme_dir": str(tmp_path)}
        check(worlds[world], settings, accumulation=accumulation, parts=parts)


@pytest.mark.parametrize("world", [1, 2])
def test_adapters(worlds, world, tmp_path):
    for stage, state in ((1, "device"), (3, "nvme"), (3, "host")):
        settings = {"stage": stage, "activations": "recompute", "dtype": "bf16", "state": state, "nvme_dir": str(tmp_path)}
        check(worlds[world], {**settings, "activation_offload": "device"}, adapter=True)


@pytest.mark.parametrize("rule", [SGD, SGD.of({"momentum": 0.9}), ADEMAMIX], ids=["sgd", "momentum", "ademamix"])
def test_other_update_rules(worlds, rule, tmp_path):
    for tiers in ({}, {"gradients": "host", "state": "host"}, {"state": "nvme", "state_host_bytes": 0}):
        settings = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "dtype": "bf16", "update": "now"}
        check(worlds[2], settings | {**DEVICE, **tiers, "nvme_dir": str(tmp_path)}, rule=rule)


SPLIT = [
    {},
    {"parameters": "host", "gradients": "host", "state": "host"},
    {"parameters": "nvme", "gradients": "nvme", "state": "nvme", "state_host_bytes": 0},
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("rule", "master"),
    [(ADAMW_8BIT, "fp32"), (LION_8BIT, "fp32"), (ADAMW, "split"), (ADAMW_8BIT, "split")],
    ids=["adamw_8bit", "lion_8bit", "split", "adamw_8bit-split"],
)
def test_other_forms_of_the_state(worlds, world, rule, master, tmp_path):
    for number, tiers in enumerate(SPLIT):
        for dtype in ("bf16", "fp32") if number == 0 else ("bf16",):
            settings = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "update": "now"}
            settings |= {"dtype": dtype, "master": master, **DEVICE, **tiers, "nvme_dir": str(tmp_path)}
            check(worlds[world], settings, rule=rule)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_adapters_have_fp32_moments_also_by_an_eight_bit_rule(worlds, master, tmp_path):
    settings = {"stage": 3, "activations": "recompute", "dtype": "bf16", "state": "device", "master": master}
    check(worlds[2], {**settings, "activation_offload": "device"}, adapter=True, rule=ADAMW_8BIT)


def staying(folder, free_bytes):
    """What stays in host memory of a state on NVMe, where all else is decided and so much is free."""
    decided = {"stage": 3, "activations": "recompute", "reshard_after_forward": True, "dtype": "bf16"}
    settings = {**decided, **DEVICE, "state": "nvme", "nvme_dir": folder}
    with mock.patch.object(shapes, "usable_host", return_value=(free_bytes, "this test", free_bytes)):
        units = shard(build(False, False), settings, device=torch.device("cpu"), micro_batch_tokens=2 * SEQUENCE)
    units.tiers.close()
    return units.plan.strategy.state_host_bytes, widest_states_bytes(units.plan.shape, units.plan.strategy, 2, cpu=True)


def test_what_stays_of_a_state_fits_what_is_free_though_the_user_decided_the_rest(world2, tmp_path):
    for stays, most in world2.run(staying, str(tmp_path), 64 << 30):
        assert stays == most > 0
    assert [stays for stays, _ in world2.run(staying, str(tmp_path), 0)] == [0, 0]
