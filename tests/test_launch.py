"""Ranks that work, raise, are killed or asked to end, and ranks that join an outer job.

Ranks find their functions by name and import this file.
"""

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ftkit.errors import RESUME_ME, MemoryShort, RankError, UserError
from ftkit.launch import ranks as launch
from ftkit.launch.external import first_host, outer_job, threads_per_rank
from ftkit.launch.ranks import ENDING, Failure, counted_signals, explain
from tests.jobs import ranks_of, recipe
from tests.worlds import PATIENCE

HERE = __name__


def start(function, *args, ranks=2, environ=None, say=lambda text: None):
    return launch.start(f"{HERE}:{function.__name__}", args, ranks, environ=environ or {}, say=say)


BEFORE: set[int] = set()
"""Processes of earlier tests of this worker, such as worlds of ranks."""


@pytest.fixture(autouse=True)
def _note_what_runs_before():
    BEFORE.clear()
    BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))


def children():
    """Return the processes that a test has started, without those of `multiprocessing` itself."""
    own = ("resource_tracker", "forkserver")
    begun = [child for child in psutil.Process().children(recursive=True) if child.pid not in BEFORE]
    return [child for child in begun if not any(word in _command(child) for word in own)]


def _command(process):
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "resource_tracker"


def join_world():
    dist.init_process_group("gloo")
    return dist.get_rank()


def work(stop, number):
    """Add up over ranks; return the sum and what this rank sees of its environment."""
    rank = join_world()
    total = torch.tensor(float(number + rank))
    dist.all_reduce(total)
    spin = Path("/proc/self/environ").read_bytes().count(b"GOMP_SPINCOUNT=3000")
    seen = {"threads": torch.get_num_threads(), "spin": spin, "listens": listeners()}
    return {"total": total.item(), "asked": stop.asked, **seen}


def refuse_on_rank_1(stop):
    if join_world() == 1:
        raise UserError("data.jsonl:3: the row has no text")
    dist.all_reduce(torch.ones(1))


def listeners():
    """Return the addresses (hexadecimal) at which processes listen on the port of the store."""
    port = f"{int(os.environ['MASTER_PORT']):04X}"
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]


def leave_short_of_memory(stop):
    if join_world() == 1:
        threading.Thread(target=stop.leave, args=(MemoryShort("the report\nof rank 1", resumable=True),)).start()
    dist.all_reduce(torch.ones(1))
    if stop.rank == 1:
        time.sleep(60)  # until the thread ends this process


def leave_on_rank_1(stop):
    if join_world() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def wait_for_the_end(stop, folder, obey):
    """Make steps until a rank is asked to end, raises, or loses its connection. Rank 0 has a child process."""
    rank = join_world()
    if rank == 0:
        subprocess.Popen(["sh", "-c", "trap '' INT TERM; exec sleep 1000"])  # Ctrl-C reaches it, too
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    while True:
        asked = torch.tensor(float(stop.asked and obey))
        dist.all_reduce(asked)
        if asked.item() > 0:
            (Path(folder) / f"checkpoint-{rank}").touch()
            for child in psutil.Process().children():
                child.kill()
            return {"stopped": "ended with a checkpoint"}
        if (Path(folder) / "raise").exists() and rank == 1:
            raise KeyError("the row that is not there")
        time.sleep(0.05)


