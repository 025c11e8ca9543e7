"""Activation offload: inputs of recomputed blocks move to host memory or NVMe from forward to backward.

`ActivationOffload.keep` takes a block's arguments and returns an `OffloadHandle` for each activation, that is, for each
floating tensor that requires a gradient. Shared arguments (masks, rotary tables) stay on the device. Copies run on the
streams `down` and `up`, and file transfers on a thread, behind the computation. A handle starts to fetch its tensor one
block before it is needed. A tensor that several blocks receive (a position bias) moves once.

A handle gives its tensor back once per user, so a second backward over the same graph raises an error.

Memory is reused for any activation that fits. Otherwise the largest free place is replaced by a larger one. So there are
never more places than activations at one time, and few are pinned again when rows get longer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from math import prod

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ftkit.engine.memory.arena import PAGE_BYTES
from ftkit.engine.memory.flat_file import FlatFile
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.streams import DONE, Event
from ftkit.spec.sizes import LEAVING, STAGING
from ftkit.spec.tiers import DEVICE, HOST, NVME, activation_bytes


class OffloadHandle:
    """One tensor that moved off the device."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload = offload
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.place = offload.place(tensor.nbytes)
        self.release = weakref.finalize(self, offload.free.append, self.place)
        offload.leave(tensor, self.place)
        self.version = tensor._version
        self.users = 1
        self.coming: tuple[Tensor, Callable[[], Event]] | None = None

    def bring(self) -> None:
        """Start to fetch the tensor."""
        if self.coming is None and self.users > 0:
            self.coming = self.offload.fetch(self)

    def take(self) -> Tensor:
        """Return the tensor on the device, once per user. It requires a gradient."""
        self.bring()
        if self.coming is None:
            raise RuntimeError("a second backward over a graph whose activations were offloaded and freed after the first")
        tensor, fetched = self.coming
        fetched().wait()
        self.users -= 1
        if self.users == 0:
            self.coming = None
            self.release()
        return tensor.detach().requires_grad_()


