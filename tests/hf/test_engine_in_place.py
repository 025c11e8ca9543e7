"""The engine that was asked for is in place, or the run stops before its first step.

Base classes in the wrong order, a stock Trainer with our arguments, optimizers of others, wrappers of others: each would
train by plain DDP, or train nothing, without a word.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import transformers
import trl
from torch import nn

import ftkit
from tests.hf import runs
from tests.hf.runs import COMMON, Run, token_rows, train

ROWS = torch.arange(24).view(4, 6)


# --- the order of base classes


class Theirs(transformers.Trainer):
    """A user's Trainer."""


class Ours(ftkit.TrainerMixin):
    """A user's mixin over ours."""


class Behind(Theirs, Ours):
    """A Trainer with the mixin behind it, which overrides nothing."""


def test_a_mixin_behind_a_trainer_is_refused(tmp_path):
    runs.fresh_state()
    made = ftkit.TrainingArguments(str(tmp_path), **COMMON)
    with pytest.raises(ftkit.UserError, match=r"ftkit\.TrainerMixin, SFTTrainer\), ftkit's class first"):
        Behind(model=runs.llama(), args=made, train_dataset=token_rows(4))


class SecondClass(Theirs, ftkit.Trainer):
    """A user's Trainer in front of a whole Trainer of ours, which it calls by `super`."""


def test_arguments_behind_their_mixin_are_refused():
    with pytest.raises(ftkit.UserError, match=r"name ftkit\.ArgumentsMixin first"):
        type("C", (trl.SFTConfig, ftkit.ArgumentsMixin), {"__annotations__": {}})


def test_a_trainer_in_front_of_ours_trains_on_the_engine(tmp_path):
    runs.fresh_state()
    made = ftkit.TrainingArguments(str(tmp_path), **COMMON, max_steps=1)
    trainer = SecondClass(model=runs.llama(), args=made, train_dataset=token_rows(4))
    trainer.train()
    assert trainer.engine_is_on


# --- arguments that ask for the engine


class Seq2SeqArguments(ftkit.ArgumentsMixin, transformers.Seq2SeqTrainingArguments):
    """Arguments of a user's with ours."""


@pytest.mark.parametrize(
    "trainer, arguments", [(Theirs, ftkit.TrainingArguments), (transformers.Seq2SeqTrainer, Seq2SeqArguments)]
)
def test_a_trainer_without_the_engine_refuses_arguments_that_ask_for_it(trainer, arguments, tmp_path):
    runs.fresh_state()
    made = arguments(str(tmp_path), **COMMON, ftkit={"stage": 3})
    with pytest.raises(ftkit.UserError, match=r"asks for ftkit's engine.*plain DDP"):
        trainer(model=runs.llama(), args=made, train_dataset=token_rows(4))


def test_arguments_that_a_trainer_on_the_engine_has_read_are_refused_to_others(tmp_path):
    runs.fresh_state()
    made = ftkit.TrainingArguments(str(tmp_path), **COMMON)
    ftkit.Trainer(model=runs.llama(), args=made, train_dataset=token_rows(4))
    with pytest.raises(ftkit.UserError, match="asks for ftkit's engine"):
        transformers.Trainer(model=runs.llama(), args=made, train_dataset=token_rows(4))


def test_a_trainer_without_the_engine_takes_arguments_that_leave_it_off(tmp_path):
    runs.fresh_state()
    made = ftkit.TrainingArguments(str(tmp_path), **COMMON, ftkit=None)
    transformers.Trainer(model=runs.llama(), args=made, train_dataset=token_rows(4))


# --- optimizers of others


def scheduled(model, optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()


def foreign_steps(stage, early, use, make=torch.optim.AdamW):
    runs.fresh_state()
    model = runs.llama()
    optimizer = make(model.parameters()) if early else None
    ftkit.shard(model, {"stage": stage, "kernels": "off"})
    optimizer = optimizer or make(model.parameters())
    model(ROWS, labels=ROWS).loss.backward()
    with pytest.raises(ftkit.UserError, match=r"would train nothing|would do nothing"):
        use(model, optimizer)
    bystander = nn.Linear(2, 2)
    bystander(torch.ones(1, 2)).sum().backward()
    before = bystander.weight.detach().clone()
    torch.optim.SGD(bystander.parameters(), lr=1.0).step()
    assert not torch.equal(bystander.weight, before)


def plain(model, optimizer):
    optimizer.step()


@pytest.mark.parametrize("early, stage, use", [(True, 1, scheduled), (False, 3, plain)])
def test_an_optimizer_of_torch_on_a_sharded_model_raises(early, stage, use, worlds):
    worlds[2].run(foreign_steps, stage, early, use)


class SwapsOptimizer:
    """Exchanges the optimizer in the middle of a run."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        return loss


def trained(run, text):
    with pytest.raises(ftkit.UserError, match=text):
        train("ours", tempfile.mkdtemp(), run)


def test_a_trainer_with_a_foreign_optimizer_stops(worlds):
    worlds[2].run(trained, Run(mixin=SwapsOptimizer, ftkit={"stage": 3}), "would train nothing")


# --- wrappers of others


def wrapped():
    runs.fresh_state()
    model = runs.llama()
    ftkit.shard(model, {"stage": 3, "kernels": "off"})
    with pytest.raises(ftkit.UserError, match="cannot be wrapped by DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(model)
    with pytest.raises(TypeError, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(model)


def test_a_wrapper_around_a_sharded_model_is_refused(worlds):
    worlds[2].run(wrapped)


def all_compiled(model):
    return torch.compile(model, backend="eager")


def compiled_calls(model):
    model.model.layers[1].compile(backend="eager")
    return model


WRAPPED = [
    (nn.DataParallel, "the model is wrapped by DataParallel"),
    (all_compiled, "the model is compiled"),
    (compiled_calls, r"model\.layers\.1 is compiled"),
]


@pytest.mark.parametrize("wrap, told", WRAPPED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrapper_around_what_is_to_be_sharded_is_refused(wrap, told):
    runs.fresh_state()
    with pytest.raises(ftkit.UserError, match=told):
        ftkit.shard(wrap(runs.llama()), {"stage": 3, "parameters": "host"})


def test_a_compiled_module_inside_a_block_computes_and_so_does_a_block_whose_weights_stay():
    runs.fresh_state()
    model = runs.llama()
    expected = model(ROWS).logits
    model.model.layers[0].mlp.compile(backend="eager")
    compiled_calls(model)
    ftkit.shard(model, {"stage": 3})
    torch.testing.assert_close(model(ROWS).logits, expected)
