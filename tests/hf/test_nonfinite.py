"""A NaN is loud: found in a base before the first step, logged as it is, and never written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ftkit
from ftkit.engine.finite import is_finite
from ftkit.errors import Diverged
from ftkit.hf.exporting import Outgoing, write_model
from ftkit.hf.nonfinite import LossRecord, verdict
from tests.hf import runs
from tests.hf.runs import Run, files_in, train
from tests.tiny import make_base

SETTINGS = {"stage": 3, "kernels": "off"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_finite(dtype):
    values = torch.randn(1000).to(dtype)
    assert is_finite(values)
    assert is_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)), "a sum may overflow where no value does"
    for bad in (math.nan, math.inf, -math.inf):
        values[999] = bad
        assert not is_finite(values)
        assert is_finite(values, infinite=True) == (not math.isnan(bad))
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0))


# --- before the first step


def broken_in_memory(stage, bad):
    model = runs.llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[-1, -1] = bad  # in the last rank's shard only
    with pytest.raises(ftkit.UserError, match=r"model\.layers\.2\.mlp\.down_proj\.weight holds NaN or infinite weights"):
        ftkit.shard(model, {"stage": stage, "kernels": "off"})


@pytest.mark.parametrize("stage, bad", [(3, math.nan), (1, math.inf)])
def test_a_base_that_is_not_finite_is_found_when_it_is_sharded(stage, bad, worlds):
    worlds[2].run(broken_in_memory, stage, bad)


def broken_folder(folder, dtype):
    with pytest.raises(ftkit.UserError, match=rf"{folder}: model\.layers\.1\.self_attn\.o_proj\.weight holds NaN"):
        ftkit.shard(ftkit.load_model(folder), {**SETTINGS, "dtype": dtype})


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_base_that_is_not_finite_is_found_when_it_is_loaded(dtype, worlds, tmp_path):
    folder = make_base(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][-1, 0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    worlds[2].run(broken_folder, str(folder), dtype)


# --- never written


def writes_nothing(folder, placement):
    model = runs.llama()
    units = ftkit.shard(model, {**SETTINGS, **placement})
    optimizer = ftkit.ShardedAdamW(units)
    optimizer.prepare()
    ftkit.save_checkpoint(f"{folder}/good", units, optimizer)
    line = units.trainable[-1]
    if units.comm.rank == 0:
        store = optimizer.line(line).master
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


@pytest.mark.parametrize("value, dtype", [(math.nan, torch.float32), (math.inf, torch.bfloat16), (1e6, torch.float16)])
def test_what_is_not_finite_is_not_exported(value, dtype, tmp_path):
    values = torch.tensor([1.0, value])
    good = Outgoing((2,), torch.float32, lambda: [(0, torch.ones(2))])
    tensors = {"a": good, "b": Outgoing((2,), dtype, lambda: [(0, values)])}
    with pytest.raises(ftkit.UserError, match="b holds"):
        write_model(tmp_path, tensors, 10**9, lambda done, total: None)
    assert not files_in(tmp_path)


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
    with pytest.raises(Diverged, match=r"the loss was not finite at the last step, in \d of \d steps"):
        trainer.train()
    with pytest.raises(ftkit.UserError, match="holds NaN"):
        trainer.save_model(f"{folder}/model")
    return trainer.state.log_history


@pytest.mark.parametrize("stage, ranks", [(3, 2), (1, 1)])
def test_a_loss_that_is_nan_is_logged_as_it_is(stage, ranks, worlds, tmp_path):
    run = Run(arguments={"max_steps": 4, "logging_steps": 1}, mixin=NaNLoss, ftkit={"stage": stage})
    history = worlds[ranks].run(train, "ours", str(tmp_path), run)[0].history
    assert [math.isnan(line["loss"]) for line in history if "loss" in line] == [False, True, False, False]
    assert all(math.isnan(line["train_loss"]) for line in history if "train_loss" in line)


def test_a_trainer_whose_last_loss_is_nan_fails_and_keeps_the_last_good_checkpoint(worlds, tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run = Run(arguments=saving, mixin=NaNWeights, ftkit={"stage": 3})
    history = worlds[2].run(diverges, str(tmp_path), run)[0]
    assert [math.isfinite(line["loss"]) for line in history if "loss" in line] == [True, False, False, False]
    assert [path.name for path in Path(tmp_path).glob("checkpoint-*")] == ["checkpoint-1"]
    assert not list(Path(tmp_path, "model").glob("*.safetensors"))


def fails(folder, run):
    with pytest.raises(Diverged, match="the loss was not finite at the last step, in 1 of 3 steps"):
        runs.make_trainer("ours", folder, run).train()


class NaNLast(NaNLoss):
    steps = (3,)


def test_a_last_loss_of_fp16_that_is_nan_fails_where_its_step_was_not_skipped(worlds, tmp_path):
    run = Run(mixin=NaNLast, arguments={"max_steps": 3}, ftkit={**SETTINGS, "dtype": "fp16"})
    worlds[1].run(fails, str(tmp_path), run)


def test_the_filter_that_hides_a_nan_is_refused(tmp_path):
    runs.fresh_state()
    assert transformers.TrainingArguments(str(tmp_path), use_cpu=True).logging_nan_inf_filter
    with pytest.raises(ftkit.UserError, match="logging_nan_inf_filter"):
        runs.make_trainer("ours", str(tmp_path), Run(arguments={"logging_nan_inf_filter": True}))


def test_when_a_run_has_failed():
    assert verdict(0, 4, last=False) is None
    assert verdict(2, 4, last=False) is None
    assert "in 3 of 4 steps" in verdict(3, 4, last=False)
    assert "at the last step, in 1 of 4 steps" in verdict(1, 4, last=True)


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


def test_without_the_engine_the_filter_is_stocks(tmp_path):
    def given(**fields):
        return ftkit.TrainingArguments(str(tmp_path), use_cpu=True, **fields).logging_nan_inf_filter

    assert given(ftkit=None) is True
    assert given(ftkit=None, logging_nan_inf_filter=False) is False
    assert given() is False


class NaNOfTurns:
    """The loss of one rank in the first steps, of the other in the next ones; gradients are as without."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + math.nan if self.state.global_step // 2 == runs.rank() else loss


