"""Interrupts and deaths, by real signals to a real kernel and its ranks. The tests share one kernel and run in order."""

import json
import os
import re
import signal
import time

import psutil
import pytest

from tests.notebook.conftest import recipe_of
from tests.notebook.kernel import Kernel

pytestmark = pytest.mark.slow

STEPS = "settings=['train.max_steps=5000']"
END_SECONDS = 30
"""Within which processes end that must end. Not multiplied by the patience: it is promised."""


@pytest.fixture(scope="module")
def kernel(home, tmp_path_factory):
    """A kernel with two ranks, whose temporary files are in its folder."""
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "tmp").mkdir()
    (folder / "recipe.json").write_text(json.dumps(recipe_of(home)))
    caches = str(tmp_path_factory.mktemp("caches"))  # torch's own, which would be in TMPDIR
    made = Kernel(folder, {**os.environ, "TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": caches})
    made.folder = folder
    made.run("import json, os\nfrom ftkit.notebook import Ranks\nrecipe = json.load(open('recipe.json'))\nranks = Ranks(2)")
    yield made
    made.close()


def started(kernel):
    """Start the ranks unless they run, and return their process ids."""
    shown = kernel.run("print('pids', *ranks.start().pids.values())")
    return [int(each) for each in re.search(r"^pids (.*)$", shown, re.M).group(1).split()]


def has_come_to(kernel, step):
    path = kernel.folder / "run" / "metrics.jsonl"
    return lambda: path.exists() and f'"step": {step},' in path.read_text()


