"""One request to all workers, from the question to the last answer: what is shown meanwhile, and every way it can go wrong.

A rank that died, waits in vain or no longer answers costs all of them: they are ended, and the error says which rank it was,
what is known, and what to do. An error of the user's code costs nothing where no other rank waits for the one that raised.

It refuses to wait for ever: see `hang` and `watch`. What it costs: a stack a second from each rank.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import psutil

from ftkit.errors import UserError, refusal
from ftkit.launch.ranks import GRACE_SECONDS, LOST_CONNECTION, POLL_SECONDS, Failure, counted_signals, explain
from ftkit.notebook.channel import Message
from ftkit.notebook.crew import Crew
from ftkit.notebook.failures import Interrupted, RankFailed, Refused, in_notebook
from ftkit.notebook.hang import Frame, Hangs

BEAT_SECONDS = 1.0
"""Between two questions where the ranks are."""
STOPPED_SECONDS = 15.0
"""Silence after which a rank whose process is stopped is ended."""
SILENT_SECONDS = 120.0
"""Silence after which any rank is ended: one call may hold the interpreter for long."""
AFTER_FAILURE_SECONDS = 5.0
"""That a rank may wait for one that has raised or was interrupted: nobody will come."""
TAIL_LINES = 6
"""Of what a dead worker wrote past Python, that its error shows."""


def state_of(pid: int) -> str:
    """Return the state of a process in psutil's words, or `gone`."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


class View(Protocol):
    """What shows the user how a request goes."""

    def take(self, message: Message) -> None:
        """Show what a rank said."""

    def say(self, text: str) -> None:
        """Show a line of ours."""


