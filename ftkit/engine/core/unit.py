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

import random
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from ftkit.engine.core.block_buffers import BlockBuffers, Noted, as_before
from ftkit.engine.core.block_state import BlockState, attributes_as_before, differ, sample
from ftkit.engine.core.flat_parameter import FlatParameter, add_in_pieces
from ftkit.engine.core.left_tensors import Place, left
from ftkit.engine.core.resharded import Guard, on_gradient
from ftkit.engine.core.tensor_tree import in_objects, put_tensors, take_tensors
from ftkit.errors import UserError

if TYPE_CHECKING:
    from ftkit.engine.core.activation_offload import Ticket
    from ftkit.engine.core.transfer import Transfer, WeightSlot


class World:
    """What a computation depends on besides its arguments, as it was in forward: random numbers (torch's, Python's and
    NumPy's), autocast, buffers, attributes of modules (train or eval is one) and hooks.

    Args:
        module: the block.
        device: the device on which the block computes.
        fingerprint: from the block to its switches that ftkit does not set (active adapters); they must be the same in
            backward.
        state: what is known of the attributes of the block's modules.
        buffers: buffers of the block; None where it will not be computed again.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        fingerprint: Callable[[nn.Module], Hashable],
        state: BlockState,
        buffers: BlockBuffers | None = None,
    ) -> None:
        self.module = module
        self.buffers = buffers
        self.noted: list[Noted] = [] if buffers is None else buffers.note()
        self.state = state
        self.attributes = state.note()
        if buffers is not None:
            self.others = random.getstate(), np.random.get_state()
        self.device = device
        self.fingerprint = fingerprint
        self.switches = fingerprint(module)
        self.cpu_state = torch.get_rng_state()
        self.cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = autocast_kind(device)
        self.autocast = torch.is_autocast_enabled(kind)
        self.autocast_dtype = torch.get_autocast_dtype(kind)

    def without_caches(self) -> AbstractContextManager[None]:
        """Return forward's autocast as a context, without what would outlive the weights; see `uncached`."""
        return uncached(autocast_kind(self.device), self.autocast_dtype, enabled=self.autocast)

    def ran(self) -> None:
        """Keep of what was noted that which the forward has changed; called after it."""
        self.state.ran(self.attributes)
        if self.buffers is not None:
            self.noted = self.buffers.changed(self.noted)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body in forward's world, then return to the present one.

        Raises:
            RuntimeError: if adapters were switched since the forward.
        """
        if self.fingerprint(self.module) != self.switches:
            raise RuntimeError("adapters were switched between a block's forward and its backward; switch after backward")
        with ExitStack() as stack:
            devices = [self.device] if self.cuda_state is not None else []
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type="cuda"))
            torch.set_rng_state(self.cpu_state)
            if self.cuda_state is not None:
                torch.cuda.set_rng_state(self.cuda_state, self.device)
            stack.callback(_set_others, random.getstate(), np.random.get_state())
            _set_others(*self.others)
            stack.enter_context(attributes_as_before(self.attributes))
            stack.enter_context(as_before(self.noted))
            stack.enter_context(self.without_caches())
            yield


def _set_others(python: Any, numpy: Any) -> None:
    """Set the states of Python's and NumPy's random numbers."""
    random.setstate(python)
    np.random.set_state(numpy)


def autocast_kind(device: torch.device) -> str:
    """Return the kind of device by which autocast is asked for; the CPU's where a device (meta) has none."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


@contextmanager
def uncached(kind: str, dtype: torch.dtype, *, enabled: bool) -> Iterator[None]:
    """Compute in the body with autocast, but without its cache of weights and that of `parametrize.cached()`.

    What they keep would outlive the weights, and has no gradient where the first run of a block made it.
    """
    cached = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        with torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            yield
    finally:
        parametrize._cache_enabled = cached


Split = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], list[bool]]
"""From a block and a call's (args, kwargs) to a flag for each tensor in them, in order: whether its rows are the batch."""


