"""The ranks of a node while they run: how each ended, whether each still answers, and what the user asked for.

A rank answers by touching a file once a second from a thread of its own; SIGSTOP stops all threads, and so does a call
that holds the interpreter for good. Ends are read without reaping the process, which is the launcher's business. When
ranks have failed, `explain` chooses the cause: a rank whose memory guard spoke goes before one killed by a signal, that
before one that raised, an error of its own before a lost connection, the earlier before the later.

It refuses to guess on a rank that runs but is silent for less than two minutes. What it costs: a poll ten times a
second, and a stopped rank is named after 15 s, not at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ftkit.errors import MemoryShort, refusal

if TYPE_CHECKING:  # the door catches the errors of this file, and must not pay for torch
    from torch.distributed.elastic.multiprocessing.api import PContext

POLL_SECONDS = 0.1
BEAT_SECONDS = 1.0
_GONE = (ProcessLookupError, psutil.NoSuchProcess)
# A stopped process is known for what it is; one that runs but does not answer may hold the interpreter in a long call.
STOPPED_SECONDS = 15.0
SILENT_SECONDS = 120.0
# Time the other ranks get to write down their own errors, so that the cause can be told from its consequences.
GRACE_SECONDS = 1.5
TRACEBACK_LINES = 12

RESUME = "resume with --resume auto if checkpoints were saved (output.save_every_steps)"

LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket|remote process|NCCL communicator|"
    r"ncclRemoteError|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


class RankError(RuntimeError):
    """A rank died; the text names it and shows its error.

    Args:
        rank: The rank that failed first.
        text: One screen for the user.
    """

    asked = False
    """Whether the user had asked the run to end by then."""

    def __init__(self, rank: int, text: str):
        self.rank = rank
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, str(self))


class StoppedError(RuntimeError):
    """The user ended the run at once, with a second Ctrl-C or before there was anything to save."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended.

    Args:
        exit_code: Negative: the number of the signal that killed it.
        message: `Type: text` of the exception, if one was raised.
        traceback: Its traceback, if one was raised.
        refusal: Text of a `UserError`, if that was raised.
        time_ns: When the error was written, nanoseconds since the epoch.
    """

    exit_code: int
    message: str = ""
    traceback: str = ""
    refusal: str = ""
    time_ns: int = 0


@dataclass
class Asked:
    """How often the user asked this process to end."""

    times: int = 0


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals by which a user asks a run to end."""


