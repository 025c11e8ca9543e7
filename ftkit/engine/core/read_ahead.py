"""Read-ahead: weights on NVMe are read into host memory before they are gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.arena import arena_bytes
from ftkit.engine.memory.tiers import FileStore, Tiers
from ftkit.engine.streams import DONE, Event
from ftkit.spec.sizes import READ_AHEAD_BUFFERS


class ReadAhead:
    """Reads this rank's shards of the next units.

    Args:
        groups: For each unit, its gathered flat parameters.
        tiers: Tiers of this rank.
    """

    def __init__(self, groups: Sequence[Sequence[FlatParameter]], tiers: Tiers) -> None:
        widest = max(arena_bytes([(flat.layout.shard_numel, flat.dtype) for flat in group]) for group in groups)
        self.arena = tiers.arena(READ_AHEAD_BUFFERS * widest)
        self.streams = tiers.streams
        buffers = [self.arena.take(widest, torch.uint8) for _ in range(READ_AHEAD_BUFFERS)]
        # Each with the event after the last copy from it. The oldest is used first.
        self.free: deque[tuple[Event, Tensor]] = deque((DONE, buffer) for buffer in buffers)
        self.coming: dict[tuple[tuple[str, int], ...], tuple[Future[None], Tensor]] = {}  # by names and versions
        self.thread = tiers.worker("ftkit-read-ahead")

    def start(self, flats: Sequence[FlatParameter]) -> None:
        """Start reading a unit's weights, unless that has begun."""
        content = content_of(flats)
        if content in self.coming or not flats:
            return
        buffer = self._buffer()
        self.coming[content] = (self.thread.submit(self._read, flats, buffer), buffer)

    def take(self, flats: Sequence[FlatParameter]) -> tuple[list[Tensor], Tensor]:
        """Wait for a unit's weights. Return them, (S,) each, and their buffer, to pass to `give_back`."""
        self.start(flats)
        future, buffer = self.coming.pop(content_of(flats))
        future.result()
        return list(_parts(buffer, flats)), buffer

    def give_back(self, buffer: Tensor) -> None:
        """Reuse a buffer once the work issued on the current stream has read it."""
        self.free.append((self.streams.now(), buffer))

    def copy(self, flat: FlatParameter, out: Tensor) -> None:
        """Copy a root parameter's shard to `out` (S,) on the current stream. Blocks the host until the drive has read it."""
        assert isinstance(flat.weights, FileStore)
        flat.settle()
        for part in out.split(self.arena.requested_bytes // READ_AHEAD_BUFFERS // flat.dtype.itemsize):
            buffer = self._buffer()
            source = buffer[: part.nbytes].view(flat.dtype)
            flat.weights.file.read(part.storage_offset() - out.storage_offset(), source).wait()
            part.copy_(source, non_blocking=True)
            self.give_back(buffer)

    def _buffer(self) -> Tensor:
        if not self.free:  # the units came in another order: drop the oldest read
            future, buffer = self.coming.pop(next(iter(self.coming)))
            future.exception()
            return buffer
        copied, buffer = self.free.popleft()
        copied.synchronize()
        return buffer

    @staticmethod
    def _read(flats: Sequence[FlatParameter], buffer: Tensor) -> None:
        requests = []
        for flat, part in zip(flats, _parts(buffer, flats)):
            if (update := flat.update) is not None:  # do not settle: the computing thread clears `update`
                update.wait()
            if isinstance(flat.weights, FileStore):
                requests.append(flat.weights.file.read(0, part))
        for request in requests:
            request.wait()


def content_of(flats: Sequence[FlatParameter]) -> tuple[tuple[str, int], ...]:
    """Return names and versions of weights, by which a buffer with them is known."""
    return tuple((flat.name, flat.version) for flat in flats)


def _parts(buffer: Tensor, flats: Sequence[FlatParameter]) -> Iterator[Tensor]:
    """Yield each flat parameter's place (S,) in a buffer; places begin at whole pages."""
    start = 0
    for flat in flats:
        size = flat.layout.shard_numel * flat.dtype.itemsize
        yield buffer[start : start + size].view(flat.dtype)
        start += arena_bytes([(flat.layout.shard_numel, flat.dtype)])
