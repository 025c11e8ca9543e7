"""Worlds of ranks for tests: processes that start once and run many cases.

A world is W processes joined by gloo. A case is a picklable function that runs on every rank at the same time with
the same arguments. The results come back as a list in rank order. If a rank raises, dies or exceeds the time limit, the
world is ended and the test fails with the rank's number and its traceback, or its stacks if it hangs. The next case
starts a fresh world.

The ranks are forked from a server that imported torch and transformers once, so a world starts in a fraction of a
second. Every case begins with the same random numbers and one thread per rank.
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
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

PATIENCE = float(os.environ.get("FTKIT_TEST_PATIENCE", "1"))
"""Factor on every time limit of the tests. A machine that is too slow for them sets FTKIT_TEST_PATIENCE=3."""
CASE_SECONDS = 60.0
"""Limit of a case, before `PATIENCE`. Its world is ended afterwards."""
GROUP_SECONDS = 20.0
"""Timeout of the process group, before `PATIENCE`: the longest wait of a rank for another one."""
GRACE_SECONDS = 15.0
"""Limit for the other ranks to fail by themselves after one has failed, before `PATIENCE`."""
FRAMES = 12
"""How many of the innermost calls a rank's traceback shows."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "transformers.modeling_utils", "peft", "ftkit.train.run"])


class RankFailure(AssertionError):
    """A case failed on at least one rank; the text holds each rank's traceback."""


@dataclass
class Rank:
    """One process of a world and its pipe."""

    process: Any
    pipe: Connection


class World:
    """W ranks that execute cases.

    Args:
        size: Number of ranks.
        environ: Environment variables of the ranks, in addition to those of `torchrun`.
    """

    def __init__(self, size: int, environ: dict[str, str] | None = None) -> None:
        self.size = size
        self.environ = environ or {}
        self.ranks: list[Rank] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = CASE_SECONDS) -> list[Any]:
        """Run `function(*args)` on every rank.

        Args:
            function: Function that ranks can import by name (of a test file).
            args: Picklable arguments.
            seconds: Limit of the case, multiplied by `PATIENCE`.

        Returns:
            The result of each rank, in rank order.

        Raises:
            RankFailure: The case raised on a rank, killed one, or exceeded the limit. The next case starts a new world.
        """
        try:
            return self._run(function, args, seconds * PATIENCE)
        except BaseException:  # also the test's own timeout: the next case must not read this one's answers
            self.close()
            raise

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
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
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS * PATIENCE)
        missing = [r for r in range(self.size) if r not in answers and r not in failures]
        if not missing and not failures:
            return [answers[r] for r in range(self.size)]
        late = {r: f"no answer; it was at\n{self._where(r)}" for r in missing}
        merged: dict[str, str] = {}  # one entry for ranks with the same text
        for number, text in sorted(failures.items()) + sorted(late.items()):
            merged[text] = f"{merged[text]}, {number}" if text in merged else f"rank {number}"
        lines = [f"{ranks} of {self.size}: {text}" for text, ranks in merged.items()]
        raise RankFailure(f"{function.__name__}{args!r:.300}\n" + "\n".join(lines))

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join(GRACE_SECONDS * PATIENCE)
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
            self.ranks[number].process.join(GRACE_SECONDS * PATIENCE)
            return False, f"died with exit code {self.ranks[number].process.exitcode}"
        return ok, answer

    def _where(self, number: int) -> str:
        """Return the stacks of a rank that hangs."""
        assert self.folder is not None
        path = Path(self.folder.name) / f"stack{number}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[number].process.pid, signal.SIGUSR1)
        until = time.monotonic() + GRACE_SECONDS * PATIENCE
        while time.monotonic() < until and not (path.exists() and path.stat().st_size):
            time.sleep(0.05)
        return path.read_text() if path.exists() else "an unknown place"


class Worlds:
    """The worlds of a test session, by size: `worlds[2]` is started at its first use."""

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


def seed_all() -> None:
    """Seed the generators of Python, NumPy and torch, as every test and every case of a world begins."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def free_port() -> int:
    """Return an unused port below 32768, where the kernel does not take local ports of connections from.

    A world of one rank opens its store there much later, so the port must not be taken in the meantime.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 32000)  # every test seeds the other generators alike
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _serve(rank: int, size: int, pipe: Connection, folder: str, environ: dict[str, str]) -> None:
    """Run cases as one rank until the pipe closes."""
    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C and ends the ranks
    os.environ.update(environ)
    torch.set_num_threads(1)
    gc.freeze()  # collecting the server's imports would copy their pages into every rank
    groups, known = 0, len(sys.modules)
    while True:
        if size > 1 and not dist.is_initialized():  # at the start, and after a case that destroyed the group, as a job does
            groups += 1
            limit = timedelta(seconds=GROUP_SECONDS * PATIENCE)
            store = f"file://{folder}/store{groups}"
            dist.init_process_group("gloo", init_method=store, timeout=limit, rank=rank, world_size=size)
        try:
            case = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            seed_all()
            function, args = pickle.loads(case)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc(limit=-FRAMES)))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)
        gc.collect()
        if len(sys.modules) > known:  # a case's imports stay, too
            gc.freeze()
            known = len(sys.modules)
