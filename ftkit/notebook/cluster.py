"""The processes behind a notebook: ipyparallel's controller and one engine per rank.

The kernel starts them and serves the store at which ranks meet. A thread watches them: if one ends by itself, the thread
ends the others. The connection files have keys, so their folder is private to the user.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ipyparallel

from ftkit.launch.children import kill_children
from ftkit.launch.external import threads_per_rank
from ftkit.launch.ranks import GRACE_SECONDS, POLL_SECONDS, Failure, environment, loopback_store

START_SECONDS = 120
STOP = signal.SIGUSR1
"""Asks a rank to end its run after the step. SIGINT interrupts the user's own cells."""
LAST_WORDS = "FTKIT_LAST_WORDS"
"""Environment variable with the number of the file descriptor to which a rank that ends itself writes why."""


class Cluster:
    """The started processes and the client that talks to them.

    Args:
        ranks: Number of engines.
        environ: The environment. The user's own settings of threads and interfaces stay.
        lost: Called in a thread after a process ended by itself and the others were ended.

    Attributes:
        client: ipyparallel's client.
        failures: Failures of ranks that ended by themselves, by rank.
        is_lost: Whether a process ended by itself.

    Raises:
        RuntimeError: A process did not start.
    """

    def __init__(self, ranks: int, environ: Mapping[str, str], lost: Callable[[], None]) -> None:
        self.failures: dict[int, Failure] = {}
        self.is_lost = self._ends = False
        self._lost = lost
        self._engines: list[subprocess.Popen[bytes]] = []
        self._words: list[Connection] = []
        self.folder = tempfile.mkdtemp(prefix="ftkit-ranks-")
        self._store = loopback_store()
        files = [Path(self.folder, "security", f"ipcontroller-{kind}.json") for kind in ("engine", "client")]
        threads = None if "OMP_NUM_THREADS" in environ else threads_per_rank(ranks)
        options = ["--ip=127.0.0.1", "--location=127.0.0.1", "--IPController.use_threads=True"]
        self._controller = self._start("controller", options, environ)
        try:
            self._await(lambda: all(map(_is_whole, files)))
            for rank in range(ranks):
                ours, theirs = Pipe(duplex=False)
                variables = environment(rank, ranks, self._store.port, threads, environ)
                variables[LAST_WORDS] = str(theirs.fileno())
                options = [f"--file={files[0]}", f"--IPEngine.id={rank}", f"--IPEngine.timeout={START_SECONDS}"]
                options.append("--IPEngine.enable_nanny=False")  # the thread below watches the engine
                with theirs:
                    self._engines.append(self._start("engine", options, {**environ, **variables}, theirs))
                self._words.append(ours)
            self.client: Any = ipyparallel.Client(str(files[1]), timeout=START_SECONDS)
            self._await(lambda: len(self.client.ids) == ranks)
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._watch, name="ftkit ranks", daemon=True).start()

    def _start(
        self, role: str, options: list[str], environ: Mapping[str, str], words: Connection | None = None
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ftkit.notebook.process", role, str(os.getpid()), self.folder]
        with open(Path(self.folder, f"{role}.log"), "ab") as log:
            return subprocess.Popen(
                [*command, f"--profile-dir={self.folder}", "--init", *options],
                env=dict(environ),
                pass_fds=() if words is None else (words.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the kernel's interrupts do not reach it
            )

    def _await(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_done():
            if time.monotonic() > deadline or self._has_ended():
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in Path(self.folder).glob("*.log"))
                raise RuntimeError(f"ipyparallel's processes did not start within {START_SECONDS} s:\n{logs}")
            time.sleep(POLL_SECONDS)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        return {rank: process.pid for rank, process in enumerate(self._engines)}

    def _has_ended(self) -> bool:
        return any(process.poll() is not None for process in (*self._engines, self._controller))

    def send_signal(self, number: int) -> None:
        """Send a signal to every engine."""
        for process in self._engines:
            process.send_signal(number)

    def _watch(self) -> None:
        """Wait until a process ends by itself; then note how, end the others, and report it."""
        while not self._has_ended():
            time.sleep(POLL_SECONDS)
        time.sleep(GRACE_SECONDS)  # other ranks may end of the same cause
        if self._ends:
            return
        for rank, process in enumerate(self._engines):
            if (code := process.poll()) is not None:
                self.failures[rank] = Failure(code)
                with suppress(EOFError, OSError):  # a rank that was killed wrote nothing
                    self.failures[rank] = pickle.loads(self._words[rank].recv_bytes())
        self.kill()
        self.is_lost = True
        self._lost()

    def kill(self) -> None:
        """End every process at once, with the processes that it started, and remove the folder."""
        self._ends = True
        processes = (*self._engines, self._controller)
        for process in processes:
            if process.poll() is None:
                kill_children(process.pid)
            with suppress(ProcessLookupError):  # its group, because a dead process has no children any more
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
        if hasattr(self, "client"):
            self.client.close(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(json.loads(path.read_text()))
    return False
