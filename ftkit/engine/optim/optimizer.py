"""The optimizer: parameter groups, loss scale, one collective for norm and overflow, and what a step does to each line.

[Note: a step]
    clip_grad_norm_ or step, whichever comes first:
        finish the gradients; one sum over ranks of (squared norm, overflow, which tensors got a gradient); cached
    step:
        overflow -> the loss scale backs off and nothing is written
        else     -> learning rates, clip, scale and step counts are noted for each line, and the updater (updater.py) walks
                    the shards: gradient to fp32 (times clip / scale), fp32 master weight and moments in place, weight out
                    in the compute dtype; at once, or under the next forward

The parameter groups hold the model's own parameters, so Trainer's decay names, per-group learning rates and every LR
scheduler work; a group is a list of runs on the line, not a reordering of it. A tensor that got no gradient on any
rank is left alone and its own step count stays, as in PyTorch. Where weights are fp32 they are their own master, if they
lie where the state does.

The arithmetic is one pass over memory: on the host a compiled loop (host_loops.py), on a GPU a kernel where one was brought
(device_kernels.py), else torch's fused AdamW. All decouple the decay (arXiv:1711.05101).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ftkit.engine.arena import arena_bytes
from ftkit.engine.core.buffers import CommonBuffers
from ftkit.engine.core.flat_parameter import FlatParameter, store_bytes
from ftkit.engine.core.gradient import Gradient
from ftkit.engine.core.shard import Units
from ftkit.engine.kernels.device_kernels import FlatKernels
from ftkit.engine.memory.tiers import Store
from ftkit.engine.optim.updater import CUDA_PIECE_NUMEL, Hyperparameters, LineState, LineStep, Run, Updater
from ftkit.errors import UserError
from ftkit.spec.update_rules import ADAMW, MOMENTUM, SGD, UpdateRule

PIECE_NUMEL = 1 << 18
"""Elements that torch's own operations update at a time on a CPU: gradient, master and moments stay in cache meanwhile."""


LEAST_SCALE = 2.0**-24
"""The smallest loss scale: what is not finite under it is no overflow."""


@dataclass
class LossScale:
    """A dynamic loss scale: doubles after `growth_steps` clean steps, halves on overflow, never gives up.

    There is no upper or lower stop but fp32's own: a scale below 1 is what a model with large gradients needs.

    Args:
        value: the factor on the loss.
        dynamic: whether `value` changes; False keeps it (1.0 for fp32 and bf16).
        growth_steps: clean steps after which `value` doubles.
        clean_steps: steps without overflow since the last overflow or doubling.
        skipped_steps: steps with overflow so far.
        limit: largest value that doubling reaches.
    """

    value: float = 1.0
    dynamic: bool = False
    growth_steps: int = 1000
    clean_steps: int = 0
    skipped_steps: int = 0
    limit: float = 2.0**40  # lower for losses in fp16, which cannot hold 2^16

    @classmethod
    def for_dtype(cls, dtype: torch.dtype | None) -> LossScale:
        """Return the scale that `dtype` needs: dynamic from 2^16 for fp16, none for others."""
        return cls(2.0**16, dynamic=True) if dtype == torch.float16 else cls()

    def update(self, *, overflow: bool) -> None:
        """Take note of one step."""
        self.skipped_steps += overflow
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.value = max(self.value / 2, LEAST_SCALE)
        elif self.clean_steps >= self.growth_steps:
            self.value, self.clean_steps = min(self.value * 2, self.limit), 0

    def fit(self, loss: Tensor) -> None:
        """Keep the scale within what a loss of this dtype can be multiplied by."""
        if self.dynamic and loss.dtype == torch.float16:
            self.limit = 2.0**15
            self.value = min(self.value, self.limit)


class StateInShards(defaultdict[Any, Any]):
    """In the place of `optimizer.state`: it is empty, and refuses what would have no effect."""

    def __missing__(self, key: Any) -> Any:
        raise _state_refusal()

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _state_refusal()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _state_refusal()

    clear = get = pop = popitem = setdefault = update = __delitem__ = _refuse


def _state_refusal() -> UserError:
    return UserError(
        "optimizer.state of a sharded model: the state lies in shards, and nothing that is read or written here would be "
        "its. To begin with fresh state, make a new Trainer or optimizer; to keep it, save a checkpoint"
    )


