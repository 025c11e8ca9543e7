"""The flat parameter: one line of bytes that is a unit's weights, gradient and state on this rank.

[Note: the tensors of a flat parameter]   N elements, W ranks, shards of S elements (layout.py)

    shard       (S,)    compute dtype   this rank's part of the weights; permanent; written by the optimizer and the loader
    full        (W*S,)  compute dtype   all weights; permanent ("resident") or lent by a slot (transfer.py)
    grad        (S,)    gradient dtype  this rank's part of the mean gradient, summed over a step's micro-batches
    full_grad   (W*S,)  gradient dtype  the local gradient of all weights; only where reduction waits for the step's end

The `nn.Parameter` objects of the model stay where they are, under the names they have. While a unit is gathered their
`.data` are views of `full`. Otherwise they are *absent*: shape, dtype and device stay true (counts, PEFT and Trainer read
them), and the one element behind them is NaN, so that an accidental use is loud.

A resident flat parameter (stages 0, 1 and 2, small parameters everywhere, or one rank) keeps `full` for good, and
`shard` is a view of it. A replicated one (stage 0) is laid out for a world of one although W ranks hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ftkit.engine.comm import Communicator
from ftkit.engine.layout import FlatLayout


@dataclass(frozen=True)
class Policy:
    """How the flat parameters of one model are held. The plan or the user's `engine:` block decides.

    Args:
        stage: 0 replicates everything as DDP does; 1 shards the optimizer state; 2 the gradients too; 3 the weights too.
        activations: 'recompute' a block in backward, or 'keep' its graph.
        weights: at stage 3, 'free' a block's weights after its forward, or 'hold' them until its backward.
        compute_dtype: dtype of weights in use and of gradients on the wire; None keeps each parameter's own.
        gradient_dtype: dtype in which a step's micro-batches are summed; None means the compute dtype.
        prefetch: gather the neighbour's weights while a block computes.
        debug: fill every freed buffer with NaN, and compare among ranks what each gather and reduction is for.
    """

    stage: int = 3
    activations: str = "recompute"
    weights: str = "free"
    compute_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    prefetch: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage is {self.stage!r}, one of 0, 1, 2, 3 is needed")
        if self.activations not in ("recompute", "keep"):
            raise ValueError(f"activations is {self.activations!r}, 'recompute' or 'keep' is needed")
        if self.weights not in ("free", "hold"):
            raise ValueError(f"weights is {self.weights!r}, 'free' or 'hold' is needed")


def is_absent(parameter: Tensor) -> bool:
    """Return whether a tensor holds nothing of its own: on meta, or one element expanded."""
    return parameter.is_meta or (parameter.dim() > 0 and parameter.numel() > 0 and not any(parameter.stride()))


Origin = Callable[[int, Tensor], object]
"""Fills a tensor (n,) fp32 with elements [start, start + n) of this rank's shard, as exact as the weights came."""


