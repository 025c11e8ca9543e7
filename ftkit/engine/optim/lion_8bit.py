"""Lion with 8-bit moments over shards."""

from __future__ import annotations

from ftkit.engine.optim.lion import ShardedLion
from ftkit.spec.update_rules import LION_8BIT


class ShardedLion8bit(ShardedLion):
    """Lion with 8-bit moments of the matrices in blocks. Settings as `ShardedLion`."""

    kind = LION_8BIT
