"""Streams that run on a CPU as CUDA's would be issued, and a checker of the order of all accesses to memory.

Every stream, host thread and file transfer is an agent with a vector clock. An operation belongs to the current stream, or
to its host thread if all its tensors are in host memory. Two accesses of one byte, one of which writes it, need an order:
issue on one stream, an event and a wait, a wait of the host, a job's end. So does freeing memory that another stream uses.

Recorded are torch operations (a `TorchDispatchMode` in each thread), the loops on the host, files, and collectives, which
read and write on the current stream, as NCCL's do. Numbers are computed at once, so that a run gives plain PyTorch's.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.flat_file import FlatFile, Request
from ftkit.engine.memory.tiers import FileStore
from ftkit.engine.streams import SideStream, Streams

READ_ONLY = {"square_sum": {0}, "add_": {1}, "adamw": {1}, "sgd": {1}, "adamw_8bit": {1}, "lion_8bit": {1}}
READ_ONLY |= {"split": {0}, "join": {0, 1}, "encode": {0}, "decode": {0, 1}}
"""Positions of the arguments that a host loop only reads."""

Clock = dict[str, int]
Range = tuple[Any, int, int]  # key of a memory, first byte, byte to stop before
Access = namedtuple("Access", "start stop agent time kind what")
"""Bytes [start, stop) that an agent has read or written at a time of its own clock."""


@dataclass
class Memory:
    """A storage or a file. `kept` are the streams that its memory waits for when it is freed."""

    home: str
    on_host: bool
    accesses: list[Access] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)


class Local(threading.local):
    stream: str | None = "compute"


class Recorder:
    """Clocks and memory of one rank.

    `found` has the accesses without an order; `waits` has what each host thread has waited for, by the thread's name.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.active = False
        self.found: list[str] = []
        self.waits: list[tuple[str, str]] = []
        self.clocks: dict[str, Clock] = {}
        self.memory: dict[Any, Memory] = {}
        self.pinned: list[tuple[int, int]] = []
        self.numbers = itertools.count()
        self.local = Local()

    @property
    def host(self) -> str:
        return f"host {threading.current_thread().name}"

    @contextmanager
    def on(self, stream: str | None) -> Iterator[None]:
        """Make a stream the current one of this thread. On None nothing is recorded."""
        before, self.local.stream = self.local.stream, stream
        try:
            yield
        finally:
            self.local.stream = before

    def clock(self, agent: str) -> Clock:
        """Return a copy of an agent's clock. A stream comes after what the host did before it issued the last work."""
        with self.lock:
            if not agent.startswith("host"):
                self.join(agent, self.clocks.get(self.host, {}))
            return dict(self.clocks.get(agent, {}))

    def join(self, agent: str, clock: Clock) -> None:
        """Let an agent go on after the work that `clock` has seen."""
        with self.lock:
            own = self.clocks.setdefault(agent, {})
            for other, time in clock.items():
                own[other] = max(own.get(other, 0), time)

    def wait(self, clock: Clock, why: str) -> None:
        """Block the host."""
        self.waits.append((threading.current_thread().name, why))
        self.join(self.host, clock)

    def after(self, call: Callable[..., Any], clock: Clock, why: str) -> Callable[..., Any]:
        """Return a wait of the host that comes after the work that `clock` has seen."""

        def wait(*args: Any) -> Any:
            try:
                return call(*args)
            finally:
                self.wait(clock, why)

        return wait

    def handed(self, function: Callable[..., Any]) -> tuple[Callable[..., Any], Clock]:
        """Return a function for another thread, which comes after what this one has done, and the clock at its end."""
        begin, end = self.clock(self.host), Clock()

        def job(*args: Any) -> Any:
            self.join(self.host, begin)
            try:
                return function(*args)
            finally:
                end.update(self.clock(self.host))

        return job, end

    def memory_of(self, tensor: Tensor, agent: str, on_host: bool = False) -> tuple[Any, Memory]:
        """Return the memory of a tensor and its key. It is `agent`'s if it is new."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.memory:
            on_host = on_host or any(start <= key < stop for start, stop in self.pinned)
            self.memory[key] = Memory(self.host if on_host else agent, on_host)
            weakref.finalize(storage, self.free, key)
        return key, self.memory[key]

    def ranges(self, tensors: Sequence[Tensor], agent: str, on_host: bool = False) -> Iterator[Range]:
        """Yield the bytes between each tensor's first and last element."""
        for tensor in tensors:
            if tensor.numel():
                start = tensor.storage_offset() * tensor.itemsize
                extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
                yield self.memory_of(tensor, agent, on_host)[0], start, start + extent * tensor.itemsize

    def free(self, key: Any) -> None:
        """Forget memory that is freed. Its home stream may use it again at once."""
        with self.lock:
            memory = self.memory.pop(key)
            if not self.active:
                return
            order = dict(self.clocks.get(self.host, {}))
            for agent, time in self.clocks.get(memory.home, {}).items():
                order[agent] = max(order.get(agent, 0), time)
            for access in memory.accesses:
                if access.agent not in (memory.home, *memory.kept) and order.get(access.agent, 0) < access.time:
                    self.found.append(f"memory of {memory.home} is freed while {access.agent} uses it: {access.what}")

    def access(self, agent: str, reads: Iterable[Range], writes: Iterable[Range], what: str) -> None:
        """Let an agent access bytes, after all that its host thread has done."""
        with self.lock:
            if not self.active:
                return
            clock = self.clocks.setdefault(agent, {})
            self.join(agent, self.clocks.get(self.host, {}))
            time = clock[agent] = clock.get(agent, 0) + 1
            for key, start, stop, kind in [*((*each, "read") for each in reads), *((*each, "write") for each in writes)]:
                memory = self.memory[key]
                for old in memory.accesses:
                    overlaps = old.start < stop and start < old.stop
                    if overlaps and "write" in (old.kind, kind) and clock.get(old.agent, 0) < old.time:
                        self.found.append(f"{kind} after {old.kind}: {agent} {what}, {old.agent} {old.what}")
                over = [old for old in memory.accesses if kind == "write" or (old.agent, old.kind) == (agent, kind)]
                over = [old for old in over if start <= old.start and old.stop <= stop]
                memory.accesses = [each for each in memory.accesses if each not in over]
                memory.accesses.append(Access(start, stop, agent, time, kind, what))

    def touch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str, made: Sequence[Tensor] = ()) -> str:
        """Record an operation that also makes tensors; return its agent."""
        with self.lock:
            places = self.places((*reads, *writes))
            agent = self.host if places == {True} else self.local.stream
            new = self.ranges(made, agent, places == {True})
            self.access(agent, self.ranges(reads, agent), [*self.ranges(writes, agent), *new], what)
            return agent

    def places(self, tensors: Sequence[Tensor]) -> set[bool]:
        """Return whether the tensors are in host memory."""
        return {self.memory_of(tensor, self.local.stream)[1].on_host for tensor in tensors if tensor.numel()}

    def operation(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a torch operation."""
        schema, tensors, results = function._schema, _tensors((args, kwargs)), _tensors(result)
        if any(each.is_meta for each in (*tensors, *results)):
            return
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return  # a view
        values = {**dict(zip((each.name for each in schema.arguments), args)), **kwargs}
        changed = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        writes = _tensors([values.get(name) for name in changed])
        reads = [tensor for tensor in tensors if not any(tensor is each for each in writes)]
        with self.lock:
            known = {each.untyped_storage().data_ptr() for each in tensors}
            made = [each for each in results if each.untyped_storage().data_ptr() not in known and each.numel()]
            if "empty" in schema.name:
                for each in made:  # work that was issued on this stream may still use what was there before
                    memory = self.memory_of(each, home := self.local.stream)[1]
                    time = self.clocks.get(home, {}).get(home, 0)
                    memory.accesses.append(Access(0, each.untyped_storage().nbytes(), home, time, "write", "is allocated"))
                return
            agent = self.touch(reads, writes, schema.name, made)
            mixed = len(self.places((*reads, *writes))) == 2
        if schema.name == "aten::_local_scalar_dense" and agent == self.local.stream:
            self.wait(self.clock(agent), "a number")
        elif schema.name == "aten::copy_" and mixed and not values.get("non_blocking", False):
            self.wait(self.clock(agent), "a copy")


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


class Mode(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.recorder.active and self.recorder.local.stream is not None:
            self.recorder.operation(func, args, kwargs or {}, result)
        return result


class RecordedEvent:
    def __init__(self, recorder: Recorder, stream: str) -> None:
        self.recorder, self.stream, self.clock = recorder, stream, recorder.clock(stream)

    def wait(self) -> None:
        self.recorder.join(self.recorder.local.stream, self.clock)

    def synchronize(self) -> None:
        self.recorder.wait(self.clock, self.stream)


class RecordedSide(SideStream):
    @property
    def recorder(self) -> Recorder:
        return self.trace.clock.recorder

    def mark(self) -> RecordedEvent:
        return RecordedEvent(self.recorder, self.name)

    def keep(self, tensor: Tensor) -> None:
        self.recorder.memory_of(tensor, self.name)[1].kept.add(self.name)

    def _current(self) -> Any:
        return self.recorder.on(self.name)


class RecordedWorker(ThreadPoolExecutor):
    recorder: Recorder

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        job, end = self.recorder.handed(function)
        future = super().submit(job, *args)
        future.result = self.recorder.after(future.result, end, "a job")
        future.exception = self.recorder.after(future.exception, end, "a job")
        return future


class RecordingStreams(Streams):
    def __init__(self) -> None:
        self.recorder = Recorder()
        super().__init__(torch.device("cpu"))
        self.separate = True

    def side(self, name: str, priority: int = 0) -> RecordedSide:
        return RecordedSide(name, self.trace)

    def now(self) -> RecordedEvent:
        return RecordedEvent(self.recorder, self.recorder.local.stream)

    def pin(self, window: ctypes.Array[ctypes.c_ubyte]) -> int:  # type: ignore[override]
        span = ctypes.addressof(window), ctypes.addressof(window) + len(window)
        self.recorder.pinned.append(span)
        weakref.finalize(window, self.recorder.pinned.remove, span)
        return 0

    def enter_thread(self) -> None:
        Mode(self.recorder).__enter__()

    def worker(self, name: str) -> RecordedWorker:
        worker = RecordedWorker(1, name, initializer=self.enter_thread)
        worker.recorder = self.recorder
        return worker

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        job, end = self.recorder.handed(target)
        thread = super().thread(job, name)
        thread.join = self.recorder.after(thread.join, end, "a thread")
        return thread

    def signal(self) -> threading.Event:
        signal, sent = super().signal(), Clock()
        give = signal.set
        signal.set = lambda: (sent.update(self.recorder.clock(self.recorder.host)), give())
        signal.wait = self.recorder.after(signal.wait, sent, "a signal")
        return signal

    def loops(self, threads: int) -> HostLoops:
        loops = HostLoops(threads)
        for name, reads in READ_ONLY.items():
            setattr(loops, name, recorded_loop(self.recorder, name, getattr(loops, name), reads))
        return loops

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record the body. Raise AssertionError at its end if accesses had no order."""
        recorder, request, blank = self.recorder, FlatFile._request, FileStore.blank
        FlatFile._request = lambda *args: recorded_request(recorder, request(*args), *args)  # type: ignore[method-assign]
        FileStore.blank = lambda *args: recorded_blank(recorder, blank(*args))  # type: ignore[method-assign]
        recorder.active = True
        try:
            with Mode(recorder):
                yield recorder
        finally:
            recorder.active = False
            FlatFile._request, FileStore.blank = request, blank  # type: ignore[method-assign]
        assert not recorder.found, "\n".join(f"{count} times {text}" for text, count in Counter(recorder.found).items())


def recorded_loop(recorder: Recorder, name: str, loop: Callable[..., Any], reads: set[int]) -> Callable[..., Any]:
    """Return a host loop that records its arguments. It only reads those in `reads`."""

    def call(*args: Any, **settings: Any) -> Any:
        with recorder.on(None):
            result = loop(*args, **settings)
        tensors = {number: each for number, each in enumerate(args) if isinstance(each, Tensor)}
        written = [each for number, each in tensors.items() if number not in reads]
        recorder.touch([tensors[number] for number in reads], written, name)
        return result

    return call


def recorded_request(recorder: Recorder, request: Request, file: FlatFile, *arguments: Any) -> Request:
    """Record a file transfer, which is an agent of its own."""
    _, start, tensor, doing = arguments
    agent, first = f"file {next(recorder.numbers)}", start * file.dtype.itemsize
    recorder.memory.setdefault(file.path, Memory(agent, True))
    ranges = [(file.path, first, first + tensor.nbytes)], [*recorder.ranges([tensor], agent)]
    recorder.access(agent, *(ranges if doing == "reading" else ranges[::-1]), f"{doing} {file.path.name}")

    request.wait = recorder.after(request.wait, recorder.clock(agent), "a file")
    return request


def recorded_blank(recorder: Recorder, piece: Tensor) -> Tensor:
    """Note that a piece is host memory."""
    with recorder.lock:
        memory = recorder.memory_of(piece, recorder.host, on_host=True)[1]
        memory.home, memory.on_host, memory.accesses = recorder.host, True, []
    return piece


class RecordingCommunicator(Communicator):
    def __init__(self, streams: RecordingStreams) -> None:
        super().__init__(streams.device)
        self._stage = None  # as on CUDA
        self.recorder = streams.recorder

    def _run(self, name: str, of: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *args: Any) -> None:
        with self.recorder.on(None):
            getattr(super(), name)(*args, of)
        self.recorder.touch(reads, writes, f"{name} {of}")

    def all_gather(self, full: Tensor, shard: Tensor, of: str = "") -> None:
        written = [full]
        if shard.numel() and shard.untyped_storage().data_ptr() == full.untyped_storage().data_ptr():
            own = shard.numel() * self.rank  # NCCL leaves this part as it is
            written = [full[:own], full[own + shard.numel() :]]
        self._run("all_gather", of, [shard], written, full, shard)

    def reduce_scatter_mean(self, shard: Tensor, full: Tensor, of: str = "") -> None:
        self._run("reduce_scatter_mean", of, [], [full, shard], shard, full)

    def all_reduce_mean(self, full: Tensor, of: str = "") -> None:
        self._run("all_reduce_mean", of, [], [full], full)

    def sum(self, numbers: Tensor, of: str = "") -> Tensor:
        self._run("sum", of, [], [numbers], numbers)
        return numbers

    def totals(self, numbers: Tensor, of: str = "") -> list[float]:
        totals = super().totals(numbers, of)
        self.recorder.wait(self.recorder.clock(self.recorder.local.stream), "totals")
        return totals
