"""Activation offload: inputs of recomputed blocks move to host memory or NVMe from forward to backward.

`ActivationOffload.keep` takes a block's arguments and returns an `OffloadHandle` for each activation, that is, for each
floating tensor that requires a gradient. Shared arguments (masks, rotary tables) stay on the device. Copies run on a side
stream, and file transfers on threads, behind the computation. A handle starts to fetch its tensor one block before it is
needed. A tensor that several blocks receive (a position bias) moves once.

A handle gives its tensor back once per user, so a second backward over the same graph raises an error.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from math import prod

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ftkit.engine.memory.arena import Arena
from ftkit.engine.memory.flat_file import FlatFile, Request
from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.tiers import DEVICE, HOST

STAGING = 4
"""Host buffers of each size between the device and files."""

ROUND_BYTES = 16384
"""Buffers and files are rounded up to a multiple of this."""


class OffloadHandle:
    """One tensor that moved off the device."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload = offload
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.place = offload.place(-(-tensor.nbytes // ROUND_BYTES) * ROUND_BYTES)
        offload.leave(tensor, self.place)
        self.version = tensor._version
        self.users = 1
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.release = weakref.finalize(self, offload.free[self.place.size_bytes].append, self.place)

    def bring(self) -> None:
        """Start to fetch the tensor."""
        if self.coming is None and self.users > 0:
            self.coming = self.offload.fetch(self)

    def take(self) -> Tensor:
        """Return the tensor on the device, once per user. It requires a gradient."""
        self.bring()
        if self.coming is None:
            raise RuntimeError("a second backward over a graph whose activations were offloaded and freed after the first")
        tensor, event = self.coming
        if event is not None:
            torch.cuda.current_stream(self.offload.device).wait_event(event)
        self.users -= 1
        if self.users == 0:
            self.coming = None
            self.release()
        return tensor.detach().requires_grad_()


@dataclass
class Place:
    """Memory for one tensor: a host buffer or a file. `write` is the last write from the buffer or to the file."""

    size_bytes: int
    buffer: Tensor | None = None
    file: FlatFile | None = None
    write: Request | None = None

    def settle(self) -> None:
        """Wait for the last write."""
        if self.write is not None:
            self.write.wait()


class ActivationOffload:
    """Moves activations to the tier of `activation_offload` and back."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.tier = tiers.tier("activation_offload")
        self.device = tiers.device
        self.free: dict[int, list[Place]] = defaultdict(list)
        self.staging: dict[int, Iterator[Place]] = {}
        self.arenas: list[Arena] = []
        self.numbers = count()
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" and self.tier != DEVICE else None
        self.handles = WeakTensorKeyDictionary()  # from a tensor to a weak reference to its handle

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return sum(arena.requested_bytes for arena in self.arenas)

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
        """Return free memory of a size, new if necessary."""
        if self.free[size_bytes]:
            return self.free[size_bytes].pop()
        if self.tier == HOST:
            return self._host_place(size_bytes)
        assert self.tiers.disk is not None
        return Place(size_bytes, file=self.tiers.disk.file(f"kept.{next(self.numbers)}", size_bytes, torch.uint8))

    def _host_place(self, size_bytes: int) -> Place:
        arena = self.tiers.arena(size_bytes)
        self.arenas.append(arena)
        return Place(size_bytes, arena.take(size_bytes, torch.uint8))

    def _buffer(self, place: Place) -> tuple[Place, Tensor]:
        """Return a host place and its buffer: `place`, or for a file the least recently used staging of its size."""
        if place.file is not None:
            if place.size_bytes not in self.staging:
                self.staging[place.size_bytes] = cycle([self._host_place(place.size_bytes) for _ in range(STAGING)])
            place = next(self.staging[place.size_bytes])
            place.settle()
        assert place.buffer is not None
        return place, place.buffer

    # --- transfers

    def leave(self, tensor: Tensor, place: Place) -> None:
        """Copy `tensor` to its place. A fetch on the same stream comes after it."""
        host, buffer = self._buffer(place)
        event = self._copy(_view(buffer, tensor.shape, tensor.dtype), tensor)
        if place.file is not None:
            if event is not None:
                event.synchronize()
            place.settle()  # a tensor that was dropped without a backward may still be written
            host.write = place.write = place.file.write(0, buffer)

    def fetch(self, handle: OffloadHandle) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a handle's tensor on the device, and the event after which it is complete."""
        place = handle.place
        _, buffer = self._buffer(place)
        if place.file is not None:
            place.settle()
            place.file.read(0, buffer).wait()
        tensor = torch.empty(handle.shape, dtype=handle.dtype, device=self.device)
        event = self._copy(tensor, _view(buffer, handle.shape, handle.dtype))
        if place.file is not None and event is not None:
            event.synchronize()  # the next tensor may use the staging buffer
        return tensor, event

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy on the side stream, after the computation that makes `source`."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            for tensor in (target, source):
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            return self.stream.record_event()


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
        self._forwards.clear()


def _view(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
