"""What costs the ranks: kills, interrupts, the kernel's own death; and what is left then, which is nothing."""

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

from ftkit.notebook import Interrupted, RankFailed
from tests.notebook.test_ranks import short
from tests.worlds import PATIENCE

pytestmark = pytest.mark.slow

KERNEL = """
import os, sys, time
from ftkit.notebook import Ranks
ranks = Ranks(2).start()
print(*ranks.pids.values(), flush=True)
{then}
"""


def when(condition, act):
    """Do something in another thread once a condition holds."""

    def wait():
        deadline = time.monotonic() + 60 * PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                return  # the test fails: nothing happened
            time.sleep(0.02)
        act()

    threading.Thread(target=wait, daemon=True).start()


def press():
    """Interrupt the kernel as its stop button does: the handler alone is called, pytest gets no signal."""
    signal.getsignal(signal.SIGINT)(signal.SIGINT, None)


def has_come_to(step):
    path = Path("run/metrics.jsonl")
    return path.exists() and f'"step": {step},' in path.read_text()


def gone(pids):
    """Wait until processes are gone; return whether they are."""
    deadline = time.monotonic() + 30 * PATIENCE
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.1)
    return False


def test_an_interrupt_ends_a_run_after_a_step_and_it_goes_on(ranks, work):
    work = {**work, "train": {"batch_tokens": 192, "max_steps": 400}, "output": {"dir": "run"}}
    when(lambda: has_come_to(5), press)
    with pytest.raises(Interrupted) as caught:
        ranks.finetune(work)
    step = int(re.search(r"ended at step (\d+) with a checkpoint", short(caught.value)).group(1))
    assert 5 <= step < 400
    assert 'resume="auto" continues' in str(caught.value)
    assert ranks.run("trainer.state.global_step") == step
    assert len(ranks.generate(["3+1?"], max_new_tokens=2)) == 1
    assert ranks.finetune(settings=[f"train.max_steps={step + 3}"], resume="auto")["steps"] == step + 3


def test_an_interrupt_ends_the_users_code_and_the_ranks_live_on(ranks, tmp_path):
    ranks.run("import time, pathlib\nkept = 3")
    begun = tmp_path / "begun"
    when(begun.exists, press)
    with pytest.raises(Interrupted) as caught:
        ranks.run(f"pathlib.Path({str(begun)!r}).touch()\nwhile True:\n    time.sleep(60)")
    assert re.search(r"cell \d+, line [123]", short(caught.value))
    assert ranks.run("kept") == 3


def test_a_killed_worker_is_told_at_once_and_restart_brings_the_checkpoint_back(ranks, work, capfd):
    work = {**work, "train": {"batch_tokens": 192, "max_steps": 400}}
    ranks.run("pass")
    victim = ranks.pids[1]
    when(Path("run/checkpoint-4").exists, lambda: os.kill(victim, signal.SIGKILL))
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
    deadline = time.monotonic() + 30 * PATIENCE
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
    forks = "if os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\nprint('forked', flush=True)\ntime.sleep(600)"
    then = forks if how == "killed" else ""
    caches = str(tmp_path_factory.mktemp("caches"))  # torch's own, which it makes in TMPDIR unless it is told where
    environ = {**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": caches}
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL.format(then=then)], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ
    )
    pids = [int(pid) for pid in kernel.stdout.readline().split()]
    assert len(pids) == 2
    children = []
    if how == "killed":
        assert kernel.stdout.readline() == "forked\n"
        children = psutil.Process(kernel.pid).children()
        os.kill(pids[0], signal.SIGSTOP)
        kernel.kill()
    kernel.wait(60 * PATIENCE)
    try:
        assert gone(pids)
        assert not list(tmp_path.iterdir())
    finally:
        for child in children:
            if child.is_running():
                child.kill()
        kernel.stdout.close()


def test_what_a_killed_worker_had_started_ends_with_the_ranks(ranks, capfd):
    program = ranks.run("import subprocess\nprogram = subprocess.Popen(['sleep', '100'])\nprogram.pid")
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailed, match="was killed by SIGKILL"):
        ranks.run("1")
    assert gone([program])
