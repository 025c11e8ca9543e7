"""`ftkit plan MODEL`, `ftkit init` and `ftkit eval`: commands that need no recipe of the user's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from ftkit.cli import app as cli
from ftkit.config.recipe import load
from ftkit.data.prepare import prepare
from ftkit.launch.ranks import Stop
from ftkit.train.generate import evaluation
from ftkit.train.starter import data_section, starter
from tests.tiny import make_base

LLAMA = "meta-llama/Llama-2-13b-hf"
TOKENS = 32


def leave(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_base(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = [{"prompt": f"{n} + {n}?", "completion": str(2 * n)} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return path


# --- plan


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_is_planned_as_its_packaged_recipe(lora: bool, capsys: pytest.CaptureFixture) -> None:
    method = "lora" if lora else "full"
    packaged = load(f"llama-2-13b-{method}-8xv100-16gb")
    made = starter(LLAMA, 8, "8xv100-16gb", lora=lora)
    kept = {"data": packaged.data, "output": made.output}
    assert made.model_dump() == packaged.model_copy(update=kept).model_dump() | {"data": made.data.model_dump()}
    assert (made.data.sequence_tokens, made.data.packing) == (packaged.data.sequence_tokens, packaged.data.packing)
    assert leave("plan", LLAMA, "--hardware", "8xv100-16gb", "--json", *(["--lora"] if lora else [])) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["epoch"] is None, "no data were named"
    assert (plan["model"]["trained"] == plan["model"]["parameters"]) == (not lora)


def test_models_that_cannot_be_packed_are_not(base: Path) -> None:
    assert not starter("facebook/opt-13b", 1).data.packing
    t5 = starter("google-t5/t5-11b", 1)
    assert (t5.task, t5.data.packing, t5.data.sequence_tokens) == ("seq2seq", False, 512)
    assert starter(str(base), 1).model.name == str(base)


def test_an_unknown_model_is_refused_with_similar_names(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert leave("plan", "Llama-2-13b") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert LLAMA in said
    assert "llama-2-13b-" in said
    assert leave("plan", "meta-llama/Llama-2-13b") == 2
    assert LLAMA in " ".join(capsys.readouterr().err.split())
    assert leave("plan", LLAMA, "--hardware", "8xv100-16gb", "--set", "train.seed=1") == 2
    assert "--set is for a RECIPE" in capsys.readouterr().err
    assert leave("plan", "tiny-cpu", "--lora") == 2


# --- init


def test_init_writes_a_recipe_that_fits(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "full.yaml"
    assert leave("init", LLAMA, rows, "--hardware", "8xv100-16gb", "-o", out) == 0
    text = out.read_text()
    assert "Planned, not measured" in text
    assert all(word in text for word in ("strategy: ", "device: ", "host: ", "tokens/s"))
    recipe = load(str(out))
    assert (recipe.adapter, recipe.ranks, recipe.hardware, recipe.data.path) == (None, 8, "8xv100-16gb", str(rows))
    before = out.read_bytes()
    capsys.readouterr()
    assert leave("init", LLAMA, rows, "--hardware", "8xv100-16gb", "-o", out) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert leave("init", LLAMA, rows, "--hardware", "1xv100-32gb", "-o", tmp_path / "one.yaml") == 0
    assert "full fine-tuning does not fit" in capsys.readouterr().err
    assert load(str(tmp_path / "one.yaml")).adapter is not None


def test_init_refuses_what_fits_nowhere_and_data_that_are_not_there(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("{gpus: 1, device_gib: 4, host_gib: 8, nvme_gib: 0, dtype: fp16}\n")
    assert leave("init", LLAMA, rows, "--hardware", small, "-o", tmp_path / "r.yaml") == 2
    assert "does not fit" in capsys.readouterr().err
    assert leave("init", LLAMA, tmp_path / "nowhere.jsonl", "--hardware", "8xv100-16gb", "-o", tmp_path / "r.yaml") == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "r.yaml").exists()


def test_what_init_writes_is_planned_and_run(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(base, tmp_path / "my model, #1: odd")
    shutil.copy(rows, tmp_path / "rows.jsonl")
    monkeypatch.chdir(tmp_path)
    assert leave("init", "my model, #1: odd", "rows.jsonl", "--nproc", 2, "--lora") == 0
    assert leave("plan", "recipe.yaml", "--nproc", 2) == 0
    shorter = ["--set", "data.sequence_tokens=32", "--set", "train.batch_tokens=128"]
    assert leave("finetune", "recipe.yaml", "--dry-run", "--nproc", 2, *shorter) == 0


# --- eval


def plain_loss(model: Any, folder: Path, rows: Path) -> tuple[float, int]:
    """Return the loss of all label tokens by a plain forward of transformers, row by row."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for row in prepare(data_section(str(rows), TOKENS), tokenizer).train:
        labels = torch.tensor([row["labels"]])
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss) * count
        tokens += count
    return total / tokens, tokens


@pytest.mark.parametrize("adapter", [False, True])
def test_eval_is_a_plain_forward_of_transformers(adapter: bool, base: Path, rows: Path, worlds: Any, tmp_path: Path) -> None:
    base_model: Any = AutoModelForCausalLM.from_pretrained(base)
    model, folder = AutoModelForCausalLM.from_pretrained(base), base
    if adapter:
        folder = tmp_path / "adapter"
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()
        model.save_pretrained(folder)
    loss, tokens = plain_loss(model, base, rows)
    alone = evaluation(Stop(), 1, str(folder), str(rows), TOKENS)
    assert alone.tokens == tokens
    assert alone.loss == pytest.approx(loss, rel=1e-5)
    assert (alone.loss == pytest.approx(plain_loss(base_model, base, rows)[0], rel=1e-5)) != adapter
    found = worlds[2].run(evaluation_of_a_rank, str(folder), str(rows))
    assert [each.tokens for each in found] == [tokens] * 2
    assert [each.loss for each in found] == pytest.approx([loss] * 2, rel=1e-5)


def evaluation_of_a_rank(folder: str, rows: str) -> Any:
    return evaluation(Stop(rank=torch.distributed.get_rank()), 2, folder, rows, TOKENS)


def test_learned_positions_bound_the_sequences(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    sizes = {"n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    rows = [{"prompt": "1 + 1?", "completion": "2 " * 60}, {"prompt": "too long " * 60, "completion": "no"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 0 < evaluation(Stop(), 1, str(tmp_path / "gpt2"), str(path), 2048).tokens < 24
    assert "rows.jsonl:2: loses its whole answer" in capsys.readouterr().err


def test_the_command_prints_json(base: Path, rows: Path, capsys: pytest.CaptureFixture) -> None:
    assert leave("eval", base, rows, "--json", "--nproc", 1, "--sequence-tokens", TOKENS) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"loss", "perplexity", "tokens"}
    assert leave("generate", base, "1+1?", "--max-new-tokens", 3, "--json", "--nproc", 1) == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt"] == "1+1?"
    assert leave("recipes", "list", "--json") == 0
    assert any(row["name"] == "tiny-cpu" for row in json.loads(capsys.readouterr().out))
    assert leave("data", "tiny-cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["report"]["samples"] > 0
    assert leave("eval", base, "nowhere.jsonl") == 2


def test_help_of_every_command(capsys: pytest.CaptureFixture) -> None:
    tree: Any = typer.main.get_command(cli.app)
    commands = [(name,) for name in tree.commands] + [("recipes", name) for name in tree.commands["recipes"].commands]
    assert len(commands) > 12
    for command in commands:
        assert leave(*command, "-h") == 0
        assert "Usage: ftkit" in capsys.readouterr().out
