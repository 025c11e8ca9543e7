"""The worker processes of a notebook, from start to end: fresh ones, one a rank, with a channel to each.

They are started, not forked, so the kernel may have used CUDA; they meet at a store that this process holds on the
loopback, and the process group is theirs alone. They have a session of their own: an interrupt of the kernel reaches them
as a message and not as a signal. What they write past Python (C libraries, programs) is read here, and the last of it kept.

Cost: two threads a worker, and torch imported here.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from ftkit.launch.external import threads_per_rank
from ftkit.launch.ranks import environment, loopback_store
from ftkit.notebook.channel import Channel, Message

KEPT_LINES = 20
"""Of what a worker wrote past Python."""
END_SECONDS = 10.0
"""That workers have to end in order."""


class Crew:
    """Workers that have been started.

    Args:
        ranks: Number of workers.
        environ: The environment; what the user set in it about threads and interfaces is left alone.
        gone: Called with the rank of a worker that has ended of itself, in a thread.

    Attributes:
        messages: Queue of (rank, what it said); the latter is None once the rank is gone.
        pids: Process numbers by rank.
    """

    def __init__(self, ranks: int, environ: Mapping[str, str], gone: Callable[[int], None]) -> None:
        self._gone = gone
        # Not SimpleQueue: a signal at the end of its get(timeout) leaves a negative rest, and CPython 3.11 never returns.
        self.messages: queue.Queue[tuple[int, Message | None]] = queue.Queue()
        self._store = loopback_store()
        threads = None if "OMP_NUM_THREADS" in environ else threads_per_rank(ranks)
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tails: list[deque[str]] = []
        self._known: list[psutil.Process] = []  # by number and time of birth
        self._ending = False
        try:
            for rank in range(ranks):
                own = environment(rank, ranks, self._store.port, threads, environ)
                self._start({**environ, **own, "MPLBACKEND": "agg"})  # the kernel's own draws into the kernel's cells
        except BaseException:
            self.kill()
            raise

    def _start(self, environ: Mapping[str, str]) -> None:
        channel, theirs = Channel.pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "ftkit.notebook.worker", str(theirs.fileno()), str(os.getpid())],
                env=dict(environ),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        rank = len(self._processes)
        self._channels.append(channel)
        self._processes.append(process)
        self._known.append(psutil.Process(process.pid))
        self._tails.append(deque(maxlen=KEPT_LINES))
        for work in (self._listen, self._drain):
            threading.Thread(target=work, args=(rank,), name=f"ftkit rank {rank}", daemon=True).start()
        self.send(rank, {"path": sys.path})

    def _listen(self, rank: int) -> None:
        while (message := self._channels[rank].receive()) is not None:
            self.messages.put((rank, message))
        self.messages.put((rank, None))
        self._channels[rank].close()
        if not self._ending:
            self._gone(rank)

    def _drain(self, rank: int) -> None:
        """Read what a worker writes past Python; rank 0's is shown."""
        pipe = self._processes[rank].stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                self._tails[rank].append(text.rstrip("\n"))
                if rank == 0:
                    self.messages.put((rank, {"out": text, "stream": "stderr"}))

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self._processes)

    @property
    def pids(self) -> dict[int, int]:
        """Process number of each rank."""
        return {rank: process.pid for rank, process in enumerate(self._processes)}

    def tail(self, rank: int) -> list[str]:
        """Return the last lines that a worker wrote past Python."""
        return list(self._tails[rank])

    def dead(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended; negative: the signal that killed it."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def exit_code(self, rank: int) -> int:
        """Wait for the end of a worker, and return its exit code."""
        return self._processes[rank].wait()

    def send(self, rank: int, message: Message) -> None:
        """Send a worker something; nothing happens where it is gone, which its own silence tells."""
        with suppress(OSError):
            self._channels[rank].send(message)

    def end(self) -> None:
        """End all workers in order, and those that do not by force."""
        self._ending = True
        for channel in self._channels:
            channel.close_sending()
        deadline = time.monotonic() + END_SECONDS
        while len(self.dead()) < self.ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End every worker at once, with the processes it started, also those that it left behind."""
        self._ending = True
        for process in self._known:
            own = process.is_running() or not psutil.pid_exists(process.pid)  # else the number is another's by now
            with suppress(psutil.NoSuchProcess):
                for each in [*process.children(recursive=True), process]:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            if own:
                with suppress(ProcessLookupError, PermissionError):  # it leads a group of its own; macOS: of zombies alone
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close_sending()
