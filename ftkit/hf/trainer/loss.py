"""The loss of a Trainer's step on W ranks: that of one rank with all their rows.

The engine averages gradients over ranks, so each rank's loss needs a weight. A loss is one of five kinds:

    counted       divided by `num_items_in_batch`, the label tokens of all ranks and micro-batches. Each rank gets its share
                  of that count and computes as if it ran alone, since the Trainer would multiply by W. A part that does not
                  depend on the count (a router's balance, a penalty) is then averaged over ranks.
    mean-tokens   a mean over label tokens: weight W * n_r / sum(n_r)
    mean-rows     a mean over rows: the same with rows
    sum           a sum over rows: weight W
    mean-ranks    neither (negatives from the batch): weight 1, as in DDP

One probe of the first batch shows whether the loss is counted. Otherwise the labels decide: integers with a sequence
dimension make a mean over tokens, anything else a mean over rows. `ftkit={"loss_reduction": ...}` overrides both.

Micro-batches of one rank are added up as the stock Trainer adds them. One case differs on purpose: the loss of a model that
accepts `num_items_in_batch` and ignores it. The stock Trainer adds up the means of micro-batches; here the loss is the mean
over all rows or label tokens of the step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset
from transformers.trainer_utils import has_length

from ftkit.errors import UserError
from ftkit.hf.adapters import adds_to_loss
from ftkit.hf.generate.generation import evaluating
from ftkit.hf.kernels.head import usable_loss
from ftkit.hf.reading import read_by_all
from ftkit.hf.trainer.seeding import STEPS, seeded
from ftkit.spec.strategy import AUTO

logger = logging.getLogger(__name__)

COUNTED, SUM, ROWS, TOKENS, RANKS = "counted", "sum", "mean-rows", "mean-tokens", "mean-ranks"
IGNORED = -100
"""The label that no loss of transformers counts."""
REACTION = 1e-3
"""Relative change of a loss under another count that rounding does not explain."""


@dataclass(frozen=True)
class Reduction:
    """How a loss is reduced over its batch.

    Args:
        kind: counted | sum | mean-rows | mean-tokens | mean-ranks.
        shifted: Whether the first label of each row does not count, because nothing predicts it.
        label_names: Keys of the labels in a batch.
    """

    kind: str
    shifted: bool = False
    label_names: Sequence[str] = ("labels",)

    def count(self, batch: Any) -> int:
        """Return what the loss of a batch is a mean over: rows, or label tokens."""
        return rows_of(batch, self.label_names) if self.kind == ROWS else counted_labels(batch, shifted=self.shifted)


def by_labels(batch: Any, config: Any) -> str:
    """Return the reduction of a loss that is not counted, by the form of its labels.

    Args:
        batch: A batch of the loader.
        config: The model's configuration, or None. Speech models state the reduction of their CTC loss there.
    """
    of_speech = {"sum": SUM, "mean": ROWS}.get(getattr(config, "ctc_loss_reduction", None) or "")
    if of_speech is not None:
        return of_speech
    labels = token_labels(batch)
    return TOKENS if labels is not None and labels.dim() > 1 else ROWS


class LossOfRanks:
    """The losses of one Trainer: how they are reduced, and the weight of each on this rank.

    Attributes:
        reduction: How the loss is reduced; None until a batch with labels has shown it.
        takes_count: Whether the Trainer gives the loss a count.
        hides_count: Whether the Trainer's own loss is computed without the count, because the model ignores it.
        reached_stock: Whether the Trainer's own `compute_loss` computed the last loss.
        was_counted: Whether the last loss was computed with a count.
        weights: Weight of the loss of each micro-batch of the step.
        evaluated: Batches of the present evaluation.
        unlabelled: Those of them in which no rank has a label.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.reduction: Reduction | None = None
        self.takes_count = self.hides_count = self.reached_stock = self.was_counted = False
        self.weights: Sequence[float] = ()
        self.evaluated = self.unlabelled = 0

    @property
    def is_counted(self) -> bool:
        """Whether the loss is divided by `num_items_in_batch`."""
        return self.reduction is not None and self.reduction.kind == COUNTED

    @property
    def is_per_rank(self) -> bool:
        """Whether each rank's loss is a mean over its own labels."""
        return not self.trainer.args.average_tokens_across_devices

    @property
    def shifted(self) -> bool:
        """Whether the model's loss leaves out the first label of each row; transformers knows it of causal models."""
        return bool(getattr(self.trainer, "_loss_shifts_labels", False))

    def alone(self) -> AbstractContextManager[None]:
        """Report one rank to the code of a loss with a count: the Trainer would multiply it by the number of ranks."""
        return self.trainer.accelerator.with_num_processes(1) if self.takes_count else nullcontext()

    def share(self, count: Any) -> Any:
        """Return this rank's share of the count of all ranks, where the loss is divided by it."""
        if count is None or not self.is_counted or self.is_per_rank:
            return count
        return count / self.trainer.engine.comm.world_size

    # --- a training step

    def weigh(self, batches: list[Any]) -> list[Any]:
        """Return a step's batches without repeated rows, and set the weights of their losses. A collective.

        Args:
            batches: This rank's micro-batches, as the loader gave them.
        """
        trainer, comm = self.trainer, self.trainer.engine.comm
        reduction, ranks = self.reduction_by(batches[0]), comm.world_size
        last, empty = own_rows(batches[-1], trainer.accelerator, reduction, per_rank=self.is_per_rank)
        batches = [*batches[:-1], last]
        self.weights = [1.0] * len(batches)
        if reduction.kind == SUM:
            self.weights = [0.0 if empty and each is last else float(ranks) for each in batches]
        elif reduction.kind == ROWS or (reduction.kind == TOKENS and not self.is_per_rank):
            counts = [reduction.count(each) for each in batches]
            counts[-1] = 0 if empty else counts[-1]
            totals = comm.totals(torch.tensor(counts, dtype=torch.float32, device=comm.device))
            if reduction.kind == TOKENS:
                known = zip(batches, counts, totals, strict=True)
                batches = [with_one_label(each) if total and not count else each for each, count, total in known]
            if self.hides_count:  # the Trainer divides by the number of micro-batches
                totals = [sum(totals) / len(totals)] * len(totals)
            self.weights = [ranks * count / total if total else 1.0 for count, total in zip(counts, totals, strict=True)]
        return batches

    # --- evaluation

    def of_all(self, loss: Tensor, batch: Any, empty: bool) -> Tensor:
        """Return the loss of all ranks' batches from that of this rank's. A collective.

        Args:
            loss: This rank's loss, a scalar.
            batch: This rank's own rows.
            empty: Whether they only repeat others.
        """
        comm = self.trainer.engine.comm
        reduction = self.reduction or Reduction(RANKS)
        if reduction.kind == COUNTED and not self.was_counted:  # Seq2SeqTrainer evaluates without the count
            reduction = replace(reduction, kind=TOKENS)
        if reduction.kind == RANKS or (self.is_per_rank and reduction.kind in (COUNTED, TOKENS)):
            return loss
        weight = 1.0
        if reduction.kind == SUM:
            weight = 0.0 if empty else float(comm.world_size)
        elif reduction.kind != COUNTED:
            count = 0 if empty else reduction.count(batch)
            total = comm.totals(torch.tensor([float(count)], device=comm.device))[0]
            weight = comm.world_size * count / total if total else 1.0
        reduced: Tensor = self.trainer.accelerator.reduce(loss * weight if weight else torch.zeros_like(loss), "mean")
        return reduced

    def evaluate(self, predict: Callable[[Any, bool], Any], batch: Any, loss_only: bool) -> tuple[Tensor | None, Any, Any]:
        """Return loss, outputs and labels of a batch; the loss is that of all ranks' batches. A collective.

        Args:
            predict: Evaluates a batch on this rank: (batch, whether only its loss is used) to loss, outputs and labels.
            batch: This rank's batch.
            loss_only: Whether only the loss is used.
        """
        trainer, comm = self.trainer, self.trainer.engine.comm
        if not self._has_loss(batch):
            loss, outputs, labels = predict(batch, loss_only)
            return loss, outputs, labels
        labelled = self.has_labels(batch)
        self.evaluated, self.unlabelled = self.evaluated + 1, self.unlabelled + (not labelled)
        if comm.world_size == 1 or not labelled:
            loss, outputs, labels = predict(batch, loss_only)
            return loss if labelled else None, outputs, labels
        own, empty = own_rows(batch, trainer.accelerator, self.reduction_by(batch), per_rank=self.is_per_rank)
        cut = comm.any(rows_of(own, trainer.label_names) != rows_of(batch, trainer.label_names))
        loss, outputs, labels = predict(own, cut or loss_only)
        loss = None if loss is None else self.of_all(loss, own, empty)
        if cut and not loss_only:  # the outputs must have the other ranks' shape
            _, outputs, labels = predict(batch, False)
        return loss, outputs, labels

    def check_evaluated(self) -> None:
        """Raise UserError if no batch of an evaluation had a label."""
        if self.unlabelled and self.unlabelled == self.evaluated:
            raise UserError(
                f"evaluation: none of the {self.evaluated} batches has a label that counts: all labels are {IGNORED}. "
                "Prompts that fill the whole length leave none; check the labels that the data collator makes"
            )

    def _has_loss(self, batch: Any) -> bool:
        """Return whether the Trainer computes a loss of a batch in evaluation."""
        if not isinstance(batch, Mapping):
            return False
        if not self.trainer.label_names:
            return bool(batch.get("return_loss", self.trainer.can_return_loss))
        return all(batch.get(name) is not None for name in self.trainer.label_names)

    def has_labels(self, batch: Any) -> bool:
        """Return whether any rank's batch has a label that counts, or labels that are not of tokens. A collective."""
        comm, labels = self.trainer.engine.comm, token_labels(batch)
        return comm.any(labels is None or labels.dim() < 2 or counted_labels(batch, shifted=self.shifted) > 0)

    # --- how the loss is reduced

    def reduction_by(self, batch: Any) -> Reduction:
        """Return how the loss is reduced; found by this batch if it is not known. A collective."""
        if self.reduction is None:
            self.reduction = self._find(batch)
        return self.reduction or Reduction(RANKS)

    def _find(self, batch: Any) -> Reduction | None:
        """Return how the loss is reduced; None where no row of any rank has a label. A collective."""
        trainer, comm = self.trainer, self.trainer.engine.comm
        if not all(comm.all(isinstance(batch, Mapping))):  # TRL's online trainers make the model's batches of it
            return Reduction(RANKS)
        kind = trainer.engine.strategy.loss_reduction
        self.takes_count = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func) and "labels" in batch
        if self.takes_count and (kind == AUTO or not trainer.computes_as_stock):
            labels = token_labels(batch)
            if not comm.any(labels is None or bool(labels.ne(IGNORED).any())):
                return None
            counted = self._reacts_to_count(batch)  # also shows whether a subclass's loss reaches the Trainer's
            kind = COUNTED if counted and kind == AUTO else kind
        if kind == AUTO:
            kind = by_labels(batch, getattr(trainer.model, "config", None))
        if kind != COUNTED and self.takes_count and (self.reached_stock or trainer.computes_as_stock):
            self.hides_count = True
            if kind != SUM and trainer.loss_is_scaled_for_ga is None:
                trainer.loss_is_scaled_for_ga = False
        return Reduction(kind, self.shifted, trainer.label_names)

    def _reacts_to_count(self, batch: Any) -> bool:
        """Return whether the loss depends on `num_items_in_batch`, by two forwards without gradients. A collective."""
        trainer = self.trainer
        plain = trainer.computes_as_stock and not trainer.label_smoother and not trainer.compute_loss_func
        if plain and usable_loss(trainer.model) is not None and not adds_to_loss(trainer.model):
            return True  # the chunked loss divides by it
        rows = rows_of(batch, trainer.label_names)
        batch = first_rows(batch, max(1, rows // trainer.engine.strategy.parts), rows)  # as much as fits a forward
        count = torch.tensor(max(counted_labels(batch, shifted=self.shifted), 1), device=trainer.accelerator.device)
        try:
            one, two = (self._probed(batch, factor * count) for factor in (1, 2))
        except (RuntimeError, TypeError, AttributeError, LookupError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if trainer.engine.comm.rank == 0:
                logger.warning(
                    "the loss cannot be computed without gradients (%s), so it is taken for a mean. If it is something "
                    "else, set ftkit={'loss_reduction': ...}",
                    error,
                )
            return False
        return bool(trainer.engine.comm.any(abs(one - two) > REACTION * max(abs(one), abs(two))))

    def _probed(self, batch: Mapping[str, Any], count: Tensor) -> float:
        """Return the loss of a batch for a count, without gradients, in evaluation mode. Random numbers are restored."""
        trainer = self.trainer
        with ExitStack() as stack:
            for owner, name in ((trainer, "_metrics"), (trainer.state, "log_history")):
                if (kept := vars(owner).get(name)) is not None:  # TRL's trainers add to _metrics in compute_loss
                    stack.callback(setattr, owner, name, kept)
                    setattr(owner, name, copy.deepcopy(kept) if name == "_metrics" else list(kept))
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(trainer.model))
            stack.enter_context(read_by_all(trainer))
            stack.enter_context(trainer.accelerator.with_num_processes(1))
            stack.enter_context(seeded(trainer.accelerator.device, STEPS, trainer.args.seed))
            stack.enter_context(trainer.compute_loss_context_manager())
            inputs = dict(trainer._prepare_inputs(dict(batch)))
            return float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count).mean())


