"""The unit: one recomputed block, and its use as one autograd function.

    forward :  gather the weights -> compute without a graph -> free -> keep the inputs and the state of the random numbers
    backward:  gather -> compute again with a graph -> backward -> reduce-scatter the gradient -> free

Nothing of a block but its inputs lives from forward to backward, so the order of gathers is the order of the blocks, the
neighbour is the prefetch, and there are no hooks on modules, no resized storages and no recorded traces. A second forward
before the first one's backward is harmless, because there is nothing it could disturb.

Two ways to pay for activations are one `if`: a unit that *keeps* builds the graph in forward and walks it in backward. The
weights are not kept alive by it: autograd remembers parameters and views of them, both of which lie at addresses that
the unit's slot has again in backward. Two ways to hold weights are another: a unit that *holds* gathers into a buffer of
its own, which lives until its backward.

Micro-batches may pass a unit together (`parts`): it divides what it is given, and all parts go through it before the next
unit's weights are gathered, so that weights move once a step and gradients add up in the slot. What may be divided is
declared by whoever shards (`Split`), never guessed from sizes.

What it refuses: double backward, a forward whose weights are updated before its backward, and caches among a block's
arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftkit.engine.core.activation_offload import OffloadedInputs
from ftkit.engine.core.block_buffers import BlockBuffers
from ftkit.engine.core.block_call import Call, ForwardContext, Split, autocast_kind, uncached
from ftkit.engine.core.block_state import BlockState, differ, sample
from ftkit.engine.core.block_weights import BlockWeights
from ftkit.engine.core.gradient import Gradient, reduced_at_once
from ftkit.engine.core.left_tensors import Place, left
from ftkit.engine.core.resharded import Guard, on_gradient
from ftkit.engine.core.tensor_tree import in_objects, put_tensors, take_tensors
from ftkit.errors import UserError


class Unit:
    """A block with its weights and gradients.

    Args:
        module: the block.
        weights: its weights, which know its name and its place in the order of execution.
        gradients: of its flat parameters that are trained.
        keep: keep the graph from forward to backward.
        arguments: cleans a call's (args, kwargs) when gradients are on.
        fingerprint: see `ForwardContext`.
        parts: micro-batches into which a call that a backward follows is divided.
        split: says which of the call's tensors `parts` divides; needed where that is above 1.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: BlockWeights,
        gradients: Sequence[Gradient],
        *,
        keep: bool,
        arguments: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        fingerprint: Callable[[nn.Module], Hashable],
        parts: int = 1,
        split: Split | None = None,
    ) -> None:
        if parts > 1 and split is None:
            raise ValueError("to divide a block's batch, shard() needs `split`, which says which arguments hold the batch")
        self.parts, self.split = parts, split
        self.number, self.name = weights.number, weights.name
        self.module = module
        self.weights = weights
        self.transfer = weights.transfer
        self.device = self.transfer.comm.device
        self.inputs = OffloadedInputs(self.transfer.activations)
        self.buffers = BlockBuffers(module)
        self.state = BlockState(module)
        self.forwards = 0  # that are to be computed again
        self.reduced = reduced_at_once(gradients)
        self.keep = keep
        self.arguments = arguments
        self.fingerprint = fingerprint
        self.before: Unit | None = None
        self.after: Unit | None = None
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)  # makes a unit on raw data differentiable
        for gradient in gradients:
            for index, parameter in enumerate(gradient.flat.parameters):
                on_gradient(parameter, self._receiver(gradient, index))

    @property
    def is_cut_out(self) -> bool:
        """Whether the block's computation is cut out of autograd's graph: else plain autograd has all it needs."""
        return not self.keep or bool(self.weights.gathered or self.reduced)

    @property
    def trains(self) -> bool:
        """Whether any parameter of the block asks for a gradient now."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def version(self) -> int:
        """Of the model's weights: changes with every update, also of adapters that lie outside this unit's lines."""
        return self.transfer.updates

    def forget(self) -> None:
        """Forget forwards whose backward has not come; one that comes all the same gathers again."""
        self.weights.forget_backwards()
        self.inputs.forget()

    # --- the gradients

    def _receiver(self, gradient: Gradient, index: int) -> Callable[[Tensor], None]:
        """Return the hook that moves one parameter's finished gradient into the engine's.

        It does not keep unit and gradient alive: see `root_parameters.receive`.
        """
        own, reference = weakref.ref(self), weakref.ref(gradient)

        def receive(parameter: Tensor) -> None:
            unit, gradient = own(), reference()
            if unit is not None and gradient is not None:
                name = gradient.flat.layout.segments[index].name
                if isinstance(parameter, Guard):  # of a graph that saw the weight in its block, and walks back without it
                    parameter.grad = None
                    raise unit._outside(name)
                finished, parameter.grad = parameter.grad, None
                if finished is None:  # it is cut off on the way here
                    return
                if not gradient.open:
                    raise unit._outside(name)
                gradient.add(index, finished)

        return receive

    def _outside(self, name: str) -> UserError:
        """Return the error for a gradient of weight `name` that the block's own backward did not give."""
        return UserError(
            f"{name} got a gradient outside the backward of its block {self.name} (a penalty on it, in compute_loss or in "
            "a hook; or a hook on the block itself, which runs outside it): this ZeRO stage takes a block's gradients while "
            "its own backward runs. For an L2 penalty set weight_decay; put a hook on a module inside the block; for "
            "anything else train with ftkit={'stage': 1, 'activations': 'keep'}"
        )

    # --- the use

    def use(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block's own `function` on these arguments, with weights that are here only meanwhile."""
        if not torch.is_grad_enabled():
            if self.weights.is_whole:
                return self._without_caches(function, args, kwargs)
            self.weights.enter(graph=False, neighbour=self.weights.after)
            try:
                return self._without_caches(function, args, kwargs)
            finally:
                self.weights.leave()
        arguments = self.arguments(args, kwargs)
        if not self.is_cut_out:
            self.weights.enter(graph=True, neighbour=None)
            with self.transfer.trace.span("compute", f"forward {self.number}"):
                result = function(*arguments[0], **arguments[1])
            return self._guarded(result, arguments)
        tensors: list[Tensor] = []
        tree = take_tensors(arguments, tensors)
        self._refuse_objects(tree, "is given")
        divided, parts = self._division(arguments, tensors)
        call = Call(function, tree, self._context, divided, parts)
        if self.trains or any(t.requires_grad for t in tensors):
            results = _Use.apply(self, call, self.anchor, *tensors)
            self._refuse_objects(call.result, "returns")
            call.put_left(results)
            return put_tensors(call.result, results)
        with torch.no_grad():
            return self.use(self._unseen_by(function), *arguments)

    def _refuse_objects(self, tree: Any, verb: str) -> None:
        """Raise where a gradient would have to go through a tensor that lies in an object.

        Raises:
            UserError: naming the block and the object.
        """
        for each in in_objects(tree):
            if each.requires_grad or (verb == "returns" and each.is_floating_point()):
                raise UserError(
                    f"the block {self.name} {verb} an object with a tensor of shape {tuple(each.shape)} in it, whose "
                    "gradient would be lost: hand tensors over by themselves, or in tuples, lists, dictionaries or named "
                    "tuples; or set ftkit={'stage': 1, 'activations': 'keep'}"
                )

    def _unseen_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a frozen block, whose arguments ask for no gradients, so that nothing asks for one by
        another way: a tensor in an attribute or a hook.
        """

        def compute(*args: Any, **kwargs: Any) -> Any:
            with torch.enable_grad():  # no graph is made where nothing asks
                result = function(*args, **kwargs)
            found: list[Tensor] = []
            take_tensors(result, found)
            if any(each.requires_grad for each in found):
                raise UserError(
                    f"the block {self.name} is frozen, and so are its arguments; but something in it asks for gradients "
                    "that is neither an argument nor a weight of the block (a tensor that a hook or an attribute brings "
                    "in), and would get none here. Hand it over as an argument, or set "
                    "ftkit={'stage': 1, 'activations': 'keep'}"
                )
            return result

        return compute

    def _without_caches(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = autocast_kind(self.device)
        with uncached(kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)):
            return function(*args, **kwargs)

    def _context(self) -> ForwardContext:
        return ForwardContext(self.module, self.device, self.fingerprint, self.state, None if self.keep else self.buffers)

    def add_left(self, call: Call, tensors: Sequence[Tensor], results: list[Tensor]) -> None:
        """Add to a forward's results the tensors on its graph that it has left in attributes.

        Which are on the graph is asked of a run with one, once for each attribute.

        Raises:
            UserError: if the batch is divided in the block: an attribute holds what one micro-batch left.
        """
        places = left(call.contexts[-1].attributes, call.contexts[-1].noted)
        known = {} if self.keep else self.state.on_graph
        if any(place.key not in known for place in places):
            if self.keep:
                known = _on_graph(places)
            else:
                result = call.result
                with call.contexts[-1].restored(), torch.enable_grad():
                    call.run(_leaves(call.part(tensors, len(call.contexts) - 1)))
                    known.update(_on_graph(places))
                call.result = result
        chosen = [place for place in places if known[place.key]]
        if chosen and call.parts > 1:
            raise UserError(
                f"the block {self.name} leaves a tensor with a gradient in its attribute {chosen[0].attribute}, and its "
                "batch is divided inside the block: set engine.accumulate_in: step"
            )
        call.cut_off = [place for place in places if not known[place.key]]
        call.take_left(chosen, results)

    def refuse_other_left(self, call: Call, results: Sequence[Tensor], expected: int) -> None:
        """Raise if the second run has left other tensors in attributes than the first, or some on the graph that were not.

        Raises:
            UserError: naming the block and the attribute.
        """
        if len(results) != expected:
            names = ", ".join(sorted({place.attribute for place, _ in call.left})) or "its results"
            raise UserError(
                f"the block {self.name} gives another number of tensors in backward, where it is computed again, than in "
                f"forward ({names}): let it do the same each time, or set ftkit={{'activations': 'keep'}}"
            )
        for key, is_on_graph in _on_graph(call.cut_off).items():
            if is_on_graph:
                name = next(place.attribute for place in call.cut_off if place.key == key)
                raise UserError(
                    f"the block {self.name} leaves a tensor with a gradient in its attribute {name}, where it left one "
                    "without before: a loss on it would not train the block. Give it one each time (x.sum() * 0), or "
                    "detach() it"
                )

    def _division(self, arguments: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[list[bool], int]:
        """Return which of a call's tensors are divided, and into how many micro-batches: none has less than a row."""
        if self.parts == 1 or self.split is None:
            return [], 1
        divided = self.split(self.module, *arguments)
        return divided, min(self.parts, max((len(t) for t, cut in zip(tensors, divided) if cut), default=1))

    def _guarded(self, result: Any, arguments: Any) -> Any:
        """Return a block's result, whose backward refuses weights that were updated since."""
        version = self.version

        def check(gradient: Tensor) -> None:
            self.check_version(version)

        found: list[Tensor] = []
        take_tensors(result, found)
        if self.transfer.trace.recording:
            inputs: list[Tensor] = []
            take_tensors(arguments, inputs)
            self.transfer.trace.watch_backward("compute", f"backward {self.number}", found, inputs)
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(check)
        return result

    def refuse_written(self, tensors: Sequence[Tensor], versions: Sequence[int | None]) -> None:
        """Raise if the block has written to an argument in place, which it would be given in backward as it is then.

        Args:
            tensors: tensors of the arguments, as they are now.
            versions: their versions before the call; None for those that may be written to.

        Raises:
            UserError: naming the block.
        """
        if any(before is not None and tensor._version != before for tensor, before in zip(tensors, versions)):
            raise UserError(
                f"the block {self.name} writes to a tensor that it is given (x.mul_(...), x += ...): it is computed again "
                "in backward, from what it was given. Let it write to a tensor of its own (x = x * ...), or set "
                "ftkit={'activations': 'keep', 'stage': 1}"
            )

    def refuse_other_results(self, first: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Raise if the second run of the block gave other results than the first.

        Raises:
            UserError: naming the block.
        """
        eps = max((torch.finfo(each.dtype).eps for each in results if each.is_floating_point()), default=1.0)
        if differ(first, sample(results), eps):
            raise UserError(
                f"the block {self.name} gives other results in backward, where it is computed again, than in forward. It "
                "depends on something besides its arguments, weights, buffers and attributes, such as a global switch or a "
                "random generator of Python's or NumPy's. Keep that in an attribute of a module in the block (a generator "
                "as a torch.Generator), or set ftkit={'activations': 'keep'}"
            )

    def check_version(self, version: int) -> None:
        """Raise if the weights are no more those of the forward that saw `version`."""
        if version != self.version:
            raise RuntimeError(f"the weights of {self.name} were updated between its forward and its backward")


class _Use(torch.autograd.Function):
    """The use of a unit (module docstring). Tensors in: the anchor and the call's tensors. Out: the result's tensors."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.call, ctx.version = unit, call, unit.version
        ctx.set_materialize_grads(False)
        unit.weights.enter(graph=True, neighbour=unit.weights.after)
        unit.weights.expect_backward()
        versions = [t._version if t.requires_grad and not unit.keep else None for t in tensors]
        parts: list[list[Tensor]] = []
        graphs: list[_Graph] = []
        try:
            with unit.transfer.trace.span("compute", f"forward {unit.number}"):
                for number in range(call.parts):
                    inputs = call.part(tensors, number)
                    with call.enter_context().without_caches():
                        if unit.keep:
                            inputs = _leaves(inputs)
                            with torch.enable_grad():
                                parts.append(call.run(inputs))
                            graphs.append((inputs, parts[-1]))
                        else:
                            parts.append(call.run(inputs))
                    call.contexts[-1].ran()
                    unit.add_left(call, tensors, parts[-1])
        finally:
            unit.weights.leave()
        ctx.graphs = graphs if unit.keep else None
        if unit.keep:
            call.contexts.clear()
        else:
            unit.refuse_written(tensors, versions)
            unit.forwards += 1
            looks = unit.forwards & (unit.forwards - 1) == 0  # at the 1st, 2nd, 4th, 8th ...
            ctx.samples = [sample(results) for results in parts] if looks else None
            ctx.handles = unit.inputs.keep(tensors)
            ctx.save_for_backward(*(t for t, handle in zip(tensors, ctx.handles) if handle is None))
        joined = call.joined(tensors, parts)
        returned = tuple(r.detach() for r in joined)
        if joined and any(joined[0] is t and t.requires_grad for t in tensors):
            returned = (joined[0].clone(), *returned[1:])  # handed through, it is one of its own: a hook may write to it
        ctx.mark_non_differentiable(*(r for r in returned if not r.is_floating_point()))
        return returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        unit, call = ctx.unit, ctx.call
        unit.check_version(ctx.version)
        if not torch.autograd._is_checkpoint_valid() and unit.trains:  # torch's own checkpoints ask the same
            raise RuntimeError(
                f"gradients of chosen inputs (torch.autograd.grad, backward(inputs=...)) through {unit.name}: those of its "
                "parameters would be added up all the same. Call backward(), or keep activations on one rank"
            )
        if ctx.graphs == [] or (ctx.graphs is None and not call.contexts):
            way_out = "recompute activations" if unit.keep else "call the first with retain_graph=True"
            raise RuntimeError(f"a second backward through {unit.name}: its tensors are gone after the first; {way_out}")
        unit.weights.begin_backward()
        tensors: list[Tensor] = []
        if ctx.graphs is None:
            saved = iter(ctx.saved_tensors)
            tensors = [next(saved) if handle is None else handle.take() for handle in ctx.handles]
        if unit.before is not None:
            unit.before.inputs.bring()
        unit.weights.enter(graph=False, neighbour=unit.weights.before)
        found = []
        try:
            transfer = unit.transfer
            with transfer.gradients(unit.reduced, unit.number), transfer.trace.span("compute", f"backward {unit.number}"):
                for number in range(call.parts):
                    graph = _again(unit, call, tensors, number, len(gradients)) if ctx.graphs is None else ctx.graphs.pop(0)
                    if ctx.graphs is None and ctx.samples is not None:
                        unit.refuse_other_results(ctx.samples[number], graph[1])
                    found.append(_walk_back(graph, [call.share(g, number) for g in gradients]))
        except Exception as error:
            error.add_note(f"in the backward of {unit.name}") if hasattr(error, "add_note") else None
            raise
        finally:
            unit.weights.leave()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # A tensor that was left in an attribute holds this context, whose contexts hold what the attribute held before:
            # tensor would hold tensor back to the first step
            call.contexts.clear()
        return (None, None, None, *call.summed(found))


_Graph = tuple[list[Tensor], list[Tensor]]
"""Inputs, cut from the graph they came from, and results that hang on them."""


def _again(unit: Unit, call: Call, tensors: Sequence[Tensor], number: int, expected: int) -> _Graph:
    """Compute micro-batch `number` once more, in the context of the forward, with a graph."""
    inputs = _leaves(call.part(tensors, number))
    with call.contexts[number].restored(), torch.enable_grad():
        results = call.run(inputs)
        call.left_again(results)
        unit.refuse_other_left(call, results, expected)
        return inputs, results


def _on_graph(places: Sequence[Place]) -> dict[tuple[int, str], bool]:
    """Return of each attribute whether a tensor in it asks for a gradient."""
    found: dict[tuple[int, str], bool] = {}
    for place in places:
        tensors: list[Tensor] = []
        take_tensors(place.get(), tensors)
        found[place.key] = found.get(place.key, False) or any(each.requires_grad for each in tensors)
    return found


def _walk_back(graph: _Graph, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of a graph's inputs; those of parameters go where their hooks put them."""
    inputs, results = graph
    pairs = [(r, g) for r, g in zip(results, gradients) if g is not None and r.requires_grad]
    try:
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise UserError(
            "blocks that are computed again in backward read a tensor with a graph that is not one of their arguments (an "
            "attribute outside of them, a list in a closure): each of them would walk back through its graph. Hand it over "
            "as an argument of the block, read it with detach(), or set ftkit={'stage': 1, 'activations': 'keep'}"
        ) from error
    return [tensor.grad for tensor in inputs]


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors cut from the graph they came from, asking for gradients where they did."""
    return [t.detach().requires_grad_(t.requires_grad) for t in tensors]