def absent(parameter: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of `parameter`'s shape that holds nothing: one NaN, expanded."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(parameter.shape)


class FlatParameter:
    """One line of parameters of one dtype that are trained, or frozen, together.

    Args:
        name: unique in the model; the checkpoint's file name.
        parameters: (name in the model, parameter) in model order. They are absent afterwards.
        comm: the ranks that share it.
        dtype: compute dtype of the line.
        policy: see `Policy`.
        resident: keep all weights on every rank.
        deferred: reduce the gradient once, at the end of the step, instead of after each use. (Where there is nothing
            to reduce, on one rank, this is the only way: autograd's gradients are added straight into `full_grad`.)
        replicated: every rank owns the whole line (stage 0).
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        comm: Communicator,
        dtype: torch.dtype,
        policy: Policy,
        *,
        resident: bool,
        deferred: bool,
        replicated: bool,
    ) -> None:
        self.name = name
        self.comm = comm
        self.dtype = dtype
        self.parameters = [parameter for _, parameter in parameters]
        self.trainable = self.parameters[0].requires_grad
        self.owners = 1 if replicated else comm.world_size
        self.rank = 0 if replicated else comm.rank
        self.layout = FlatLayout.of([(n, tuple(p.shape)) for n, p in parameters], self.owners)
        self.resident = resident or self.owners == 1
        self.deferred = deferred or self.owners == 1
        self.grad_dtype = policy.gradient_dtype or dtype
        self.version = 0  # of the weights: +1 an update
        self.touched = [False] * len(self.parameters)  # which tensors got a gradient since zero_grad
        self.grad: Tensor | None = None
        self.full_grad: Tensor | None = None
        self.full: Tensor | None = None
        self.full_version = 0
        self.refreshed: torch.cuda.Event | None = None  # when a resident copy is up to date
        self.origin: Origin | None = None  # weights as they came, where they are wider than the compute dtype
        self._has_gradient = False
        self._finished = False
        self.contributions = 0  # counts everything that changes the gradient; a cached norm is of one such count
        self._allocate(comm.device)

    def _allocate(self, device: torch.device) -> None:
        """Lay down this rank's bytes; take over values of parameters that have them (a meta tensor has none)."""
        if self.resident:
            self.full = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=device)
            start = self.rank * self.layout.shard_numel
            self.shard = self.full[start : start + self.layout.shard_numel]
        else:
            self.shard = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=device)
        base, limit = self.layout.shard_range(self.rank)
        start, stop = (0, self.layout.numel) if self.full is not None else (base, limit)
        target = self.full if self.full is not None else self.shard
        self.built = not all(map(is_absent, self.parameters))
        wider = [p for p in self.parameters if not is_absent(p) and p.dtype.itemsize > self.dtype.itemsize]
        exact = torch.zeros(limit - base, dtype=torch.float32, device=device) if wider and self.trainable else None
        for span in self.layout.spans(start, stop):
            source = self.parameters[span.index].detach()
            if not is_absent(source):
                low = span.start - span.segment.start
                values = source.reshape(-1)[low : low + span.numel]
                target[span.start - start : span.stop - start].copy_(values)
                first, last = max(span.start, base), min(span.stop, limit)
                if exact is not None and first < last:
                    exact[first - base : last - base].copy_(values[first - span.start : last - span.start])
        if exact is not None:
            self.origin = lambda begin, out: out.copy_(exact[begin : begin + out.numel()])
        for parameter in self.parameters:
            parameter.grad = None
        if self.full is not None:
            self.attach(self.full)
        else:
            self.detach()

    def agree(self) -> None:
        """Make whole copies equal on all ranks, as they may have been built from other random numbers: the owner's count.

        Cost: for a resident line one all-gather or broadcast.
        """
        if self.full is None or not self.built:
            return
        if self.owners > 1:
            self.gather(self.full)
            return
        self.comm.broadcast(self.full)
        if self.origin is not None:
            exact = self.full.float()
            self.origin(0, exact[: self.layout.numel])
            self.comm.broadcast(exact)
            self.origin = lambda start, out: out.copy_(exact[start : start + out.numel()])

    def attach(self, full: Tensor) -> None:
        """Point the parameters at their places in `full` (W*S,)."""
        for parameter, segment in zip(self.parameters, self.layout.segments):
            parameter.data = full[segment.start : segment.stop].view(segment.shape)

    def detach(self) -> None:
        """Make the parameters absent."""
        for parameter in self.parameters:
            parameter.data = absent(parameter, self.shard.device, self.dtype)

    def gather(self, full: Tensor) -> None:
        """Fill `full` (W*S,) with every rank's shard. Cost: one all-gather of W*S elements."""
        if self.owners > 1:
            self.comm.all_gather(full, self.shard)
        elif full.data_ptr() != self.shard.data_ptr():
            full.copy_(self.shard)

    def exact_weights(self) -> Tensor:
        """Return this rank's weights (S,) in fp32, as exact as they came; what is behind them is let go.

        Cost: 4 bytes an element of S.
        """
        weights = self.shard.float()
        if self.origin is not None:
            base, stop = self.layout.shard_range(self.rank)
            self.origin(0, weights[: stop - base])
            self.origin = None
        return weights

    def refresh(self) -> None:
        """Bring a resident copy up to date after an update. Cost: one all-gather, if it is stale."""
        if self.full is not None and self.full_version != self.version:
            self.gather(self.full)
            self.full_version = self.version

    # --- gradients

    def zero_grad(self) -> None:
        """Forget the step's gradient. Nothing is written: the next contribution overwrites."""
        self._has_gradient = self._finished = False
        self.contributions += 1
        self.touched = [False] * len(self.parameters)

    def _changes(self) -> None:
        """Note that the gradient changes.

        Raises:
            RuntimeError: if it was reduced and read already: what was reduced cannot be added to.
        """
        if self._finished and self.deferred and self.comm.world_size > 1:
            raise RuntimeError(
                f"a backward reached {self.name} after its gradient norm was taken or the step was made: call zero_grad() "
                "between a step and the next backward"
            )
        self._finished = False
        self.contributions += 1

    def contribute(self, full: Tensor) -> None:
        """Add the mean over ranks of a local gradient `full` (W*S,), which is scratch after, to this rank's `grad`.

        Cost: one reduce-scatter of W*S elements.
        """
        self._changes()
        if self.grad is None:
            self.grad = torch.empty(self.layout.shard_numel, dtype=self.grad_dtype, device=self.shard.device)
        if not self._has_gradient and self.grad_dtype == full.dtype:
            self.comm.reduce_scatter_mean(self.grad, full)
        else:
            part = torch.empty(self.layout.shard_numel, dtype=full.dtype, device=self.shard.device)
            self.comm.reduce_scatter_mean(part, full)
            if self._has_gradient:
                self.grad.add_(part)
            else:
                self.grad.copy_(part)
        self._has_gradient = True

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Add tensor `index`'s local `gradient` to `full_grad`; `finish` reduces it."""
        self._changes()
        if self.full_grad is None:
            self.full_grad = torch.empty(self.layout.padded_numel, dtype=self.grad_dtype, device=self.shard.device)
        segment = self.layout.segments[index]
        place = self.full_grad[segment.start : segment.stop]
        if self.touched[index]:
            place.add_(gradient.reshape(-1))
        else:
            place.copy_(gradient.reshape(-1))
        self.touched[index] = True
        self._has_gradient = True

    def finish(self) -> None:
        """Reduce a deferred gradient: after this, `grad` (S,) is the step's mean gradient on every path.

        Every rank takes part, also one whose part of the batch did not use these tensors.
        Cost: for deferred gradients one reduce-scatter (stage 1) or all-reduce (stage 0) a step.
        """
        if self._finished:
            return
        self._finished = True
        if not self.deferred:
            return
        if self.full_grad is None:
            self.full_grad = torch.empty(self.layout.padded_numel, dtype=self.grad_dtype, device=self.shard.device)
        for index, segment in enumerate(self.layout.segments):
            if not self.touched[index]:
                self.full_grad[segment.start : segment.stop].zero_()
        self.full_grad[self.layout.numel :].zero_()
        if self.owners == 1:
            self.comm.all_reduce_mean(self.full_grad)
            self.grad = self.full_grad
        else:
            start = self.rank * self.layout.shard_numel
            self.grad = self.full_grad[start : start + self.layout.shard_numel]
            self.comm.reduce_scatter_mean(self.grad, self.full_grad)
        self._has_gradient = True

    @property
    def has_gradient(self) -> bool:
        """Whether this rank holds a gradient for the current step."""
        return self._has_gradient

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of live storages by kind: parameters, gradients (the optimizer adds its own)."""
        weights = self.full if self.full is not None else self.shard
        gradient = self.full_grad if self.full_grad is not None else self.grad
        return {
            "parameters": weights.untyped_storage().nbytes(),
            "gradients": gradient.untyped_storage().nbytes() if gradient is not None else 0,
        }
