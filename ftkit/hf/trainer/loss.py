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

Micro-batches are added up as in the stock Trainer, with one exception: if the model accepts `num_items_in_batch` and ignores
it, the loss is the mean over all rows or label tokens of the step, and not a sum of means.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
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


class LossOfRanks:
    """The losses of one Trainer: how they are reduced, and the weight of each on this rank.

    Attributes:
        kind: How the loss is reduced; None until a batch with labels has shown it.
        takes_count: Whether the Trainer gives the loss a count.
        hides_count: Whether the Trainer's own loss is computed without the count, because the model ignores it.
        was_counted: Whether the last loss was computed with a count.
        weights: Weight of the loss of each micro-batch of the step.
        saw_labels: Whether a batch of the present evaluation had a label on any rank; None if no batch was to have one.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.kind: str | None = None
        self.takes_count = self.hides_count = self.was_counted = False
        self.weights: Sequence[float] = ()
        self.saw_labels: bool | None = None

    def alone(self) -> AbstractContextManager[None]:
        """Report one rank to the code of a loss with a count: the Trainer would multiply it by the number of ranks."""
        return self.trainer.accelerator.with_num_processes(1) if self.takes_count else nullcontext()

    def share(self, count: Any) -> Any:
        """Return the count that divides this rank's loss: its share if the loss is counted, None if the loss ignores it."""
        if self.hides_count or count is None:
            return None
        self.was_counted = True
        return count / self.trainer.engine.comm.world_size if self.kind == COUNTED else count

    # --- the weights of batches

    def weigh(self, batches: list[Any]) -> list[Any]:
        """Return this rank's batches of a step without repeated rows, and set the weights of their losses. A collective."""
        kind = self.kind_by(batches[0])
        last, empty = self._own_rows(batches[-1], kind)
        batches = [*batches[:-1], last]
        counts, totals = self._counts(batches, kind, empty=empty)
        if kind == TOKENS:
            known = zip(batches, counts, totals, strict=True)
            batches = [with_one_label(each) if total and not count else each for each, count, total in known]
        if self.hides_count:  # the Trainer divides by the number of micro-batches
            totals = [sum(totals) / len(totals)] * len(totals)
        ranks = self.trainer.engine.comm.world_size
        self.weights = [ranks * count / total if total else 1.0 for count, total in zip(counts, totals, strict=True)]
        return batches

    def _counts(self, batches: list[Any], kind: str, *, empty: bool) -> tuple[list[float], list[float]]:
        """Count the rows or label tokens of each batch's mean loss, on this rank and on all ranks. A collective.

        `empty` says that the last batch has repeated rows only.
        """
        comm = self.trainer.engine.comm
        if kind in (COUNTED, RANKS):
            return [1.0] * len(batches), [float(comm.world_size)] * len(batches)
        if kind == SUM:
            counts = [1.0] * len(batches)
        elif kind == ROWS:
            counts = [float(rows_of(each, self.trainer.label_names)) for each in batches]
        else:
            counts = [float(self._counted_labels(each)) for each in batches]
        counts[-1] = 0.0 if empty else counts[-1]
        if kind == SUM:
            return counts, [1.0] * len(batches)
        return counts, comm.totals(torch.tensor(counts, device=comm.device))

    def _own_rows(self, batch: Any, kind: str) -> tuple[Any, bool]:
        """Return a batch without the rows that repeat earlier ones to fill it, and whether none of its rows is left.

        A rank must compute as many batches as the others: of a batch that has repeated rows only, one row is left.
        """
        if kind == RANKS:
            return batch, False
        accelerator, rows = self.trainer.accelerator, rows_of(batch, self.trainer.label_names)
        left = rows_left(accelerator, rows)
        own = min(max(left - accelerator.process_index * rows, 0), rows) if left else rows
        if own == rows:
            return batch, False
        if kind in (COUNTED, TOKENS) and torch.is_tensor(batch.get("labels")):
            labels = batch["labels"].clone()
            labels[own:] = IGNORED
            return {**batch, "labels": labels}, own == 0
        return first_rows(batch, max(own, 1), rows), own == 0

    # --- evaluation

    def evaluate(self, predict: Callable[[Any, bool], Any], batch: Any, loss_only: bool) -> Any:
        """Return loss, outputs and labels of a batch; the loss is that of all ranks' batches. A collective.

        Args:
            predict: Evaluates a batch on this rank: (batch, whether only its loss is used) to loss, outputs and labels.
            batch: This rank's batch.
            loss_only: Whether only the loss is used.
        """
        comm, names = self.trainer.engine.comm, self.trainer.label_names
        if not names or not isinstance(batch, Mapping) or any(batch.get(name) is None for name in names):
            return predict(batch, loss_only)
        labelled = self._has_labels(batch)
        self.saw_labels = self.saw_labels or labelled
        if comm.world_size == 1 or not labelled:
            loss, outputs, labels = predict(batch, loss_only)
            return loss if labelled else None, outputs, labels
        kind = self.kind_by(batch)
        own, empty = self._own_rows(batch, kind)
        cut = comm.any(rows_of(own, names) != rows_of(batch, names))
        loss, outputs, labels = predict(own, cut or loss_only)
        if loss is not None:
            kind = TOKENS if kind == COUNTED and not self.was_counted else kind  # Seq2SeqTrainer evaluates without the count
            (count,), (total,) = self._counts([own], kind, empty=empty)
            weight = comm.world_size * count / total if total else 1.0
            loss = self.trainer.accelerator.reduce(loss * weight if weight else torch.zeros_like(loss), "mean")
        if cut and not loss_only:  # the outputs must have the other ranks' shape
            _, outputs, labels = predict(batch, False)
        return loss, outputs, labels

    def _has_labels(self, batch: Any) -> bool:
        """Return whether any rank's batch has a label that counts, or labels that are not of tokens. A collective."""
        labels = token_labels(batch)
        return self.trainer.engine.comm.any(labels is None or labels.dim() < 2 or self._counted_labels(batch) > 0)

    def _counted_labels(self, batch: Any) -> int:
        """Return how many labels count: without the first of each row where the model's loss leaves it out."""
        labels = token_labels(batch)
        if labels is None:
            return 0
        shifted = getattr(self.trainer, "_loss_shifts_labels", False) and labels.dim() > 1
        return int((labels[..., 1:] if shifted else labels).ne(IGNORED).sum())

    # --- how the loss is reduced

    def kind_by(self, batch: Any) -> str:
        """Return how the loss is reduced; found by this batch if it is not known. A collective."""
        if self.kind is None:
            self.kind = self._find(batch)
        return self.kind or RANKS

    def _find(self, batch: Any) -> str | None:
        """Return how the loss is reduced; None where no row of any rank has a label. A collective."""
        trainer = self.trainer
        if not isinstance(batch, Mapping):  # TRL's online trainers make the model's batches of it
            return RANKS
        kind: str = trainer.engine.strategy.loss_reduction
        self.takes_count = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func) and "labels" in batch
        if self.takes_count and kind == AUTO:
            if not self._has_labels(batch):
                return None
            kind = COUNTED if self._reacts_to_count(batch) else kind
        if kind == AUTO:
            kind = by_labels(batch, getattr(trainer.model, "config", None))
        if self.takes_count and kind != COUNTED and trainer.computes_as_stock:
            self.hides_count = True
            if trainer.loss_is_scaled_for_ga is None:
                trainer.loss_is_scaled_for_ga = kind == SUM
        return kind

    def _reacts_to_count(self, batch: Any) -> bool:
        """Return whether the loss depends on `num_items_in_batch`, by two forwards without gradients. A collective."""
        trainer = self.trainer
        plain = trainer.computes_as_stock and not trainer.label_smoother and not trainer.compute_loss_func
        if plain and usable_loss(trainer.model) is not None and not adds_to_loss(trainer.model):
            return True  # the chunked loss divides by it
        rows = rows_of(batch, trainer.label_names)
        batch = first_rows(batch, max(1, rows // trainer.engine.strategy.parts), rows)  # as much as fits a forward
        count = torch.tensor(max(self._counted_labels(batch), 1), device=trainer.accelerator.device)
        one, two = (self._probed(batch, factor * count) for factor in (1, 2))
        return trainer.engine.comm.any(abs(one - two) > REACTION * max(abs(one), abs(two)))

    def _probed(self, batch: Mapping[str, Any], count: Tensor) -> float:
        """Return the loss of a batch for a count, without gradients, in evaluation mode. Random numbers are restored."""
        trainer = self.trainer
        with ExitStack() as stack:
            if (metrics := vars(trainer).get("_metrics")) is not None:  # TRL's trainers add to it in compute_loss
                stack.callback(setattr, trainer, "_metrics", metrics)
                trainer._metrics = copy.deepcopy(metrics)
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(trainer.model))
            stack.enter_context(read_by_all(trainer))
            stack.enter_context(trainer.accelerator.with_num_processes(1))
            stack.enter_context(seeded(trainer.accelerator.device, STEPS, trainer.args.seed))
            inputs = trainer._prepare_inputs(batch)
            return float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count))