class ShardedOptimizer(torch.optim.Optimizer):
    """What all sharded optimizers share: groups, norm, clipping, loss scale, the walk over the shards.

    Args:
        units: units that `shard()` returned.
        params: parameters or groups of the sharded model, as for any torch optimizer; None takes all trainable ones.
        defaults: hyper-parameters of a group.
        loss_scale: None takes a dynamic one where any trained weights are fp16, else none.

    Raises:
        UserError: if no parameter of the model asks for gradients.
        ValueError: if a parameter does not belong to `units`.
    """

    rule: UpdateRule = SGD

    def __init__(
        self,
        units: Units,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        loss_scale: LossScale | None = None,
    ) -> None:
        if not units.trainable:
            raise UserError(
                f"no parameter of this {type(units.model).__name__} asks for gradients, so nothing can be trained: set "
                "requires_grad before the model is sharded"
            )
        if units.evaluated_only:
            raise UserError(
                f"this {type(units.model).__name__} was sharded for evaluation only, without room for gradients and state: "
                "shard it for training (evaluation=False), or give it to accelerator.prepare() with its optimizer"
            )
        self.units = units
        self.host = units.host_loops(torch.get_num_threads())
        self.lines: dict[str, LineState] = {}
        self.buffers = CommonBuffers(units.model, units.comm)
        narrow = any(flat.dtype == torch.float16 for flat in units.trainable)
        self.loss_scale = loss_scale or LossScale.for_dtype(torch.float16 if narrow else None)
        self.step_was_skipped = False
        self.overflowed: tuple[str, ...] = ()  # lines whose gradients of the last step were not finite, in forward order
        self.edited = False  # whether a weight was ever edited in place by others
        self._left_out = False
        self._norm: float | None = None
        self._written: list[float] = []  # sums over ranks of `CommonBuffers.written`
        self._norm_of: tuple[int, ...] = ()  # the changes of the gradients up to which the norm is theirs
        self._clip = 1.0
        self.hyper_parameters = frozenset(defaults)  # `defaults` may have more: those of an optimizer that this one replaces
        super().__init__(params if params is not None else _trainable(units), defaults)
        self.state = StateInShards()
        self.updater = Updater(
            units.tiers,
            update_piece=self.update_piece,
            moment_names=self.rule.moments,
            deferred=units.strategy.deferred,
            trace=units.transfer.trace,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters must be the sharded model's.

        Raises:
            UserError: if one is not, naming its shape.
        """
        super().add_param_group(param_group)
        self._find_groups()

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Share another optimizer's groups, as the same objects: whoever changes their learning rates changes ours.

        Raises:
            UserError: if a parameter is not the sharded model's.
        """
        for group in groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self.param_groups = groups
        self._find_groups()

    def _find_groups(self) -> None:
        """Note for each tensor on each line the group it is in.

        Raises:
            UserError: if a parameter is not the sharded model's, naming its shape.
        """
        self.group_of: dict[str, list[int | None]] = {
            flat.name: [None] * len(flat.parameters) for flat in self.units.trainable
        }
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                try:
                    flat, index = self.units.place(parameter)
                except KeyError:
                    raise UserError(
                        f"a parameter of shape {tuple(parameter.shape)} does not belong to the sharded model. Was the "
                        "optimizer made before the model was changed (a new head, an adapter, resized embeddings)? Make it "
                        "after the change, from the parameters that model.named_parameters() has then"
                    ) from None
                if flat.trainable:
                    self.group_of[flat.name][index] = number

    def plain_groups(self) -> list[dict[str, Any]]:
        """Return what JSON can hold of each group: numbers of NumPy and torch as Python's, and no tensors of the model.

        What a user has put into a group beside settings is left out where JSON has no form for it.
        """
        plain = ({key: _plain(value) for key, value in group.items() if key != "params"} for group in self.param_groups)
        known = self.hyper_parameters
        return [{key: each for key, each in group.items() if key in known or _has_json(each)} for group in plain]

    def groups_by_name(self) -> dict[str, int | None]:
        """Return each trained tensor's parameter group; None where it is in none."""
        flats = self.units.trainable
        return {s.name: group for flat in flats for s, group in zip(flat.layout.segments, self.group_of[flat.name])}

    # --- state

    def line(self, flat: FlatParameter) -> LineState:
        """Return the state of `flat`, once no update of it is under way; all state is made at first use.

        Who reads what lies in files calls `settle` first: a line's update is done before its state is written behind.

        Cost: 4 bytes an element of S for the master and each moment, on their tier.
        """
        flat.settle()
        self.prepare()
        return self.lines[flat.name]

    def prepare(self) -> None:
        """Make all state, if there is none yet."""
        if not self.lines:
            try:
                self._make_lines(fill=True)
            except BaseException:
                self.lines.clear()
                raise

    @contextmanager
    def overwritten(self) -> Iterator[None]:
        """Make all state, if there is none yet, for a body that writes all of it: nothing is put there, or touched, before.

        Where the body fails, state that was made for it is that of the present weights, as `prepare` makes it.
        """
        fresh = not self.lines
        if fresh:
            self._make_lines(fill=False)
        try:
            yield
        except BaseException:
            if fresh:
                self._begin_again()
            raise
        for flat in self.units.trainable:
            flat.origin = None

    @torch.no_grad()
    def take_edits(self, *, unseen: bool = False) -> None:
        """Let masters that lie apart take over what was written in place to whole weights since the last time.

        Called before an update, which would undo the edit, and before a save. Elements that the edit left as they are keep
        their masters. What was written through `.data` leaves no trace, and is found by comparing.

        Args:
            unseen: compare weights and masters to find writes through `.data`, too; asked for before a model is written.

        Raises:
            UserError: if the `.data` of a parameter was replaced, or an update ran while a weight was edited.

        Cost: under a microsecond a resident parameter; where one was edited, and of all with `unseen`, one read of its
            line's weights and masters.
        """
        self.units.take_edits()
        for flat in self.units.trainable:
            edits = flat.edits()
            if edits == flat.edits_taken:
                if unseen and flat.resident and not flat.stale:
                    self._take_edit(flat)
                continue
            if self.updater.deferred and self.updater.last is not None:
                name = flat.layout.segments[0].name
                raise UserError(
                    f"a weight of {flat.name} ({name}, ...) was edited in place, and updates are deferred: the last one may "
                    "have run meanwhile, and one of both may be lost. Make updates in the step: ftkit={'update': 'now'}"
                )
            self.edited = True
            self._take_edit(flat)
            flat.edits_taken = edits

    def _take_edit(self, flat: FlatParameter) -> None:
        """Write to a line's master, if that lies apart, the weights that are not its own rounded."""
        master = self.line(flat).master
        if master is flat.weights:
            return
        for start, stop in ranges(master, flat.weights):
            piece, edited = master.read(start, stop), False
            for low in range(start, stop, CUDA_PIECE_NUMEL):
                part = piece[low - start : low - start + CUDA_PIECE_NUMEL]
                weights = flat.weights.read(low, low + part.numel()).to(part.device)
                if not torch.equal(part.to(weights.dtype), weights):
                    if flat.captured is not None and not edited:
                        flat.captured.wait()  # a checkpoint that is being written has the values before
                    part.copy_(torch.where(part.to(weights.dtype) == weights, part, weights.float()))
                    edited = True
            if edited:
                master.write(start, piece)

    def settle(self) -> None:
        """Wait for updates under way, and until all state can be read.

        Raises:
            RuntimeError: if one failed.
        """
        self.updater.settle()
        self.units.settle()

    def _make_lines(self, *, fill: bool) -> None:
        """Make the state of all lines. fill: masters too, each before the next line's memory is taken."""
        tiers, fp32 = self.units.tiers, torch.float32
        apart = {flat.name: not self._is_own_master(flat) for flat in self.units.trainable}
        kinds = {f.name: [*(["master"] if apart[f.name] else []), *self.rule.moments] for f in self.units.trainable}
        sizes = [[(f.layout.shard_numel, fp32)] * len(kinds[f.name]) for f in self.units.trainable]
        homes = tiers.state_tiers([arena_bytes(each) for each in sizes])
        for home in dict.fromkeys(homes):
            tiers.reserve("state", [size for each, where in zip(sizes, homes) if where == home for size in each], home)
        for flat, home in zip(self.units.trainable, homes):
            numel = flat.layout.shard_numel
            stores = {kind: tiers.make("state", f"{flat.name}.{kind}", numel, fp32, home) for kind in kinds[flat.name]}
            master = stores.pop("master") if apart[flat.name] else flat.weights
            self.lines[flat.name] = LineState(master, stores, [0] * len(flat.parameters))
            if fill:
                self._fill_master(flat)

    def _fill_master(self, flat: FlatParameter) -> None:
        """Make a line's master that of its weights, as exact as they came."""
        master = self.lines[flat.name].master
        if master is not flat.weights:
            for start, stop in ranges(master, flat.weights):
                piece = master.blank(start, stop)
                for low in range(start, stop, CUDA_PIECE_NUMEL):  # the values in fp32 are a copy: a small one at a time
                    high = min(low + CUDA_PIECE_NUMEL, stop)
                    piece[low - start : high - start].copy_(flat.exact_weights(low, high))
                master.write(start, piece)
        flat.origin = None

    def _begin_again(self) -> None:
        """Give the state of all lines the values that it begins with."""
        for flat in self.units.trainable:
            self._fill_master(flat)
            for store in self.lines[flat.name].moments.values():
                for start, stop in store.pieces():
                    store.write(start, store.blank(start, stop).zero_())

    def _is_own_master(self, flat: FlatParameter) -> bool:
        """Whether fp32 weights serve as their master: they must be at hand where the state is updated."""
        if flat.dtype != torch.float32:
            return False
        return flat.weights.tensor is None or flat.weights.tensor.device.type == self.updater.home.type

    def state_bytes(self) -> int:
        """Return the bytes of live optimizer stores on this rank, masters included, fp32 weights not."""
        stores = [
            store
            for flat in self.units.trainable
            if (state := self.lines.get(flat.name)) is not None
            for store in (state.master, *state.moments.values())
            if store is not flat.weights
        ]
        return sum(store_bytes(store) for store in stores)

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the state lies on all ranks.

        Raises:
            RuntimeError: always; names `ftkit.save_checkpoint`.
        """
        raise RuntimeError("the optimizer state lies on several ranks: use ftkit.save_checkpoint() on all of them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: the state lies on all ranks.

        Raises:
            RuntimeError: always; names `ftkit.load_checkpoint`.
        """
        raise RuntimeError("the optimizer state lies on several ranks: use ftkit.load_checkpoint() on all of them")

    # --- gradients

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, to call backward on."""
        self.loss_scale.fit(loss)
        return loss if self.loss_scale.value == 1.0 else loss * self.loss_scale.value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the step's gradients; writes nothing."""
        self._norm, self._clip = None, 1.0
        self.units.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the global norm of the step's mean gradient, unscaled; inf or nan on overflow.

        Squares are added up in float64: what fits a gradient's own fp32 has a norm. (The kernels of a GPU square in fp32,
        as torch does, and give inf beyond 1.8e19.)

        Cost: at the first call in a step, the reductions that waited, one collective of a few floats, one host wait.
        """
        gradients = self.units.gradients
        changes = tuple(each.changes for each in gradients)
        if self._norm is not None and self._norm_of == changes:
            return self._norm
        self._clip, self._norm_of = 1.0, changes
        self.units.finish_gradients()
        squares = torch.zeros(len(gradients), dtype=torch.float64, device=self.units.comm.device)
        for number, gradient in enumerate(gradients):
            if (square := gradient.square(self._square)) is not None:
                squares[number] = square
        touched = [float(t) for each in gradients for t in each.touched] + self.buffers.written()
        with self.units.transfer.trace.span("collectives", "norm"):
            told = self.units.comm.totals(torch.cat([squares, squares.new_tensor(touched)]), "the gradient norm")
        marks: Iterator[float] = iter(told[len(gradients) :])
        for each in gradients:
            each.agree([next(marks) > 0 for _ in each.touched])
        self._written = list(marks)
        self.overflowed = tuple(each.flat.name for each, square in zip(gradients, told) if not math.isfinite(square))
        self._norm = math.sqrt(sum(told[: len(gradients)])) / self.loss_scale.value
        if self.loss_scale.dynamic and math.isnan(self._norm):
            self._norm = math.inf  # inf - inf on the way: an overflow all the same
        return self._norm

    def _square(self, gradient: Tensor) -> Tensor | float:
        """Return the sum of squares of `gradient` (n,), where it lies."""
        kernels = self._kernels_for(gradient)
        if kernels is not None:
            return kernels.square(gradient)
        if gradient.device.type == "cpu":
            return self.host.square_sum(gradient)
        return torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def _kernels_for(self, shard: Tensor) -> FlatKernels | None:
        """Return the kernels for shards on the device of compute; None for those elsewhere."""
        return self.units.flat_kernels if shard.device.type == self.units.comm.device.type else None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm to `max_norm`, exactly, when the step is made.

        A norm that is not finite clips as torch's function does: inf makes every finite gradient 0, nan makes all nan.

        Returns:
            The norm before clipping, a scalar fp32 CPU tensor; inf where fp32 cannot hold it.
        """
        norm = self.grad_norm()
        self._clip = norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))
        return torch.tensor(norm, dtype=torch.float32)

    # --- the step

    def leave_out(self) -> None:
        """Let the coming step write nothing: its gradients are forgotten, and the loss scale stays as it is."""
        self._left_out = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Update every line's shard, or skip on overflow and when `leave_out` was called. See [Note: a step].

        Raises:
            UserError: in a `no_sync` context of several ranks; as `take_edits`.
            ValueError: if a closure is given.
        """
        if closure is not None:
            raise ValueError("closures are not supported: compute loss and gradients before step()")
        if self.units.unsynced and self.units.comm.world_size > 1:
            raise UserError(
                "an optimizer step inside no_sync(): each rank would update the weights by gradients of its own, and the "
                "ranks share these weights. Step after the context (accelerator.accumulate does so); LocalSGD needs weights "
                "of its own on each rank: leave it off (enabled=False)"
            )
        self.take_edits()
        norm = self.grad_norm()  # also finishes the gradients, where nobody clipped
        overflow = self.loss_scale.dynamic and not math.isfinite(norm)
        factor = self._clip / self.loss_scale.value
        if not self._left_out:
            self.loss_scale.update(overflow=overflow)
        self.step_was_skipped, self._left_out = overflow or self._left_out, False
        if not self.step_was_skipped:
            noted = [_noted(group) for group in self.param_groups]
            steps = [self._line_step(gradient, noted, factor) for gradient in self.units.gradients]
            self.updater.submit([step for step in steps if step is not None])
            self.units.updated()
        self.buffers.send(self._written)
        self._norm, self._clip = None, 1.0

    def _line_step(self, gradient: Gradient, noted: list[Hyperparameters], factor: float) -> LineStep | None:
        """Return what this step, with the groups' hyper-parameters as `noted`, does to a line; None if nothing."""
        flat = gradient.flat
        state = self.line(flat)
        groups = self.group_of[flat.name]
        due = [touched and group is not None for touched, group in zip(gradient.touched, groups)]
        store = gradient.store()
        if not any(due) or store is None:
            return None
        state.steps = [count + now for count, now in zip(state.steps, due)]
        runs = list(_runs(flat, [g if d else None for g, d in zip(groups, due)], state.steps))
        return LineStep(flat, state, store, runs, noted, factor)

    def update_piece(
        self,
        master: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        weight: Tensor | None,
        group: Hyperparameters,
        step: int,
        factor: float,
    ) -> None:
        """Update `master` (n,) fp32 and `moments` in place, and `weight` (n,) from it.

        Args:
            master: master weights, read and written.
            gradient: (n,) gradient dtype, scaled and not clipped yet.
            moments: name to moment (n,) fp32, read and written.
            weight: receives `master` in its own dtype; None where the master is the weight.
            group: hyper-parameters of the group.
            step: 1 at a tensor's first update.
            factor: what the gradient is multiplied by: clip over loss scale.
        """
        width = PIECE_NUMEL if master.device.type == "cpu" else max(master.numel(), 1)
        for start in range(0, master.numel(), width):
            part = slice(start, start + width)
            clipped = gradient[part].float()
            if factor != 1.0:
                clipped = clipped * factor
            self.update(master[part], clipped, {name: tensor[part] for name, tensor in moments.items()}, group, step)
            if weight is not None:
                weight[part].copy_(master[part])

    def update(
        self, master: Tensor, gradient: Tensor, moments: dict[str, Tensor], group: Hyperparameters, step: int
    ) -> None:
        """Update `master` (n,) fp32 and `moments` in place from `gradient` (n,) fp32, unscaled and clipped.

        Args:
            master: master weights, read and written.
            gradient: gradient of these elements, already unscaled and clipped.
            moments: name to moment (n,) fp32, read and written.
            group: hyper-parameters of the group.
            step: 1 at a tensor's first update.
        """
        raise NotImplementedError


