"""`ftkit export --merge-adapter`: one folder that gives what the adapter on its base gives."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.cli import app as cli
from ftkit.errors import UserError
from ftkit.hf.save.merge import merge_adapter
from tests.hf import runs
from tests.jobs import job, recipe

TOKENS = torch.arange(3, 9)[None]


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
    numel = merge_adapter(run / source, tmp_path / "out", shard_bytes=40_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
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
            cli.main(["export", str(run / "checkpoint-10"), "-o", str(tmp_path / "out"), *arguments])
        return ended.value.code, capsys.readouterr().err

    assert "--merge-adapter" in leave()[1]
    assert leave("--base", str(home / "base"))[0] == 2
    moved = shutil.copytree(home / "base", tmp_path / "moved")
    code, _ = leave("--merge-adapter", "--base", str(moved), "--dtype", "bf16", "--max-shard-size", "1MB")
    assert not code
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def trained(folder, base, config):
    """Save an adapter with random values, and return the logits of base + adapter."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(folder)
        return model(input_ids=TOKENS).logits


def assert_merged(tmp_path, config):
    """Merge an adapter of `config`; assert that the folder's logits are those of base + adapter. Return its config."""
    expected = trained(tmp_path / "adapter", tmp_path / "base", config)
    merge_adapter(tmp_path / "adapter", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    return merged.config


def test_gpt2_keeps_its_matrices_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    assert_merged(tmp_path, LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_rslora=True))


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        pytest.param({"use_dora": True}, True, id="DoRA"),
        pytest.param({"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}, True, id="both tied weights"),
        pytest.param({"trainable_token_indices": [3, 4]}, True, id="rows of a tied table"),
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, False, id="one of two tied weights"),
        pytest.param({"target_modules": ["q_proj", "embed_tokens"]}, False, id="the other of two tied weights"),
        pytest.param({"modules_to_save": ["lm_head"]}, False, id="a head trained whole"),
    ],
)
def test_an_adapter_on_a_tied_base_gives_the_logits_of_both(options, tied, tmp_path):
    runs.llama(num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    options = {"target_modules": ["q_proj"], **options}
    config = assert_merged(tmp_path, LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    stored = {name for name in load_file(tmp_path / "out" / "model.safetensors") if "embed" in name or "head" in name}
    assert config.tie_word_embeddings is tied
    assert len(stored) == (1 if tied else 2)


def test_one_tied_weight_of_t5_may_change(tmp_path):
    """Its configuration reads `tie_word_embeddings` in a way of its own."""
    runs.t5().save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, task_type="SEQ_2_SEQ_LM", target_modules=["lm_head"], init_lora_weights=False)
    model = get_peft_model(model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", task="seq2seq")
    merged = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        ours, theirs = (each(input_ids=TOKENS, decoder_input_ids=TOKENS).logits for each in (merged, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_a_sum_is_rounded_once(tmp_path):
    runs.llama(num_hidden_layers=1).bfloat16().save_pretrained(tmp_path / "base")
    trained(tmp_path / "adapter", tmp_path / "base", LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    for dtype in ("fp32", None):
        merge_adapter(tmp_path / "adapter", tmp_path / f"{dtype}", dtype=dtype)
    wide, own = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "None"))
    assert {tensor.dtype for tensor in own.values()} == {torch.bfloat16}
    assert all(torch.equal(wide[name].bfloat16(), tensor) for name, tensor in own.items())
    changed = wide["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(changed, changed.bfloat16().float())


def refused(adapter, out, match, **options):
    with pytest.raises(UserError, match=match):
        merge_adapter(adapter, out, **options)
    assert not out.exists() or not list(out.iterdir())


def test_what_cannot_be_merged_is_refused(run, home, tmp_path):
    out = tmp_path / "out"
    refused(home / "base", out, "needs adapter_config.json and adapter_model.safetensors")
    refused(run / "model", out, "nowhere: no model configuration", base=str(tmp_path / "nowhere"))
    pickled = shutil.copytree(run / "model", tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused(pickled, out, "needs adapter_config.json and adapter_model.safetensors")
    broken = shutil.copytree(run / "checkpoint-10", tmp_path / "broken")
    data = bytearray((broken / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "adapter_model.safetensors").write_bytes(data)
    refused(broken, out, r"adapter_model\.safetensors: changed since")


def test_an_adapter_of_another_base_or_kind_is_refused(tmp_path):
    out = tmp_path / "out"
    runs.llama(num_hidden_layers=2).save_pretrained(tmp_path / "base")
    runs.llama(num_hidden_layers=1).save_pretrained(tmp_path / "short")
    trained(tmp_path / "lora", tmp_path / "base", LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    refused(tmp_path / "lora", out, r"layers\.1.* is not in the base", base=str(tmp_path / "short"))
    trained(tmp_path / "prompt", tmp_path / "base", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    refused(tmp_path / "prompt", out, "prompt_embeddings is not in the base: .*prompts, which cannot be merged")
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    get_peft_model(classifier, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])).save_pretrained(tmp_path / "head")
    refused(tmp_path / "head", out, r"score\.weight is not in the base")


def test_a_merged_model_that_is_not_finite_is_not_written(tmp_path):
    runs.llama(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, lora_alpha=10**8, task_type="CAUSAL_LM", target_modules=["q_proj"])
    trained(tmp_path / "adapter", tmp_path / "base", config)
    refused(tmp_path / "adapter", tmp_path / "out", "q_proj.* holds an infinite value in float16", dtype="fp16")
