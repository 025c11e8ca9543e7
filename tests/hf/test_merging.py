"""`ftkit export --merge-adapter`: one folder that gives what the adapter on its base gives."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.cli import app as cli
from ftkit.errors import UserError
from ftkit.hf.weights.merging import merge_adapter
from tests.hf import runs
from tests.jobs import job, recipe


@pytest.fixture(scope="module")
def run(home, worlds):
    """The folder of a LoRA run that also trains the head."""
    (home / "lora").mkdir()
    adapter = {"rank": 4, "alpha": 16, "modules_to_save": ["lm_head"]}
    worlds[2].run(job, recipe(home, "lora", adapter=adapter, eval=None))
    return home / "lora"


def merged_by_peft(base, adapter):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()


@pytest.mark.parametrize("source", ["checkpoint-10", "model"])
def test_it_is_what_peft_merges(source, run, home, tmp_path):
    numel = merge_adapter(run / source, tmp_path / "out")
    ours, theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), merged_by_peft(home / "base", run / source)
    base = AutoModelForCausalLM.from_pretrained(home / "base").state_dict()
    assert numel == sum(parameter.numel() for parameter in theirs.parameters())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)
        changed = any(part in name for part in ("proj", "lm_head"))
        assert torch.equal(ours.state_dict()[name], base[name]) != changed, name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert not left & {"adapter_config.json", "adapter_model.safetensors", "contents.json", "training_args.bin"}


def test_the_command(run, home, tmp_path, capsys):
    def leave(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", str(run / "checkpoint-10"), str(tmp_path / "out"), *arguments])
        return ended.value.code, capsys.readouterr().err

    assert "--merge-adapter" in leave()[1]
    assert leave("--base", str(home / "base"))[0] == 2
    moved = shutil.copytree(home / "base", tmp_path / "moved")
    code, _ = leave("--merge-adapter", "--base", str(moved), "--dtype", "bf16", "--max-shard-gib", "0.001")
    assert not code
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_gpt2_keeps_its_matrices_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_rslora=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        merged_by_peft(tmp_path / "base", tmp_path / "adapter"),
    )
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_merged_is_refused(run, home, tmp_path):
    def adapter(name, change):
        copy = shutil.copytree(run / "model", tmp_path / name)
        tensors = load_file(copy / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, copy / "adapter_model.safetensors")
        return copy

    def refused(folder, match, **options):
        with pytest.raises(UserError, match=match):
            merge_adapter(folder, tmp_path / "out", **options)
        assert not list((tmp_path / "out").glob("*.safetensors")) if (tmp_path / "out").exists() else True

    refused(adapter("more", lambda tensors: tensors.update({"base_model.model.x.bias": torch.zeros(3)})), r"x\.bias cannot")

    def narrow(tensors):
        key = next(key for key in tensors if "lora_B" in key)
        tensors[key] = tensors[key][:-1].contiguous()

    refused(adapter("narrow", narrow), "another base")
    refused(tmp_path, "no adapter folder that PEFT can read")
    refused(run / "model", "nowhere: no model configuration", base=str(tmp_path / "nowhere"))
    broken = shutil.copytree(run / "checkpoint-10", tmp_path / "broken")
    data = bytearray((broken / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "adapter_model.safetensors").write_bytes(data)
    refused(broken, r"adapter_model\.safetensors: changed since")


def test_an_adapter_that_changes_one_of_two_tied_weights_is_refused(tmp_path):
    runs.llama(num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"changes lm_head\.weight, which the base ties"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
