"""`shard()`: makes a sharded model of a model, in place.

The model stays the same object with its names, hooks and configuration. Some modules get a subclass generated for the
instance, as in FSDP2: blocks get a `forward` that goes through their unit, modules with a root parameter get a property
for it, and entries (the models inside the model) get a `__call__` that tracks whether the model runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.block_weights import BlockWeights
from ftkit.engine.core.exact_weights import ExactWeights
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.gradient import DeferredGradient, DeferredReductions, Gradient, ReducedGradient, reduced_at_once
from ftkit.engine.core.gradient_offload import GradientOffload, OffloadedGradient
from ftkit.engine.core.instance_class import specialise
from ftkit.engine.core.partition import Binding, bindings_of, names_of, partition
from ftkit.engine.core.placeholder import absent
from ftkit.engine.core.recompute import Split
from ftkit.engine.core.root_parameters import RootParameter
from ftkit.engine.core.transfer import Transfer
from ftkit.engine.core.unit import Unit
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy
from ftkit.spec.tiers import DEVICE

FAILED = "_ftkit_failed"
"""Attribute of a model that was left partly sharded."""


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
    tiers: Tiers | None = None,
    split: Split | None = None,
    host_loops: Callable[[int], HostLoops] = HostLoops,
    model_class: type[ShardedModel] = ShardedModel,
) -> ShardedModel:
    """Shard a model in place over the ranks of `comm`.

    Args:
        model: A model on CPU, on the device, or on meta. Weights on meta become zeros until they are loaded.
        blocks: (name, module) of the units, in order of execution.
        comm: The ranks.
        strategy: A strategy without "auto" (`Strategy.of`).
        entries: Modules whose calls count as calls of the model. The model itself is always one.
        replicated: Selects parameters to replicate in any case (LoRA adapters).
        wide: Selects parameters, by name, that stay in fp32 in any compute dtype.
        arguments: Cleans a block's (args, kwargs) in forwards that a backward follows.
        tiers: Tiers of this rank. None: those of `strategy`, which must not use NVMe.
        split: Selects the tensors of a block's arguments that hold the batch. Required if `strategy.parts` divides it.
        host_loops: Takes a number of threads; returns the arithmetic on shards in host memory.
        model_class: Class to return.

    Returns:
        The sharded model, for an optimizer and for checkpoints.

    Raises:
        UserError: A module cannot be sharded.

    Cost: this rank's shards and two slots of the widest unit. The model's own storage is freed tensor by tensor.
    """
    refuse_failed(model)
    _refuse(model, blocks, comm, strategy)
    units = model_class(model, comm, strategy, tiers or Tiers.open(comm, strategy), host_loops)
    _materialise(model, comm.device)
    groups = partition(model, blocks, dtype=units.compute_dtype, replicated=replicated, wide=wide)
    with changing(model):
        bindings = bindings_of(model)
        units.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        units.aliases = {b.name: places[0].name for places in bindings.values() for b in places[1:]}
        owners: dict[str, list[FlatParameter]] = {name: [] for name, _ in blocks}
        others: list[FlatParameter] = []
        for name, (group, members) in zip(names_of(list(groups)), groups.items()):
            flat = FlatParameter(name, members, comm, group.dtype, strategy, group.kind)
            units.flats.append(flat)
            units.places.update({id(p): (flat, index) for index, p in enumerate(flat.parameters)})
            (owners[group.owner] if group.kind == "block" else others).append(flat)
        gradients = _make_gradients(units, owners)
        _make_units(units, blocks, list(owners.values()), gradients, arguments, split)
        for flat in others:
            _add_outside(units, flat, bindings)
        _allocate(units)
        _specialise_entries(units, entries)
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    setattr(module, key, buffer.to(comm.device))
        units.registered = units.registration()
    return units


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a sharded model, or a block or another module whose parameters are gathered."""
    return hasattr(type(module), "_ftkit")


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    """Mark the model if the body fails, so that `refuse_failed` raises."""
    try:
        yield
    except BaseException:
        setattr(model, FAILED, True)
        raise


def refuse_failed(model: nn.Module) -> None:
    """Raise UserError for a model that an earlier call left partly sharded."""
    if hasattr(model, FAILED):
        raise UserError("sharding this model failed before and left it partly sharded: build the model again")


