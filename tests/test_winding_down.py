"""Signals while ranks wind down, and what the launcher makes of ranks that lost another one."""

from __future__ import annotations

import atexit
import signal
from pathlib import Path

import pytest

from ftkit.errors import LostRank, RanksDiffer, UserError, refusal
from ftkit.launch import local as launch
from ftkit.launch.supervisor import ENDING, Failure, RankError, explain


def ignored() -> set[int]:
    """Return the signals that this process ignores."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def note_at_the_end(stop: launch.Stop, folder: str) -> str:
    def note() -> None:
        (Path(folder) / f"ignored-{stop.rank}").write_text(" ".join(map(str, sorted(ignored()))))

    atexit.register(note)
    return "done"


@pytest.mark.slow
def test_a_rank_whose_work_is_done_dies_of_no_further_interrupt(tmp_path: Path):
    """Python gives a handler's signal its default back when the interpreter ends: a late Ctrl-C killed such a rank."""
    told = launch.start(f"{__name__}:note_at_the_end", (str(tmp_path),), 2, environ={})
    assert told == "done"
    for rank in range(2):
        assert set(ENDING) <= {*map(int, (tmp_path / f"ignored-{rank}").read_text().split()), signal.SIGHUP}


@pytest.mark.parametrize(
    "killed", [Failure(-signal.SIGKILL, time_ns=9), Failure(1, "KeyError: 'x'", "line", time_ns=9)], ids=["killed", "raised"]
)
def test_a_rank_that_lost_another_is_no_cause(killed: Failure):
    waiting = Failure(LostRank.exit_code, refusal="rank 1 is gone", time_ns=3)
    error = explain({0: waiting, 1: killed, 2: waiting}, {0: 10, 1: 11, 2: 12})
    assert isinstance(error, RankError)
    assert error.rank == 1


def test_a_rank_that_lost_another_may_be_started_again():
    error = explain({0: Failure(LostRank.exit_code, refusal="rank 1 has ended its part")}, {0: 10})
    assert isinstance(error, RankError), "what --max-restarts restarts"
    assert "rank 1 has ended its part" in str(error)
    error = explain({0: Failure(RanksDiffer.exit_code, refusal="they do not do the same")}, {0: 10})
    assert isinstance(error, UserError), "another start would not help"


def test_a_rank_that_was_ended_without_a_word_is_not_blamed():
    """The watchdog's thread ends a rank that cannot raise; it has printed the reason."""
    waiting, ended = Failure(LostRank.exit_code, refusal="rank 2 is gone", time_ns=3), Failure(LostRank.exit_code)
    assert "rank 2 is gone" in str(explain({0: waiting, 1: ended}, {0: 10, 1: 11}))
    assert "rank 1 (pid 11) could not go on without another rank" in str(explain({1: ended}, {1: 11}))
    assert explain({1: ended, 2: Failure(3)}, {1: 11, 2: 12}).rank == 2


def test_codes_keep_the_kind_of_an_error():
    assert type(refusal("x", LostRank("x").exit_code)) is LostRank
