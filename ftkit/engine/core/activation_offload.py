"""Inputs of recomputed blocks, from forward to backward: kept where they are, or moved to host memory or NVMe meanwhile.

An `ActivationOffload` takes the activations among a block's arguments, floating tensors that ask for a gradient, and gives
an `OffloadHandle` for each; what blocks share (masks, rotary tables) stays with autograd on the device. The way out runs
behind the computation on a side stream and, to files, through threads; the way back begins one block before it is wanted.
The same tensor handed to several blocks (a position bias) is moved once.

What it refuses: to give a tensor back twice; so a second backward over the same graph, which needs recomputation from
activations twice, is refused while activations are offloaded.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import count
from math import prod

import torch
from torch import Tensor

from ftkit.engine.arena import Arena
from ftkit.engine.files.flat_file import FlatFile, Request
from ftkit.engine.memory.tiers import Tiers
from ftkit.spec.tiers import DEVICE, HOST

STAGING = 4
"""Host buffers of each size through which activations pass on their way to files and back."""


RECENT = 4
"""Tensors among which one that is handed to several blocks is looked for."""


class OffloadHandle:
    """One tensor that was moved away: what brings it back."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload = offload
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.place = offload.place(_padded_bytes(tensor))
        offload.leave(tensor, self.place)
        self.version = tensor._version
        self.users = 1
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.taken = False
        self.release = weakref.finalize(self, offload.free[self.place.size_bytes].append, self.place)

    def bring(self) -> None:
        """Start bringing it back."""
        if self.coming is None and not self.taken:
            self.coming = self.offload.fetch(self)

    def take(self) -> Tensor:
        """Return the tensor on the device, asking for a gradient.

        Raises:
            RuntimeError: if all who kept it have taken it.
        """
        if self.taken:
            raise RuntimeError(
                "a second backward over a graph whose activations were offloaded: they are gone after the first; keep them "
                "on the device (engine.activation_offload: device)"
            )
        self.bring()
        assert self.coming is not None
        tensor, event = self.coming
        if event is not None:
            torch.cuda.current_stream(self.offload.device).wait_event(event)
        self.users -= 1
        if self.users == 0:
            self.taken, self.coming = True, None
            self.release()
        return tensor.detach().requires_grad_()


class Place:
    """Room for one tensor: a host buffer, or a file."""

    def __init__(self, size_bytes: int, buffer: Tensor | None, file: FlatFile | None) -> None:
        self.size_bytes = size_bytes
        self.buffer, self.file = buffer, file
        self.write: Request | None = None


class ActivationOffload:
    """Moves activations to the tier of `activation_offload`, and back.

    Args:
        tiers: tiers of this rank.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.tier = tiers.tier("activation_offload")
        self.device = tiers.device
        self.free: dict[int, list[Place]] = defaultdict(list)
        self.staging: dict[int, list[Place]] = defaultdict(list)
        self.arenas: list[Arena] = []
        self.numbers = count()
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" and self.tier != DEVICE else None
        self.recent: deque[tuple[weakref.ref[Tensor], weakref.ref[OffloadHandle]]] = deque(maxlen=RECENT)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory taken so far."""
        return sum(arena.requested_bytes for arena in self.arenas)

    def keep(self, tensors: Sequence[Tensor]) -> list[OffloadHandle | None]:
        """Move the activations among `tensors` away; None for those that stay. The originals may be freed at once."""
        if self.tier == DEVICE:
            return [None] * len(tensors)
        return [self._handle(t) if t.is_floating_point() and t.requires_grad else None for t in tensors]

    def _handle(self, tensor: Tensor) -> OffloadHandle:
        for known, former in ((tensor_ref(), handle_ref()) for tensor_ref, handle_ref in self.recent):
            if known is tensor and former is not None and former.version == tensor._version and former.users > 0:
                former.users += 1
                return former
        handle = OffloadHandle(self, tensor)
        self.recent.append((weakref.ref(tensor), weakref.ref(handle)))
        return handle

    # --- rooms

    def place(self, size_bytes: int) -> Place:
        """Return room of a size: one that was used before, or a new one."""
        if self.free[size_bytes]:
            return self.free[size_bytes].pop()
        if self.tier == HOST:
            return Place(size_bytes, self._buffer(size_bytes), None)
        assert self.tiers.disk is not None
        return Place(size_bytes, None, self.tiers.disk.file(f"kept.{next(self.numbers)}", size_bytes // 4, torch.int32))

    def _buffer(self, size_bytes: int) -> Tensor:
        arena = self.tiers.arena(size_bytes)
        self.arenas.append(arena)
        return arena.take(size_bytes, torch.uint8)

    def _staging(self, size_bytes: int) -> Place:
        """Return a host buffer whose last write to a file is done; the least recently used one."""
        ring = self.staging[size_bytes]
        if len(ring) < STAGING:
            ring.append(Place(size_bytes, self._buffer(size_bytes), None))
            return ring[-1]
        ring.append(ring.pop(0))
        if ring[-1].write is not None:
            ring[-1].write.wait()
            ring[-1].write = None
        return ring[-1]

    # --- ways

    def leave(self, tensor: Tensor, place: Place) -> None:
        """Copy `tensor` to its place. (The way back is asked of the same stream, and so comes after.)"""
        host = place if place.buffer is not None else self._staging(place.size_bytes)
        assert host.buffer is not None
        event = self._copy(_view(host.buffer, tensor.shape, tensor.dtype), tensor)
        if place.file is not None:
            if event is not None:
                event.synchronize()
            host.write = place.write = place.file.write(0, host.buffer.view(torch.int32))

    def fetch(self, handle: OffloadHandle) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a handle's tensor on the device, and the event after which it is there."""
        place = handle.place
        if place.buffer is None:
            assert place.file is not None
            if place.write is not None:
                place.write.wait()
            host = self._staging(place.size_bytes)
            assert host.buffer is not None
            place.file.read(0, host.buffer.view(torch.int32)).wait()
            source = _view(host.buffer, handle.shape, handle.dtype)
        else:
            source = _view(place.buffer, handle.shape, handle.dtype)
        tensor = torch.empty(handle.shape, dtype=handle.dtype, device=self.device)
        event = self._copy(tensor, source)
        if place.buffer is None and event is not None:
            event.synchronize()  # the staging buffer is about to be used again
        return tensor, event

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy behind the computation, once it has made `source`."""
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
    """The inputs of one block that were moved away: of each forward whose backward is to come.

    Args:
        offload: moves them.
    """

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self._forwards: list[list[weakref.ref[OffloadHandle]]] = []

    def keep(self, tensors: Sequence[Tensor]) -> list[OffloadHandle | None]:
        """Move a call's activations away until its backward; None for what stays with autograd."""
        handles = self.offload.keep(tensors)
        self._forwards.append([weakref.ref(handle) for handle in handles if handle is not None])
        return handles

    def bring(self) -> None:
        """Start bringing back the inputs of the last forward."""
        for reference in self._forwards.pop() if self._forwards else ():
            if (handle := reference()) is not None:
                handle.bring()

    def forget(self) -> None:
        """Forget forwards whose backward has not come."""
        self._forwards.clear()


def _padded_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, rounded up to what a file of 4-byte elements takes."""
    return -(-tensor.numel() * tensor.dtype.itemsize // 16384) * 16384


def _view(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return buffer[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
