"""LoRA on the engine is LoRA under the stock Trainer: losses, norms, adapters, folders; only adapters carry state.

The reference is PEFT under transformers' Trainer in one process. An adapter folder that we write must be one that PEFT
opens, tensor for tensor and name for name; a model that was built on meta with an adapter must have an adapter that
changes nothing until it is trained.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import AdaLoraConfig, IA3Config, LoraConfig, OFTConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn

import ftkit
from tests.hf import runs
from tests.hf.runs import Run, assert_same_history, assert_same_weights, files_in, train
from tests.hf.test_loading import refuse
from tests.hf.test_trainer import BASE, changed

SHARDED = {"stage": 3}


def lora(**changes: Any) -> LoraConfig:
    """Return LoRA on all linear layers, without dropout."""
    fields = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**fields, **changes})


def adapted(**changes: Any) -> PeftModel:
    """Return the small Llama with LoRA, whose second factors are not zero, so that all of it has gradients."""
    base = runs.llama()
    torch.manual_seed(13)
    model = get_peft_model(base, lora(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def attention_only() -> PeftModel:
    """LoRA on two projections."""
    return adapted(target_modules=["q_proj", "v_proj"])


def with_head() -> PeftModel:
    """LoRA, and the head trained whole."""
    return adapted(modules_to_save=["lm_head"])


def with_embedding() -> PeftModel:
    """LoRA on the embedding too, which lies outside the blocks."""
    return adapted(target_modules=["embed_tokens", "up_proj"])


def prompted() -> PeftModel:
    """Prompt tuning: what trains is outside the base model altogether."""
    base = runs.llama()
    torch.manual_seed(14)
    return get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def scaled() -> PeftModel:
    """IA3: vectors that scale activations."""
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return get_peft_model(runs.llama(), config)


def adaptive() -> PeftModel:
    """AdaLoRA, which adds a penalty of its weights to the loss, once and not once a rank."""
    base = runs.llama()
    torch.manual_seed(15)
    fields = {"target_modules": ["q_proj", "down_proj"], "init_r": 4, "target_r": 2, "total_step": 10}
    return get_peft_model(base, AdaLoraConfig(task_type="CAUSAL_LM", **fields))


def decomposed() -> PeftModel:
    """DoRA: LoRA with a trained magnitude of each row."""
    return adapted(target_modules=["q_proj", "down_proj"], use_dora=True)


def orthogonal() -> PeftModel:
    """OFT: rotations of the inputs."""
    base = runs.llama()
    torch.manual_seed(16)
    fields = {"target_modules": ["q_proj", "v_proj"], "oft_block_size": 8, "use_cayley_neumann": False}
    return get_peft_model(base, OFTConfig(task_type="CAUSAL_LM", **fields))


def with_tied_head() -> PeftModel:
    """LoRA on a tied model, whose head is trained whole and apart from its embedding."""
    torch.manual_seed(17)
    return get_peft_model(runs.tied_llama(), lora(modules_to_save=["lm_head"]))


def state(trainer: Any) -> dict[str, Any]:
    """Return what carries gradients and state on this rank."""
    units, optimizer = trainer.units, trainer.sharded_optimizer
    trained = [flat for flat in units.flats if flat.trainable]
    return {
        "trained": sorted(segment.name for flat in trained for segment in flat.layout.segments),
        "frozen gradients": sum(flat in units.gradient_of for flat in units.flats if not flat.trainable),
        "lines": sorted(optimizer.states) == sorted(flat.name for flat in trained),
        "state bytes": optimizer.state_bytes(),
        "expected bytes": sum(2 * 4 * flat.layout.shard_numel for flat in trained),  # two moments; fp32 is its own master
        "counts": (trainer.get_num_trainable_parameters(), trainer.model.num_parameters()),
    }


def counts(trainer: Any) -> dict[str, Any]:
    """Return what the stock Trainer counts."""
    return {"counts": (trainer.get_num_trainable_parameters(), trainer.model.num_parameters())}


@pytest.mark.quick(4)
@pytest.mark.parametrize("ranks, settings", [(1, "auto"), (2, SHARDED), (3, {"stage": 2, "activations": "keep"})])
@pytest.mark.parametrize("make", [adapted, attention_only, with_head])
def test_lora_is_that_of_the_stock_trainer(make, ranks, settings, worlds, stock, tmp_path):
    run = replace(BASE, model=make)
    theirs = stock(replace(run, after=counts))
    ours = worlds[ranks].run(train, "ours", str(tmp_path), replace(run, ftkit=settings, after=state))
    for outcome in ours:
        assert_same_history(outcome, theirs)
        told = outcome.after
        model = make()
        assert told["trained"] == sorted(name for name, p in model.named_parameters() if p.requires_grad)
        assert told["frozen gradients"] == 0
        assert told["lines"]
        assert told["state bytes"] == told["expected bytes"]
        assert told["counts"] == theirs.after["counts"]
    assert_same_weights(ours[0].weights, theirs.weights)


@pytest.mark.quick(2)
@pytest.mark.parametrize("make", [with_embedding, prompted, adaptive, scaled, decomposed, orthogonal, with_tied_head])
def test_other_adapters(make, world2, stock, tmp_path):
    run = replace(BASE, model=make)
    ours = world2.run(train, "ours", str(tmp_path), replace(run, ftkit=SHARDED))[0]
    assert_same_history(ours, stock(run))
    expected = {name: tensor for name, tensor in stock(run).weights.items() if name != "word_embeddings.weight"}  # twice
    assert_same_weights(ours.weights, expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [adapted, decomposed, scaled, orthogonal, with_tied_head])
def test_ten_steps_of_two_ranks_are_those_of_one(make, world2, stock, tmp_path):
    run = replace(changed(BASE, num_train_epochs=4, max_steps=10), model=make)
    ours = world2.run(train, "ours", str(tmp_path), replace(run, ftkit=SHARDED))[0]
    assert len(ours.column("loss")) == 10
    assert_same_history(ours, stock(run))
    assert_same_weights(ours.weights, stock(run).weights)


@pytest.mark.slow
def test_gradient_checkpointing_as_peft_wants_it(world2, stock, tmp_path):
    run = replace(changed(BASE, gradient_checkpointing=True), model=adapted)
    ours = world2.run(train, "ours", str(tmp_path), replace(run, ftkit=SHARDED))[0]
    assert_same_history(ours, stock(replace(BASE, model=adapted)))


SAVING = changed(BASE, save_strategy="steps", save_steps=2, num_train_epochs=1)


def save(trainer: Any) -> None:
    """Save the adapter by hand too."""
    trainer.save_model(f"{trainer.args.output_dir}/model")


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [with_head, adapted, with_embedding])
def test_folders_are_pefts_own(make, world1, world2, tmp_path):
    run = replace(SAVING, model=make, after=save)
    world1.run(train, "stock", str(tmp_path / "stock"), run)
    ours = world2.run(train, "ours", str(tmp_path / "ours"), replace(run, ftkit=SHARDED))[0]
    for name in ("model", "checkpoint-2", "checkpoint-3"):
        mine, theirs = tmp_path / "ours" / name, tmp_path / "stock" / name
        one, two = (safetensors.torch.load_file(folder / "adapter_model.safetensors") for folder in (mine, theirs))
        assert_same_weights(one, two)
        assert {key: value.dtype for key, value in one.items()} == {key: value.dtype for key, value in two.items()}
        configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (mine, theirs)]
        for config in configs:
            config["target_modules"] = sorted(config["target_modules"])
        assert configs[0] == configs[1]
        apart = ("ftkit/", "rng_state", "contents.json")
        lists = [{f for f in files_in(folder) if not f.startswith(apart)} for folder in (mine, theirs)]
        assert lists[0] == lists[1] - {"optimizer.pt"}
        opened = PeftModel.from_pretrained(runs.llama(), mine)
        if name != "checkpoint-2":
            assert_same_weights(opened.state_dict(), ours.weights, limit=0)
    held = sum(path.stat().st_size for path in (tmp_path / "ours" / "checkpoint-3" / "ftkit").iterdir())
    assert held < 5 * 4 * sum(p.numel() for p in make().parameters() if p.requires_grad) + 64 * 1024  # no base in it


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks, settings", [(1, "auto"), (3, {"stage": 1})])
def test_resuming_an_adapter(ranks, settings, worlds, stock, tmp_path):
    run = replace(changed(SAVING, num_train_epochs=2), model=with_head)
    worlds[2].run(train, "ours", str(tmp_path / "whole"), replace(run, ftkit=SHARDED))
    resumed = replace(run, resume=str(tmp_path / "whole" / "checkpoint-2"), ftkit=settings)
    ours = worlds[ranks].run(train, "ours", str(tmp_path / "again"), resumed)[0]
    theirs = stock(replace(BASE, model=with_head))
    assert_same_history(ours, theirs, leave_out=["train_loss"])
    assert_same_weights(ours.weights, theirs.weights)


@pytest.mark.quick(1)
@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("flags", [{}, {"bf16": True}])
def test_the_best_adapter_is_loaded(only_model, flags, world2, stock, tmp_path):
    run = changed(
        BASE,
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        greater_is_better=True,
        metric_for_best_model="eval_loss",
        save_only_model=only_model,
    )
    run = replace(run, model=with_head, after=save)
    theirs = stock(run)
    ours = world2.run(train, "ours", str(tmp_path), replace(changed(run, **flags), ftkit=SHARDED))[0]
    if not flags:
        assert_same_weights(ours.weights, theirs.weights)
    best = tmp_path / next(path.name for path in tmp_path.glob("checkpoint-*") if path.name != "checkpoint-6")
    one, two = (safetensors.torch.load_file(folder / "adapter_model.safetensors") for folder in (best, tmp_path / "model"))
    assert_same_weights(two, one, limit=0)  # what is saved at the end is the best, to the last bit of its fp32


# --- adapters on models that no rank has whole


def loaded(folder: str, config: LoraConfig, seed: int) -> tuple[dict[str, torch.Tensor], list[str], torch.Tensor]:
    """A case for a world: a folder streamed in under a new adapter."""
    torch.manual_seed(seed + runs.rank())
    model = ftkit.load_model(folder, adapter=config)
    units = ftkit.shard(model, SHARDED)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 11)[None]).logits
    return units.state_dict(), model._ftkit_source.report.initialised, logits


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [lora(), lora(init_lora_weights="gaussian", modules_to_save=["lm_head"])])
def test_a_new_adapter_on_a_streamed_model(config, worlds, tmp_path):
    base = runs.llama().eval()
    base.save_pretrained(tmp_path)
    (weights, anew, logits), (other, *_) = worlds[2].run(loaded, str(tmp_path), config, 1)
    assert anew == []
    expected = get_peft_model(runs.llama(), config).state_dict()
    assert sorted(weights) == sorted(expected)
    for name, tensor in weights.items():
        assert torch.equal(tensor, other[name]), name
        assert tensor.dtype == expected[name].dtype
        if "lora_B" in name:
            assert not tensor.any(), name
        elif "lora_A" in name:
            assert float(tensor.std()) == pytest.approx(float(expected[name].std()), rel=0.5), name
        else:
            assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        torch.testing.assert_close(logits, base(input_ids=torch.arange(3, 11)[None]).logits)
    again = worlds[3].run(loaded, str(tmp_path), config, 1)[0][0]
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    different = worlds[2].run(loaded, str(tmp_path), config, 7)[0][0]
    assert not all(torch.equal(tensor, different[name]) for name, tensor in weights.items())


def streamed() -> nn.Module:
    """Return the Llama of a folder in the working directory, on meta, with an adapter."""
    return ftkit.load_model("base", adapter=lora(modules_to_save=["lm_head"]))


def test_training_a_streamed_model_with_an_adapter(world2, tmp_path, monkeypatch):
    runs.llama().save_pretrained(tmp_path / "base")
    run = replace(BASE, model=streamed, ftkit=SHARDED, after=save)
    ours = world2.run(train_in, str(tmp_path), run)[0]
    assert ours.column("loss")[-1] < ours.column("loss")[0]
    opened = PeftModel.from_pretrained(runs.llama(), tmp_path / "run" / "model")
    assert_same_weights(opened.state_dict(), ours.weights, limit=0)
    assert opened.peft_config["default"].base_model_name_or_path == "base"


def train_in(folder: str, run: Run) -> runs.Outcome:
    """A case for a world: `train` with `folder` as the working folder."""
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        return train("ours", f"{folder}/run", run)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "config",
    [
        lora(init_lora_weights="pissa"),
        lora(use_dora=True),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=lambda config: f"{config.peft_type.value}-{getattr(config, 'init_lora_weights', '')}",
)
def test_adapters_that_begin_from_the_bases_weights_are_refused_on_meta(config):
    base = runs.llama().config
    refuse(None, "initialised from the base's weights", "from_config()", config=base, adapter=config)


def test_auto_model_class_of_the_base_is_kept():
    assert isinstance(adapted().get_base_model(), transformers.LlamaForCausalLM)


def test_weights_trained_beside_an_adapter_are_named_when_it_is_saved(tmp_path, caplog):
    model = adapted()
    for name, parameter in model.named_parameters():
        if name.endswith("model.norm.weight"):
            parameter.requires_grad_(True)
    units = ftkit.shard(model, {"stage": 3})
    ftkit.save_model(units, tmp_path / "a")
    assert "trained beside the adapter, and not in its folder: base_model.model.model.norm.weight" in caplog.text
    caplog.clear()
    ftkit.save_model(ftkit.shard(adapted(), {"stage": 3}), tmp_path / "b")
    assert "beside the adapter" not in caplog.text
