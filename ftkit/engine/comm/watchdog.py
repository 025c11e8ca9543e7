"""A thread of each rank that shows where the rank stands, and ends it when it waits in vain.

About once a second it publishes a sign of life (`board.py`). While its own rank stands still it reads those of the others
and asks `judge` (`standstill.py`). A verdict ends the rank in one of two ways. A rank that waits in a collective of ftkit on
a CPU looks at `verdict` once a second and raises it, so that `finally` clauses of the user run. A rank that waits elsewhere
(in a collective that the user or accelerate called, or for a CUDA device) cannot be woken: its process group is aborted
where the backend can do that, and after some seconds the thread prints the message and ends the process.

What it refuses to judge: a rank that waits for one which computes, sleeps or uploads, however long; that is reminded of. A
call of C that keeps the interpreter's lock (`json.loads` of a huge text) keeps the thread from giving signs of life. So on
one machine the work of such a process counts as one: its time on a CPU grows, or it waits for a disk.
Cost: a record of some hundred bytes a second; nothing in the path of a step but the ledger's microsecond.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

import psutil

from ftkit.engine.comm.board import Board
from ftkit.engine.comm.ledger import Ledger
from ftkit.engine.comm.standstill import ENDED, Patience, Stand, Verdict, judge, look_at, lost
from ftkit.errors import UserError

PATIENCE = Patience()
"""Of every watchdog that is made from now on."""

WORKS = 0.05
"""Share of a CPU's time from which a process works: threads of a backend that look around take less."""

logger = logging.getLogger("ftkit")


@dataclass
class Working:
    """What was seen of a silent process.

    Args:
        cpu_s: seconds that it had spent on CPUs at the last look.
        looked: moment of the last look.
        worked: moment at which it was last known to work.
        disk: whether it has waited for a disk since the last look.
    """

    cpu_s: float
    looked: float
    worked: float
    disk: bool = False