def _refuse(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], comm: Communicator, strategy: Strategy) -> None:
    """Raise for models that would train wrongly."""
    if problem := strategy.problem(cpu=comm.device.type == "cpu"):
        raise UserError(problem)
    for name, module in model.named_modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise UserError(f"{name or 'the model'} is wrapped by {type(module).__name__}: pass the model inside")
        if is_sharded(module):
            raise UserError(f"{name or 'the model'} is sharded already: use the result of the first call")
    for name, module in (("the model", model), *blocks):
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled and (module is model or not strategy.resident("block", comm.world_size)):
            raise UserError(f"{name} is compiled: a compiled graph would use addresses of weights that come and go")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(
                f"{name} has dtype {parameter.dtype}: only floating-point parameters are sharded. Use a buffer for indices; "
                "quantised weights are not supported"
            )
    for name, block in blocks[: len(blocks) - strategy.graphs(len(blocks))]:
        _refuse_recomputation(name, block)
    for name, block in blocks:
        if "forward" in vars(block):
            raise UserError(
                f"the forward of block {name} is replaced on the instance and would bypass the engine: replace it on the "
                "class, or load the model without device_map"
            )


def _refuse_recomputation(name: str, block: nn.Module) -> None:
    """Raise for a block that depends on more than its inputs, weights and random numbers."""
    for inner, module in block.named_modules():
        alora = any(type(variant).__name__.startswith("ALora") for variant in getattr(module, "lora_variant", {}).values())
        if isinstance(module, _BatchNorm) or alora:
            found = "aLoRA, whose offsets exist during forward only" if alora else "running statistics"
            raise UserError(
                f"{name}.{inner} ({type(module).__name__}) has {found}; recomputing its block in backward would give "
                "another result. Set activations: keep (ftkit={'activations': 'keep'})"
            )


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on meta by parameters without values on `device`, which can be given data."""
    for places in bindings_of(model).values():
        old = getattr(places[0].module, places[0].attribute)
        if old.is_meta:
            new = nn.Parameter(absent(old, device, old.dtype), requires_grad=old.requires_grad)
            for place in places:
                place.module.register_parameter(place.attribute, new)


def _make_gradients(units: ShardedModel, owners: dict[str, list[FlatParameter]]) -> list[list[Gradient]]:
    """Make the gradients of trained flat parameters, and the stores of those that leave the device.

    Returns:
        The gradients of each block.
    """
    tiers, strategy = units.tiers, units.strategy
    reduced = OffloadedGradient if tiers.tier("gradients") != DEVICE else ReducedGradient
    for flat in units.flats:
        if flat.trainable:
            late = strategy.reduced_late(flat.kind, units.comm.world_size)
            units.gradient_of[flat] = (DeferredGradient if late else reduced)(flat, strategy, units.streams)
    blocks = [[units.gradient_of[flat] for flat in flats if flat.trainable] for flats in owners.values()]
    of_blocks = {id(gradient) for block in blocks for gradient in block}
    by_use = [*blocks, *([each] for each in units.gradients if id(each) not in of_blocks)]
    deferred = [[each for each in group if isinstance(each, DeferredGradient)] for group in by_use]
    others = [each for group in deferred[len(blocks) :] for each in group]
    units.deferred = DeferredReductions(deferred[: len(blocks)], others, units.streams)
    leaving = [each for each in units.gradient_of.values() if isinstance(each, OffloadedGradient)]
    tiers.reserve("gradients", [(each.flat.layout.shard_numel, each.dtype) for each in leaving])
    if leaving:
        groups = [[each for each in group if isinstance(each, OffloadedGradient)] for group in by_use]
        units.offload = GradientOffload(groups, tiers, units.host_loops(torch.get_num_threads()))
        for each in leaving:
            store = tiers.make("gradients", f"{each.flat.name}.gradient", each.flat.layout.shard_numel, each.dtype)
            each.connect(units.offload, store)
    return blocks


def _make_units(
    units: ShardedModel,
    blocks: Sequence[tuple[str, nn.Module]],
    flats: Sequence[Sequence[FlatParameter]],
    gradients: Sequence[Sequence[Gradient]],
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    split: Split | None,
) -> None:
    """Make the units of the blocks, and the slots that they share."""
    strategy = units.strategy
    reduced = [reduced_at_once(group) for group in gradients]
    units.transfer = transfer = Transfer(
        flats, reduced, units.comm, units.tiers, prefetch=strategy.prefetch, debug=strategy.debug
    )
    stay = not strategy.reshard_after_forward
    recomputed = len(blocks) - strategy.graphs(len(blocks))  # the last blocks keep their graphs
    for number, (name, block) in enumerate(blocks):
        weights = BlockWeights(number, name, flats[number], stay=stay, transfer=transfer)
        unit = Unit(
            block,
            weights,
            gradients[number],
            units.running,
            units.deferred,
            keep=number >= recomputed,
            arguments=arguments,
            parts=strategy.parts,
            split=split,
        )
        if units.units:
            unit.before, units.units[-1].after = units.units[-1], unit
        units.units.append(unit)
        _specialise_block(unit)


def _add_outside(units: ShardedModel, flat: FlatParameter, bindings: dict[int, list[Binding]]) -> None:
    """Make a flat parameter outside blocks usable: by plain autograd if it is resident, else as root parameters."""
    gradient = units.gradient_of.get(flat)
    if flat.resident:
        units.outside.append(flat)
        if gradient is not None:
            gradient.receive(in_block=False)
        return
    for place in bindings[id(flat.parameters[0])]:
        root = RootParameter(flat, gradient, place.module, place.attribute, units.running, units.transfer)
        units.root_parameters.append(root)
        _specialise_root(root)


def _allocate(units: ShardedModel) -> None:
    """Allocate all shards on their tiers, copy the model's values, and make resident weights equal on all ranks."""
    home = units.comm.device if units.tiers.tier("state") == DEVICE else torch.device("cpu")
    units.tiers.reserve("parameters", [(f.layout.shard_numel, f.dtype) for f in units.flats if not f.resident])
    gathered_once = [f for f in units.flats if f.resident and f.owners > 1]
    units.tiers.reserve("full parameters", [(f.layout.padded_numel, f.dtype) for f in gathered_once], DEVICE)
    for flat in units.flats:
        exact = ExactWeights(flat, home) if ExactWeights.needed(flat) else None
        flat.allocate(units.tiers)
        if exact is not None:
            exact.agree()
            units.exact[flat] = exact
    for gradient in units.gradient_of.values():
        gradient.guard()


