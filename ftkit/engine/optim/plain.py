"""Update rules over ordinary parameters, for optimizers that torch does not have.

`ftkit.Accelerator.prepare` and the Trainer replace such an optimizer by its sharded form, as they do with AdamW of torch.
Without the engine it steps by itself, with the reference arithmetic of the rule, on fp32 parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftkit.engine.optim.adagrad import ShardedAdagrad
from ftkit.engine.optim.adamw_8bit import ShardedAdamW8bit
from ftkit.engine.optim.ademamix import ShardedAdEMAMix
from ftkit.engine.optim.flat_step import Elements, Hyperparameters
from ftkit.engine.optim.lion import ShardedLion
from ftkit.engine.optim.lion_8bit import ShardedLion8bit
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.stable_adamw import ShardedStableAdamW, fresh_weights, ratio_squares, scaled


class PlainOptimizer(torch.optim.Optimizer):
    """The base of them. Arguments are parameters or groups, and the settings of the rule."""

    sharded: ClassVar[type[ShardedOptimizer]]

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, dict(self.sharded.kind.of(settings).settings))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("closures are not supported: compute loss and gradients before step()")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Hyperparameters) -> None:
        state = self.state[parameter]
        if not state:
            zeros = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in self.sharded.kind.moments}
            state.update(step=0, **zeros)
        state["step"] += 1
        moments = {name: state[name] for name in self.sharded.kind.moments}
        at = Elements(parameter, gradient, None, moments)
        self.sharded.update(at, gradient, self.settings_of(at, group, state["step"]), state["step"])

    def settings_of(self, at: Elements, group: Hyperparameters, step: int) -> Hyperparameters:
        """Return the settings of one tensor."""
        return group


class Lion(PlainOptimizer):
    """Lion. See `ShardedLion`."""

    sharded = ShardedLion


class AdEMAMix(PlainOptimizer):
    """AdEMAMix. See `ShardedAdEMAMix`."""

    sharded = ShardedAdEMAMix


class Adagrad(PlainOptimizer):
    """Adagrad. Unlike torch's it has no state before the first step. See `ShardedAdagrad`."""

    sharded = ShardedAdagrad


class StableAdamW(PlainOptimizer):
    """StableAdamW. See `ShardedStableAdamW`."""

    sharded = ShardedStableAdamW

    def settings_of(self, at: Elements, group: Hyperparameters, step: int) -> Hyperparameters:
        """Divide the learning rate by the RMS of the tensor."""
        fresh = fresh_weights(group, step)[1]
        total = ratio_squares(at.gradient, at.moments["exp_avg_sq"], factor=1.0, fresh=fresh, least=group["eps"] ** 2)
        return scaled(group, float(total) / at.master.numel())


def _needs_the_engine(optimizer: torch.optim.Optimizer) -> RuntimeError:
    return RuntimeError(
        f"{type(optimizer).__name__}: 8-bit moments exist in sharded models only. Pass it to ftkit.Accelerator.prepare "
        "together with the model, or name it in the Trainer (optim=), which replace it by its sharded form"
    )


class AdamW8bit(torch.optim.AdamW):
    """AdamW with 8-bit moments, in a sharded model. See `ShardedAdamW8bit`."""

    sharded: ClassVar[type[ShardedOptimizer]] = ShardedAdamW8bit

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # it never returns
        """Refuse. Raises RuntimeError."""
        raise _needs_the_engine(self)


class Lion8bit(Lion):
    """Lion with 8-bit moments, in a sharded model. See `ShardedLion8bit`."""

    sharded = ShardedLion8bit

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # as above
        """Refuse. Raises RuntimeError."""
        raise _needs_the_engine(self)
