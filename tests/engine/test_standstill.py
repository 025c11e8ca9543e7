"""Nothing stands still: ranks at different collectives, dead ranks and hung ranks end every rank, with one message.

The clocks are shortened: a second of these tests is some ten seconds of a run.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ftkit.engine.comm import communicator as comm_module
from ftkit.engine.comm import watchdog
from ftkit.engine.comm.board import SLOT_BYTES, StoreBoard
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.ledger import RECENT, Ledger, first_difference
from ftkit.engine.comm.standstill import Patience, Stand, Verdict, judge, look_at
from ftkit.errors import UserError
from ftkit.launch.local import loopback_store
from tests.worlds import World, Worlds

CPU = torch.device("cpu")
SHORT = Patience(beat=0.1, look=0.3, stuck=1.0, stopped=1.0, silent=9.0, leave=0.5, grace=1.0, remind=60.0)


@pytest.fixture
def broken() -> Iterator[World]:
    """Return a world whose ranks end in pieces."""
    world = World(2)
    yield world
    world.close()


@pytest.fixture
def broken3() -> Iterator[World]:
    world = World(3)
    yield world
    world.close()


def told(case: Callable[[Communicator], Any], shared: bool = True) -> tuple[str, str, float]:
    """Run a case on short clocks; return the error's kind and text, and how long it took."""
    began = time.monotonic()
    wake = mock.patch.object(comm_module, "WAKE", timedelta(seconds=0.1))
    with mock.patch.object(watchdog, "PATIENCE", SHORT), wake:
        comm = Communicator(CPU)
        if not shared:
            comm._stage = None
        try:
            case(comm)
        except UserError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


# --- different collectives


def gathers(comm: Communicator, *names: str) -> None:
    full = torch.zeros(8 * comm.world_size)
    for name in names:
        comm.all_gather(full, torch.ones(8), name)


def skips(comm: Communicator) -> None:
    names = ("model.layers.0", "model.layers.1", "model.layers.2")
    gathers(comm, *(name for number, name in enumerate(names) if number != comm.rank))


def skips_and_steps(comm: Communicator) -> None:
    skips(comm)
    comm.totals(torch.ones(1), "the gradient norm")


def other_operation(comm: Communicator) -> None:
    if comm.rank:
        gathers(comm, "model.layers.0")
    else:
        full = torch.zeros(8 * comm.world_size)
        comm.reduce_scatter_mean(torch.zeros(8), full, "model.layers.0")


def asks_alone(comm: Communicator) -> None:
    if comm.rank:
        gathers(comm, "model.layers.0")
    else:
        comm.all({"room": 3}, "room for all weights")


def counts_alone(comm: Communicator) -> None:
    if comm.rank:
        comm.totals(torch.ones(3), "the gradient norm")
    else:
        comm.barrier()


def broadcasts_alone(comm: Communicator) -> None:
    if comm.rank:
        comm.broadcast(torch.zeros(3), "model.norm")
    else:
        comm.any(True)


@pytest.mark.parametrize("case", [skips, other_operation, asks_alone, counts_alone, broadcasts_alone])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_at_different_collectives_end_at_once_over_shared_memory(case, size, worlds: Worlds):
    answers = worlds[size].run(told, case)
    assert {kind for kind, _, _ in answers} == {"RanksDiffer"}
    assert len({text for _, text, _ in answers}) == 1, "one message"
    assert max(seconds for _, _, seconds in answers) < 5
    assert "rank 0" in answers[0][1]
    assert "rank 1" in answers[0][1]


def test_the_blocks_that_ranks_went_to_are_named(worlds: Worlds):
    ((_, text, _), _) = worlds[2].run(told, skips)
    assert "rank 0 to all-gather of model.layers.1; rank 1 to all-gather of model.layers.0" in text
    assert "test_standstill.py, line" in text


@pytest.mark.parametrize("case", [skips_and_steps, other_operation, counts_alone])
def test_ranks_at_different_collectives_end_without_shared_memory(case, broken: World):
    answers = broken.run(told, case, False)
    assert {kind for kind, _, _ in answers} == {"RanksDiffer"}
    assert len({text for _, text, _ in answers}) == 1
    assert max(seconds for _, _, seconds in answers) < 10


def test_a_rank_that_does_the_same_is_left_alone(worlds: Worlds):
    assert {kind for kind, _, _ in worlds[2].run(told, together)} == {""}


