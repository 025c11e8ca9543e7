"""Loss and perplexity of held-out tokens, exact: the sum of all label tokens' losses over their number.

A mean of batches' means would weigh a token by the batch that it came in. Here sums are made, in fp64, of all label tokens
of all ranks, so that batches, padding and the number of ranks change nothing but rounding. Where the model makes its loss
by chunks of its head (`head.py`) no whole logits exist; else those of one batch do, and its loss is taken row by row.

Ranks may have different numbers of batches: a sharded model keeps them in step (`rank_sync.py`).

What it refuses: models without labels for tokens, and data without any. What it costs: a forward a batch, and the spare
forwards of a rank that has fewer, of one token each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ftkit.data.samples import IGNORED_LABEL
from ftkit.errors import UserError
from ftkit.hf.inference.generation import evaluating
from ftkit.hf.models.head import adds_to_loss, only_loss, usable_loss
from ftkit.hf.models.rank_sync import Inputs, in_step
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.hf.sharding import units_of

UNSHIFTED = "ForMaskedLM"
"""transformers' name for the loss of models whose logits at t are for the label at t. Encoder-decoders do so, too."""

OF_TOKENS = {
    "input_ids", "attention_mask", "position_ids", "token_type_ids", "decoder_input_ids", "decoder_attention_mask", "labels",
    "num_items_in_batch",
}  # fmt: skip
"""Inputs of which one token without the others gathers the same weights."""


LARGEST_LOSS = 700.0
"""Nats whose exponential a float holds."""


@dataclass(frozen=True)
class Evaluation:
    """What held-out tokens gave.

    Args:
        loss: mean loss of all label tokens, nats.
        perplexity: exponential of the loss.
        tokens: number of label tokens.
    """

    loss: float
    perplexity: float
    tokens: int

    @classmethod
    def of(cls, loss_sum: float, tokens: int) -> Evaluation:
        """Make it of the sum of all label tokens' losses and their number; both 0 where there are none."""
        loss = float(loss_sum) / max(int(tokens), 1)
        return cls(loss, math.inf if loss > LARGEST_LOSS else math.exp(loss), int(tokens))


def evaluate(
    model: nn.Module,
    data: Iterable[Mapping[str, Any]] | Sequence[Any],
    *,
    collate: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    batch_size: int = 8,
) -> Evaluation:
    """Return loss and perplexity of data, the same on all ranks. All ranks of a sharded model call it together.

    Args:
        model: a model of transformers or PEFT with its weights, sharded or whole.
        data: without `collate`, this rank's own batches, as many as it has: dictionaries of tensors with `input_ids` (B, T)
            and `labels` (B, T), -100 where a token does not count. With `collate`, the rows of a data set, which all ranks
            give whole: batches are cut from it in order and dealt to the ranks.
        collate: makes a batch of rows (`ftkit.data.batches.Collator`).
        batch_size: rows of a batch, where `collate` is given.

    Raises:
        UserError: no label token at all, or a model whose labels are not those of tokens.
    """
    units = units_of(model)
    batches = iter(data) if collate is None else _dealt(data, collate, batch_size, units)
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    stand_in = {"input_ids": token} | ({"decoder_input_ids": token} if _config(model).is_encoder_decoder else {})

    def spare(module: nn.Module, inputs: Inputs) -> Inputs:
        """One token without a label, so that no logits of a batch come; the same again where more than tokens was given."""
        return ((), stand_in) if not inputs[0] and set(inputs[1]) <= OF_TOKENS else inputs

    together = in_step(units, spare, stand_in) if units is not None else nullcontext()
    with torch.no_grad(), evaluating(model), together:
        for batch in batches:
            sums += loss_sum(model, {key: _there(value, device) for key, value in batch.items()})
    total, tokens = units.comm.totals(sums) if units is not None else sums.tolist()
    if not tokens:
        raise UserError("evaluation: the data have no label tokens: every label is -100, or there are no batches")
    return Evaluation.of(total, round(tokens))


def loss_sum(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the sum of a batch's losses, nats, and its label tokens: (2,) fp64.

    Raises:
        UserError: the batch has no labels of tokens, or the model no logits for them.
    """
    labels = batch.get("labels")
    if labels is None or labels.dim() != 2:
        raise UserError("evaluation: a batch needs `labels` (B, T), one for each token")
    shifted = shifts(model)
    chunked = usable_loss(model)
    if chunked is not None and adds_to_loss(model):
        with chunked.each_token() as tokens:
            model(**batch)
        return tokens[-1].rows[:, :2].double().sum(0)
    if chunked is not None:
        counted = (labels[:, 1:] != IGNORED_LABEL).sum()
        with only_loss(model, wanted=True):
            loss = model(**batch, num_items_in_batch=torch.ones((), device=labels.device)).loss
        return torch.stack([loss.double(), counted.double()])
    logits = getattr(model(**batch), "logits", None)
    if logits is None or logits.dim() != 3 or logits.shape[:2] != labels.shape:
        shape = None if logits is None else tuple(logits.shape)
        raise UserError(
            f"evaluation: {type(model).__name__} gives logits {shape} for labels {tuple(labels.shape)}: needed are (B, T, V)"
        )
    return row_statistics(logits, labels, shifted=shifted)[:, :2].double().sum(0)


def row_statistics(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    """Reduce logits to three numbers a row.

    Args:
        logits: (B, T, V) floating, on any device.
        labels: (B, T) int64; -100 does not count.
        shifted: The logits at t predict the label at t + 1 (causal), not that at t (encoder-decoder).

    Returns:
        (B, 3) float32: sum of losses, label tokens, hits.

    Cost: the logits of one row in fp32 at a time.
    """
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    rows = []
    for row_logits, row_labels in zip(logits, labels):
        counted = row_labels != IGNORED_LABEL
        row_logits, row_labels = row_logits[counted].float(), row_labels[counted]
        loss_sum = cross_entropy(row_logits, row_labels, reduction="sum")
        hits = (row_logits.argmax(-1) == row_labels).sum()
        rows.append(torch.stack([loss_sum, counted.sum().to(loss_sum), hits.to(loss_sum)]))
    return torch.stack(rows)


def shifts(model: nn.Module) -> bool:
    """Return whether a model's logits at t predict the label at t + 1."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return not base.config.is_encoder_decoder and getattr(base, "loss_type", None) != UNSHIFTED


def _dealt(
    rows: Any, collate: Callable[[list[Any]], Mapping[str, Any]], batch_size: int, units: ShardedTransformer | None
) -> Iterator[Mapping[str, Any]]:
    """Yield this rank's batches of a data set."""
    rank, ranks = (units.comm.rank, units.comm.world_size) if units is not None else (0, 1)
    for start in range(rank * batch_size, len(rows), ranks * batch_size):
        yield collate([rows[number] for number in range(start, min(start + batch_size, len(rows)))])


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if not hasattr(config, "is_encoder_decoder"):
        raise UserError(f"evaluation: {type(model).__name__} is not a transformers model")
    return config


def _there(value: Any, device: torch.device) -> Any:
    return value.to(device) if torch.is_tensor(value) else value