# --- batches


def rows_of(batch: Any, label_names: Sequence[str] = ("labels",)) -> int:
    """Return the number of rows of a batch: of its labels, else of its first tensor; 0 if it has none."""
    if not isinstance(batch, Mapping):
        return 0
    values = [batch[name] for name in label_names if name in batch] + list(batch.values())
    return next((len(each) for each in values if isinstance(each, list) or (torch.is_tensor(each) and each.dim())), 0)


def first_rows(batch: Any, count: int, rows: int) -> Any:
    """Return a batch of the first `count` of its rows; the batch itself where its tensors do not all have rows."""
    tensors = [each for each in batch.values() if torch.is_tensor(each) and each.dim()]
    if any(len(each) not in (1, rows) for each in tensors):
        return batch
    has_rows = {
        key: ((torch.is_tensor(value) and value.dim() > 0) or isinstance(value, (list, tuple))) and len(value) == rows
        for key, value in batch.items()
    }
    return {key: value[:count] if has_rows[key] else value for key, value in batch.items()}


def token_labels(batch: Any) -> Tensor | None:
    """Return the integer labels of a batch, with at least one dimension; None if it has no such labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not torch.is_tensor(labels) or labels.dim() == 0 or labels.is_floating_point():
        return None
    return labels


def counted_labels(batch: Any, *, shifted: bool) -> int:
    """Return how many labels count; shifted: without the first label of each row."""
    labels = token_labels(batch)
    if labels is None:
        return 0
    return int((labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(IGNORED).sum())


def without_labels(batch: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return the batch with the labels of its rows from `first` on ignored."""
    labels = batch["labels"].clone()
    labels[first:] = IGNORED
    return {**batch, "labels": labels}


