"""Lion with an 8-bit moment for matrices of blocks: 5.03 bytes of state per parameter, or 3.03 with a split master."""

from __future__ import annotations

from torch import Tensor

from ftkit.engine.optim import coding
from ftkit.engine.optim.flat_step import Hyperparameters
from ftkit.engine.optim.lion import ShardedLion
from ftkit.spec.update_rules import LION_8BIT


class ShardedLion8bit(ShardedLion):
    """Lion over shards with an 8-bit moment. Settings as in `ShardedLion`; embeddings, norms and biases keep fp32."""

    kind = LION_8BIT

    def coded_update(self, at: dict[str, Tensor], group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.coded_update`."""
        update = (self.loops_for(at["gradient"]) or coding).lion_8bit
        update(
            at.get("master"),
            at["gradient"],
            at["exp_avg.codes"],
            at["exp_avg.scales"],
            at.get("weight"),
            at.get("residual"),
            factor=factor,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
        )
