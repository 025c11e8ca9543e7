"""A request to all ranks and every way it can go wrong, with workers that are played: what each says is put in a queue."""

import os
import queue
import signal

import pytest

from ftkit.errors import UserError
from ftkit.notebook import Interrupted, RankFailed, Ranks, Refused
from ftkit.notebook.exchange import Exchange


class Messages(queue.Queue):
    """Messages of workers; the user interrupts the kernel `presses` times while it waits for the first."""

    def __init__(self, presses):
        super().__init__()
        self.presses = presses

    def get(self, block=True, timeout=None):
        if self.presses:
            self.presses -= 1
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)  # the handler alone: pytest gets no signal
            raise queue.Empty
        return super().get(block, timeout)


class Played:
    """Workers that say what they were given; `dead` are the exit codes of those that have ended."""

    def __init__(self, *said, dead=None, ranks=2, tail=(), presses=0):
        self.messages = Messages(presses)
        self.ranks, self.pids = ranks, {rank: 100 + rank for rank in range(ranks)}
        self.sent, self.killed, self._dead, self._tail = [], False, dead or {}, list(tail)
        for rank, message in said:
            self.messages.put((rank, {"number": 0, **message} if message is not None else None))

    def send(self, rank, message):
        self.sent.append((rank, message))

    def dead(self):
        return self._dead

    def tail(self, rank):
        return self._tail

    def kill(self):
        self.killed = True


class Shown:
    def __init__(self):
        self.taken, self.said = [], []

    def take(self, message):
        self.taken.append(message)

    def say(self, text):
        self.said.append(text)


def failed(kind, message, *lines, number=0, **more):
    return {"failed": {"kind": kind, "message": message, "lines": list(lines), **more}, "number": number}


def ask(crew, view=None, on_interrupt=""):
    return Exchange(crew, view or Shown(), 30.0, lambda: "start again", on_interrupt).ask("cell", source="1")


def test_all_are_asked_and_rank_0_answers():
    view = Shown()
    crew = Played((1, {"done": 1}), (0, {"out": "x", "stream": "stdout"}), (0, {"done": 0}))
    assert ask(crew, view) == 0
    assert [rank for rank, _ in crew.sent] == [0, 1]
    assert crew.sent[0][1] == {"do": "cell", "with": {"source": "1"}, "cwd": os.getcwd(), "number": 0}
    assert [(each["out"], each["stream"]) for each in view.taken] == [("x", "stdout")]


def test_an_answer_to_an_earlier_request_is_not_this_ones():
    late, own = {"done": "late", "number": 6}, {"done": "own", "number": 7}
    crew = Played((0, late), (1, late), (0, own), (1, failed("E", "late", number=6)), (1, own))
    assert Exchange(crew, Shown(), 30.0, lambda: "", number=7).ask("cell", source="1") == "own"
    assert {message["number"] for _, message in crew.sent} == {7}


def test_the_error_is_that_of_the_rank_that_had_one_of_its_own():
    lost = failed("RuntimeError", "Connection closed by peer [127.0.0.1]")
    crew = Played((0, lost), (1, failed("KeyError", "'k'", "  cell 1, line 2, in f: x['k']")))
    with pytest.raises(RankFailed) as caught:
        ask(crew)
    assert caught.value.rank == 1
    assert str(caught.value) == "rank 1 raised KeyError: 'k'\n  cell 1, line 2, in f: x['k']"
    assert not crew.killed


def test_what_all_ranks_raise_is_told_once():
    with pytest.raises(RankFailed, match=r"\Aranks 0, 1 and 2 raised NameError: x\Z"):
        ask(Played(*((rank, failed("NameError", "x")) for rank in range(3)), ranks=3))


def test_a_refusal_has_the_notebooks_words_and_stays_a_user_error():
    told = failed("UserError", "", refused="continue it with --resume auto", exit_code=2)
    with pytest.raises(UserError, match='continue it with resume="auto"') as caught:
        ask(Played((0, told), (1, told)))
    assert isinstance(caught.value, Refused)


def test_a_dead_worker_is_the_cause_and_costs_the_others():
    lost = failed("RuntimeError", "Connection reset by peer")
    crew = Played((0, lost), (1, None), dead={1: -9}, tail=["terminate called"])
    with pytest.raises(RankFailed) as caught:
        ask(crew)
    told = str(caught.value)
    assert told.startswith("rank 1 (pid 101) was killed by SIGKILL")
    assert "The other ranks were ended; start again." in told
    assert told.endswith("its last lines:\n  terminate called")
    assert crew.killed


def test_the_memory_guards_report_is_what_is_told():
    crew = Played((1, {"left": "host memory is running out", "exit_code": 75}), (1, None), dead={0: -9, 1: 75})
    with pytest.raises(Refused, match="host memory is running out\nThe ranks were ended; start again"):
        ask(crew)


def test_the_first_interrupt_is_handed_on_and_the_second_ends_the_ranks():
    crew, view = Played(presses=2), Shown()
    with pytest.raises(Interrupted, match="the ranks were ended at once; start again"):
        ask(crew, view, "stopping after this step")
    assert view.said == ["stopping after this step"]
    assert crew.sent[2:] == [(0, {"interrupt": True}), (1, {"interrupt": True})]
    assert crew.killed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ranks_that_were_interrupted_say_where_and_keep_their_state():
    one = failed("KeyboardInterrupt", "", "  cell 2, line 3, in <module>: time.sleep(60)")
    with pytest.raises(KeyboardInterrupt) as caught:
        ask(Played((0, one), (1, one)))
    told = "interrupted at cell 2, line 3, in <module>: time.sleep(60); the ranks keep their state"
    assert str(caught.value) == told


def test_an_interrupt_of_what_the_ranks_finish_first_ends_the_users_cell():
    answer = {"done": ["x"], "number": 1}
    crew, ranks = Played((0, answer), (1, answer), presses=1), Ranks(2)
    ranks._crew = crew
    with pytest.raises(Interrupted, match="the ranks have finished this first, and keep their state"):
        ranks.generate("1+1?")
    assert not crew.killed


def test_an_interrupt_within_the_engine_does_not_promise_the_state():
    one, other = failed("KeyboardInterrupt", ""), failed("KeyboardInterrupt", "")
    other["failed"]["engine"] = True
    with pytest.raises(Interrupted, match="do not train on with it; start again") as caught:
        ask(Played((0, one), (1, other)))
    assert "keep their state" not in str(caught.value)
