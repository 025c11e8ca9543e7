"""fp32 modules: a model with planted large activations computes and trains in fp16 as it does in fp32."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import ftkit
from ftkit.hf.fp16 import search
from ftkit.hf.fp16.modules import Fp32Modules
from ftkit.hf.fp16.search import find_fp32_modules
from tests import fusible
from tests.hf.runs import fresh_state
from tests.tiny import make_base, make_overflowing_base

LAST = ("down_proj", "o_proj", "dense_4h_to_h", "attention.dense", "c_proj", "fc2", "out_proj", "wo", "SelfAttention.o")
FIRST = (".up_proj", "gate_up_proj", "wi", "wi_1", "c_fc", "dense_h_to_4h", "fc1")
HUGE = 2.0**15


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_state()


def plant_in_sums(model: nn.Module) -> nn.Module:
    """Let the blocks' projections give one feature of the residual stream values far beyond what fp16 holds."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(FIRST):
                module.weight *= 16
            if name.endswith(LAST):
                (module.weight.T if isinstance(module, Conv1D) else module.weight)[0] *= HUGE
    return model


def plant_inside(model: nn.Module) -> nn.Module:
    """Let products inside MLPs be beyond it, and what comes out of them as it was."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith((".up_proj", "wi_1")):
                module.weight *= 2 * HUGE
            if name.endswith(("down_proj", "wo")):
                module.weight /= 2 * HUGE
    return model


def compute(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor | None]:
    """Return loss and logits."""
    model.eval()
    with torch.no_grad():
        out = model(**batch)
    return float(out.loss), out.logits.float()


APART = ("llama", "qwen3", "gemma2", "gemma3", "olmo2", "t5-gated")
"""Their MLPs multiply the results of two projections that stand apart, of which one is planted."""


@pytest.mark.parametrize("family", fusible.families())
def test_sums_that_overflow(family: str) -> None:
    mends(family, plant_in_sums)


@pytest.mark.parametrize("family", fusible.families(APART))
def test_products_that_overflow(family: str) -> None:
    mends(family, plant_inside)


def mends(family: str, plant: Any) -> None:
    """Assert that a planted model, which is not finite in fp16, computes with fp32 modules what it computes in fp32."""
    batch = fusible.batch(family, 2, 12, 0)
    wanted, wanted_logits = compute(plant(fusible.build(family)), batch)
    model = plant(fusible.build(family))
    units = ftkit.shard(model, {"dtype": "fp16"})
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert not torch.isfinite(torch.tensor(compute(model, batch)[0])) or family.startswith("t5")  # which clamps
    found = find_fp32_modules(units, [batch])
    assert found.finite
    assert found.found
    loss, logits = compute(model, batch)
    assert loss == pytest.approx(wanted, rel=5e-3)
    torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=0.03 * float(wanted_logits.abs().max()))
    again = find_fp32_modules(units, [batch])
    assert again.found == found.found
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("family", fusible.families())
def test_a_model_that_fits_is_left_as_it_is(family: str) -> None:
    model = fusible.build(family)
    units = ftkit.shard(model, {"dtype": "fp16"})
    before = [type(module) for module in model.modules()]
    assert find_fp32_modules(units, [fusible.batch(family, 2, 12, 0)]).found == {}
    assert [type(module) for module in model.modules()] == before


def test_scores_of_an_attention() -> None:
    def plant(model: nn.Module) -> nn.Module:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight *= 2.0**9
                layer.self_attn.k_proj.weight *= 2.0**9
                layer.self_attn.scaling *= 2.0**-18
        return model

    batch = fusible.batch("llama", 2, 12, 0)
    wanted, _ = compute(plant(fusible.build("llama")), batch)
    model = plant(fusible.build("llama"))
    units = ftkit.shard(model, {"dtype": "fp16"})
    assert not torch.isfinite(torch.tensor(compute(model, batch)[0]))
    found = find_fp32_modules(units, [batch])
    assert {name: kind for name, kind in found.found.items() if "self_attn" in name} == {
        f"model.layers.{number}.self_attn": "part" for number in range(fusible.LAYERS)
    }
    assert compute(model, batch)[0] == pytest.approx(wanted, rel=5e-3)


def test_a_chunked_head_that_overflows() -> None:
    batch = fusible.batch("llama", 2, 12, 0)

    def plant(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            model.lm_head.weight *= 2.0**12
            model.model.norm.weight *= 2.0**5
        return model

    wanted, _ = compute(plant(fusible.build("llama")), batch)
    model = plant(fusible.build("llama"))
    units = ftkit.shard(model, {"dtype": "fp16"})
    assert find_fp32_modules(units, [batch]).found == {"lm_head": "projection"}
    assert compute(model, batch)[0] == pytest.approx(wanted, rel=5e-3)


class Broken(nn.Module):
    """An activation whose result is NaN while `now` is set, in every precision."""

    now = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden`, or NaN of its shape."""
        return hidden * torch.nan if self.now else hidden


