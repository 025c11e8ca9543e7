"""Sharded optimizers: parameter groups, gradient norm, clipping, and the step of each flat parameter.

[Note: a step]
    clip_grad_norm_ or step, whichever comes first:
        finish the gradients; one sum over ranks of the squared norms and of the tensors that got a gradient; cached
    step:
        overflow -> halve the loss scale and write nothing
        else     -> note the learning rates, clip factor, loss scale and step counts of each flat parameter; the updater
                    (updater.py) updates the shards now or under the next forward

Parameter groups contain the model's own parameters, as in PyTorch. A tensor without a gradient on any rank is not updated,
and its step count stays. A subclass (adamw.py, sgd.py, ...) declares its `rule`, the PyTorch arithmetic in `update`, and the
compiled loop of the host in `host_update`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftkit.engine.core.flat_parameter import FlatParameter, store_bytes
from ftkit.engine.core.gradient import Gradient
from ftkit.engine.kernels.host_loops import RANGE_NUMEL, FlatKernels, HostLoops
from ftkit.engine.memory.arena import arena_bytes
from ftkit.engine.memory.tiers import Store
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.flat_step import Elements, FlatStep, Hyperparameters, Run, runs_of
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.engine.optim.state_stores import FlatState, SplitMaster, coder_for, parts_of, state_sizes
from ftkit.engine.optim.updater import Updater
from ftkit.errors import UserError
from ftkit.spec.sizes import CONVERTED_NUMEL, CUDA_PIECE_NUMEL, REFERENCE_NUMEL
from ftkit.spec.strategy import FP32
from ftkit.spec.update_rules import UpdateRule


class ShardedOptimizer(torch.optim.Optimizer):
    """The base of all sharded optimizers.

    Args:
        units: The sharded model.
        params: Parameters or groups of the sharded model, as for any torch optimizer. None takes all trainable ones.
        loss_scale: None takes a dynamic one if any trained weights are fp16, else none.
        settings: Settings of the rule, as `lr`. A group may have its own.

    Raises:
        UserError: Nothing can be trained, or the parameters changed since the model was sharded.
        ValueError: The rule has no such setting.
    """

    kind: ClassVar[UpdateRule]
    """The rule with its default settings. `rule` has those of this optimizer."""

    def __init__(
        self,
        units: ShardedModel,
        params: Iterable[Any] | None = None,
        *,
        loss_scale: LossScale | None = None,
        **settings: Any,
    ) -> None:
        _check_trainable(units)
        self.rule = self.kind.of(settings)
        self.units = units
        self.host = units.host_loops(torch.get_num_threads())
        self.states: dict[str, FlatState] = {}  # of each trainable flat parameter, made at first use
        narrow = any(flat.dtype == torch.float16 for flat in units.trainable)
        self.loss_scale = loss_scale or LossScale.for_dtype(torch.float16 if narrow else None)
        self.step_was_skipped = False
        self.overflowed: tuple[str, ...] = ()  # flat parameters whose last gradients were not finite, in forward order
        self._left_out = False
        self._norm: float | None = None
        self._norm_of: list[int] = []  # `changes` of the gradients when the norm was computed
        self._clip = 1.0
        self.hyper_parameters = frozenset(self.rule.settings)  # `take_groups` may add keys that no rule reads
        every = [parameter for flat in units.trainable for parameter in flat.parameters]
        super().__init__(every if params is None else params, dict(self.rule.settings))
        self.rule = self.kind.of({**settings, **self.kind.needed(self.param_groups)})
        self.updater = Updater(units.tiers, self.update_run)

    # --- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the sharded model."""
        super().add_param_group(param_group)
        self._find_groups()

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Share the group objects of another optimizer, so that its schedulers drive this one."""
        self.param_groups = groups
        self._find_groups()

    def _find_groups(self) -> None:
        """Note the group number of each trained tensor, None for one that is in no group.

        Raises:
            UserError: A parameter does not belong to the model.
        """
        segments = [segment for flat in self.units.trainable for segment in flat.layout.segments]
        self.group_of: dict[str, int | None] = dict.fromkeys(segment.name for segment in segments)
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                try:
                    flat, index = self.units.places[id(parameter)]
                except KeyError:
                    raise UserError(
                        f"a parameter of shape {tuple(parameter.shape)} does not belong to the sharded model. Make the "
                        "optimizer after the last change of the model (a new head, an adapter, resized embeddings), from "
                        "model.named_parameters()"
                    ) from None
                if flat.trainable:
                    self.group_of[flat.layout.segments[index].name] = number

    def plain_groups(self) -> list[Hyperparameters]:
        """Return the settings of each group, for a step and for JSON, without parameters. Schedulers set NumPy numbers."""
        kept = (bool, int, float, str, list, tuple, type(None))
        groups = [{k: v.item() if hasattr(v, "item") else v for k, v in group.items()} for group in self.param_groups]
        return [{k: v for k, v in group.items() if k != "params" and isinstance(v, kept)} for group in groups]

    # --- state

    def state_of(self, flat: FlatParameter) -> FlatState:
        """Return the state of a flat parameter after its pending update. Makes all state at first use.

        Call `settle` before reading state from NVMe: an update ends before its state is written to the file.
        """
        flat.settle()
        self.prepare()
        return self.states[flat.name]

    def prepare(self) -> None:
        """Make all state that does not exist yet. Master weights begin at the weights, moments at zero."""
        if not self.states:
            self.states = self._make_states(fill=True)

    @contextmanager
    def overwritten(self) -> Iterator[None]:
        """Make all state without values for a load in the body. If it fails, the next use makes state from the weights."""
        fresh = not self.states
        if fresh:
            self.states = self._make_states(fill=False)
        try:
            yield
        except BaseException:
            if fresh:
                self.states = {}
            raise

    def settle(self) -> None:
        """Wait for pending updates, and until all state can be read."""
        self.updater.settle()
        self.units.settle()

    def _make_states(self, *, fill: bool) -> dict[str, FlatState]:
        """Return the state of all flat parameters. `fill` sets each master weight before the next one is allocated."""
        tiers, flats = self.units.tiers, self.units.trainable
        sizes = [state_sizes(flat, self.rule, self._master_of(flat)) for flat in flats]
        homes = tiers.state_tiers([arena_bytes(each.values()) for each in sizes])
        for home in dict.fromkeys(homes):
            own = [each.values() for each, tier in zip(sizes, homes) if tier == home]
            tiers.reserve("state", [*chain.from_iterable(own)], home)
        states = {}
        for flat, roles, home in zip(flats, sizes, homes):
            stores = {role: tiers.make("state", f"{flat.name}.{role}", *size, home) for role, size in roles.items()}
            states[flat.name] = FlatState.of(flat, self.rule, stores, self.host)
            if fill:
                _fill_master(self.units, flat, states[flat.name].master)
        return states

    def _master_of(self, flat: FlatParameter) -> str | None:
        """Return the form of the master: "fp32", "split", or None for weights that are their own master.

        Weights can be the master, or the upper half of one, only where they can be read at the place of the update.
        """
        if not self.updater.at_home(flat.weights):
            return FP32
        return None if flat.dtype == torch.float32 else self.units.strategy.master

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank: moments, and master weights that are not the weights."""
        weights = {id(flat.weights) for flat in self.units.trainable}
        stores = [extent.store for state in self.states.values() for extent in state.extents.values()]
        return sum(store_bytes(store) for store in stores if id(store) not in weights)

    def state_dict(self) -> dict[str, Any]:
        """Refuse, because each rank has a part of the state."""
        raise RuntimeError("the optimizer state is on several ranks: use ftkit.save_checkpoint() on all of them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse, because each rank has a part of the state."""
        raise RuntimeError("the optimizer state is on several ranks: use ftkit.load_checkpoint() on all of them")

    # --- gradients

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, to call backward on."""
        self.loss_scale.fit(loss)
        return loss if self.loss_scale.value == 1.0 else loss * self.loss_scale.value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the step's gradients."""
        self.units.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the global norm of the step's mean gradient, unscaled. An overflow gives inf or nan.

        Squares are summed in float64. GPU kernels square in fp32, as torch does, and give inf beyond 1.8e19.

        Cost: at the first call of a step, the deferred reductions, one collective of a few floats, one wait of the host.
        """
        gradients = self.units.gradients
        changes = [each.changes for each in gradients]
        if self._norm is not None and self._norm_of == changes:
            return self._norm
        self._clip, self._norm_of = 1.0, changes
        self.units.finish_gradients()
        squares = torch.zeros(len(gradients), dtype=torch.float64, device=self.units.comm.device)
        for number, gradient in enumerate(gradients):
            if (square := gradient.square(self._square)) is not None:
                squares[number] = square
        touched = squares.new_tensor([float(t) for each in gradients for t in each.touched])
        with self.units.transfer.trace.span("collectives", "norm"):
            totals = self.units.comm.totals(torch.cat([squares, touched]), "the gradient norm")
        squared, counts = totals[: len(gradients)], iter(totals[len(gradients) :])
        for each in gradients:
            each.touched = [next(counts) > 0 for _ in each.touched]
        self.overflowed = tuple(each.flat.name for each, total in zip(gradients, squared) if not math.isfinite(total))
        self._norm = math.sqrt(sum(squared)) / self.loss_scale.value
        if self.loss_scale.dynamic and math.isnan(self._norm):
            self._norm = math.inf  # an overflow: inf - inf on the way
        return self._norm

    def _square(self, gradient: Tensor) -> Tensor | float:
        """Return the sum of squares of `gradient` (n,), on its device."""
        if (loops := self.loops_for(gradient)) is not None:
            return loops.square_sum(gradient)
        return torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def loops_for(self, shard: Tensor) -> FlatKernels | HostLoops | None:
        """Return the arithmetic on a shard in one pass over memory, None for plain torch."""
        if self.units.flat_kernels is not None and shard.device.type == self.units.comm.device.type:
            return self.units.flat_kernels
        return self.host if shard.device.type == "cpu" else None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global norm to `max_norm` at the step, and return the norm before: a scalar fp32 CPU tensor.

        A norm that is not finite clips as in torch: inf makes every finite gradient 0, nan makes all nan.
        """
        norm = self.grad_norm()
        self._clip = norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))
        return torch.tensor(norm, dtype=torch.float32)

    # --- the step

    def leave_out(self) -> None:
        """Skip the coming step without a change of the loss scale."""
        self._left_out = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Update the shards, or skip on overflow and after `leave_out`. See [Note: a step]."""
        if closure is not None:
            raise ValueError("closures are not supported: compute loss and gradients before step()")
        norm = self.grad_norm()  # finishes the gradients without a clip
        overflow = self.loss_scale.dynamic and not math.isfinite(norm)
        factor = self._clip / self.loss_scale.value
        if not self._left_out:
            self.loss_scale.update(overflow=overflow)
        self.step_was_skipped, self._left_out = overflow or self._left_out, False
        if not self.step_was_skipped:
            noted = self.plain_groups()  # schedulers change the groups right after a step
            steps = [self._flat_step(gradient, noted, factor) for gradient in self.units.gradients]
            due = self.prepare_steps([step for step in steps if step is not None])
            self.units.comm.await_readers()
            self.updater.submit(due, self.units.saving)
            self.units.updated()
        self._norm = None

    def _flat_step(self, gradient: Gradient, noted: list[Hyperparameters], factor: float) -> FlatStep | None:
        """Return this step of one flat parameter, None if no tensor of it is updated."""
        flat = gradient.flat
        state = self.state_of(flat)
        numbered = zip(gradient.touched, (self.group_of[segment.name] for segment in flat.layout.segments))
        due = [noted[number] if touched and number is not None else None for touched, number in numbered]
        store = gradient.store()
        if not any(due) or store is None:
            return None
        state.steps = [count + (group is not None) for count, group in zip(state.steps, due)]
        return FlatStep(flat, state, store, due, runs_of(flat, due, state), factor)

    def prepare_steps(self, steps: Sequence[FlatStep]) -> Sequence[FlatStep]:
        """Return the steps to make. A rule that needs sums over whole tensors replaces them. A collective."""
        return steps

    def update_run(self, at: dict[str, Tensor], run: Run, factor: float) -> None:
        """Update elements of a run in place, as they are stored.

        Args:
            at: Their tensors by role, on the device of the update; see `FlatStep.extents`.
            run: The run.
            factor: Factor on the gradient: clip over loss scale.
        """
        if run.coded:
            whole = self.loops_for(at["gradient"]) is not None
            for part in [at] if whole else parts_of(at, CONVERTED_NUMEL):
                self.coded_update(part, run.group, run.step, factor)
        elif "residual" in at:
            self._split_update(at, run, factor)
        else:
            self.update_piece(_elements(at, at["master"]), run.group, run.step, factor)

    def _split_update(self, at: dict[str, Tensor], run: Run, factor: float) -> None:
        """Update some elements at a time in fp32, and split their master again."""
        coder = coder_for(at["weight"], self.host)
        width = self.host.threads * RANGE_NUMEL if at["weight"].device.type == "cpu" else CONVERTED_NUMEL
        for part in parts_of(at, width):
            weight = part.pop("weight")
            master = coder.join(weight, part["residual"])
            self.update_piece(_elements(part, master), run.group, run.step, factor)
            coder.split(master, weight, part["residual"])

    def coded_update(self, at: dict[str, Tensor], group: Hyperparameters, step: int, factor: float) -> None:
        """Update elements with 8-bit moments. `at` as in `update_run`, others as in `update_piece`."""
        raise NotImplementedError

    def update_piece(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """Update elements in place: with the compiled loop on the host, elsewhere with the reference.

        Args:
            at: The elements.
            group: Hyper-parameters of their group.
            step: 1 at a tensor's first update.
            factor: Factor on the gradient: clip over loss scale.
        """
        if at.master.device.type == "cpu":
            self.host_update(at, group, step, factor)
        else:
            self.reference_update(at, group, step, factor)

    def reference_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """Update with PyTorch operations, some elements at a time: they make several fp32 tensors of that size."""
        for start in range(0, at.master.numel(), REFERENCE_NUMEL):
            part = at.part(start, start + REFERENCE_NUMEL)
            self.update(part, part.gradient.float() * factor, group, step)
            if part.weight is not None:
                part.weight.copy_(part.master)

    def host_update(self, at: Elements, group: Hyperparameters, step: int, factor: float) -> None:
        """Update with the compiled loop of the host. Arguments as in `update_piece`."""
        raise NotImplementedError

    @staticmethod
    def update(at: Elements, gradient: Tensor, group: Hyperparameters, step: int) -> None:
        """Update master weights and moments in place with PyTorch operations: the reference of loops and kernels.

        Arguments as in `update_piece`; `gradient` (n,) fp32 is unscaled and clipped, and replaces `at.gradient`.
        """
        raise NotImplementedError


def _elements(at: dict[str, Tensor], master: Tensor) -> Elements:
    """Return elements with fp32 moments; see `update_run`."""
    moments = {role: tensor for role, tensor in at.items() if role not in ("master", "residual", "gradient", "weight")}
    return Elements(master, at["gradient"], at.get("weight"), moments)


def _check_trainable(units: ShardedModel) -> None:
    """Raise UserError if the model cannot be trained as it was sharded."""
    units.check_unchanged()
    name = type(units.model).__name__
    if not units.trainable:
        raise UserError(
            f"no parameter of this {name} asks for gradients, so nothing can be trained. Set requires_grad before the "
            "model is sharded (PEFT: is_trainable=True)"
        )
    if units.evaluated_only:
        raise UserError(
            f"this {name} was sharded for evaluation only, without memory for gradients and optimizer state. Shard it "
            "with evaluation=False, or pass it to accelerator.prepare() together with its optimizer"
        )


def _fill_master(units: ShardedModel, flat: FlatParameter, master: Store | SplitMaster) -> None:
    """Set master weights to the weights, at the precision at which they were loaded."""
    if isinstance(master, SplitMaster):
        flat.version += 1  # weights between two numbers are rounded in another direction
    if master is not flat.weights:
        for start, stop in max((list(store.pieces()) for store in (master, flat.weights)), key=len):
            piece = master.blank(start, stop)
            for low in range(start, stop, CUDA_PIECE_NUMEL):  # the fp32 values are a copy: a small one at a time
                high = min(low + CUDA_PIECE_NUMEL, stop)
                piece[low - start : high - start].copy_(units.exact_weights(flat, low, high))
            master.write(start, piece)
    units.exact.pop(flat, None)
