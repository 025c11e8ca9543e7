"""Accumulation by hand with `no_sync`, uneven inputs, and handlers of accelerate."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs
from torch.utils.data import DataLoader

import ftkit
from tests.hf import runs
from tests.hf.runs import assert_same_weights, fresh_state
from tests.hf.test_accelerator import full_rows, make

MICRO_BATCHES = 3


def by_hand(kind: str, form: str, settings: Any = "auto") -> dict[str, Any]:
    """Accumulate three micro-batches a step, the first two without synchronisation."""
    accelerator = make(kind, settings, gradient_accumulation_steps=1)
    model = runs.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(full_rows(36), batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses, norms = [], []
    for number, batch in enumerate(loader, 1):
        last = number % MICRO_BATCHES == 0
        contexts = {"accelerator": lambda: accelerator.no_sync(model), "model": getattr(model, "no_sync", nullcontext)}
        with nullcontext() if last else contexts[form]():
            loss = model(**batch).loss / MICRO_BATCHES
            accelerator.backward(loss)
        losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
        if last:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model) if kind == "ours" else accelerator.unwrap_model(model).state_dict()
    return {"losses": losses, "norms": norms, "weights": {name: tensor.detach() for name, tensor in weights.items()}}


@pytest.mark.quick(3)
@pytest.mark.parametrize("form", ["accelerator", "model"])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_no_sync_accumulates_as_ddp_does(worlds, stage, form):
    wanted = worlds[1].run(by_hand, "stock", "accelerator")[0]
    for world in (1, 2) if stage == 3 else (2,):
        got = worlds[world].run(by_hand, "ours", form, {"stage": stage})[0]
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert_same_weights(got["weights"], wanted["weights"])


@pytest.mark.parametrize("handler", [DistributedDataParallelKwargs(find_unused_parameters=True), GradScalerKwargs()])
def test_handlers_that_change_nothing_are_taken(handler):
    fresh_state()
    made = ftkit.Accelerator(cpu=True, kwargs_handlers=[handler])
    assert isinstance(made, accelerate.Accelerator)
