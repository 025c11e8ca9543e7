"""Ranks behind this process: cells, a run, and errors. They are started once."""

import json
import os
import signal
from pathlib import Path

import pytest

from ftkit.errors import RankError, UserError
from ftkit.notebook import Ranks


@pytest.fixture(autouse=True)
def interruptible():
    """A job in the background of a script starts with interrupts ignored; a kernel never does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as started:
        yield started


def test_a_cell_runs_on_every_rank_and_its_names_stay(ranks, capfd):
    ranks.run("import torch, torch.distributed as dist\nx = torch.tensor([float(rank)])\nprint('I am', rank)")
    ranks.run("dist.all_reduce(x)\nfound = (x.item(), world_size, str(device))")
    assert ranks.view["found"] == [(1.0, 2, "cpu")] * 2
    out = capfd.readouterr().out
    assert "I am 0" in out
    assert "[stdout:1]" in out
    assert "I am 1" in out


def test_an_error_of_one_rank_is_shown_with_its_number_and_the_ranks_live_on(ranks, capfd):
    ranks.run("kept = 7")
    pids = ranks.pids
    with pytest.raises(RankError, match=r"^rank 1 raised ZeroDivisionError: division by zero$") as caught:
        ranks.run("if rank == 1:\n    1 / 0")
    assert caught.value.rank == 1
    assert "[1:execute]" in capfd.readouterr().err  # ipyparallel shows the traceback
    assert ranks.view["kept"] == [7, 7]
    assert ranks.pids == pids


def test_a_run_stays_on_the_ranks(ranks, recipe, capfd):
    """Trains, generates, evaluates and saves. A second run replaces the first one and continues it."""
    summary = ranks.finetune(recipe)
    assert (summary["steps"], summary["world_size"]) == (10, 2)
    assert "10 steps" in repr(summary)
    shown = capfd.readouterr()
    assert "step 10/10  loss" in shown.out + shown.err
    assert "\x1b" not in shown.out + shown.err
    assert json.loads(Path("run/report.json").read_text())["status"] == "finished"
    ranks.run("step = trainer.state.global_step")
    assert ranks.view["step"] == [10, 10]
    found = ranks.evaluate()
    assert found["loss"] == pytest.approx(summary["eval_loss_after"], rel=1e-4)
    assert found["tokens"] == summary["eval_after"]["tokens"]
    answers = ranks.generate(["3+1?", "12+1?", "7+1?"], max_new_tokens=4)
    assert len(answers) == 3
    assert ranks.generate("3+1?", max_new_tokens=4) == answers[:1]
    folder = ranks.save("saved")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    with pytest.raises(UserError, match="overwrite=True"):
        ranks.finetune(recipe)
    assert ranks.finetune(settings=["train.max_steps=12"], resume="auto")["steps"] == 12
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))


def test_a_refusal_of_the_ranks_is_one_message_and_an_error_has_a_traceback(ranks, recipe):
    small = {"config": {"model_type": "llama", "vocab_size": 8}, "tokenizer": recipe["model"]["name"]}
    with pytest.raises(UserError, match=r"^the tokenizer has .* tokens and the model embeddings for 8") as caught:
        ranks.finetune({**recipe, "model": small, "output": {"dir": "other"}})
    assert "Traceback" not in str(caught.value)
    ranks.finetune({**recipe, "train": {"batch_tokens": 192, "max_steps": 1}})
    story = r"(?s)^rank 0 \(pid \d+\) raised ValueError.*generation.*The ranks keep their state"
    with pytest.raises(RankError, match=story) as caught:
        ranks.generate("3+1?", no_such_option=1)
    assert caught.value._render_traceback_() == str(caught.value).splitlines()


def test_connection_files_are_private_and_nothing_listens_beyond_the_loopback(ranks):
    folder = Path(ranks._cluster.folder)
    files = [path for path in folder.rglob("*.json") if path.name.startswith("ipcontroller-")]
    assert len(files) == 2
    assert not folder.stat().st_mode & 0o077
    if not os.path.exists("/proc/net/tcp"):
        pytest.skip("reads Linux's list of sockets")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    inodes = {row[9]: row[1].split(":")[0] for row in rows if row[3] == "0A"}
    own = set()
    for pid in (os.getpid(), *ranks.pids.values(), ranks._cluster._controller.pid):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(handle) if handle.is_symlink() else ""
            if target.startswith("socket:[") and target[8:-1] in inodes:
                own.add(inodes[target[8:-1]])
    assert own
    assert own <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1


def test_overwrite_removes_nothing_if_no_ranks_run(recipe):
    kept = Path("run/checkpoint-4/kept")
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    with pytest.raises(UserError, match="the ranks do not run"):
        Ranks(2).finetune(recipe, overwrite=True)
    assert kept.exists()
