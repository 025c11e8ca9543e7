"""Collectives: the only importer of `torch.distributed`.

Everything the engine says to other ranks goes through one `Communicator`, in the same order on every rank: gather
shards, reduce gradients, sum a few numbers, wait. It absorbs what differs below it: torch's renamed collectives (2.13),
16-bit sums (divided by W before they are added, so that they cannot overflow where the mean does not), and the fact
that gloo moves about 1 GB/s between two CPU ranks of one machine where a copy moves 25. Such ranks exchange large tensors
through a few MiB of shared memory instead (`SharedStage`); gloo then only carries the barriers, which also notice a dead
peer. Sums over shared memory are made in rank order in fp32, so every rank sees the same bits.

Every collective has a number and a name (`Ledger`), which all ranks must share. Over shared memory they are compared in each
collective, before anything is read; elsewhere wherever a few numbers are exchanged for the host. A `Watchdog` ends ranks
that wait in vain. On a CPU the wait itself wakes once a second to look at it.

`bytes_sent` counts what a ring would send for each operation, the figure that the ZeRO paper (arXiv:1910.02054, section 7)
states: (W-1)/W of the gathered bytes for a gather or a scatter, twice that for an all-reduce.
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import re
import socket
import sys
import tempfile
import traceback
import weakref
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.engine.comm import watchdog
from ftkit.engine.comm.board import SLOT_BYTES, Board, SharedBoard, StoreBoard
from ftkit.engine.comm.ledger import Ledger
from ftkit.engine.comm.shared_stage import SharedStage, stage_bytes
from ftkit.engine.comm.standstill import ENDED
from ftkit.engine.comm.watchdog import Watchdog
from ftkit.engine.threads import use_device
from ftkit.errors import RanksDiffer, UserError

WAKE = timedelta(seconds=1)
"""How long a CPU rank waits for others before it looks whether it waits in vain."""

LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket|remote process|ncclRemoteError|"
    r"communicator was aborted",
    re.IGNORECASE,
)
"""What backends say when another rank is gone."""

UNMISTAKABLE = re.compile(r"ncclRemoteError|communicator was aborted", re.IGNORECASE)
"""Such texts that no upload or download has; NCCL's come from wherever a device is waited for."""

COLLECTING = re.compile(r"/torch/distributed/|/accelerate/|/ftkit/engine/comm/(communicator|shared_stage)\.py$")
"""Files in whose calls the connection between ranks is lost."""


