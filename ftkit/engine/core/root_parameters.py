"""Root parameters: large parameters outside blocks (embeddings, heads), gathered when they are read.

Their gathers start early: when the model's forward begins, or when the unit begins after which the last call read the
parameter. From the second call on, an embedding's gather is issued before the first block's, and a head's beside the last.
Weights on NVMe are gathered when they are read.

Reading `module.weight` returns the gathered tensor while the model runs: it is the output of an autograd function whose
backward reduce-scatters its gradient. All reads during the module's own forward share one gather. Other code reads it too
(a fused loss reads `lm_head.weight`), so the attribute is a property of the module. At other times it is the placeholder.

Autograd decides how long the gathered tensor lives: an embedding's ends after the lookup, a head's after its backward,
which runs first. A tied weight is one flat parameter read by two modules; both uses add to one gradient shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.gradient import Gradient
from ftkit.engine.core.transfer import Transfer
from ftkit.engine.streams import Event

BEFORE_UNITS = -1
"""`Running.position` before the first unit of a call."""


class Running:
    """Whether the model runs, and which unit began last. Both are equal on all ranks, so all ranks make the same reads."""

    def __init__(self) -> None:
        self.depth = 0  # nested calls of the model
        self.begun = False  # whether the forward of the outermost call has begun
        self.reading = 0  # nested `read_by_all` contexts
        self.position = BEFORE_UNITS  # number of the last unit that began in this call
        self.roots: list[RootParameter] = []

    @property
    def gathers(self) -> bool:
        """Whether reading a root parameter gathers it."""
        return self.depth > 0 or self.reading > 0

    def begin(self) -> bool:
        """Begin a call's forward, before its first unit. Return False if it has begun already."""
        begun, self.begun = self.begun, True
        if not begun:
            self.drop()
            self.enter(BEFORE_UNITS)
        return not begun

    def drop(self) -> None:
        """Drop early gathers that no read has used."""
        for root in self.roots:
            root.drop()

    def enter(self, number: int) -> None:
        """Note that unit `number` begins, and start the gathers of parameters that the last call read after it.

        A parameter that is being updated is gathered when it is read. An early gather would block the host before the unit.
        """
        self.position = number
        for root in self.roots:
            if root.read_after == number and root.flat.update is None:
                root.start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the body as a call of the model."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            self.begun = self.begun and self.depth > 0

    @contextmanager
    def read_by_all(self) -> Iterator[None]:
        """Gather at reads in the body. All ranks must make the same reads."""
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1


class RootParameter:
    """One large parameter of one module outside blocks.

    Args:
        flat: Its flat parameter, which contains nothing else. A tied weight shares it with another root parameter.
        gradient: The gradient of `flat`. None if frozen.
        module: The module.
        attribute: Name of the parameter in the module.
        running: Whether the model runs.
        transfer: The transfer of the model.
    """

    def __init__(
        self,
        flat: FlatParameter,
        gradient: Gradient | None,
        module: nn.Module,
        attribute: str,
        running: Running,
        transfer: Transfer,
    ) -> None:
        self.flat, self.gradient = flat, gradient
        self.module, self.attribute = module, attribute
        self.running, self.transfer = running, transfer
        self.own = module._parameters[attribute]
        self.sharing = False
        self.gathered: Tensor | None = None  # during `once`
        self.read_after: int | None = None  # position of the last read in the last call that read it
        self._coming: tuple[int, Tensor, Event] | None = None  # version of the shards, tensor, event of the gather
        running.roots.append(self)
        # An input that requires a gradient, so that autograd calls the backward of `_Gather`.
        self.anchor = torch.zeros((), device=flat.comm.device, requires_grad=True)

    @property
    def parameter(self) -> Tensor:
        """The parameter that is registered in the module."""
        return cast(Tensor, self.module._parameters[self.attribute])

    def read(self) -> Tensor:
        """Return the parameter's value while the model runs or all weights are gathered, else its placeholder."""
        parameter = self.parameter
        if parameter is not self.own:  # replaced for a while, by torch.func.functional_call
            return parameter
        if self.transfer.whole is not None and not torch.is_grad_enabled():
            return self.transfer.whole.roots[self.flat]
        if self.sharing:
            wants_graph = torch.is_grad_enabled() and parameter.requires_grad
            if self.gathered is None or (wants_graph and not self.gathered.requires_grad):
                self.gathered = self._gather()
            return self.gathered
        return self._gather() if self.running.gathers else parameter

    @contextmanager
    def once(self) -> Iterator[None]:
        """Share one gather among all reads in the body."""
        self.sharing = True
        try:
            yield
        finally:
            self.sharing, self.gathered = False, None

    def _gather(self) -> Tensor:
        """Return the whole parameter. Cost: one all-gather; in backward, one reduce-scatter.

        A gradient hook that the user registered on the parameter gets the gradient of each read.
        """
        if not torch.is_grad_enabled() or not self.parameter.requires_grad or self.gradient is None:
            return self._take()
        gathered: Tensor = _Gather.apply(self, self.anchor)
        for hook in (self.parameter._backward_hooks or {}).values():
            gathered.register_hook(hook)
        return gathered

    def start(self) -> None:
        """Start to gather the parameter for the next read. Not from NVMe: the host would wait for the drive."""
        if self._coming is None and self.transfer.prefetch and self.transfer.ahead is None:
            self._coming = (self.flat.version, *self.transfer.gather_root(self.flat))

    def drop(self) -> None:
        """Drop an early gather that no read has used. Start no other one before the next read."""
        if self._coming is not None:
            self._coming[2].wait()
            self._coming = self.read_after = None

    def _take(self) -> Tensor:
        """Return the full parameter. A collective, unless its gather started early."""
        coming, self._coming = self._coming, None
        if coming is None or coming[0] != self.flat.version:
            coming = (self.flat.version, *self.transfer.gather_root(self.flat))
        self.read_after = self.running.position
        coming[2].wait()
        return coming[1]


class _Gather(torch.autograd.Function):
    """Forward: all-gather of a root parameter. Backward: reduce-scatter of its gradient."""

    @staticmethod
    def forward(ctx: Any, root: RootParameter, anchor: Tensor) -> Tensor:
        ctx.gradient = root.gradient
        ctx.set_materialize_grads(False)
        return root._take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        ctx.gradient.add_use(0, gradient)
        return None, None
