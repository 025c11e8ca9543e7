"""StableAdamW over shards: AdamW whose step in a tensor shrinks where the gradient outgrows its second moment.

The learning rate of a tensor is divided by max(1, RMS), with the root mean square over the whole tensor of
g / max(sqrt(v), eps). So a step begins with a sum over the shards of all tensors, before any is updated.

Cost: reads gradient and `exp_avg_sq` once more; one collective of a float per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ftkit.engine.optim.flat_step import Elements, FlatStep, Hyperparameters, runs_of
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.spec.sizes import PIECE_NUMEL
from ftkit.spec.update_rules import STABLE_ADAMW


class ShardedStableAdamW(ShardedOptimizer):
    """StableAdamW over shards. The correction of the moments' bias is in the betas, as in the source.

    Settings: lr=1e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=1e-2.
    Source: Wortsman et al., arXiv:2304.13013, algorithm 2.
    """

    kind = STABLE_ADAMW

    def prepare_steps(self, steps: Sequence[FlatStep]) -> Sequence[FlatStep]:
        """Divide the learning rate of each tensor by its RMS, if that is above 1. A collective."""
        self.updater.settle()  # a file may still get the moments of the last step
        counts = [len(step.groups) for step in steps]
        sums = torch.zeros(sum(counts), dtype=torch.float64)
        for step, own in zip(steps, sums.split(counts)):
            _set_squares(step, own)
        totals = iter(self.units.comm.totals(sums.to(self.units.comm.device), "the sums of StableAdamW"))
        return [self._scaled(step, [next(totals) for _ in step.groups]) for step in steps]

    def _scaled(self, step: FlatStep, totals: list[float]) -> FlatStep:
        numels = (segment.numel for segment in step.flat.layout.segments)
        groups = [group and scaled(group, total / numel) for group, total, numel in zip(step.groups, totals, numels)]
        return replace(step, groups=groups, runs=runs_of(step.flat, groups, step.state.steps))

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`. The loop is AdamW's, whose bias corrections are in the betas here."""
        lr, (fresh1, fresh2) = group["lr"], _fresh(group, step)
        numbers = factor, 1 - lr * group["weight_decay"], fresh1, 1 - fresh2, fresh2, 1.0, group["eps"], lr
        tensors = at.master, at.gradient, at.moments["exp_avg"], at.moments["exp_avg_sq"], at.weight
        self.host.update("adamw", tensors, numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`. `group` has the learning rate of the tensor."""
        lr, (fresh1, fresh2) = group["lr"], _fresh(group, step)
        average = at.moments["exp_avg"].lerp_(gradient, fresh1)
        square = at.moments["exp_avg_sq"].mul_(1 - fresh2).addcmul_(gradient, gradient, value=fresh2)
        at.master.mul_(1 - lr * group["weight_decay"]).addcdiv_(average, square.sqrt().add_(group["eps"]), value=-lr)


def scaled(group: Hyperparameters, mean_square: float) -> Hyperparameters:
    """Return the settings of a tensor, given the mean of its `ratio_squares`."""
    return {**group, "lr": group["lr"] / max(1.0, math.sqrt(mean_square))}


def ratio_squares(gradient: Tensor, square: Tensor, group: Hyperparameters, step: int) -> Tensor:
    """Return the sum of g^2 / max(v, eps^2), with the second moment v that the step will have, in float64."""
    _, fresh = _fresh(group, step)
    squared = gradient.square()
    moment = square.mul(1 - fresh).add_(squared, alpha=fresh).clamp_min_(group["eps"] ** 2)
    return squared.div_(moment).sum(dtype=torch.float64)


def _fresh(group: Hyperparameters, step: int) -> tuple[float, float]:
    """Return the weights of a new gradient in both moments, which include the correction of their bias."""
    first, second = ((1 - beta) / (1 - beta**step) for beta in group["betas"])
    return first, second


def _set_squares(step: FlatStep, sums: Tensor) -> None:
    """Set `sums` (T,) to this rank's share of the `ratio_squares` of each tensor. The shares of all ranks add up to them."""
    flat, square = step.flat, step.state.moments["exp_avg_sq"]
    base, stop = flat.layout.shard_range(flat.rank)
    for low in range(0, flat.layout.shard_numel, PIECE_NUMEL):  # with the padding: files are read in whole pages
        high = min(low + PIECE_NUMEL, flat.layout.shard_numel)
        moments = square.read(low, high)
        gradient = step.gradient.read(low, high).to(moments.device, torch.float32).mul(step.factor)
        for span in flat.layout.spans(base + low, min(base + high, stop)):
            if (group := step.groups[span.index]) is not None:
                at = slice(span.start - base - low, span.stop - base - low)
                sums[span.index] += ratio_squares(gradient[at], moments[at], group, step.state.steps[span.index]).cpu()
    if flat.owners == 1:  # every rank has the whole tensors
        sums /= flat.comm.world_size
