"""From a folder to shards and back: the forms and the defects of folders.

The reference is `from_pretrained`: a model that was built of mapped files and streamed in must be that model, tensor for
tensor and dtype for dtype, on any number of ranks. A folder that ftkit writes must open as the model it was written from.
Hostile and damaged folders are refused with an error that names file or tensor, before a weight is read.
"""

from __future__ import annotations

import copy
import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import ftkit
from ftkit.engine.checkpoint.safetensors import TensorFile, create_file
from ftkit.hf.adapters import adapter_parameters
from tests.hf import runs

KIB = 1 << 10


def gpt2() -> torch.nn.Module:
    """Return a small GPT-2: other names, transposed weights, a tied head."""
    torch.manual_seed(8)
    config = transformers.GPT2Config(
        vocab_size=runs.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> torch.nn.Module:
    """Return a small mixture of experts, whose experts transformers merges on load."""
    torch.manual_seed(9)
    widths = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(
        **widths, num_key_value_heads=2, vocab_size=runs.VOCABULARY, num_local_experts=4, pad_token_id=0
    )
    return transformers.MixtralForCausalLM(config)


def write(folder: Path, model: torch.nn.Module, **options: Any) -> Path:
    """Write a model's folder, as transformers does."""
    model.save_pretrained(folder, **options)
    return folder


def loaded(folder: str | None, options: dict[str, Any], settings: Any = "auto") -> tuple[dict[str, Tensor], Tensor]:
    """A case for a world: load a folder, shard it, and return the whole weights and logits."""
    torch.manual_seed(100 + runs.rank())  # ranks need not agree on random numbers
    model = ftkit.load_model(folder, **options)
    assert all(parameter.is_meta == (folder is None) for parameter in model.parameters())
    units = ftkit.shard(model, settings)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        logits = model(input_ids=ids, **arguments).logits
    return units.state_dict(), logits


def expected(folder: Path, kind: type = transformers.AutoModelForCausalLM) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights that from_pretrained finds, and the logits."""
    model = kind.from_pretrained(folder).eval()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        return model.state_dict(), model(input_ids=ids, **arguments).logits


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Compare tensor for tensor, dtype for dtype."""
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


# --- every form of a folder


@pytest.mark.quick(4)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_stored_dtypes_in_one_file_or_many(ranks, dtype, shard_size, worlds, tmp_path):
    folder = write(tmp_path, runs.llama().to(dtype), max_shard_size=shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard_size == "40KB")
    theirs, logits = expected(folder)
    for ours, own_logits in worlds[ranks].run(loaded, str(folder), {}, {"stage": 3}):
        assert_identical(ours, theirs)
        torch.testing.assert_close(own_logits, logits)


@pytest.mark.parametrize("make, stage", [(runs.tied_llama, 3), (gpt2, 1), (mixtral, 3)])
def test_tied_weights_and_other_families(make, stage, world2, tmp_path):
    folder = write(tmp_path, make())
    theirs, logits = expected(folder)
    for ours, own_logits in world2.run(loaded, str(folder), {}, {"stage": stage}):
        assert_identical(ours, theirs)
        torch.testing.assert_close(own_logits, logits)


def test_an_encoder_decoder(world2, tmp_path):
    folder = write(tmp_path, runs.t5())
    theirs, logits = expected(folder, transformers.AutoModelForSeq2SeqLM)
    ours, own_logits = world2.run(loaded, str(folder), {"task": "seq2seq"}, {"stage": 3})[1]
    assert_identical(ours, theirs)
    torch.testing.assert_close(own_logits, logits)


def test_a_dtype_that_is_asked_for(world2, tmp_path):
    folder = write(tmp_path, runs.llama().to(torch.bfloat16))
    theirs, _ = expected(folder)
    ours, _ = world2.run(loaded, str(folder), {"dtype": torch.float32})[0]
    assert_identical(ours, {name: tensor.float() for name, tensor in theirs.items()})


def test_a_configuration_beside_the_folder_replaces_its_own_and_not_its_weights(world2, tmp_path):
    folder = write(tmp_path, runs.llama())
    theirs, _ = expected(folder)
    config = transformers.LlamaConfig.from_pretrained(folder, rms_norm_eps=0.5)
    theirs_changed = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    with torch.no_grad():
        logits = theirs_changed(input_ids=torch.arange(3, 11)[None]).logits
    for given in (config, config.to_dict()):
        ours, own_logits = world2.run(loaded, str(folder), {"config": given}, {"stage": 3})[0]
        assert_identical(ours, theirs)
        torch.testing.assert_close(own_logits, logits)


def masters(folder: str | None, narrow: str) -> dict[str, Tensor]:
    """A case for a world: the fp32 master weights with which a 16-bit run begins."""
    torch.manual_seed(7)
    config = None if folder else runs.llama().config
    units = ftkit.shard(ftkit.load_model(folder, config=config, dtype=torch.float32), {"stage": 3, "dtype": narrow})
    optimizer = ftkit.ShardedAdamW(units)
    found = {}
    for flat in units.flats:
        full = flat.collect(optimizer.state_of(flat).master)
        found |= {s.name: full[s.start : s.stop].view(s.shape) for s in flat.layout.segments}
    return found


def test_masters_of_a_16_bit_run_begin_with_the_weights_as_they_are_stored(world2, tmp_path):
    model = runs.llama()
    folder = write(tmp_path / "model", model)
    for found in world2.run(masters, str(folder), "bf16"):
        assert_identical(found, dict(model.named_parameters()))


def test_masters_of_new_weights_are_not_rounded(world2):
    exact = world2.run(masters, None, "fp32")[0]
    assert_identical(world2.run(masters, None, "bf16")[0], exact)
    assert not torch.equal(exact["lm_head.weight"], exact["lm_head.weight"].bfloat16().float())


def test_the_base_models_own_folder_has_names_without_prefix_and_no_head(world2, tmp_path):
    folder = write(tmp_path, runs.llama().model)
    theirs, _ = expected(folder)
    (ours, _), (other, _) = world2.run(loaded, str(folder), {}, {"stage": 3})
    head, _ = ours.pop("lm_head.weight"), theirs.pop("lm_head.weight")
    assert_identical(ours, theirs)
    assert torch.equal(head, other["lm_head.weight"])
    assert head.std() == pytest.approx(0.15, rel=0.1)  # the model's own initializer_range


def test_what_is_too_much_is_ignored_and_what_is_missing_is_initialised(world2, tmp_path):
    folder = write(tmp_path, runs.llama())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    kept = dict(tensors)
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    tensors["a.stranger"] = torch.ones(3)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ours, _ = world2.run(loaded, str(folder), {}, {"stage": 3})[0]
    anew = ["lm_head.weight", "model.norm.weight"]
    assert torch.equal(ours[anew[1]], torch.ones(32))
    assert ours[anew[0]].std() == pytest.approx(0.15, rel=0.1)
    for name, tensor in kept.items():
        assert name in anew or torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("stage", [0, 3])
def test_from_a_configuration_alone_weights_do_not_depend_on_the_ranks(stage, worlds):
    config = runs.llama().config
    one = worlds[1].run(loaded, None, {"config": config.to_dict()}, {"stage": stage})[0][0]
    assert one["lm_head.weight"].std() == pytest.approx(0.15, rel=0.1)
    assert torch.equal(one["model.norm.weight"], torch.ones(32))
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"])
    for ranks in (2, 3):
        for weights, _ in worlds[ranks].run(loaded, None, {"config": config.to_dict()}, {"stage": stage}):
            assert_identical(weights, one)


FAMILIES = {
    "t5": (
        transformers.T5Config(
            vocab_size=400, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        "seq2seq",
    ),
    "t5-gated": (
        transformers.T5Config(
            vocab_size=400,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        ),
        "seq2seq",
    ),
    "gpt2": (transformers.GPT2Config(vocab_size=400, n_embd=64, n_layer=8, n_head=4, n_positions=32), "causal-lm"),
    "bert": (
        transformers.BertConfig(
            vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, is_decoder=True
        ),
        "causal-lm",
    ),
    "llama": (runs.llama().config, "causal-lm"),
    "llama-tied": (runs.tied_llama().config, "causal-lm"),
}


def from_scratch(config: dict[str, Any], task: str, settings: Any) -> dict[str, Tensor]:
    """A case for a world: a model from its configuration."""
    return ftkit.shard(ftkit.load_model(None, config=config, task=task), settings).state_dict()


@pytest.mark.quick(4)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_configuration_every_tensor_has_the_spread_that_transformers_gives_it(family, stage, world2):
    config, task = FAMILIES[family]
    kinds = {"seq2seq": transformers.AutoModelForSeq2SeqLM, "causal-lm": transformers.AutoModelForCausalLM}
    theirs = kinds[task].from_config(config).state_dict()
    ours = world2.run(from_scratch, config.to_dict(), task, {"stage": stage})[0]
    assert sorted(ours) == sorted(theirs)
    wrong = {}
    for name, tensor in theirs.items():
        spread, aim = (float(t.float().std(correction=0)) for t in (ours[name], tensor))
        if spread != pytest.approx(aim, rel=5 / tensor.numel() ** 0.5, abs=1e-9):  # five standard errors and more
            wrong[name] = (spread, aim)
        if aim == 0 and not torch.equal(ours[name], tensor):
            wrong[name] = "another constant"
        if tensor.dim() == 2 and not torch.equal((ours[name] == 0).all(1), (tensor == 0).all(1)):
            wrong[name] = "another row of zeros"  # of the padding token
    assert not wrong


def saved(folder: str, target: str, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """A case for a world: load a folder and write it to another."""
    units = ftkit.shard(ftkit.load_model(folder), {"stage": 3})
    ftkit.save_model(units, target, dtype=dtype, shard_bytes=shard_bytes)


@pytest.mark.parametrize("make, dtype, shard_bytes", [(runs.tied_llama, None, 5 * 10**9), (gpt2, torch.bfloat16, 30 * KIB)])
def test_a_saved_folder_opens_as_the_model_it_was_written_from(make, dtype, shard_bytes, world2, tmp_path):
    source = write(tmp_path / "source", make())
    world2.run(saved, str(source), str(tmp_path / "target"), dtype, shard_bytes)
    theirs, _ = expected(source)
    ours, _ = expected(tmp_path / "target")
    assert_identical(ours, {name: tensor.to(dtype or tensor.dtype) for name, tensor in theirs.items()})
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "target"))
    assert two == {**one, **({"dtype": "bfloat16"} if dtype else {})}
    stored = [name for path in (tmp_path / "target").glob("*.safetensors") for name in TensorFile(path).entries]
    assert len(stored) == len(set(stored)) == len(list(make().named_parameters()))  # tied weights once


def test_a_folder_may_be_written_over_itself(world2, tmp_path):
    folder = write(tmp_path, runs.llama())
    theirs, _ = expected(folder)
    theirs = {name: tensor.clone() for name, tensor in theirs.items()}
    own = ["model_ema.safetensors", "model.fp16.safetensors", "model-notes.safetensors.txt"]
    stale = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in own + stale:
        (folder / name).write_text("x")
    world2.run(saved, str(folder), str(folder), None, 5 * 10**9)
    assert_identical(expected(folder)[0], theirs)
    assert all((folder / name).exists() for name in own)
    assert not any((folder / name).exists() for name in stale)


def saved_by_one(folder: str, target: str) -> str:
    """A case for a world: write a folder on a drive that fails rank 1 alone; return what is told."""
    units = ftkit.shard(ftkit.load_model(folder), {"stage": 3})
    full = mock.patch.object(TensorFile, "write", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full if units.comm.rank else nullcontext(), pytest.raises(ftkit.UserError) as caught:
        ftkit.save_model(units, target)
    return str(caught.value)


def test_every_rank_learns_that_one_could_not_write(world2, tmp_path):
    source = write(tmp_path / "source", runs.llama())
    first, second = world2.run(saved_by_one, str(source), str(tmp_path / "target"))
    assert "No space left" in second
    assert first.startswith("rank 1: ")
    assert "No space left" in first
    assert not (tmp_path / "target" / "model.safetensors").exists()


# --- every way in which it can be broken


@pytest.fixture
def folder(tmp_path) -> Path:
    """A good folder of one file."""
    return write(tmp_path / "model", runs.llama())


def refuse(folder: Path | str | None, *words: str, **options: Any) -> None:
    """Assert that loading is refused with a UserError that has the words."""
    with pytest.raises(ftkit.UserError) as refusal:
        ftkit.shard(ftkit.load_model(folder, **options))
    for word in words:
        assert word in str(refusal.value), str(refusal.value)
    assert len(str(refusal.value)) < 900  # one screen


def test_pickles_are_refused_with_the_way_to_convert_them(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    refuse(folder, "no weights", ".bin", "can run code", "save_pretrained")


def test_folders_without_weights_or_configuration(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    refuse(folder, str(folder), "no weights; model.safetensors, or")
    (folder / "config.json").unlink()
    refuse(folder, str(folder), "no model configuration")
    refuse(tmp_path / "nowhere", "nowhere")
    refuse("somebody/something", "somebody/something")
    refuse(None, "a folder, a hub name or a config")
    refuse(None, "model_type is missing", config={"hidden_size": 32})
    refuse(folder, "task is 'chat'", task="chat")


def test_truncated_files(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 1000, 7, 0):
        path.write_bytes(whole[:size])
        refuse(folder, str(path), "cut short")


def test_wrong_shapes(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(57, 32)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refuse(folder, "model.layers.1.mlp.up_proj.weight is [57, 32]", "the model needs [56, 32]")


def test_generation_is_read_of_a_configuration_where_there_is_no_file_of_its_own(tmp_path):
    config = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50}
    write(tmp_path, transformers.BartForConditionalGeneration(transformers.BartConfig(**config, **heads)))
    (tmp_path / "generation_config.json").unlink()
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"forced_bos_token_id": 0, "num_beams": 3, "no_repeat_ngram_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(written))
    ours, stock = ftkit.load_model(tmp_path), transformers.BartForConditionalGeneration.from_pretrained(tmp_path)
    assert ours.generation_config.to_diff_dict() == stock.generation_config.to_diff_dict()
    assert ours.generation_config.num_beams == 3


def test_a_block_that_lacks_weights(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.layers.2.input_layernorm.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refuse(folder, "lacks model.layers.1.mlp.up_proj.weight and 1 more", "fetch it again")


def test_another_models_weights(folder):
    safetensors.torch.save_file({"a": torch.zeros(3)}, folder / "model.safetensors")
    refuse(folder, "lacks model.layers.0.", "belongs to another model")


@pytest.mark.parametrize(
    "index, words",
    [
        ({"weight_map": {"a": "../model.safetensors"}}, "outside its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside its folder"),
        ({"weight_map": {"a": "model-00009-of-00009.safetensors"}}, "model-00009-of-00009.safetensors"),
        ({}, "not a weight index"),
        ("{", "not a weight index"),
    ],
)
def test_bad_indices(index, words, folder):
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    shutil.move(folder / "model.safetensors", folder.parent)
    refuse(folder, "model.safetensors.index.json", words)


def test_a_file_of_all_weights_is_read_before_an_index(folder):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model-00001-of-00001.safetensors"
    others = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    safetensors.torch.save_file(others, folder / name, {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weight = ftkit.load_model(folder).model.embed_tokens.weight
    assert torch.equal(weight, transformers.LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight)


@pytest.mark.parametrize("has_model", [True, False])
def test_an_adapter_in_place_of_a_model_stops(has_model, folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    if not has_model:
        (folder / "config.json").unlink()
    refuse(folder, "contains an adapter", "PeftModel.from_pretrained", "--merge-adapter")


def header(*, length: int | None = None, text: str | bytes = "{}", data: int = 64) -> bytes:
    """Return a safetensors file with a header of one's own."""
    raw = text if isinstance(text, bytes) else text.encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data)


def entry(**changes: Any) -> str:
    """Return a header with one tensor of 16 fp32 numbers, changed."""
    return json.dumps({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **changes}})


@pytest.mark.parametrize(
    "content",
    [
        header(text=b"\xff\xfe\x00garbage"),
        header(text="[" * 100_000),
        header(length=2**63),
        header(length=200 << 20),
        header(text=entry(shape=[17])),
        header(text=entry(shape=[-16])),
        header(text=entry(data_offsets=[-64, 0])),
        header(text=entry(data_offsets=[64, 128])),
    ],
    ids=lambda content: str(content[:40]) if len(content) < 400 else str(len(content)),
)
def test_hostile_headers(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    refuse(folder, str(folder / "model.safetensors"))


def test_an_unknown_dtype_is_refused_where_it_is_wanted(folder):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    refuse(folder, "lm_head.weight", "dtype")


def test_code_in_a_folder_is_not_run(folder):
    (folder / "mine.py").write_text("raise SystemExit('it was run')\n")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": auto_map}))
    refuse(folder, str(folder), "trust_remote_code")


def test_quantised_models_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    refuse(folder, "quantised")


def test_a_model_on_meta_without_a_source_is_refused():
    with torch.device("meta"):
        model = runs.llama()
    with pytest.raises(ftkit.UserError, match="on the meta device and has no value"):
        ftkit.shard(model)


# --- memory


def load_and_measure(folder: str) -> dict[str, int]:
    """A case for a world: load, and return the peak of what this rank's tensors take, in bytes, and what it keeps."""
    settings = {"stage": 3, "activations": "recompute", "reshard_after_forward": True}
    read, chunks = 0, TensorFile.chunks

    def counted(file: TensorFile, start: int, size: int, itemsize: int) -> Iterator[Tensor]:
        nonlocal read
        read += size
        return chunks(file, start, size, itemsize)

    memory = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with memory as profile, mock.patch.object(TensorFile, "chunks", counted):
        units = ftkit.shard(ftkit.load_model(folder), settings)
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    mapped = (Path(folder) / "model.safetensors").stat().st_size  # PyTorch counts a mapped file as one allocation
    events = [each for each in events if abs(each.nbytes()) != mapped]
    return {
        "peak": max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))),
        "shard": units.state_bytes()["parameters"],
        "unit": max(sum(flat.layout.numel * flat.dtype.itemsize for flat in unit.weights.flats) for unit in units.units),
        "read": read,
    }


def test_no_rank_holds_more_than_its_shard(world2, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=512, intermediate_size=1408, num_hidden_layers=10, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    create_file(path, [(name, tuple(p.shape), torch.bfloat16) for name, p in model.named_parameters()])
    size, embedding = path.stat().st_size, 2 * config.vocab_size * config.hidden_size
    assert size >= 70e6
    for sizes in world2.run(load_and_measure, str(tmp_path)):
        most = 2 * sizes["unit"] + embedding + 5 * KIB**2  # beside the shards, which are in shared memory
        assert 2 * sizes["unit"] <= sizes["peak"] <= most, sizes
        assert sizes["shard"] <= 0.51 * size
        assert sizes["read"] <= 0.51 * size


CASTS: dict[str, Any] = {
    "half": (lambda model: model.half(), torch.float16),
    "to bf16": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "float": (lambda model: model.float(), torch.float32),
    "to cpu": (lambda model: model.to("cpu"), torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_before_sharding_is_kept(cast, tmp_path):
    change, dtype = CASTS[cast]
    folder = write(tmp_path, runs.llama().to(torch.bfloat16))
    theirs = change(transformers.AutoModelForCausalLM.from_pretrained(folder))
    units = ftkit.shard(change(ftkit.load_model(folder)), {"stage": 3, "affinity": False})
    assert set(units.dtypes.values()) == {dtype}
    assert_identical(units.state_dict(), theirs.state_dict())


def test_a_model_that_could_not_be_sharded_keeps_its_cast(tmp_path):
    model = ftkit.load_model(write(tmp_path, runs.llama().to(torch.bfloat16))).float()
    with pytest.raises(ftkit.UserError):
        ftkit.shard(model, {"stage": 3, "affinity": False, "device_gib": 1e-9, "host_gib": 1e-9})
    assert set(ftkit.shard(model, {"stage": 3, "affinity": False}).dtypes.values()) == {torch.float32}


# --- a base's files below trained adapters

LAYERS = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=2, init_lora_weights=False, modules_to_save=["lm_head"], **LAYERS),
    "dora": peft.LoraConfig(r=2, init_lora_weights=False, use_dora=True, **LAYERS),
    "ia3": peft.IA3Config(feedforward_modules=["down_proj"], init_ia3_weights=False, **LAYERS),
    "oft": peft.OFTConfig(oft_block_size=4, init_weights=False, **LAYERS),
    "loha": peft.LoHaConfig(r=2, init_weights=False, **LAYERS),
    "hra": peft.HRAConfig(r=2, init_weights=False, **LAYERS),
    "vblora": peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, **LAYERS),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def reloaded(folder: str, other: str, config: Any) -> tuple[dict[str, Tensor], ...]:
    """A case for a world: load the files of another base below an adapter with values; return all weights."""
    torch.manual_seed(3)
    model = peft.get_peft_model(ftkit.load_model(folder), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    units = ftkit.shard(model, {"stage": 3, "dtype": "fp32"})
    before = units.state_dict()
    ftkit.load_weights(units, [Path(other) / "model.safetensors"])
    return before, units.state_dict()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_files_of_a_base_leave_adapters_unchanged(kind, worlds, tmp_path):
    base = runs.llama()
    folder = write(tmp_path / "one", base)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(2)
    other = write(tmp_path / "two", base)
    for before, after in worlds[2].run(reloaded, str(folder), str(other), ADAPTERS[kind]):
        with torch.device("meta"):
            added = adapter_parameters(peft.get_peft_model(runs.llama(), copy.deepcopy(ADAPTERS[kind])), copies=True)
        assert added
        for name, value in before.items():
            assert torch.equal(after[name], value if name in added else 2 * value), name
        assert len(before) > len(added)
