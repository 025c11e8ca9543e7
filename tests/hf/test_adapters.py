"""Names in an adapter's configuration must match modules, and a parameter without a value is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import (
    CPTConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch import nn

import ftkit
from ftkit.hf.adapters import adapter_parameters, add_adapter
from tests.hf import runs
from tests.worlds import RankFailure


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **changes})


WRONG = {
    "a target beside good ones": (lora(target_modules=["q_proj", "v_porj"]), "'v_porj'", "v_proj"),
    "one of two modules to save": (lora(modules_to_save=["lm_head", "norms"]), "'norms'", "norm"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    path = tmp_path_factory.mktemp("model")
    runs.llama().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("case", WRONG)
def test_a_name_that_matches_nothing_stops(case, folder):
    config, *words = WRONG[case]
    with pytest.raises(ftkit.UserError) as refusal:
        ftkit.load_model(folder, adapter=config)
    for word in ("adapter: ", *words):
        assert word in str(refusal.value), str(refusal.value)


GOOD = [
    lora(target_modules="all-linear", exclude_modules=["q_proj", "lm_head"]),
    lora(target_modules=r".*\.(q|k)_proj"),
    lora(target_modules=["self_attn.q_proj", "model.layers.1.mlp.up_proj"], modules_to_save=["lm_head", "model.norm"]),
    lora(trainable_token_indices={"embed_tokens": [0, 96]}),
    IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
]


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_names_that_match_pass(number):
    assert adapter_parameters(add_adapter(runs.llama(), GOOD[number]))


def test_a_configuration_may_be_used_twice(folder):
    """PEFT adds heads to the user's own list, which this model may not have."""
    config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"])
    for _ in range(2):
        ftkit.load_model(folder, task="sequence-classification", adapter=config)


# --- which parameters are an adapter's

ATTENTION = ["q_proj", "v_proj"]
KINDS = {
    "LoRA": (lora(), {"lora_A", "lora_B"}),
    "DoRA": (lora(use_dora=True), {"lora_A", "lora_B", "lora_magnitude_vector"}),
    "IA3": (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), {"ia3_l"}),
    "OFT": (OFTConfig(target_modules=ATTENTION, oft_block_size=8), {"oft_R"}),
    "LoHa": (LoHaConfig(r=2, target_modules=ATTENTION), {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),
    "HRA": (HRAConfig(r=2, target_modules=ATTENTION), {"hra_u"}),
    "prompts": (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), {"prompt_encoder"}),
    "rows of an embedding": (lora(trainable_token_indices=[1, 2]), {"lora_A", "lora_B", "token_adapter"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_an_adapter_are_known_by_pefts_own_names(kind):
    config, names = KINDS[kind]
    model = get_peft_model(runs.llama(), config)
    found = adapter_parameters(model)
    assert found == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {next(part for part in name.split(".") if part in names) for name in found} == names


def test_a_copy_of_a_whole_module_is_not_an_adapters():
    model = get_peft_model(runs.llama(), lora(modules_to_save=["lm_head"]))
    assert not any("lm_head" in name for name in adapter_parameters(model))


# --- what a sharded PEFT model refuses


def merged(stage: int) -> float:
    """A case for a world: the largest difference between the logits of a sharded model before and after PEFT merges it."""
    model = get_peft_model(runs.llama(), lora(task_type="CAUSAL_LM", init_lora_weights=False))
    ftkit.shard(model, {"stage": stage})
    rows = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(input_ids=rows).logits
        return float((model.merge_and_unload()(input_ids=rows).logits - before).abs().max())


def test_an_adapter_is_merged_where_the_base_is_whole(world2):
    assert max(world2.run(merged, 2)) < 1e-4
    with pytest.raises(RankFailure, match=r"q_proj\.base_layer\.weight is resharded"):
        world2.run(merged, 3)


@pytest.mark.parametrize("kind", [PrefixTuningConfig, CPTConfig])
def test_adapters_that_would_not_train_are_refused(kind):
    fields: dict[str, Any] = {"num_virtual_tokens": 3}
    if kind is CPTConfig:
        fields = {"cpt_token_ids": [3, 4, 5], "cpt_tokens_type_mask": [1, 2, 3]}
    model = get_peft_model(runs.llama(), kind(task_type="CAUSAL_LM", **fields))
    with pytest.raises(ftkit.UserError, match="is not supported: it"):
        ftkit.shard(model)


# --- what has no value


def of_a_configuration() -> Any:
    return ftkit.load_model(None, config=runs.llama().config)


def test_an_adapter_without_values_is_refused_by_name(folder):
    model = get_peft_model(ftkit.load_model(folder), lora(), low_cpu_mem_usage=True)
    with pytest.raises(ftkit.UserError, match=r"lora_A\.default\.weight is on the meta device .* low_cpu_mem_usage off"):
        ftkit.shard(model)


def test_a_head_given_to_a_model_of_a_configuration_is_kept():
    model = of_a_configuration()
    head = nn.Linear(32, 97, bias=False)
    expected = head.weight.detach().clone()
    model.lm_head = head
    assert torch.equal(ftkit.shard(model, {"dtype": "fp32"}).state_dict()["lm_head.weight"], expected)


def test_a_model_that_could_not_be_sharded_keeps_its_values(folder):
    model = ftkit.load_model(folder)
    with pytest.raises(ftkit.UserError):
        ftkit.shard(model, {"stage": 3, "device_gib": 1e-6, "host_gib": 1e-6})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    units = ftkit.shard(model, {"stage": 3})
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in units.state_dict().items())
