"""Parameters outside blocks: embeddings and heads, gathered when they are read.

A root module gathers at most once in its own `forward`. But others read `weight` too (a fused loss reads `lm_head.weight`),
so the name is a property: while the model runs, and where all ranks are known to read alike (`read_by_all`), it is the
gathered tensor, an autograd function of the shard, whose backward reduce-scatters; at other times it is the absent
parameter, with its true shape and dtype, which refuses computations. The gathered tensor lives as long as autograd wants it:
an embedding's is gone after its lookup, a head's stays until its backward, which comes at once.

A tied weight is one flat parameter read from two modules; both uses add into one gradient shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.gradient import Gradient
from ftkit.engine.core.resharded import on_gradient
from ftkit.errors import UserError


class Running:
    """How many calls of the model, one inside the other, are under way."""

    def __init__(self) -> None:
        self.depth = 0
        self.reading = 0
        self.shared: dict[FlatParameter, tuple[int, Tensor]] = {}  # of parameters whose gradient a hook wants whole

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the body as a call of the model."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            self._forget()

    @contextmanager
    def read_by_all(self) -> Iterator[None]:
        """Let reads of root parameters gather in the body, also between calls: all ranks make the same reads there."""
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1
            self._forget()

    def _forget(self) -> None:
        if not self.gathers:
            self.shared.clear()

    @property
    def gathers(self) -> bool:
        """Whether a read of a root parameter may gather it."""
        return self.depth > 0 or self.reading > 0


class RootParameter:
    """One parameter of one module outside blocks.

    Args:
        flat: its flat parameter, which holds nothing else. May be shared with another root parameter (tied weights).
        gradient: the gradient of `flat`; None where it is frozen.
        module: the module that reads the parameter.
        attribute: name of the parameter in `module`.
        running: whether the model runs.
        updates: returns how often weights were updated: what was gathered before an update is not read after it.
    """

    def __init__(
        self,
        flat: FlatParameter,
        gradient: Gradient | None,
        module: nn.Module,
        attribute: str,
        running: Running,
        updates: Callable[[], int],
    ) -> None:
        self.flat = flat
        self.gradient = gradient
        self.module = module
        self.attribute = attribute
        self.running = running
        self.updates = updates
        self.own = module._parameters[attribute]
        self.gathered: Tensor | None = None
        self.whole: Tensor | None = None  # while all weights of the model are held (holding.py)
        self.sharing = False
        self._written = 0
        self.anchor = torch.zeros((), device=flat.comm.device, requires_grad=True)

    def read(self) -> Tensor:
        """Return the parameter's value where it has one to give: held, or gathered while the model runs, else absent.

        What stands in its place for a while (torch.func.functional_call) is returned as it is.
        """
        if self.module._parameters.get(self.attribute) is not self.own:
            return self.parameter
        if self.whole is not None and not torch.is_grad_enabled():
            return self.whole
        if self.sharing:
            wants_graph = torch.is_grad_enabled() and self.parameter.requires_grad
            if self.gathered is None or (wants_graph and not self.gathered.requires_grad):
                self._refuse_written(self.gathered)
                self.gathered = self._gather()
                self._written = self._writes(self.gathered)
            return self.gathered
        return self._gather() if self.running.gathers else self.parameter

    @property
    def parameter(self) -> Tensor:
        """The parameter as the module has it registered: absent, with its true shape and dtype.

        Raises:
            AttributeError: if somebody took it out of the module, as pruning does while it looks at it.
        """
        parameter = self.module._parameters.get(self.attribute)
        if parameter is None:
            raise AttributeError(f"{type(self.module).__name__} has no {self.attribute}: it was taken out after sharding")
        return parameter

    @contextmanager
    def once(self) -> Iterator[None]:
        """Let all reads in the body share one gather, at the first of them.

        Raises:
            UserError: if the gathered tensor was written in place: it is a copy, and the write would be lost.
        """
        self.sharing = True
        try:
            yield
        finally:
            gathered, self.sharing, self.gathered = self.gathered, False, None
        self._refuse_written(gathered)

    def _refuse_written(self, gathered: Tensor | None) -> None:
        if gathered is not None and self._writes(gathered) != self._written:
            raise UserError(
                f"{self.flat.name} was written in place while its module computed. At stage 3 it is a copy meanwhile, and "
                "the write would be lost. Compute with a changed copy (weight * scale), or set ftkit={'stage': 2}"
            )

    @staticmethod
    def _writes(gathered: Tensor) -> int:
        return 0 if gathered.is_inference() else gathered._version

    def _gather(self) -> Tensor:
        """Return the whole parameter. Cost: one all-gather; in backward one reduce-scatter.

        All reads in a call share one where a hook wants the gradient: it is given the sum, as of a tied weight.
        """
        if torch.is_grad_enabled() and self.parameter.requires_grad and self.gradient is not None:
            hooks = _hooks_of(self.parameter)
            updates, shared = self.running.shared.get(self.flat, (-1, None))
            if hooks and shared is not None and updates == self.updates():
                return shared
            gathered: Tensor = self.with_attributes(_Gather.apply(self.gradient, self.anchor))
            for hook in hooks:
                gathered.register_hook(hook)
            if hooks and self.running.gathers:
                self.running.shared[self.flat] = self.updates(), gathered
            return gathered
        return self.with_attributes(gather_whole(self.flat))

    def with_attributes(self, gathered: Tensor) -> Tensor:
        """Give a gathered tensor the attributes that the user has put on the parameter."""
        own = vars(self.parameter)
        gathered.__dict__.update({key: value for key, value in own.items() if not key.startswith("ftkit_")})
        return gathered


def _hooks_of(parameter: Tensor) -> list[Any]:
    """Return what the user registered on a parameter to change its gradient: autograd calls it on what is read instead."""
    return list((parameter._backward_hooks or {}).values())


class _Gather(torch.autograd.Function):
    """Forward: all-gather of a flat parameter that holds one tensor. Backward: its gradient is added up and reduced."""

    @staticmethod
    def forward(ctx: Any, gradient: Gradient, anchor: Tensor) -> Tensor:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return gather_whole(gradient.flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        ctx.gradient.add_use(0, gradient)
        return None, None


def gather_whole(flat: FlatParameter) -> Tensor:
    """Return the one tensor on `flat`, whole. A collective. Cost: one all-gather, and its bytes on every rank."""
    full = torch.empty(flat.layout.padded_numel, dtype=flat.dtype, device=flat.comm.device)
    flat.gather(full)
    return full[: flat.layout.numel].view(flat.layout.segments[0].shape)


def refuse_gradients(flat: FlatParameter) -> None:
    """Raise where autograd adds up a gradient in a root parameter itself, which only a read by attribute can bring home.

    Raises:
        UserError: for a hook of the user's that waits for such a gradient.
    """
    name = flat.name
    if any(parameter._post_accumulate_grad_hooks for parameter in flat.parameters):
        raise UserError(
            f"{name} has a hook of register_post_accumulate_grad_hook: at stage 3 its gradient is never whole in `.grad`. "
            "Use register_hook, which is given the gradient, or set ftkit={'stage': 2}"
        )

    def refuse(parameter: Tensor) -> None:
        parameter.grad = None
        raise UserError(
            f"{name} got a gradient outside the model's calls: read it as an attribute of its module (model.lm_head.weight) "
            "in a Trainer's compute_loss or within `ftkit.root_parameters(model)`"
        )

    for parameter in flat.parameters:
        on_gradient(parameter, refuse)


def receive(gradient: Gradient) -> None:
    """Collect the gradient of a resident flat parameter outside blocks as autograd finishes it.

    The hooks do not keep it alive: autograd holds hooks where Python's collector does not look, so what they held would
    never go.
    """
    reference = weakref.ref(gradient)

    def receiver(index: int) -> Any:
        def take(parameter: Tensor) -> None:
            own = reference()
            if own is None:  # its model is gone: this is a tensor like any other
                return
            finished, parameter.grad = parameter.grad, None
            own.add_use(index, finished)

        return take

    for index, parameter in enumerate(gradient.flat.parameters):
        on_gradient(parameter, receiver(index))
