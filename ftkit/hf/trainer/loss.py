"""The loss of a Trainer's step: on W ranks that of one rank.

One micro-batch of W ranks is their batches together, and its loss is what one rank would compute of all their rows. The
micro-batches of a step are added up as the stock Trainer adds them on one rank: equally where it divides by their number,
by label tokens where the model's loss is divided by `num_items_in_batch`. One case differs on purpose: a model that takes
`num_items_in_batch` and ignores it, and whose loss is a mean. The stock Trainer adds the means of micro-batches up, so that
accumulation multiplies the gradient; here the step's loss is the mean over all its rows or label tokens.

How a loss scales is found out at the first step (`loss_scaling`), or given by `ftkit={"loss_reduction": ...}`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ftkit.config.engine import EngineSettings
from ftkit.hf.models.head import adds_to_loss, only_loss, usable_loss
from ftkit.hf.reading import read_by_all
from ftkit.hf.trainer.accelerator import Accelerator
from ftkit.hf.trainer.loss_scaling import COUNTED, RANKS, ROWS, SUM, TOKENS, Scaling, Trial
from ftkit.hf.trainer.row_parts import IGNORED, can_split, rows_of, selected, token_labels, with_labels
from ftkit.hf.trainer.seeding import STEPS, SeededCollator, seeded
from ftkit.hf.trainer.untouched import untouched
from ftkit.spec.strategy import AUTO

logger = logging.getLogger(__name__)

TRIALS = 8
"""Batches by which rows and label tokens may be told apart, before the likelier of the two is taken for good."""


if TYPE_CHECKING:
    _Beside = transformers.Trainer  # every class that has the mixin has this as well
else:
    _Beside = object


class LossMixin(_Beside):
    """What `TrainerMixin` does with losses: finds out how they scale, weights ranks and micro-batches, seeds each.

    It stands between a Trainer and `TrainerMixin`; with `ftkit=None`, every override steps aside.
    """

    args: Any
    accelerator: Any
    model: Any
    state: Any

    _parts = 1  # into which blocks divide a rank's batch
    scaling: Scaling | None = None
    """How the loss scales, once that is known."""
    _trials = 0
    _trial_problem = ""  # why the last trial's loss could not be computed
    _trying = False  # whether the loss is computed for a trial
    _reached_stock = False  # whether the last loss was computed by the Trainer's own compute_loss
    _hides_count = False  # whether the Trainer's own loss is asked for without the count
    _was_counted = False  # whether the last loss was asked for with a count
    _predicting = False  # whether a batch is evaluated
    _outputs_unread = False  # whether nobody reads the outputs that are asked for with a loss
    _weights: Sequence[float] = ()  # of the step's micro-batches
    _place = (-1, 0)  # step and number of the last micro-batch
    _collator: SeededCollator | None = None

    # --- a training step

    @property
    def _has_parts(self) -> bool:
        """Whether a step's batch comes in several parts, of ranks or micro-batches."""
        return isinstance(self.accelerator, Accelerator) and (
            self.accelerator.num_processes > 1 or self.args.gradient_accumulation_steps > 1
        )

    def weighted(self, batches: list[Any]) -> list[Any]:
        """Return a step's batches without repeated samples, and note how much each counts. A collective.

        Args:
            batches: this rank's batches, as the loader gave them.
        """
        self._weights, self._place = (), (-1, 0)
        if not self._has_parts or not batches or not self._can_try():
            return batches
        scaling = self._scaling_by(batches[0])
        ranks = self.accelerator.num_processes
        last, empty = self._without_repeated(batches[-1], scaling)
        batches = [*batches[:-1], last]
        given = 1 / ranks if scaling.multiplied and not self._hides_count else 1.0
        if scaling.kind == SUM:
            self._weights = [0.0 if empty and each is last else given * ranks for each in batches]
        elif scaling.kind == RANKS or (not self.args.average_tokens_across_devices and scaling.kind != ROWS):
            self._weights = [1.0 if scaling.kind == COUNTED else given] * len(batches)
        elif scaling.kind == COUNTED:
            self._weights = [given if scaling.partly else given * ranks] * len(batches)
        else:
            counts = [scaling.count(each, self.label_names) for each in batches]
            counts[-1] = 0 if empty else counts[-1]
            comm = self.accelerator.sharded(self.model).comm
            totals = comm.totals(torch.tensor(counts, dtype=torch.float32, device=comm.device))
            self._weights = [given * weight for weight in self._shares(counts, totals)]
            if scaling.kind == TOKENS:  # where no rank has a label, the mean is no number, as on one rank
                known = zip(batches, counts, totals, strict=True)
                batches = [_with_one_label(each) if total and not count else each for each, count, total in known]
        return batches

    def _shares(self, counts: Sequence[int], totals: list[float]) -> list[float]:
        """Return the factors of this rank's means that make the mean over all ranks' rows or tokens.

        Args:
            counts: number of rows or tokens in each micro-batch of this rank.
            totals: for each micro-batch, the number in that of all ranks together.
        """
        if self._hides_count and self.loss_is_scaled_for_ga is False:  # the Trainer divides by the number of micro-batches
            totals = [sum(totals) / len(totals)] * len(totals)
        ranks = self.accelerator.num_processes
        return [ranks * count / total if total else 1.0 for count, total in zip(counts, totals, strict=True)]

    @property
    def _partly(self) -> bool:
        return self.scaling is not None and self.scaling.partly

    def _as_if_alone(self) -> AbstractContextManager[None]:
        """Tell a loss of which a part does not depend on the count that there is one rank: nothing is multiplied."""
        return self.accelerator.telling_ranks(1) if self._partly else nullcontext()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Do the Trainer's forward and backward, with the weight and the random numbers of this micro-batch."""
        if not self._has_parts:
            return super().training_step(model, inputs, num_items_in_batch)
        step, number = self.state.global_step, self._place[1] + 1 if self._place[0] == self.state.global_step else 0
        self._place = (step, number)
        weight = self._weights[number] if number < len(self._weights) else None
        if self._partly and num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch / self.accelerator.num_processes
        place = number * self.accelerator.num_processes + self.accelerator.process_index
        self.accelerator.loss_weight = weight
        try:
            draws = seeded(self.accelerator.device, STEPS, self.args.seed, step, place, together=number)
            with draws, self._as_if_alone():
                loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.accelerator.loss_weight = None
        return loss if weight is None else loss * weight

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as the Trainer does; a mean that ignores `num_items_in_batch` without it.

        The Trainer would multiply such a mean by the ranks, and not divide it by the micro-batches of a step. Where the loss
        is all that is wanted, the model may make it without its logits.
        """
        stock: Any = super().compute_loss
        plain = stock.__func__ is transformers.Trainer.compute_loss
        engine = isinstance(self.accelerator, Accelerator)
        self._reached_stock = self._reached_stock or plain
        hides = engine and plain and not self._trying and self._hides_count
        self._was_counted = num_items_in_batch is not None and not hides
        nothing_else = plain and engine and not (self.label_smoother or self.compute_loss_func)
        with only_loss(self.model, wanted=nothing_else and (not return_outputs or self._outputs_unread)):
            asked = {"return_outputs": True} if return_outputs else {}  # as the Trainer asks: a user's may know no more
            return stock(model, inputs, **asked, num_items_in_batch=None if hides else num_items_in_batch)

    # --- how the loss scales

    def _can_try(self) -> bool:
        """Whether batches come to the model as the loader gives them: TRL's online trainers generate from them first."""
        definers = [each for each in type(self).__mro__ if "_prepare_inputs" in vars(each)]
        return not any(each.__module__.startswith("trl.") for each in definers)

    def _scaling_by(self, batch: Any) -> Scaling:
        """Return how the loss scales; found by this batch if it is not known. A collective."""
        if self.scaling is None or not self.scaling.certain:
            found = self._found(batch)
            if found is None:
                return Scaling(RANKS)
            self.scaling = found
        return self.scaling

    def _found(self, batch: Any) -> Scaling | None:
        """Return how the loss scales; None where this batch cannot tell, because no row of any rank has a label."""
        reduction = EngineSettings.of(self.args.ftkit).strategy.loss_reduction
        units = self.accelerator.sharded(self.model)
        comm = units.comm
        stock = _definer(type(self), "compute_loss") is LossMixin and self._is_stock_beneath()
        averaged, added = self.args.average_tokens_across_devices, adds_to_loss(self.model)
        if stock and not self.label_smoother and not self.compute_loss_func and usable_loss(self.model) is not None:
            return Scaling(COUNTED, multiplied=averaged and not added, partly=averaged and added)
        rows = rows_of(batch, self.label_names)
        if self._parts > 1 and can_split(batch, rows):  # as much as fits a forward
            batch = selected(batch, range(max(1, rows // self._parts)), rows)
        given = self._prepare_inputs(copy(batch))
        known = isinstance(given, Mapping)
        if not all(comm.all(known)):
            return Scaling(RANKS)
        if not any(comm.all(_may_have_a_label(given))):
            return None
        dtype = units.compute_dtype or next(iter(units.dtypes.values()))
        shifts = bool(getattr(self, "_loss_shifts_labels", False))
        counting = bool(self.model_accepts_loss_kwargs or self.compute_loss_func)
        trial = Trial(self._tried_loss, comm, self.label_names, shifts, counting, dtype)
        before = self.scaling
        if before is None:
            self._reached_stock = False
            counted, multiplied, partly = trial.counts(given)
            if counted and stock and added:  # which may be less than a trial can tell
                multiplied, partly = False, True
            if counted and reduction in (AUTO, COUNTED):
                return Scaling(COUNTED, multiplied=multiplied, partly=partly and averaged)
        else:
            multiplied = before.multiplied
        if reduction != AUTO:
            found = Scaling(reduction, shifted=shifts)
        else:
            self._trial_problem = ""
            found = trial.kind(given)
            self._trials += 1
            self._tell_trial(found)
        found = replace(found, multiplied=multiplied, certain=found.certain or self._trials >= TRIALS)
        if self._reached_stock and found.kind not in (COUNTED, SUM):
            self._hides_count = True
            if self.loss_is_scaled_for_ga is None:
                self.loss_is_scaled_for_ga = False
        if found.kind == RANKS and reduction == AUTO and comm.world_size > 1 and comm.rank == 0:
            logger.warning(
                "the loss of this batch is neither a sum nor a mean of the losses of its parts (negatives from the batch, "
                "class weights, inputs that cannot be split): the loss of %d ranks is the mean of theirs, as under DDP. If "
                "it is a sum or a mean, say so: ftkit={'loss_reduction': 'sum', 'mean-rows' or 'mean-tokens'}",
                comm.world_size,
            )
        return found

    def _tell_trial(self, found: Scaling) -> None:
        """Say once that how the loss scales was guessed, because a loss of the user's cannot be tried. A collective."""
        comm = self.accelerator.sharded(self.model).comm
        problems = [each for each in comm.all(self._trial_problem) if each]
        if problems and not found.certain and self._trials == 1 and comm.rank == 0:
            logger.warning(
                "how the loss scales with its batch was not found, because it cannot be computed without gradients (%s): it "
                "is taken for %s. If it is something else, say so: ftkit={'loss_reduction': 'sum', 'mean-rows', "
                "'mean-tokens' or 'mean-ranks'}",
                problems[0].splitlines()[0],
                found.kind,
            )

    def _is_stock_beneath(self) -> bool:
        stock: Any = super().compute_loss
        return stock.__func__ is transformers.Trainer.compute_loss

    def _tried_loss(self, batch: Mapping[str, Any], count: Tensor | None, ranks: int | None = None) -> float:
        """Return the loss of a batch, leaving no trace; NaN where it cannot be computed. See `loss_scaling.Loss`."""
        things = [self, self.state, self.accelerator, *([self.compute_loss_func] if self.compute_loss_func else [])]
        self._trying, reached, problem = True, self._reached_stock, ""
        told = nullcontext() if ranks is None else self.accelerator.telling_ranks(ranks)
        with untouched(self.model, self.accelerator.device, *things), told:
            try:
                with read_by_all(self), self.compute_loss_context_manager():
                    loss = self.compute_loss(self.model, dict(batch), num_items_in_batch=count)
                value = float(loss.detach().float().mean())
            except torch.OutOfMemoryError:
                raise
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                logger.debug("the loss of a trial batch: %s", problem)
                value = math.nan
            reached = reached or self._reached_stock
        self._trying, self._reached_stock, self._trial_problem = False, reached, problem
        return value

    # --- samples that are repeated to fill the last batch

    def _without_repeated(self, batch: Any, scaling: Scaling) -> tuple[Any, bool]:
        """Return a batch without the samples that fill it up, and whether nothing of it is this rank's.

        A rank must compute as many batches as the others: of one that has repeated samples only, one is left.
        """
        rows = rows_of(batch, self.label_names)
        left = rows_left(self.accelerator, rows)
        if not left or scaling.kind == RANKS:
            return batch, False
        own = min(max(left - self.accelerator.process_index * rows, 0), rows)
        if scaling.kind in (COUNTED, TOKENS) and torch.is_tensor(batch.get("labels")):
            of_rank = not own and not self.args.average_tokens_across_devices  # a mean of this rank's, and it has no other
            return (batch, False) if own == rows or of_rank else (_without_labels(batch, own), own == 0)
        if own == rows or not can_split(batch, rows):
            return batch, False
        return selected(batch, range(max(own, 1)), rows), own == 0

    # --- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **others: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch as one rank would evaluate the batches of all ranks: its loss is that of their rows together."""
        ranks = self.accelerator.num_processes if isinstance(self.accelerator, Accelerator) else 1
        if ranks == 1 or not self._can_try() or not self._gives_loss(inputs):
            return self._predict(model, inputs, prediction_loss_only, ignore_keys, **others)
        scaling = self._scaling_by(inputs)
        own, empty = self._without_repeated(inputs, scaling)
        rows, kept = rows_of(inputs, self.label_names), rows_of(own, self.label_names)
        if any(self.accelerator.sharded(self.model).comm.all(kept != rows)):  # the outputs must have the others' shape
            loss, _, _ = self._predict(model, own, True, ignore_keys, **others)
            logits = labels = None
            if not prediction_loss_only:
                _, logits, labels = self._predict(model, inputs, False, ignore_keys, **others)
        else:
            loss, logits, labels = self._predict(model, own, prediction_loss_only, ignore_keys, **others)
        if loss is not None:
            loss = self._loss_of_all(loss, own, empty, scaling)
        return loss, logits, labels

    def _predict(self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None, **others: Any) -> Any:
        plain = _definer(type(self), "compute_loss") is LossMixin  # somebody else's may look at the outputs
        self._was_counted, self._outputs_unread, self._predicting = not plain, loss_only and plain, True
        try:
            with self._as_if_alone():
                return super().prediction_step(model, inputs, loss_only, ignore_keys, **others)
        finally:
            self._outputs_unread = self._predicting = False

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the count that the Trainer takes; in evaluation this rank's share of it, where `Scaling.partly` says so."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        if count is None or not (self._predicting and self._partly):
            return count
        return count / self.accelerator.sharded(self.model).comm.world_size

    def _loss_of_all(self, loss: Tensor, batch: Any, empty: bool, scaling: Scaling) -> Tensor:
        """Return the loss of all ranks' batches from that of this rank's. A collective."""
        ranks = self.accelerator.num_processes
        given = 1 / ranks if scaling.multiplied and self._was_counted else 1.0
        if scaling.kind == COUNTED and not self._was_counted:  # Seq2SeqTrainer evaluates without the count
            scaling = Scaling(TOKENS, shifted=bool(getattr(self, "_loss_shifts_labels", False)))
        if scaling.kind == RANKS or (scaling.kind != ROWS and not self.args.average_tokens_across_devices):
            return loss
        if scaling.partly:
            return self.accelerator.reduce(loss, "mean")
        if scaling.is_mean:
            count = 0 if empty else scaling.count(batch, self.label_names)
            comm = self.accelerator.sharded(self.model).comm
            total = comm.totals(torch.tensor([float(count)], device=comm.device))[0]
            weight = given * ranks * count / total if total else given
        else:
            weight = 0.0 if empty and scaling.kind == SUM else given * ranks
        return self.accelerator.reduce(loss * weight if weight else torch.zeros_like(loss), "mean")

    def _gives_loss(self, inputs: Any) -> bool:
        """Return whether the Trainer computes a loss of a batch in evaluation."""
        if not isinstance(inputs, Mapping):
            return False
        if not self.label_names:
            return bool(inputs.get("return_loss", self.can_return_loss))
        return all(inputs.get(name) is not None for name in self.label_names)

    # --- random numbers of collators

    def get_train_dataloader(self) -> DataLoader:
        """Return the Trainer's loader; a collator that draws does so by the number of the batch, not by the rank."""
        loader = super().get_train_dataloader()
        base = getattr(loader, "base_dataloader", loader)  # inside accelerate's
        if self._has_parts and isinstance(base, DataLoader) and not isinstance(base.collate_fn, SeededCollator):
            one = isinstance(loader, DataLoaderDispatcher)  # rank 0 makes all ranks' batches
            rank, ranks = (0, 1) if one else (self.accelerator.process_index, self.accelerator.num_processes)
            shared = base.num_workers > 0
            base.collate_fn = self._collator = SeededCollator(base.collate_fn, self.args.seed, rank, ranks, shared=shared)
        return loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does, and number its batches from where it is resumed."""
        if self._collator is not None:
            epoch, skipped = kwargs["epoch"], 0
            loader = kwargs["train_dataloader"]
            resumed = kwargs["resume_from_checkpoint"] is not None and epoch == kwargs["epochs_trained"]
            if resumed and not self.args.ignore_data_skip and not isinstance(loader.dataset, IterableDataset):
                skipped = kwargs["steps_trained_in_current_epoch"]
            self._collator.begin(epoch, skipped)
        super()._run_epoch(*args, **kwargs)


def rows_left(accelerator: Any, rows: int) -> int:
    """Return how many samples all ranks' present batches of `rows` hold, if they are an epoch's last and are not full.

    0 otherwise, and where it cannot be told (a stream that each rank reads, samples laid end to end in one row): there
    repeated samples count, as in the Trainer.
    """
    state = accelerator.gradient_state
    if not state.end_of_dataloader or accelerator.num_processes == 1:
        return 0
    loader, ranks, split = state.active_dataloader, accelerator.num_processes, False
    if isinstance(loader, DataLoaderDispatcher):  # rank 0 reads for all, and knows how many it read
        return int(loader.remainder) if 0 < loader.remainder < rows * ranks else 0
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # accelerate's shard, and what skips batches after a resume
        split = split or getattr(sampler, "split_batches", False)
        sampler = sampler.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler or sampler.drop_last:
        return 0
    samples = sampler.batch_size if split else sampler.batch_size * ranks
    return len(cast(Sized, sampler.sampler)) % samples if rows * ranks == samples else 0


def _without_labels(batch: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return the batch with the labels of its rows from `first` on masked."""
    labels = batch["labels"].clone()
    labels[first:] = IGNORED
    return with_labels(batch, labels)


def _may_have_a_label(batch: Mapping[str, Any]) -> bool:
    labels = token_labels(batch)
    return labels is None or bool(labels.ne(IGNORED).any())


def _with_one_label(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without label tokens with one: a mean over none is no number, and the weight of this one is 0."""
    labels = batch["labels"].clone()
    labels.view(-1)[-1] = 0
    return with_labels(batch, labels)


def _definer(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in vars(each))
