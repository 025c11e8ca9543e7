"""The sharded model: its units, its other flat parameters, and operations on all of them. `shard` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.core.dtypes import compute_dtype
from ftkit.engine.core.flat_parameter import FlatParameter
from ftkit.engine.core.gradient import DeferredReductions, Gradient
from ftkit.engine.core.gradient_offload import GradientOffload
from ftkit.engine.core.root_parameters import RootParameter, Running
from ftkit.engine.core.transfer import Transfer
from ftkit.engine.core.unit import Unit
from ftkit.engine.kernels.host_loops import FlatKernels, HostLoops
from ftkit.engine.memory.tiers import Tiers
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy

if TYPE_CHECKING:
    from ftkit.engine.checkpoint.saving import Saving

Exact = Callable[[int, Tensor], object]
"""Fills a tensor (n,) fp32 with elements [start, start + n) of this rank's shard, in the precision of their source."""


class ShardedModel:
    """A sharded model. `shard` fills it.

    Attributes:
        units: Units of the blocks, in order of execution.
        flats: All flat parameters, in model order.
        outside: Resident flat parameters that belong to no unit.
        root_parameters: Large parameters outside blocks, one for each module that reads one.
        gradient_of: The gradient of each trained flat parameter.
        deferred: Reduces those that are not reduced after each backward.
        places: For each parameter, by id, its flat parameter and its index there.
        aliases: Tied names, and the name under which the flat parameter has the tensor.
        dtypes: Dtype of each parameter before sharding, by name; a saved model has it again.
        registered: As `registration` returned it after sharding.
        exact: Weights that were cast to a narrower dtype, until the optimizer has made master weights of them.
        saving: The checkpoint that is being written.
        flat_kernels: Kernels for shards on the device, if there are any.
        evaluated_only: The plan has no memory for gradients and optimizer state.
    """

    transfer: Transfer
    deferred: DeferredReductions

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        strategy: Strategy,
        tiers: Tiers,
        host_loops: Callable[[int], HostLoops] = HostLoops,
    ) -> None:
        self.model, self.comm, self.strategy, self.tiers, self.host_loops = model, comm, strategy, tiers, host_loops
        self.compute_dtype = compute_dtype(strategy)
        self.units: list[Unit] = []
        self.flats: list[FlatParameter] = []
        self.outside: list[FlatParameter] = []
        self.root_parameters: list[RootParameter] = []
        self.gradient_of: dict[FlatParameter, Gradient] = {}
        self.offload: GradientOffload | None = None
        self.places: dict[int, tuple[FlatParameter, int]] = {}
        self.aliases: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.exact: dict[FlatParameter, Exact] = {}
        self.registered: dict[str, int] = {}
        self.streams = tiers.streams
        self.saving: Saving | None = None
        self.flat_kernels: FlatKernels | None = None
        self.running = Running()
        self.evaluated_only = False

    @property
    def trainable(self) -> list[FlatParameter]:
        """The trained flat parameters, those first that every forward needs at its beginning."""
        return sorted((flat for flat in self.flats if flat.trainable), key=lambda flat: flat not in self.outside)

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients of the trained flat parameters, in their order."""
        return [self.gradient_of[flat] for flat in self.trainable]

    def registration(self) -> dict[str, int]:
        """Return the id of each parameter of the model by name, tied names included."""
        return {name: id(parameter) for name, parameter in self.model.named_parameters(remove_duplicate=False)}

    def check_unchanged(self) -> None:
        """Compare the model's parameters with those that were sharded. For building an optimizer, and for saving.

        Raises:
            UserError: A parameter was replaced, added, renamed (pruning, parametrization), tied or unfrozen since.
        """
        changed = sorted(dict(self.registration().items() ^ self.registered.items()))
        if changed:
            raise UserError(
                f"the model's parameters changed after sharding ({', '.join(changed[:3])}): replaced, added, renamed or "
                "tied. Make such changes before ftkit.shard() or before the Trainer is built"
            )
        for flat in self.flats:
            for parameter, segment in zip(flat.parameters, flat.layout.segments):
                if parameter.requires_grad and not flat.trainable:
                    raise UserError(
                        f"{segment.name} was frozen when the model was sharded and requires a gradient now: set "
                        "requires_grad before ftkit.shard() or before the Trainer is built"
                    )

    # --- the step

    def begin_call(self) -> None:
        """Refresh weights outside blocks, and start reading the first units from NVMe.

        Raises:
            RuntimeError: Weights that are gathered for generation are out of date.
        """
        if self.transfer.whole is not None:
            if self.transfer.whole.updates != self.transfer.updates:
                raise RuntimeError("the weights were updated while they are gathered for generation: leave that context")
            return
        self._refresh_outside()
        self.transfer.read_ahead([unit.weights.gathered for unit in self.units[:2]])

    def begin_forward(self) -> None:
        """Start gathering the weights that a call needs first. Its forward pre-hooks have run.

        Weights on NVMe are gathered when they are used: their gather blocks the host until they are read.
        """
        if self.transfer.whole is not None or not self.running.begin():
            return
        early = self.transfer.prefetch and self.transfer.ahead is None
        if self.units and early and not self.units[0].weights.updating:
            self.units[0].weights.fetch(graph=torch.is_grad_enabled())

    def _refresh_outside(self) -> None:
        self.transfer.refresh(self.outside)
        for flat in self.outside:
            flat.refreshed.wait()

    @contextmanager
    def read_by_all(self) -> Iterator[None]:
        """Gather root parameters at each read in the body, with gradients. All ranks must make the same reads."""
        with self.running.read_by_all():
            self._refresh_outside()
            yield

    def last_backward(self) -> AbstractContextManager[None]:
        """Return a context for the last backward before the step. At stages 0 and 1, blocks are reduced in it.

        Without it they are reduced at the step. All ranks use it in the same steps. Its body runs one backward.
        """
        return self.deferred.last_backward()

    def zero_grad(self) -> None:
        """Drop the step's gradients, and what was kept for a backward that has not run. Writes nothing."""
        self.deferred.reduced.wait()  # a step may be left out after `last_backward`
        for gradient in self.gradient_of.values():
            gradient.zero()
        for unit in self.units:
            unit.forget()
        self.running.drop()  # a head that was not read would stay until the next call

    def finish_gradients(self) -> None:
        """Complete the step's mean gradients. Cost: one reduction per deferred gradient that is not reduced yet."""
        self.deferred.finish()
        if self.offload is not None:
            self.offload.finish()

    def updated(self) -> None:
        """Record an update of the shards. Unless it is deferred, refresh resident weights at once.

        Cost: one all-gather per resident trained flat parameter.
        """
        self.transfer.updates += 1
        if not self.strategy.deferred:
            self.transfer.refresh(self.trainable)
            self._refresh_outside()

    def rewritten(self) -> None:
        """Record that shards were loaded, and refresh resident weights. Cost: one all-gather for each."""
        self.exact.clear()
        for flat in self.flats:
            flat.version += 1
            flat.updated = self.streams.now()  # the collectives of a load wait too, but a caller may write without one
        self.transfer.updates += 1
        self.transfer.refresh(self.flats)

    # --- reading

    def settle(self) -> None:
        """Wait for updates under way, and make the current stream wait for the last writes of all shards.

        Raises:
            RuntimeError: One failed.
        """
        for flat in self.flats:
            flat.settle()

    def freshen(self) -> None:
        """Refresh all resident weights now. A collective. Afterwards reading them needs no other rank.

        Raises:
            RuntimeError: An update under way failed.
        """
        self.settle()
        self.transfer.refresh(self.flats)
        self.streams.join()

    def be_current(self) -> None:
        """Wait until resident weights are those of the last update. No collective.

        Raises:
            UserError: A deferred update is done and no forward has gathered the weights since.
        """
        self.settle()
        stale = [flat for flat in self.flats if flat.stale]
        if any(flat.owners > 1 for flat in stale):
            raise UserError(
                f"the weights of {stale[0].name} were updated, and this rank does not have the other ranks' shards yet "
                "(updates are deferred): read them on all ranks within `with ftkit.gathered_parameters(model):`, save with "
                "trainer.save_model() or ftkit.save_model(), or set ftkit={'update': 'now'}"
            )
        self.transfer.refresh(stale)
        self.streams.join()

    def exact_weights(self, flat: FlatParameter, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of this rank's weights in fp32, in the precision of their source if it is known.

        Cost: 4 bytes per element.
        """
        weights = flat.weights.read(start, stop).float()
        if flat in self.exact and start < flat.own_numel:
            self.exact[flat](start, weights[: flat.own_numel - start])
        return weights

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor), gathering one flat parameter at a time. A collective.

        A tensor is valid until the next one is requested. Cost: one all-gather and one buffer per flat parameter.
        """
        self.check_unchanged()
        self.freshen()
        for flat in self.flats:
            full = flat.collect(flat.weights) if flat.full is None else flat.full
            for segment, view in zip(flat.layout.segments, flat.views(full)):
                yield segment.name, view

    def state_dict(self) -> dict[str, Tensor]:
        """Return CPU copies of whole parameters, tied names included, and of persistent buffers. A collective.

        Cost: host memory for the whole model on every rank.
        """
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.full_tensors()}
        state |= {alias: state[name] for alias, name in self.aliases.items()}
        buffers = persistent_buffers(self.model)
        return state | {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of live storage on this rank: parameters, gradients, slots, staging."""
        return {
            "parameters": sum(flat.size_bytes for flat in self.flats),
            "gradients": sum(gradient.size_bytes for gradient in self.gradient_of.values()),
            "slots": self.transfer.slot_bytes + (self.offload.buffer_bytes if self.offload is not None else 0),
            "staging": self.transfer.staging_bytes + (self.offload.staging_bytes if self.offload is not None else 0),
        }
