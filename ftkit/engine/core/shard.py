"""`shard()`: from a model to units.

The model stays the object it was, with its names, classes by name, hooks and configuration; nothing is wrapped. What
changes is the class of some modules, to a subclass generated for that one instance (as FSDP2 does): blocks get a `forward`
that goes through their unit, modules outside blocks a property for each sharded parameter, and entries (the models inside
the model) a `__call__` that knows when the model runs.

Which parameters go where, decided in this order:

    in a block, used nowhere else         -> the block's flat parameters, one for each (trainable, dtype)
    small, or asked for by `replicated`   -> one replicated line for each (trainable, dtype); optimizer state is sharded
    anything else (embeddings, heads)     -> a root parameter, one line each

After this, tying, resizing or adding parameters is refused at the next forward; copying and pickling are refused at once.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core import block_weights
from ftkit.engine.core.block_call import Split
from ftkit.engine.core.block_weights import BlockWeights
from ftkit.engine.core.dtypes import compute_dtype
from ftkit.engine.core.flat_parameter import FlatParameter, absent, unusable
from ftkit.engine.core.gradient import DeferredGradient, Gradient, ReducedGradient, reduced_at_once
from ftkit.engine.core.gradient_offload import GradientOffload, OffloadedGradient
from ftkit.engine.core.instance_class import specialise
from ftkit.engine.core.resharded import plain_class
from ftkit.engine.core.root_parameters import RootParameter, Running, receive, refuse_gradients
from ftkit.engine.core.transfer import Transfer
from ftkit.engine.core.unit import Unit
from ftkit.engine.core.wrappers import refuse_compiled, refuse_wrapped, refusing_members
from ftkit.engine.files.finite import refuse_beyond, refuse_broken
from ftkit.engine.kernels.device_kernels import FlatKernels
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.tiers import Tiers
from ftkit.errors import UserError
from ftkit.spec.strategy import LineKind, Strategy
from ftkit.spec.tiers import DEVICE

REPLICATED = "whole"
"""Owner of the replicated flat parameters, and so the name of their files in a checkpoint."""
WHOLE_SHARE = 0.002
"""A parameter outside blocks of at most this share of the model is replicated: gathering it would cost more than it."""


@dataclass(frozen=True)
class Binding:
    """One place where a parameter is registered: `module.attribute`, called `name` in the model."""

    name: str
    module: nn.Module
    attribute: str


class SaveInFlight(Protocol):
    """A checkpoint of a sharded model that is being written (checkpoint/saving.py)."""

    def poll(self) -> bool:
        """Return whether it is there under its name. A collective."""

    def wait(self) -> None:
        """Return when it is there. A collective."""

    def give_up(self) -> None:
        """Stop, and remove what was written. A collective."""


class Units:
    """A sharded model: its units, its other flat parameters, and what concerns all of them.

    Made by `shard`. Attributes: model, comm, strategy, units (in order of execution), flats (all flat parameters in model
    order), aliases (tied names to the name under which the tensor stands on its line).
    """

    transfer: Transfer

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        strategy: Strategy,
        tiers: Tiers,
        host_loops: Callable[[int], HostLoops] = HostLoops,
    ) -> None:
        self.model = model
        self.comm = comm
        self.strategy = strategy
        self.compute_dtype = compute_dtype(strategy)  # of weights in use; None: each parameter's own
        self.tiers = tiers
        self.host_loops = host_loops
        self.offload: GradientOffload | None = None
        self.gradient_of: dict[FlatParameter, Gradient] = {}
        self.units: list[Unit] = []
        self.flats: list[FlatParameter] = []
        self.aliases: dict[str, str] = {}
        self.outside: list[FlatParameter] = []  # resident lines that belong to no unit
        self.dtypes: dict[str, torch.dtype] = {}  # of each tensor before sharding: what a saved folder will have
        self.saving: SaveInFlight | None = None
        self.flat_kernels: FlatKernels | None = None  # for shards on the device, by whoever has some
        self.running = Running()
        self.root_parameters: list[RootParameter] = []
        self.held_since: int | None = None  # while all weights are held (holding.py): updates before that
        self.places: dict[int, tuple[FlatParameter, int]] = {}  # id(parameter) -> its line and index on it
        self.evaluated_only = False  # its gradients and optimizer state were not planned
        self.unsynced = 0  # `no_sync` contexts that are open, one inside the other
        self.replaced: list[weakref.ref[Tensor]] = []  # parameters on meta, in whose places others stand now
        self._registered: frozenset[object] = frozenset()
        self._names: frozenset[str] = frozenset()  # of its parameters, tied ones' too

    @property
    def trainable(self) -> list[FlatParameter]:
        """The flat parameters that an optimizer may update, in the order in which a forward wants them: whole ones outside
        blocks, which are looked at when the model is called, then model order.
        """
        trainable = [flat for flat in self.flats if flat.trainable]
        return sorted(trainable, key=lambda flat: not (flat.resident and flat in self.outside))

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of the trainable flat parameters, in their order."""
        return [self.gradient_of[flat] for flat in self.trainable]

    def place(self, parameter: Tensor) -> tuple[FlatParameter, int]:
        """Return the flat parameter that `parameter` is on, and its index there.

        Raises:
            KeyError: if it is no parameter of the sharded model.
        """
        return self.places[id(parameter)]

    def zero_grad(self) -> None:
        """Forget the step's gradients, and weights held for a backward that never came. Writes nothing."""
        for gradient in self.gradient_of.values():
            gradient.zero()
        for unit in self.units:
            unit.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the body, as DDP's context of this name does; the step comes after it.

        Gradients that the ranks reduce block by block are reduced here too: the sum over micro-batches is the same. An
        optimizer step in the body raises on several ranks, because each rank would apply gradients of its own.
        """
        self.unsynced += 1
        try:
            yield
        finally:
            self.unsynced -= 1

    def finish_gradients(self) -> None:
        """Bring all gradients to the mean over ranks. Cost: one reduction a deferred gradient."""
        with self.transfer.trace.span("collectives", "finish gradients"):
            for gradient in self.gradients:
                gradient.finish()
            if self.offload is not None:
                self.offload.finish()
            self.transfer.settle()

    def updated(self) -> None:
        """Bring resident copies up to date after the optimizer wrote shards, or began to: then each when it is wanted.

        Cost: one all-gather a resident line.
        """
        self.transfer.note_update()
        if not self.strategy.deferred:
            self.transfer.refresh([flat for flat in self.trainable if flat.resident])
            self._await_outside()  # anybody may look at what is outside blocks

    def _await_outside(self) -> None:
        for flat in self.outside:
            self.transfer.side.wait(flat.refreshed)

    def begin_call(self) -> None:
        """Make ready for a call of the model: whole copies outside blocks, and the first blocks' weights on their way.

        Raises:
            UserError: if the model's parameters changed (`check_unchanged`).
            RuntimeError: if held weights are out of date.
        """
        if self.held_since is not None:  # looked at when they came
            if self.held_since != self.transfer.updates:
                raise RuntimeError("the weights were updated while they are held: leave the `hold` context before a step")
            return
        self.check_unchanged()
        self.be_ready_outside()
        if self.units:
            self.transfer.read_ahead([unit.weights.gathered for unit in self.units[:2]])

    def be_ready_outside(self) -> None:
        """Make whole copies outside blocks ready to be used."""
        self.transfer.refresh(self.outside)
        self._await_outside()

    def stop_holding(self) -> None:
        """Take note that weights come and go again, block by block."""
        self.held_since = None

    @contextmanager
    def read_by_all(self) -> Iterator[None]:
        """Let root parameters (embeddings, heads) have their values in the body, with gradients, at each read by attribute.

        Each read there is a collective: all ranks must make the same reads in the same order.
        """
        with self.running.read_by_all():
            self.transfer.refresh(self.outside)
            self._await_outside()
            yield

    def settle(self) -> None:
        """Wait for updates under way.

        Raises:
            RuntimeError: if one failed.
        """
        for flat in self.flats:
            flat.settle()

    def freshen(self) -> None:
        """Bring resident copies up to date now, not when each is wanted: afterwards a forward that needs no gathered weights
        needs no other rank. A collective; where nothing is stale it exchanges nothing.

        Raises:
            RuntimeError: if an update that is under way fails.
        """
        self.settle()
        self.transfer.refresh([flat for flat in self.flats if flat.resident])
        self.transfer.settle()

    def be_current(self) -> None:
        """Wait until whole copies are those of the last update, for somebody who reads them. No collective.

        Raises:
            UserError: if that would take one: a deferred update has been made, and no forward since.
        """
        self.settle()
        stale = [flat for flat in self.flats if flat.stale]
        if any(flat.owners > 1 for flat in stale):
            raise UserError(
                f"the weights of {stale[0].name} were updated, and this rank has not got the others' parts yet (updates are "
                "deferred): read them on all ranks within `with ftkit.gathered_parameters(model):`, save with "
                "trainer.save_model() or ftkit.save_model(), or make updates in the step (ftkit={'update': 'now'})"
            )
        self.transfer.refresh(stale)
        self.transfer.settle()

    def rewritten(self) -> None:
        """Take note that shards of any line were written from outside (loaded). Cost as `updated`."""
        for flat in self.flats:
            flat.version += 1
            flat.origin = None
        self.transfer.note_update()
        self.transfer.refresh([flat for flat in self.flats if flat.resident])

    def full_tensors(self, flats: Iterable[FlatParameter] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor), gathering one line at a time; all ranks must iterate together.

        The tensor is only valid until the next one is asked for. Cost: one all-gather a line, and its buffer.
        """
        self.check_savable()
        self.take_edits()
        self.transfer.settle()
        for flat in self.flats if flats is None else flats:
            full = flat.full
            if full is None:
                full = torch.empty(flat.layout.padded_numel, dtype=flat.dtype, device=self.comm.device)
                flat.gather(full)
            else:
                flat.refresh()
            for segment in flat.layout.segments:
                yield segment.name, full[segment.start : segment.stop].view(segment.shape)

    def state_dict(self, keep: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Return whole CPU copies of the parameters whose name `keep` takes, tied names included, and of the buffers.

        A collective: all ranks must call it. Cost: host memory for what is kept, on every rank.
        """
        state = {n: t.detach().cpu().clone() for n, t in self.full_tensors() if keep(n) or self._kept_alias(n, keep)}
        for alias, name in self.aliases.items():
            if keep(alias) and name in state:
                state[alias] = state[name]
        state = {name: tensor for name, tensor in state.items() if keep(name)}
        for name, module in self.model.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                full_name = f"{name}.{key}" if name else key
                if key not in module._non_persistent_buffers_set and keep(full_name):
                    state[full_name] = buffer.detach().cpu().clone()
        return state

    def _kept_alias(self, name: str, keep: Callable[[str], bool]) -> bool:
        return any(keep(alias) for alias, target in self.aliases.items() if target == name)

    def check_unchanged(self) -> None:
        """Compare the model's parameters with those that were sharded.

        Raises:
            UserError: if a parameter was tied, replaced, added, cast, moved or unfrozen since. (Freezing one is fine, and
                so is thawing it again: that is how adapters are switched off and on.)
        """
        self._check_same()
        for flat in self.flats if torch.is_grad_enabled() else ():  # a reference pass may switch another adapter on
            if not flat.trainable and any(parameter.requires_grad for parameter in flat.parameters):
                raise UserError(
                    f"a parameter of {flat.name} was frozen when the model was sharded and asks for gradients now: set "
                    "requires_grad before ftkit.shard() or before the Trainer is built"
                )

    def _check_same(self) -> None:
        if self._registration() != self._registered:
            raise UserError(
                "the model's parameters changed after sharding (tied, resized, replaced, added, cast or moved); make such "
                "changes before ftkit.shard() or before the Trainer is built"
            )

    def check_savable(self) -> None:
        """Compare the model's parameters, and their names, with those that were sharded, before they are saved.

        Raises:
            UserError: if a parameter was tied, replaced, added, cast or moved since, or has another name
                (`torch.nn.utils.prune`, a parametrization): what the model computes with is made from it then, and would
                not be in what is saved.

        Cost: a walk over the model's names.
        """
        self._check_same()
        if gone := sorted(self._names - (now := self._present_names())):
            came = ", ".join(sorted(now - self._names)) or "nothing"
            raise UserError(
                f"{gone[0]} is no parameter of the model since it was sharded, and {came} came: pruned or parametrized, the "
                "model computes with other values than would be saved. Prune and parametrize before ftkit.shard() or before "
                "the Trainer is built; or take it back before a save"
            )

    def _present_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.model.named_parameters(remove_duplicate=False))

    def take_edits(self) -> None:
        """Make sure that the lines hold what the model computes with, before they are updated or saved.

        Raises:
            UserError: if the `.data` of a parameter was replaced: the model computes with the new tensor, and nobody else
                would know of it.

        Cost: under a microsecond a resident parameter.
        """
        name = next((name for flat in self.flats if (name := flat.displaced()) is not None), None)
        if name is not None:
            raise UserError(
                f"{name}: its .data is another tensor than when the model was sharded (p.data = tensor, "
                "vector_to_parameters): the model computes with that tensor, which the optimizer would not update nor a "
                "save write. Copy the values in place (with torch.no_grad(): p.copy_(tensor)), replace it before the "
                "model is sharded, or train without the engine (ftkit=None)"
            )

    def _registration(self) -> frozenset[object]:
        """Return the model's parameters without their order: a parametrization that comes and goes changes that."""
        with torch._C.DisableTorchFunctionSubclass():  # a resharded parameter would answer in Python
            return frozenset((id(p), p.dtype, p.device) for p in self.model.parameters())

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of live storages on this rank: parameters, gradients, slots."""
        return {
            "parameters": sum(flat.size_bytes for flat in self.flats),
            "gradients": sum(gradient.size_bytes for gradient in self.gradient_of.values()),
            "slots": self.transfer.slot_bytes,
            "staging": self.transfer.staging_bytes + (self.offload.staging_bytes if self.offload is not None else 0),
        }


def shard(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    *,
    comm: Communicator,
    strategy: Strategy,
    entries: Sequence[nn.Module] = (),
    replicated: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,
    wide: Callable[[str], bool] = lambda name: False,
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] = lambda args, kwargs: (args, kwargs),
    fingerprint: Callable[[nn.Module], Hashable] = lambda module: None,
    tiers: Tiers | None = None,
    split: Split | None = None,
    host_loops: Callable[[int], HostLoops] = HostLoops,
    units_class: type[Units] = Units,
) -> Units:
    """Shard a model in place over the ranks of `comm`.

    Args:
        model: on CPU, on the device, or on meta (then its weights are zeros until a loader writes the shards).
        blocks: (name, module) of the blocks to recompute, in order of execution.
        comm: the ranks.
        strategy: how the model is held; nothing that a plan decides is "auto" (`Strategy.of`).
        entries: modules whose calls count as "the model runs"; the model itself always is one.
        replicated: parameters to replicate in any case (LoRA adapters).
        wide: parameters, by name, that stay fp32 whatever the compute dtype is.
        arguments: cleans a block's (args, kwargs) in forwards that a backward will follow.
        fingerprint: from a block to its switches that must not change between forward and backward.
        tiers: where shards lie; None opens what `strategy` says, which then must not name NVMe.
        split: says which of a block's arguments hold the batch, where `strategy.parts` divides it.
        host_loops: from a number of threads to the arithmetic on shards in host memory.
        units_class: class of the returned units; a caller passes a subclass to keep its own facts with the model.

    Returns:
        The units, which an optimizer and a checkpoint take.

    Raises:
        UserError: if a module cannot be sharded; it is named.

    Cost: this rank's shards and two slots of the widest block; the model's own storage is let go tensor by tensor.
    """
    refuse_failed(model)
    inside = {id(each) for _, block in blocks for each in block.modules()}
    units = units_class(model, comm, strategy, tiers or Tiers.open(comm, strategy), host_loops)
    bindings = _bindings(model)
    alone = comm.world_size == 1 and strategy.parameters == DEVICE
    gathers = strategy.stage == 3 and not alone
    refuse_wrapped(model, blocks, gathers=gathers)
    _refuse(model, blocks, units, gathers=gathers)
    units.replaced = _materialise(bindings, comm.device)
    units.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    owners: dict[str, list[FlatParameter]] = {name: [] for name, _ in blocks}
    outside = _make_lines(units, _sort(model, blocks, bindings, replicated, wide, units.compute_dtype), owners)
    _refuse_values(units)
    _make_gradients(units)
    with changing(model):
        for flat in outside:
            _outside(units, flat, bindings, inside)
        units.aliases = {b.name: places[0].name for places in bindings.values() for b in places[1:]}
        _allocate(units)
        _make_units(units, blocks, owners, arguments, fingerprint, split)
        _specialise_entries(units, entries)
        model.register_state_dict_pre_hook(lambda *_: units.be_current())
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    setattr(module, key, buffer.to(comm.device))
        for flat in units.flats:
            flat.agree()
        units._registered, units._names = units._registration(), units._present_names()
    return units


def _make_lines(
    units: Units, sorted_: dict[_Key, list[tuple[str, nn.Parameter]]], owners: dict[str, list[FlatParameter]]
) -> list[FlatParameter]:
    """Make the flat parameters: those of blocks go to their owner, the others are returned."""
    strategy = units.strategy
    outside: list[FlatParameter] = []
    for (kind, owner, trainable, dtype, _), members in sorted_.items():
        several = len({other for k, o, t, other, _ in sorted_ if (k, o, t) == (kind, owner, trainable)}) > 1
        suffix = ("" if trainable else ".frozen") + (f".{str(dtype).removeprefix('torch.')}" if several else "")
        flat = FlatParameter(
            f"{_file_name(owner)}{suffix}",
            members,
            units.comm,
            dtype,
            strategy,
            kind,
        )
        units.flats.append(flat)
        units.places.update({id(p): (flat, i) for i, p in enumerate(flat.parameters)})
        if kind == "block":
            owners[owner].append(flat)
        else:
            outside.append(flat)
    return outside


def _allocate(units: Units) -> None:
    """Lay down every line's bytes on their tiers."""
    tiers, flats = units.tiers, units.flats
    tiers.reserve("parameters", [(f.layout.shard_numel, f.dtype) for f in flats if not f.resident])
    for flat in flats:
        flat.allocate(tiers)
        if (gradient := units.gradient_of.get(flat)) is not None:
            gradient.watch()


def _make_gradients(units: Units) -> None:
    """Make the gradients of what is trained, each in its form; lay down the stores of those that leave the device."""
    tiers, strategy = units.tiers, units.strategy
    reduced = OffloadedGradient if tiers.tier("gradients") != DEVICE else ReducedGradient
    for flat in units.flats:
        if flat.trainable:
            late = strategy.reduced_late(flat.kind, units.comm.world_size)
            units.gradient_of[flat] = (DeferredGradient if late else reduced)(flat, strategy)
    leaving = [each for each in units.gradient_of.values() if isinstance(each, OffloadedGradient)]
    tiers.reserve("gradients", [(each.flat.layout.shard_numel, each.dtype) for each in leaving])
    if leaving:
        units.offload = offload = GradientOffload(leaving, tiers, units.host_loops(torch.get_num_threads()))
        for each in leaving:
            name, numel = f"{each.flat.name}.gradient", each.flat.layout.shard_numel
            each.connect(offload, tiers.make("gradients", name, numel, each.dtype))


def _refuse_values(units: Units) -> None:
    """Raise for weights that are not finite, or not in the dtype to compute in, while the model is as it came. A collective.

    Cost: one pass over the values that this rank takes over.
    """
    found = [(flat.dtype, *unusable(flat)) for flat in units.flats]
    refuse_broken(units.comm, {name for _, broken, _ in found for name in broken})
    for dtype in dict.fromkeys(dtype for dtype, _, _ in found):
        largest = {name: most for own, _, beyond in found if own == dtype for name, most in beyond.items()}
        refuse_beyond(units.comm, largest, dtype)


FAILED = "_ftkit_failed"
"""Attribute of a model that was left half sharded."""


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    """Note it in the model if the body, which changes it, fails: `refuse_failed` raises then."""
    try:
        yield
    except BaseException:
        setattr(model, FAILED, True)
        raise


def refuse_failed(model: nn.Module) -> None:
    """Raise for a model that an earlier call left half sharded.

    Raises:
        UserError: with what to do.
    """
    if hasattr(model, FAILED):
        raise UserError(
            "sharding this model failed before, and left it half sharded: make the model again, as before that first call, "
            "and see the first error"
        )


def _bindings(model: nn.Module) -> dict[int, list[Binding]]:
    """Return for each parameter, by identity and in model order, all places where it is registered."""
    found: dict[int, list[Binding]] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{attribute}" if module_name else attribute
            found.setdefault(id(parameter), []).append(Binding(name, module, attribute))
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a sharded model, or one of its blocks."""
    return isinstance(getattr(type(module), "_ftkit", None), (Unit, Units))


def _refuse(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], units: Units, *, gathers: bool) -> None:
    """Raise for what would train wrongly."""
    strategy = units.strategy
    if problem := strategy.problem(cpu=units.comm.device.type == "cpu"):
        raise UserError(problem)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and strategy.stage == 3:
            raise UserError(
                f"{name} is a {type(module).__name__}: RNN modules flatten their own weights, which stage 3 cannot gather; "
                "set ftkit={'stage': 1}"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise UserError(
                f"{name} has max_norm={module.max_norm}: it writes weights in forward, which shards cannot follow; set "
                f"{name}.max_norm = None"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UserError(
                f"{name} has sparse=True: gradients are summed in shards, where none is sparse; set {name}.sparse = False"
            )
        if is_sharded(module):
            raise UserError(f"{name} is sharded already: use the result of the first ftkit.shard(), ftkit.units_of(model)")
    _refuse_hidden(model)
    for name, block in blocks:
        if "forward" in vars(block):
            raise UserError(
                f"the forward of block {name} is replaced on the instance, and would go around the engine: change it on a "
                f"subclass ({name}.__class__ = YourBlock), in a module inside the block, or in a forward hook"
            )
    plain = not gathers and strategy.graphs(len(blocks)) == len(blocks)  # blocks run by plain autograd
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(
                f"{name} has dtype {parameter.dtype}: only floating-point parameters are sharded. Register indices and the "
                "like as a buffer (register_buffer), complex values as real ones; quantised weights are not supported"
            )
        hooks = getattr(parameter, "_backward_hooks", None) or {}
        if not plain and any(getattr(hook, "__qualname__", "").startswith(OF_SEVERAL) for hook in hooks.values()):
            raise UserError(
                f"{name} has a hook of {OF_SEVERAL}, which waits for nodes of the graph that a sharded weight, and one of a "
                "recomputed block, does not have: it would not be called. Give each parameter a hook of its own "
                "(register_hook), before the model is sharded"
            )
        if parameter.requires_grad and (units.compute_dtype or parameter.dtype) not in COMPUTED:
            raise UserError(
                f"{name} has dtype {parameter.dtype}: fp32, bf16 and fp16 can be trained here. Cast the model before it is "
                "sharded (model.float()), or set dtype (ftkit={'dtype': 'fp32'})"
            )


def _refuse_hidden(model: nn.Module) -> None:
    """Raise for a parameter that a model's own named_parameters() leaves out."""
    listed = {id(parameter) for parameter in model.parameters()}
    for name, module in model.named_modules():
        hidden = [key for key, each in module._parameters.items() if each is not None and id(each) not in listed]
        if hidden:
            raise UserError(
                f"{f'{name}.'.lstrip('.')}{hidden[0]} is a parameter that named_parameters() of the model does not list: a "
                "class overrides it. It would neither be sharded nor saved; let the method list every parameter"
            )


OF_SEVERAL = "register_multi_grad_hook"
"""torch.autograd.graph's, whose hooks on tensors have its name in front of theirs."""

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which a parameter can be trained."""


def _materialise(bindings: dict[int, list[Binding]], device: torch.device) -> list[weakref.ref[Tensor]]:
    """Replace meta parameters, which cannot be given data, by absent ones on `device`, at all their places; return them."""
    replaced: list[weakref.ref[Tensor]] = []
    for key, places in list(bindings.items()):
        old = getattr(places[0].module, places[0].attribute)
        if old.is_meta:
            new = nn.Parameter(absent(old, device, old.dtype), requires_grad=old.requires_grad)
            for place in places:
                place.module.register_parameter(place.attribute, new)
            bindings[id(new)] = bindings.pop(key)
            replaced.append(weakref.ref(old))
    return replaced


LONGEST_NAME = 180
"""Bytes of a line's name: a file system takes 255, with what stands behind it."""


def _file_name(owner: str) -> str:
    """Return the name of a line, which names its files too: modules may have names that no file can have."""
    name = owner.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name.encode()[: LONGEST_NAME // 2].decode(errors='ignore')}~{sha256(owner.encode()).hexdigest()[:16]}"


_Key = tuple[LineKind, str, bool, torch.dtype, int]


def _sort(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    bindings: dict[int, list[Binding]],
    replicated: Callable[[str, nn.Parameter], bool],
    wide: Callable[[str], bool],
    computed: torch.dtype | None,
) -> dict[_Key, list[tuple[str, nn.Parameter]]]:
    """Return the lines to make: (kind, owner, trainable, dtype, serial) to (name, parameter), in model order."""
    replicated_ones = {id(parameter) for name, parameter in model.named_parameters() if replicated(name, parameter)}
    block_of = _blocks_of_modules(blocks, replicated_ones)
    total = sum(p.numel() for p in model.parameters())
    lines: dict[_Key, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        homes = {block_of.get(id(place.module)) for place in bindings[id(parameter)]}
        home = homes.pop() if len(homes) == 1 else None
        dtype = computed or parameter.dtype
        dtype = torch.float32 if wide(name) and dtype.itemsize < 4 else dtype
        key: _Key
        if replicated(name, parameter):
            key = ("replicated", REPLICATED, parameter.requires_grad, dtype, 0)
        elif home is not None:
            key = ("block", home, parameter.requires_grad, dtype, 0)
        elif parameter.dim() < 2 or parameter.numel() <= WHOLE_SHARE * total:
            key = ("replicated", REPLICATED, parameter.requires_grad, dtype, 0)
        elif any(id(place.module) in block_of for place in bindings[id(parameter)]):
            others = [place.name for place in bindings[id(parameter)] if place.name != name]
            raise UserError(
                f"{name} and {others[0]} are one parameter, which a block shares with another block or with a module "
                "outside the blocks. Blocks are sharded one by one. Untie them before the model is sharded (give each a "
                "parameter of its own)"
            )
        else:
            key = ("root", name, parameter.requires_grad, dtype, 0)
        lines.setdefault(key, []).append((name, parameter))
    return lines


@dataclass(frozen=True)
class Members:
    """The parameters of one flat parameter. kind is a `LineKind`; owner names the block or the root parameter."""

    kind: str
    owner: str
    trained: bool
    dtype: torch.dtype
    numel: int


def lines_of(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    *,
    dtype: torch.dtype | None,
    replicated: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,
    wide: Callable[[str], bool] = lambda name: False,
) -> list[Members]:
    """Return the lines that `shard` would make, without making them: for the plan. Arguments as there."""
    sorted_ = _sort(model, blocks, _bindings(model), replicated, wide, dtype)
    return [
        Members(kind, owner, trained, dtype, sum(parameter.numel() for _, parameter in members))
        for (kind, owner, trained, dtype, _), members in sorted_.items()
    ]


def _blocks_of_modules(blocks: Sequence[tuple[str, nn.Module]], whole: Set[int]) -> dict[int, str]:
    """Return for each module inside a block, by identity, the block's name.

    Args:
        blocks: (name, module) of the blocks.
        whole: parameters, by identity, that are replicated: blocks may share them (the vector bank of VB-LoRA).

    Raises:
        UserError: if a module with other parameters is in several blocks.
    """
    found: dict[int, str] = {}
    for name, block in blocks:
        for inner, module in block.named_modules():
            other = found.setdefault(id(module), name)
            if other != name and any(id(parameter) not in whole for parameter in module.parameters()):
                raise UserError(
                    f"{inner} of block {name} is a part of {other}, too: weights that blocks share are in no one's unit. "
                    "Give each block a copy of its own (copy.deepcopy) before the model is sharded"
                )
    return found


def _outside(units: Units, flat: FlatParameter, bindings: dict[int, list[Binding]], inside: Set[int]) -> None:
    """Make a line outside blocks usable: by plain autograd where it is resident, else through root parameters.

    Args:
        units: units of the model.
        flat: the line.
        bindings: for each parameter, by identity, the modules that have it and its names there.
        inside: ids of the modules in blocks, which wait for their weights by themselves (adapters have such lines, too).
    """
    if flat.resident:
        units.outside.append(flat)
        if flat.trainable:
            receive(units.gradient_of[flat])
        if units.strategy.deferred:
            for place in (place for parameter in flat.parameters for place in bindings[id(parameter)]):
                if id(place.module) not in inside:
                    _specialise_outside(units, place.module)
        return
    if flat.trainable:
        refuse_gradients(flat)
    kind = plain_class(flat.parameters[0])
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        raise UserError(
            f"{flat.name} is a {kind.__name__}, a subclass of nn.Parameter: outside blocks, stage 3 gives a module a plain "
            "tensor in its place. Make it an nn.Parameter, or set ftkit={'stage': 2}"
        )
    for place in bindings[id(flat.parameters[0])]:
        gradient = units.gradient_of.get(flat)
        root = RootParameter(flat, gradient, place.module, place.attribute, units.running, lambda: units.transfer.updates)
        units.root_parameters.append(root)
        _specialise_root(place.module, root, place.attribute)


def _make_units(
    units: Units,
    blocks: Sequence[tuple[str, nn.Module]],
    owners: dict[str, list[FlatParameter]],
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    fingerprint: Callable[[nn.Module], Hashable],
    split: Split | None,
) -> None:
    strategy = units.strategy
    groups = list(owners.values())
    gradients = [[units.gradient_of[flat] for flat in group if flat.trainable] for group in groups]
    units.transfer = transfer = Transfer(
        groups,
        list(map(reduced_at_once, gradients)),
        units.comm,
        units.tiers,
        prefetch=strategy.prefetch,
        debug=strategy.debug,
    )
    weights = [
        BlockWeights(number, name, flats, hold=not strategy.reshard_after_forward, transfer=transfer)
        for number, (name, flats) in enumerate(owners.items())
    ]
    block_weights.connect(weights)
    for number, (_, block) in enumerate(blocks):
        unit = Unit(
            block,
            weights[number],
            gradients[number],
            keep=number >= len(blocks) - strategy.graphs(len(blocks)),  # the last ones
            arguments=arguments,
            fingerprint=fingerprint,
            parts=strategy.parts,
            split=split,
        )
        if units.units:
            unit.before, units.units[-1].after = units.units[-1], unit
        units.units.append(unit)
        _specialise_block(unit)


# --- the generated subclasses


def _specialise(module: nn.Module, owner: object, **methods: Any) -> None:
    """Give `module` methods that know `owner`, and refuse copies."""
    name = type(module).__name__

    def refuse(self: nn.Module, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded {name} cannot be copied or pickled: ftkit's engine holds its weights. Copy before sharding (a "
            "Trainer: when it is built), or save it with trainer.save_model() / ftkit.save_model() and load the folder. For "
            "an average of weights copy the values (p.detach().clone()) within ftkit.gathered_parameters(model)"
        )

    specialise(module, _ftkit=owner, __reduce_ex__=refuse, **methods)


def _specialise_block(unit: Unit) -> None:
    block_forward = type(unit.module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unit.use(block_forward.__get__(self), args, kwargs)

    forward.__signature__ = inspect.signature(block_forward)  # type: ignore[attr-defined]  # functions may carry one
    _specialise(unit.module, unit, forward=forward)
    if unit.weights.gathered:
        unit.module.register_state_dict_pre_hook(_refuse_state_dict)


def _specialise_outside(units: Units, module: nn.Module) -> None:
    """Let a module outside blocks, called outside the model's calls (in a method of the user's), wait for its update."""
    if getattr(type(module), "_ftkit_waits", False):
        return
    own = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not units.running.gathers:
            units.be_ready_outside()
        return own(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # functions may carry one
    specialise(module, forward=forward, _ftkit_waits=True)


def _specialise_root(module: nn.Module, root: RootParameter, attribute: str) -> None:
    module_forward = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with root.once():
            return module_forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(module_forward)  # type: ignore[attr-defined]  # as above
    _specialise(module, root, forward=forward, **{attribute: property(lambda self: root.read())})
    module.register_state_dict_pre_hook(_refuse_state_dict)


def _specialise_entries(units: Units, entries: Sequence[nn.Module]) -> None:
    for entry in {id(module): module for module in (units.model, *entries)}.values():
        entry_call = type(entry).__call__

        def call(self: nn.Module, *args: Any, _entry_call: Any = entry_call, **kwargs: Any) -> Any:
            if units.running.depth == 0:
                refuse_compiled(self)
                units.begin_call()
            with units.running.call():
                return _entry_call(self, *args, **kwargs)

        methods: dict[str, Any] = {"__call__": call, "forward": _entry_forward(units, entry), **refusing_members()}
        if entry is units.model:
            methods["zero_grad"] = lambda self, set_to_none=True: units.zero_grad()
            methods["no_sync"] = lambda self: units.no_sync()
        _specialise(entry, units, **methods)


def _entry_forward(units: Units, entry: nn.Module) -> Callable[..., Any]:
    """Return an entry's forward, which may be called by itself, past its hooks."""
    own = type(entry).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if units.running.depth > 0:
            return own(self, *args, **kwargs)
        units.begin_call()
        with units.running.call():
            return own(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # functions may carry one
    return forward


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UserError(
        f"state_dict() of a sharded model: the weights under '{prefix}' lie on several ranks. Use units.state_dict() or "
        "trainer.save_model() on all ranks together"
    )
