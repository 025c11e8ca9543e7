"""A trial under the conditions of a large model: `FTKIT_STRICT=1`.

On a small model "auto" keeps all weights and graphs, so that a script may read weights, edit them or take tensors from
inside blocks. On a large model weights are sharded and blocks recomputed, and the same script is refused. This switch
makes the choice of a large model for a small one, so that the refusal comes on a laptop. What the user set explicitly stays.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ftkit.spec.strategy import AUTO, Strategy
from ftkit.spec.tiers import HOST

logger = logging.getLogger(__name__)


def strict(strategy: Strategy, ranks: int, *, say: bool) -> Strategy:
    """Return the strategy with everything that is "auto" as a large model would have it, and with debug checks.

    On one rank shards are whole; there weights, gradients and state go to host memory, so that weights come and go too.

    Args:
        strategy: what the user decided.
        ranks: number of ranks.
        say: whether what is forced is logged; on one rank.
    """
    wanted: dict[str, Any] = {"stage": 3, "activations": "recompute", "reshard_after_forward": True}
    if ranks == 1:
        wanted |= {"parameters": HOST, "gradients": HOST, "state": HOST}
    if strategy.stage not in (AUTO, 3):
        wanted = {"activations": "recompute"}
    forced = {key: value for key, value in wanted.items() if getattr(strategy, key) == AUTO}
    if say:
        listed = ", ".join(f"{key} {value}" for key, value in forced.items())
        logger.warning("FTKIT_STRICT=1: %s; debug checks are on. Slower; for trials.", listed or "nothing more is forced")
    return replace(strategy, **forced, debug=True)
