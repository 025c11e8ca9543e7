"""The largest model that fits, what-if, and the page of the ablation."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import ablation
from benchmarks.published import PAGE, generated
from ftkit.plan.candidates import with_adapter
from ftkit.plan.catalog import profiles
from ftkit.plan.memory import GIB
from ftkit.plan.plan import Asked
from ftkit.plan.refuse import DoesNotFit
from ftkit.plan.whatif import largest, what_if, with_blocks
from ftkit.report.curve import curve
from ftkit.spec.strategy import Strategy
from ftkit.spec.update_rules import ADAMW, ADAMW_8BIT
from tests.plan.test_choice import LLAMA_13B, SMALL, cpu, llama, on

V100 = profiles()["8xv100-16gb"].rates_of_a_rank(8)
SHORT = llama(5120, 13824, 6, 32000)
ASKED = Asked(SHORT, on("8xv100-16gb", host_bytes=64 * GIB), Strategy(), 8, 2, V100)


def test_one_block_more_does_not_fit() -> None:
    plan = largest(ASKED)
    count = len(plan.shape.blocks)
    assert count > 6
    assert plan.speed is not None
    with pytest.raises(DoesNotFit):
        replace(ASKED, shape=with_blocks(SHORT, count + 1), rates=None).plan()
    with pytest.raises(DoesNotFit):
        largest(replace(ASKED, limits=replace(ASKED.limits, device_bytes=GIB)))


def test_blocks_of_two_kinds_stay_in_proportion() -> None:
    thin, wide = llama(256, 1024, 3, 8000).blocks, llama(512, 1024, 1, 8000).blocks
    shape = replace(SMALL, blocks=thin + wide)
    twice = with_blocks(shape, 8)
    assert twice.blocks == tuple(each for each in shape.blocks for _ in range(2))
    assert with_blocks(shape, 4) == shape
    assert with_blocks(shape, 1).blocks == thin[:1]


def test_adapters_grow_with_the_blocks() -> None:
    shape = with_adapter(SHORT)
    twice = with_blocks(shape, 2 * len(shape.blocks))
    assert twice.trained_numel == 2 * shape.trained_numel
    assert twice.replicated[0] == shape.replicated[0], "what is frozen outside blocks stays"


def test_nineteen_billion_fit_the_box_of_the_project() -> None:
    """Issue 6, done when 2: full parameters, fp32 state in host memory."""
    plan = largest(replace(ablation.asked(), rates=None))
    assert plan.shape.trained_numel == plan.shape.numel > 19e9
    assert plan.strategy.state == "host"


def test_forms_of_the_state_make_larger_models_fit() -> None:
    """With one micro-batch a step, so that gradients are not summed in fp32."""
    asked = replace(ablation.asked(), sequences=4, rates=None)
    shown = re.findall(r"^\| `name: .* \| ([\d.]+)B \|$", (PAGE.parent / "optimizers.md").read_text(encoding="utf-8"), re.M)
    for size, rule, master in zip(shown, (ADAMW, ADAMW_8BIT, ADAMW_8BIT), ("fp32", "fp32", "split"), strict=True):
        shape, wanted = replace(asked.shape, rule=rule), Strategy(master=master)
        assert f"{largest(replace(asked, shape=shape, wanted=wanted)).shape.numel / 1e9:.1f}" == size
    assert float(shown[2]) > 33


@pytest.mark.slow
def test_the_page_is_what_the_planner_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert generated(page, "ablation") == ablation.fragment(), "write it again: make ablation"


def test_a_hundred_billion_on_64_gpus() -> None:
    known = profiles()["64xv100"]
    rates = known.rates_of_a_rank(64)
    assert rates is not None
    assert rates.link == 12.5e9
    assert profiles()["16xv100"].rates_of_a_rank(8) == replace(rates, link=120e9), "within one node NVLink counts"
    shape = llama(4096, 4096 * 8 // 3, 480, 50304, world=64, sequence=1024)
    forced = Strategy(
        stage=3,
        activations="recompute",
        reshard_after_forward=True,
        parameters="device",
        activation_offload="device",
        micro_batch=2,
    )
    plan = Asked(shape, on("64xv100"), forced, 2, 2, rates).plan()
    assert plan.speed is not None
    assert plan.speed.binds == "collectives"
    assert plan.shape.numel > 95e9


LORA = "LoRA, rank 16 (estimate)"


def test_what_if() -> None:
    answers = {each.question: each for each in what_if(replace(ASKED, limits=on("8xv100-16gb")))}
    assert list(answers) == ["GPUs of 32 GiB", "NVMe of 1,676 GiB", LORA, "sequences of 1,024"]
    for each in answers.values():
        assert each.plan is not None
        assert each.plan.speed is not None
    before = replace(ASKED, limits=on("8xv100-16gb")).plan()
    larger = answers["GPUs of 32 GiB"].plan
    assert larger.speed.seconds <= before.speed.seconds * 1.005
    assert answers["sequences of 1,024"].plan.speed.tokens == before.speed.tokens
    assert answers[LORA].plan.shape.peft
    tight = list(what_if(Asked(LLAMA_13B, on("8xv100-16gb", host_bytes=30 * GIB, device_bytes=4 * GIB))))
    assert any("above the limit" in each.problem for each in tight if each.plan is None)
    assert [each.question for each in what_if(Asked(SMALL, cpu(100)))] == [LORA, "sequences of 128"]


@pytest.mark.parametrize("activations", ["recompute", 3, "keep"])
def test_the_memory_within_a_step(activations: str | int) -> None:
    forced = Strategy(
        stage=3,
        activations=activations,
        reshard_after_forward=True,
        activation_offload="device",
        state="host",
        micro_batch=1,
    )
    plan = replace(ASKED, limits=on("8xv100-32gb"), wanted=replace(forced, accumulate_in="step")).plan()
    assert plan.speed is not None
    static, instants = curve(plan, plan.speed)
    assert all(now[0] >= before[0] for before, now in pairwise(instants))
    assert instants[-1][1] == 0, "all that came has gone"
    most = static + max(size for _, size in instants)
    assert 0.6 * plan.memory.at("device", "train") < most <= plan.memory.at("device", "train")
    kept = [size for _, size in instants]
    assert max(kept) > kept[0]