@dataclass(eq=False)
class Place:
    """Memory for one tensor: a host buffer or a file.

    Args:
        size_bytes: Its bytes.
        buffer: The host buffer, uint8.
        file: The file.
        copied: The event after the last copy from or to the buffer.
        job: The last transfer of the file, or between the buffer and a file.
    """

    size_bytes: int
    buffer: Tensor | None = None
    file: FlatFile | None = None
    copied: Event = DONE
    job: Future[Event] | None = None

    def view(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the beginning of the buffer as a tensor."""
        assert self.buffer is not None
        return self.buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def settle(self) -> None:
        """Wait until no transfer uses the place. An error of one belongs to the tensor that was moved."""
        if self.job is not None:
            self.job.exception()
            self.job = None


class ActivationOffload:
    """Moves activations to the tier of `activation_offload` and back."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.streams = tiers, tiers.streams
        self.tier = tiers.tier("activation_offload")
        self.free: list[Place] = []
        self.staging: list[Place] = []  # the least recently used first
        self.leaving: deque[tuple[Tensor, Event]] = deque()  # originals, and the events after their copies
        self.host_bytes = 0  # host memory allocated now
        self.numbers = count()
        self.handles = WeakTensorKeyDictionary()  # from a tensor to a weak reference to its handle
        if self.tier == NVME:
            self.thread = tiers.worker("ftkit-activations")

    def keep(self, tensors: Sequence[Tensor]) -> list[OffloadHandle | None]:
        """Move the activations among `tensors`. The originals may be freed. None stands for a tensor that stays."""
        if self.tier == DEVICE:
            return [None] * len(tensors)
        return [self._handle(t) if t.is_floating_point() and t.requires_grad else None for t in tensors]

    def _handle(self, tensor: Tensor) -> OffloadHandle:
        former: OffloadHandle | None = self.handles.get(tensor, lambda: None)()
        if former is not None and former.version == tensor._version and former.users > 0:
            former.users += 1
            return former
        handle = OffloadHandle(self, tensor)
        self.handles[tensor] = weakref.ref(handle)
        return handle

    # --- memory

    def place(self, size_bytes: int) -> Place:
        """Return free memory for a tensor: the smallest that fits. The largest is replaced if none does."""
        fitting = [place for place in self.free if place.size_bytes >= size_bytes]
        if fitting:
            place = min(fitting, key=lambda each: each.size_bytes)
            self.free.remove(place)
            return place
        if self.free:
            self.free.remove(largest := max(self.free, key=lambda each: each.size_bytes))
            self._drop(largest)
        if self.tier == HOST:
            return self._host_place(size_bytes)
        assert self.tiers.disk is not None
        size_bytes = activation_bytes(size_bytes)
        return Place(size_bytes, file=self.tiers.disk.file(f"kept.{next(self.numbers)}", size_bytes, torch.uint8))

    def _host_place(self, size_bytes: int) -> Place:
        size_bytes = activation_bytes(size_bytes)
        self.host_bytes += size_bytes
        return Place(size_bytes, self.tiers.arena(size_bytes).take(size_bytes, torch.uint8))

    def _drop(self, place: Place) -> None:
        """Free a place."""
        place.settle()
        place.copied.synchronize()
        if place.file is not None:
            assert self.tiers.disk is not None
            self.tiers.disk.remove(place.file)
        else:
            self.host_bytes -= place.size_bytes
            place.buffer = None

    def _staging(self, size_bytes: int) -> Place:
        """Return the least recently used staging buffer, which no file transfer uses. It is replaced if it is too small."""
        place = self.staging.pop(0) if len(self.staging) == STAGING else self._host_place(size_bytes)
        place.settle()
        if place.size_bytes < size_bytes:
            self._drop(place)
            place = self._host_place(size_bytes)
        self.staging.append(place)
        return place

    # --- transfers

    def leave(self, tensor: Tensor, place: Place) -> None:
        """Start to copy `tensor` to its place."""
        file, host = place.file, place if place.file is None else self._staging(tensor.nbytes)
        with self.streams.down.run(self.streams.now(), host.copied):
            host.view(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
        host.copied = self.streams.down.mark()
        self.leaving.append((tensor.detach(), host.copied))
        self.release(LEAVING)
        if file is None:
            return

        def write() -> Event:
            host.copied.synchronize()
            file.write(0, _whole_pages(host, tensor_bytes)).wait()
            return DONE

        tensor_bytes = tensor.nbytes  # the tensor itself may be freed now
        place.job = host.job = self.thread.submit(write)

    def release(self, most: int = 0) -> None:
        """Make the current stream wait for the oldest copies, and release all but the newest `most` originals."""
        while len(self.leaving) > most:
            _, copied = self.leaving.popleft()
            copied.wait()

    def fetch(self, handle: OffloadHandle) -> tuple[Tensor, Callable[[], Event]]:
        """Return a handle's tensor on the device, and a function that returns the event after which it is complete.

        The function waits until the tensor is read from its file.
        """
        self.release()  # work issued from here on runs after all copies to the host
        place, up = handle.place, self.streams.up
        tensor = torch.empty(handle.shape, dtype=handle.dtype, device=self.streams.device)
        file, host = place.file, place if place.file is None else self._staging(tensor.nbytes)
        begun, written = self.streams.now(), place.job

        def copy() -> Event:
            with up.run(begun):
                tensor.copy_(host.view(handle.shape, handle.dtype), non_blocking=True)
                up.keep(tensor)
            host.copied = up.mark()
            return host.copied

        def read() -> Event:
            assert file is not None
            assert written is not None
            host.copied.synchronize()
            written.result()
            file.read(0, _whole_pages(host, tensor.nbytes)).wait()
            return copy()

        if file is None:
            event = copy()
            return tensor, lambda: event
        place.job = host.job = self.thread.submit(read)  # after the write: the thread does one job after the other
        return tensor, place.job.result


class OffloadedInputs:
    """The offloaded inputs of one block, for each forward that awaits its backward."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self._forwards: list[weakref.WeakSet[OffloadHandle]] = []

    def keep(self, tensors: Sequence[Tensor]) -> list[OffloadHandle | None]:
        """Move a call's activations until its backward; None for a tensor that stays with autograd."""
        handles = self.offload.keep(tensors)
        self._forwards.append(weakref.WeakSet(handle for handle in handles if handle is not None))
        return handles

    def bring(self) -> None:
        """Start to fetch the inputs of the last forward."""
        for handle in self._forwards.pop() if self._forwards else ():
            handle.bring()

    def forget(self) -> None:
        """Forget forwards whose backward did not run."""
        self.offload.release()
        self._forwards.clear()


def _whole_pages(host: Place, size_bytes: int) -> Tensor:
    """Return the buffer's bytes that hold a tensor, rounded up as files need it."""
    assert host.buffer is not None
    return host.buffer[: -(-size_bytes // PAGE_BYTES) * PAGE_BYTES]
