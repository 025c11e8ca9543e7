"""The callback of a Trainer on the engine."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ftkit.errors import UserError
from ftkit.hf.sharding import units_of


class EngineCheck(TrainerCallback):
    """Stop a run that asked for the engine and would train without it; finish checkpoints beside training."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare what will train with what was asked for."""
        optimizer = self.trainer.sharded_optimizer
        if units_of(self.trainer.model) is None or optimizer is None or optimizer.units.model is not self.trainer.model:
            raise UserError(
                "ftkit's engine was asked for (ftkit=...) but is not in place: a subclass overrides create_optimizer or the "
                "accelerator. Call super() there, or set ftkit=None"
            )
        self.trainer.checkpoints.check()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step that overflowed; publish a checkpoint that all ranks have written by now."""
        self.trainer.overflow_scan.after_step()
        self.trainer.checkpoints.finish(wait=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the checkpoint that is being written."""
        self.trainer.checkpoints.finish()
