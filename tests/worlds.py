"""Worlds of ranks for tests: processes that start once and run many cases.

A world is W processes joined by gloo. A case is a picklable function that runs on every rank at the same time, with
the same arguments; what the ranks return comes back as a list, in rank order. When a rank raises, dies or does not
answer in time, the whole world is ended and the test fails with the rank's number and its own traceback (a rank that
hangs shows where); the next case starts a fresh world.

The ranks are forked from a server that imported torch and transformers once, so that a world costs a fraction of a
second and not an import a rank. Every case begins with the same random numbers and one thread a rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASE_SECONDS = 60.0
"""How long a case may take before its world is ended."""
GRACE_SECONDS = 3.0
"""How long the other ranks may take to fail by themselves once one has failed."""
FRAMES = 12
"""How many of the innermost calls a rank's traceback shows."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "transformers.modeling_utils", "peft", "ftkit.train.job"])


class RankFailure(AssertionError):
    """A case failed on at least one rank; the text holds each rank's traceback."""


@dataclass
class Rank:
    """One process of a world, and the pipe to it."""

    process: Any
    pipe: Connection


class World:
    """W ranks that execute cases.

    Args:
        size: number of ranks.
        environ: environment variables of the ranks, beside those that `torchrun` would set.
    """

    def __init__(self, size: int, environ: dict[str, str] | None = None) -> None:
        self.size = size
        self.environ = environ or {}
        self.ranks: list[Rank] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """Run `function(*args)` on every rank.

        Args:
            function: known by its name in an importable module (a test file).
            seconds: how long it may take.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailure: if it raised on a rank, killed one, or took too long. The world is started anew afterwards.
        """
        if not self.ranks:
            self._start()
        case = pickle.dumps((function, args))
        for rank in self.ranks:
            rank.pipe.send_bytes(case)
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(answers) + len(failures) < self.size:
            waiting = [r for r in range(self.size) if r not in answers and r not in failures]
            ready = wait([self.ranks[r].pipe for r in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for number in waiting:
                if self.ranks[number].pipe in ready:
                    ok, answer = self._receive(number)
                    (answers if ok else failures)[number] = answer
                    if not ok:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        missing = [r for r in range(self.size) if r not in answers and r not in failures]
        if not missing and not failures:
            return [answers[r] for r in range(self.size)]
        late = {r: f"no answer; it was at\n{self._where(r)}" for r in missing}
        self.close()
        told: dict[str, str] = {}  # ranks that say the same are told together
        for number, text in sorted(failures.items()) + sorted(late.items()):
            told[text] = f"{told[text]}, {number}" if text in told else f"rank {number}"
        lines = [f"{who} of {self.size}: {text}" for text, who in told.items()]
        raise RankFailure(f"{function.__name__}{args!r:.300}\n" + "\n".join(lines))

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.pipe.close()
        self.ranks = []
        if self.folder is not None:
            self.folder.cleanup()

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ftkit-world-")
        environ = {**self.environ, "WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for number in range(self.size):
            ours, theirs = _context.Pipe()
            own = {**environ, "RANK": str(number), "LOCAL_RANK": str(number)}
            process = _context.Process(
                target=_serve, args=(number, self.size, theirs, self.folder.name, own), daemon=True, name=f"rank{number}"
            )
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours))

    def _receive(self, number: int) -> tuple[bool, Any]:
        try:
            ok, answer = pickle.loads(self.ranks[number].pipe.recv_bytes())
        except (EOFError, OSError):
            self.ranks[number].process.join(GRACE_SECONDS)
            return False, f"died with exit code {self.ranks[number].process.exitcode}"
        return ok, answer

    def _where(self, number: int) -> str:
        """Return the stacks of a rank that hangs."""
        assert self.folder is not None
        path = Path(self.folder.name) / f"stack{number}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[number].process.pid, signal.SIGUSR1)
        for _ in range(20):
            if path.exists() and path.stat().st_size:
                break
            time.sleep(0.05)
        return path.read_text() if path.exists() else "an unknown place"


class Worlds:
    """The worlds of a test session, started when first asked for: `worlds[2]`."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __getitem__(self, size: int) -> World:
        if size not in self._worlds:
            self._worlds[size] = World(size)
        return self._worlds[size]

    def close(self) -> None:
        """End all of them."""
        for world in self._worlds.values():
            world.close()


def free_port() -> int:
    """Return a port of this host on which nobody listens, and which no connection is given as its own end.

    A world of one rank opens its store at it long after: the kernel deals ports from 32768 on to what connects meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 32000)  # not torch's numbers, which every test begins alike
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _serve(rank: int, size: int, pipe: Connection, folder: str, environ: dict[str, str]) -> None:
    """Be one rank: run cases until the pipe closes."""
    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends us
    os.environ.update(environ)
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is never garbage; looking at it would copy its pages into every rank
    meetings, known = 0, len(sys.modules)
    while True:
        if size > 1 and not dist.is_initialized():  # at the start, and after a case that ended the group (as a job does)
            meetings += 1
            dist.init_process_group("gloo", init_method=f"file://{folder}/store{meetings}", rank=rank, world_size=size)
        try:
            case = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            torch.manual_seed(0)
            function, args = pickle.loads(case)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc(limit=-FRAMES)))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)
        gc.collect()
        if len(sys.modules) > known:  # what a case has imported is never garbage either
            gc.freeze()
            known = len(sys.modules)
