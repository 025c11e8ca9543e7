"""Ranks that work, raise, are killed, stopped or asked to end; and joining an outer job.

The workers know torch only. They are named, not handed over: a spawned process imports this file.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ftkit.errors import RESUME_ME, MemoryShort, UserError
from ftkit.launch import local as launch
from ftkit.launch import supervisor as watch
from ftkit.launch.external import first_host, outer_job, threads_per_rank
from ftkit.launch.local import Stop
from ftkit.launch.supervisor import Failure, RankError, StoppedError, explain

HERE = __name__


def start(function, *args, ranks=2, environ=None, say=lambda text: None):
    return launch.start(f"{HERE}:{function.__name__}", args, ranks, environ=environ or {}, say=say)


BEFORE: set[int] = set()
"""The processes that other tests of this worker keep: worlds of ranks, templates."""


@pytest.fixture(autouse=True)
def _note_what_runs_before():
    BEFORE.clear()
    BEFORE.update(child.pid for child in psutil.Process().children(recursive=True))


def children():
    """Return the processes that a test has begun, without what Python keeps for itself."""
    own = ("resource_tracker", "forkserver")
    begun = [child for child in psutil.Process().children(recursive=True) if child.pid not in BEFORE]
    return [child for child in begun if not any(word in _command(child) for word in own)]


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "resource_tracker"


def join_world():
    dist.init_process_group("gloo")
    return dist.get_rank()


def add_up(stop, number):
    rank = join_world()
    total = torch.tensor(float(number + rank))
    dist.all_reduce(total)
    return {"total": total.item(), "threads": torch.get_num_threads(), "asked": stop.asked}


def raise_on_rank_1(stop):
    if join_world() == 1:
        raise KeyError("the row that is not there")
    dist.all_reduce(torch.ones(1))


def refuse_on_rank_1(stop):
    if join_world() == 1:
        raise UserError("data.jsonl:3: the row has no text")
    dist.all_reduce(torch.ones(1))


def die_on_rank_1(stop, number, path):
    if join_world() == 1:
        Path(path).write_text(str(time.time()))
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def listeners(stop):
    """Return the addresses (hexadecimal) at which anything listens on the port of the store."""
    join_world()
    port = f"{int(os.environ['MASTER_PORT']):04X}"
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]


def leave_short_of_memory(stop):
    if join_world() == 1:
        threading.Thread(target=stop.leave, args=(MemoryShort("the report\nof rank 1", resumable=True),)).start()
    dist.all_reduce(torch.ones(1))
    if stop.rank == 1:
        time.sleep(60)


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
    """Start a thread that acts once every rank is at work."""

    def act():
        paths = [Path(folder) / f"pid-{rank}" for rank in range(ranks)]
        while not all(path.exists() and path.read_text() for path in paths):
            time.sleep(0.05)
        action([int(path.read_text()) for path in paths])

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_ranks_work_together_and_rank_0_answers():
    result = start(add_up, 3)
    assert result == {"total": 7.0, "threads": threads_per_rank(2), "asked": False}
    assert not children()


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads Linux's list of sockets")
def test_the_store_listens_on_the_loopback_alone():
    assert start(listeners) == ["0100007F"]  # 127.0.0.1, its bytes as they lie in memory


def test_an_exception_is_told_once_with_its_rank_and_traceback():
    with pytest.raises(RankError) as caught:
        start(raise_on_rank_1)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "rank 1" in text
    assert "KeyError: 'the row that is not there'" in text
    assert "in raise_on_rank_1" in text
    assert len(text.splitlines()) < 25


def test_a_refusal_in_a_rank_is_the_users_error():
    with pytest.raises(UserError, match=r"data\.jsonl:3: the row has no text"):
        start(refuse_on_rank_1)


@pytest.mark.slow
def test_a_rank_leaves_with_its_report_from_any_thread():
    with pytest.raises(MemoryShort, match="the report\nof rank 1") as caught:
        start(leave_short_of_memory)
    assert caught.value.exit_code == RESUME_ME
    assert not children()


@pytest.mark.parametrize("refused", [True, False])
def test_a_rank_leaves_with_words_that_are_no_text(refused, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        Stop(refused=tmp_path / "refused" if refused else None).leave(UserError("a file called \udcff"))
    assert left.value.code == 2
    assert "a file called \\udcff" in ((tmp_path / "refused").read_text() if refused else capfd.readouterr().err)


def test_a_killed_rank_is_named_and_the_others_end(tmp_path):
    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL") as caught:
        start(die_on_rank_1, signal.SIGKILL, str(tmp_path / "died"))
    assert caught.value.rank == 1
    assert time.time() - float((tmp_path / "died").read_text()) < 30
    assert not children()


def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(RankError, match=r"rank 1 .*exit code 0 before its work was done"):
        start(leave_on_rank_1)


@pytest.mark.slow
def test_without_waitid_ends_are_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "waitid")  # as on macOS before Python 3.13
    assert start(add_up, 3)["total"] == 7.0
    with pytest.raises(RankError, match=r"rank 1 .*SIGKILL") as caught:
        start(die_on_rank_1, signal.SIGKILL, str(tmp_path / "died"))
    assert caught.value.rank == 1
    assert not children()


def test_a_stopped_rank_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 3.0)
    when_ready(tmp_path, lambda pids: os.kill(pids[1], signal.SIGSTOP))
    with pytest.raises(RankError, match=r"rank 1 .*its process is stopped"):
        start(wait_for_the_end, str(tmp_path), True)
    assert not children()


def test_one_ctrl_c_lets_the_ranks_end_cleanly(tmp_path):
    said = []
    when_ready(tmp_path, lambda pids: os.kill(os.getpid(), signal.SIGINT))
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
    def twice(pids):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    when_ready(tmp_path, twice)
    with pytest.raises(StoppedError):
        start(wait_for_the_end, str(tmp_path), False)
    assert not children()


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


def how_they_wait(stop):
    return os.environ.get("GOMP_SPINCOUNT"), open("/proc/self/environ", "rb").read().count(b"GOMP_SPINCOUNT=3000")


def test_ranks_have_it_from_their_first_instruction_on(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert launch.start("tests.test_launch:how_they_wait", (), 1, environ=os.environ, say=print) == ("3000", 1)
    assert "GOMP_SPINCOUNT" not in os.environ


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


def test_a_huge_number_of_nodes_takes_no_memory():
    assert outer_job({**SLURM, "SLURM_TASKS_PER_NODE": "2(x99999999999999)"})["LOCAL_WORLD_SIZE"] == "2"
    assert outer_job({**SLURM, "SLURM_TASKS_PER_NODE": "1,3(x2)"})["LOCAL_WORLD_SIZE"] == "3"


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
