"""A NaN is loud: found in a base before the first step, logged as it is, and never written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ftkit
from ftkit.engine.checkpoint.finite import CPU_PIECE, NotFinite, is_finite
from ftkit.engine.checkpoint.safetensors import TensorFile, create_file
from ftkit.engine.comm.communicator import Communicator
from ftkit.hf.save.finite import Narrowing
from tests.hf import runs
from tests.hf.runs import Run, files_in, train
from tests.tiny import make_base

SETTINGS = {"stage": 3, "kernels": "off"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_finite(dtype):
    values = torch.randn(CPU_PIECE + 1000).to(dtype)
    assert is_finite(values)
    assert is_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)), "a sum may overflow where no value does"
    for bad in (math.nan, math.inf, -math.inf):
        values[-1] = bad
        assert not is_finite(values)
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0))


def test_a_nan_is_named_before_a_weight_beyond_fp16():
    found = Narrowing()
    for value in (math.nan, 7e4):  # pieces of one tensor
        stored = torch.tensor([value])
        found.check("w", stored, stored.half())
    with pytest.raises(ftkit.UserError, match="w holds NaN or infinite weights"):
        found.refuse(Communicator(torch.device("cpu")), [])


# --- before the first step


def beyond_fp16(folder):
    model = runs.llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[-1, -1] = 1e5
    model.save_pretrained(folder)
    found = r"model\.layers\.2\.mlp\.down_proj\.weight has a weight of 100000, fp16 holds 65504: compute in bf16 or fp32"
    with pytest.raises(ftkit.UserError, match=found):
        ftkit.shard(ftkit.load_model(folder), {"stage": 3, "kernels": "off", "dtype": "fp16"})
    ftkit.shard(ftkit.load_model(folder), {"stage": 3, "kernels": "off", "dtype": "bf16"})


def test_a_weight_that_fp16_does_not_hold_is_named_with_its_value(world1, tmp_path):
    world1.run(beyond_fp16, str(tmp_path))


def broken_folder(folder):
    model = ftkit.load_model(folder)
    with pytest.raises(ftkit.UserError, match=rf"{folder}: model\.layers\.1\.self_attn\.o_proj\.weight holds NaN"):
        ftkit.shard(model, SETTINGS)


def test_a_base_that_is_not_finite_is_found_when_it_is_loaded(worlds, tmp_path):
    folder = make_base(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][-1, 0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    worlds[2].run(broken_folder, str(folder))


# --- never written


def writes_nothing(folder, placement):
    model = runs.llama()
    units = ftkit.shard(model, {**SETTINGS, **placement})
    optimizer = ftkit.ShardedAdamW(units)
    optimizer.prepare()
    ftkit.save_checkpoint(f"{folder}/good", units, optimizer)
    flat = units.trainable[-1]
    if units.comm.rank == 0:
        store = optimizer.state_of(flat).master
        piece = store.read(*next(iter(store.pieces())))
        piece[0] = math.nan
        store.write(0, piece)
    for save in (
        lambda: ftkit.save_model(units, f"{folder}/model", optimizer),
        lambda: ftkit.save_checkpoint(f"{folder}/bad", units, optimizer),
    ):
        with pytest.raises(ftkit.UserError, match="holds NaN: such a model is not written"):
            save()
    return files_in(f"{folder}/model") + files_in(f"{folder}/bad"), files_in(f"{folder}/good")


@pytest.mark.parametrize("placement", [{}, {"state": "nvme", "nvme_dir": "nvme", "parameters": "nvme"}])
def test_what_is_not_finite_is_not_written(placement, worlds, tmp_path):
    (tmp_path / "nvme").mkdir()
    placement = {key: str(tmp_path / value) if key == "nvme_dir" else value for key, value in placement.items()}
    left, good = worlds[2].run(writes_nothing, str(tmp_path), placement)[0]
    assert not left
    assert good


TOO_LARGE = r"b holds an infinite value in float16: .* write a wider dtype \(--dtype bf16\)"


@pytest.mark.parametrize(
    "value, dtype, message",
    [
        (math.nan, torch.float32, "b holds NaN.* Training diverged"),
        (math.inf, torch.bfloat16, "b holds an infinite value in bfloat16.* Training diverged"),
        (1e6, torch.float16, TOO_LARGE),
    ],
)
def test_what_is_not_finite_is_not_exported(value, dtype, message, tmp_path):
    create_file(tmp_path / "out", [("b", (2,), dtype)])
    with TensorFile(tmp_path / "out", writable=True) as file, pytest.raises(NotFinite, match=message):
        file.write("b", 0, torch.tensor([1.0, value]))


# --- in a Trainer


class NaNLoss:
    """Adds NaN to the loss of chosen steps; gradients are those of the loss without it."""

    steps: tuple[int, ...] = (2,)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + math.nan if self.state.global_step + 1 in self.steps else loss


class NaNWeights(NaNLoss):
    """Multiplies it instead, so that the weights become NaN."""

    def compute_loss(self, *args, **kwargs):
        loss = super(NaNLoss, self).compute_loss(*args, **kwargs)
        return loss * math.nan if self.state.global_step + 1 in self.steps else loss


def diverges(folder, run):
    trainer = runs.make_trainer("ours", folder, run)
    trainer.train()  # ends as the stock Trainer
    with pytest.raises(ftkit.UserError, match="holds NaN"):
        trainer.save_model(f"{folder}/model")
    return trainer.state.log_history


def test_a_loss_that_is_nan_is_logged_as_it_is(worlds, tmp_path):
    run = Run(arguments={"max_steps": 4, "logging_steps": 1}, mixin=NaNLoss, ftkit={"stage": 3})
    history = worlds[2].run(train, "ours", str(tmp_path), run)[0].history
    assert [math.isnan(line["loss"]) for line in history if "loss" in line] == [False, True, False, False]
    assert all(math.isnan(line["train_loss"]) for line in history if "train_loss" in line)


def test_a_trainer_whose_weights_become_nan_keeps_the_last_good_checkpoint(worlds, tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run = Run(arguments=saving, mixin=NaNWeights, ftkit={"stage": 3})
    history = worlds[2].run(diverges, str(tmp_path), run)[0]
    assert [math.isfinite(line["loss"]) for line in history if "loss" in line] == [True, False, False, False]
    assert [path.name for path in Path(tmp_path).glob("checkpoint-*")] == ["checkpoint-1"]
    assert not list(Path(tmp_path, "model").glob("*.safetensors"))


class LogsItsOwn:
    """A user's Trainer that logs a loss of its own in each micro-batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.log({"loss": 0.0, "mine": 1.0})
        return loss


