"""Layout of a flat parameter: every element has one place and one owner, for any sizes and number of ranks."""

from __future__ import annotations

import pytest

from ftkit.spec.layout import SHARD_ALIGNMENT, FlatLayout

SHAPES = {
    "one": [("a", (1,))],
    "scalars and nothing": [("a", ()), ("b", (0, 3)), ("c", ()), ("d", (2, 0))],
    "a little over a shard": [("a", (SHARD_ALIGNMENT, 2)), ("b", (1,))],
    "exactly two shards": [("a", (SHARD_ALIGNMENT,)), ("b", (SHARD_ALIGNMENT // 2, 2))],
    "odd": [("a", (67, 32)), ("b", (32,)), ("c", (90, 32)), ("d", (7, 11, 13)), ("e", (4099,))],
    "nothing": [],
}


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_element_has_one_place_and_one_owner(shapes, world):
    layout = FlatLayout.of(shapes, world)
    position = 0
    for segment, (name, shape) in zip(layout.segments, shapes, strict=True):
        assert (segment.name, segment.shape, segment.start) == (name, shape, position)
        position = segment.stop
    assert position == layout.numel
    assert layout.shard_numel % SHARD_ALIGNMENT == 0
    assert layout.padded_numel == world * layout.shard_numel >= layout.numel
    assert layout.padded_numel - layout.numel < world * SHARD_ALIGNMENT
    owned = [layout.shard_range(rank) for rank in range(world)]
    assert [start for start, _ in owned] == [0, *(stop for _, stop in owned[:-1])]
    assert owned[-1][1] == layout.numel
    for rank, (start, stop) in enumerate(owned):
        assert 0 <= stop - start <= layout.shard_numel
        assert start == stop or start == rank * layout.shard_numel


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_spans_cut_any_range_into_tensors(shapes, world):
    layout = FlatLayout.of(shapes, world)
    ranges = [layout.shard_range(rank) for rank in range(world)] + [(0, layout.numel), (5, 90), (3, 3), (66, 4170)]
    for start, stop in ranges:
        spans = list(layout.spans(start, stop))
        covered = [element for span in spans for element in (span.start, span.stop)]
        stop = min(stop, layout.numel)
        if not spans:
            assert start >= stop
            continue
        assert (covered[0], covered[-1]) == (start, stop)
        assert covered[1:-1:2] == covered[2::2]  # gapless
        for span in spans:
            assert span.segment is layout.segments[span.index]
            assert span.segment.start <= span.start < span.stop <= span.segment.stop


def test_where_a_tensor_lies_does_not_depend_on_the_ranks():
    assert len({FlatLayout.of(SHAPES["odd"], world).segments for world in (1, 2, 3, 64)}) == 1