class Communicator:
    """The ranks that share one model: who I am, and the collectives among us.

    Args:
        device: where the tensors live. CPU ranks of one machine use shared memory.
        group: a `torch.distributed` process group; None takes the default group, or a world of one where no process group
            was initialised.

    Attributes:
        rank: this rank in the group.
        world_size: number of ranks in the group.
        bytes_sent: bytes that this rank has sent, by name of the operation, counted as a ring sends them.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.device = device
        self.bytes_sent: Counter[str] = Counter()
        live = dist.is_available() and dist.is_initialized()
        if not live and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"a launcher started {os.environ['WORLD_SIZE']} ranks, but they have no process group, so each would train "
                "a model of its own: call torch.distributed.init_process_group() (and torch.cuda.set_device(local_rank)) "
                "before ftkit.shard()"
            )
        self.rank = dist.get_rank(group) if live else 0
        self.world_size = dist.get_world_size(group) if live else 1
        self._stage: SharedStage | None = None
        self._ledger = Ledger()
        self._watchdog: Watchdog | None = None
        if self.world_size > 1:
            if device.type == "cpu":
                atexit.register(_end_group)
            self._meet_others()

    @property
    def ledger(self) -> Ledger:
        """The collectives that this rank has entered."""
        return self._ledger

    @property
    def transport(self) -> str:
        """What carries large tensors: 'none' (one rank), 'shared memory', or the backend's name."""
        if self.world_size == 1:
            return "none"
        return "shared memory" if self._stage else str(dist.get_backend(self.group))

    def _meet_others(self) -> None:
        """Open what ranks of one machine share, or a store, and begin to watch. Cost: some small collectives."""
        on_cpu = self.device.type == "cpu"
        boards = self.world_size * SLOT_BYTES
        memory = _shared_memory(self, boards + on_cpu * stage_bytes(self.world_size))
        board: Board | None
        if memory is None:
            board = _store_board(self)
        else:
            board = shared = SharedBoard(memory, self.rank, self.world_size)
            self._ledger.counter = shared.counter()
            if on_cpu:
                self._stage = SharedStage(self.rank, self.world_size, memory, boards)
        if board is not None:
            group, device = self.group, self.device

            def abort() -> None:  # on the watchdog's thread
                use_device(device)
                (group or dist.group.WORLD).abort()  # type: ignore[union-attr]  # there is a default group

            self._watchdog = Watchdog(board, self.rank, self._ledger, cuda=not on_cpu, abort=abort)
            weakref.finalize(self, self._watchdog.stop)
            atexit.register(_end_process_after, weakref.ref(self._watchdog))

    def _in(self, operation: str, of: str = "") -> Passage:
        """Return a context for one collective, which notes its number and name and explains its failure."""
        return Passage(self, operation, of)

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective of the CPU.

        Raises:
            UserError: if the ranks wait in vain.
        """
        while work is not None:
            try:
                work.wait(WAKE)
                return
            except RuntimeError:  # time is over, or it failed
                completed = work.is_completed()
                if not completed and self._watchdog is not None and self._watchdog.verdict is not None:
                    raise self._watchdog.error() from None
            if completed:
                work.wait()  # the last rank came after the time was over; of what failed this raises the true error
                return

    def meet(self) -> None:
        """Wait for all ranks to come here: a barrier without a number, for pieces of a collective."""
        if self.device.type == "cpu":
            self._wait(dist.barrier(group=self.group, async_op=True))
        else:
            dist.barrier(group=self.group)

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> None:
        """Fill `full` (W*S,) with every rank's `shard` (S,), in rank order. `shard` may be this rank's part of `full`.

        Args:
            full: receives the shards of all ranks (W*S,).
            shard: this rank's shard (S,).
            of: name of what is gathered, for messages; here and below.

        Raises:
            UserError: If ranks do not do the same, or one is dead or hung; also below.
        """
        self._count("all_gather", full)
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return
        with self._in("all-gather", of):
            gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
            if self._stage:
                self._stage.all_gather(self, full, shard)
            elif self.device.type == "cpu":
                self._wait(gather(full, shard, group=self.group, async_op=True))
            else:
                gather(full, shard, group=self.group)

    def reduce_scatter_mean(self, shard: Tensor, full: Tensor, of: str = "") -> None:
        """Put the mean over ranks of `full` (W*S,) into `shard` (S,): this rank's part of it. `full` is scratch after.

        `shard` may be this rank's part of `full`.
        """
        self._count("reduce_scatter", full)
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return
        with self._in("reduce-scatter", of):
            if self._stage:
                self._stage.reduce_scatter_mean(self, shard, full)
            else:
                self._reduce_scatter_mean(shard, full)

    def _reduce_scatter_mean(self, shard: Tensor, full: Tensor) -> None:
        narrow = full.dtype != torch.float32
        if narrow:
            full.div_(self.world_size)
        if self.device.type == "cpu":  # gloo's reduce-scatter is slower than its all-reduce, and no wait for it can end
            self._all_reduce(full)
            shard.copy_(full[self.rank * shard.numel() : (self.rank + 1) * shard.numel()])
        else:
            scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
            scatter(shard, full, group=self.group)
        if not narrow:
            shard.div_(self.world_size)

    def all_reduce_mean(self, full: Tensor, of: str = "") -> None:
        """Replace `full` (n,) by its mean over ranks."""
        if self.world_size == 1:
            return
        self._count("all_reduce", full, 2)
        with self._in("all-reduce", of):
            if self._stage is None:
                if full.dtype != torch.float32:
                    full.div_(self.world_size)
                self._all_reduce(full)
                if full.dtype == torch.float32:
                    full.div_(self.world_size)
                return
            part = full.numel() // self.world_size
            even, rest = full[: part * self.world_size], full[part * self.world_size :]
            if part:
                shard = even[self.rank * part : (self.rank + 1) * part]
                self._stage.reduce_scatter_mean(self, shard, even)
                self._stage.all_gather(self, even, shard)
            if rest.numel():
                total = rest.float()
                self._stage.sum(self, total)
                rest.copy_(total.div_(self.world_size))

    def _all_reduce(self, numbers: Tensor) -> None:
        if self.device.type == "cpu":
            self._wait(dist.all_reduce(numbers, group=self.group, async_op=True))
        else:
            dist.all_reduce(numbers, group=self.group)

    def sum(self, numbers: Tensor, of: str = "") -> Tensor:
        """Return the sum over ranks of a few `numbers` (n,), on every rank; waits for nothing on the host."""
        if self.world_size > 1:
            self._count("sum", numbers, 2)
            with self._in("sum", of):
                self._sum(numbers)
        return numbers

    def _sum(self, numbers: Tensor) -> None:
        if self._stage is not None and numbers.device.type == "cpu":
            self._stage.sum(self, numbers)
        else:
            self._all_reduce(numbers)

    def totals(self, numbers: Tensor, of: str = "") -> list[float]:
        """Return the sums over ranks of a few `numbers` (n,), on the host. Cost: one small all-reduce and a host wait.

        The same collective compares the ranks' courses where nothing else does. Numbers of 16 bits are added in fp32: the
        squares of a course need more digits than they have.
        """
        if numbers.is_floating_point() and numbers.dtype.itemsize < 4:
            numbers = numbers.float()
        if self.world_size == 1 or self._stage is not None:
            summed: list[float] = self.sum(numbers, of).tolist()
            return summed
        with self._in("sum", of):
            self._count("sum", numbers, 2)
            digits = self._ledger.digits()
            marks = torch.tensor([*digits, *(digit * digit for digit in digits)], dtype=numbers.dtype)
            both = torch.cat([numbers.reshape(-1), marks.to(numbers.device)])
            self._all_reduce(both)
            summed = both.tolist()
            first, square = summed[-2 * len(digits) : -len(digits)], summed[-len(digits) :]
            # Equal numbers alone have a mean of squares that is the square of their mean.
            if any(self.world_size * s != f * f for f, s in zip(first, square)):
                self.differs()
            return summed[: numbers.numel()]

    def differs(self) -> NoReturn:
        """Raise that the ranks have come to different collectives.

        Raises:
            UserError: always, with the same text on all ranks.
        """
        if self._watchdog is not None:
            raise self._watchdog.differs(sys._getframe())
        raise RanksDiffer(
            f"the ranks run different blocks, or in another order; rank {self.rank} is in {self._ledger.name}. All ranks "
            "must run the same blocks in the same order"
        )

    def broadcast(self, tensor: Tensor, of: str = "") -> None:
        """Replace `tensor` (n,) by rank 0's. Cost: its bytes, through the process group."""
        if self.world_size == 1:
            return
        self._count("broadcast", tensor)
        with self._in("broadcast", of):
            if self._stage is not None:
                self._stage.barrier(self)  # compares what is broadcast
            if self.device.type == "cpu":
                self._wait(dist.broadcast(tensor, src=self._first, group=self.group, async_op=True))
            else:
                dist.broadcast(tensor, src=self._first, group=self.group)

    @property
    def _first(self) -> int:
        """Rank 0 of the group, as the whole world counts."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def any(self, flag: bool, of: str = "") -> bool:
        """Return whether `flag` is true on any rank. Cost: one small all-reduce and a host wait."""
        told = torch.tensor([float(flag)], dtype=torch.float32, device=self.device)
        return bool(self.totals(told, of or "a flag")[0])

    def same(self, value: Any, of: str = "") -> Any:
        """Return rank 0's `value` on every rank (a small picklable object that ftkit itself made)."""
        if self.world_size == 1:
            return value
        return self.all(value if self.rank == 0 else None, of or "what rank 0 found")[0]

    def all(self, value: Any, of: str = "") -> list[Any]:
        """Return every rank's `value`, in rank order (small picklable objects that ftkit itself made)."""
        if self.world_size == 1:
            return [value]
        data = pickle.dumps(value)
        sizes = self.all_numbers(len(data), of or "what each rank found")
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        full = torch.empty(self.world_size * max(sizes), dtype=torch.uint8, device=self.device)
        with self._in("exchange", of or "what each rank found"):
            self._gather(full, own.to(self.device))
        rows = full.cpu().view(self.world_size, -1)
        return [pickle.loads(rows[rank, :size].numpy().tobytes()) for rank, size in enumerate(sizes)]

    def all_numbers(self, number: int, of: str = "") -> list[int]:
        """Return every rank's integer, in rank order. Cost: one small all-gather and a host wait.

        The same collective compares the ranks' courses where nothing else does.
        """
        if self.world_size == 1:
            return [number]
        with self._in("exchange of a number", of):
            own = torch.tensor([number, self._ledger.digest], device=self.device)
            full = torch.empty(2 * self.world_size, dtype=torch.int64, device=self.device)
            self._gather(full, own)
            told = full.tolist()
            if len(set(told[1::2])) > 1:
                self.differs()
        return told[::2]

    def _gather(self, full: Tensor, own: Tensor) -> None:
        """Fill `full` (W*n,) with every rank's `own` (n,)."""
        if self._stage is not None:
            self._stage.all_gather(self, full, own)
        elif self.device.type == "cpu":
            rows = list(full.view(self.world_size, -1))
            self._wait(dist.all_gather(rows, own, group=self.group, async_op=True))
        else:
            dist.all_gather(list(full.view(self.world_size, -1)), own, group=self.group)

    def explain(self, error: RuntimeError) -> UserError | None:
        """Return what a lost connection means, which any collective of the group has raised; None for other errors.

        A connection of the user's own (an upload in a callback) is none of the group's.
        Cost: some seconds, in which the other ranks are looked at.
        """
        lost = self._watchdog is not None and is_lost_connection(error)
        return self._watchdog.broken(sys._getframe(1), error) if self._watchdog is not None and lost else None

    def barrier(self, of: str = "") -> None:
        """Wait until every rank has come here."""
        if self.world_size > 1:
            with self._in("barrier", of):
                if self._stage is None:
                    self.meet()
                else:
                    self._stage.barrier(self)

    def _count(self, name: str, full: Tensor, times: int = 1) -> None:
        self.bytes_sent[name] += times * full.numel() * full.element_size() * (self.world_size - 1) // self.world_size


