"""Loss and perplexity of held-out tokens are the sums over all of them, whatever batches, padding and ranks were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftkit
from ftkit.data.batches import Collator
from ftkit.hf.generate.evaluation import Evaluation, evaluate
from ftkit.hf.kernels.head import head_loss
from tests.engine import families
from tests.engine.families import VOCABULARY
from tests.hf import runs


def rows(count: int = 11) -> list[dict[str, list[int]]]:
    """Rows of uneven length, each with its own share of labels."""
    random = torch.Generator().manual_seed(9)
    made = []
    for length in torch.randint(3, 14, (count,), generator=random).tolist():
        ids = torch.randint(3, VOCABULARY, (length,), generator=random)
        labels = ids.masked_fill(torch.rand(length, generator=random) < 0.4, -100)
        labels[-1] = ids[-1]
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def exact(name: str, data: list[dict[str, list[int]]]) -> tuple[float, int]:
    """The mean loss of all label tokens, by plain PyTorch in fp64, row by row; and their number."""
    model = build(name).double().eval()
    total, tokens = 0.0, 0
    for row in data:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model(input_ids=ids, labels=labels).logits[0]
        logits, labels = (logits, labels[0]) if name in ("t5", "bert") else (logits[:-1], labels[0, 1:])
        total += float(nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        tokens += int((labels != -100).sum())
    return total / tokens, tokens


def build(name: str) -> nn.Module:
    return runs.t5() if name == "t5" else families.build(name)


def collate(samples: list[Any]) -> dict[str, Tensor]:
    return Collator(pad_token_id=0)(samples)


def sharded(name: str, settings: dict[str, Any], batch_size: int, chunked: bool, count: int) -> Evaluation:
    model = build(name).train()
    kernels = "auto" if chunked else "off"
    ftkit.shard(model, {"stage": 3, "affinity": False, "debug": True, "kernels": kernels, **settings})
    assert (head_loss(model) is not None) == chunked
    found = evaluate(model, rows(count), collate=collate, batch_size=batch_size)
    assert model.training
    return found


QUICK = [(2, "llama", {}, 2, False, 11), (3, "llama", {}, 2, True, 11), (3, "t5", {}, 8, False, 11)]
SLOW = [
    *((world, name, {}, 3, False, 11) for world in (1, 2, 3) for name in ("gpt2", "gemma3", "bert", "t5")),
    *((2, "qwen3", {"stage": stage}, 4, True, 11) for stage in (0, 1, 2)),
    (2, "llama", {"parameters": "host", "gradients": "host", "state": "host"}, 1, True, 7),
    (3, "gpt2", {}, 8, False, 3),
]


def check(worlds, world, name, settings, batch_size, chunked, count):
    loss, tokens = exact(name, rows(count))
    for found in worlds[world].run(sharded, name, settings, batch_size, chunked, count):
        assert found.tokens == tokens
        assert found.loss == pytest.approx(loss, rel=2e-6)
        assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_loss_and_perplexity_are_exact(worlds, case):
    check(worlds, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_loss_and_perplexity_are_exact_in_more_settings(worlds, case):
    check(worlds, *case)


def test_a_whole_model_in_one_process():
    loss, tokens = exact("llama", rows())
    found = evaluate(families.build("llama"), rows(), collate=collate, batch_size=4)
    assert (found.tokens, found.loss) == (tokens, pytest.approx(loss, rel=2e-6))


def test_data_without_labels_are_refused():
    model = families.build("llama")
    with pytest.raises(ftkit.UserError, match="no label tokens"):
        evaluate(model, [], collate=collate)


def after_an_update(settings: dict[str, Any]) -> list[tuple[float, int]]:
    """What one row gives, of which one rank has it and the others nothing, after a step and after another."""
    model = families.build("llama").train()
    units = ftkit.shard(model, {"stage": 3, "affinity": False, **settings})
    optimizer = ftkit.ShardedAdamW(units, lr=1e-2)
    found = []
    for step in range(2):
        batch = families.batch("llama", step)
        families.token_loss(model, batch, families.label_tokens(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        told = evaluate(model, rows(1), collate=collate)
        found.append((told.loss, told.tokens))
    return found


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_without_a_batch_takes_part_in_what_an_update_left_to_do(world2, stage):
    at_once = world2.run(after_an_update, {"stage": stage})
    assert world2.run(after_an_update, {"stage": stage, "update": "deferred"}, seconds=30) == at_once
