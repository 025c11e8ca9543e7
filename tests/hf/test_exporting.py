"""`ftkit export`: a checkpoint becomes a folder that from_pretrained opens, with the weights of the checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.cli import app as cli
from ftkit.errors import UserError
from ftkit.hf.save.export import export_checkpoint


@pytest.fixture(scope="module")
def checkpoint(whole):
    """The last checkpoint of a run, after whose step nothing was trained."""
    return whole[0] / "checkpoint-10"


def test_the_last_checkpoint_is_the_model_of_the_run(checkpoint, whole, tmp_path):
    numel = export_checkpoint(checkpoint, tmp_path / "out")
    ours, runs = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out", whole[0] / "model"))
    assert numel == sum(parameter.numel() for parameter in runs.parameters())
    state = runs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {path.name for path in (whole[0] / "model").iterdir()} - {"training_args.bin"}


def test_small_files_have_an_index_and_another_dtype(checkpoint, tmp_path):
    export_checkpoint(checkpoint, tmp_path / "out", dtype="bf16", shard_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    whole_ = tmp_path / "whole"
    export_checkpoint(checkpoint, whole_, dtype="bf16")
    expected = load_file(whole_ / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items() if name in expected)


def test_the_command(checkpoint, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(checkpoint), "-o", str(tmp_path / "out"), "--dtype", "fp16", "--max-shard-size", "10MB"])
    assert not ended.value.code
    assert "parameters" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(checkpoint), "-o", str(tmp_path / "out"), "--dtype", "int8"])
    assert ended.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(checkpoint), "-o", str(tmp_path / "out"), "--max-shard-size", "large"])
    assert ended.value.code == 2
    assert "--max-shard-size: `size` large is not in a valid format" in capsys.readouterr().err


def test_what_cannot_be_exported_is_refused(checkpoint, tmp_path):
    export_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(UserError, match=r"out: holds \S+ already"):
        export_checkpoint(checkpoint, tmp_path / "out")
    for folder in (tmp_path / "nowhere", checkpoint.parent):
        with pytest.raises(UserError, match=r"contents\.json: No such file"):
            export_checkpoint(folder, tmp_path / "other")

    def spoiled(name):
        return shutil.copytree(checkpoint, tmp_path / name)

    config = spoiled("config")
    (config / "config.json").write_text((config / "config.json").read_text().replace("64", "65"))
    with pytest.raises(UserError, match=r"config\.json"):
        export_checkpoint(config, tmp_path / "other")
    weights = spoiled("weights")
    victim = sorted((weights / "ftkit").glob("*.weights.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(UserError, match=f"{victim}: bytes"):
        export_checkpoint(weights, tmp_path / "other")
    with pytest.raises(UserError, match="for this kind of AutoModel: AutoModelForSeq2SeqLM"):
        export_checkpoint(checkpoint, tmp_path / "other", task="seq2seq")
    assert not list((tmp_path / "other").iterdir()), "no half a model"
