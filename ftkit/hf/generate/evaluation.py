"""Loss and perplexity of held-out tokens: the sum of the losses of all label tokens divided by their number.

The sums are made in fp64 over all label tokens of all ranks. Batch size, padding and the number of ranks change only
rounding. If the model has a chunked loss, its logits are never whole; otherwise the logits of one batch are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from ftkit.data.tokenize import IGNORED_LABEL
from ftkit.errors import UserError
from ftkit.hf.adapters import base_of
from ftkit.hf.generate.generation import evaluating
from ftkit.hf.kernels.head import usable_loss
from ftkit.hf.sharding import units_of

Batch = Mapping[str, Any]

UNSHIFTED = "ForMaskedLM"
"""Loss type of transformers whose logits at t predict the label at t. So do those of encoder-decoders."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Args:
        loss: Mean loss of all label tokens, nats.
        perplexity: Exponential of the loss.
        tokens: Number of label tokens.
    """

    loss: float
    perplexity: float
    tokens: int

    @classmethod
    def of(cls, loss_sum: float, tokens: int) -> Evaluation:
        """Return the result for the sum of the losses of all label tokens, nats, and their number."""
        loss = float(loss_sum) / max(int(tokens), 1)
        perplexity = torch.tensor(loss, dtype=torch.float64).exp()  # inf where math.exp raises
        return cls(loss, float(perplexity), int(tokens))


def evaluate(model: nn.Module, rows: Any, *, collate: Callable[[list[Any]], Batch], batch_size: int = 8) -> Evaluation:
    """Return loss and perplexity of rows, the same on all ranks. All ranks of a sharded model call this together.

    Args:
        model: A transformers or PEFT model with its weights, whole or sharded.
        rows: A data set or list, the same on all ranks. It is cut into batches, which are dealt to the ranks.
        collate: Makes a batch from rows (`ftkit.data.batches.Collator`), with `input_ids` (B, T) and `labels` (B, T), -100
            where a token does not count.
        batch_size: Rows of a batch.

    Raises:
        UserError: The rows have no label tokens.

    Cost: one forward per batch. In the last round, ranks without a batch repeat the last one: all gather the same weights.
    """
    units = units_of(model)
    rank, ranks = (units.comm.rank, units.comm.world_size) if units is not None else (0, 1)
    device = next(model.parameters()).device
    starts = range(0, len(rows), batch_size)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad(), evaluating(model):
        for first in range(0, len(starts), ranks):
            number = first + rank
            start = starts[min(number, len(starts) - 1)]
            batch = collate([rows[place] for place in range(start, min(start + batch_size, len(rows)))])
            found = loss_sum(model, tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(batch)))
            if number < len(starts):
                sums += found
    total, tokens = units.comm.totals(sums) if units is not None else sums.tolist()
    if not tokens:
        raise UserError("evaluation: the rows have no label tokens: every label is -100, or there are no rows")
    return Evaluation.of(total, round(tokens))


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of a batch's losses, nats, and the number of its label tokens: (2,) fp64."""
    chunked = usable_loss(model)
    if chunked is not None:
        with chunked.each_token() as tokens:
            model(**batch)
        return tokens[-1].rows[:, :2].double().sum(0)
    base = base_of(model)
    shifted = not base.config.is_encoder_decoder and getattr(base, "loss_type", None) != UNSHIFTED
    return row_statistics(model(**batch).logits, batch["labels"], shifted=shifted)[:, :2].double().sum(0)


def row_statistics(logits: Tensor, labels: Tensor, *, shifted: bool) -> Tensor:
    """Reduce logits to three numbers per row.

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
        losses = cross_entropy(row_logits, row_labels, reduction="sum")
        hits = (row_logits.argmax(-1) == row_labels).sum()
        rows.append(torch.stack([losses, counted.sum().to(losses), hits.to(losses)]))
    return torch.stack(rows)
