"""Forms of optimizer state: 8-bit moments in groups of 128, and a master weight split into 16 bits and 16 bits.

[Note: 8-bit moments]

    A group is 128 neighbouring elements of one matrix. It has one fp32 scale, its largest magnitude, and a byte per element.
    Matrices of blocks whose size is a multiple of 128 are coded; all other tensors keep fp32 moments. In a flat parameter
    the coded matrices come first, so each begins at a multiple of 128, and so does each shard: no group is on two ranks.

        elements   | coded matrices, M elements         | other tensors |
        codes      | uint8                              |
        scales     | fp32, one per 128                  |
        plain      |                                    | fp32          |

    Per element and moment: 1 + 4/128 bytes instead of 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

GROUP_NUMEL = 128
"""Elements of a matrix that share a scale."""

_PAGE = 1024
"""fp32 elements of a page. O_DIRECT moves whole pages."""


def can_be_coded(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape, in a block, can have 8-bit moments."""
    return len(shape) >= 2 and prod(shape) % GROUP_NUMEL == 0


@dataclass(frozen=True)
class CodedSizes:
    """Elements of the stores of one 8-bit moment, equal on all ranks.

    Args:
        codes: uint8.
        scales: fp32, whole pages.
        plain: fp32, whole pages; as many as the rank with most of them needs.
    """

    codes: int
    scales: int
    plain: int

    @classmethod
    def of(cls, shard_numel: int, coded_numel: int, numel: int, owners: int) -> CodedSizes:
        """Return the sizes for a flat parameter.

        Args:
            shard_numel: S, elements of a shard.
            coded_numel: M, elements of the coded matrices; more than 0.
            numel: N, elements of all tensors.
            owners: Number of shards.
        """
        plain = max(stop - start for start, stop in (plain_range(shard_numel, coded_numel, numel, k) for k in range(owners)))
        return cls(shard_numel, whole_pages(shard_numel // GROUP_NUMEL), plain)


def plain_range(shard_numel: int, coded_numel: int, numel: int, rank: int) -> tuple[int, int]:
    """Return the elements [start, stop) of a rank's shard in the plain store, in whole pages. (S, S) if it has none."""
    first, stop = rank * shard_numel, min((rank + 1) * shard_numel, numel)
    coded = min(max(coded_numel - first, 0), shard_numel)
    if stop - first <= coded:
        return shard_numel, shard_numel
    return coded // _PAGE * _PAGE, whole_pages(stop - first)


def whole_pages(numel: int) -> int:
    """Return a number of values, rounded up to pages of fp32."""
    return -(-numel // _PAGE) * _PAGE
