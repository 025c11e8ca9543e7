"""The Trainer of a recipe: the recipe's order of samples, and a loss for each held-out row.

Three things differ from `ftkit.Trainer`. Samples come in the order of the prepared data, a function of (seed, epoch)
alone, and each epoch ends with a whole step: rows that would start another are left to the next epoch's shuffle, so
that no sample is seen twice to fill a batch and a step has the same samples on any number of ranks. Evaluation
makes three numbers a row (`held_out`) where the logits arise. And the loss of each step is at hand before its
update, with the places of its samples, for `divergence_callback`.

It refuses data with fewer samples than a step. What it costs: up to one step's rows are left out of an epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import torch

from ftkit.config.wording import counted
from ftkit.data.batches import Collator
from ftkit.data.packing import leaks, refuse_leak
from ftkit.data.tokenize import IGNORED_LABEL
from ftkit.errors import UserError
from ftkit.hf.fp16.search import BATCHES
from ftkit.hf.generate.evaluation import row_statistics
from ftkit.hf.kernels.attention import is_packed
from ftkit.hf.kernels.head import usable_loss
from ftkit.hf.trainer.trainer import Trainer
from ftkit.plan.choice import Plan
from ftkit.train.divergence import LossWindow
from ftkit.train.held_out import HeldOut, write_rows

logger = logging.getLogger(__name__)


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
        noted: What checkpoints note of the run.
        plan: How memory is used; None leaves it to the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        order: Any,
        step_sequences: int,
        metrics: tuple[str, ...],
        seq2seq: bool,
        per_example: Path,
        noted: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        **kwargs: Any,
    ):
        self.plan = plan  # the accelerator, which is made next, asks for it
        super().__init__(*args, compute_metrics=self._note_held_out, **kwargs)
        self.order = WholeSteps(order, step_sequences)
        self.wanted_metrics, self.seq2seq, self.per_example = metrics, seq2seq, per_example
        self.evaluated: dict[int, float] = {}  # step to held-out loss, of this run and of what it continues
        self.held_out: list[HeldOut] = []
        self.losses = LossWindow()
        self.left_out: frozenset[int] = frozenset()
        self._step_loss: float | torch.Tensor = 0.0
        self._noted = dict(noted or {})

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Begin as the Trainer does; how often to log, evaluate and save is this recipe's, not the checkpoint's."""
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return trained

    _only_restores = False

    def restore(self, checkpoint: str) -> None:
        """Bring model, optimizer and schedule of a checkpoint into memory, and train nothing."""
        self._only_restores = True
        try:
            self.train(resume_from_checkpoint=checkpoint)
        finally:
            self._only_restores = False

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does, unless nothing is to be trained."""
        if self._only_restores:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> WholeSteps:
        return self.order

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, with the order also where the epoch is set after a resume in mid-epoch.

        Skipping batches wraps the ranks' shard of the batches once more; accelerate then looks for the sampler on the
        shard, which has none of its own, and the order would stay that of epoch 0.
        """
        loader: Any = super().get_train_dataloader()
        loader.set_sampler(self.order)
        return loader

    # --- a step's loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Do the Trainer's forward and backward, unless the step is one of `left_out`: then its loss is no number."""
        if self.state.global_step + 1 in self.left_out:
            return torch.full((), math.nan, device=self.args.device)
        if not self._isolated:
            self._check_first(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = self._step_loss + loss
        return loss

    def first_batches(self) -> list[Any]:
        """Return this rank's first batches of the first epoch, a few, as the loader will give them."""
        size, ranks = self.args.per_device_train_batch_size, self.args.world_size
        numbers = list(islice(iter(self.order), min(BATCHES * size * ranks, self.order.step_sequences)))
        mine = [numbers[start : start + size] for start in range(self.args.process_index * size, len(numbers), size * ranks)]
        rows = cast(datasets.Dataset, self.train_dataset)
        return [self.data_collator([rows[int(number)] for number in each]) for each in mine]

    @property
    def pad_token_id(self) -> int:
        """The token with which this run's batches are padded."""
        return cast(Collator, self.data_collator).pad_token_id

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count as the Trainer does; of packed samples, whose mask says where they end, those that are no padding."""
        if is_packed(inputs.get("attention_mask")):
            pads = self.pad_token_id
            mask = (inputs["input_ids"] != pads) | (inputs["labels"] != IGNORED_LABEL)
            inputs = {**inputs, "attention_mask": mask}
        super()._track_num_input_tokens(inputs)

    _isolated = False  # whether the first batch was looked at

    def _check_first(self, inputs: Any) -> None:
        """Refuse packed samples that see each other, by the run's own first batch. A collective.

        Raises:
            UserError: naming the family and how much one sample moves the next.
        """
        self._isolated = True
        if "position_ids" in inputs:
            own = leaks(self.model, self._prepare_inputs(inputs))
            shares = self.all_ranks(own) if self.engine_is_on else [own]
            refuse_leak(self.model, max((share for share in shares if share is not None), default=0.0))

    def step_loss(self) -> float:
        """Return the loss of the step whose backward is done, the mean over ranks. A collective, once a step."""
        own, self._step_loss = self._step_loss, 0.0
        told = self.engine.comm.sum(torch.as_tensor(own, dtype=torch.float32, device=self.engine.comm.device).clone())
        return float(told) / self.engine.comm.world_size

    def places(self, step: int) -> tuple[str, ...]:
        """Return where the samples of a step stand in the data, in their order."""
        steps = len(self.order) // self.order.step_sequences
        epoch, number = divmod(step - 1, steps)
        first = number * self.order.step_sequences
        drawn = self.order.order.order(epoch)[first : first + self.order.step_sequences]
        rows = cast(datasets.Dataset, self.train_dataset)
        return tuple(rows[int(sample)]["place"] for sample in drawn)

    # --- checkpoints

    @property
    def noted(self) -> dict[str, Any]:
        """See `ftkit.Trainer.noted`: also the losses that the next step is judged by, and those of held-out rows."""
        evaluated = {str(step): loss for step, loss in self.evaluated.items()}
        return {**self._noted, "losses": list(self.losses.losses), "evaluated": evaluated}

    def take_noted(self, path: Path, noted: dict[str, Any]) -> None:
        """Take those losses.

        Raises:
            UserError: they are no numbers.
        """
        losses, evaluated = noted.get("losses", []), noted.get("evaluated", {})
        if not isinstance(losses, list) or not isinstance(evaluated, dict):
            raise UserError(f"{path}: its losses are not a list, or those of evaluations not an object")
        if not all(isinstance(loss, float) and math.isfinite(loss) for loss in (*losses, *evaluated.values())):
            raise UserError(f"{path}: its losses are not numbers")
        if not all(step.isdecimal() and len(step) < 16 for step in evaluated):
            raise UserError(f"{path}: its evaluations name no steps")
        self.losses = LossWindow(losses)
        self.evaluated = {int(step): loss for step, loss in evaluated.items()}

    # --- evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **others: Any
    ) -> tuple[Any, Any, Any]:
        """Return the loss, and per row the three numbers of `row_statistics` in place of logits and labels."""
        chunked = None if self.label_smoother else usable_loss(self.model)
        if chunked is not None:  # no logits: they are not in the plan
            with chunked.each_token() as tokens:
                loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys, **others)
            if tokens:
                return loss, tokens[-1].rows, tokens[-1].rows[:, 1:2]
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys, **others)
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        statistics = row_statistics(logits, labels, shifted=not self.seq2seq)
        return loss, statistics, statistics[:, 1:2]

    def _note_held_out(self, prediction: Any) -> dict[str, float]:
        numbers = np.asarray(prediction.predictions, dtype=np.float64)
        counts = np.rint(numbers[:, 1:]).astype(np.int64)
        noted = HeldOut(self.state.global_step, numbers[:, 0], counts[:, 0], counts[:, 1])
        self.held_out.append(noted)
        if math.isfinite(noted.loss):
            self.evaluated[noted.step] = float(noted.loss)
        if noted.step == 0 and self.is_world_process_zero():
            write_rows(self.per_example, noted, None)
        return noted.metrics(self.wanted_metrics)

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank; a collective, once the model is in place."""
        return self.engine.comm.any(flag)

    def all_ranks(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order; a collective, once the model is in place."""
        return self.engine.comm.all(value)

    def loss_scale(self) -> float | None:
        """Return the loss scale of fp16, or None where losses are not scaled."""
        scale = self.engine_optimizer.loss_scale
        return scale.value if scale.dynamic else None
