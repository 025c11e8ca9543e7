"""Overflow in fp16: named, skipped, recovered from; and a loss scale below 1 goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ftkit
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.hf.fp16.overflow import began_in
from ftkit.hf.fp16.search import find_fp32_modules
from tests import fusible
from tests.tiny import make_base


def rows(count: int) -> list[dict[str, list[int]]]:
    chance = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, 200, (12,), generator=chance).tolist() for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


class Forced(ftkit.Trainer):
    """Puts an inf where it is told to, in one step."""

    at = ("", 0)

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        name, step = self.at
        handle = None
        if self.state.global_step + 1 == step:
            module = dict(model.named_modules())[name]

            def spoil(module: Any, args: Any, output: Any) -> Any:
                return output * torch.inf

            handle = module.register_forward_hook(spoil)
        try:
            return super().training_step(model, inputs, *args)
        finally:
            if handle is not None:
                self.handle = handle

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)
        if getattr(self, "handle", None) is not None:
            self.handle.remove()
            self.handle = None


def test_a_forced_inf_is_named_skipped_and_recovered_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_base(tmp_path / "base")
    arguments = ftkit.TrainingArguments(
        str(tmp_path / "run"), max_steps=6, per_device_train_batch_size=2, logging_steps=1, report_to=[], fp16=False,
        use_cpu=True, ftkit={"dtype": "fp16"}, save_strategy="no", learning_rate=1e-3,
    )  # fmt: skip
    trainer = Forced(ftkit.load_model(str(folder)), arguments, train_dataset=rows(12))
    trainer.at = ("model.layers.1.mlp.down_proj", 3)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.overflow_scan.overflows == [(3, "in the forward of model.layers.1.mlp.down_proj")]
    assert "step 3: overflow in the forward of model.layers.1.mlp.down_proj; it is skipped" in caplog.text
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 6
    assert all(torch.isfinite(torch.tensor(losses[3:])))
    assert trainer.sharded_optimizer.loss_scale.skipped_steps == 1
    assert trainer.sharded_optimizer.loss_scale.value == 2.0**15


def test_the_first_module_that_overflows() -> None:
    model = fusible.build("llama")
    units = ftkit.shard(model, {"dtype": "fp16", "kernels": "off"})
    inputs = fusible.batch("llama", 2, 6, 0)
    assert find_fp32_modules(units, [inputs]).overflowed is None

    def spoil(module: Any, args: Any, output: Any) -> Any:
        return output * torch.inf

    model.model.layers[1].self_attn.o_proj.register_forward_hook(spoil)
    assert find_fp32_modules(units, [inputs]).overflowed == "model.layers.1.self_attn.o_proj"


def test_where_a_backward_began_to_overflow() -> None:
    lines = ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert began_in(["embed", "layers.0", "layers.1"], lines) == "layers.1"
    assert began_in(lines, lines) is None


def test_the_scale_goes_below_1_and_never_ends() -> None:
    scale = LossScale.for_dtype(torch.float16)
    for _ in range(200):
        scale.update(overflow=True)
    assert 0 < scale.value < 1
    scale.growth_steps = 1
    scale.update(overflow=False)
    assert scale.value == 2.0**-23
