"""Start the ranks of this node, wait for them, and name the cause if one fails.

`start` calls a function in new processes, one per rank. They meet at a store that the launcher serves on the loopback. Each
rank sends its result or its failure through a pipe. `join` calls the function in this process, as a rank of an outer job.

[Note: signals]

    1. The launcher counts SIGINT, SIGTERM, SIGUSR1 and SIGHUP. It forwards the first one to the ranks, as SIGINT, which sets
       `Stop.asked`; the work reads it after each step. At the second one the launcher kills the ranks.
    2. Ranks start with these signals blocked, so that a signal is pending until a rank has set its handlers.
    3. Ctrl-C in a terminal, Slurm and systemd signal the ranks, too. `Stop.asked` is set twice then, which changes nothing.
    4. `start_processes` makes the kernel send SIGINT to the ranks when the launcher dies.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.multiprocessing import start_processes

from ftkit.engine.memory.affinity import OWN_THREADS
from ftkit.errors import RankError, StoppedError, UserError, refusal
from ftkit.launch.children import kill_children
from ftkit.launch.external import threads_per_rank

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to end."""
POLL_SECONDS = 0.1
GRACE_SECONDS = 1.5
"""Time for the other ranks to send their failures after the first one, so that the cause can be chosen among all."""
RESUME = "resume with --resume auto if checkpoints were saved (output.save_every_steps)"
OTHERS_ENDED = f"The other ranks were ended; {RESUME}."
LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket|remote process|NCCL communicator|"
    r"ncclRemoteError|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    exit_code: int  # if negative, the number of the signal that killed the rank
    message: str = ""  # `Type: text` of the exception, if one was raised
    traceback: str = ""
    refusal: str = ""  # text of a `UserError`, if one was raised

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure of a rank that raised an error."""
        if isinstance(error, UserError):
            return cls(error.exit_code, refusal=str(error))
        return cls(1, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


@dataclass
class Stop:
    """The user's request to end, as one rank sees it."""

    asked: bool = False  # read it after each step
    rank: int = 0
    launcher: Connection | None = None  # None in an outer job

    def listen(self) -> None:
        """Take the signals of `ENDING` as the request, except SIGHUP if `nohup` silenced it."""
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        os.register_at_fork(after_in_child=_leave_signals_to_the_rank)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True

    def done(self) -> None:
        """Ignore the signals of `ENDING`: the work is done. Python would restore the default action when it exits."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def leave(self, error: BaseException) -> NoReturn:
        """End this process at once, from any thread, with the processes that it started, and show the error to the user.

        Nothing is torn down: other threads may be in the middle of anything, and other ranks still use the process group.
        """
        with suppress(OSError):
            if self.launcher is not None:
                self.launcher.send_bytes(pickle.dumps(Failure.of(error)))
            else:  # not through sys.stderr, whose lock another thread may have; the whole text once
                text = str(error) if self.rank == 0 else str(error).partition("\n")[0]
                os.write(2, f"ftkit (rank {self.rank}): {text}\n".encode(errors="backslashreplace"))
        kill_children(os.getpid())
        os._exit(error.exit_code if isinstance(error, UserError) else 1)


def _leave_signals_to_the_rank() -> None:
    """Let a process that a rank forked, such as a worker of `datasets`, end by SIGTERM, and ignore other requests to end."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


