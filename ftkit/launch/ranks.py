"""Starts the ranks of one node, or joins an outer job as one of its ranks.

The ranks are processes of torch's elastic launcher (`torch.distributed.elastic.multiprocessing`, the layer its agent
stands on), which meet at a store that this process holds on the loopback, so no port is guessed. `watch` looks after
them: when one fails the others are ended and *its* error is raised, and one that no longer answers is named. Ctrl-C,
SIGTERM and SIGUSR1 reach the ranks once, as SIGINT, and mean "save and end at the next step"; the second one kills.

It refuses to restart ranks (a run resumes from its checkpoint, by the user's word) and knows nothing of training. What
it costs: torch imported once more, in the process that only waits.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.errors import record

from ftkit.engine.memory.affinity import OWN_THREADS
from ftkit.errors import UserError
from ftkit.launch.external import threads_per_rank
from ftkit.launch.supervisor import BEAT_SECONDS, POLL_SECONDS, RankError, Watch, counted_signals


@dataclass
class Stop:
    """Whether the user asked this rank to end, read at each step; and how it ends at once with an error of its own.

    Args:
        asked: Whether the user asked.
        rank: The rank of this process.
        refused: File in which the launcher looks for the error; None under an outer launcher, where stderr is for that.
        listened: Signals that this process takes as the wish to end.
    """

    asked: bool = False
    rank: int = 0
    refused: Path | None = None
    listened: list[signal.Signals] = field(default_factory=list)

    def listen(self, *numbers: signal.Signals) -> None:
        """Take these signals as the wish to end, from now on; SIGHUP only where `nohup` has not silenced it."""

        def ask(number: int, frame: Any) -> None:
            self.asked = True

        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, ask)
                self.listened.append(number)

    def done(self) -> None:
        """Take no signal as a wish to end any more: the work is done, and this process only leaves."""
        for number in self.listened:  # not the default: Python restores that for handlers of its own when it ends
            signal.signal(number, signal.SIG_IGN)

    def leave(self, error: UserError) -> NoReturn:
        """End this process at once, from any thread, with an error for the user.

        Nothing is torn down: another thread may be in the middle of anything, and other ranks still hold the group.
        """
        if self.refused is not None:
            self.refused.write_text(str(error), encoding="utf-8", errors="backslashreplace")
        else:  # past Python's buffers, whose locks another thread may hold; one rank tells the whole story
            told = str(error) if self.rank == 0 else str(error).partition("\n")[0]
            os.write(2, f"ftkit (rank {self.rank}): {told}\n".encode(errors="backslashreplace"))
        os._exit(error.exit_code)


MOST_CPU_RANKS = 256
"""Most ranks on a node without a GPU: each imports torch, which takes 300 MiB."""


def check_ranks(ranks: int, gpus: int) -> None:
    """Refuse more ranks than GPUs, before anything is started.

    Args:
        ranks: Processes of this node.
        gpus: Usable GPUs; with 0 the ranks run on the CPU, at most `MOST_CPU_RANKS`.

    Raises:
        UserError: Two ranks would share a GPU, or there are too many for a CPU.
    """
    if not gpus and ranks > MOST_CPU_RANKS:
        raise UserError(
            f"{ranks} ranks were asked for and this node has no usable GPU: at most {MOST_CPU_RANKS} share its cores; lower "
            "--nproc or ranks"
        )
    if gpus and ranks > gpus:
        raise UserError(
            f"{ranks} ranks were asked for and this node has {gpus} usable GPU{'s' * (gpus > 1)}: a rank needs a GPU of "
            f"its own; use --nproc {gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def join(entry: str, args: tuple[Any, ...], rank: int) -> Any:
    """Run the work of one rank in this process, under an outer launcher.

    Args:
        entry: `module:function`; it is called as `function(stop, *args)`.
        args: Arguments of the function, beside `stop`.
        rank: The rank of this process.

    Returns:
        What it returns.
    """
    stop = Stop(rank=rank)
    stop.listen(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return _work(entry, args, stop)


def start(
    entry: str,
    args: tuple[Any, ...],
    ranks: int,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """Start the ranks of this node, wait for all of them, and return what rank 0 returned.

    Args:
        entry: `module:function`, called in each rank as `function(stop, *args)`. A name, so that this process need not
            import what the ranks import.
        args: Arguments of the function, beside `stop`; they are pickled.
        ranks: Number of processes.
        environ: The environment; what the user set in it about threads and interfaces is left alone.
        say: Shows a line to the user.

    Raises:
        UserError: A rank refused the user's input.
        RankError: A rank died, raised, or stopped answering.
        StoppedError: The user ended the run at once.

    Cost: the other ranks are gone at most a few seconds after the first failed; a stopped rank is named within 30 s.
    """
    threads = None if "OMP_NUM_THREADS" in environ else threads_per_rank(ranks)
    with tempfile.TemporaryDirectory(prefix="ftkit-ranks-") as name, _quiet_launcher(), counted_signals() as asked:
        folder = Path(name)
        _start_resource_tracker()
        store = loopback_store()
        with _deaf_to_interrupts():
            context = start_processes(
                name="rank",
                entrypoint=_rank,
                args={rank: (entry, args, rank, folder, threads) for rank in range(ranks)},
                envs={rank: environment(rank, ranks, store.port, threads, environ) for rank in range(ranks)},
                logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
                start_method="spawn",
            )
        watch = Watch(context, folder, ranks, say, asked)
        try:
            return watch.wait()
        except RankError as error:
            error.asked = asked.times > 0
            raise
        finally:
            watch.kill()
            context.close(signal.SIGKILL, timeout=10)


def loopback_store() -> TCPStore:
    """Return a store that this machine alone can reach: left to itself it listens on every interface, to anyone.

    (Ranks exchange pickles through it.)
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _start_resource_tracker() -> None:
    """Start multiprocessing's tracker without its complaint about locks of ranks that were ended, which it removes."""
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ignore SIGINT while ranks are started: they inherit that, so none dies of Ctrl-C before it listens for it.

    The launcher would install handlers that raise; it is asked to leave those signals to `counted_signals`.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        with _inherited({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT", **waiting(os.environ)}):
            yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Let processes that are started in the body have these variables from their first instruction on."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """Return how threads of an operation wait for each other, unless the user said: some microseconds awake, then asleep.

    By default they spin for milliseconds, and on a node with other work the one that is waited for then gets no core: small
    steps of one rank on two cores took 105 to 190 s beside two other processes instead of some 20. Alone they lose a tenth.
    """
    said = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return {} if any(name in environ for name in said) else {"GOMP_SPINCOUNT": "3000"}


def environment(rank: int, ranks: int, port: int, threads: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one rank of this node, beside those of `environ`.

    Args:
        rank: Rank of the process that gets the variables.
        ranks: Number of processes.
        port: Port of the store on the loopback.
        threads: CPU threads of a rank; None where the user said how many.
        environ: The environment; what the user set in it stays.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "ftkit",
    }
    variables |= waiting(environ)
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), OWN_THREADS: str(threads)}
    if "GLOO_SOCKET_IFNAME" not in environ and os.path.exists("/sys/class/net/lo"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # one node: a host name that resolves nowhere must not matter
    return variables


def _rank(entry: str, args: tuple[Any, ...], rank: int, folder: Path, threads: int | None) -> Any:
    """Be one rank: answer once a second, listen for the wish to end, do the work."""
    launcher = os.getppid()
    stop = Stop(rank=rank, refused=folder / f"rank-{rank}.refused")
    # Slurm and systemd send theirs to all processes of a step or a service.
    stop.listen(signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM)
    threading.Thread(target=_beat, args=(folder / f"rank-{rank}.beat",), daemon=True).start()
    if threads is not None:  # torch came with the launcher's own import, before OMP_NUM_THREADS was set in here
        torch.set_num_threads(threads)
    try:
        result = _work(entry, args, stop)
    except BaseException as error:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(error, UserError):
            stop.leave(error)
        # The error is on file. A regular exit would tear down a process group that the others still hold, and abort.
        os._exit(1)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    return result


def _end_with(launcher: int) -> None:
    """End this process when the launcher has died: torch waits without limit for the launcher to read the result.

    The kernel sends the death signal when the launcher's main thread ends. `getppid` changes when its last thread ends.
    """
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _work(entry: str, args: tuple[Any, ...], stop: Stop) -> Any:
    """Call the entry, write its error where the launcher looks for it, and leave the process group if it ended well."""
    module, _, function = entry.partition(":")
    result = record(getattr(importlib.import_module(module), function))(stop, *args)
    stop.done()
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _beat(path: Path) -> None:
    while True:
        try:
            path.touch()
        except OSError:  # the folder is gone: the launcher has ended
            return
        time.sleep(BEAT_SECONDS)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the launcher's own log of a failure off the screen; the cause is shown once, by us."""
    names = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before):
            logger.disabled = disabled
