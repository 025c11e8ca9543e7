"""AdamW with 8-bit moments over shards."""

from __future__ import annotations

from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.spec.update_rules import ADAMW_8BIT


class ShardedAdamW8bit(ShardedAdamW):
    """AdamW with 8-bit moments of the matrices in blocks. Settings as `ShardedAdamW`."""

    kind = ADAMW_8BIT
