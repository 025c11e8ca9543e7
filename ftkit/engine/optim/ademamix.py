"""AdEMAMix over shards: AdamW with a second, slow average of the gradient. It keeps three moments."""

from __future__ import annotations

import math

from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.update_rules import ADEMAMIX


class ShardedAdEMAMix(ShardedOptimizer):
    """AdEMAMix over shards.

    Settings: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2 as AdamW's, and

    - beta3=0.9999: decay of the slow average. It grows from `betas[0]` during the first `t_beta3` steps (0: none).
    - alpha=5.0: weight of the slow average. It grows from 0 during the first `t_alpha` steps (0: none).

    Source: Pagliardini et al., arXiv:2409.03137.
    """

    kind = ADEMAMIX

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`."""
        lr, (beta1, beta2), (beta3, alpha) = group["lr"], group["betas"], _slow(group, step)
        tensors = at.master, at.gradient, *(at.moments[name] for name in ADEMAMIX.moments), at.weight
        bias, root = 1 - beta1**step, math.sqrt(1 - beta2**step)
        decays = beta1, 1 - beta1, beta3, 1 - beta3, beta2, 1 - beta2
        numbers = factor, 1 - lr * group["weight_decay"], *decays, bias, root, group["eps"], alpha, lr
        self.host.update("ademamix", tensors, numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`."""
        lr, (beta1, beta2), (beta3, alpha) = group["lr"], group["betas"], _slow(group, step)
        fast, slow, square = (at.moments[name] for name in ADEMAMIX.moments)
        fast.mul_(beta1).add_(gradient, alpha=1 - beta1)
        slow.mul_(beta3).add_(gradient, alpha=1 - beta3)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        mixed = fast.div(1 - beta1**step).add_(slow, alpha=alpha)
        at.master.mul_(1 - lr * group["weight_decay"]).addcdiv_(mixed, root, value=-lr)


def _slow(group: Hyperparameters, step: int) -> tuple[float, float]:
    """Return the decay and the weight of the slow average at a step. Source: equations 4 and 5 of the paper."""
    beta3, alpha = group["beta3"], group["alpha"]
    if group["t_beta3"]:
        start, end, share = math.log(group["betas"][0]), math.log(beta3), step / group["t_beta3"]
        beta3 = min(math.exp(start * end / ((1 - share) * end + share * start)), beta3)
    return beta3, alpha * min(step / group["t_alpha"], 1.0) if group["t_alpha"] else alpha