def by_labels(batch: Any, config: Any) -> str:
    """Return how a loss that is not counted is reduced, by its labels, or by the configuration of a speech model."""
    speech = getattr(config, "ctc_loss_reduction", None)
    if speech in ("sum", "mean"):
        return SUM if speech == "sum" else ROWS
    labels = token_labels(batch)
    return TOKENS if labels is not None and labels.dim() > 1 else ROWS


# --- batches


def rows_of(batch: Any, label_names: Sequence[str] = ("labels",)) -> int:
    """Return the number of rows of a batch: of its labels, else of its first tensor; 0 if it has none."""
    values = [batch[name] for name in label_names if name in batch] + list(batch.values())
    return next((len(each) for each in values if isinstance(each, list) or (torch.is_tensor(each) and each.dim())), 0)


def first_rows(batch: Any, count: int, rows: int) -> Any:
    """Return a batch of the first `count` of its rows; the batch itself where its tensors do not all have rows."""
    tensors = [each for each in batch.values() if torch.is_tensor(each) and each.dim()]
    if any(len(each) not in (1, rows) for each in tensors):
        return batch
    listed = [each for each in batch.values() if isinstance(each, (list, tuple))]
    cut = {id(each) for each in (*tensors, *listed) if len(each) == rows}
    return {key: each[:count] if id(each) in cut else each for key, each in batch.items()}


def token_labels(batch: Any) -> Tensor | None:
    """Return the integer labels of a batch, with at least one dimension; None if it has no such labels."""
    labels = batch.get("labels")
    if not torch.is_tensor(labels) or labels.dim() == 0 or labels.is_floating_point():
        return None
    return labels


def with_one_label(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without label tokens with one: a mean over none is NaN, also with the weight 0."""
    labels = batch["labels"].clone()
    labels.view(-1)[-1] = 0
    return {**batch, "labels": labels}


def check_even(trainer: Any, number: int) -> None:
    """Raise UserError where a stream gave ranks different numbers of batches: they would wait for each other."""
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
    while hasattr(sampler, "batch_sampler"):  # accelerate's samplers that shard and that skip batches
        split = split or getattr(sampler, "split_batches", False)
        sampler = sampler.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler or sampler.drop_last:
        return 0
    samples = sampler.batch_size if split else sampler.batch_size * ranks
    return len(cast(Sized, sampler.sampler)) % samples if rows * ranks == samples else 0