# --- the generated subclasses


def _specialise(module: nn.Module, owner: object, **members: Any) -> None:
    """Give a module members that use `owner`, and make it refuse copies."""
    name = type(module).__name__

    def refuse(self: nn.Module, protocol: Any) -> Any:
        raise TypeError(
            f"a sharded {name} cannot be copied or pickled. Copy it before it is sharded, save it with trainer.save_model() "
            "or ftkit.save_model(), or copy values (p.detach().clone()) within ftkit.gathered_parameters(model)"
        )

    specialise(module, _ftkit=owner, __reduce_ex__=refuse, **members)


def _specialise_block(unit: Unit) -> None:
    own = type(unit.module).forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unit.use(own.__get__(self), args, kwargs)

    _specialise(unit.module, unit, forward=forward)
    if unit.weights.gathered:
        unit.module.register_state_dict_pre_hook(_refuse_state_dict)


def _specialise_root(root: RootParameter) -> None:
    own = type(root.module).forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with root.once():
            return own(self, *args, **kwargs)

    _specialise(root.module, root, forward=forward, **{root.attribute: property(lambda self: root.read())})
    root.module.register_state_dict_pre_hook(_refuse_state_dict)


def _specialise_entries(units: ShardedModel, entries: Sequence[nn.Module]) -> None:
    for entry in {id(module): module for module in (units.model, *entries)}.values():
        kind = type(entry)
        members: dict[str, Any] = {
            "__call__": _running(units, kind.__call__, nested=True),
            "forward": _running(units, kind.forward, nested=False),  # which may be called without the hooks of `__call__`
        }
        if entry is units.model:
            members["zero_grad"] = lambda self, set_to_none=True: units.zero_grad()
            members["_ddp_params_and_buffers_to_ignore"] = property(_refuse_ddp)
            members["no_sync"] = lambda self: nullcontext()  # a sum of reduced micro-batches is the same
        _specialise(entry, units, **members)
        entry.register_state_dict_pre_hook(lambda *_: units.be_current())  # `save_pretrained` of a backbone calls it, too


def _running(units: ShardedModel, own: Callable[..., Any], *, nested: bool) -> Callable[..., Any]:
    """Return the method `own` as one that counts as a call of the model; within a call it counts only if `nested`."""

    @functools.wraps(own)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if units.running.depth == 0:
            units.begin_call()
        elif not nested:
            units.begin_forward()
            return own(self, *args, **kwargs)
        with units.running.call():
            if not nested:
                units.begin_forward()
            return own(self, *args, **kwargs)

    return method


def _refuse_ddp(module: nn.Module) -> None:
    """Raise when DistributedDataParallel looks up which parameters to ignore."""
    raise UserError(
        f"{type(module).__name__} is sharded and cannot be wrapped by DistributedDataParallel (or prepared by another "
        "Accelerator): the engine reduces gradients itself. Call the model as it is"
    )


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UserError(
        f"state_dict() of a sharded model: the weights under '{prefix}' are in shards. Call units.state_dict() or "
        "trainer.save_model() on all ranks"
    )