class Passage:
    """One collective, from its beginning to its end, on this rank."""

    __slots__ = ("comm",)

    def __init__(self, comm: Communicator, operation: str, of: str) -> None:
        self.comm = comm
        watchdog = comm._watchdog
        if watchdog is not None and watchdog.verdict is not None:
            raise watchdog.error()
        comm._ledger.enter(operation, of)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        told = self.comm.explain(error) if isinstance(error, RuntimeError) else None
        self.comm._ledger.leave()
        if told is not None:
            raise told from None
        watchdog = self.comm._watchdog
        if error is None and watchdog is not None and watchdog.verdict is not None:  # it came while this rank waited
            raise watchdog.error()


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error says that a connection is lost, and was raised where ranks talk to each other."""
    if LOST_CONNECTION.search(str(error)) is None or error.__traceback__ is None:
        return False
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1].f_code.co_filename
    return UNMISTAKABLE.search(str(error)) is not None or COLLECTING.search(innermost) is not None


def _end_group() -> None:
    """End the default process group before the interpreter goes: gloo's threads abort a process that leaves them behind."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_process_after(held: weakref.ref[Watchdog]) -> None:
    """Tell the other ranks how this process ends, before connections break.

    If ranks waited in vain it ends here: gloo's threads still wait, and ending the group would wait for them.
    """
    watchdog = held()
    if watchdog is None or watchdog.pid != os.getpid():
        return
    raised = getattr(sys, "last_value", None)  # what Python has just shown as this process's error
    first = f"{raised}".strip().partition("\n")[0][:200]
    watchdog.stop(f"has ended with {type(raised).__name__}: {first}" if raised is not None else ENDED)
    if watchdog.taken and watchdog.verdict is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(watchdog.verdict.error().exit_code)