def test_a_loss_that_a_user_logs_leaves_the_trainers_sum_alone(worlds, tmp_path):
    run = Run(mixin=LogsItsOwn, arguments={"max_steps": 4, "logging_steps": 2})
    ours = worlds[2].run(train, "ours", str(tmp_path / "2"), run)[0]
    stock = worlds[1].run(train, "stock", str(tmp_path / "1"), run)[0]
    told = [[line["loss"] for line in each.history if "grad_norm" in line] for each in (ours, stock)]
    assert len(told[0]) == 2
    assert told[0] == pytest.approx(told[1], rel=1e-5)
    assert ours.column("train_loss") == pytest.approx(stock.column("train_loss"), rel=1e-5)


class HugeLoss:
    """Multiplies the loss, so that no float holds the square of its gradient's norm."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 1e25


def test_a_gradient_whose_square_no_float_holds_is_clipped(worlds, tmp_path):
    plain = Run(arguments={"max_steps": 3}, ftkit={"stage": 3})
    ours, huge = (
        worlds[2].run(train, "ours", str(tmp_path / str(number)), run)[0]
        for number, run in enumerate((plain, replace(plain, mixin=HugeLoss)))
    )
    assert huge.column("grad_norm")[0] == pytest.approx(1e25 * ours.column("grad_norm")[0], rel=1e-5)
    runs.assert_same_weights(huge.weights, ours.weights)


class NaNOfOneRank(NaNLoss):
    """One rank's loss, which the others' logs would not show."""

    def compute_loss(self, *args, **kwargs):
        loss = super(NaNLoss, self).compute_loss(*args, **kwargs)
        return loss + math.nan if self.state.global_step == 1 and runs.rank() == 1 else loss


def test_the_mean_loss_at_the_end_is_that_of_all_ranks(worlds, tmp_path):
    arguments = {"max_steps": 3, "logging_strategy": "no"}
    told = worlds[2].run(train, "ours", str(tmp_path / "nan"), Run(mixin=NaNOfOneRank, arguments=arguments))
    assert all(math.isnan(each.column("train_loss")[-1]) for each in told)
    ours = worlds[2].run(train, "ours", str(tmp_path / "ours"), Run(arguments=arguments))[0]
    stock = worlds[1].run(train, "stock", str(tmp_path / "stock"), Run(arguments=arguments))[0]
    assert ours.column("train_loss") == pytest.approx(stock.column("train_loss"), rel=1e-5)


class NaNGradient:
    """The last step's loss is finite and its gradient is not: the root of 0 has none."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        last = self.state.global_step + 1 == self.args.max_steps
        return loss + (self.model.model.norm.weight * 0).sum().sqrt() if last else loss


def test_in_fp16_a_last_step_that_was_skipped_leaves_finite_weights(worlds, tmp_path):
    run = Run(mixin=NaNGradient, arguments={"max_steps": 2}, ftkit={**SETTINGS, "dtype": "fp16"})
    weights = worlds[1].run(train, "ours", str(tmp_path), run)[0].weights
    assert all(is_finite(weight) for weight in weights.values())
