"""The records of a step: the optimizer state of a flat parameter, and what one step does to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import Store

Hyperparameters = dict[str, Any]
"""The settings of a parameter group that an update reads, under the names of torch.optim; `lr` is a float."""


@dataclass(frozen=True)
class Run:
    """Neighbouring elements [start, stop) of a shard with equal hyper-parameters and step count, which are updated alike."""

    start: int
    stop: int
    group: Hyperparameters
    step: int


@dataclass
class FlatState:
    """The optimizer state of one flat parameter on this rank.

    Args:
        master: Master weights (S,) fp32; the weights' own store where these are fp32 and on the same tier.
        moments: Moments (S,) fp32 by name.
        steps: Number of updates of each tensor.
    """

    master: Store
    moments: dict[str, Store]
    steps: list[int]


@dataclass(frozen=True)
class FlatStep:
    """One step of one flat parameter.

    Args:
        flat: The flat parameter.
        state: Its optimizer state.
        gradient: Its gradient shard (S,).
        groups: Hyper-parameters of each tensor. None leaves the tensor out.
        runs: The elements to update.
        factor: Factor on the gradient: clip over loss scale.
    """

    flat: FlatParameter
    state: FlatState
    gradient: Store
    groups: list[Hyperparameters | None]
    runs: list[Run]
    factor: float

    @property
    def stores(self) -> dict[str, Store]:
        """All stores of the update by role. The weight is one of them only where it is not the master."""
        stores = {"gradient": self.gradient, "master": self.state.master, **self.state.moments}
        if self.state.master is not self.flat.weights:
            stores["weight"] = self.flat.weights
        return stores

    @property
    def updates_all(self) -> bool:
        """Whether the runs cover all elements of the shard. Padding does not count, because it is not read."""
        return sum(run.stop - run.start for run in self.runs) == self.flat.own_numel


@dataclass(frozen=True)
class Elements:
    """The tensors (n,) of some elements of a shard, on the device of the update.

    Args:
        master: Master weights, fp32, read and written.
        gradient: Gradient in its own dtype, not unscaled or clipped.
        weight: Receives `master` in its own dtype. None where the master is the weight.
        moments: Moments by name, read and written.
    """

    master: Tensor
    gradient: Tensor
    weight: Tensor | None
    moments: dict[str, Tensor]

    def part(self, start: int, stop: int) -> Elements:
        """Return the elements [start, stop) of these."""
        weight = None if self.weight is None else self.weight[start:stop]
        moments = {name: moment[start:stop] for name, moment in self.moments.items()}
        return Elements(self.master[start:stop], self.gradient[start:stop], weight, moments)


def runs_of(flat: FlatParameter, groups: list[Hyperparameters | None], steps: list[int]) -> list[Run]:
    """Return the runs of this rank's shard.

    Args:
        flat: The flat parameter.
        groups: Hyper-parameters of each tensor. None leaves the tensor out.
        steps: Step count of each tensor.
    """
    runs: list[Run] = []
    base, stop = flat.layout.shard_range(flat.rank)
    for span in flat.layout.spans(base, stop):
        group, step, start = groups[span.index], steps[span.index], span.start - base
        if group is None:
            continue
        if runs and (runs[-1].stop, runs[-1].group, runs[-1].step) == (start, group, step):
            start = runs.pop().start
        runs.append(Run(start, span.stop - base, group, step))
    return runs