class Call:
    """One call of a block: the function, its arguments as a tree with holes for tensors, and the worlds it ran in.

    Args:
        function: computes the block.
        arguments: its arguments as a tree with holes for tensors.
        note_world: returns the present world.
        divided: for each tensor, whether its rows are divided among `parts`.
        parts: number of micro-batches.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        note_world: Callable[[], World],
        divided: Sequence[bool] = (),
        parts: int = 1,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.note_world = note_world
        self.divided = divided
        self.parts = parts
        self.worlds: list[World] = []
        self.result: object = None
        self.left: list[tuple[Place, object]] = []  # with trees as of the result
        self.cut_off: list[Place] = []

    def enter_world(self) -> World:
        """Note the world in which the next micro-batch is computed."""
        self.worlds.append(self.note_world())
        return self.worlds[-1]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the block; return the tensors of its result and remember their tree in `result`."""
        args, kwargs = put_tensors(self.arguments, tensors)
        found: list[Tensor] = []
        self.result = take_tensors(self.function(*args, **kwargs), found)
        return found

    # --- what it leaves in attributes

    def take_left(self, places: Sequence[Place], found: list[Tensor]) -> None:
        """Count the tensors in `places` as results, which are appended to `found`."""
        self.left = [(place, take_tensors(place.get(), found)) for place in places]

    def put_left(self, results: Sequence[Tensor]) -> None:
        """Put results where the block has left them."""
        for place, tree in self.left:
            place.put(put_tensors(tree, results))

    def left_again(self, found: list[Tensor]) -> None:
        """Append to `found` what another run has left in the same places."""
        for place, _ in self.left:
            take_tensors(place.get(), found)

    # --- micro-batches

    def part(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the tensors as micro-batch `number` has them."""
        if self.parts == 1:
            return list(tensors)
        return [t.tensor_split(self.parts)[number] if cut else t for t, cut in zip(tensors, self.divided)]

    def share(self, gradient: Tensor | None, number: int) -> Tensor | None:
        """Return micro-batch `number`'s rows of a result's gradient."""
        return gradient if gradient is None or self.parts == 1 else gradient.tensor_split(self.parts)[number]

    def joined(self, tensors: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the results of all micro-batches, row after row.

        Raises:
            RuntimeError: if a result has other rows than the batch: it could not be divided again in backward.
        """
        if self.parts == 1:
            return list(parts[0])
        rows = next(len(t) for t, cut in zip(tensors, self.divided) if cut)
        whole = [torch.cat(results) for results in zip(*parts)]
        if any(len(result) != rows for result in whole):
            raise RuntimeError(
                f"a block returns a tensor whose rows are not the {rows} of its batch; such a model cannot divide its batch "
                "inside blocks: set engine.accumulate_in: step"
            )
        return whole

    def summed(self, found: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """Return the gradient of each of the call's tensors from those of its micro-batches."""
        if self.parts == 1:
            return list(found[0])
        total: list[Tensor | None] = []
        for gradients, cut in zip(zip(*found), self.divided):
            there = [g for g in gradients if g is not None]
            if len(there) < (len(gradients) if cut else 1):
                total.append(None)
            else:
                total.append(torch.cat(there) if cut else torch.stack(there).sum(0))
        return total


class Unit:
    """A block with its flat parameters.

    Args:
        number: place in the order of execution.
        name: name of the module in the model.
        module: the block.
        flats: its flat parameters (frozen and trainable, one a dtype).
        keep: keep the graph from forward to backward.
        hold: keep the weights gathered from forward to backward.
        arguments: cleans a call's (args, kwargs) when gradients are on.
        fingerprint: see `World`.
        parts: micro-batches into which a call that a backward follows is divided.
        split: says which of the call's tensors `parts` divides; needed where that is above 1.
    """

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        flats: Sequence[FlatParameter],
        *,
        keep: bool,
        hold: bool,
        arguments: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        fingerprint: Callable[[nn.Module], Hashable],
        parts: int = 1,
        split: Split | None = None,
    ) -> None:
        if parts > 1 and split is None:
            raise ValueError("to divide a block's batch, shard() must be told what of its arguments is the batch (split)")
        self.parts, self.split = parts, split
        self.number = number
        self.name = name
        self.module = module
        self.buffers = BlockBuffers(module)
        self.state = BlockState(module)
        self.forwards = 0  # that are to be computed again
        self.flats = list(flats)
        self.gathered = [flat for flat in flats if not flat.resident]
        self.resident = [flat for flat in flats if flat.resident]
        self.reduced = [flat for flat in flats if flat.trainable and not flat.deferred]
        self.keep = keep
        self.hold = hold
        self.arguments = arguments
        self.fingerprint = fingerprint
        self.before: Unit | None = None
        self.after: Unit | None = None
        self.held: WeightSlot | None = None
        self.whole: WeightSlot | None = None  # while all weights of the model are held (holding.py)
        self.kept: list[list[weakref.ref[Ticket]]] = []  # of each forward whose backward is to come
        self.pending = 0  # forwards since zero_grad that wait for their backward: counted, so alike on all ranks
        self.receiving: dict[FlatParameter, Tensor] = {}  # open gradient buffers, while this unit's backward runs
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)  # makes a unit on raw data differentiable

    def connect(self, transfer: Transfer, before: Unit | None, after: Unit | None) -> None:
        """Take the neighbours and the slots that all units share."""
        self.transfer = transfer
        self.before, self.after = before, after
        for flat in self.flats:
            if flat.trainable:
                for index, parameter in enumerate(flat.parameters):
                    on_gradient(parameter, self._receiver(flat, index))

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        return next((flat.comm.device for flat in self.flats), torch.device("cpu"))

    @property
    def trains(self) -> bool:
        """Whether any parameter of the block asks for a gradient now."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def slot(self) -> WeightSlot:
        """The buffer for this unit's weights: its own while it holds one, else slot `number` mod 2."""
        return self.held or self.transfer.slots[self.number % 2]

    @property
    def version(self) -> int:
        """Of the model's weights: changes with every update, also of adapters that lie outside this unit's lines."""
        return self.transfer.updates

    # --- the weights

    def fetch(self, *, graph: bool) -> None:
        """Start gathering the weights, if they are not here; into a buffer of its own if this unit holds for a graph."""
        self.transfer.refresh(self.resident)
        if not self.gathered:
            return
        if self.hold and graph and self.held is None:
            self.held = self.transfer.lend(self.gathered)
        self.transfer.gather(self.slot, self.gathered, self.number)

    def enter(self, *, graph: bool, neighbour: Unit | None) -> None:
        """Make the weights usable, and start the neighbour's gather. `graph`: a backward will follow.

        Raises:
            RuntimeError: if all weights are held for forwards without gradients.
        """
        if self.whole is not None:
            raise RuntimeError(
                f"{self.name} was used for training while its weights are held for generation: leave the `hold` context "
                "first, or compute under torch.no_grad()"
            )
        self.fetch(graph=graph)
        for flat in self.resident:
            self.transfer.side.wait(flat.refreshed)
        if self.gathered:
            self.transfer.take(self.slot, self.gathered, self.number)
        if neighbour is not None and self.transfer.prefetch:
            neighbour.fetch(graph=graph)
        self.transfer.read_ahead([unit.gathered for unit in self._beyond(neighbour, turns=graph)])

    def _beyond(self, neighbour: Unit | None, *, turns: bool) -> list[Unit]:
        """Return the units that come after the neighbour; after the last one of a forward, those that its backward wants."""
        if neighbour is None:
            return [unit for unit in (self.before,) if unit is not None and turns]
        forward = neighbour is self.after
        coming = neighbour.after if forward else neighbour.before
        return [coming] if coming is not None else []

    def leave(self) -> None:
        """Free the weights, but for a held buffer that a backward will ask for."""
        if self.gathered:
            self.transfer.free(self.slot, self.gathered, for_good=self.held is None)
            if self.pending == 0:
                self.held = None

    def hold_whole(self) -> None:
        """Gather the weights into a buffer of their own, where calls without gradients find them until `give_back`."""
        self.whole = self.transfer.lend(self.gathered)
        self.transfer.take(self.whole, self.gathered, self.number)

    def give_back(self) -> None:
        """Let the buffer of `hold_whole` go; the parameters become absent."""
        if self.whole is not None:
            self.transfer.free(self.whole, self.gathered, for_good=True)
            self.whole = None

    def forget(self) -> None:
        """Let a held buffer go; a backward that comes all the same gathers again."""
        self.pending, self.held = 0, None
        self.kept.clear()

    # --- the gradients

    def _receiver(self, flat: FlatParameter, index: int) -> Callable[[Tensor], None]:
        """Return the hook that moves one parameter's finished gradient onto the unit's line.

        It does not keep unit and line alive: see `root_parameters.receive`.
        """
        own, line = weakref.ref(self), weakref.ref(flat)

        def receive(parameter: Tensor) -> None:
            unit, flat = own(), line()
            if unit is not None and flat is not None:
                if isinstance(parameter, Guard):  # of a graph that saw the weight in its block, and walks back without it
                    parameter.grad = None
                    raise unit._outside(flat.layout.segments[index].name)
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:  # none where it is cut off on the way here
                    unit._take(flat, index, gradient)

        return receive

    def _take(self, flat: FlatParameter, index: int, gradient: Tensor) -> None:
        """Put tensor `index`'s gradient where the line's gradient is being made.

        Raises:
            UserError: if it comes from outside the block's own backward, where there is no place for it.
        """
        segment = flat.layout.segments[index]
        if flat.deferred:
            flat.accumulate(index, gradient)
        elif flat in self.receiving:
            place = self.receiving[flat][segment.start : segment.stop]
            if (flat.name, index) in self.written:  # by an earlier micro-batch in the same slot
                add_in_pieces(place, gradient.reshape(-1))
            else:
                place.copy_(gradient.reshape(-1))
            self.written.add((flat.name, index))
        else:
            raise self._outside(segment.name)

    def _outside(self, name: str) -> UserError:
        """Return the error for a gradient of weight `name` that the block's own backward did not give."""
        return UserError(
            f"{name} got a gradient outside the backward of its block {self.name} (a penalty on it, in compute_loss or in "
            "a hook; or a hook on the block itself, which runs outside it): this ZeRO stage takes a block's gradients while "
            "its own backward runs. For an L2 penalty set weight_decay; put a hook on a module inside the block; for "
            "anything else train with ftkit={'stage': 1, 'activations': 'keep'}"
        )

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Run the block's backward in the body: gradients land in the gradient slot, and are reduced afterwards."""
        if not self.reduced:
            yield
            return
        self.written: set[tuple[str, int]] = set()
        places = self.transfer.open_gradients(self.reduced)
        self.receiving = dict(zip(self.reduced, places))
        yield
        self.receiving = {}
        for flat, place in zip(self.reduced, places):
            place[flat.layout.numel :].zero_()
            for index, segment in enumerate(flat.layout.segments):
                if (flat.name, index) in self.written:
                    flat.touched[index] = True
                else:
                    place[segment.start : segment.stop].zero_()
        self.transfer.reduce(self.reduced, places, self.number)

    # --- the use

    def use(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block's own `function` on these arguments, with weights that are here only meanwhile."""
        if not torch.is_grad_enabled():
            if self.whole is not None:
                return self._without_caches(function, args, kwargs)
            self.enter(graph=False, neighbour=self.after)
            try:
                return self._without_caches(function, args, kwargs)
            finally:
                self.leave()
        arguments = self.arguments(args, kwargs)
        if self.keep and not self.gathered and not self.reduced:  # plain autograd has all it needs
            self.enter(graph=True, neighbour=None)
            with self.transfer.trace.span("compute", f"forward {self.number}"):
                result = function(*arguments[0], **arguments[1])
            return self._guarded(result, arguments)
        tensors: list[Tensor] = []
        tree = take_tensors(arguments, tensors)
        self._refuse_objects(tree, "is given")
        divided, parts = self._division(arguments, tensors)
        call = Call(function, tree, self._world, divided, parts)
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
                    f"the block {self.name} is frozen, and so is what it is given; but something in it asks for gradients "
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

    def _world(self) -> World:
        return World(self.module, self.device, self.fingerprint, self.state, None if self.keep else self.buffers)

    def add_left(self, call: Call, tensors: Sequence[Tensor], results: list[Tensor]) -> None:
        """Add to a forward's results the tensors on its graph that it has left in attributes.

        Which are on the graph is asked of a run with one, once for each attribute.

        Raises:
            UserError: if the batch is divided in the block: an attribute holds what one micro-batch left.
        """
        places = left(call.worlds[-1].attributes, call.worlds[-1].noted)
        known = {} if self.keep else self.state.on_graph
        if any(place.key not in known for place in places):
            if self.keep:
                known = _on_graph(places)
            else:
                result = call.result
                with call.worlds[-1].restored(), torch.enable_grad():
                    call.run(_leaves(call.part(tensors, len(call.worlds) - 1)))
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

    def keep_inputs(self, tensors: Sequence[Tensor]) -> list[Ticket | None]:
        """Move a call's activations to their tier, until its backward; None for what stays with autograd."""
        tickets = self.transfer.keeper.keep(tensors)
        self.kept.append([weakref.ref(ticket) for ticket in tickets if ticket is not None])
        return tickets

    @staticmethod
    def bring_inputs_of(unit: Unit | None) -> None:
        """Start bringing back what a unit will want next."""
        if unit is not None and unit.kept:
            for known in unit.kept.pop():
                if (ticket := known()) is not None:
                    ticket.bring()

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
                f"the block {self.name} gives other results in backward, where it is computed again, than in forward: it "
                "depends on something that is no argument, weight, buffer or attribute of its modules, such as a global "
                "switch or a random generator of Python's or NumPy's. Keep that in an attribute of a module in the block, a "
                "generator as a torch.Generator, or set ftkit={'activations': 'keep'}"
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
        unit.enter(graph=True, neighbour=unit.after)
        unit.pending += 1
        versions = [t._version if t.requires_grad and not unit.keep else None for t in tensors]
        parts: list[list[Tensor]] = []
        graphs: list[_Graph] = []
        try:
            with unit.transfer.trace.span("compute", f"forward {unit.number}"):
                for number in range(call.parts):
                    inputs = call.part(tensors, number)
                    with call.enter_world().without_caches():
                        if unit.keep:
                            inputs = _leaves(inputs)
                            with torch.enable_grad():
                                parts.append(call.run(inputs))
                            graphs.append((inputs, parts[-1]))
                        else:
                            parts.append(call.run(inputs))
                    call.worlds[-1].ran()
                    unit.add_left(call, tensors, parts[-1])
        finally:
            unit.leave()
        ctx.graphs = graphs if unit.keep else None
        if unit.keep:
            call.worlds.clear()
        else:
            unit.refuse_written(tensors, versions)
            unit.forwards += 1
            looks = unit.forwards & (unit.forwards - 1) == 0  # at the 1st, 2nd, 4th, 8th ...
            ctx.samples = [sample(results) for results in parts] if looks else None
            ctx.tickets = unit.keep_inputs(tensors)
            ctx.save_for_backward(*(t for t, ticket in zip(tensors, ctx.tickets) if ticket is None))
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
        if ctx.graphs == [] or (ctx.graphs is None and not call.worlds):
            way_out = "recompute activations" if unit.keep else "call the first with retain_graph=True"
            raise RuntimeError(f"a second backward through {unit.name}: what it needs is gone after the first; {way_out}")
        unit.pending = max(unit.pending - 1, 0)  # zero_grad may have come between
        tensors: list[Tensor] = []
        if ctx.graphs is None:
            saved = iter(ctx.saved_tensors)
            tensors = [next(saved) if ticket is None else ticket.take() for ticket in ctx.tickets]
        unit.bring_inputs_of(unit.before)
        unit.enter(graph=False, neighbour=unit.before)
        found = []
        try:
            with unit.gradients(), unit.transfer.trace.span("compute", f"backward {unit.number}"):
                for number in range(call.parts):
                    graph = _again(unit, call, tensors, number, len(gradients)) if ctx.graphs is None else ctx.graphs.pop(0)
                    if ctx.graphs is None and ctx.samples is not None:
                        unit.refuse_other_results(ctx.samples[number], graph[1])
                    found.append(_walk_back(graph, [call.share(g, number) for g in gradients]))
        except Exception as error:
            error.add_note(f"in the backward of {unit.name}") if hasattr(error, "add_note") else None
            raise
        finally:
            unit.leave()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # A tensor that was left in an attribute holds this context, whose worlds hold what the attribute held before:
            # tensor would hold tensor back to the first step
            call.worlds.clear()
        return (None, None, None, *call.summed(found))


_Graph = tuple[list[Tensor], list[Tensor]]
"""Inputs, cut from the graph they came from, and results that hang on them."""


def _again(unit: Unit, call: Call, tensors: Sequence[Tensor], number: int, expected: int) -> _Graph:
    """Compute micro-batch `number` once more, in forward's world, with a graph."""
    inputs = _leaves(call.part(tensors, number))
    with call.worlds[number].restored(), torch.enable_grad():
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
            "blocks that are computed again in backward read a tensor with a graph that is no argument of theirs (an "
            "attribute outside of them, a list in a closure): each of them would walk back through its graph. Hand it over "
            "as an argument of the block, read it with detach(), or set ftkit={'stage': 1, 'activations': 'keep'}"
        ) from error
    return [tensor.grad for tensor in inputs]


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors cut from the graph they came from, asking for gradients where they did."""
    return [t.detach().requires_grad_(t.requires_grad) for t in tensors]
