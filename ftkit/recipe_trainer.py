"""The Trainer of a recipe: the recipe's order of samples, and a loss for each held-out row.

Two things differ from `ftkit.Trainer`. Samples come in the order of the prepared data, a function of (seed, epoch)
alone, and each epoch ends with a whole step: rows that would start another are left to the next epoch's shuffle, so
that no sample is seen twice to fill a batch and a step has the same samples on any number of ranks. And evaluation
reduces the logits to three numbers a row (`held_out`) where they arise.

It refuses data with fewer samples than a step. What it costs: up to one step's rows are left out of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftkit.errors import UserError
from ftkit.held_out import HeldOut, row_statistics, write_rows
from ftkit.hf.trainer import Trainer
from ftkit.words import counted


class WholeSteps(torch.utils.data.Sampler):
    """An order of samples, cut to a whole number of steps.

    Args:
        order: Yields sample numbers; has `set_epoch`.
        step_sequences: Sequences of one optimizer step, all ranks together.

    Raises:
        UserError: There are fewer samples than one step takes.
    """

    def __init__(self, order: Any, step_sequences: int):
        if len(order) < step_sequences:
            raise UserError(
                f"the data gave {counted(len(order), 'sequence')} and one step takes {step_sequences} (train.batch_tokens / "
                "data.sequence_tokens); lower train.batch_tokens or add data"
            )
        self.order, self.step_sequences = order, step_sequences

    def __len__(self) -> int:
        return len(self.order) // self.step_sequences * self.step_sequences

    def __iter__(self) -> Iterator[int]:
        numbers = iter(self.order)
        return (next(numbers) for _ in range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.order.set_epoch(epoch)


class RecipeTrainer(Trainer):
    """`ftkit.Trainer` with the recipe's order of samples and a loss for each held-out row.

    Args:
        order: Order of the training samples, or None to evaluate only.
        step_sequences: Sequences of one optimizer step, all ranks together.
        metrics: Names from the recipe's `eval.metrics`.
        seq2seq: The model is an encoder-decoder.
        per_example: Where the loss of each held-out row before training is kept, for a run that is resumed.
    """

    def __init__(
        self,
        *args: Any,
        order: Any,
        step_sequences: int,
        metrics: tuple[str, ...],
        seq2seq: bool,
        per_example: Path,
        **kwargs: Any,
    ):
        super().__init__(*args, compute_metrics=self._note_held_out, **kwargs)
        self.order = WholeSteps(order, step_sequences)
        self.wanted_metrics, self.seq2seq, self.per_example = metrics, seq2seq, per_example
        self.held_out: list[HeldOut] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> WholeSteps:
        return self.order

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, with the order also where the epoch is set after a resume in mid-epoch.

        Skipping batches wraps the ranks' shard of the batches once more; accelerate then looks for the sampler on the
        shard, which has none of its own, and the order would stay that of epoch 0.
        """
        loader = super().get_train_dataloader()
        loader.set_sampler(self.order)
        return loader

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss, and per row the three numbers of `row_statistics` in place of logits and labels."""
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys=ignore_keys)
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        statistics = row_statistics(logits, labels, shifted=not self.seq2seq)
        return loss, statistics, statistics[:, 1:2]

    def _note_held_out(self, prediction: Any) -> dict[str, float]:
        numbers = np.asarray(prediction.predictions, dtype=np.float64)
        counts = np.rint(numbers[:, 1:]).astype(np.int64)
        noted = HeldOut(self.state.global_step, numbers[:, 0], counts[:, 0], counts[:, 1])
        self.held_out.append(noted)
        if noted.step == 0 and self.is_world_process_zero():
            write_rows(self.per_example, noted, None)
        return noted.metrics(self.wanted_metrics)

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank; a collective, once the model is in place."""
        return self.units.comm.any(flag)

    def all_ranks(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; a collective, once the model is in place."""
        return self.units.comm.all(value)

    def loss_scale(self) -> float | None:
        """Return the loss scale of fp16, or None where losses are not scaled."""
        scale = self.sharded_optimizer.loss_scale
        return scale.value if scale.dynamic else None