def with_one_label(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without label tokens with one: a mean over none is NaN, also with the weight 0."""
    labels = batch["labels"].clone()
    labels.view(-1)[-1] = 0
    return {**batch, "labels": labels}


def own_rows(batch: Any, accelerator: Any, reduction: Reduction, *, per_rank: bool) -> tuple[Any, bool]:
    """Return a batch without the rows that repeat earlier ones to fill it, and whether none of its rows is left.

    A rank must compute as many batches as the others: of a batch that has repeated rows only, one row is left.

    Args:
        batch: A batch of the loader.
        accelerator: The Trainer's accelerator.
        reduction: How the loss is reduced.
        per_rank: Whether each rank's loss is a mean over its own labels (`average_tokens_across_devices=False`).
    """
    rows = rows_of(batch, reduction.label_names)
    left = rows_left(accelerator, rows)
    own = min(max(left - accelerator.process_index * rows, 0), rows) if left else rows
    if own == rows or reduction.kind == RANKS:
        return batch, False
    if reduction.kind in (COUNTED, TOKENS) and torch.is_tensor(batch.get("labels")):
        if own == 0 and per_rank:  # it has no other labels
            return batch, False
        return without_labels(batch, own), own == 0
    return first_rows(batch, max(own, 1), rows), own == 0


def check_even(trainer: Any, number: int) -> None:
    """Raise UserError where a stream gave ranks different numbers of batches: they would compute different blocks together.

    Args:
        trainer: The Trainer.
        number: This rank's batches of the step.
    """
    loader = trainer.accelerator.gradient_state.active_dataloader
    if loader is not None and has_length(loader):
        return
    numbers = trainer.engine.comm.all(number)
    if len(set(numbers)) > 1:
        raise UserError(
            f"step {trainer.state.global_step + 1}: the ranks were given {numbers} batches; a stream must give each rank as "
            "many: split it evenly, or let rank 0 read it (accelerator_config={'dispatch_batches': True})"
        )


def rows_left(accelerator: Any, rows: int) -> int:
    """Return how many different rows all ranks' present batches hold, if they are an epoch's last and are not full.

    0 otherwise, and where it is not known (a stream that each rank reads): there repeated rows count, as in the Trainer.
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