def _shared_memory(comm: Communicator, size: int) -> mmap.mmap | None:
    """Map shared memory on all ranks, or on none: ranks on several machines, or no room in /dev/shm, give None."""
    one_machine = len(set(comm.all(machine()))) == 1
    path, memory = None, None
    if comm.rank == 0 and one_machine:
        path = _reserve(size)
    path = comm.same(path)
    try:
        if path is not None:
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), size)
    except OSError:
        memory = None
    everybody = all(comm.all(memory is not None))
    if comm.rank == 0 and path is not None:
        os.unlink(path)  # the mappings keep it alive; a crash leaves no file behind
    return memory if everybody else None


def _store_board(comm: Communicator) -> Board | None:
    """Return a board in a store that rank 0 serves on its machine's address, or None if a rank does not reach it."""
    address, store = None, None
    name = os.environ.get("MASTER_ADDR", "") if comm._first == 0 else ""
    try:
        if comm.rank == 0:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.bind((socket.gethostbyname(name or socket.gethostname()), 0))
            listener.listen(socket.SOMAXCONN)
            host, port = address = listener.getsockname()
            store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except (OSError, RuntimeError):
        address = None
    address = comm.same(address)
    if address is None:
        return None
    try:
        if comm.rank > 0:
            store = dist.TCPStore(address[0], address[1], is_master=False, timeout=timedelta(seconds=15))
    except RuntimeError:
        store = None
    if store is None or not all(comm.all(store is not None)):
        return None
    return StoreBoard(store, comm.rank, comm.world_size, watchdog.PATIENCE.beat)


def machine() -> tuple[str, str]:
    """Return what ranks that may share memory have in common: the running kernel and the network they live in."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux: nothing to compare, so nobody is taken for a neighbour
        return str(os.getpid()), ""


def _reserve(size_bytes: int) -> str | None:
    """Return a file in shared memory with its bytes reserved, or None: a full tmpfs would otherwise kill us with SIGBUS."""
    try:
        with tempfile.NamedTemporaryFile(prefix="ftkit-", dir="/dev/shm", delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            except OSError:
                os.unlink(file.name)
                return None
            return file.name
    except OSError:
        return None
