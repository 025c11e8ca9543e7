"""The commands. An error of the user prints at most one screen, without a traceback, and exits with 2."""

import json
import math
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ftkit
from ftkit.cli import app as cli
from ftkit.cli import recipes
from ftkit.cli.options import echo_json
from ftkit.errors import UNEXPECTED
from ftkit.launch.ranks import ENDING
from ftkit.output.run_folder import RunFolder
from tests.tiny import make_base, make_tokenizer, write_rows
from tests.worlds import PATIENCE, free_port

SCREEN_LINES = 24
RECIPE = """\
model: {{name: {model}}}
data: {{path: {data}, sequence_tokens: 32, cache_dir: {cache}}}
train: {{batch_tokens: 128, max_steps: 2}}
output: {{dir: {out}}}
"""


def leave(*arguments):
    """Run a command in this process; returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code or 0


def refusal(capsys, *arguments):
    """Run a command that must be refused; returns what it said."""
    code = leave(*arguments)
    said = capsys.readouterr()
    text = said.out + said.err
    assert code == 2, text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= SCREEN_LINES
    return " ".join(text.split())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def places(tmp_path, base):
    """Return a function that writes a recipe for the small model and some rows, with changes."""
    rows = write_rows(tmp_path / "rows.jsonl", 8)

    def write(**changes):
        chosen = {"model": base, "data": rows, "cache": tmp_path / "cache", "out": tmp_path / "out"}
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE.format(**{**chosen, **changes}))
        return path

    return write


def test_recipes_are_listed_shown_and_copied(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert leave("recipes", "list") == 0
    assert "tiny-cpu" in capsys.readouterr().out
    assert leave("recipes", "show", "tiny-cpu") == 0
    shown = capsys.readouterr().out
    assert leave("recipes", "copy", "tiny-cpu") == 0
    assert (tmp_path / "tiny-cpu.yaml").read_text() == shown
    capsys.readouterr()
    assert "exists already" in refusal(capsys, "recipes", "copy", "tiny-cpu")
    assert "/proc/nothing: No such file" in refusal(capsys, "recipes", "copy", "tiny-cpu", "/proc/nothing/x.yaml")
    assert leave("recipes", "copy", "tiny-cpu", "new/folder/x.yaml") == 0
    assert (tmp_path / "new/folder/x.yaml").read_text() == shown


def test_the_version_and_the_public_names(capsys):
    assert leave("--version") == 0
    assert capsys.readouterr().out.strip() == f"ftkit {ftkit.__version__}"
    assert {"Trainer", "ShardedAdamW", "notebook"} <= set(dir(ftkit))


def test_json_has_null_for_numbers_that_are_not_finite(capsys):
    echo_json({"loss": math.nan, "perplexity": [math.inf, 1.5]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "perplexity": [None, 1.5]}


def test_the_command_imports_nothing_heavy():
    heavy = {"torch", "transformers", "datasets", "pynvml"}
    code = f"import sys; import ftkit.cli.app; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60 * PATIENCE)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "train.epoch=3"), "train.epoch: unknown key; here it is 'train.epochs'"),
        (("--set", "data.path=nowhere.jsonl"), "data.path: no such file or folder: nowhere.jsonl"),
        (("--set", "output.dir=/proc/nothing"), "output.dir: /proc/nothing cannot be written"),
        (("--resume", "/nowhere"), "--resume: no such checkpoint folder: /nowhere"),
        (("--frobnicate",), "No such option"),
    ],
)
def test_faults_of_the_recipe(capsys, places, arguments, words):
    assert words in refusal(capsys, "finetune", places(), *arguments)


def test_a_recipe_that_is_not_there(capsys):
    assert "no packaged recipe of that name" in refusal(capsys, "finetune", "nowhere.yaml")


def test_more_ranks_than_gpus(capsys, places, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = refusal(capsys, "finetune", places(), "--nproc", "3")
    assert "3 ranks were asked for and this node has 2 usable GPUs" in text


def test_an_old_run_is_not_overwritten(capsys, places, tmp_path):
    folder = RunFolder(tmp_path / "out")
    (folder.path / "checkpoint-7").mkdir(parents=True)
    assert "out is not a run of ftkit" in refusal(capsys, "finetune", places(), "--overwrite")
    folder.write_recipe("")
    assert "holds checkpoint-7 of an earlier run" in refusal(capsys, "finetune", places())
    assert "keep one" in refusal(capsys, "finetune", places(), "--overwrite", "--resume", "auto")
    (folder.path / "checkpoint-7").rmdir()
    folder.model.mkdir()
    folder.summary.touch()
    for resume in ((), ("--resume", "auto")):
        text = refusal(capsys, "finetune", places(), *resume)
        assert "holds summary.json and model of an earlier run; it has no checkpoint" in text
        assert "--overwrite" in text


def test_reports_are_written_and_compared(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert leave("report", "a") == 0
    assert leave("report", "a", "b") == 0
    assert leave("report", "a", "b", "--out", "new/c.html") == 0
    assert capsys.readouterr().out.splitlines() == ["a/report.html", "compare.html", "new/c.html"]
    assert all("<svg" in (tmp_path / name).read_text() for name in ("a/report.html", "compare.html", "new/c.html"))
    assert "nowhere has no recipe.yaml" in refusal(capsys, "report", "nowhere")
    assert "--out: b exists and is not an .html file" in refusal(capsys, "report", "a", "--out", "b")


def test_half_an_outer_job_is_refused(capsys, places, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "MASTER_ADDR and MASTER_PORT is not" in refusal(capsys, "finetune", places())


@pytest.fixture
def as_a_rank(monkeypatch):
    """Make this process the only rank of an outer job, so that a command's work is done in it."""
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_weights_that_do_not_fit(capsys, places, base, tmp_path, as_a_rank):
    short = tmp_path / "short"
    shutil.copytree(base, short)
    whole = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(whole[:-100])
    assert "model.safetensors" in refusal(capsys, "finetune", places(model=short))
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: torch.zeros(3, 32)}, short / "model.safetensors", metadata={"format": "pt"})
    text = refusal(capsys, "finetune", places(model=short))
    assert "shapes differ" in text
    assert f"{name} is [3, 32], the model needs [64, 32]" in text


