"""The records of a step: the update of one flat parameter, and its runs of elements with equal settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.memory.tiers import Store
from ftkit.engine.optim.state_stores import CodedMoment, Extent, FlatState, SplitMaster

Hyperparameters = dict[str, Any]
"""The settings of a parameter group that an update reads, under the names of torch.optim; `lr` is a float."""


@dataclass(frozen=True)
class Run:
    """Neighbouring elements [start, stop) of a shard with equal hyper-parameters and step count, which are updated alike."""

    start: int
    stop: int
    group: Hyperparameters
    step: int
    coded: bool = False  # the moments are in 8 bits


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

    @cached_property
    def extents(self) -> dict[str, Extent]:
        """All stores of the update by role. The weight is one of them only where it is not the master."""
        weight = {} if self.state.master is self.flat.weights else {"weight": Extent(self.flat.weights)}
        return {"gradient": Extent(self.gradient), **self.state.extents, **weight}

    @property
    def writes_all(self) -> bool:
        """Whether all weights are written without being read. Padding does not count, because it is not read."""
        whole = sum(run.stop - run.start for run in self.runs) == self.flat.own_numel
        return whole and not isinstance(self.state.master, SplitMaster)

    def reads(self, run: Run, role: str) -> bool:
        """Return whether a run uses the store of a role: codes and scales, or the moment in fp32."""
        moment, _, code = role.partition(".")
        return not isinstance(self.state.moments.get(moment), CodedMoment) or bool(code) == run.coded


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


def runs_of(flat: FlatParameter, groups: list[Hyperparameters | None], state: FlatState) -> list[Run]:
    """Return the runs of this rank's shard.

    Args:
        flat: The flat parameter.
        groups: Hyper-parameters of each tensor. None leaves the tensor out.
        state: Its state, with the step count of each tensor.
    """
    coded_numel = flat.coded_numel if any(isinstance(each, CodedMoment) for each in state.moments.values()) else 0
    runs: list[Run] = []
    base, stop = flat.layout.shard_range(flat.rank)
    for span in flat.layout.spans(base, stop):
        group, step, start = groups[span.index], state.steps[span.index], span.start - base
        if group is None:
            continue
        run = Run(start, span.stop - base, group, step, span.start < coded_numel)
        if runs and replace(runs[-1], start=start, stop=run.stop) == run and runs[-1].stop == start:
            run = replace(run, start=runs.pop().start)
        runs.append(run)
    return runs
