"""What costs the ranks: kills, hangs, interrupts, the kernel's own death; and what is left then, which is nothing."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ftkit.notebook import Interrupted, RankFailed, Ranks
from tests import shared_memory
from tests.notebook.test_ranks import short

pytestmark = pytest.mark.slow

KERNEL = """
import os, sys, time
from ftkit.notebook import Ranks
ranks = Ranks(2).start()
print(*ranks.pids.values(), flush=True)
{then}
"""


def later(seconds, act, *arguments):
    """Do something while the ranks are asked."""
    timer = threading.Timer(seconds, act, arguments)
    timer.start()
    return timer


def interrupt_at(folder, step):
    """Press the stop button once a run has come to a step."""

    def wait():
        path = Path(folder) / "metrics.jsonl"
        while not path.exists() or f'"step": {step},' not in path.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def gone(pids, seconds=15.0):
    """Wait until processes are gone; return whether they are."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.1)
    return False


def test_an_interrupt_ends_a_run_after_a_step_and_it_goes_on(ranks, work):
    work = {**work, "train": {"batch_tokens": 192, "max_steps": 400}, "output": {"dir": "run"}}
    interrupt_at("run", 5)
    with pytest.raises(Interrupted) as caught:
        ranks.finetune(work)
    step = int(re.search(r"ended at step (\d+) with a checkpoint", short(caught.value)).group(1))
    assert 5 <= step < 400
    assert 'resume="auto" continues' in str(caught.value)
    assert ranks.run("trainer.state.global_step") == step
    assert len(ranks.generate(["3+1?"], max_new_tokens=2)) == 1
    assert ranks.finetune(settings=[f"train.max_steps={step + 3}"], resume="auto")["steps"] == step + 3


def test_an_interrupt_ends_the_users_code_and_the_ranks_live_on(ranks):
    ranks.run("kept = 3")
    later(1.0, os.kill, os.getpid(), signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        ranks.run("import time\nwhile True:\n    time.sleep(60)")
    assert time.monotonic() - began < 10
    assert "cell" in short(caught.value)
    assert "line 3" in str(caught.value)
    assert ranks.run("kept") == 3


def test_a_rank_that_waits_for_one_that_sleeps_is_told_and_not_ended(ranks, capfd):
    ranks.run("import time, torch.distributed as dist\nif rank == 1:\n    time.sleep(8)\ndist.barrier()")
    told = capfd.readouterr().out
    assert re.search(r"rank 0 has waited for \d s in barrier .*; rank 1 is at cell \d+, line 3: time.sleep", told)
    assert ranks.run("rank") == 0


def test_a_rank_that_waits_for_one_that_ended_is_named_with_its_place(ranks):
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks.run("import torch.distributed as dist\nif rank == 0:\n    dist.barrier()", name="cell [7]")
    assert time.monotonic() - began < 20
    told = short(caught.value)
    assert caught.value.rank == 0
    assert "in barrier, and no other rank will come: rank 1 has ended its cell" in told
    assert "cell [7], line 3, in <module>: dist.barrier()" in told
    assert "ranks.restart()" in told
    assert ranks.pids == {}


def test_a_rank_that_waits_for_one_that_raised_is_ended_and_the_cause_is_told(ranks):
    with pytest.raises(RankFailed) as caught:
        ranks.run("import torch.distributed as dist\nif rank == 1:\n    raise ValueError('mine')\ndist.barrier()")
    told = short(caught.value)
    assert caught.value.rank == 1
    assert told.startswith("rank 1 raised ValueError: mine\n")
    assert "rank 0 waited for it in barrier" in told


def test_a_killed_worker_is_told_at_once_and_restart_brings_the_checkpoint_back(ranks, work, capfd):
    work = {**work, "train": {"batch_tokens": 192, "max_steps": 400}}
    ranks.run("pass")
    victim = ranks.pids[1]

    def kill():
        while not Path("run/checkpoint-4").exists():
            time.sleep(0.02)
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RankFailed) as caught:
        ranks.finetune(work)
    told = short(caught.value)
    assert told.startswith(f"rank 1 (pid {victim}) was killed by SIGKILL")
    saved = re.search(r"ranks.restart\(\) starts them anew, from (checkpoint-(\d+)) of run", told)
    assert saved
    ranks.restart()
    step = int(saved.group(2))
    assert ranks.run("trainer.state.global_step") == step
    assert ranks.evaluate()["tokens"] > 0
    assert ranks.finetune(settings=[f"train.max_steps={step + 2}"], resume="auto")["steps"] == step + 2
    capfd.readouterr()
    os.kill(ranks.pids[0], signal.SIGKILL)  # nobody talks to it
    deadline = time.monotonic() + 5
    told = ""
    while "killed" not in told and time.monotonic() < deadline:
        time.sleep(0.05)
        told += capfd.readouterr().err
    assert re.search(r"rank 0 \(pid \d+\) was killed by SIGKILL; ranks.restart\(\)", told)


def test_a_worker_that_leaves_says_its_last_words(ranks):
    with pytest.raises(RankFailed) as caught:
        ranks.run("import os\nif rank == 1:\n    os.write(2, b'a C library: out of luck\\n')\n    os._exit(3)")
    told = short(caught.value)
    assert "rank 1" in told
    assert "ended with exit code 3" in told
    assert "a C library: out of luck" in told


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_workers_end_with_the_kernel_however_it_ends(how, tmp_path, tmp_path_factory):
    """Also where a child that it forked lives on and holds its sockets, and a worker is stopped."""
    then = "if os.fork() == 0: time.sleep(60)\ntime.sleep(600)" if how == "killed" else ""
    caches = str(tmp_path_factory.mktemp("caches"))  # torch's own, which it makes in TMPDIR unless it is told where
    environ = {**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": caches}
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL.format(then=then)], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ
    )
    before = shared_memory.names()
    pids = [int(pid) for pid in kernel.stdout.readline().split()]
    assert len(pids) == 2
    children = []
    if how == "killed":
        time.sleep(0.5)
        children = psutil.Process(kernel.pid).children()
        os.kill(pids[0], signal.SIGSTOP)
        kernel.kill()
    kernel.wait()
    try:
        assert gone(pids)
        assert not list(tmp_path.iterdir())
        assert not shared_memory.stays(before)
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        kernel.stdout.close()


def test_a_stopped_worker_is_named():
    with Ranks(1) as ranks:
        os.kill(ranks.pids[0], signal.SIGSTOP)
        with pytest.raises(RankFailed) as caught:
            ranks.run("1")
        assert re.search(r"rank 0 \(pid \d+\) has not answered for 1\d s: its process is stopped", short(caught.value))


def test_what_a_killed_worker_had_started_ends_with_the_ranks(ranks, capfd):
    program = ranks.run("import subprocess\nprogram = subprocess.Popen(['sleep', '100'])\nprogram.pid")
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailed, match="was killed by SIGKILL"):
        ranks.run("1")
    assert gone([program], 5)