class Watchdog:
    """Shows where this rank stands, and judges the others while it stands still.

    Args:
        board: where records are shown.
        rank: this rank in the group.
        ledger: ledger of this rank's collectives.
        cuda: whether collectives return before they are done.
        abort: ends the backend's collectives, as far as the backend can.
    """

    def __init__(self, board: Board, rank: int, ledger: Ledger, *, cuda: bool, abort: Callable[[], None]) -> None:
        self.board, self.rank, self.ledger, self.cuda, self.abort = board, rank, ledger, cuda, abort
        self.patience = PATIENCE
        self.verdict: Verdict | None = None
        self.taken = False
        self.pid, self.host = os.getpid(), socket.gethostname()
        self.main = threading.get_ident()
        self.ended = False
        self._place: tuple[object, ...] = ()
        self._since = self._ticked = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}
        self._stands: dict[int, Stand] = {}
        self._working: dict[int, Working] = {}
        self._reminded = self.patience.remind
        self._given = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._publish(self._stand())
        self._thread = threading.Thread(target=self._run, name="ftkit-watchdog", daemon=True)
        self._thread.start()

    # --- for the main thread

    def error(self) -> UserError:
        """Return the verdict as the error to raise; from now on the rank ends by itself."""
        assert self.verdict is not None
        self.taken = True
        return self.verdict.error()

    def differs(self, frame: FrameType) -> UserError:
        """Return the error for this rank's collective, which is not that of the others; they come to the same verdict.

        Args:
            frame: where this rank is.

        Cost: waits a few seconds for the other ranks to say where they are.
        """
        return self._await_verdict(frame, "ranks have come to different collectives", lost_rank=False)

    def broken(self, frame: FrameType, error: RuntimeError) -> UserError:
        """Return the error for a collective that the backend gave up, with what is known of the other ranks."""
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        return self._await_verdict(frame, f"the connection to another rank is lost ({first})", lost_rank=True)

    def _await_verdict(self, frame: FrameType, otherwise: str, *, lost_rank: bool) -> UserError:
        _, line, calls = look_at(frame)
        own = self._stand(line=line, calls=calls, still_s=self.patience.stuck, codes=self.ledger.recent())
        patience = Patience(**{**vars(self.patience), "stopped": 2 * self.patience.beat, "leave": 0.0})
        began = time.monotonic()
        deadline, left = began + 5 * self.patience.beat, began + self.patience.leave
        while True:
            self._publish(own)
            with self._lock:
                stands, silent = self._read(own)
                everybody = all(stand.codes or stand.ended or stand.verdict for stand in stands)
                gone = [s for s in stands if self._is_gone(*silent.get(s.rank, (0.0, "")))]
                # A launcher tells the first end as the cause: a rank that ends with an error of its own goes first.
                leaving = lost_rank and not gone and any(s.ended for s in stands) and time.monotonic() < left
                if not leaving and (everybody or lost_rank or time.monotonic() > deadline):
                    self.verdict = self.verdict or judge(stands, silent, self.ledger.names, patience)
                    if self.verdict is None and gone and lost_rank:
                        self.verdict = lost(gone[0], gone[0].exit or "is gone: its process has ended")
                if self.verdict is None and not leaving and time.monotonic() > deadline:
                    ended = [s for s in stands if s.ended]
                    where = "\n".join(f"  rank {s.rank} {s.place}" for s in stands)
                    self.verdict = (
                        lost(ended[0], ended[0].exit or ENDED)
                        if lost_rank and ended
                        else Verdict(f"{otherwise}:\n{where}", lost=lost_rank)
                    )
            if self.verdict is not None:
                self._show_verdict()
                self._wake_stopped()
                return self.error()
            time.sleep(self.patience.beat / 10)

    def _is_gone(self, silent_s: float, state: str) -> bool:
        """Whether a rank to which the connection is lost is the one that died."""
        return state in ("gone", "zombie") or (not state and silent_s > 3 * self.patience.beat)

    # --- the thread

    def _run(self) -> None:
        told = False
        while not self._over.wait(self.patience.beat):
            try:
                self._tick()
            except Exception:  # of a system without a file to spare: without this thread the rank would be taken for hung
                if not told:
                    logger.warning("the watchdog of rank %d could not look, and goes on", self.rank, exc_info=True)
                told = True

    def _tick(self) -> None:
        """Look once."""
        now = time.monotonic()
        if now - self._ticked > 5 * self.patience.beat:  # this process was stopped: the others could not be seen either
            self._seen.clear()
            self._working.clear()
            self._since = now
        self._ticked = now
        if self._given:
            self._end_process_if_it_stays(now)
            return
        outside, line, calls = look_at(sys._current_frames().get(self.main))
        place = self.ledger.entered, self.ledger.left, outside
        if place != self._place:
            self._place, self._since, self._reminded = place, now, self.patience.remind
            with self._lock:  # others count as silent from when this rank begins to wait for them
                self._seen.clear()
                self._working.clear()
        still_s = now - self._since
        inside = self.ledger.inside
        looks = still_s >= self.patience.look
        own = self._stand(
            entered=self.ledger.entered,  # before the codes: this rank may go on meanwhile, and newer codes do no harm
            inside=inside,
            outside="" if inside else outside,
            line=line if looks else "",
            calls=calls,
            still_s=still_s,
            codes=self.ledger.recent() if looks else b"",
        )
        self._publish(own)
        if looks and (own.waits or self.cuda):
            with self._lock:
                stands, silent = self._read(own)
                if time.monotonic() - now > 5 * self.patience.beat:  # stopped meanwhile: the next look begins anew
                    return
                self.verdict = self.verdict or judge(stands, silent, self.ledger.names, self.patience)
            if self.verdict is not None:
                self._give(now)
            elif own.waits:
                self._remind(stands, still_s)

    def _give(self, now: float) -> None:
        """Begin to end this rank."""
        self._given = now
        self._show_verdict()
        self._wake_stopped()
        if self.cuda:
            self.abort()

    def _show_verdict(self) -> None:
        assert self.verdict is not None
        self._publish(self._stand())

    def _wake_stopped(self) -> None:
        """Let stopped processes of this machine go on: they find the verdict and end, where SIGTERM would wait with them."""
        for stand in self._stands.values():
            if self._state(stand) == "stopped":
                with suppress(OSError):
                    os.kill(stand.pid, signal.SIGCONT)

    def _end_process_if_it_stays(self, now: float) -> None:
        """End the process if it has not raised the verdict, or waits for others once more after it did."""
        outside, _, _ = look_at(sys._current_frames().get(self.main))
        if self.taken and not outside:
            self._given = now  # it unwinds
        elif now - self._given > self.patience.grace:
            assert self.verdict is not None
            os.write(2, f"ftkit (rank {self.rank}): {self.verdict.text}\n".encode())
            os._exit(self.verdict.error().exit_code)

    def _remind(self, stands: list[Stand], still_s: float) -> None:
        """Say for whom this rank waits, if it is the first of those that wait; again after twice the time."""
        waiting = [stand.rank for stand in stands if stand.waits]
        if still_s < self._reminded or self.rank != min(waiting, default=-1):
            return
        self._reminded = 2 * still_s
        where = "; ".join(f"rank {stand.rank} {stand.place}" for stand in stands if not stand.waits)
        if where:
            logger.warning("rank %d waits for %.0f s in %s; %s", self.rank, still_s, self.ledger.name, where)

    # --- records

    def _stand(self, **fields: object) -> Stand:
        ledger = self.ledger
        known = {"inside": ledger.inside, "name": ledger.name, "entered": ledger.entered, "ended": self.ended}
        if fields.get("codes"):
            known["trail"] = ledger.trail()
        return Stand(self.rank, self.host, self.pid, **{**known, **fields})  # type: ignore[arg-type]  # fields of several types

    def _publish(self, stand: Stand) -> None:
        """Show a record; once there is a verdict, with that in place of the course, whichever thread came to it."""
        if self.verdict is not None:
            stand = replace(stand, verdict=self.verdict.text, lost=self.verdict.lost, codes=b"", trail=())
        self.board.publish(stand.to_bytes())

    def _read(self, own: Stand) -> tuple[list[Stand], dict[int, tuple[float, str]]]:
        """Return the stands of all ranks that have published, and of the others how long they are silent and their state.

        A process that works is not silent. Where rank 0 serves the records and has ended, there are no signs to be had.
        """
        now = time.monotonic()
        silent: dict[int, tuple[float, str]] = {}
        for rank, told in enumerate(self.board.read()):
            if rank == self.rank:
                continue
            if told is not None:
                beats, data = told
                if rank not in self._seen or self._seen[rank][0] != beats:
                    self._seen[rank] = beats, now
                    self._working.pop(rank, None)
                    self._stands[rank] = Stand.from_bytes(data)
            entered = self.board.entered(rank)
            if entered is not None and rank in self._stands and entered > self._stands[rank].entered:  # since its record
                name = self.ledger.name_of(entered) or self._stands[rank].name
                self._stands[rank] = replace(self._stands[rank], entered=entered, name=name, codes=b"", still_s=0.0)
            if rank in self._seen:
                state = self._state(self._stands[rank])
                silent[rank] = now - self._last_sign(rank, state, now), state
        if self.board.served and 0 in self._stands and self._stands[0].ended:
            silent.clear()
        return [own if rank == self.rank else self._stands[rank] for rank in sorted({*self._stands, self.rank})], silent

    def _last_sign(self, rank: int, state: str, now: float) -> float:
        """Return when a rank last published, or was last seen to work where this machine knows its process.

        Of one that has ended its part it is the former: its work is no longer for the others.
        """
        beats_at = self._seen[rank][1]
        if self._stands[rank].ended or state in ("", "stopped", "gone", "zombie") or now - beats_at < 3 * self.patience.beat:
            return beats_at
        try:
            times = psutil.Process(self._stands[rank].pid).cpu_times()
        except (psutil.Error, OSError):
            return beats_at
        cpu_s = float(times.user + times.system)
        seen = self._working.setdefault(rank, Working(cpu_s, now, beats_at))
        seen.disk |= state == "disk-sleep"
        if (passed := now - seen.looked) >= max(1.0, self.patience.silent / 9):  # time is counted in ticks of 10 ms
            if seen.disk or cpu_s - seen.cpu_s >= WORKS * passed:
                seen.worked = now
            seen.cpu_s, seen.looked, seen.disk = cpu_s, now, False
        return seen.worked

    def _state(self, stand: Stand) -> str:
        """Return what a rank's process does, where this machine knows it."""
        if stand.host != self.host:
            return ""
        try:
            return str(psutil.Process(stand.pid).status())
        except psutil.NoSuchProcess:
            return "gone"
        except (psutil.Error, OSError):  # no file to spare: it lets that pass as it is
            return ""

    # --- the end

    def stop(self, exit: str = "") -> None:
        """Show that this rank has ended its part, and end the thread; nothing in a process that was forked from it.

        Args:
            exit: how its process ends, in words; empty if it does not.
        """
        if os.getpid() != self.pid or self._over.is_set():
            return
        self._over.set()
        if threading.current_thread() is not self._thread:  # it must not show an older record after the last one
            self._thread.join(2 * self.patience.beat + 1)
        self.ended = True
        if self.verdict is None:
            self._publish(self._stand(exit=exit))
        self.board.close()