def together(comm: Communicator) -> None:
    gathers(comm, "model.layers.0", "model.layers.1")
    comm.barrier()
    assert comm.all(comm.rank) == list(range(comm.world_size))
    value = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(comm.sum(value), comm.world_size * torch.arange(6.0).view(2, 3).t())
    assert comm.sum(torch.tensor(1.5)).item() == 1.5 * comm.world_size
    short = torch.full((3,), float(comm.rank))
    comm.broadcast(short)
    assert short.tolist() == [0.0] * 3


# --- others' collectives


def torchs_barrier_on_0(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        gathers(comm, "model.layers.7")


def test_a_wait_in_torchs_own_collective_is_no_way_to_stand_still(broken: World):
    with pytest.raises(AssertionError) as caught:
        broken.run(told_or_dead, torchs_barrier_on_0)
    assert "rank 0 of 2: died with exit code 2" in str(caught.value)
    assert "waits in torch.distributed.all_reduce" in str(caught.value)
    assert "is in all-gather of model.layers.7" in str(caught.value)


def told_or_dead(case: Callable[[Communicator], Any]) -> None:
    kind, text, _ = told(case)
    raise RuntimeError(f"{kind}: {text}")


# --- dead and hung ranks


def dies(comm: Communicator) -> None:
    gathers(comm, "model.layers.0")
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gathers(comm, "model.layers.1")


def crashes(comm: Communicator) -> None:
    gathers(comm, "model.layers.0")
    if comm.rank == comm.world_size - 1:
        os._exit(3)
    comm.totals(torch.ones(1))


def stops(comm: Communicator) -> None:
    gathers(comm, "model.layers.0")
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    gathers(comm, "model.layers.1")


def written(case: Callable[[Communicator], Any], folder: str) -> None:
    """Write what is told, where a dead rank does not keep it from being read."""
    kind, text, seconds = told(case)
    Path(folder, os.environ["RANK"]).write_text(f"{kind} {seconds}\n{text}")


def survivors(world: World, case: Callable[[Communicator], Any], folder: Path) -> tuple[str, str]:
    """Return kind and text of all ranks but the last, which must agree and take no more than some seconds."""
    with suppress(AssertionError):
        world.run(written, case, str(folder), seconds=6.0)
    texts = [(folder / str(rank)).read_text().split("\n", 1) for rank in range(world.size - 1)]
    assert len({text for _, text in texts}) == 1, "one message"
    kinds = {first.split()[0] for first, _ in texts}
    assert len(kinds) == 1
    return kinds.pop(), texts[0][1]


@pytest.mark.parametrize("case", [dies, crashes])
def test_a_dead_rank_is_named_with_its_place(case, broken: World, broken3: World, tmp_path: Path):
    for world in (broken, broken3):
        kind, text = survivors(world, case, tmp_path)
        assert kind == "LostRank"
        assert f"rank {world.size - 1} (pid" in text
        assert "It was last in all-gather of model.layers.0." in text
        assert "gloo" not in text


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_place(broken: World, tmp_path: Path):
    kind, text = survivors(broken, stops, tmp_path)
    assert kind == "LostRank"
    assert "rank 1 (pid" in text
    assert "its process is stopped" in text
    assert "It was last in all-gather of model.layers.0." in text
    assert (tmp_path / "1").exists(), "it was let go on, so that it can end"


def makes_fewer_steps(comm: Communicator) -> None:
    for _ in range(3 - comm.rank):
        comm.totals(torch.ones(1), "the gradient norm")


def test_a_rank_that_makes_fewer_steps_is_named(broken: World, tmp_path: Path):
    kind, text = survivors(broken, makes_fewer_steps, tmp_path)
    assert kind == "LostRank"
    assert "rank 1" in text
    assert "has ended its part while others still work with the model" in text


# --- ranks that are only late


def sleeps_on_0(comm: Communicator) -> None:
    gathers(comm, "model.layers.0")
    if comm.rank == 0:
        time.sleep(6 * SHORT.stuck)
    gathers(comm, "model.layers.1")


def works_on_0(comm: Communicator) -> None:
    until = time.monotonic() + 6 * SHORT.stuck
    while comm.rank == 0 and time.monotonic() < until:
        sum(range(1000))
    gathers(comm, "model.layers.1")


@pytest.mark.parametrize("case", [sleeps_on_0, pytest.param(works_on_0, marks=pytest.mark.slow)])
def test_a_rank_that_is_only_late_is_waited_for(case, worlds: Worlds):
    """Six times as long as ranks at different places are given: of a run, two minutes."""
    answers = worlds[2].run(told, case)
    assert {kind for kind, _, _ in answers} == {""}
    assert min(seconds for _, _, seconds in answers) > 6 * SHORT.stuck - 1


IMPATIENT = Patience(beat=0.1, look=0.3, stuck=1.0, stopped=1.0, silent=2.0, grace=1.0, remind=60.0)


def computes_in_c(comm: Communicator) -> None:
    """Keep the interpreter's lock on rank 0, at work: no thread of Python goes on meanwhile."""
    gathers(comm, "model.layers.0")
    until = time.process_time() + 2 * IMPATIENT.silent
    if comm.rank == 0:
        needed = min(timeit.repeat(lambda: sum(itertools.repeat(1, 10**6)), time.process_time, number=1, repeat=5))
        sum(itertools.repeat(1, int(10**6 * 2 * IMPATIENT.silent / needed)))
        assert time.process_time() > until - IMPATIENT.silent
    gathers(comm, "model.layers.1")


def hangs_in_c(comm: Communicator) -> None:
    """Keep the interpreter's lock on the last rank, without any work."""
    gathers(comm, "model.layers.0")
    if comm.rank == comm.world_size - 1:
        ctypes.PyDLL(None).sleep(5)
    gathers(comm, "model.layers.1")


def impatiently(case: Callable[[Communicator], Any]) -> tuple[str, str]:
    wake = mock.patch.object(comm_module, "WAKE", timedelta(seconds=0.1))
    with mock.patch.object(watchdog, "PATIENCE", IMPATIENT), wake:
        try:
            case(Communicator(CPU))
        except UserError as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.slow
def test_a_rank_that_computes_in_one_call_of_c_is_waited_for(worlds: Worlds):
    assert worlds[2].run(impatiently, computes_in_c) == [("", ""), ("", "")]


def test_a_rank_that_hangs_in_a_call_of_c_is_told(broken: World):
    kind, text = broken.run(impatiently, hangs_in_c)[0]
    assert kind == "LostRank"
    assert "rank 1 (pid" in text
    assert "has given no sign of life for 2 s" in text


# --- the judgement, without processes


def stand(rank: int, names: tuple[str, ...] = (), *, inside: bool = False, **fields: Any) -> Stand:
    """Return where a rank stands that went through collectives of these names."""
    ledger = Ledger()
    for name in names:
        ledger.enter("all-gather", name)
        ledger.leave()
    NAMES.update(ledger.names)
    fields = {"codes": ledger.recent(), "still_s": 99.0, **fields}
    return Stand(rank, "host", 7 + rank, ledger.entered, inside, ledger.name, **fields)


NAMES: dict[int, str] = {}
ALIVE = {1: (0.5, "sleeping")}
SLEEPS = {"codes": b"", "line": "train.py, line 3, in upload"}


def verdict(*stands: Stand, silent: dict[int, tuple[float, str]] | None = None) -> str:
    found = judge(stands, ALIVE if silent is None else silent, NAMES, Patience())
    return "" if found is None else f"{type(found.error()).__name__}: {found.text}"


def test_who_computes_or_sleeps_is_behind():
    waits = stand(0, ("a", "b"), inside=True)
    assert verdict(waits, stand(1, ("a",), **SLEEPS)) == ""
    assert verdict(waits, stand(1, ("a",), line="train.py, line 3, in upload")) == "", "it stands still, and does not wait"
    assert verdict(waits, stand(1, ("a", "b"), inside=True)) == "", "the same collective, and slow"
    assert verdict(waits, stand(1, ("a",), inside=True)) == "", "the same course, and slower"
    assert verdict(waits, stand(1, ("a",), outside="recv")) == "", "it may be sent something"
    assert verdict(waits, stand(1, ("a",), outside="barrier", still_s=5.0)) == ""


def test_who_waits_elsewhere_has_parted():
    waits = stand(0, ("a", "b"), inside=True)
    text = verdict(waits, stand(1, ("a",), outside="barrier", line="train.py, line 3, in save", codes=b""))
    assert text.startswith("RanksDiffer")
    assert "rank 0 is in all-gather of b" in text
    assert "rank 1 waits in torch.distributed.barrier (train.py, line 3, in save)" in text
    assert "RanksDiffer" in verdict(waits, stand(1, ("a", "c")))
    assert "rank 0 to all-gather of b; rank 1 to all-gather of c" in verdict(waits, stand(1, ("a", "c", "d")))


def test_who_gives_no_sign_of_life_is_lost():
    waits, other = stand(0, ("a", "b"), inside=True), stand(1, ("a",), codes=b"")
    for silent in ((21.0, "stopped"), (21.0, "gone"), (46.0, ""), (46.0, "running")):
        text = verdict(waits, other, silent={1: silent})
        assert text.startswith("LostRank: rank 1 (pid 8 on host) has given no sign of life")
        assert "It was last in all-gather of a" in text
    for silent in ((15.0, "stopped"), (44.0, "running"), (44.0, "")):
        assert verdict(waits, other, silent={1: silent}) == ""


def test_who_ended_with_less_is_lost():
    waits = stand(0, ("a", "b"), inside=True)
    less, left = stand(1, ("a",), ended=True, codes=b""), {1: (11.0, "sleeping")}
    assert "rank 1 (pid 8 on host) has ended its part" in verdict(waits, less, silent=left)
    assert verdict(waits, stand(1, ("a", "b"), ended=True, codes=b""), silent=left) == "", "it was there"


@pytest.mark.parametrize("state", ["running", "gone", "zombie"])
def test_a_process_may_end_before_others_tell_of_it(state):
    """Its launcher sees it end first, and shows its own error."""
    fell = stand(1, ("a",), ended=True, codes=b"", exit="has ended with LookupError: a row")
    text = verdict(stand(0, ("a", "b"), inside=True), fell, silent={1: (9.0, state)})
    assert bool(text) == (state != "running")


def test_who_left_its_process_is_told_with_its_error():
    fell = {"ended": True, "codes": b"", "exit": "has ended with LookupError: a row"}
    left = {1: (11.0, "sleeping")}
    text = verdict(stand(0, ("a", "b"), inside=True), stand(1, ("a",), **fell), silent=left)
    assert text.startswith("LostRank: rank 1 (pid 8 on host) has ended with LookupError: a row. It was last in")
    waits, other = stand(0, ("a",), outside="barrier", codes=b""), stand(1, ("a",), **fell)
    assert "has ended with LookupError: a row" in verdict(waits, other, silent=left), "in others' collectives, too"
    assert verdict(stand(0, ("a",), outside="barrier", codes=b"", still_s=5.0), other, silent=left) == ""
    alive = stand(1, ("a",), **{**fell, "exit": ""})
    assert verdict(waits, alive, silent=left) == "", "it let its model go, and its process goes on"


def test_a_verdict_is_everybodys():
    waits = stand(0, ("a", "b"), inside=True)
    assert verdict(waits, stand(1, ("a",), verdict="so it is", lost=True)) == "LostRank: so it is"


@pytest.mark.parametrize("call", ["generate", "evaluate", "save_model", "state_dict"])
def test_what_only_some_ranks_call_is_named(call):
    text = verdict(stand(0, ("a", "b"), calls=(call,)), stand(1, ("a", "c")))
    assert f"`{call}` runs on rank 0 only" in text


def test_what_is_published_comes_back():
    one = stand(1, ("a", "ö"), inside=True, calls=("generate",), line="x", outside="barrier")
    assert Stand.from_bytes(one.to_bytes()) == one


def course(*names: str) -> tuple[int, bytes]:
    ledger = Ledger()
    for name in names:
        ledger.enter("gather", name)
    return ledger.entered, ledger.recent()


def test_the_first_difference_is_found_where_it_is_remembered():
    many = [str(number % 7) for number in range(RECENT + 500)]
    assert first_difference([course(*many), course(*many)]) is None
    assert first_difference([course(*many), course(*many[:-9])]) is None, "behind is not different"
    for place in (RECENT + 499, RECENT + 3, 900):
        other = [*many[:place], "x", *many[place + 1 :]]
        assert first_difference([course(*many), course(*other)]) == place
        assert first_difference([course(*other), course(*many), course(*many)]) == place


def test_a_frame_is_told_by_the_users_line():
    outside, line, calls = look_at(sys._getframe())
    assert (outside, calls) == ("", ())
    assert line.startswith("test_standstill.py, line ")
    assert line.endswith("in test_a_frame_is_told_by_the_users_line")


def parted(comm: Communicator) -> None:
    gathers(comm, f"model.layers.{comm.rank}", f"model.layers.{1 - comm.rank}")
    comm.totals(torch.ones(2), "the gradient norm")
    raise AssertionError("nothing was noticed")


def parted_for_a_number(comm: Communicator) -> None:
    gathers(comm, f"model.layers.{comm.rank}")
    comm.all_numbers(4)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("case", [parted, parted_for_a_number])
@pytest.mark.parametrize("size", [2, 3])
def test_courses_are_compared_with_the_norm(case, size, worlds: Worlds):
    """Where collectives match in size, ranks mix their weights and wait for nobody."""
    answers = worlds[size].run(told, case, False)
    assert {kind for kind, _, _ in answers} == {"RanksDiffer"}
    assert "model.layers.0" in answers[0][1]
    assert "model.layers.1" in answers[0][1]


@pytest.mark.slow
def test_over_a_store_ranks_see_each_other(broken: World, tmp_path: Path):
    kind, text = survivors(broken, stops_over_a_store, tmp_path)
    assert kind == "LostRank"
    assert "rank 1 (pid" in text


class Shown:
    """A board of two ranks in one process, of which one gives a sign of life and then none."""

    served = False

    def __init__(self) -> None:
        self.records: list[Stand] = []
        self.other = (1, Stand(1, "elsewhere", 7, 1, name="all-gather of a").to_bytes())
        self.pause = 0.0

    def publish(self, data: bytes) -> None:
        time.sleep(self.pause)
        self.records.append(Stand.from_bytes(data))

    def read(self) -> list[tuple[int, bytes] | None]:
        return [None, self.other]

    def entered(self, rank: int) -> int | None:
        return None

    def close(self) -> None:
        pass


def watching(
    patience: Patience, board: Shown | None = None, ledger: Ledger | None = None, *, rank: int = 0, cuda: bool = False
) -> tuple[Any, watchdog.Watchdog]:
    """Return a watchdog of a rank that waits in a collective, and looks only when it is told to."""
    board, ledger = board or Shown(), ledger or Ledger()
    ledger.enter("all-gather", "a")
    ledger.enter("all-gather", "b")
    with mock.patch.object(watchdog, "PATIENCE", patience):
        watched = watchdog.Watchdog(board, rank, ledger, cuda=cuda, abort=lambda: None)
    watched._over.set()
    watched._thread.join()
    return board, watched


def test_a_verdict_stays_in_every_later_record():
    board, watched = watching(Patience(beat=0.02, look=60.0))
    error = watched.broken(sys._getframe(), RuntimeError("connection reset"))
    watched._tick()
    assert [each.verdict for each in board.records[-2:]] == [str(error)] * 2
    assert board.records[-1].lost


def test_a_pause_of_the_whole_job_while_it_looks_is_no_silence():
    board, watched = watching(Patience(beat=0.1, look=0.0, silent=0.6))
    watched._tick()
    board.pause = 1.0
    watched._tick()
    board.pause = 0.0
    watched._tick()
    assert watched.verdict is None
    for _ in range(40):
        watched._tick()
        time.sleep(0.05)
        if watched.verdict is not None:
            break
    assert watched.verdict is not None, "it goes on to look"


def test_a_record_with_a_verdict_has_room_for_it():
    board, watched = watching(Patience(look=0.0))
    watched.verdict = Verdict("so it is" * 3000)
    watched._tick()
    assert max(len(each.to_bytes()) for each in board.records) < SLOT_BYTES - 64


class Hasty(Ledger):
    """Of a rank that goes on as soon as its codes were copied."""

    def recent(self) -> bytes:
        codes = super().recent()
        self.enter("all-gather", "c")
        return codes


def test_a_rank_that_goes_on_while_it_is_looked_at_has_not_parted():
    board, watched = watching(Patience(look=0.0), ledger=Hasty())
    watched._tick()
    told, other = board.records[-1], stand(1, ("a", "b", "c"))
    assert told.entered == 2
    assert first_difference([(told.entered, told.codes), (other.entered, other.codes)]) is None


def test_silence_is_counted_from_when_a_rank_waits():
    """Over a store records are not fetched between two waits."""
    _, watched = watching(Patience(beat=0.1, look=0.1, silent=0.5))
    watched._tick()
    time.sleep(0.15)
    watched._tick()
    assert watched._seen, "it has looked"
    for _ in range(6):
        watched.ledger.enter("all-gather", "a")
        watched._tick()
        time.sleep(0.1)
    watched._tick()
    assert 1 in watched._seen, "it has looked again"
    assert watched.verdict is None


class Failing(Shown):
    """A board that cannot be read once."""

    reads = 0

    def read(self) -> list[tuple[int, bytes] | None]:
        self.reads += 1
        if self.reads == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().read()


def test_a_look_that_fails_does_not_end_the_watch():
    """A rank without the thread gives no sign of life, and would be taken for a hung one."""
    board, ledger = Failing(), Ledger()
    ledger.enter("all-gather", "a")
    with mock.patch.object(watchdog, "PATIENCE", Patience(beat=0.02, look=0.0)):
        watched = watchdog.Watchdog(board, 0, ledger, cuda=False, abort=lambda: None)
    until = time.monotonic() + 3.0
    while board.reads < 3 and time.monotonic() < until:
        time.sleep(0.02)
    watched.stop()
    assert board.reads >= 3
    with mock.patch.object(watchdog.psutil, "Process", side_effect=OSError(errno.EMFILE, "Too many open files")):
        assert watched._state(Stand(1, watched.host, 7)) == ""


class Slow(Shown):
    """A board on which the thread's records are shown late."""

    def publish(self, data: bytes) -> None:
        if threading.current_thread().name == "ftkit-watchdog":
            time.sleep(0.2)
        super().publish(data)


def test_the_last_record_says_that_the_rank_has_ended():
    board = Slow()
    with mock.patch.object(watchdog, "PATIENCE", Patience(beat=0.02)):
        watched = watchdog.Watchdog(board, 0, Ledger(), cuda=False, abort=lambda: None)
    time.sleep(0.1)  # the thread is about to show a record
    watched.stop("has ended")
    time.sleep(0.3)
    assert (board.records[-1].ended, board.records[-1].exit) == (True, "has ended")


class Served(Shown):
    """What rank 1 of three sees once rank 0 has ended."""

    def __init__(self, *, served: bool) -> None:
        super().__init__()
        self.served = served

    def read(self) -> list[tuple[int, bytes] | None]:
        ended = Stand(0, "elsewhere", 7, 2, ended=True)
        return [(1, ended.to_bytes()), None, (1, Stand(2, "elsewhere", 8, 2).to_bytes())]


@pytest.mark.parametrize("served", [True, False])
def test_nobody_is_silent_where_the_store_has_ended(served):
    _, watched = watching(Patience(beat=0.1, look=0.0, silent=0.3), Served(served=served), rank=1, cuda=True)
    watched.ledger.leave()
    for _ in range(12):
        watched._tick()
        time.sleep(0.05)
    assert (watched.verdict is None) == served


def test_the_end_of_who_serves_the_store_is_seen_by_all():
    store = loopback_store()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    boards = [StoreBoard(each, rank, 2, 0.1) for rank, each in enumerate((store, client))]
    boards[1].publish(b"at work")
    boards[0].publish(b"the last")
    boards[0].close()
    began = time.monotonic()
    boards[0]._shared.linger()
    assert time.monotonic() - began > 0.3, "there is time to look at it"
    boards[1].publish(b"at work")
    until = time.monotonic() + 3.0
    while boards[1]._shared.seen[0] is None and time.monotonic() < until:
        time.sleep(0.02)
    seen = boards[1]._shared.seen[0]
    assert seen is not None
    assert seen[1] == b"the last"
    boards[1].close()


@pytest.mark.parametrize("where, lost", [("/x/torch/distributed/distributed_c10d.py", True), ("/x/hub/upload.py", False)])
def test_a_lost_connection_of_the_users_own_is_left_alone(where, lost):
    with pytest.raises(RuntimeError) as caught:
        exec(compile("raise RuntimeError('connection closed before message completed')", where, "exec"))
    assert comm_module.is_lost_connection(caught.value) == lost


def stops_over_a_store(comm: Communicator) -> None:
    with mock.patch.object(comm_module, "machine", return_value=(os.environ["RANK"], "")):
        other = Communicator(CPU)
    assert type(other._watchdog.board).__name__ == "StoreBoard"
    time.sleep(1.0)
    stops(other)
