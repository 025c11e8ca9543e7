"""Overflow in fp16 during a Trainer's run.

A step whose gradients are not finite is skipped, and the loss scale is halved. `ShardedOptimizer.overflowed` names the
flat parameters without finite gradients. Backward goes from the last unit to the first, so the overflow began in the last
of them. If no unit has finite gradients, the forward may have overflowed, which no loss scale can fix: the step's batches
are searched again for fp32 modules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ftkit.errors import UserError
from ftkit.hf.fp16.search import BATCHES, find_fp32_modules, taken_by, widens_inputs

logger = logging.getLogger(__name__)

FP32_MODULES = "islands"  # checkpoints of the first format have this name
"""Key of the fp32 modules in a checkpoint's notes."""


def began_in(overflowed: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the one of `names`, in forward order, in whose backward an overflow began; None if all have overflowed."""
    return None if set(overflowed) >= set(names) else max(overflowed, key=names.index)


class OverflowScan:
    """A Trainer's search for overflow: on its first batches, and after a skipped step. Without fp16 nothing is searched."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.overflows: list[tuple[int, str]] = []  # step, and where the overflow began
        self._batches: Sequence[Any] = ()  # of the present step
        self._looked = False  # whether this run, or the one that it resumes, has searched its first batches

    @property
    def is_on(self) -> bool:
        """Whether the model is sharded and computes in fp16."""
        units = self.trainer.units if self.trainer.engine_is_on else None
        return units is not None and units.compute_dtype == torch.float16

    def before_step(self, batches: Sequence[Any]) -> None:
        """Take the batches of the next step, and search those of the first step. A collective."""
        self._batches = batches
        self.look(batches[:BATCHES])

    def look(self, batches: Iterable[Any]) -> None:
        """Search the run's first batches, once. A collective.

        Raises:
            UserError: The forward is not finite, and fp32 modules do not help.
            DoesNotFit: The fp32 inputs of blocks do not fit.
        """
        if self._looked or not self.is_on:
            return
        self._looked = True
        if not self.find(self._inputs_of(batches)):
            raise UserError(
                "fp16: the model's forward on the first batches is not finite, and computing parts of it in fp32 does not "
                "help. Compute in bf16 or fp32 (train.dtype, or ftkit={'dtype': ...}), or check the weights"
            )
        units = self.trainer.engine
        if units.plan is not None and widens_inputs(units):
            units.plan.check_wide_inputs()

    def after_step(self) -> None:
        """Log where a skipped step overflowed. If its forward did, make fp32 modules. A collective then."""
        optimizer, step = self.trainer.engine_optimizer, self.trainer.state.global_step
        if not (self.is_on and optimizer.step_was_skipped and optimizer.overflowed):
            return
        units, finite = self.trainer.engine, True
        unit = began_in(optimizer.overflowed, [flat.name for flat in units.trainable])
        where = f"in the backward of {unit}"
        if unit is None:
            finite = self.find(self._inputs_of(self._batches))
            module = units.fp32_modules.overflowed
            where = f"in the forward of {module}" if module else "at once in all units: the loss, or its gradient"
        self.overflows.append((step, where))
        if units.comm.rank == 0:
            scale = optimizer.loss_scale.value
            logger.warning("step %d: overflow %s; it is skipped, the loss scale is %g now", step, where, scale)
            if not finite:
                logger.warning("fp16: that forward is not finite in fp32 either")

    def find(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Make and log fp32 modules; return whether the forward of `_inputs_of` is finite with them. A collective."""
        units = self.trainer.engine
        before, loud = units.fp32_modules.found, units.comm.rank == 0
        if not batches:
            if loud:
                logger.warning("fp16: the overflow scan was skipped: the keys of a batch do not match the model's forward()")
            return True
        found = find_fp32_modules(units, batches)
        if loud:
            level = logging.WARNING if found.found != before else logging.INFO
            logger.log(level, "fp16: fp32 modules: %s", found.describe())
        return found.finite

    def _inputs_of(self, batches: Iterable[Any]) -> list[Any]:
        """Return the batches that the model itself takes, on its device: of each as much as fits one forward."""
        taken, parts = set(taken_by(self.trainer.model)), self.trainer.engine.strategy.parts
        given = [self.trainer._prepare_inputs(_first_part(batch, parts)) for batch in batches if isinstance(batch, Mapping)]
        return [each for each in given if each.keys() <= taken]

    # --- checkpoints

    def noted(self) -> dict[str, Any]:
        """Return the fp32 modules, as a checkpoint's notes for `restore`."""
        return {FP32_MODULES: {"found": self.trainer.engine.fp32_modules.found}} if self.is_on else {}

    def restore(self, noted: dict[str, Any]) -> None:
        """Remove the fp32 modules from a checkpoint's notes, and make them again.

        Raises:
            UserError: The notes name a module that the model has not.
        """
        given = noted.pop(FP32_MODULES, None)
        if given is None or not self.is_on:
            return
        self._looked, units = True, self.trainer.engine
        if given["found"]:
            units.fp32_modules.apply(units.model, given["found"])


def _first_part(batch: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """Return the first of the parts into which blocks divide a batch."""
    tensors = {key: each for key, each in batch.items() if torch.is_tensor(each) and each.dim()}
    rows = max(map(len, tensors.values()), default=0)
    return {**batch, **{key: each.tensor_split(parts)[0] for key, each in tensors.items() if len(each) == rows}}
