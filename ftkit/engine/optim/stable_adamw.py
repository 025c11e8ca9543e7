"""StableAdamW over shards: AdamW whose step in a tensor shrinks where the gradient outgrows its second moment.

The learning rate of a tensor is divided by max(1, RMS), with the root mean square over the whole tensor of
g / max(sqrt(v), eps). So a step begins with a sum over the shards of all tensors, before any is updated.

Cost: reads gradient and `exp_avg_sq` once more, before the updates; one collective of a float per tensor.
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
        sums = [self._ratio_squares(step).to(self.units.comm.device) for step in steps]
        totals = iter(self.units.comm.totals(torch.cat(sums), "the sums of StableAdamW") if sums else ())
        return [self._scaled(step, [next(totals) for _ in step.groups]) for step in steps]

    def _ratio_squares(self, step: FlatStep) -> Tensor:
        """Return this rank's share of the `ratio_squares` of each tensor (T,). The shares of all ranks add up to them."""
        flat, square = step.flat, step.extents["exp_avg_sq"].store
        base, stop = flat.layout.shard_range(flat.rank)
        device = torch.device("cpu") if square.tensor is None else square.tensor.device
        sums = torch.zeros(len(step.groups), dtype=torch.float64, device=device)
        for low in range(0, flat.layout.shard_numel, PIECE_NUMEL):  # with the padding: files are read in whole pages
            high = min(low + PIECE_NUMEL, flat.layout.shard_numel)
            moments, gradient = square.read(low, high), step.gradient.read(low, high).to(device)
            for span in flat.layout.spans(base + low, min(base + high, stop)):
                if (group := step.groups[span.index]) is None:
                    continue
                at = slice(span.start - base - low, span.stop - base - low)
                numbers = {"factor": step.factor, "fresh": fresh_weights(group, step.state.steps[span.index])[1]}
                add = self.host.ratio_square_sum if device.type == "cpu" else ratio_squares
                sums[span.index] += add(gradient[at], moments[at], **numbers, least=group["eps"] ** 2)
        return sums / flat.comm.world_size if flat.owners == 1 else sums  # 1: every rank has the whole tensors

    def _scaled(self, step: FlatStep, totals: list[float]) -> FlatStep:
        numels = (segment.numel for segment in step.flat.layout.segments)
        groups = [group and scaled(group, total / numel) for group, total, numel in zip(step.groups, totals, numels)]
        return replace(step, groups=groups, runs=runs_of(step.flat, groups, step.state))

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """See `ShardedOptimizer.host_update`. The loop is AdamW's, whose bias corrections are in the betas here."""
        lr, (fresh1, fresh2) = group["lr"], fresh_weights(group, step)
        numbers = factor, 1 - lr * group["weight_decay"], fresh1, 1 - fresh2, fresh2, 1.0, group["eps"], lr
        tensors = at.master, at.gradient, at.moments["exp_avg"], at.moments["exp_avg_sq"], at.weight
        self.host.update("adamw", tensors, numbers)

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """See `ShardedOptimizer.update`. `group` has the learning rate of the tensor."""
        lr, (fresh1, fresh2) = group["lr"], fresh_weights(group, step)
        average = at.moments["exp_avg"].lerp_(gradient, fresh1)
        square = at.moments["exp_avg_sq"].mul_(1 - fresh2).addcmul_(gradient, gradient, value=fresh2)
        at.master.mul_(1 - lr * group["weight_decay"]).addcdiv_(average, square.sqrt().add_(group["eps"]), value=-lr)


def scaled(group: Hyperparameters, mean_square: float) -> Hyperparameters:
    """Return the settings of a tensor, given the mean of its `ratio_squares`."""
    return {**group, "lr": group["lr"] / max(1.0, math.sqrt(mean_square))}


def ratio_squares(gradient: Tensor, square: Tensor, *, factor: float, fresh: float, least: float) -> Tensor:
    """Return the sum that `HostLoops.ratio_square_sum` returns, with PyTorch operations: a scalar on the device."""
    squared = gradient.float().mul(factor).square_()
    moment = square.mul(1 - fresh).add_(squared, alpha=fresh).clamp_min_(least)
    return squared.div_(moment).sum(dtype=torch.float64)


def fresh_weights(group: Hyperparameters, step: int) -> tuple[float, float]:
    """Return the weights of a new gradient in both moments, which include the correction of their bias."""
    first, second = ((1 - beta) / (1 - beta**step) for beta in group["betas"])
    return first, second