def test_fp32_modules_of_a_stream_that_no_precision_mends_are_taken_back() -> None:
    model = fusible.build("llama")
    model.model.layers[1].mlp.act_fn = Broken()
    units = ftkit.shard(model, {"dtype": "fp16", "kernels": "off"})
    found = find_fp32_modules(units, [fusible.batch("llama", 2, 12, 0)])
    assert not found.finite
    assert found.found == {}


# --- in training


def rows(count: int) -> list[dict[str, list[int]]]:
    chance = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, 200, (12,), generator=chance).tolist() for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def trainer(folder: Path, out: Path, dtype: str, kind: type[ftkit.Trainer] = ftkit.Trainer, **changes: Any) -> ftkit.Trainer:
    fields = {"max_steps": 30, "per_device_train_batch_size": 6, "logging_steps": 1, "report_to": [], "use_cpu": True}
    fields |= {"save_strategy": "no", "learning_rate": 3e-3, "seed": 3, "lr_scheduler_type": "constant"}
    engine = {"dtype": dtype, **changes.pop("engine", {})}
    arguments = ftkit.TrainingArguments(str(out), ftkit=engine, **{**fields, **changes})
    return kind(ftkit.load_model(str(folder)), arguments, train_dataset=rows(12))


def losses(made: ftkit.Trainer) -> list[float]:
    return [line["loss"] for line in made.state.log_history if "loss" in line]