def test_ranks_work_together_and_rank_0_answers(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    result = start(work, 3)
    assert (result["total"], result["threads"], result["asked"]) == (7.0, threads_per_rank(2), False)
    assert result["spin"] == 1, "threads wait asleep, from the first instruction of a rank"
    assert "GOMP_SPINCOUNT" not in os.environ
    assert result["listens"] == ["0100007F"], "the store listens on 127.0.0.1 alone"
    assert not children()


@pytest.mark.slow
def test_a_refusal_in_a_rank_is_the_users_error():
    with pytest.raises(UserError, match=r"data\.jsonl:3: the row has no text"):
        start(refuse_on_rank_1)


@pytest.mark.slow
def test_a_rank_leaves_with_its_report_from_any_thread():
    with pytest.raises(MemoryShort, match="the report\nof rank 1") as caught:
        start(leave_short_of_memory)
    assert caught.value.exit_code == RESUME_ME
    assert not children()


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(RankError, match=r"rank 1 .*exit code 0 before its work was done"):
        start(leave_on_rank_1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_counted_and_handlers_restored(number):
    found = signal.signal(number, signal.SIG_DFL)  # it may be ignored here: under nohup
    try:
        with counted_signals() as heard:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert heard == [number, number]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, found)


LAUNCHER = """
import os, signal, sys
from ftkit.cli import app
from ftkit.cli.options import say
from ftkit.errors import EndedEarly
from ftkit.launch import ranks as launch

folder, obey, early = sys.argv[1:]
start_processes = launch.start_processes

def start_and_signal(*arguments, **options):
    context = start_processes(*arguments, **options)
    if early:
        os.kill(os.getpid() if early == "SIGKILL" else 0, signal.Signals[early])  # 0: the process group
    return context

def command(*arguments, **options):
    entry = ("tests.test_launch:wait_for_the_end", (folder, obey == "obey"), 2)
    raise EndedEarly(launch.start(*entry, environ=os.environ, say=say)["stopped"])

if __name__ == "__main__":
    launch.start_processes, app.app = start_and_signal, command
    app.main([])
"""


def running(session):
    """Return the processes of a session that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.as_dict(["pid", "ppid", "status", "cmdline"]))
    return found


class Command:
    """A launcher in a session of its own.

    Args:
        command: Program and arguments.
        folder: Folder for what it prints.
    """

    def __init__(self, command, folder):
        self.path = folder / "printed"
        with self.path.open("w") as file:
            root = Path(__file__).parents[1]
            self.process = subprocess.Popen(command, cwd=root, stdout=file, stderr=file, start_new_session=True)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def printed(self):
        return self.path.read_text()

    def until(self, reached):
        """Wait until `reached()`."""
        deadline = time.monotonic() + 90 * PATIENCE
        while not reached():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.02)

    def end(self):
        """Wait for the end of all processes, and return the exit code."""
        code = self.process.wait(90 * PATIENCE)
        deadline = time.monotonic() + 60 * PATIENCE
        while running(self.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(self.pid) == []
        return code


def launcher(folder, *, obey=True, early=""):
    return Command([sys.executable, "-c", LAUNCHER, str(folder), "obey" if obey else "refuse", early], folder)


def saved(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


ENDING_NOW = "ending after this step, with a checkpoint; Ctrl-C again ends at once and loses it"


@pytest.mark.ranks
@pytest.mark.quick(1)
@pytest.mark.parametrize("event", ["Ctrl-C", "SIGTERM", "SIGUSR1", "group SIGTERM"])
def test_a_run_that_is_asked_to_end_saves_and_ends_with_75(event, tmp_path):
    """A terminal sends Ctrl-C to all processes. Slurm and systemd can send their signals to all processes, too."""
    with launcher(tmp_path) as run:
        run.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        number = signal.SIGINT if event == "Ctrl-C" else signal.Signals[event.split()[-1]]
        (os.killpg if event in ("Ctrl-C", "group SIGTERM") else os.kill)(run.pid, number)
        code = run.end()
    assert code == RESUME_ME, run.printed
    assert saved(tmp_path) == ["checkpoint-0", "checkpoint-1"]
    assert run.printed.splitlines() == [ENDING_NOW, "ftkit: ended with a checkpoint"]


@pytest.mark.ranks
@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_ranks_listen_is_not_lost(number, tmp_path):
    """The signal reaches the launcher and the ranks right after they were started."""
    with launcher(tmp_path, early=number.name) as run:
        code = run.end()
    assert code == RESUME_ME, run.printed
    assert saved(tmp_path) == ["checkpoint-0", "checkpoint-1"]


@pytest.mark.ranks
def test_a_second_ctrl_c_ends_at_once_with_130(tmp_path):
    with launcher(tmp_path, obey=False) as run:
        run.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        os.killpg(run.pid, signal.SIGINT)
        run.until(lambda: ENDING_NOW in run.printed)
        run.process.send_signal(signal.SIGINT)
        code = run.end()  # also the ranks' children have ended
    assert code == 130, run.printed
    assert saved(tmp_path) == []
    assert "ftkit: the run was ended at once; resume with --resume auto if checkpoints were saved" in run.printed


@pytest.mark.ranks
def test_a_rank_that_raises_is_shown_and_ends_the_run_with_1(tmp_path):
    with launcher(tmp_path) as run:
        run.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        (tmp_path / "raise").touch()
        code = run.end()
    assert code == 1, run.printed
    pid = (tmp_path / "pid-1").read_text()
    assert f"ftkit: rank 1 (pid {pid}) raised KeyError: 'the row that is not there'" in run.printed
    assert "in wait_for_the_end" in run.printed
    assert "The other ranks were ended; resume with --resume auto" in run.printed
    assert saved(tmp_path) == []


@pytest.mark.ranks
def test_a_rank_that_is_killed_is_named_and_ends_the_run_with_1(tmp_path):
    with launcher(tmp_path) as run:
        run.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        pid = int((tmp_path / "pid-1").read_text())
        os.kill(pid, signal.SIGKILL)
        code = run.end()
    assert code == 1, run.printed
    assert f"ftkit: rank 1 (pid {pid}) was killed by SIGKILL (the kernel does that when host memory runs out)" in run.printed
    assert "Traceback" not in run.printed
    assert saved(tmp_path) == []


@pytest.mark.ranks
@pytest.mark.quick(1)
@pytest.mark.parametrize("early", ["", "SIGKILL"])
def test_no_rank_outlives_the_launcher(early, tmp_path):
    """The kernel kills the launcher alone when host memory runs out, also while the ranks import torch."""
    with launcher(tmp_path, early=early) as run:
        if not early:
            run.until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
            run.process.kill()
        assert run.end() == -signal.SIGKILL
    assert saved(tmp_path) == ([] if early else ["checkpoint-0", "checkpoint-1"])


def finetune(home, name, tmp_path):
    """Start the real command on two ranks; it makes steps until it is ended."""
    path = home / f"{name}.yaml"
    path.write_text(recipe(home, name, eval=None, output={"dir": str(home / name), "save_every_steps": 2}))
    more = ["--set", "train.max_steps=100000", "--set", "optimizer.schedule=constant"]
    return Command([str(Path(sys.executable).with_name("ftkit")), "finetune", str(path), "--nproc", "2", *more], tmp_path)


@pytest.mark.slow
def test_finetune_saves_after_the_step_at_the_first_ctrl_c(home, tmp_path):
    with finetune(home, "first", tmp_path) as run:
        run.until((home / "first" / "checkpoint-2").exists)
        os.killpg(run.pid, signal.SIGINT)
        code = run.end()
    assert code == RESUME_ME, run.printed
    assert ENDING_NOW in run.printed
    (step,) = re.findall(r"ftkit: ended at step (\d+) with a checkpoint; --resume auto continues from it", run.printed)
    assert (home / "first" / f"checkpoint-{step}" / "contents.json").exists()


@pytest.mark.slow
def test_finetune_ends_at_once_at_the_second_ctrl_c(home, tmp_path):
    with finetune(home, "second", tmp_path) as run:
        run.until((home / "second" / "checkpoint-2").exists)
        for pid in ranks_of(run.pid):
            os.kill(pid, signal.SIGSTOP)  # so that the run cannot end between the two signals
        os.kill(run.pid, signal.SIGINT)
        run.until(lambda: ENDING_NOW in run.printed)
        os.kill(run.pid, signal.SIGINT)
        code = run.end()
    assert code == 130, run.printed
    assert "ftkit: the run was ended at once" in run.printed
    assert (home / "second" / "checkpoint-2").exists(), "what was saved before stays"


def note_ignored_signals(stop, folder):
    def note():
        (ignored,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
        (Path(folder) / f"ignored-{stop.rank}").write_text(ignored.split()[1])

    atexit.register(note)


@pytest.mark.slow
def test_a_rank_ignores_signals_after_its_work(tmp_path):
    """Python restores the default action of handled signals at exit. A late Ctrl-C would kill such a rank."""
    start(note_ignored_signals, str(tmp_path))
    for rank in range(2):
        ignored = int((tmp_path / f"ignored-{rank}").read_text(), 16)
        assert all(ignored >> (number - 1) & 1 for number in ENDING)


def test_the_cause_goes_before_its_consequences():
    lost = Failure(1, "RuntimeError: [1.2.3.4] Connection closed by peer", "Traceback\n")
    raised = Failure(1, "IndexError: 2", "Traceback\n")
    refused, killed, aborted, left = Failure(2, refusal="no text"), Failure(-9), Failure(-6), Failure(3)
    pids = {0: 10, 1: 11, 2: 12}
    assert isinstance(explain({0: lost, 1: killed, 2: refused}, pids), UserError)
    assert explain({0: lost, 1: raised, 2: killed}, pids).rank == 2
    assert explain({0: lost, 1: raised, 2: lost}, pids).rank == 1
    assert explain({0: aborted, 1: raised}, pids).rank == 1
    assert explain({0: lost, 1: left}, pids).rank == 1
    assert "ended with exit code 3 before its work was done" in str(explain({1: left}, pids))


def test_threads_soon_wait_asleep_unless_the_user_said():
    assert launch.environment(0, 1, 1, 2, {})["GOMP_SPINCOUNT"] == "3000"
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        assert "GOMP_SPINCOUNT" not in launch.environment(0, 1, 1, 2, {name: "1"})


def test_more_ranks_than_gpus_are_refused():
    launch.check_ranks(400, 0)
    launch.check_ranks(2, 2)
    with pytest.raises(UserError, match=r"3 ranks .* 2 usable GPUs.*at most 2 ranks"):
        launch.check_ranks(3, 2)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}


def test_torchrun_is_joined():
    assert outer_job({}) is None
    joined = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert outer_job({**TORCHRUN, "MASTER_PORT": "1"}) == joined
    with pytest.raises(UserError, match=r"cannot be used .*'two'.*unset RANK"):
        outer_job({**TORCHRUN, "MASTER_PORT": "1", "WORLD_SIZE": "two"})
    with pytest.raises(UserError, match="MASTER_PORT is not"):
        outer_job(TORCHRUN)


def test_torchruns_single_thread_is_undone():
    environ = {**TORCHRUN, "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    assert outer_job(environ)["OMP_NUM_THREADS"] == str(threads_per_rank(2))


SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-05],login1",
}


def test_slurm_is_joined():
    assert outer_job(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "30123",
    }
    assert outer_job({**SLURM, "MASTER_ADDR": "b", "MASTER_PORT": "7"})["MASTER_ADDR"] == "b"


@pytest.mark.parametrize(("name", "value"), [("SLURM_NODEID", "3"), ("SLURM_PROCID", "x"), ("SLURM_STEP_NODELIST", None)])
def test_slurm_variables_that_do_not_fit_are_refused(name, value):
    wrong = {key: each for key, each in {**SLURM, name: value}.items() if each is not None}
    with pytest.raises(UserError, match=r"outer job's variables cannot be used .*unset RANK, WORLD_SIZE and SLURM_PROCID"):
        outer_job(wrong)


def test_a_slurm_batch_script_starts_its_own_ranks():
    assert outer_job({key: value for key, value in SLURM.items() if "STEP" not in key}) is None
    assert outer_job({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu7", "gpu7"), ("a,b", "a"), ("gpu[03-05,9],x", "gpu03"), ("n[12,14]", "n12"), ("r[1-2]-ib,x", "r1-ib")],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first
