"""AdamW with 8-bit moments for matrices of blocks: 6.06 bytes of state per parameter, or 4.06 with a split master."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim import coding
from ftkit.engine.optim.adamw import ShardedAdamW, numbers_of
from ftkit.engine.optim.flat_step import Hyperparameters
from ftkit.spec.update_rules import ADAMW_8BIT


class ShardedAdamW8bit(ShardedAdamW):
    """AdamW over shards with 8-bit moments. Settings as in `ShardedAdamW`; embeddings, norms and biases keep fp32 moments.

    Sources: Dettmers et al., arXiv:2110.02861 (8-bit optimizers); `ftkit/engine/optim/coding.py` has the code.
    """

    kind = ADAMW_8BIT

    def coded_update(self, at: dict[str, Tensor], group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.coded_update`."""
        update = (self.loops_for(at["gradient"]) or coding).adamw_8bit
        update(
            at.get("master"),
            at["gradient"],
            at["exp_avg.codes"],
            at["exp_avg.scales"],
            at["exp_avg_sq.codes"],
            at["exp_avg_sq.scales"],
            at.get("weight"),
            at.get("residual"),
            factor=factor,
            step=step,
            **numbers_of(group),
        )