@pytest.mark.slow
def test_fp16_converges_where_bf16_and_fp32_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The convergence proof: large activations planted, the same run in three dtypes, and in fp16 without fp32 modules."""
    folder = make_overflowing_base(tmp_path / "base")
    ends = {}
    for dtype in ("fp32", "bf16", "fp16"):
        fresh_state()
        made = trainer(folder, tmp_path / dtype, dtype)
        with caplog.at_level(logging.WARNING):
            made.train()
        ends[dtype] = losses(made)
    assert ends["fp32"][-1] < 0.85 * ends["fp32"][0]
    # Matrix products of other CPU generations round otherwise, 30 steps long.
    assert ends["bf16"][-1] == pytest.approx(ends["fp32"][-1], rel=0.05)
    assert ends["fp16"] == pytest.approx(ends["fp32"], rel=0.05)
    assert "model.layers.0" in made.units.fp32_modules.describe()
    assert f"fp16: fp32 modules: {made.units.fp32_modules.describe()}" in caplog.text
    fresh_state()
    lost = trainer(folder, tmp_path / "lost", "fp16")
    lost.overflow_scan.find = lambda batches: True
    lost.train()
    assert not any(math.isfinite(loss) for loss in losses(lost))
    assert lost.sharded_optimizer.loss_scale.skipped_steps == 30


def test_a_run_goes_on_with_the_fp32_modules_it_had(tmp_path: Path) -> None:
    folder = make_overflowing_base(tmp_path / "base")
    whole = trainer(folder, tmp_path / "whole", "fp16", max_steps=6)
    whole.train()
    fresh_state()
    first = trainer(folder, tmp_path / "run", "fp16", max_steps=6, save_strategy="steps", save_steps=3)
    first.train()
    fresh_state()
    second = trainer(folder, tmp_path / "run", "fp16", max_steps=6)
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert second.units.fp32_modules.found == first.units.fp32_modules.found != {}
    assert not second.units.fp32_modules.largest, "it has not searched again"
    assert losses(second)[-3:] == losses(whole)[-3:]


def test_an_overflow_in_mid_run_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(make_overflowing_base(tmp_path / "base"), tmp_path / "run", "fp16", max_steps=4)
    made.overflow_scan.look = lambda batches: None  # as if activations had grown since
    with caplog.at_level(logging.WARNING):
        made.train()
    assert made.overflow_scan.overflows[0][0] == 1
    assert made.overflow_scan.overflows[0][1].startswith("in the forward of model.layers.0")
    assert len(made.overflow_scan.overflows) == 1
    assert "fp16: fp32 modules: " in caplog.text


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "engine", [{"accumulate_in": "unit"}, {"activations": "keep"}, {"state": "host", "activation_offload": "host"}]
)
def test_fp32_modules_under_other_ways_to_train(engine: dict[str, str], tmp_path: Path) -> None:
    folder = make_overflowing_base(tmp_path / "base")
    changes = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    exact = trainer(folder, tmp_path / "exact", "fp32", **changes)
    exact.train()
    fresh_state()
    made = trainer(folder, tmp_path / "run", "fp16", engine=engine, **changes)
    made.train()
    assert made.units.fp32_modules.found
    assert losses(made) == pytest.approx(losses(exact), rel=0.01)


# --- ranks


def look_on_ranks(spread: bool) -> tuple[dict[str, str], float]:
    """Case: token 7 alone makes a huge activation; it comes to the last rank only, or to none.

    Returns what is fp32, and the loss.
    """
    fresh_state()
    model = fusible.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 0] = 3e4
        model.model.layers[0].self_attn.o_proj.weight[0] *= 2.0**6
        model.model.layers[0].input_layernorm.weight *= 30
    units = ftkit.shard(model, {"dtype": "fp16", "stage": 3})
    batch = fusible.batch("llama", 2, 12, units.comm.rank)
    batch["input_ids"][batch["input_ids"] == 7] = 8
    if spread and units.comm.rank == units.comm.world_size - 1:
        batch["input_ids"][0, 3] = 7
    found = find_fp32_modules(units, [batch])
    return found.found, compute(model, batch)[0]


@pytest.mark.parametrize("world", [2])
def test_ranks_find_the_same_fp32_modules(world: int, worlds: Any) -> None:
    told = worlds[world].run(look_on_ranks, True)
    assert told[0][0]
    assert all(found == told[0][0] for found, _ in told)
    assert all(torch.isfinite(torch.tensor(loss)) for _, loss in told)
    assert all(found == {} for found, _ in worlds[world].run(look_on_ranks, False))


# --- adapters, files


def test_an_adapters_projection(tmp_path: Path) -> None:

    def build() -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(
            plant_in_sums(fusible.build("llama")), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        )

    batch = fusible.batch("llama", 2, 12, 0)
    wanted, _ = compute(build(), batch)
    model = build()
    units = ftkit.shard(model, {"dtype": "fp16"})
    found = find_fp32_modules(units, [batch])
    assert found.finite
    assert any(name.endswith("down_proj") for name in found.found)
    assert compute(model, batch)[0] == pytest.approx(wanted, rel=5e-3)


def test_an_fp32_module_that_is_called_by_keyword() -> None:
    norm, layer = nn.LayerNorm(8), nn.Linear(8, 8)
    model = nn.ModuleDict({"norm": norm, "layer": layer}).half()
    Fp32Modules().apply(model, {"layer": "projection"})
    x = torch.randn(2, 8)
    assert torch.equal(norm(input=x), norm(x))
    assert layer(input=x.half()).dtype == torch.float32


def test_fp32_modules_are_taken_back_whole() -> None:
    torch.manual_seed(0)
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(fusible.build("llama"), config)
    batch = fusible.batch("llama", 2, 12, 0)
    modules = ftkit.shard(model, {"dtype": "fp16", "kernels": "off"}).fp32_modules
    layers = [name for name, module in model.named_modules() if name.endswith("layers.0")]
    chosen = {layers[0]: "stream", f"{layers[0]}.mlp": "part", f"{layers[0]}.self_attn.o_proj": "projection"}
    plain = compute(model, batch)[1]
    modules.apply(model, chosen)
    classes, wide = [type(module) for module in model.modules()], compute(model, batch)[1]
    assert not torch.equal(wide, plain)
    modules.apply(model, {})
    assert torch.equal(compute(model, batch)[1], plain)
    assert all(each.cast_input_dtype_enabled for each in model.modules() if isinstance(each, BaseTunerLayer))
    modules.apply(model, chosen)
    assert torch.equal(compute(model, batch)[1], wide)
    assert [type(module) for module in model.modules()] == classes, "one class per module"


def test_restored_fp32_modules_are_those_that_were_found() -> None:
    batch = fusible.batch("llama", 2, 12, 0)
    first, second = (plant_in_sums(fusible.build("llama")) for _ in range(2))
    found = find_fp32_modules(ftkit.shard(first, {"dtype": "fp16"}), [batch])
    units = ftkit.shard(second, {"dtype": "fp16"})
    units.fp32_modules.apply(second, found.found)
    assert compute(second, batch)[0] == compute(first, batch)[0]
    with pytest.raises(ftkit.UserError, match="no such part"):
        units.fp32_modules.apply(second, {"model.layers.9": "part"})


def test_weights_that_fp16_does_not_hold_are_refused(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ftkit.UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has a weight of 1e\+06, fp16"):
        ftkit.shard(ftkit.load_model(str(folder)), {"dtype": "fp16"})
    ftkit.shard(ftkit.load_model(str(folder)), {"dtype": "bf16"})


# --- what a review found


def mixtral(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    fields = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "initializer_range": 0.15, "use_cache": False}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{"num_local_experts": 4, **fields, **changes}))


def plant_in_attention(model: nn.Module, name: str) -> nn.Module:
    with torch.no_grad():
        model.get_submodule(name).weight[0] *= HUGE
    return model


def test_a_mixture_of_experts() -> None:
    batch = fusible.batch("llama", 2, 12, 0)
    wanted, _ = compute(plant_in_attention(mixtral(), "model.layers.0.self_attn.o_proj"), batch)
    model = plant_in_attention(mixtral(), "model.layers.0.self_attn.o_proj")
    found = find_fp32_modules(ftkit.shard(model, {"dtype": "fp16"}), [batch])
    assert found.finite
    assert found.found
    assert compute(model, batch)[0] == pytest.approx(wanted, rel=5e-3)


def look_at_experts() -> tuple[dict[str, str], bool]:
    """Case: experts in a loop, called as often as a rank's tokens go there; only the last norm is beyond the limit."""
    fresh_state()
    model = mixtral(experts_implementation="eager", num_local_experts=8)
    with torch.no_grad():
        model.model.norm.weight *= 2.0**14
        model.lm_head.weight *= 2.0**-14
    units = ftkit.shard(model, {"dtype": "fp16", "stage": 3, "kernels": "off"})
    tokens = 24 if units.comm.rank == 0 else 2
    found = find_fp32_modules(units, [fusible.batch("llama", 1, tokens, 0)])
    return found.found, found.finite