def test_the_number_of_ranks_is_the_outer_jobs(capsys, places, as_a_rank):
    assert "--nproc starts ranks" in refusal(capsys, "finetune", places(), "--nproc", "2")


def test_dry_run(capsys, places):
    assert leave("finetune", places(), "--dry-run", "--nproc", "2") == 0
    said = capsys.readouterr().out
    assert "step: 128 tokens = 2 ranks x 2 sequences x 1 micro-batch x 32 tokens" in said
    assert "steps: 2 in all, 2 per epoch of 8 sequences" in said
    assert "parameters" in said


def test_what_a_user_should_know_before_the_first_step(capsys, places, base, tmp_path):
    changes = ["--set", "train.batch_tokens=96", "--set", "optimizer.warmup_steps=2"]
    assert leave("finetune", places(), "--dry-run", "--nproc", "1", *changes) == 0
    said = capsys.readouterr().out
    assert "2 of 8 sequences left over in each epoch: a step takes 3" in said
    assert "warning: optimizer.warmup_steps is 2 and the run has 2 steps" in said
    assert "no checkpoints will be saved (output.save_every_steps is not set)" in said
    assert "no chat template" not in said
    changes = ["--set", "optimizer={warmup_ratio: 0.9, groups: [{match: norm, weight_decay: 0.1}]}"]
    assert leave("finetune", places(), "--dry-run", "--nproc", "1", *changes) == 0
    said = capsys.readouterr().out
    assert "warning: optimizer.warmup_ratio is 0.9 and the run has 2 steps" in said
    assert "group 'norm': 5 tensors" in said
    make_tokenizer(tmp_path / "bare", template=None)
    quiet = [f"model.tokenizer={tmp_path / 'bare'}", "output.save_every_steps=1"]
    assert leave("finetune", places(), "--dry-run", "--nproc", "1", *(w for each in quiet for w in ("--set", each))) == 0
    said = capsys.readouterr().out
    assert "no chat template: questions and answers are plain text" in said
    assert "left over" not in said
    assert "warning" not in said
    assert "no checkpoints" not in said


def rows_of(path, *rows):
    path.write_text("".join(row + "\n" for row in rows))
    return path


