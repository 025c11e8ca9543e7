"""Losses that are not finite: counted without waiting for the device, and judged when training ends.

A run that ends with a NaN, or of which most steps were NaN, has failed, even where every step was logged as it was. In fp16
a step whose gradients overflow is skipped and is no failure; it is the loss itself that is looked at here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ftkit.config.wording import counted
from ftkit.engine.checkpoint.finite import is_finite
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.memory.flat_file import PIECE_NUMEL
from ftkit.engine.model import ShardedModel
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError

FIRST_ROOM = 1024
"""Steps that a record has room for at first; it doubles."""


@dataclass(frozen=True)
class Before:
    """The steps that a checkpoint was made of.

    Args:
        steps: number of the steps.
        broken: number of steps whose loss was not finite.
        last: whether the last step is one of these; a step that fp16's loss scale skipped does not count.
    """

    steps: int = 0
    broken: int = 0
    last: bool = False


class LossRecord:
    """The steps of one call of `train`, and which of them had a loss on this rank that was not finite.

    Attributes:
        steps: number of steps of this call.
        before: the steps that this call was resumed from.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.before = Before()
        self._step: int | None = None
        self._broken: Tensor | None = None  # a bool a step, on the device

    def note(self, step: int, loss: Tensor) -> None:
        """Take the loss of a micro-batch of a step. Cost: two small operations on the device, and a byte a step."""
        broken = ~loss.detach().isfinite().all()
        if self._broken is None:
            self._broken = torch.zeros(FIRST_ROOM, dtype=torch.bool, device=broken.device)
        if step != self._step:
            self.steps, self._step = self.steps + 1, step
            if self.steps > len(self._broken):
                self._broken = torch.cat([self._broken, torch.zeros_like(self._broken)])
        self._broken[self.steps - 1] |= broken

    def broken(self, comm: Communicator) -> list[bool]:
        """Return for each step whether the loss of any rank was not finite: what is logged is their mean. A collective."""
        own = b"" if self._broken is None else bytes(self._broken[: self.steps].tolist())
        return [any(ranks) for ranks in zip(*comm.all(own))]

    def noted(self, comm: Communicator, *, skips: bool) -> dict[str, Any]:
        """Return what a checkpoint notes, so that a run in several parts is judged as a whole. A collective.

        Args:
            comm: the ranks.
            skips: whether the last step was skipped because its gradients were not finite (fp16's loss scale).
        """
        broken = self.broken(comm)
        last = broken[-1] and not skips if broken else self.before.last
        return asdict(Before(self.before.steps + len(broken), self.before.broken + sum(broken), last))

    def take(self, noted: Any, where: str) -> None:
        """Take what a checkpoint notes; one of an earlier version notes nothing.

        Args:
            noted: what the checkpoint notes.
            where: where the note stands, for messages.

        Raises:
            UserError: if it is not what `noted` gives.
        """
        fields = noted if isinstance(noted, dict) else {}
        counts: Any = fields.get("steps"), fields.get("broken")
        if fields.keys() != {"steps", "broken", "last"} or not all(type(n) is int and n >= 0 for n in counts):
            raise UserError(f"{where}: the numbers of its losses are not numbers")
        self.before = Before(counts[0], counts[1], last=fields["last"] is True)

    def judged(self, broken: Sequence[bool], *, skips: bool) -> str | None:
        """Return what is wrong with how the steps ended, those before this call too; None if nothing is.

        Args:
            broken: for each step whether its loss was not finite on any rank, as `broken` returns it.
            skips: see `noted`.
        """
        last = broken[-1] and not skips if broken else self.before.last
        return verdict(self.before.broken + sum(broken), self.before.steps + len(broken), last=last)


def judged_by_log(history: Sequence[Mapping[str, Any]], after: int) -> str | None:
    """Return what is wrong with the losses that a Trainer has logged, or their mean where it logged none; else None.

    This is for losses that no record has seen: those of a subclass's own `training_step`, and of another process.

    Args:
        history: lines of the Trainer's log. Lines without a learning rate are a user's own, and their loss is passed over.
        after: step after which lines count.
    """
    lines = [line for line in history if isinstance(step := line.get("step"), int) and step > after]
    losses = [line["loss"] for line in lines if "loss" in line and "learning_rate" in line]
    losses = losses or [line["train_loss"] for line in lines if "train_loss" in line]
    broken = [loss is None or not math.isfinite(loss) for loss in losses if loss is None or isinstance(loss, (int, float))]
    if not broken or (not broken[-1] and 2 * sum(broken) <= len(broken)):
        return None
    which = "the last loss" if broken[-1] else f"{sum(broken)} of {len(broken)} losses"
    return f"training failed: {which} in the log {'is' if broken[-1] else 'are'} not finite"


def verdict(broken: int, steps: int, *, last: bool) -> str | None:
    """Return what is wrong with a run of so many steps, or None.

    Args:
        broken: number of steps whose loss was not finite.
        steps: number of steps.
        last: whether the last step is one of the broken ones, and counts.
    """
    if not last and 2 * broken <= steps:
        return None
    when = "at the last step, " if last else ""
    return f"training failed: the loss was not finite {when}in {broken} of {counted(steps, 'step')}"


def made_no_update(optimizer: ShardedOptimizer, steps: int) -> str | None:
    """Return what is wrong with a run of so many steps that has never changed a weight, or None.

    A short run may end while the loss scale of fp16 still comes down from 2^16: each of its steps was warned of.
    """
    if not steps or any(count for line in optimizer.states.values() for count in line.steps):
        return None
    scale = optimizer.loss_scale
    if scale.dynamic and scale.skipped_steps and scale.value > 1.0:
        return None
    why = "in fp16 their gradients were not finite, however small the loss scale: compute in bf16 or fp32"
    why = why if scale.dynamic and scale.skipped_steps else "all were left out, or nothing had a gradient"
    return f"training failed: not one of {counted(steps, 'step')} made an update: {why}"


def weights_not_finite(units: ShardedModel, optimizer: ShardedOptimizer) -> list[str]:
    """Return the names of tensors that `save_model` would not write, alike on all ranks. A collective.

    Cost: one pass over each rank's weights.
    """
    optimizer.settle()
    stores = [(flat, optimizer.state_of(flat).master if flat.trainable else flat.weights) for flat in units.flats]
    own = {
        span.segment.name
        for flat, store in stores
        for span, values in flat.spans(store)
        for part in values.split(PIECE_NUMEL)
        if not is_finite(part.to(units.dtypes[span.segment.name]))
    }
    return sorted({name for names in units.comm.all(sorted(own)) for name in names})


def at_hand_not_finite(model: nn.Module, units: ShardedModel | None) -> list[str]:
    """Return the names of weights with which a forward would give NaN. A collective where there are units.

    Args:
        model: the model, with its weights.
        units: what `shard` made of it; None: it is whole.

    Cost: one pass over each rank's weights, as they are computed with.
    """
    if units is None:
        plain = (Tensor, nn.Parameter)  # others' classes, and what an offload has put on meta, cannot be asked
        known = [(name, values) for name, values in model.named_parameters() if type(values) in plain]
        dense = [(name, values) for name, values in known if values.layout == torch.strided and not values.is_meta]
        return sorted({name for name, values in dense if not is_finite(values.detach())})
    units.settle()
    pieces = ((span.segment.name, values) for flat in units.flats for span, values in flat.spans(flat.weights))
    own = {name for name, values in pieces if not is_finite(values)}
    return sorted({name for names in units.comm.all(sorted(own)) for name in names})