def test_ranks_whose_tokens_go_to_different_experts(world2: Any) -> None:
    first, second = world2.run(look_at_experts)
    assert first == second
    assert first[1]
    assert "model.norm" in first[0]


def options_after_a_call() -> dict[str, Any]:
    """Case: rank 0 alone has called a module, and found that its projection's result is its own."""
    units = ftkit.shard(mixtral(), {"dtype": "fp16", "stage": 3})
    name = "model.layers.0.self_attn.o_proj"
    with search._Hooks(units) as hooks:
        if units.comm.rank == 0:
            hooks.last.add(units.model.get_submodule(name))
            hooks.excesses.append((name, 1e9))
        return hooks._take_excesses()


def test_ranks_try_the_same_fp32_modules(world2: Any) -> None:
    name = "model.layers.0.self_attn.o_proj"
    assert world2.run(options_after_a_call) == [{name: (1e9, [(name, "projection")])}] * 2


def test_a_batch_without_labels_that_count() -> None:
    batch = fusible.batch("llama", 2, 12, 0)
    batch["labels"][:] = -100
    for kernels in ("auto", "off"):
        units = ftkit.shard(fusible.build("llama"), {"dtype": "fp16", "kernels": kernels})
        assert find_fp32_modules(units, [batch]).finite


def test_one_batch_that_is_not_finite_is_enough() -> None:
    model = fusible.build("llama")
    broken = model.model.layers[1].mlp.act_fn = Broken()

    def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        broken.now = bool((kwargs["input_ids"] == 7).any())

    model.register_forward_pre_hook(look, with_kwargs=True)
    good, bad = fusible.batch("llama", 2, 12, 0), fusible.batch("llama", 2, 12, 1)
    good["input_ids"][good["input_ids"] == 7] = 8
    bad["input_ids"][0, 0] = 7
    found = find_fp32_modules(ftkit.shard(model, {"dtype": "fp16", "kernels": "off"}), [bad, good])
    assert not found.finite