def test_steps_that_are_nan_on_any_rank_are_counted_together(worlds, tmp_path):
    run = Run(mixin=NaNOfTurns, arguments={"max_steps": 6})
    worlds[2].run(fails_in, str(tmp_path), run, "in 4 of 6 steps")


def fails_in(folder, run, words):
    with pytest.raises(Diverged, match=words):
        runs.make_trainer("ours", folder, run).train(resume_from_checkpoint=run.resume)


def test_a_run_that_is_resumed_at_its_end_is_judged_by_its_log(worlds, tmp_path):
    saving = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    run = Run(mixin=NaNLast, arguments=saving)
    worlds[1].run(fails_in, str(tmp_path), run, "at the last step, in 1 of 3 steps")
    worlds[1].run(fails_in, str(tmp_path), replace(run, resume=str(tmp_path / "checkpoint-3")), "no step was left to make")


def test_how_many_steps_a_record_holds():
    class Alone:
        all = staticmethod(lambda own: [own])

    record = LossRecord()
    for step in range(3000):
        record.note(step, torch.tensor(math.nan if step % 2 else 1.0))
        record.note(step, torch.tensor(1.0))
    assert record.ended(Alone(), skips=True) is None
    record.note(3000, torch.tensor(math.inf))
    assert "in 1501 of 3001 steps" in record.ended(Alone(), skips=True)


def not_saved_by_accelerate(folder):
    runs.fresh_state()
    accelerator = ftkit.Accelerator(cpu=True, ftkit={"stage": 3})
    model = runs.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.arange(12).view(2, 6)
    accelerator.backward(model(input_ids=ids, labels=ids).loss * math.nan)
    optimizer.step()
    for save in (lambda: accelerator.save_model(model, folder), lambda: accelerator.get_state_dict(model)):
        with pytest.raises(ftkit.UserError, match="holds NaN"):
            save()
    return files_in(folder)


def test_accelerate_writes_no_model_that_is_not_finite(worlds, tmp_path):
    assert not worlds[2].run(not_saved_by_accelerate, str(tmp_path))[0]
class HugeLoss:
    """Multiplies the loss, so that no float holds the square of its gradient's norm."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 1e25


@pytest.mark.parametrize("stage, ranks", [(3, 2), (1, 1)])
def test_a_gradient_whose_square_no_float_holds_is_clipped(stage, ranks, worlds, tmp_path):
    plain = Run(arguments={"max_steps": 3}, ftkit={"stage": stage})
    ours, huge = (
        worlds[ranks].run(train, "ours", str(tmp_path / str(number)), run)[0]
        for number, run in enumerate((plain, replace(plain, mixin=HugeLoss)))
    )
    assert huge.column("grad_norm")[0] == pytest.approx(1e25 * ours.column("grad_norm")[0], rel=1e-5)
    runs.assert_same_weights(huge.weights, ours.weights)