class Exchange:
    """A request on its way.

    Args:
        crew: The workers that are asked.
        view: Where the exchange is shown.
        hang_seconds: How long a rank may wait for one that does not come.
        way_out: Returns what the user can do once the ranks were ended.
        on_interrupt: What is said of the first interrupt.
        number: Number of the request, which its answers bear; 0 is that to join.
    """

    def __init__(
        self,
        crew: Crew,
        view: View,
        hang_seconds: float,
        way_out: Callable[[], str],
        on_interrupt: str = "",
        number: int = 0,
    ) -> None:
        self.number = number
        self.shows = True  # until the view fails
        self.crew, self.view, self.way_out, self.on_interrupt = crew, view, way_out, on_interrupt
        self.running = set(range(crew.ranks))
        self.answers: dict[int, Message] = {}
        self.failed: dict[int, Message] = {}
        self.hangs = Hangs(hang_seconds)
        self.interrupts = 0
        self.doubted = False  # whether a line was said about a rank that waits
        self.failed_s = math.inf  # when the first failed
        now = time.monotonic()
        self.heard_s = dict.fromkeys(self.running, now)
        self.looked_s = now
        self.asked = 0

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Ask every rank for something, wait for all, and return rank 0's answer.

        Raises:
            Refused: What the user gave cannot be used. RankFailed: A rank raised, died, hangs or does not answer.
            Interrupted: The user interrupted the kernel, and the ranks' code ended of it.
        """
        question = {"do": verb, "with": arguments, "cwd": os.getcwd(), "number": self.number}
        return self._answer(question)

    def wait(self) -> Any:
        """Wait for the answers to what all were asked for; as `ask`."""
        return self._answer(None)

    def _answer(self, question: Message | None) -> Any:
        with counted_signals((signal.SIGINT,)) as signals:  # before the first is asked: none is asked alone
            if question is not None:
                for rank in range(self.crew.ranks):
                    self.crew.send(rank, question)
            while self.running:
                self._take()
                self._look()
                self._hear(signals)
        if self.failed:
            self._raise_failure("")
        return self.answers[0]["done"]

    # --- messages

    def _take(self) -> None:
        """Take what the workers said."""
        try:
            rank, message = self.crew.messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        while True:
            self._take_one(rank, message)
            try:
                rank, message = self.crew.messages.get_nowait()
            except queue.Empty:
                return

    def _take_one(self, rank: int, message: Message | None) -> None:
        if message is None:
            self._died()
        elif "where" in message:
            self.heard_s[rank] = time.monotonic()
            frames = [Frame(**each) for each in message["frames"]]
            self.hangs.note(rank, frames, message["cpu_s"], time.monotonic())
        elif "left" in message:
            self.failed[rank] = message  # its end follows
        elif "failed" in message or "done" in message:
            if message["number"] != self.number:
                return  # to an earlier request, which nobody waited for to the end
            self.running.discard(rank)
            self.answers[rank] = message
            if "failed" in message:
                self.failed[rank] = message["failed"]
                self.failed_s = min(self.failed_s, time.monotonic())
        else:
            if "step" in message:
                self.hangs.forget()
            self._show(self.view.take, message)

    def _show(self, show: Callable[[Any], None], what: Any) -> None:
        """Show something; a view that fails costs what it would have shown, and not the request."""
        if not self.shows:
            return
        try:
            show(what)
        except Exception as error:
            self.shows = False
            text = f"the display failed ({type(error).__name__}: {error}); the ranks go on without it"
            print(text, file=sys.stderr, flush=True)

    # --- what can go wrong

    def _look(self) -> None:
        """Ask each rank once a second where it is, and judge what was heard."""
        now = time.monotonic()
        if now - self.looked_s < BEAT_SECONDS:
            return
        if now - self.looked_s > 5 * BEAT_SECONDS:  # this process was itself stopped: they have had no chance
            self.hangs.forget()
            self.heard_s = dict.fromkeys(self.heard_s, now)
        self.looked_s = now
        self.asked += 1
        for rank in self.running:
            self.crew.send(rank, {"where": self.asked})
            self._look_at_silence(rank, now - self.heard_s[rank])
        ended = {rank: self._became(rank) for rank in self.answers}
        limit = min(AFTER_FAILURE_SECONDS, self.hangs.limit_s) if self.failed or self.interrupts else None
        hang = self.hangs.hang(self.running, ended, limit)
        if hang is not None:
            self.crew.kill()
            rank, story = hang
            if self.failed:
                waited = ", ".join(f"rank {each}" for each in sorted(self.running))
                self._raise_failure(f"{waited} waited for it in {self.hangs.stands[rank].collective}, so the")
            raise RankFailed(rank, f"{story}\nThe ranks were ended; {self.way_out()}.")
        if self.failed and not self.doubted and now - self.failed_s > AFTER_FAILURE_SECONDS:  # they compute, or CUDA waits
            self.doubted = True
            waited = ", ".join(f"rank {each}" for each in sorted(self.running))
            self._show(self.view.say, f"{self._told_failure()[1]}\nwaiting for {waited}; interrupt the kernel to end it")
        if not self.doubted and (doubt := self.hangs.doubt(self.running)) is not None:
            self.doubted = True
            self._show(self.view.say, doubt)

    def _became(self, rank: int) -> str:
        return "raised" if rank in self.failed else "has ended its cell"

    def _look_at_silence(self, rank: int, silent_seconds: float) -> None:
        """End the ranks where one does not answer: it is stopped, or one call of it holds the interpreter."""
        if silent_seconds < STOPPED_SECONDS:
            return
        pid = self.crew.pids[rank]
        state = state_of(pid)
        if state == "stopped" or silent_seconds > SILENT_SECONDS:
            self.crew.kill()
            raise RankFailed(
                rank,
                f"rank {rank} (pid {pid}) has not answered for {silent_seconds:.0f} s: its process is {state}. The ranks "
                f"were ended; {self.way_out()}.",
            )

    def _died(self) -> NoReturn:
        """Raise what became of a worker that is gone, once the others have had their word."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and len(self.crew.dead()) + len(self.failed) < self.crew.ranks:
            try:
                rank, message = self.crew.messages.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if message is not None:
                self._take_one(rank, message)
        dead = self.crew.dead()
        failures = {rank: self._failure(rank, code) for rank, code in dead.items()}
        failures |= {rank: self._failure(rank, 1) for rank in self.failed if rank not in dead}
        self.crew.kill()
        if not failures:  # it closed its socket and lives: nothing that ours do
            raise RankFailed(0, f"a worker broke off. The ranks were ended; {self.way_out()}.")
        error = explain(failures, self.crew.pids, self.way_out())
        if isinstance(error, UserError):
            told = refusal(in_notebook(str(error)), error.exit_code)
            raise Refused(f"{told}\nThe ranks were ended; {self.way_out()}.") from told
        rank = error.rank if hasattr(error, "rank") else min(failures)
        tail = self.crew.tail(rank)[-TAIL_LINES:]
        said = ["", "its last lines:", *(f"  {line}" for line in tail)] if tail else []
        raise RankFailed(rank, "\n".join([str(error), *said]))

    def _failure(self, rank: int, exit_code: int) -> Failure:
        told = self.failed.get(rank, {})
        if "left" in told:
            return Failure(told["exit_code"], refusal=told["left"])
        message = f"{told['kind']}: {told['message']}" if told else ""
        return Failure(exit_code, message, "\n".join(told.get("lines", ())), refusal=told.get("refused", ""))

    def _raise_failure(self, ended: str) -> NoReturn:
        """Raise what ranks answered that failed: one error, with the names of those that had it.

        Args:
            ended: Why all of them were ended, as the beginning of a sentence; "" where they live on.
        """
        after = f"\n{ended} ranks were ended; {self.way_out()}." if ended else ""
        if all(each["kind"] == "KeyboardInterrupt" for each in self.failed.values()):
            at = next((each["lines"][-1].strip() for each in self.failed.values() if each["lines"]), "")
            kept = "; the ranks keep their state"
            if any("engine" in each for each in self.failed.values()):
                kept = (
                    "; the ranks live on, but it came while the engine worked on a sharded model, which may be a part of a "
                    f"step further on one rank than on another: do not train on with it; {self.way_out()}"
                )
            raise Interrupted("interrupted" + (f" at {at}" if at else "") + (after or kept))
        rank, told = self._told_failure()
        if "refused" in self.failed[rank]:
            raise Refused(in_notebook(self.failed[rank]["refused"]) + after)
        raise RankFailed(rank, told + after)

    def _told_failure(self) -> tuple[int, str]:
        """Return the rank whose failure is the cause, as far as is known, and the story."""
        told = {rank: f"{each['kind']}: {each['message']}".rstrip(": ") for rank, each in self.failed.items()}
        # An error of its own before a lost connection or an interrupt, then the first in order of time.
        consequence = {
            each: LOST_CONNECTION.search(text) is not None or self.failed[each]["kind"] == "KeyboardInterrupt"
            for each, text in told.items()
        }
        rank = min(self.failed, key=lambda each: consequence[each])
        alike = sorted(each for each in told if told[each] == told[rank])
        names = f"rank {rank}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike[:-1]))} and {alike[-1]}"
        return rank, "\n".join([f"{names} raised {told[rank]}", *self.failed[rank]["lines"]])

    # --- the user

    def _hear(self, signals: list[int]) -> None:
        """Hand an interrupt to the ranks; the second one ends them."""
        if len(signals) == self.interrupts:
            return
        self.interrupts = len(signals)
        if self.interrupts > 1:
            self.crew.kill()
            raise Interrupted(f"the ranks were ended at once; {self.way_out()}.")
        self.hangs.forget()
        if self.on_interrupt:
            self._show(self.view.say, self.on_interrupt)
        for rank in self.running:
            self.crew.send(rank, {"interrupt": True})