def check_ranks(ranks: int, gpus: int) -> None:
    """Refuse more ranks than usable GPUs, before anything is started. Without a GPU, ranks run on the CPU."""
    if gpus and ranks > gpus:
        raise UserError(
            f"{ranks} ranks were asked for and this node has {gpus} usable GPU{'s' * (gpus > 1)}: a rank needs a GPU of "
            f"its own; use at most {gpus} ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def join(entry: str, args: tuple[Any, ...], rank: int) -> Any:
    """Call the function of `start` in this process, as one rank of an outer job, and return its result."""
    stop = Stop(rank=rank)
    stop.listen()
    return record(_work)(entry, args, stop)  # torchrun shows the error that `record` writes


def start(
    entry: str,
    args: tuple[Any, ...],
    ranks: int,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """Start the ranks of this node, wait for all of them, and return the result of rank 0.

    Args:
        entry: `module:function`, called in each rank as `function(stop, *args)`. The launcher does not import the module.
        args: Arguments of the function after `stop`; they are pickled.
        ranks: Number of processes.
        environ: The environment. The user's own settings of threads and interfaces stay.
        say: Shows a line to the user.

    Raises:
        UserError: A rank refused the user's input.
        RankError: A rank raised another error, was killed, or ended before its work was done.
        StoppedError: The user ended the run at once.
    """
    threads = None if "OMP_NUM_THREADS" in environ else threads_per_rank(ranks)
    with counted_signals() as heard:
        store = loopback_store()
        readers, writers = zip(*(Pipe(duplex=False) for _ in range(ranks)))
        with _inherited(environment(0, ranks, store.port, threads, environ)):
            job = (entry, args, writers, os.getpid())
            processes = start_processes(_rank, job, ranks, join=False, start_method="spawn").processes
        for writer in writers:  # else a rank that is killed while it sends would leave the launcher waiting
            writer.close()
        try:
            return _wait(processes, readers, say, heard)
        except RankError as error:
            _kill(processes)
            error.asked = bool(heard)
            raise
        finally:
            _kill(processes)


def _rank(rank: int, entry: str, args: tuple[Any, ...], writers: Sequence[Connection], launcher: int) -> None:
    """Be one rank: listen for the request to end, do the work, and send the result or the failure."""
    faulthandler.enable()
    for other in {*writers} - {writers[rank]}:
        other.close()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    stop = Stop(rank=rank, launcher=writers[rank])
    stop.listen()
    if os.getppid() != launcher:  # it died before torch asked the kernel to signal that
        os._exit(1)
    try:
        result = _work(entry, args, stop)
        writers[rank].send_bytes(pickle.dumps(result if rank == 0 else None))
    except BaseException as error:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        stop.leave(error)


def _work(entry: str, args: tuple[Any, ...], stop: Stop) -> Any:
    """Call the entry, and leave the process group if it returned."""
    module, _, function = entry.partition(":")
    result = getattr(importlib.import_module(module), function)(stop, *args)
    stop.done()
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _wait(processes: Sequence[Any], readers: Sequence[Connection], say: Callable[[str], None], heard: list[int]) -> Any:
    """Wait for the end of all ranks; see `start`."""
    words: dict[int, Any] = {}  # the last word of each rank: its result or a `Failure`
    forwarded, deadline = False, float("inf")
    while True:
        codes = [process.exitcode for process in processes]
        for rank, reader in enumerate(readers):
            with suppress(EOFError, OSError):
                while reader.poll():
                    words[rank] = pickle.loads(reader.recv_bytes())
        failures = {}
        for rank, code in enumerate(codes):
            if code is not None and (code != 0 or rank not in words):
                word = words.get(rank)
                failures[rank] = word if isinstance(word, Failure) else Failure(code)
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if None not in codes or time.monotonic() > deadline:
                raise explain(failures, {rank: process.pid for rank, process in enumerate(processes)})
        elif None not in codes:
            return words[0]
        elif len(heard) > 1:
            raise StoppedError(f"the run was ended at once; {RESUME}")
        elif heard and not forwarded:
            forwarded = True
            say("ending after this step, with a checkpoint; Ctrl-C again ends at once and loses it")
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGINT)
        wait([process.sentinel for process in processes if process.is_alive()], POLL_SECONDS)


def _kill(processes: Sequence[Any]) -> None:
    """End every live rank at once, with the processes that it started."""
    for process in processes:
        if process.is_alive():  # else its number may belong to another process by now
            kill_children(process.pid)
            process.kill()
    for process in processes:
        process.join(timeout=10)  # a process that waits for a device or a network drive ends late


def explain(failures: Mapping[int, Failure], pids: Mapping[int, int], end: str = OTHERS_ENDED) -> Exception:
    """Choose the rank whose failure is the cause, and return the error to raise.

    A `UserError` comes first, then a rank that was killed, then an error that is not a lost connection. `end` is the last
    sentence of the message.
    """

    def order(rank: int) -> tuple[int, int]:
        failure = failures[rank]
        if failure.refusal:
            kind = 0
        elif failure.message:
            kind = 4 if LOST_CONNECTION.search(failure.message) else 2
        else:  # torch aborts a rank that waits for one that is gone: such a rank is not the cause
            kind = 1 if failure.exit_code < 0 and failure.exit_code != -signal.SIGABRT else 3
        return kind, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    if failure.refusal:
        return refusal(failure.refusal, failure.exit_code)
    if failure.message:
        tail = failure.traceback.rstrip().splitlines()[-12:]
        story = "\n".join([f"raised {failure.message}", "", *tail, "", ""])
    elif failure.exit_code < 0:
        hint = " (the kernel does that when host memory runs out)" if failure.exit_code == -signal.SIGKILL else ""
        story = f"was killed by {signal_name(-failure.exit_code)}{hint}. "
    else:
        story = f"ended with exit code {failure.exit_code} before its work was done. "
    return RankError(rank, f"rank {rank} (pid {pids[rank]}) {story}{end}")


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


@contextmanager
def counted_signals(numbers: Sequence[signal.Signals] = ENDING) -> Iterator[list[int]]:
    """Collect signals in a list instead of dying of them, except SIGHUP if `nohup` silenced it; restore the handlers."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield heard
        return
    known = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in known}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(rank: int, ranks: int, port: int, threads: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one rank of this node, to be added to `environ`. The user's own settings in it stay.

    `port` is that of the store on the loopback. `threads` is None if the user set the number.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to the launcher's store and serves none
        "TORCHELASTIC_RUN_ID": "ftkit",
    }
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environ):
        # Threads spin for milliseconds by default while they wait for each other, and take the core of the one they wait
        # for: small steps of one rank on two cores took 105 to 190 s beside two other processes, instead of some 20.
        variables["GOMP_SPINCOUNT"] = "3000"
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), OWN_THREADS: str(threads)}
    if "GLOO_SOCKET_IFNAME" not in environ and os.path.exists("/sys/class/net/lo"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that resolves nowhere must not matter on one node
    return variables


def loopback_store() -> dist.TCPStore:
    """Return a store on 127.0.0.1. By default it would listen on every interface, and ranks exchange pickles through it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Give variables and blocked signals to processes that are started in the body, before they import torch."""
    # The resource tracker would warn of semaphores of killed ranks, which it removes. Its start unblocks signals.
    sys.warnoptions.append("ignore:resource_tracker")
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
