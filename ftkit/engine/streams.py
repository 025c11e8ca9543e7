"""Streams, events, pinned memory and threads of one rank. No other file of the engine uses them through `torch.cuda`.

Beside the computing stream, a rank on CUDA has the side streams `collectives`, `up` (host to device), `down` (device to
host) and `save`. An optimizer has three more. A thread that issues its work late does not delay other work there.

Work on one stream runs in the order of issue, and all ranks issue their collectives in the same order. Events order work on
different streams. Memory that the computing stream allocates is freed in its order: `SideStream.keep` delays that
for a tensor that may be freed while a side stream uses it.

`Streams` is for ranks whose work runs in program order: every event is `DONE`. `CudaStreams` is for a GPU. The tests have a
third implementation, which runs on a CPU and checks the order of all accesses (tests/engine/recorder.py).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ftkit.engine.trace import Trace

logger = logging.getLogger(__name__)

LARGE_BYTES = 4 << 30
"""Pinning so much takes seconds, which the log tells."""

URGENT = -1
"""Priority of the stream of collectives, so that they do not queue behind kernels of the computing stream."""


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Make the current stream wait for the work before the event."""

    def synchronize(self) -> None:
        """Block the host until the work before the event is done."""


class _Done:
    """An event whose work is done."""

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


DONE: Event = _Done()
"""An event whose work is done, as all work on a CPU that was issued before."""


class SideStream:
    """A stream beside the computing one. Here its work runs in program order.

    Args:
        name: Its name in the trace.
        trace: Receives its spans.
    """

    def __init__(self, name: str, trace: Trace) -> None:
        self.name, self.trace = name, trace

    @contextmanager
    def run(self, *after: Event, span: str = "") -> Iterator[None]:
        """Run the body on this stream, after the events `after`, as a span of the trace if it has a name."""
        with self._current():
            for event in after:
                event.wait()
            with self.trace.span(self.name, span) if span else nullcontext():
                yield

    def mark(self) -> Event:
        """Return an event after the work issued on this stream so far."""
        return DONE

    def keep(self, tensor: Tensor) -> None:
        """Do not reuse the memory of a freed device tensor before the work issued on this stream so far is done."""

    def _current(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Streams:
    """The streams and threads of one rank. Here all work runs in program order.

    Args:
        device: Device that the rank computes on.

    Attributes:
        separate: Whether the device has memory of its own, to which the host copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.separate = device.type != "cpu"
        self.trace = Trace(self)
        self.collectives = self.side("collectives", URGENT)
        self.up, self.down, self.save = (self.side(name) for name in ("up", "down", "save"))

    def side(self, name: str, priority: int = 0) -> SideStream:
        """Return a new side stream. CUDA has few of them in a process, so make it once."""
        return SideStream(name, self.trace)

    def now(self) -> Event:
        """Return an event after the work issued on the current stream so far."""
        return DONE

    def join(self) -> None:
        """Make the current stream wait for the work issued on the side streams so far."""
        for side in (self.collectives, self.up, self.down):
            side.mark().wait()

    # --- memory

    @staticmethod
    def pin(window: ctypes.Array[ctypes.c_ubyte]) -> int:
        """Pin host memory until `window`, which owns it, is freed. Return 0, or CUDA's error."""
        return 0

    # --- threads

    def enter_thread(self) -> None:
        """Prepare a new thread for work on the device."""

    def worker(self, name: str) -> Executor:
        """Return an executor of one thread. The thread starts with its first job."""
        return ThreadPoolExecutor(1, name, initializer=self.enter_thread)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread that calls `target`."""

        def run() -> None:
            self.enter_thread()
            target()

        return threading.Thread(target=run, name=name, daemon=True)

    def signal(self) -> threading.Event:
        """Return a new signal from one thread to another."""
        return threading.Event()

    # --- the trace's clock

    def stamp(self) -> Any:
        """Return the time at which the current stream gets here, for `seconds`."""
        return time.perf_counter()

    def seconds(self, start: Any, stamp: Any) -> float:
        """Return the seconds between two stamps."""
        return float(stamp - start)

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""


class _CudaEvent:
    """An event after the work issued on a stream. The current device of a thread need not be the stream's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.device = stream.device
        self.event = stream.record_event(torch.cuda.Event(blocking=True))  # a host that waits sleeps instead of spinning

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaSideStream(SideStream):
    """A CUDA stream."""

    def __init__(self, name: str, trace: Trace, device: torch.device, priority: int) -> None:
        super().__init__(name, trace)
        self.stream = torch.cuda.Stream(device, priority=priority)

    def mark(self) -> Event:
        return _CudaEvent(self.stream)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class CudaStreams(Streams):
    """The streams of a rank on a CUDA device."""

    def side(self, name: str, priority: int = 0) -> SideStream:
        """See `Streams.side`."""
        return _CudaSideStream(name, self.trace, self.device, priority)

    def now(self) -> Event:
        """See `Streams.now`."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    @staticmethod
    def pin(window: ctypes.Array[ctypes.c_ubyte]) -> int:
        """See `Streams.pin`."""
        address = ctypes.addressof(window)
        start = time.perf_counter()
        # One call, because a copy must not cross the border of two registrations. Flags 0: with unified addressing the
        # memory is pinned for every device, and no other device gets a context.
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(window), 0))
        if len(window) >= LARGE_BYTES:
            logger.info("pinned %.1f GiB of host memory in %.1f s", len(window) / (1 << 30), time.perf_counter() - start)
        if not error:  # views keep the window alive, so this runs after the last view and before the memory is unmapped
            weakref.finalize(window, _unpin, address, os.getpid())
        return error

    def enter_thread(self) -> None:
        """Make the rank's device the current one.

        The current device of a new thread is 0. Waiting for an event or using a stream there would create a CUDA context on
        GPU 0, about 530 MiB for each of the other ranks of a node.
        """
        torch.cuda.set_device(self.device)

    def stamp(self) -> Any:
        """See `Streams.stamp`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, stamp: Any) -> float:
        """See `Streams.seconds`. Both stamps must be reached."""
        return float(start.elapsed_time(stamp)) / 1e3

    def synchronize(self) -> None:
        """See `Streams.synchronize`."""
        torch.cuda.synchronize(self.device)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a rank that computes on `device`."""
    return CudaStreams(device) if device.type == "cuda" else Streams(device)


def _unpin(address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has pinned nothing
        torch.cuda.cudart().cudaHostUnregister(address)
