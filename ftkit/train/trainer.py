"""The Trainer of a recipe: whole steps in the recipe's order, and a loss for each held-out row.

The order of samples depends on (seed, epoch) alone. An epoch ends with a whole step: no sample is seen twice to fill a
batch, and a step has the same samples on any number of ranks. Evaluation keeps three numbers per row (`HeldOut`). The loss
of a step is known before its update, with the places of its samples, so that `DivergenceWatch` can judge it.

Cost: up to one step of rows is left out of each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import torch
from transformers import TrainerCallback

from ftkit.config.optimizer import Group
from ftkit.config.wording import counted
from ftkit.data.tokenize import IGNORED_LABEL
from ftkit.errors import UserError
from ftkit.hf.fp16.search import BATCHES
from ftkit.hf.generate.evaluation import row_statistics
from ftkit.hf.kernels.attention import is_packed
from ftkit.hf.kernels.head import usable_loss
from ftkit.hf.trainer.optimizers import optimizer_by_name
from ftkit.hf.trainer.trainer import Trainer
from ftkit.output.run_folder import RunFolder
from ftkit.plan.plan import Plan
from ftkit.train.divergence import LossWindow
from ftkit.train.groups import split_groups
from ftkit.train.held_out import HeldOut, write_rows


class WholeSteps(torch.utils.data.Sampler):
    """An order of samples, cut to whole steps of `step_sequences` sequences, all ranks together.

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
        return islice(iter(self.order), len(self))


class NoSteps(TrainerCallback):
    """End training before its first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave no steps to make."""
        state.max_steps = state.global_step


class RecipeTrainer(Trainer):
    """`ftkit.Trainer` with the recipe's order of samples and a loss for each held-out row.

    Args:
        order: Order of the training samples (`StepOrder`).
        step_sequences: See `WholeSteps`.
        metrics: Names of the recipe's metrics.
        seq2seq: Whether the model is an encoder-decoder.
        groups: The recipe's `optimizer.groups`.
        noted: Notes about the run that each checkpoint stores.
        plan: How memory is used. None lets the Trainer plan.

    Attributes:
        held_out: Results of the evaluations of this process.
        answers: Answers to the sample prompts (`ShowAnswers`), which each checkpoint stores.
        losses: Losses of the last steps.
    """

    def __init__(
        self,
        *args: Any,
        order: Any,
        step_sequences: int,
        metrics: tuple[str, ...],
        seq2seq: bool,
        groups: Sequence[Group],
        noted: Mapping[str, Any],
        plan: Plan | None = None,
        **kwargs: Any,
    ):
        self.plan = plan  # the accelerator reads it while the Trainer is built
        super().__init__(*args, compute_metrics=self._note_held_out, **kwargs)
        self.order = WholeSteps(order, step_sequences)
        self.pad_token_id: int = cast(Any, self.data_collator).pad_token_id
        self.wanted_metrics, self.seq2seq = metrics, seq2seq
        self.groups = groups
        self.held_out: list[HeldOut] = []
        self.answers: list[dict[str, Any]] = []
        self.losses = LossWindow()
        self._step_loss: float | torch.Tensor = 0.0
        self._noted = noted

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Begin as the Trainer does, but log, evaluate and save as often as this recipe says, not the checkpoint."""
        trained = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return trained

    def restore(self, checkpoint: str) -> None:
        """Load model, optimizer and schedule of a checkpoint, and train nothing."""
        self.add_callback(NoSteps)
        self.train(resume_from_checkpoint=checkpoint)
        self.remove_callback(NoSteps)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return the recipe's optimizer, also without the engine."""
        return optimizer_by_name(args)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer as the Trainer does, then give the recipe's groups their own settings."""
        made_before = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if self.groups and not made_before:
            split_groups(optimizer, self.model, self.groups)
        return optimizer

    # --- samples

    def _get_train_sampler(self, train_dataset: Any = None) -> WholeSteps:
        return self.order

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop:  # early stopping, by the evaluations of the checkpoint
            return
        # After a resume inside an epoch, neither transformers nor accelerate finds the sampler behind the skipped batches.
        self.order.order.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def first_batches(self) -> list[Any]:
        """Return this rank's first batches of the first epoch, at most `BATCHES`, as the loader will give them."""
        size, ranks = self.args.per_device_train_batch_size, self.args.world_size
        numbers = list(islice(iter(self.order), min(BATCHES * size * ranks, self.order.step_sequences)))
        mine = [numbers[start : start + size] for start in range(self.args.process_index * size, len(numbers), size * ranks)]
        rows = cast(datasets.Dataset, self.train_dataset)
        return [self.data_collator([rows[int(number)] for number in each]) for each in mine]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count tokens as the Trainer does. A packed batch has boundaries as its mask: count what is not padding."""
        if is_packed(inputs.get("attention_mask")):
            mask = (inputs["input_ids"] != self.pad_token_id) | (inputs["labels"] != IGNORED_LABEL)
            inputs = {**inputs, "attention_mask": mask}
        super()._track_num_input_tokens(inputs)

    def places(self, step: int) -> tuple[str, ...]:
        """Return where the samples of a step are in the data, as `file:line`, in their order."""
        size = self.order.step_sequences
        epoch, number = divmod(step - 1, len(self.order) // size)
        drawn = self.order.order.order(epoch)[number * size : (number + 1) * size]
        rows = cast(datasets.Dataset, self.train_dataset)
        return tuple(rows[int(sample)]["place"] for sample in drawn)

    # --- the loss of a step

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Do the Trainer's forward and backward, and add the loss to that of the step."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = self._step_loss + loss
        return loss

    def step_loss(self) -> float:
        """Return the loss of the step whose backward is done, the mean over ranks. A collective, once per step."""
        own, self._step_loss = self._step_loss, 0.0
        comm = self.engine.comm
        total = comm.sum(torch.as_tensor(own, dtype=torch.float32, device=comm.device).clone())
        return float(total) / comm.world_size

    @property
    def noted(self) -> dict[str, Any]:
        """See `TrainerMixin.noted`: also the losses that the next step is compared with, and the answers so far."""
        return {**self._noted, "losses": list(self.losses.losses), "answers": deepcopy(self.answers)}

    def take_noted(self, path: Path, noted: dict[str, Any]) -> None:
        """Take the losses and the answers that a checkpoint stores."""
        self.losses, self.answers = LossWindow(noted.get("losses", [])), noted.get("answers", [])

    # --- evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **others: Any
    ) -> tuple[Any, Any, Any]:
        """Return the loss, and per row the three numbers of `row_statistics` in place of logits and labels."""
        chunked = None if self.label_smoother else usable_loss(self.model)
        if chunked is not None:  # the plan has no memory for logits
            with chunked.each_token() as tokens:
                loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys, **others)
            if tokens:
                return loss, tokens[-1].rows, tokens[-1].rows[:, 1:2]
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys, **others)
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        statistics = row_statistics(logits, labels, shifted=not self.seq2seq)
        return loss, statistics, statistics[:, 1:2]

    def _note_held_out(self, prediction: Any) -> dict[str, float]:
        held_out = HeldOut.of(self.state.global_step, np.asarray(prediction.predictions))
        self.held_out.append(held_out)
        if held_out.step == 0 and self.is_world_process_zero():
            write_rows(RunFolder(Path(self.args.output_dir)).per_example, held_out, None)
        return held_out.metrics(self.wanted_metrics)