def test_an_earlier_stream_under_a_later_one() -> None:
    def plant(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            model.model.embed_tokens.weight[7, 0] = 3e4
            model.model.embed_tokens.weight[9, 0] = 1e4
            model.model.layers[0].self_attn.o_proj.weight[0] *= 2.0**12
        return model

    batches = [fusible.batch("llama", 1, 12, 0) for _ in range(2)]
    for batch, token in zip(batches, (9, 7)):
        batch["input_ids"][:] = batch["input_ids"].masked_fill((batch["input_ids"] == 7) | (batch["input_ids"] == 9), 8)
        batch["input_ids"][0, 3] = token
    model = plant(fusible.build("llama"))
    units = ftkit.shard(model, {"dtype": "fp16", "kernels": "off"})
    units.fp32_modules.apply(model, {"model.layers.1": "stream", "model.layers.0": "stream"})
    exact = plant(fusible.build("llama"))
    for batch in batches:
        assert compute(model, batch)[0] == pytest.approx(compute(exact, batch)[0], rel=5e-3)
    assert find_fp32_modules(units, batches).finite


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_t5s_first_attention(stack: str) -> None:
    def plant(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            attention = model.get_submodule(f"{stack}.block.0.layer.0.SelfAttention")
            attention.q.weight *= 2.0**17
            attention.k.weight *= 2.0**-17
        return model

    batch = fusible.batch("t5-gated", 2, 12, 0)
    wanted, _ = compute(plant(fusible.build("t5-gated")), batch)
    model = plant(fusible.build("t5-gated"))
    assert find_fp32_modules(ftkit.shard(model, {"dtype": "fp16"}), [batch]).finite
    assert compute(model, batch)[0] == pytest.approx(wanted, rel=1e-2)


def test_packed_batches_of_an_adapter_are_looked_at(tmp_path: Path) -> None:
    folder = make_overflowing_base(tmp_path / "base")
    model = ftkit.load_model(str(folder), adapter=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    packed = [{**row, "position_ids": [*range(6), *range(6)]} for row in rows(12)]
    arguments = ftkit.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        ftkit={"dtype": "fp16"},
    )  # fmt: skip
    made = ftkit.Trainer(model, arguments, train_dataset=packed)
    made.train()
    assert made.units.fp32_modules.found
    assert made.sharded_optimizer.loss_scale.skipped_steps == 0


def test_an_overflow_in_an_earlier_micro_batch(tmp_path: Path) -> None:
    folder = make_overflowing_base(tmp_path / "base")
    changes = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    made = trainer(folder, tmp_path / "run", "fp16", **changes)
    find, seen = made.overflow_scan.find, []
    made.overflow_scan.look = lambda batches: None
    made.overflow_scan.find = lambda batches: seen.append(len(batches)) or find(batches)
    made.train()
    assert seen == [3]
    assert made.units.fp32_modules.found


def test_state_that_could_not_be_made_is_made_again(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    units = ftkit.shard(ftkit.load_model(str(folder)), {"dtype": "fp16"})
    optimizer = ftkit.ShardedAdamW(units)
    folder.rename(tmp_path / "away")
    with pytest.raises(ftkit.UserError):
        optimizer.prepare()
    (tmp_path / "away").rename(folder)
    optimizer.prepare()
    assert all(state.master.tensor.abs().sum() > 0 for state in optimizer.states.values())