class ShardedAdamW(ShardedOptimizer):
    """AdamW over sharded lines. Arguments as `torch.optim.AdamW`'s; `units` and `params` as `ShardedOptimizer`'s.

    Source: Loshchilov and Hutter, arXiv:1711.05101.
    """

    rule = ADAMW

    def __init__(
        self,
        units: Units,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        loss_scale: LossScale | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(units, params, defaults, loss_scale)

    def update_piece(
        self,
        master: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        weight: Tensor | None,
        group: Hyperparameters,
        step: int,
        factor: float,
    ) -> None:
        """See `ShardedOptimizer.update_piece`. One pass over memory, but for devices without kernels."""
        kernels = self._kernels_for(master)
        if kernels is None and master.device.type != "cpu":
            super().update_piece(master, gradient, moments, weight, group, step, factor)
            return
        update = self.host.adamw if kernels is None else kernels.adamw
        update(
            master,
            gradient,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            weight,
            factor=factor,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        )

    def update(
        self, master: Tensor, gradient: Tensor, moments: dict[str, Tensor], group: Hyperparameters, step: int
    ) -> None:
        """See `ShardedOptimizer.update`."""
        adamw(
            [master],
            [gradient],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [torch.full((), step - 1, dtype=torch.float32, device=master.device)],  # made there: no copy, no wait
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class ShardedSGD(ShardedOptimizer):
    """SGD with optional momentum over sharded lines. Arguments as `torch.optim.SGD`'s."""

    def __init__(
        self,
        units: Units,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.rule = MOMENTUM if momentum else SGD
        super().__init__(units, params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, loss_scale)

    def update_piece(
        self,
        master: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        weight: Tensor | None,
        group: Hyperparameters,
        step: int,
        factor: float,
    ) -> None:
        """See `ShardedOptimizer.update_piece`. One pass over memory on the host."""
        if master.device.type != "cpu":
            super().update_piece(master, gradient, moments, weight, group, step, factor)
            return
        self.host.sgd(
            master,
            gradient,
            moments.get("momentum_buffer"),
            weight,
            factor=factor,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
        )

    def update(
        self, master: Tensor, gradient: Tensor, moments: dict[str, Tensor], group: Hyperparameters, step: int
    ) -> None:
        """See `ShardedOptimizer.update`."""
        if group["weight_decay"]:
            gradient = gradient.add(master, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = moments["momentum_buffer"]
            gradient = buffer.mul_(group["momentum"]).add_(gradient)
        master.add_(gradient, alpha=-float(group["lr"]))


def _noted(group: dict[str, Any]) -> Hyperparameters:
    """Return the hyper-parameters of a group as they are now: schedulers change it right after a step."""
    noted = {key: value for key, value in group.items() if key != "params"} | {"lr": float(group["lr"])}
    return cast(Hyperparameters, noted)


def _trainable(units: Units) -> list[Tensor]:
    return [parameter for flat in units.trainable for parameter in flat.parameters]


def ranges(*stores: Store) -> Iterator[tuple[int, int]]:
    """Yield ranges that are whole pieces of every one of the stores."""
    yield from max((list(store.pieces()) for store in stores), key=len)


def _runs(flat: FlatParameter, groups: list[int | None], steps: list[int]) -> Iterator[Run]:
    """Yield the runs of this rank's shard: spans of tensors in a group, joined where group and step count agree."""
    base, stop = flat.layout.shard_range(flat.rank)
    current: Run | None = None
    for span in flat.layout.spans(base, stop):
        group = groups[span.index]
        if group is None:
            continue
        start, end, step = span.start - base, span.stop - base, steps[span.index]
        if current and (current.stop, current.group, current.step) == (start, group, step):
            current = Run(current.start, end, group, step)
            continue
        if current:
            yield current
        current = Run(start, end, group, step)
    if current:
        yield current


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as Python's, and anything else as it is."""
    return value.item() if isinstance(value, (np.generic, Tensor)) and value.ndim == 0 else value


def _has_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
