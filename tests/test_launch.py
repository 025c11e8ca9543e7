"""Ranks that work, raise, are killed or asked to end, and ranks that join an outer job.

The workers use torch only. They are passed by name, because a spawned process imports this file.
"""

import atexit
import os
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

from ftkit.errors import RESUME_ME, MemoryShort, UserError
from ftkit.launch import ranks as launch
from ftkit.launch import supervisor as watch
from ftkit.launch.external import first_host, outer_job, threads_per_rank
from ftkit.launch.supervisor import Failure, RankError, StoppedError, explain
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


def raise_on_rank_1(stop):
    if join_world() == 1:
        raise KeyError("the row that is not there")
    dist.all_reduce(torch.ones(1))


def refuse_on_rank_1(stop):
    if join_world() == 1:
        raise UserError("data.jsonl:3: the row has no text")
    dist.all_reduce(torch.ones(1))


def die_on_rank_1(stop, number):
    if join_world() == 1:
        os.kill(os.getpid(), number)
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
    rank = join_world()
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    while True:
        asked = torch.tensor(float(stop.asked and obey))
        dist.all_reduce(asked)
        if asked.item() > 0:
            return f"saved by {rank}"
        time.sleep(0.05)


def when_ready(folder, action, ranks=2):
    """Start a thread that calls `action` when all ranks work."""

    def act():
        wait_for_ranks(folder, ranks)
        action()

    threading.Thread(target=act, daemon=True).start()


def wait_for_ranks(folder, ranks=2):
    paths = [Path(folder) / f"pid-{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + 60 * PATIENCE
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
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


def test_an_exception_is_told_once_with_its_rank_and_traceback():
    with pytest.raises(RankError) as caught:
        start(raise_on_rank_1)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "rank 1" in text
    assert "KeyError: 'the row that is not there'" in text
    assert "in raise_on_rank_1" in text
    assert len(text.splitlines()) < 25


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


def test_a_killed_rank_is_named_and_the_others_end():
    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL") as caught:
        start(die_on_rank_1, signal.SIGKILL)
    assert caught.value.rank == 1
    assert not children()


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(RankError, match=r"rank 1 .*exit code 0 before its work was done"):
        start(leave_on_rank_1)


@pytest.mark.slow
def test_one_ctrl_c_lets_the_ranks_end_cleanly(tmp_path):
    said = []
    when_ready(tmp_path, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    assert start(wait_for_the_end, str(tmp_path), True, say=said.append) == "saved by 0"
    assert signal.getsignal(signal.SIGINT) is before
    assert len(said) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_counted_and_handlers_restored(number):
    found = signal.signal(number, signal.SIG_DFL)  # it may be ignored here: under nohup
    try:
        with watch.counted_signals() as asked:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert asked.times == 2
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, found)


@pytest.mark.slow
def test_a_second_signal_kills(tmp_path):
    def interrupt(*words):
        os.kill(os.getpid(), signal.SIGINT)

    when_ready(tmp_path, interrupt)
    with pytest.raises(StoppedError):
        start(wait_for_the_end, str(tmp_path), False, say=interrupt)
    assert not children()


LAUNCHER = """
import os, sys
from ftkit.launch import ranks as local
print(local.start("tests.test_launch:wait_for_the_end", (sys.argv[1], True), 2, environ=os.environ))
"""


def running(session):
    """Return the processes of a session that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.as_dict(["pid", "ppid", "status", "cmdline"]))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["launcher killed", "group asked to end"])
def test_no_process_outlives_the_launcher(how, tmp_path):
    """The kernel kills the launcher alone when memory is short. Slurm and systemd signal all processes of a job."""
    command, root, printed = [sys.executable, "-c", LAUNCHER, str(tmp_path)], Path(__file__).parents[1], tmp_path / "printed"
    with printed.open("w") as file:
        launcher = subprocess.Popen(command, cwd=root, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for_ranks(tmp_path)
        if how == "launcher killed":
            os.kill(launcher.pid, signal.SIGKILL)
        else:
            os.killpg(launcher.pid, signal.SIGTERM)
        code = launcher.wait(60 * PATIENCE)
        deadline = time.monotonic() + 60 * PATIENCE
        while running(launcher.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running(launcher.pid) == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    expected = (-signal.SIGKILL, "") if how == "launcher killed" else (0, "saved by 0\n")
    assert (code, printed.read_text()) == expected


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
        assert all(ignored >> (number - 1) & 1 for number in watch.ENDING)


def test_the_cause_goes_before_its_consequences():
    lost = Failure(1, "RuntimeError: [1.2.3.4] Connection closed by peer", "Traceback\n", time_ns=1)
    own = Failure(1, "IndexError: 7", "Traceback\n", time_ns=2)
    killed = Failure(-9)
    pids = {0: 10, 1: 11, 2: 12}
    assert explain({0: lost, 1: own, 2: killed}, pids).rank == 2
    assert "--resume auto if checkpoints were saved" in str(explain({2: killed}, pids))
    assert explain({0: lost, 1: own}, pids).rank == 1
    assert explain({0: lost, 1: Failure(3)}, pids).rank == 1
    assert explain({0: Failure(-6), 1: own}, pids).rank == 1
    assert explain({0: Failure(-6, own.message), 2: killed}, pids).rank == 2
    assert isinstance(explain({0: lost, 1: Failure(2, refusal="no text", time_ns=3)}, pids), UserError)


def test_threads_soon_wait_asleep_unless_the_user_said():
    assert launch.environment(0, 1, 1, 2, {})["GOMP_SPINCOUNT"] == "3000"
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        assert "GOMP_SPINCOUNT" not in launch.environment(0, 1, 1, 2, {name: "1"})


def test_more_ranks_than_gpus_are_refused():
    launch.check_ranks(4, 0)
    launch.check_ranks(2, 2)
    with pytest.raises(UserError, match=r"3 ranks .* 2 usable GPUs.*--nproc 2"):
        launch.check_ranks(3, 2)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}


def test_torchrun_is_joined():
    assert outer_job({}) is None
    assert outer_job({**TORCHRUN, "MASTER_PORT": "1"}) == {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
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
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_NODELIST": "gpu[03-05],login1",
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


@pytest.mark.parametrize(
    "wrong",
    [{"SLURM_TASKS_PER_NODE": "2(x1)"}, {"SLURM_PROCID": "6"}, {"SLURM_NTASKS": "9" * 5000}, {"SLURM_NTASKS": "2(x3)"}],
)
def test_slurm_variables_that_do_not_fit_are_refused(wrong):
    with pytest.raises(UserError, match="do not fit together"):
        outer_job({**SLURM, **wrong})


def test_a_slurm_batch_script_starts_its_own_ranks():
    batch = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert outer_job(batch) is None
    assert outer_job({**SLURM, "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu7", "gpu7"), ("a,b", "a"), ("gpu[03-05,9],x", "gpu03"), ("n[12,14]", "n12"), ("r[1-2]-ib,x", "r1-ib")],
)
def test_first_host(hosts, first):
    assert first_host(hosts) == first
