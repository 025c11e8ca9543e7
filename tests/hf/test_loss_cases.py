"""More losses of users: on two ranks as on one rank, and as stock on one. The losses are found out, not declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hf import losses, runs
from tests.hf.losses import TEN, THREE_PARTS, case
from tests.hf.runs import Run, assert_same_history, token_rows, train

# --- losses


def token_losses(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses (B, T - 1) of next tokens, and which count."""
    logits = outputs.logits[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(labels[:, 1:].shape)
    return each, labels[:, 1:] != -100


class OfUser:
    """A user's compute_loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.of(*token_losses(outputs, labels), num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class RowsOfTokens(OfUser):
    def of(self, each: Tensor, counted: Tensor, count: Any) -> Tensor:
        return ((each * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


class SumOfTokens(OfUser):
    def of(self, each: Tensor, counted: Tensor, count: Any) -> Tensor:
        return (each * counted).sum() / 100


class SumOfRows(OfUser):
    def of(self, each: Tensor, counted: Tensor, count: Any) -> Tensor:
        return ((each * counted).sum(1) / counted.sum(1).clamp(min=1)).sum() / 10


def by_count(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    each, counted = token_losses(outputs, labels)
    return (each * counted).sum() / (counted.sum() if num_items_in_batch is None else num_items_in_batch)


def with_a_part(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a counted loss and, as the balance of a router, a mean that does not depend on the count."""
    return by_count(outputs, labels, num_items_in_batch) + 1e-2 * outputs.logits.pow(2).mean()


class WithAPart:
    """The same as a user's compute_loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = with_a_part(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class Penalised:
    """A mean that does not depend on the count, added to what the Trainer computes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = loss + 3e-2 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class TwoTasks(nn.Module):
    """A classifier with a second head; its loss is a sum of two means over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bert = runs.classifier()
        self.second = nn.Linear(3, 1)

    def forward(self, input_ids, labels=None, scores=None, **kwargs):
        out = self.bert(input_ids=input_ids)
        loss = F.cross_entropy(out.logits, labels) + 0.5 * F.mse_loss(self.second(out.logits)[:, 0], scores)
        return {"loss": loss, "logits": out.logits}


def scored() -> list[dict[str, Tensor]]:
    return [{**row, "scores": row["input_ids"].float().mean() / 97} for row in losses.labelled()]


# --- data


def some_without_labels() -> list[dict[str, Tensor]]:
    """Rows of which whole ranks' batches have no label."""
    rows = losses.tagged(27)
    for number in (0, 1, 2, 9, 10, 11, 15, 16, 17, 18):
        rows[number] = {**rows[number], "labels": torch.full_like(rows[number]["labels"], -100)}
    return rows


def some_texts_without_labels() -> list[dict[str, Tensor]]:
    rows = token_rows(27)
    for number in (0, 1, 2, 9, 10, 11, 15, 16, 17, 18):
        rows[number] = {**rows[number], "labels": torch.full_like(rows[number]["labels"], -100)}
    return rows


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def stream() -> Stream:
    return Stream(token_rows(60))


def stream_of_labelled() -> Stream:
    return Stream(losses.labelled(60))


def short_stream() -> Stream:
    return Stream(token_rows(27))


def short_stream_of_labelled() -> Stream:
    return Stream(losses.labelled(27))


def lengths() -> list[dict[str, Any]]:
    texts = [row["input_ids"][: 4 + number % 8] for number, row in enumerate(losses.labelled(27))]
    return [{"input_ids": ids.tolist(), "labels": (ids % 5).tolist()} for ids in texts]


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest of the batch, which ranks do not share."""
    width = max(len(row["input_ids"]) for row in rows)
    made = {}
    for key, value in (("input_ids", 0), ("labels", -100)):
        made[key] = torch.tensor([row[key] + [value] * (width - len(row[key])) for row in rows])
    made["attention_mask"] = (made["input_ids"] != 0).long()
    return made


FOUR = {**TEN, "gradient_accumulation_steps": 4, "num_train_epochs": 3}
STREAMED = {**TEN, "max_steps": 8}
SPLIT = {**TEN, "accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 6}
DISPATCHED = {**TEN, "accelerator_config": {"dispatch_batches": True}}
SMOOTHED = {**TEN, "label_smoothing_factor": 0.1}
TOLD = {"eval_rows": 12, "arguments": {**TEN, "eval_strategy": "epoch"}}
DROPPED = {**TEN, "dataloader_drop_last": True}
SUM, ROWS = {"loss_reduction": "sum"}, {"loss_reduction": "mean-rows"}

CASES: dict[str, Run] = {
    "rows of tokens": case(runs.llama, 27, mixin=RowsOfTokens, ftkit=ROWS),
    "sum of tokens": case(runs.llama, 27, mixin=SumOfTokens, ftkit=SUM),
    "sum of rows": case(runs.llama, 27, mixin=SumOfRows, ftkit=SUM),
    "function by count": case(runs.llama, 27, options={"compute_loss_func": by_count}),
    "function by count, parts": case(runs.llama, 27, options={"compute_loss_func": by_count}, arguments=FOUR),
    "function with a part": case(runs.llama, 24, options={"compute_loss_func": with_a_part}, **TOLD),
    "own with a part": case(runs.llama, 24, mixin=WithAPart, **TOLD),
    "a part and a penalty": case(runs.llama, 24, options={"compute_loss_func": with_a_part}, mixin=Penalised, **TOLD),
    "own by count, told": case(runs.llama, 24, mixin=losses.OwnCounted, **TOLD),
    "two tasks": case(TwoTasks, scored),
    "smoothed classifier": case(runs.classifier, losses.labelled, arguments=SMOOTHED),
    "smoothed tagger": case(losses.tagger, losses.tagged, arguments=SMOOTHED),
    "without labels": case(losses.tagger, some_without_labels),
    "texts without labels": case(runs.llama, some_texts_without_labels),
    "incomplete accumulation": case(runs.llama, 27, arguments=FOUR),
    "incomplete accumulation, own": case(runs.llama, 27, mixin=SumOfTokens, arguments=FOUR, ftkit=SUM),
    "stream": case(runs.llama, stream, arguments=STREAMED),
    "stream of rows": case(runs.classifier, stream_of_labelled, arguments=STREAMED),
    "dispatched": case(runs.classifier, losses.labelled, arguments=DISPATCHED),
    "dispatched texts": case(runs.llama, 27, arguments=DISPATCHED),
    "dispatched in parts": case(runs.llama, 27, arguments={**DISPATCHED, "gradient_accumulation_steps": 2}),
    "stream that ends": case(runs.llama, short_stream, arguments={**TEN, "max_steps": 5}),
    "stream that ends, rows": case(runs.classifier, short_stream_of_labelled, arguments={**TEN, "max_steps": 5}),
    "split": case(losses.tagger, losses.tagged, arguments=SPLIT),
    "uneven padding": case(losses.tagger, lengths, options={"data_collator": pad}),
    "uneven padding, texts": case(runs.llama, lengths, options={"data_collator": pad}),
    "uneven padding, parts": case(runs.llama, lengths, options={"data_collator": pad}, arguments=FOUR),
    "dropped": case(runs.classifier, losses.labelled, arguments=DROPPED),
    "own rows, parts": case(runs.llama, 27, mixin=RowsOfTokens, arguments=THREE_PARTS, ftkit=ROWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_users_loss_on_two_ranks_is_that_of_one(name, worlds, stock, tmp_path):
    run = CASES[name]
    ours = worlds[2].run(train, "ours", str(tmp_path / "2"), run)[0]
    alone = worlds[1].run(train, "ours", str(tmp_path / "1"), run)[0]
    assert len(ours.column("loss")) >= 4
    assert_same_history(ours, alone, absolute=5e-6)
    assert_same_history(ours, stock(run), absolute=5e-6)
