"""Names, offsets and ranks: the arithmetic of a flat parameter, in integers only.

A flat parameter lays the tensors of one unit end to end, in model order, with nothing between them. Its N elements
are cut into W equal shards. A shard's length is a multiple of 4096 elements (so that O_DIRECT and SIMD stay aligned in
memory); the overhang of the last ranks is padding that never reaches a file:

    segments   |  q_proj  | k | v |  o_proj  |    gate    |     up     | n |
    elements   0                                                          N        W*S
    shards     |        rank 0         |        rank 1         |     rank 2 + pad  |

No W appears in a file, so reading a checkpoint on another number of ranks is asking the same line for another range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

SHARD_ALIGNMENT = 4096
"""Elements. A shard is a whole number of these: 4 KiB at the least, whatever the dtype."""


@dataclass(frozen=True)
class Segment:
    """One tensor's place on the line: elements [start, stop), seen as `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """First element after this tensor."""
        return self.start + self.numel


@dataclass(frozen=True)
class Span:
    """A run of elements of one tensor that falls into an asked range: [start, stop) on the line."""

    segment: Segment
    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The line of one flat parameter and how W ranks share it.

    Args:
        segments: the tensors in model order, gapless from element 0.
        world_size: number of shards, at least 1.
    """

    segments: tuple[Segment, ...]
    world_size: int

    @classmethod
    def of(cls, named_shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int) -> FlatLayout:
        """Lay tensors end to end.

        Raises:
            ValueError: if a name occurs twice or `world_size` is below 1.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, at least 1 is needed")
        segments: list[Segment] = []
        start = 0
        for name, shape in named_shapes:
            segments.append(Segment(name, tuple(shape), start))
            start = segments[-1].stop
        if len({segment.name for segment in segments}) != len(segments):
            raise ValueError(f"a name occurs twice in {[segment.name for segment in segments]}")
        return cls(tuple(segments), world_size)

    @property
    def numel(self) -> int:
        """N: elements of all tensors, without padding."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def shard_numel(self) -> int:
        """S: elements of one rank's shard, a multiple of `SHARD_ALIGNMENT`."""
        per_rank = -(-self.numel // self.world_size)
        return -(-per_rank // SHARD_ALIGNMENT) * SHARD_ALIGNMENT

    @property
    def padded_numel(self) -> int:
        """W*S: elements of the gathered buffer."""
        return self.shard_numel * self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the elements [start, stop) that `rank` owns, without padding (empty for a rank past the end)."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the tensors' parts inside [start, stop), in order; empty tensors do not appear."""
        for index, segment in enumerate(self.segments):
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                yield Span(segment, index, low, high)