def alive(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def all_gone(pids):
    """Wait until processes are gone, and return whether they are."""
    deadline = time.monotonic() + END_SECONDS
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive(pids)


def test_an_interrupt_ends_a_run_after_a_step_with_a_checkpoint(kernel):
    pids = started(kernel)
    assert len(pids) == 2
    cell = kernel.begin(f"ranks.finetune(recipe, {STEPS})")
    shown = kernel.end(cell, has_come_to(kernel, 6), kernel.manager.interrupt_kernel)
    assert "Traceback" not in shown
    step = int(re.search(r"ended at step (\d+) with a checkpoint; resume=\"auto\"", shown).group(1))
    assert 6 <= step < 5000
    assert (kernel.folder / "run" / f"checkpoint-{step}").is_dir()
    assert f"[{step}, {step}]" in kernel.run("%%ranks\nstep = trainer.state.global_step") + kernel.run("ranks.view['step']")
    shown = kernel.run(f"ranks.finetune(settings=['train.max_steps={step + 3}'], resume='auto')")
    assert f"<run: {step + 3} steps" in shown
    assert started(kernel) == pids


def test_an_interrupt_ends_the_users_cell_and_the_ranks_live_on(kernel):
    pids = started(kernel)
    cell = kernel.begin("%%ranks\nkept = 3\nopen(f'begun-{rank}', 'w').close()\nimport time\ntime.sleep(1000)")
    begun = [kernel.folder / f"begun-{rank}" for rank in (0, 1)]
    shown = kernel.end(cell, lambda: all(path.exists() for path in begun), kernel.manager.interrupt_kernel)
    assert "interrupted; the ranks keep their state" in shown
    assert "[3, 3]" in kernel.run("ranks.view['kept']")
    assert started(kernel) == pids


def test_an_interrupt_waits_for_answers_and_ends_the_users_cell(kernel):
    pids = started(kernel)
    kernel.run("ranks.finetune(recipe, overwrite=True)")
    slow = "(open(f'busy-{rank}', 'w').close(), time.sleep(3), original(*given, **named))[2]"
    patched = f"engine.generate = lambda *given, **named: {slow}"
    kernel.run(f"%%ranks\nimport time\nimport ftkit.notebook.engine as engine\noriginal = engine.generate\n{patched}")
    cell = kernel.begin("ranks.generate('3+1?')\nprint('the rest of the cell')")
    busy = [kernel.folder / f"busy-{rank}" for rank in (0, 1)]
    shown = kernel.end(cell, lambda: all(path.exists() for path in busy), kernel.manager.interrupt_kernel)
    assert "the ranks have finished this first" in shown
    assert "the rest of the cell" not in shown
    kernel.run("%%ranks\nengine.generate = original")
    assert kernel.run("len(ranks.generate('3+1?'))") == "1"
    assert started(kernel) == pids


def test_a_rank_that_ends_itself_says_why(kernel):
    pids = started(kernel)
    leave = "if rank == 1: _sessions[0].stop.leave(UserError('the memory guard ended the run'))"
    shown = kernel.run(f"%%ranks\nfrom ftkit.errors import UserError\nfrom ftkit.notebook.engine import _sessions\n{leave}")
    assert "the memory guard ended the run" in shown
    assert all_gone(pids)


def test_a_second_interrupt_ends_the_ranks_at_once(kernel):
    pids = started(kernel)
    stays = "while True:\n    try:\n        time.sleep(1000)\n    except: 0"
    cell = kernel.begin(f"%%ranks\nimport time\nopen(f'stuck-{{rank}}', 'w').close()\n{stays}")
    stuck = [kernel.folder / f"stuck-{rank}" for rank in (0, 1)]

    def twice():
        kernel.manager.interrupt_kernel()
        time.sleep(1)
        kernel.manager.interrupt_kernel()

    shown = kernel.end(cell, lambda: all(path.exists() for path in stuck), twice)
    assert "the ranks were ended at once; ranks.restart()" in shown
    assert all_gone(pids)


def test_a_killed_rank_ends_the_others_and_is_named(kernel):
    pids = started(kernel)
    killed = []

    def kill():
        os.kill(pids[1], signal.SIGKILL)
        killed.append(time.monotonic())

    saved = kernel.folder / "run" / "checkpoint-4"
    cell = kernel.begin(f"ranks.finetune(recipe, {STEPS}, overwrite=True)")
    shown = kernel.end(cell, saved.is_dir, kill)
    assert all_gone(pids)
    assert time.monotonic() < killed[0] + END_SECONDS
    assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in shown
    assert re.search(r"ranks\.restart\(\) loads checkpoint-\d+ of run, and ranks\.finetune\(resume=\"auto\"\)", shown)
    assert "was killed by SIGKILL" in kernel.run("ranks.generate('3+1?')")
    shown = kernel.run("ranks.restart()")
    step = int(re.search(r"the model of step (\d+) is in memory", shown).group(1))
    assert step >= 4
    assert f"<run: {step + 2} steps" in kernel.run(f"ranks.finetune(settings=['train.max_steps={step + 2}'], resume='auto')")


def test_ranks_that_wait_for_one_that_raised_are_ended(kernel):
    pids = started(kernel)
    kernel.run("ranks.finetune(recipe, overwrite=True)")
    kernel.run("%%ranks\nif rank == 1: tokenizer = 3")
    shown = kernel.run("ranks.generate('3+1?')")
    assert f"rank 1 (pid {pids[1]}) raised TypeError" in shown
    assert "The others waited for it. The ranks were ended; ranks.restart()" in shown
    assert all_gone(pids)


def test_a_rank_that_dies_between_cells_is_named_at_once(kernel):
    pids = started(kernel)
    kernel.run("%%ranks\nimport subprocess\nprogram = subprocess.Popen(['sleep', '1000'])")
    children = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(children) >= 2
    os.kill(pids[0], signal.SIGKILL)
    assert all_gone(pids + children)
    assert f"rank 0 (pid {pids[0]}) was killed by SIGKILL" in kernel.run("ranks.evaluate()")


def test_no_process_survives_a_killed_kernel(kernel):
    """Neither engines nor controller nor what a rank started; and no connection file stays."""
    assert len(started(kernel)) == 2
    kernel.run("%%ranks\nimport subprocess\nprogram = subprocess.Popen(['sleep', '1000'])")
    pids = [each.pid for each in psutil.Process(kernel.pid).children(recursive=True)]
    assert len(pids) >= 5
    assert len(list((kernel.folder / "tmp").glob("ftkit-ranks-*"))) == 1
    os.kill(kernel.pid, signal.SIGKILL)
    try:
        assert all_gone(pids)
    finally:
        for pid in alive(pids):
            os.kill(pid, signal.SIGKILL)
    assert not list((kernel.folder / "tmp").glob("ftkit-ranks-*"))
