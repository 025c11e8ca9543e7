"""A run that is made longer than it was to be goes on at its new schedule's learning rate, and not at the old one's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import ftkit
from tests.hf.runs import fresh_state
from tests.tiny import make_base


class Rates(TrainerCallback):
    """Notes the learning rate with which each step is made."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def rates(folder: Path, out: Path, steps: int, kind: str, checkpoint: str | None = None) -> list[float]:
    """Train on until `steps`; return the learning rates of the steps that were made."""
    fresh_state()
    arguments = ftkit.TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=2, report_to=[], use_cpu=True, learning_rate=1e-3,
        lr_scheduler_type=kind, warmup_steps=1, save_strategy="steps", save_steps=4, logging_steps=1,
    )  # fmt: skip
    seen = Rates()
    rows = [{"input_ids": [1, 5, 6, 2], "labels": [1, 5, 6, 2]}] * 8
    ftkit.Trainer(ftkit.load_model(str(folder)), arguments, train_dataset=rows, callbacks=[seen]).train(checkpoint)
    return seen.seen


@pytest.mark.parametrize("kind", ["linear"])
def test_a_longer_run_follows_its_own_schedule(kind: str, tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    whole = rates(folder, tmp_path / "whole", 8, kind)
    rates(folder, tmp_path / "run", 4, kind)
    longer = rates(folder, tmp_path / "run", 8, kind, str(tmp_path / "run" / "checkpoint-4"))
    assert longer == whole[4:]
    assert min(longer) > 0
