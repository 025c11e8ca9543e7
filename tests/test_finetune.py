"""The job of a rank: what a run leaves, that it resumes exactly on any number of ranks, and the other kinds of job."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.config.recipe import Show, parse
from ftkit.engine.checkpoint.pieces import PieceWriter
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError
from ftkit.hf.generate.evaluation import row_statistics
from ftkit.launch.ranks import Stop
from ftkit.output.run_folder import RunFolder
from ftkit.train.answers import questions
from ftkit.train.generate import answers
from ftkit.train.held_out import HeldOut
from ftkit.train.resume import first_whole
from ftkit.train.summary import _lines
from ftkit.train.trainer import WholeSteps
from tests.jobs import job, lines, losses, ranks_of, recipe, records, resumed_job
from tests.report.test_page import check
from tests.tiny import make_overflowing_base, make_tokenizer
from tests.worlds import PATIENCE, RankFailure

METRICS = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "tokens_per_second",
    "loss_scale",
    "divergences",
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


def test_a_run_leaves_its_folder(whole):
    folder, summary = whole
    names = {"checkpoint-8", "checkpoint-10", "eval_per_example.json", "metrics.jsonl", "model"}
    told = {"report.html", "report.json", "trace.json"}
    assert {path.name for path in folder.iterdir()} == {*names, *told, "recipe.yaml", "summary.json", ".lock"}
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
    assert written["answers"][0]["question"] == "3+1?"
    held_out = [record for record in records(folder) if "loss" not in record]
    assert [record["step"] for record in held_out] == [0, 5, 10]
    assert set(held_out[0]) == {"step", "epoch", "eval_loss", "eval_perplexity", "eval_accuracy"}
    assert (held_out[0]["eval_loss"], held_out[2]["eval_loss"]) == (written["eval_loss_before"], written["eval_loss_after"])
    assert written["eval_after"]["perplexity"] == pytest.approx(np.exp(written["eval_loss_after"]))
    assert dict(_lines(written, RunFolder(folder)))["accuracy"].endswith("after")
    assert parse((folder / "recipe.yaml").read_text(), "recipe.yaml").train.max_steps == 10


def test_a_run_that_is_over_is_left_as_it_is(whole, home, worlds):
    folder, summary = whole
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for again in worlds[2].run(job, (folder / "recipe.yaml").read_text(), (), str(folder / "checkpoint-10")):
        assert again == json.loads((folder / "summary.json").read_text())
        assert again["seconds"] == summary["seconds"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_that_is_continued_has_no_summary_until_its_end(whole, home, worlds):
    folder = home / "continued"
    shutil.copytree(whole[0], folder)
    text = (folder / "recipe.yaml").read_text().replace(str(whole[0]), str(folder))
    told = worlds[1].run(job, text, (), str(folder / "checkpoint-8"), 1)[0]
    assert "ended at step 9" in told["stopped"]
    assert not (folder / "summary.json").exists()


def test_a_run_leaves_its_report(whole, ended):
    page = (whole[0] / "report.html").read_text()
    check(page)
    for told in (">finished<", "10 <small>of 10", "Step 3 of rank 0, measured", "backward 0: ", "3+1?", "max_steps: 10"):
        assert told in page, told
    standing = json.loads((whole[0] / "report.json").read_text())
    assert (standing["status"], standing["steps"], standing["plan"]["ranks"]) == ("finished", 10, 2)
    early = (ended[0] / "report.html").read_text()
    assert "ended early</span>" in early
    assert "ended at step 6" in early


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
    assert len(answers(Stop(), 1, str(folder / "model"), ["3+1?"], {"max_new_tokens": 3})) == 1


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
    (answer,) = answers(Stop(), 1, str(home / "lora" / "model"), ["60+1?"], {"max_new_tokens": 64})
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


@pytest.mark.slow
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


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_bf16_and_fp16(dtype, home, worlds):
    (home / dtype).mkdir()
    summary = worlds[2].run(job, recipe(home, dtype), (f"train.dtype={dtype}",))[0]
    assert summary["dtype"] == dtype
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    scales = {line["loss_scale"] for line in lines(home / dtype)}
    assert (scales == {None}) == (dtype == "bf16")


@pytest.mark.parametrize(
    ("chosen", "moments"),
    [
        ({"name": "sgd", "args": {"momentum": 0.9, "nesterov": True}, "lr": 0.05}, {"momentum_buffer"}),
        ({"name": "ademamix", "args": {"t_alpha": 8, "alpha": 2.0}, "lr": 5e-4}, {"exp_avg", "exp_avg_slow", "exp_avg_sq"}),
        ({"name": "adagrad", "eps": 1e-9, "lr": 1e-2}, {"sum"}),
    ],
)
def test_an_optimizer_by_name_keeps_its_state(chosen, moments, home, worlds):
    name = chosen["name"]
    (home / name).mkdir()
    summary = worlds[2].run(job, recipe(home, name, optimizer={**chosen, "warmup_steps": 2}))[0]
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    files = {path.name.split(".")[-2] for path in (home / name / "checkpoint-8" / "ftkit").glob("*.safetensors")}
    assert files - {"weights", "master", "buffers"} == moments
    manifest = json.loads((home / name / "checkpoint-8" / "ftkit" / "manifest.json").read_text())
    group = manifest["optimizer"]["groups"][0]
    assert {key: group[key] for key in chosen.get("args", {})} == chosen.get("args", {})


def test_fp16_of_a_model_that_overflows(home, worlds):
    """The look comes before the first evaluation, and the summary names what is computed in fp32."""
    base = make_overflowing_base(home / "overflowing")
    summary = worlds[2].run(job, recipe(home, "overflows"), ("train.dtype=fp16", f"model.name={base}"))[0]
    assert summary["fp16"]["fp32_modules"] == dict.fromkeys(
        ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"), "projection"
    )
    assert "model.layers.0.mlp.down_proj (reached 5e+04)" in summary["fp16"]["text"]
    assert summary["eval_loss_after"] < summary["eval_loss_before"] < 10


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
    assert noted.summary()["loss"] == 2.0
    assert noted.metrics(("loss", "perplexity", "accuracy")) == {
        "token_loss": 2.0,
        "perplexity": pytest.approx(np.exp(2.0)),
        "accuracy": 0.5,
    }
    assert noted.row_losses.tolist() == [2.0, 2.0]


def test_whole_steps():
    steps = WholeSteps(range(11), 4)
    assert (len(steps), list(steps)) == (8, list(range(8)))
    with pytest.raises(UserError, match="3 sequences and one step takes 4"):
        WholeSteps(range(3), 4)


def test_sample_prompts(tmp_path):
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [
        {"messages": [*chat, {"role": "user", "content": "2+1?"}, {"role": "assistant", "content": "3"}]},
        {"messages": chat[1:]},  # an answer to nothing
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": chat},
        {"messages": chat},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("not JSON\n" + "".join(json.dumps(row) + "\n" for row in rows))
    first, second = questions(Show(path=str(path), count=2))
    assert [turn["content"] for turn in first.turns] == ["1+1?", "2", "2+1?"]
    assert (first.text, first.expected) == ("2+1?", "3")
    assert (second.text, second.expected) == ("1+1?", "2")
    path.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    (pair,) = questions(Show(path=str(path)))
    assert (pair.text, pair.expected, pair.separator) == ("1+1=", "2", "")
    path.write_text(json.dumps({"text": "1+1=2"}) + "\n")
    with pytest.raises(UserError, match=r"has no row with a question and an answer; write show\.prompts"):
        questions(Show(path=str(path)))
    assert [each.text for each in questions(Show(prompts=("a", "b")))] == ["a", "b"]


@contextmanager
def until_saved(command, checkpoint):
    """Start a command and wait for its checkpoint; yield the process and the file with its stderr."""
    errors = checkpoint.parent.with_suffix(".stderr")
    with errors.open("w") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + 120 * PATIENCE
        while not checkpoint.exists():
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, errors
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_killed_rank_ends_the_command_which_then_resumes(tier, home, whole):
    """Kill a rank of the command with SIGKILL, then resume with --resume auto on another number of ranks.

    With the state on NVMe the rank dies during deferred writes. The next run removes the files it left there.
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
    more += ["--set", f"memory.nvme_dir={nvme}", "--set", "engine.state_host_bytes=0"] * bool(kinds)
    with until_saved([*command, *more], folder / "checkpoint-4") as (process, errors):
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        process.wait(60 * PATIENCE)
    told = errors.read_text()
    assert process.returncode == 1, told
    assert "rank 1" in told
    assert "SIGKILL" in told
    assert "Traceback" not in told
    assert "leaked" not in told
    last = int(sorted(folder.glob("checkpoint-*"), key=lambda each: int(each.name[11:]))[-1].name[11:])
    before = losses(folder)
    assert len(list(nvme.iterdir())) == (2 if kinds else 0)
    resumed = ["--nproc", "3", "--resume", "auto", "--set", f"train.max_steps={last + 4}"]
    limit = 120 * PATIENCE
    done = subprocess.run([*command, *resumed, *more[4:]], capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stderr
    after = losses(folder)
    assert [line[0] for line in after] == list(range(1, last + 5))
    for mine, other in zip(after, before):
        assert mine == pytest.approx(other, rel=1e-5)
    assert list(nvme.iterdir()) == []


def test_resume_takes_the_newest_checkpoint_that_is_whole(home, whole, worlds):
    folder = home / "passed-over"
    shutil.copytree(whole[0], folder)
    victim = sorted((folder / "checkpoint-10" / "ftkit").glob("*.exp_avg.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    shutil.rmtree(folder / "model")
    found = [str(folder / name) for name in ("checkpoint-10", "checkpoint-8")]
    for path, said in worlds[2].run(chosen, found):
        assert path == found[1]
        assert f"passed over: {victim}: bytes" in said[0]
    worlds[2].run(resumed_job, recipe(home, "passed-over"), found)
    for mine, other in zip(losses(folder), losses(whole[0]), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert worlds[2].run(chosen, found)[0] == (found[0], []), "the broken one was written again"
    (folder / "checkpoint-8" / "trainer_state.json").write_text("{}")
    with pytest.raises(RankFailure, match=r"checkpoint-8/trainer_state\.json: 2 bytes, \d+ were written"):
        worlds[2].run(resumed_job, recipe(home, "passed-over"), [found[1]])


def chosen(checkpoints):
    said = []
    return first_whole(checkpoints, Communicator(torch.device("cpu")), said.append), said


def test_one_run_a_folder(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.lock(), pytest.raises(UserError, match="a run is active in"), second.lock():
        pass
    with second.lock():
        assert first.path.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "asked"])
def test_the_command_goes_on_by_itself_or_says_that_it_can(how, home):
    """A rank that dies is replaced with --max-restarts; SIGUSR1 (Slurm's warning) saves, and the exit code says so."""
    folder = home / f"restarted-{how}"
    path = home / f"restarted-{how}.yaml"
    path.write_text(recipe(home, f"restarted-{how}"))
    command = [str(Path(sys.executable).with_name("ftkit")), "finetune", str(path), "--nproc", "2", "--max-restarts", "1"]
    steps = 400 if how == "killed" else 100_000
    command += ["--set", f"train.max_steps={steps}", "--set", "optimizer.schedule=constant", "--set", "eval=null"]
    with until_saved([*command, "--set", "output.save_every_steps=20"], folder / "checkpoint-20") as (process, errors):
        if how == "killed":
            os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGUSR1)
        process.wait(240 * PATIENCE)
    told = errors.read_text()
    if how == "killed":
        assert process.returncode == 0, told
        assert "SIGKILL" in told
        assert "starting again, 0 restarts left" in told
        assert [line[0] for line in losses(folder)] == list(range(1, steps + 1))
    else:
        assert process.returncode == 75, told
        last = losses(folder)[-1][0]
        assert f"ended at step {last} with a checkpoint" in told
        assert (folder / f"checkpoint-{last}" / "contents.json").exists()


def full_disk_job(text):
    """Be a rank of a run whose disk is full in the middle of a save, once."""
    move = PieceWriter._transfer
    failed = []

    def transfer(handle, data, at):
        if "checkpoint-4" in os.readlink(f"/proc/self/fd/{handle}") and not failed and os.environ["RANK"] == "1":
            failed.append(at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        move(handle, data, at)

    with mock.patch.object(PieceWriter, "_transfer", staticmethod(transfer)):
        job(text)
    return failed


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(home, whole, worlds):
    folder = home / "full"
    folder.mkdir()
    _, failed = worlds[2].run(full_disk_job, recipe(home, folder.name))
    assert failed, "the save met the full disk"
    for mine, other in zip(losses(folder), losses(whole[0]), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert [path.name for path in sorted(folder.glob("*checkpoint*"))] == ["checkpoint-10", "checkpoint-8"]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"], "no debris"


class FailingDrive:
    """The NVMe folder of rank 1. After the first checkpoint it fails to write."""

    def __init__(self, nvme, checkpoint):
        self.nvme, self.checkpoint, self.pwritev = str(nvme), checkpoint, os.pwritev

    def write(self, handle, buffers, at):
        ours = os.readlink(f"/proc/self/fd/{handle}").startswith(self.nvme)
        if ours and os.environ["RANK"] == "1" and self.checkpoint.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.pwritev(handle, buffers, at)


def on_failing_drive(text, nvme, checkpoint):
    with mock.patch("os.pwritev", FailingDrive(nvme, checkpoint).write):
        return job(text)


def test_a_drive_that_fails_in_mid_run_loses_no_more_than_the_last_checkpoint(home, whole, worlds):
    folder, nvme = home / "drive", home / "nvme-drive"
    folder.mkdir()
    nvme.mkdir()
    kinds = dict.fromkeys(("parameters", "gradients", "state"), "nvme")
    engine = {"stage": 3, **kinds, "state_host_bytes": 0}
    text = recipe(home, folder.name, engine=engine, memory={"nvme_dir": str(nvme)})
    with pytest.raises(RankFailure, match=r"NVMe tier: cannot finish writing \S+: Input/output error"):
        worlds[2].run(on_failing_drive, text, nvme, folder / "checkpoint-4")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"], "nothing was saved of the broken step"
    assert not (folder / "model").exists()
    worlds[2].run(job, text, (), str(folder / "checkpoint-4"))
    for mine, other in zip(losses(folder), losses(whole[0]), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_the_last_checkpoints_and_the_best_are_kept(home, worlds):
    """The rate is so large that the held-out loss rises again."""
    (home / "best").mkdir()
    held_out = {"path": str(home / "held.jsonl"), "every_steps": 2}
    output = {"dir": str(home / "best"), "save_every_steps": 2, "keep": 1}
    text = recipe(home, "best", eval=held_out, output=output, optimizer={"lr": 3.0, "schedule": "constant"})
    summary = worlds[2].run(job, text)[0]
    losses_by_step = {record["step"]: record["eval_loss"] for record in records(home / "best") if "eval_loss" in record}
    best = min((step for step in losses_by_step if step), key=losses_by_step.__getitem__)
    assert best != 10
    assert summary["best"] == {"step": best, "metric": "loss", "value": losses_by_step[best]}
    assert {path.name for path in (home / "best").glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-10"}


def test_a_run_that_was_over_makes_no_step_more(home, whole, worlds):
    """Killed after its last checkpoint and before its end: stock would train another step."""
    folder = home / "over"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "model")
    worlds[2].run(resumed_job, recipe(home, "over"), [str(folder / "checkpoint-10")])
    assert losses(folder) == losses(whole[0])
    mine, other = (load_file(each / "model" / "model.safetensors") for each in (folder, whole[0]))
    assert all(torch.equal(mine[name], value) for name, value in other.items())