@contextmanager
def counted_signals(numbers: Sequence[signal.Signals] = ENDING) -> Iterator[Asked]:
    """Count signals instead of dying of them, and restore the handlers afterwards; not SIGHUP where nohup silenced it."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():  # a notebook's thread: signals are not ours
        yield asked
        return

    def count(number: int, frame: Any) -> None:
        asked.times += 1

    silenced = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []  # nohup
    before = {number: signal.signal(number, count) for number in numbers if number not in silenced}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Watch:
    """The ranks while they run: their ends, their heartbeats, the user's signals."""

    context: PContext
    folder: Path
    ranks: int
    say: Callable[[str], None]
    asked: Asked
    forwarded: bool = False
    exit_codes: dict[int, int] = field(default_factory=dict)
    # For each rank the last heartbeat seen and when this process saw it (monotonic seconds).
    beats: dict[int, tuple[int, float]] = field(default_factory=dict)
    looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.processes = []  # psutil knows them by number and time of birth: a number used again is not killed
        for pid in self.context.pids().values():
            with suppress(*_GONE):
                self.processes.append(psutil.Process(pid))

    def wait(self) -> Any:
        """Wait for the end of all ranks; see `start`."""
        while True:
            self._note_ends()
            if self.exit_codes:
                self._wait_for_the_others_words()
                raise self._cause()
            result = self.context.wait(0)
            if result is not None and not result.is_failed():
                return result.return_values[0]
            if result is not None:  # it failed since the line above, and the launcher has ended the others
                self.exit_codes.update({rank: failure.exitcode for rank, failure in result.failures.items()})
                raise self._cause()
            self._look_at_beats()
            self._forward()
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End every rank at once, with the processes it started."""
        for process in self.processes:
            with suppress(*_GONE):
                for each in [*process.children(recursive=True), process]:
                    with suppress(*_GONE):
                        each.kill()

    def _note_ends(self) -> None:
        """Note the exit code of each rank that ended."""
        for rank, pid in self.context.pids().items():
            if rank in self.exit_codes:
                continue
            code = exit_code(pid) if hasattr(os, "waitid") else self._launchers_exit_code(pid)
            if code is not None:
                self.exit_codes[rank] = code

    def _launchers_exit_code(self, pid: int) -> int | None:
        """Return a rank's exit code from the launcher's own handle: macOS has no `os.waitid` before Python 3.13.

        The handle reaps the process and remembers its code, so the launcher finds it as well.
        """
        started = self.context._pc  # type: ignore[attr-defined]  # a context of functions has it
        handles = [] if started is None else started.processes
        return next((handle.exitcode for handle in handles if handle.pid == pid), None)

    def _wait_for_the_others_words(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while len(self.exit_codes) < self.ranks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._note_ends()

    def _cause(self) -> Exception:
        failures = {rank: self._failure(rank, code) for rank, code in self.exit_codes.items()}
        return explain(failures, self.context.pids())

    def _failure(self, rank: int, exit_code: int) -> Failure:
        refused, raised = self.folder / f"rank-{rank}.refused", Path(self.context.error_files[rank])
        if refused.exists():
            return Failure(exit_code, refusal=refused.read_text(encoding="utf-8"), time_ns=refused.stat().st_mtime_ns)
        if not raised.exists():
            return Failure(exit_code)
        try:
            told = json.loads(raised.read_text(encoding="utf-8"))["message"]
        except (ValueError, KeyError):  # killed while it wrote
            return Failure(exit_code)
        stack = told["extraInfo"]["py_callstack"]
        return Failure(exit_code, told["message"], stack, time_ns=raised.stat().st_mtime_ns)

    def _look_at_beats(self) -> None:
        """Name and end a rank that does not answer."""
        now = time.monotonic()
        if now - self.looked > 5 * BEAT_SECONDS:  # this process was itself stopped (Ctrl-Z): they have had no chance
            self.beats.clear()
        self.looked = now
        for rank, pid in self.context.pids().items():
            path = self.folder / f"rank-{rank}.beat"
            beat = path.stat().st_mtime_ns if path.exists() else 0
            if rank not in self.beats or self.beats[rank][0] != beat:
                self.beats[rank] = (beat, now)
                continue
            silent_seconds = now - self.beats[rank][1]
            if silent_seconds < STOPPED_SECONDS:
                continue
            state = state_of(pid)
            if state == psutil.STATUS_STOPPED or (beat and silent_seconds > SILENT_SECONDS):
                raise RankError(
                    rank,
                    f"rank {rank} (pid {pid}) has not answered for {silent_seconds:.0f} s: its process is {state}. "
                    f"The run was ended; {RESUME}.",
                )

    def _forward(self) -> None:
        """Hand the user's wish to end to the ranks, once and when all can hear it; kill them on the second."""
        if self.asked.times >= 2:
            raise StoppedError(f"the run was ended at once; {RESUME}")
        listening = all((self.folder / f"rank-{rank}.beat").exists() for rank in range(self.ranks))
        if self.asked.times == 1 and not self.forwarded and listening:
            self.forwarded = True
            self.say("ending after this step, with a checkpoint; Ctrl-C again ends at once and loses it")
            for pid in self.context.pids().values():
                with suppress(*_GONE):
                    os.kill(pid, signal.SIGINT)


def exit_code(pid: int) -> int | None:
    """Return the exit code of a child, negative for a signal, without reaping it; None while it runs."""
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the launcher reaped it and found nothing to complain of
        return 0
    if end is None:
        return None
    return -end.si_status if end.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else end.si_status


def state_of(pid: int) -> str:
    """Return what a process does, in psutil's words, or 'gone'."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def explain(failures: Mapping[int, Failure], pids: Mapping[int, int], way_out: str = RESUME) -> Exception:
    """Choose the rank whose failure is the cause, and say it as the error to raise.

    Args:
        failures: How each rank that ended did so.
        pids: Process number of each rank.
        way_out: What the user may do now.

    Returns:
        A `UserError` if that rank refused the user's input, else a `RankError`.
    """

    def order(rank: int) -> tuple[int, int, int]:
        failure = failures[rank]
        told = bool(failure.refusal or failure.message)
        if not told:
            # Without a word: killed from outside, or it left; torch's own watchdog aborts because another rank is gone.
            kind = 0 if failure.exit_code < 0 and failure.exit_code != -signal.SIGABRT else 2
        else:
            kind = 3 if LOST_CONNECTION.search(failure.message) and not failure.refusal else 1
        known = refusal(failure.refusal, failure.exit_code) if failure.refusal else None
        if isinstance(known, MemoryShort):
            kind = -1  # whoever the kernel killed then, died of the same
        return kind, failure.time_ns, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    if failure.refusal:
        return refusal(failure.refusal, failure.exit_code)
    name = f"rank {rank} (pid {pids[rank]})"
    resume = f"The other ranks were ended; {way_out}."
    if failure.message:
        tail = failure.traceback.rstrip().splitlines()[-TRACEBACK_LINES:]
        return RankError(rank, "\n".join([f"{name} raised {failure.message}", "", *tail, "", resume]))
    if failure.exit_code < 0:
        hint = " (the kernel does that when host memory runs out)" if failure.exit_code == -signal.SIGKILL else ""
        return RankError(rank, f"{name} was killed by {signal_name(-failure.exit_code)}{hint}. {resume}")
    return RankError(rank, f"{name} ended with exit code {failure.exit_code} before its work was done. {resume}")


def signal_name(number: int) -> str:
    """Return what a signal is called."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
