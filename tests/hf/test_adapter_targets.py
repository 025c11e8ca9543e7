"""A name in an adapter's configuration that matches nothing stops, with the nearest one that would: in a recipe, in
`load_model(adapter=...)`, and when a PEFT model is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import (
    C3AConfig,
    DeloraConfig,
    FourierFTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OSFConfig,
    PrefixTuningConfig,
    TaskType,
    TrainableTokensConfig,
    VeraConfig,
    WaveFTConfig,
    XLoraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.tuners.lora.config import BdLoraConfig
from torch import nn

import ftkit
from ftkit.hf.models.adapter_targets import check_kinds, check_names
from tests.hf import runs


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **changes})


WRONG = {
    "a target beside good ones": (lora(target_modules=["q_proj", "v_porj"]), "'v_porj'", "v_proj"),
    "a target by another path": (lora(target_modules=["q_proj", "attn.k_proj"]), "'attn.k_proj'", "k_proj"),
    "a pattern": (lora(target_modules=r".*\.attention\.q_proj"), "is a pattern that matches no module", "q_proj"),
    "a module to save": (lora(modules_to_save=["lm_haed"]), "adapter.modules_to_save in a recipe", "lm_head"),
    "one of two modules to save": (lora(modules_to_save=["lm_head", "norms"]), "'norms'", "norm"),
    "an excluded module": (lora(exclude_modules=["mpl.up_proj"]), "exclude_modules", "up_proj"),
    "a rank": (lora(rank_pattern={"k_proj": 8}), "rank_pattern: 'k_proj'", "q_proj"),
    "an alpha": (lora(alpha_pattern={"layers.9.self_attn.q_proj": 8}), "alpha_pattern", "q_proj"),
    "a rank behind one of more modules": (
        lora(rank_pattern={"q_proj": 4, "layers.1.self_attn.q_proj": 8}),
        "rank_pattern: 'layers.1.self_attn.q_proj' stands behind 'q_proj'",
        "Write it before",
    ),
    "a rank of an excluded module": (
        lora(rank_pattern={"layers.0.self_attn.q_proj": 4}, exclude_modules=["layers.0.self_attn.q_proj"]),
        "rank_pattern",
        "v_proj",
    ),
    "an excluded container": (
        lora(target_modules="all-linear", exclude_modules=["mlp"]),
        "exclude_modules: 'mlp' excludes none of the targets",
        "such as model.layers.0.mlp.gate_proj",
        "exclude_modules='(.*[.])?mlp[.].*'",
    ),
    "an excluded layer": (
        lora(exclude_modules=["layers.0"]),
        "exclude_modules: 'layers.0' excludes none of the targets",
        "such as model.layers.0.self_attn.q_proj",
    ),
    "an excluded container by a pattern": (
        lora(exclude_modules=r".*\.self_attn"),
        "excludes none of the targets",
        "q_proj",
    ),
    "a target that is excluded whole": (
        lora(exclude_modules=["v_proj"]),
        "target_modules (adapter.targets in a recipe): 'v_proj' is excluded whole by exclude_modules",
    ),
    "a target outside the layers": (
        lora(target_modules=["q_proj", "embed_tokens"], layers_to_transform=[1, 2]),
        "'embed_tokens' is in none of the layers_to_transform",
    ),
    "a target in other layers": (
        lora(target_modules=["q_proj", "layers.0.self_attn.v_proj"], layers_to_transform=[1]),
        "'layers.0.self_attn.v_proj' is in none of the layers_to_transform",
    ),
    **{
        f"layers beside a pattern of {kind.__name__}": (
            kind(target_modules=r".*\.(q|v)_proj", layers_to_transform=[1]),
            "layers_to_transform is not read beside target_modules='.*\\\\.(q|v)_proj'",
        )
        for kind in (LoHaConfig, VeraConfig)
    },
    "a list of layers without layers": (
        C3AConfig(block_size=8, target_modules=["q_proj"], layers_pattern="layers"),
        "layers_pattern is read beside layers_to_transform only",
    ),
    "a rank of a layer that is left out": (
        lora(layers_to_transform=[0], rank_pattern={"layers.2.self_attn.q_proj": 4}),
        "rank_pattern: 'layers.2.self_attn.q_proj'",
        "q_proj",
    ),
    "a rank of a module that is trained whole": (
        lora(modules_to_save=["up_proj"], target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 4}),
        "target_modules: 'up_proj' is in modules_to_save, too",
        "Remove it from one of the two",
    ),
    "a rank of the head": (
        lora(target_modules="all-linear", rank_pattern={"lm_head": 4}),
        "rank_pattern: 'lm_head'",
        "q_proj",
    ),
    **{
        f"{field} of {kind.__name__}": (
            kind(target_modules=["q_proj"], **{field: {"q_porj": 4}}),
            f"{field}: 'q_porj'",
            "q_proj",
        )
        for kind, field in (
            (C3AConfig, "block_size_pattern"),
            (FourierFTConfig, "n_frequency_pattern"),
            (WaveFTConfig, "n_frequency_pattern"),
            (DeloraConfig, "lambda_pattern"),
            (DeloraConfig, "rank_pattern"),
            (OSFConfig, "rank_pattern"),
        )
    },
    "a layer": (lora(layers_to_transform=[0, 3]), "layers_to_transform: 3", "layers 0 to 2"),
    "a single layer": (lora(layers_to_transform=7), "layers_to_transform: 7", "layers 0 to 2"),
    "a list of layers": (lora(layers_to_transform=[0], layers_pattern="layer"), "layers_pattern: 'layer'", "layers"),
    "a parameter": (lora(target_parameters=["q_proj.weigth"]), "target_parameters: 'q_proj.weigth'", "weight"),
    "a pattern behind one as wide": (
        lora(rank_pattern={"q_proj": 8, "self_attn.q_proj": 2}),
        "rank_pattern: 'self_attn.q_proj' stands behind 'q_proj'",
        "Remove it",
    ),
    "a pattern behind several": (
        lora(target_modules=["q_proj", "k_proj"], rank_pattern={"q_proj": 8, "k_proj": 6, ".*attn.*": 2}),
        "rank_pattern: '.*attn.*' stands behind 'q_proj' and 'k_proj'",
        "Remove it",
    ),
    "a token": (lora(trainable_token_indices=[3, 97]), "97 is not a token", "rows 0 to 96"),
    "a token before the first": (
        lora(trainable_token_indices={"embed_tokens": [-1]}),
        "-1 is not a token",
        "rows 0 to 96",
    ),
    "a token that invokes": (lora(alora_invocation_tokens=[5, 97]), "alora_invocation_tokens: 97", "rows 0 to 96"),
    "a block-diagonal module": (
        lora(use_bdlora=BdLoraConfig(target_modules_bd_a=["q_porj"], match_strict=False)),
        "use_bdlora.target_modules_bd_a: 'q_porj'",
        "q_proj",
    ),
    "a token alone": (TrainableTokensConfig(token_indices=[97]), "token_indices: 97 is not a token", "rows 0 to 96"),
    "a token alone before the first": (
        TrainableTokensConfig(token_indices=[-1], target_modules=["embed_tokens"]),
        "-1 is not a token",
        "rows 0 to 96",
    ),
    "a text instead of a list": (
        lora(modules_to_save="lm_head"),
        "modules_to_save is the text 'lm_head'",
        "['lm_head']",
    ),
    "an embedding": (lora(trainable_token_indices={"embed_token": [1]}), "'embed_token'", "embed_tokens"),
    "IA3's feed-forward": (
        IA3Config(target_modules=["k_proj", "down_prj"], feedforward_modules=["down_prj"]),
        "'down_prj'",
        "down_proj",
    ),
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


BEFORE = ["a target beside good ones", "one of two modules to save", "a rank", "an alpha", "an excluded container"]
BEFORE += ["a target outside the layers", "layers beside a pattern of VeraConfig"]


@pytest.mark.parametrize("case", BEFORE)
def test_a_name_that_matches_nothing_stops_where_peft_was_called_by_the_user(case):
    config, *words = WRONG[case]
    model = get_peft_model(runs.llama(), config)
    with pytest.raises(ftkit.UserError) as refusal:
        ftkit.shard(model)
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


@pytest.mark.parametrize("adapter", [{"rank": 8}, "/nope"])
def test_what_is_no_configuration_of_an_adapter_stops(adapter, folder):
    with pytest.raises(ftkit.UserError, match=r"is not a configuration of PEFT: .*peft\.LoraConfig"):
        ftkit.load_model(folder, adapter=adapter)


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("bf16", torch.bfloat16), ("float16", torch.float16), ("bf15", None), (3, None)]
)
def test_a_dtype_by_its_name(dtype, wanted, folder):
    if wanted is None:
        with pytest.raises(ftkit.UserError, match=r"dtype is .*one of fp32, bf16, fp16 is needed"):
            ftkit.load_model(folder, dtype=dtype)
    else:
        assert ftkit.load_model(folder, dtype=dtype).config.dtype == wanted


GOOD = [
    TrainableTokensConfig(token_indices=[0, 96]),
    lora(target_modules="all-linear"),
    lora(target_modules=r".*\.(q|k)_proj"),
    lora(target_modules=["self_attn.q_proj", "model.layers.1.mlp.up_proj"], modules_to_save=["lm_head", "model.norm"]),
    lora(
        rank_pattern={"layers.1.self_attn.v_proj": 8, r".*2\.self_attn\.v_proj": 1},
        exclude_modules=["layers.0.self_attn.q_proj"],
    ),
    lora(target_modules="all-linear", exclude_modules=["q_proj", "lm_head"]),
    lora(target_modules="all-linear", exclude_modules=r".*\.mlp\..*"),
    lora(target_modules="all-linear", exclude_modules="(.*[.])?mlp[.].*"),
    lora(exclude_modules=["model.layers.0.self_attn.q_proj", "k_proj"]),
    LoHaConfig(target_modules="all-linear", layers_to_transform=[1, 2], r=2),
    lora(target_modules=None, exclude_modules=["v_proj"]),
    lora(layers_to_transform=[0, 2], layers_pattern="layers"),
    lora(layers_to_transform=[0, 2], rank_pattern={"layers.2.self_attn.q_proj": 4, r"0\.self_attn\.v_proj": 4}),
    lora(target_modules="all-linear", rank_pattern={"down_proj": 4}),
    FourierFTConfig(n_frequency=4, target_modules=["q_proj"], n_frequency_pattern={"q_proj": 8}),
    C3AConfig(block_size=8, target_modules=["q_proj"], block_size_pattern={"layers.1.self_attn.q_proj": 4}),
    OSFConfig(target_modules=["q_proj"], rank_pattern={"self_attn": 4}),
    lora(target_modules=[], target_parameters=["q_proj.weight"], rank_pattern={"q_proj.weight": 4}),
    lora(trainable_token_indices={"embed_tokens": [0, 96]}),
    IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
]


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_names_that_match_pass_before_and_after_peft(number):
    config = GOOD[number]
    base = runs.llama()
    check_names(base, config)
    model = get_peft_model(base, config)
    check_names(model.get_base_model(), model.peft_config["default"])


def test_modules_that_peft_adds_for_a_task_need_not_be_there():
    config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query"])
    ftkit.shard(get_peft_model(runs.classifier(), config))


# --- what a sharded PEFT model refuses


@pytest.mark.parametrize("name", ["merge_and_unload", "merge_adapter", "unmerge_adapter", "unload"])
def test_merging_a_sharded_model_says_the_way_out(name):
    model = get_peft_model(runs.llama(), lora(task_type="CAUSAL_LM"))
    ftkit.shard(model)
    for owner in (model, model.base_model):
        with pytest.raises(ftkit.UserError, match="--merge-adapter"):
            getattr(owner, name)()


def test_prefix_tuning_is_refused_for_its_true_reason():
    model = get_peft_model(runs.llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ftkit.UserError, match="prefix tuning trains through the key/value cache"):
        ftkit.shard(model)


# --- what has no value


def of_a_configuration() -> Any:
    return ftkit.load_model(None, config=runs.llama().config)


def in_place(model: Any) -> nn.Module:
    nn.init.zeros_(model.lm_head.weight)
    return model


def copied(model: Any) -> nn.Module:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.copy_(torch.ones(56, 32))
    return model


def made_on_meta(model: Any) -> nn.Module:
    model.lm_head = nn.Linear(32, 97, bias=False, device="meta")
    return model


def ia3(model: Any) -> nn.Module:
    return get_peft_model(model, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))


def dora(model: Any) -> nn.Module:
    return get_peft_model(model, lora(use_dora=True))


@pytest.mark.parametrize(
    "change, words",
    [
        (in_place, "lm_head.weight was written to while the model was on the meta device"),
        (copied, "layers.1.mlp.up_proj.weight was written to while the model was on the meta device"),
        (made_on_meta, "lm_head.weight is on the meta device and has no value"),
        (ia3, "ia3_l"),
        (dora, "lora"),
    ],
)
def test_a_change_that_the_meta_device_does_not_keep_is_refused_by_name(change, words):
    with pytest.raises(ftkit.UserError) as refusal:
        ftkit.shard(change(of_a_configuration()))
    assert words in str(refusal.value).lower(), str(refusal.value)


def test_a_parameter_on_meta_in_a_model_of_a_folder_is_refused_by_name(folder):
    with pytest.raises(ftkit.UserError, match=r"lm_head\.weight is on the meta device and has no value"):
        ftkit.shard(made_on_meta(ftkit.load_model(folder)))


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


@pytest.mark.parametrize("field", ["modules_to_save", "exclude_modules", "target_modules"])
@pytest.mark.parametrize("name", ["", "  "])
def test_a_blank_name_matches_nothing(field, name):
    """`endswith("")` is true of every module."""
    with pytest.raises(ftkit.UserError, match=rf"{field}.*'{name}' matches no module"):
        check_names(runs.llama(), lora(**{field: ["q_proj", name]}))


@pytest.mark.parametrize("add", ["add_adapter", "inject"])
def test_an_adapter_without_a_peft_model_is_checked(add):
    model, config = runs.llama(), lora(target_modules=["q_proj", "typo_proj"])
    model.add_adapter(config) if add == "add_adapter" else inject_adapter_in_model(config, model)
    with pytest.raises(ftkit.UserError, match="'typo_proj' matches no module"):
        ftkit.shard(model, {"stage": 1})


def test_a_pattern_of_fewer_modules_may_stand_first(folder):
    pattern = {"layers.1.self_attn.q_proj": 8, "q_proj": 4, ".*_proj": 6}
    model = ftkit.load_model(folder, adapter=lora(rank_pattern=pattern))
    ranks = {name.partition(".self_attn.")[2]: len(each) for name, each in model.named_parameters() if "layers.1" in name}
    assert [ranks[f"{name}.lora_A.default.weight"] for name in ("q_proj", "v_proj")] == [8, 6]


def test_x_lora_is_refused_by_name():
    with pytest.raises(ftkit.UserError, match="X-LoRA runs the model twice"):
        check_kinds(XLoraConfig(adapters={"a": "folder"}, hidden_size=32))
