"""The unit: a transformer block, used as one autograd function.

    forward :  gather the weights -> compute without a graph -> free -> save the inputs and the RNG state
    backward:  gather -> recompute with a graph -> backward -> reduce-scatter the gradient -> free

The inputs are all that stays from forward to backward. Units therefore gather in the order of the blocks, and each can
prefetch its neighbour's weights.

Variants of this path:

- A unit that *keeps* its graph computes with a graph in forward and skips recomputation. The graph holds no weights:
  autograd stores the parameters and views of them, and the unit's slot has them again in backward.
- `parts` micro-batches can pass a unit together. Weights then move once per step, and gradients add up in the slot.
- A unit that keeps its graph and whose weights and gradients stay on the device is computed by plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftkit.engine.core.activation_offload import OffloadedInputs
from ftkit.engine.core.block_weights import BlockWeights
from ftkit.engine.core.gradient import DeferredGradient, DeferredReductions, Gradient, reduced_at_once
from ftkit.engine.core.recompute import Autocast, Call, ForwardState, Split
from ftkit.engine.core.root_parameters import Running
from ftkit.engine.core.tensor_tree import put_tensors, take_tensors


class Unit:
    """A block with its weights and gradients.

    Args:
        module: The block.
        weights: Weights of the block.
        gradients: Gradients of its trained flat parameters.
        running: Knows which unit runs.
        deferred: Reduces the gradients that are not reduced after each use.
        keep: Keep the graph from forward to backward.
        arguments: Cleans the (args, kwargs) of a call that backward follows.
        parts: Micro-batches into which such a call is divided.
        split: Selects the tensors that `parts` divides. Required for more than one part.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: BlockWeights,
        gradients: Sequence[Gradient],
        running: Running,
        deferred: DeferredReductions,
        *,
        keep: bool,
        arguments: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        parts: int = 1,
        split: Split | None = None,
    ) -> None:
        self.module, self.weights = module, weights
        self.number, self.name = weights.number, weights.name
        self.transfer = weights.transfer
        self.device = self.transfer.comm.device
        self.inputs = OffloadedInputs(self.transfer.activations)
        self.running, self.deferred = running, deferred
        self.reduced = reduced_at_once(gradients)
        self.keep, self.arguments = keep, arguments
        self.parts, self.split = parts, split
        self.before: Unit | None = None  # in the order of execution; set by `shard`
        self.after: Unit | None = None
        # An input that requires a gradient, so that autograd calls backward also where the tensors of a call do not.
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        for gradient in gradients:
            gradient.receive(in_block=True)
            if isinstance(gradient, DeferredGradient) and not self.is_cut_out:
                gradient.added = partial(deferred.added, self.number)

    @property
    def trains(self) -> bool:
        """Whether a parameter of the block requires a gradient now: disabling an adapter freezes it."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def is_cut_out(self) -> bool:
        """Whether the block is computed by `_Use` and not by plain autograd."""
        return not self.keep or bool(self.weights.gathered or self.reduced)

    def forget(self) -> None:
        """Free what was kept for a backward that has not run. If it still runs, it gathers again."""
        self.weights.forget_backwards()
        self.inputs.forget()

    def use(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block's own forward with gathered weights.

        Args:
            function: The block's own forward.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if not torch.is_grad_enabled():
            return self._without_graph(function, args, kwargs)
        arguments = self.arguments(args, kwargs)
        if not self.is_cut_out:
            return self._plain(function, arguments)
        tensors: list[Tensor] = []
        tree = take_tensors(arguments, tensors)
        if not any(t.requires_grad for t in tensors) and not self.trains:
            with torch.no_grad():
                return self._without_graph(function, *arguments)
        call = Call(function, tree, *self._division(arguments, tensors))
        results = _Use.apply(self, call, self.anchor, *tensors)
        return put_tensors(call.result, results)

    def _without_graph(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Autocast(self.device).restored():
            if self.transfer.whole is not None:
                return function(*args, **kwargs)
            with self._gathered(graph=False):
                return function(*args, **kwargs)

    def _plain(self, function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        trace = self.transfer.trace
        with self._gathered(graph=True), trace.span("compute", f"forward {self.number}"):
            result = function(*arguments[0], **arguments[1])
        if trace.recording:
            inputs: list[Tensor] = []
            outputs: list[Tensor] = []
            take_tensors(arguments, inputs)
            take_tensors(result, outputs)
            trace.watch_backward("compute", f"backward {self.number}", outputs, inputs)
        return result

    @contextmanager
    def _gathered(self, *, graph: bool) -> Iterator[None]:
        """Make the weights usable in the body, which runs a forward. Start fetching the weights that are needed next."""
        beyond = self.after.after if self.after is not None else self.before if graph else None
        self.weights.enter(graph=graph, neighbour=_weights(self.after), beyond=_weights(beyond))
        self.running.enter(self.number)
        try:
            yield
        finally:
            self.weights.leave()
        self.weights.start_next()

    def _enter_backward(self) -> None:
        """Make the weights usable, and start fetching what the previous block needs."""
        beyond = self.before.before if self.before is not None else None
        if self.before is not None:
            self.before.inputs.bring()
        self.weights.enter(graph=False, neighbour=_weights(self.before), beyond=_weights(beyond))

    def _division(self, arguments: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[list[bool], int]:
        """Return which tensors of a call are divided, and the number of micro-batches, each of at least one row."""
        if self.parts == 1:
            return [], 1
        assert self.split is not None
        divided = self.split(self.module, *arguments)
        return divided, min(self.parts, max((len(t) for t, cut in zip(tensors, divided) if cut), default=1))


def _weights(unit: Unit | None) -> BlockWeights | None:
    return None if unit is None else unit.weights


class _Use(torch.autograd.Function):
    """One use of a unit. Inputs: the anchor and the tensors of the call. Outputs: the tensors of its result."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.call = unit, call
        ctx.set_materialize_grads(False)
        ctx.graphs = []
        results: list[list[Tensor]] = []
        autocast = Autocast(unit.device)
        with unit._gathered(graph=True):
            unit.weights.expect_backward()
            with unit.transfer.trace.span("compute", f"forward {unit.number}"):
                for number in range(call.parts):
                    inputs = call.part(tensors, number)
                    if not unit.keep:
                        call.states.append(ForwardState(unit.device))
                    with autocast.restored(), torch.set_grad_enabled(unit.keep):
                        results.append(call.run(inputs))
                    if unit.keep:
                        ctx.graphs.append((inputs, results[-1]))
        ctx.handles = []
        if not unit.keep:
            ctx.handles = unit.inputs.keep(tensors)
            ctx.save_for_backward(*(t for t, handle in zip(tensors, ctx.handles) if handle is None))
        returned = tuple(result.detach() for result in call.joined(tensors, results))
        ctx.mark_non_differentiable(*(result for result in returned if not result.is_floating_point()))
        return returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        unit, call = ctx.unit, ctx.call
        if unit.keep and not ctx.graphs:
            raise RuntimeError(f"a second backward through {unit.name}, which kept its graph: set activations: recompute")
        saved = iter(ctx.saved_tensors)
        tensors = [next(saved) if handle is None else handle.take() for handle in ctx.handles]
        unit.weights.begin_backward()
        unit._enter_backward()
        found: list[list[Tensor | None]] = []
        transfer = unit.transfer
        try:
            with transfer.gradients(unit.reduced, unit.number):
                for number in range(call.parts):
                    if unit.keep:
                        inputs, results = ctx.graphs.pop(0)
                    else:
                        inputs = call.part(tensors, number)
                        recomputing = transfer.trace.span("compute", f"recompute {unit.number}")
                        with recomputing, call.states[number].restored(), torch.enable_grad():
                            results = call.run(inputs)
                    if unit.reduced:
                        transfer.await_gradient_slot()
                    with transfer.trace.span("compute", f"backward {unit.number}"):
                        found.append(_backward(inputs, results, call.part_of_gradients(gradients, number)))
        finally:
            unit.weights.leave()
        if unit.weights.backwards == 0:
            unit.deferred.finished(unit.number)
        return (None, None, None, *call.summed(found))


def _backward(
    inputs: Sequence[Tensor], results: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Run autograd from a block's results to its inputs; return the inputs' gradients. Hooks take the parameters'."""
    pairs = [(result, g) for result, g in zip(results, gradients) if g is not None and result.requires_grad]
    if pairs:
        torch.autograd.backward([result for result, _ in pairs], [g for _, g in pairs])
    return [tensor.grad for tensor in inputs]
