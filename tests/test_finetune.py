"""The job of a rank: what a run leaves, that it resumes exactly on any number of ranks, and the other kinds of job."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.errors import UserError
from ftkit.finetune import decoder_inputs, run
from ftkit.generate import answers
from ftkit.held_out import HeldOut, row_statistics
from ftkit.recipe import parse
from ftkit.recipe_trainer import WholeSteps
from ftkit.run_folder import RunFolder
from ftkit.summary import _lines
from tests.tiny import make_base, make_tokenizer, write_rows

METRICS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "loss_scale",
    "peak_device_bytes",
    "peak_host_bytes",
}
SUMMARY = {
    "world_size",
    "steps",
    "seconds",
    "tokens",
    "tokens_per_second",
    "train_loss",
    "eval_loss_before",
    "eval_loss_after",
    "peaks_per_rank",
    "versions",
}


class Asked:
    """Asks to end at the given reading, which is made once a step."""

    rank = property(lambda self: int(os.environ["RANK"]))

    def leave(self, error):
        raise error

    def __init__(self, at: int | None):
        self.readings, self.at = 0, at

    @property
    def asked(self) -> bool:
        self.readings += 1
        return self.readings == self.at


def job(text, settings=(), checkpoint=None, end_at=None):
    """Be one rank of a run; the last rank alone is asked to end."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop = Asked(end_at if rank == ranks - 1 else None)
    return run(stop, parse(text, "recipe.yaml", list(settings)), checkpoint, ranks)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a base model, rows and held-out rows."""
    folder = tmp_path_factory.mktemp("finetune")
    make_base(folder / "base")
    write_rows(folder / "rows.jsonl", 50)
    write_rows(folder / "held.jsonl", 7, first=60)
    return folder


def recipe(home, out, **sections):
    """Return the text of a recipe: 8 steps of 6 sequences."""
    facts = {
        "model": {"name": str(home / "base")},
        "data": {"path": str(home / "rows.jsonl"), "sequence_tokens": 32, "cache_dir": str(home / "cache")},
        "eval": {"path": str(home / "held.jsonl"), "metrics": ["perplexity", "accuracy"], "every_steps": 5},
        "train": {"batch_tokens": 192, "max_steps": 10},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "output": {"dir": str(home / out), "save_every_steps": 4, "keep": 2},
        "engine": {"stage": 3},
    }
    return json.dumps({**facts, **sections})  # JSON is YAML


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lines(folder):
    return [record for record in records(folder) if "loss" in record]


def losses(folder):
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines(folder)]


@pytest.fixture(scope="module")
def whole(home, worlds):
    """A run from beginning to end on two ranks: its folder and what rank 0 returned."""
    (home / "whole").mkdir()
    show = {"prompts": ["3+1?"], "max_new_tokens": 4}
    return home / "whole", worlds[2].run(job, recipe(home, "whole", show=show))[0]


def test_a_run_leaves_its_folder(whole):
    folder, summary = whole
    names = {"checkpoint-8", "checkpoint-10", "eval_per_example.json", "metrics.jsonl", "model"}
    assert {path.name for path in folder.iterdir()} == {*names, "recipe.yaml", "summary.json"}
    told = lines(folder)
    assert [line["step"] for line in told] == list(range(1, 11))
    assert all(set(line) == METRICS for line in told)
    assert told[-1]["tokens"] == summary["tokens"]
    written = json.loads((folder / "summary.json").read_text())
    assert set(written) >= SUMMARY
    assert (written["world_size"], written["steps"], len(written["peaks_per_rank"])) == (2, 10, 2)
    assert written["tokens_per_second"] == pytest.approx(written["tokens"] / written["seconds"])
    assert written["train_loss"] == pytest.approx(np.mean([line["loss"] for line in told]))
    assert written["eval_loss_after"] < 0.8 * written["eval_loss_before"]
    assert [each["step"] for each in written["evaluations"]] == [0, 5, 10, 10]
    assert written["answers"][0]["question"] == "3+1?"
    held_out = [record for record in records(folder) if "loss" not in record]
    assert [record["step"] for record in held_out] == [0, 5, 10]
    assert set(held_out[0]) == {"step", "epoch", "eval_loss", "eval_perplexity", "eval_accuracy"}
    assert [record["eval_loss"] for record in held_out] == [each["loss"] for each in written["evaluations"][:3]]
    assert written["eval_after"]["perplexity"] == pytest.approx(np.exp(written["eval_loss_after"]))
    assert dict(_lines(written, RunFolder(folder)))["accuracy"].endswith("after")
    assert parse((folder / "recipe.yaml").read_text(), "recipe.yaml").train.max_steps == 10


def test_the_model_opens_with_from_pretrained_and_gives_the_loss_it_was_said_to(whole, home):
    folder, summary = whole
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    per_example = json.loads((folder / "eval_per_example.json").read_text())
    sums, counts = 0.0, 0
    for number, row in enumerate((home / "held.jsonl").read_text().splitlines()):
        pair = json.loads(row)
        turns = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["completion"]}]
        asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
        ids = tokenizer.apply_chat_template(turns)["input_ids"]
        labels = torch.tensor([[-100] * len(asked) + ids[len(asked) :]])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=labels).loss.item()
        assert per_example["after"][number] == pytest.approx(loss, rel=1e-4)
        assert per_example["tokens"][number] == (labels != -100).sum()
        sums += loss * per_example["tokens"][number]
        counts += per_example["tokens"][number]
    assert summary["eval_loss_after"] == pytest.approx(sums / counts, rel=1e-4)
    assert [asked for asked, _ in answers(str(folder / "model"), ["3+1?"], max_new_tokens=3)] == ["3+1?"]


@pytest.fixture(scope="module")
def ended(home, worlds):
    """A run that rank 1 was asked to end after step 6: its folder and what rank 0 returned."""
    (home / "ended").mkdir()
    return home / "ended", worlds[2].run(job, recipe(home, "ended"), (), None, 6)[0]


def test_a_run_that_was_asked_to_end_saves_and_says_so(whole, ended):
    folder, told = ended
    assert set(told) == {"stopped"}
    assert "step 6" in told["stopped"]
    assert [path.name for path in sorted(folder.glob("checkpoint-*"))] == ["checkpoint-4", "checkpoint-6"]
    assert not (folder / "model").exists()
    assert losses(folder) == losses(whole[0])[:6]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_resumes_exactly(whole, ended, home, worlds, ranks):
    folder = home / f"resumed-{ranks}"
    shutil.copytree(ended[0], folder)
    summary = worlds[ranks].run(job, recipe(home, folder.name), (), str(folder / "checkpoint-6"))[0]
    until_then = json.loads((ended[0] / "checkpoint-6" / "trainer_state.json").read_text())["num_input_tokens_seen"]
    assert 0 < until_then < summary["tokens"]
    assert summary["tokens_per_second"] * summary["seconds"] == pytest.approx(summary["tokens"] - until_then)
    expected = losses(whole[0])
    if ranks == 2:
        assert losses(folder) == expected
    for mine, other in zip(losses(folder), expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    for name in ("eval_loss_before", "eval_loss_after", "train_loss"):
        assert summary[name] == pytest.approx(whole[1][name], rel=1e-5)


@pytest.fixture(scope="module")
def ended_in_the_second_epoch(home, worlds):
    """A run that was asked to end after step 9, the first of epoch 1: its folder."""
    (home / "ended-later").mkdir()
    worlds[2].run(job, recipe(home, "ended-later"), (), None, 9)
    return home / "ended-later"


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_resumes_with_the_order_of_the_epoch_it_was_in(whole, ended_in_the_second_epoch, home, worlds, ranks):
    folder = home / f"resumed-later-{ranks}"
    shutil.copytree(ended_in_the_second_epoch, folder)
    worlds[ranks].run(job, recipe(home, folder.name), (), str(folder / "checkpoint-9"))
    for mine, other in zip(losses(folder), losses(whole[0]), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_an_adapter_is_left_as_an_adapter_folder(home, worlds):
    (home / "lora").mkdir()
    text = recipe(home, "lora", adapter={"rank": 4, "alpha": 8}, show={"path": str(home / "held.jsonl"), "count": 1})
    summary = worlds[2].run(job, text)[0]
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert (home / "lora" / "model" / "adapter_model.safetensors").is_file()
    assert not (home / "lora" / "model" / "model.safetensors").exists()
    ((_, answer),) = answers(str(home / "lora" / "model"), ["60+1?"], max_new_tokens=64)
    assert answer == summary_answer(home / "lora")


def summary_answer(folder):
    return json.loads((folder / "summary.json").read_text())["answers"][0]["after"]


def test_training_from_a_configuration_with_packing_and_a_share_held_out(home, worlds):
    config = json.loads((home / "base" / "config.json").read_text())
    text = recipe(
        home,
        "scratch",
        model={"config": config, "tokenizer": str(home / "base")},
        data={
            "sources": [{"path": str(home / "rows.jsonl"), "weight": 1}, {"path": str(home / "held.jsonl"), "weight": 2}],
            "sequence_tokens": 32,
            "packing": True,
            "cache_dir": str(home / "cache"),
        },
        eval={"share": 0.2},
    )
    (home / "scratch").mkdir()
    summary = worlds[2].run(job, text, ("train.max_steps=6", "train.neftune_noise_alpha=5"))[0]
    assert summary["eval_loss_after"] < summary["eval_loss_before"]


def test_an_encoder_decoder(home, worlds):
    tokenizer = make_tokenizer(home / "t5", template=None)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    config.save_pretrained(home / "t5")
    (home / "pairs").mkdir()
    model = {"config": str(home / "t5"), "tokenizer": str(home / "t5")}
    text = recipe(home, "pairs", task="seq2seq", model=model, show={"prompts": ["3+1?"], "max_new_tokens": 4})
    summary = worlds[2].run(job, text)[0]
    assert summary["eval_loss_after"] < summary["eval_loss_before"]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_label_smoothing_of_an_encoder_decoder(family, home, worlds):
    folder = home / f"smooth-{family}"
    tokenizer = make_tokenizer(folder, template=None)
    words = {"vocab_size": len(tokenizer), "d_model": 32, "decoder_start_token_id": 0, "pad_token_id": 0}
    if family == "t5":
        config = transformers.T5Config(d_kv=8, d_ff=64, num_layers=2, num_heads=4, **words)
    else:
        sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 64))}
        heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        config = transformers.BartConfig(**sizes, **heads, **words)
    config.save_pretrained(folder)
    model = {"config": str(folder), "tokenizer": str(folder)}
    summaries = []
    for smoothing in (0.0, 0.1):
        out = f"smooth-{family}-{smoothing}"
        (home / out).mkdir()
        train = {"batch_tokens": 192, "max_steps": 2, "label_smoothing": smoothing}
        summaries += worlds[2].run(job, recipe(home, out, task="seq2seq", model=model, train=train))[:1]
    plain, smooth = summaries
    # Held-out losses are of the bare labels: before training the decoder must have seen the same.
    assert smooth["eval_loss_before"] == pytest.approx(plain["eval_loss_before"], rel=1e-6)
    assert smooth["eval_loss_after"] < smooth["eval_loss_before"]
    assert smooth["train_loss"] != plain["train_loss"]


def test_label_smoothing_is_refused_where_the_model_cannot_make_its_decoders_input(home):
    text = recipe(home, "none", task="seq2seq", train={"batch_tokens": 192, "label_smoothing": 0.1})
    model = SimpleNamespace(config=SimpleNamespace(model_type="odd"))
    with pytest.raises(UserError, match=r"train\.label_smoothing: the model \(odd\)"):
        decoder_inputs(parse(text, "recipe.yaml"), model)


def test_bf16_and_fp16(home, worlds):
    for dtype in ("bf16", "fp16"):
        (home / dtype).mkdir()
        summary = worlds[2].run(job, recipe(home, dtype), (f"train.dtype={dtype}",))[0]
        assert summary["dtype"] == dtype
        assert summary["eval_loss_after"] < summary["eval_loss_before"]
        scales = {line["loss_scale"] for line in lines(home / dtype)}
        assert (scales == {None}) == (dtype == "bf16")


def test_row_statistics():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    labels[0, :3] = -100
    shifted = row_statistics(logits, labels, shifted=True)
    assert shifted[:, 1].tolist() == [2, 4]
    own = torch.nn.functional.cross_entropy(logits[0, 2:4], labels[0, 3:], reduction="sum")
    assert shifted[0, 0].item() == pytest.approx(own.item())
    assert row_statistics(logits, labels, shifted=False)[:, 1].tolist() == [2, 5]
    labels[0] = -100
    assert row_statistics(logits, labels, shifted=True)[0].tolist() == [0, 0, 0]


def test_held_out_metrics():
    noted = HeldOut(3, np.array([2.0, 6.0]), np.array([1, 3]), np.array([1, 1]))
    assert noted.loss == 2.0
    assert noted.metrics(("loss", "perplexity", "accuracy")) == {
        "token_loss": 2.0,
        "perplexity": pytest.approx(np.exp(2.0)),
        "accuracy": 0.5,
    }
    assert noted.summary()["row_loss_standard_error"] == 0.0


def test_whole_steps():
    class Order(list):
        def set_epoch(self, epoch):
            self.epoch = epoch

    steps = WholeSteps(Order(range(11)), 4)
    steps.set_epoch(2)
    assert (len(steps), list(steps), steps.order.epoch) == (8, list(range(8)), 2)
    with pytest.raises(UserError, match="3 sequences and one step takes 4"):
        WholeSteps(Order(range(3)), 4)


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_killed_rank_ends_the_command_which_then_resumes(tier, home, whole):
    """The real thing: the command, its processes, SIGKILL in mid-run, and --resume auto on another number of ranks.

    With the state on NVMe the rank dies while it writes behind; what it leaves there is removed by the next run.
    """
    folder, nvme = home / f"killed-{tier}", home / f"nvme-{tier}"
    nvme.mkdir()
    path = home / f"killed-{tier}.yaml"
    path.write_text(recipe(home, f"killed-{tier}"))
    command = [str(Path(sys.executable).with_name("ftkit")), "finetune", str(path)]
    # So many steps that the run cannot be over before it is killed; the schedule of the first ones stays the same.
    more = ["--nproc", "2", "--set", "train.max_steps=100000", "--set", "optimizer.schedule=constant"]
    kinds = [] if tier == "device" else ["parameters", "gradients", "state"]
    more += [word for kind in kinds for word in ("--set", f"engine.{kind}={tier}")]
    more += ["--set", f"memory.nvme_dir={nvme}"] * bool(kinds)
    process = subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True)
    ranks = []
    while not (folder / "checkpoint-4").exists():
        assert process.poll() is None, process.stderr.read()
        ranks = ranks_of(process.pid)
        time.sleep(0.05)
    killed = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1, told
    assert "rank 1" in told
    assert "SIGKILL" in told
    assert "Traceback" not in told
    assert "leaked" not in told
    last = int(sorted(folder.glob("checkpoint-*"), key=lambda each: int(each.name[11:]))[-1].name[11:])
    before = losses(folder)
    assert len(list(nvme.iterdir())) == (2 if kinds else 0)
    resumed = ["--nproc", "3", "--resume", "auto", "--set", f"train.max_steps={last + 4}"]
    done = subprocess.run([*command, *resumed, *more[4:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = losses(folder)
    assert [line[0] for line in after] == list(range(1, last + 5))
    for mine, other in zip(after, before):
        assert mine == pytest.approx(other, rel=1e-5)
    assert list(nvme.iterdir()) == []


def ranks_of(pid):
    """Return the process numbers of the ranks: the launcher starts them in order."""
    return sorted(each.pid for each in psutil.Process(pid).children() if "spawn_main" in " ".join(each.cmdline()))
