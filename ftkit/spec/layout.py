"""Layout of a flat parameter: names, offsets and ranks, in integers only.

A flat parameter stores the tensors of one unit end to end, in model order, without gaps. Its N elements are divided into W
equal shards. The length of a shard is a multiple of 4096 elements, which keeps O_DIRECT and SIMD aligned. The last ranks
are padded, and padding is never written to a file:

    segments   |  q_proj  | k | v |  o_proj  |    gate    |     up     | n |
    elements   0                                                          N        W*S
    shards     |        rank 0         |        rank 1         |     rank 2 + pad  |

No W is stored in a file, so another number of ranks reads the same file in other ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

SHARD_ALIGNMENT = 4096
"""Elements. The length of a shard is a multiple of this."""


@dataclass(frozen=True)
class Segment:
    """One tensor of a flat parameter: elements [start, stop), viewed as `shape`."""

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
    """The part of one tensor in a range: elements [start, stop) of the flat parameter."""

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
    """Layout of one flat parameter on W ranks: tensors in model order, without gaps from element 0."""

    segments: tuple[Segment, ...]
    world_size: int

    @classmethod
    def of(cls, named_shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int) -> FlatLayout:
        """Return the layout of tensors end to end."""
        segments: list[Segment] = []
        start = 0
        for name, shape in named_shapes:
            segments.append(Segment(name, tuple(shape), start))
            start = segments[-1].stop
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
        """Return the elements [start, stop) of a rank, without padding. Empty for a rank past the end."""
        start = min(rank * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the parts of tensors inside [start, stop), in order. Empty tensors are left out."""
        for index, segment in enumerate(self.segments):
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                yield Span(segment, index, low, high)
