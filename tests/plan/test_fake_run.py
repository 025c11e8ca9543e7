"""The fake run: the same bytes as an engine that allocates, and as the plan; the packaged recipes at full size."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers

from benchmarks.fake_run import FakeCommunicator, FakeTiers, build, fake_run, main, run, train
from benchmarks.meter import Meter
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.hf.blocks import find_blocks
from ftkit.hf.memory.fake import graph_bytes, nothing_behind
from ftkit.hf.sharding import model_shape, shard_as
from ftkit.plan.limits import Limits
from ftkit.spec.strategy import Strategy
from ftkit.spec.update_rules import ADAMW, ADAMW_8BIT, LION_8BIT
from tests.plan.made import make_plan

TOKENS, CPU = 32, torch.device("cpu")
DEVICE = {"parameters": "device", "gradients": "device", "state": "device", "activation_offload": "device"}
HOST = {"parameters": "host", "gradients": "host", "state": "host", "activation_offload": "host"}


def llama():
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    inner = model.model.rotary_emb
    inner.inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)  # what no file would hold
    return model


def planned(model, *, cpu=False, world=4, sequences=2, dtype=torch.float16, rule=ADAMW, **forced):
    limits = Limits(None if cpu else 1 << 40, 1 << 40, None, ranks_per_node=world, cpu=cpu)
    shape = replace(model_shape(model, find_blocks(model), world, dtype, TOKENS, cpu=cpu), rule=rule)
    name = next(name for name, known in DTYPES.items() if known == dtype)
    chosen = {
        "dtype": name,
        "update": "now",
        "micro_batch": 1,
        "activations": "recompute",
        "reshard_after_forward": True,
        **forced,
    }
    return make_plan(shape, limits, Strategy(**chosen), sequences=sequences)


@pytest.mark.quick(5)
@pytest.mark.parametrize("activations", ["recompute", pytest.param("keep", marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("stage, tiers", [(3, DEVICE), (3, HOST), (3, DEVICE | {"state": "host"}), (2, DEVICE)])
def test_what_stays_is_what_was_planned(stage, tiers, activations):
    if activations == "keep" and tiers["activation_offload"] != "device":
        tiers = tiers | {"activation_offload": "device"}
    model = llama()
    plan = planned(model, stage=stage, activations=activations, **tiers)
    found = fake_run(plan, model)
    for tier in ("device", "host"):
        for purpose in {*found.planned[tier], *found.found[tier]} - {"activations"}:
            assert found.found[tier].get(purpose, 0) == found.planned[tier].get(purpose, 0), (tier, purpose)
    if tiers["activation_offload"] == "host":  # beside the activations nothing comes and goes on the host
        more = found.found["host"].get("activations", 0) - found.planned["host"].get("activations", 0)
        assert 0 <= more < 64  # the norm


@pytest.mark.parametrize(
    ("rule", "master", "tiers"),
    [
        (ADAMW_8BIT, "fp32", DEVICE),
        (ADAMW_8BIT, "fp32", DEVICE | {"state": "host"}),
        (ADAMW_8BIT, "split", HOST),
        (LION_8BIT, "split", DEVICE),
        (ADAMW, "split", HOST),
    ],
)
def test_each_form_of_the_state_is_what_was_planned(rule, master, tiers):
    model = llama()
    plan = planned(model, stage=3, rule=rule, master=master, **tiers)
    found = fake_run(plan, model)
    for tier in ("device", "host"):
        for purpose in {*found.planned[tier], *found.found[tier]} - {"activations"}:
            assert found.found[tier].get(purpose, 0) == found.planned[tier].get(purpose, 0), (tier, purpose)


@pytest.mark.parametrize("activations", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("recompute", "keep")), 2])
@pytest.mark.parametrize("stage, tiers", [(3, HOST), (3, DEVICE), (2, DEVICE)])
def test_a_fake_run_on_the_cpu_takes_what_a_run_with_memory_takes(stage, tiers, activations):
    """The same meter beside both: the same storages, at the same peak."""
    if activations == "keep":
        tiers = tiers | {"activation_offload": "device"}
    plan = planned(llama(), cpu=True, world=1, dtype=torch.float32, stage=stage, activations=activations, **tiers)
    fake, real = Meter(lambda tensor: "device"), Meter(lambda tensor: "device")
    with nothing_behind(), fake:
        units, optimizer = build(plan, llama(), CPU, 1)
        train(plan, units, optimizer, packed=False)
    model = llama()
    strategy = plan.strategy
    with real:
        units = shard_as(model.train(), find_blocks(model), FakeCommunicator(CPU, 1), strategy, Tiers(CPU, strategy))
        optimizer = ShardedAdamW(units)
        optimizer.prepare()
        train(plan, units, optimizer, packed=False)
    assert fake.peaks["device"] == pytest.approx(real.peaks["device"], rel=0.01)


def test_collectives_fill_nothing_and_host_memory_is_none():
    with nothing_behind():
        arena = FakeTiers(torch.device("meta"), planned(llama(), stage=3, **HOST).strategy).arena(1 << 44)
        assert arena.take(1 << 40, torch.float32).numel() == 1 << 40
        with pytest.raises(AssertionError):
            arena.take(1 << 44, torch.float32)
    assert FakeCommunicator(CPU, 8).totals(torch.zeros(3)) == [1.0] * 3
    assert [FakeCommunicator(CPU, 8).any(flag) for flag in (True, False)] == [True, False]


@pytest.mark.slow
def test_the_command_says_whether_plan_and_fake_run_agree(capsys):
    with mock.patch("sys.argv", ["fake_run", "llama-2-13b-full-8xv100-16gb"]), pytest.raises(SystemExit) as caught:
        main()
    shares = re.search(r"([\d.]+)% +([\d.]+)%  llama-2-13b-full", capsys.readouterr().out)
    assert not caught.value.code
    assert abs(float(shares[2]) - 100) < 1


OF_EACH_KIND = ("falcon3-10b-full", "gemma-3-12b-lora", "gpt-10b-full", "t5-11b-lora", "llama-2-13b-long")


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{name}-8xv100-16gb" for name in OF_EACH_KIND])
def test_full_size_recipes(name):
    """Device and host peaks within 5 % of the plan. All of them: `make dry-runs`."""
    found = run(name, "8xv100-16gb")
    assert found.agrees, found


def test_what_autograd_keeps_is_that_of_the_engine_and_not_of_torchs_checkpoints():
    model = llama()
    blocks = find_blocks(model)
    sizes = []
    for _ in range(2):
        before = [vars(module).get("gradient_checkpointing") for module in model.modules()]
        sizes.append(graph_bytes(model, blocks[0][1], 64, lambda name: False, torch.float16))
        assert before == [vars(module).get("gradient_checkpointing") for module in model.modules()]
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
    assert sizes[0] == sizes[1] > 0
