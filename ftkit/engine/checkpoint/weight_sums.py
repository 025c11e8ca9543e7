"""Sums of frozen weights: whether those of a resumed run are the ones that were trained on.

A sum covers every bit of a tensor and its place, so that one changed element and exchanged rows show. It depends neither on
the number of ranks nor on the stage: each rank adds up its own part. What it costs: one read of the frozen shards, at the
speed of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.shard import Units

PERIOD = 4093
"""Places are counted modulo this prime, which divides no usual width: rows that change places change the sum."""
MODULUS = 1 << 63
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element to the type that its bits are read as."""


def frozen_sums(units: Units) -> dict[str, str]:
    """Return for each frozen tensor its dtype, shape and sum, as text. A collective; the same on all ranks."""
    own: dict[str, int] = {}
    forms: dict[str, str] = {}
    for flat in units.flats:
        if flat.trainable:
            continue
        for segment in flat.layout.segments:
            forms[segment.name] = f"{str(flat.dtype).removeprefix('torch.')} {list(segment.shape)}"
        for name, value in _own_sums(flat).items():
            own[name] = own.get(name, 0) + value
    told = units.comm.all(own)
    return {name: f"{form} {sum(each.get(name, 0) for each in told) % MODULUS:016x}" for name, form in forms.items()}


def _own_sums(flat: FlatParameter) -> dict[str, int]:
    """Return the sums of this rank's parts of a flat parameter's tensors."""
    base, _ = flat.layout.shard_range(flat.rank)
    first, last = flat.written_range()
    sums: dict[str, int] = {}
    for low, high in flat.weights.pieces():
        begin, end = max(base + low, first), min(base + high, last)
        if begin >= end:
            continue
        piece = flat.weights.read(low, high)
        for span in flat.layout.spans(begin, end):
            values = piece[span.start - base - low : span.stop - base - low]
            name = span.segment.name
            sums[name] = sums.get(name, 0) + placed_sum(values, span.start - span.segment.start)
    return sums


def placed_sum(values: Tensor, start: int) -> int:
    """Return the sum of the bits of values (n,), each times its place, of which the first is `start`. It is additive."""
    bits = values.contiguous().view(INTEGERS[values.element_size()])
    total = 0
    for part_start in range(0, len(bits), PERIOD * 1024):
        part = bits[part_start : part_start + PERIOD * 1024]
        shift = (start + part_start) % PERIOD
        columns = torch.zeros(-(-(shift + len(part)) // PERIOD) * PERIOD, dtype=bits.dtype, device=bits.device)
        columns[shift : shift + len(part)] = part
        column_sums = columns.view(-1, PERIOD).sum(0, dtype=torch.int64)
        places = torch.arange(1, PERIOD + 1, dtype=torch.int64, device=bits.device)
        total += int((column_sums * places).sum())
    return total
