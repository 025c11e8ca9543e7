"""Ranks behind this process: cells, runs, errors. They are started once; what costs them is among the slow tests."""

import json
import os
import sys
from pathlib import Path

import pytest

from ftkit.notebook import RankFailed, Ranks, Refused
from ftkit.notebook.ranks import Value


def short(error):
    """Return the text that a cell shows, which is all of it and no more than a screen."""
    assert "".join(error._render_traceback_()) == str(error).replace("\n", "")
    assert len(str(error).splitlines()) <= 12
    return str(error)


def test_a_cell_runs_on_every_rank_and_its_names_stay(ranks, capfd):
    ranks.run("import torch, torch.distributed as dist\nx = torch.tensor([float(rank)])\nprint('rank', rank)")
    assert ranks.run("dist.all_reduce(x)\n(x.item(), world_size, str(device))") == (1.0, 2, "cpu")
    value = ranks.run("x")
    assert isinstance(value, Value)
    assert repr(value) == "tensor([1.])"
    ranks.run("display({'a': 1})\nimport os\nos.system('echo from a program')")
    out = capfd.readouterr().out
    assert out.count("rank 0\n") == 1
    assert "rank 1" not in out
    assert "{'a': 1}" in out


def test_what_a_cell_defines_has_a_module(ranks):
    assert ranks.run("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A") is True


def test_ranks_are_fresh_processes_that_know_the_kernels_folders(ranks, tmp_path, monkeypatch):
    (tmp_path / "own_module_of_the_user.py").write_text("def f():\n    raise KeyError('k')\n")
    monkeypatch.chdir(tmp_path)
    pids = ranks.pids
    assert ranks.run("import os\n(os.getpid(), os.getcwd(), os.getppid())") == (pids[0], str(tmp_path), os.getpid())
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RankFailed) as caught:
        ranks.run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom own_module_of_the_user import f\nf()")
    told = short(caught.value)
    assert told.startswith("ranks 0 and 1 raised KeyError: 'k'\n")
    assert "own_module_of_the_user.py, line 2, in f: raise KeyError('k')" in told


def test_an_exception_of_one_rank_is_told_once_with_its_name_and_costs_nothing(ranks):
    ranks.run("kept = 7")
    pids = ranks.pids
    with pytest.raises(RankFailed) as caught:
        ranks.run("if rank == 1:\n    1 / 0\nkept", name="cell [5]")
    assert caught.value.rank == 1
    told = "rank 1 raised ZeroDivisionError: division by zero\n  cell [5], line 2, in <module>: 1 / 0"
    assert short(caught.value) == told
    assert ranks.run("kept") == 7
    assert ranks.pids == pids


def test_sys_exit_ends_a_cell_and_no_worker(ranks):
    with pytest.raises(RankFailed, match="ranks 0 and 1 raised SystemExit: 3"):
        ranks.run("import sys; sys.exit(3)")
    assert ranks.run("rank") == 0


def test_overwrite_removes_nothing_where_no_ranks_can_run(work):
    kept = Path("run/checkpoint-4/kept")
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    gone = Ranks(2)
    with pytest.raises(Refused, match="the ranks do not run"):
        gone.finetune(work, overwrite=True)
    assert kept.exists()
    assert repr(gone._checkpoints()) == "[]"


@pytest.mark.slow
def test_a_run_stays_on_the_ranks(ranks, work, capfd):
    """Trains, generates, evaluates, saves; a second run takes the place of the first, and goes on from it."""
    summary = ranks.finetune(work)
    assert (summary["steps"], summary["world_size"]) == (10, 2)
    assert "10 steps" in repr(summary)
    out = capfd.readouterr().out
    assert out.count("no Jupyter here") == 1
    assert "step 10/10  loss" in out
    assert "plan: " in out
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 10
    assert json.loads(Path("run/report.json").read_text())["status"] == "ended"
    assert ranks.run("(trainer.state.global_step, type(model).__name__, type(tokenizer).__name__[:12])")[0] == 10
    found = ranks.evaluate()
    assert found["loss"] == pytest.approx(summary["eval_loss_after"], rel=1e-4)
    assert found["tokens"] == summary["eval_after"]["tokens"]
    answers = ranks.generate(["3+1?", "12+1?", "7+1?"], max_new_tokens=4)
    assert len(answers) == 3
    assert ranks.generate("3+1?", max_new_tokens=4) == answers[:1]
    folder = ranks.save("saved")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    with pytest.raises(Refused, match="overwrite=True"):
        ranks.finetune(work)
    again = ranks.finetune(work, settings=["train.max_steps=12"], resume="auto")
    assert again["steps"] == 12
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    small = {"config": {"model_type": "llama", "vocab_size": 8}, "tokenizer": work["model"]["name"]}
    with pytest.raises(Refused, match="the tokenizer has 259 tokens and the model embeddings for 8"):
        ranks.finetune({**work, "model": small, "output": {"dir": "other"}})
    assert ranks.run("rank") == 0


@pytest.mark.slow
def test_this_process_opened_no_door(ranks):
    """Nothing that ranks and kernel made listens beyond the loopback."""
    if not os.path.exists("/proc/net/tcp"):
        pytest.skip("reads Linux's list of sockets")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    inodes = {row[9]: row[1].split(":")[0] for row in rows if row[3] == "0A"}
    own = {}
    for pid in (os.getpid(), *ranks.pids.values()):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(handle)
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                own[target] = inodes[target[8:-1]]
    assert own
    assert set(own.values()) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, as its bytes lie
    assert "torch" in sys.modules