def test_faults_of_the_data(capsys, places, tmp_path):
    good = '{"prompt": "1+1?", "completion": "2"}'
    empty = rows_of(tmp_path / "empty.jsonl")
    assert "empty.jsonl" in refusal(capsys, "finetune", places(data=empty), "--dry-run")
    without = rows_of(tmp_path / "without.jsonl", good, '{"prompt": "1+1?", "completion": ""}')
    assert "without.jsonl:2" in refusal(capsys, "finetune", places(data=without), "--dry-run")
    broken = rows_of(tmp_path / "broken.jsonl", good, "{")
    assert "broken.jsonl:2" in refusal(capsys, "finetune", places(data=broken), "--dry-run")
    few = rows_of(tmp_path / "few.jsonl", good)
    assert "1 sequence and one step takes 4" in refusal(capsys, "finetune", places(data=few), "--dry-run")


def test_faults_that_show_with_the_model(capsys, places, base, tmp_path):
    def refused(*settings):
        return refusal(capsys, "finetune", places(), "--dry-run", *(w for each in settings for w in ("--set", each)))

    assert "'no_such_module' matches no module of LlamaForCausalLM" in refused("adapter.targets=[no_such_module]")
    shutil.copytree(base, tmp_path / "other")
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path / "other")
    other.add_tokens([f"word{number}" for number in range(20)])
    other.save_pretrained(tmp_path / "other")
    words = refused(f"model.tokenizer={tmp_path / 'other'}")
    assert f"the tokenizer has {len(other)} tokens and the model embeddings for {len(other) - 20}" in words
    config = "{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 16, vocab_size: 300}"
    scratch = ["model.name=null", f"model.tokenizer={base}", f"model.config={config}"]
    assert "data.sequence_tokens is 32 and the model has 16 positions" in refused(*scratch)


def test_a_batch_that_cannot_be_divided(capsys, places):
    text = refusal(capsys, "finetune", places(), "--dry-run", "--nproc", "3")
    assert "a step has 4 sequences" in text
    assert "set train.batch_tokens to 96" in text


def test_folders_that_are_no_model(capsys, places, base, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no tokenizer could be loaded" in refusal(capsys, "finetune", places(model=bare), "--dry-run")
    shutil.copytree(base, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    text = refusal(capsys, "finetune", places(model=tmp_path / "weightless"), "--dry-run")
    assert "weightless: no weights" in text


def test_generate(capsys, base, tmp_path):
    assert leave("generate", base, "1+1?", "--max-new-tokens", "3") == 0
    capsys.readouterr()
    assert leave("generate", base, "1+1?", "2+2?", "--max-new-tokens", "3") == 0
    assert "> 2+2?" in capsys.readouterr().out
    assert "cannot be loaded" in refusal(capsys, "generate", tmp_path, "1+1?")
    assert "no such folder: runs/nowhere" in refusal(capsys, "generate", "runs/nowhere", "1+1?")
    shutil.copytree(base, tmp_path / "run" / "model")
    (tmp_path / "run" / "checkpoint-4").mkdir()
    (tmp_path / "run" / "checkpoint-4" / "contents.json").write_text("{}")
    assert "is a checkpoint, not a model; convert it with: ftkit export" in refusal(
        capsys, "generate", tmp_path / "run/checkpoint-4", "1+1?"
    )
    text = refusal(capsys, "generate", tmp_path / "run", "1+1?")
    assert f"did you mean {tmp_path / 'run' / 'model'}?" in text


def test_generate_with_an_adapter(capsys, base, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    model.save_pretrained(tmp_path / "adapter")
    assert leave("generate", tmp_path / "adapter", "1+1?", "--max-new-tokens", "3") == 0


def test_generate_runs_no_code_of_a_folder(capsys, base, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    shutil.copytree(base, tmp_path / "own")
    (tmp_path / "own" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    places = [
        ("config.json", {"auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}, "model_type": "mine"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mine.T", None]}, "tokenizer_class": "MineTokenizer"}),
    ]
    for name, changes in places:
        path = tmp_path / "own" / name
        whole = path.read_text()
        path.write_text(json.dumps({**json.loads(whole), **changes}))
        assert leave("generate", tmp_path / "own", "1+1?", "--max-new-tokens", "1") in (0, 2)
        assert "Traceback" not in capsys.readouterr().err
        path.write_text(whole)
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_an_unexpected_error_shows_its_traceback(capsys, monkeypatch):
    monkeypatch.setattr(recipes, "index", lambda: {}["missing"])
    assert leave("recipes", "list") == UNEXPECTED
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "KeyError: 'missing'" in said
    assert "this is an error in ftkit; please report it" in said
