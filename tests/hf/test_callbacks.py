"""Callbacks and overrides that read weights see those of their step, although updates may be deferred."""

from pathlib import Path

import pytest
import torch
import transformers
import trl

from tests.hf import runs


class Watching(transformers.TrainerCallback):
    """A user's callback that reads weights after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(kwargs["model"].model.norm.weight.detach().clone())


def seen(kind, folder, watch):
    Path(folder).mkdir(exist_ok=True)
    run = runs.Run(ftkit={"stage": 1, "state": "nvme", "nvme_dir": folder}, arguments={"max_steps": 3})
    trainer = runs.make_trainer(kind, folder, run)
    watching = Watching()
    if watch:
        trainer.add_callback(watching)
    trainer.train()
    return watching.seen, kind == "ours" and trainer.units.strategy.deferred


def test_a_callback_that_reads_weights_after_a_step_sees_that_steps(worlds, tmp_path):
    ours, deferred = worlds[2].run(seen, "ours", str(tmp_path / "a"), True)[0]
    stock, _ = worlds[1].run(seen, "stock", str(tmp_path / "b"), True)[0]
    assert not deferred
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    _, deferred = worlds[2].run(seen, "ours", str(tmp_path / "c"), False)[0]
    assert deferred, "else there is nothing to leave out"


def evaluated_first(kind, folder):
    Path(folder).mkdir(exist_ok=True)
    run = runs.Run(ftkit={"stage": 1, "state": "nvme", "nvme_dir": folder}, arguments={"max_steps": 3}, eval_rows=6)
    trainer = runs.make_trainer(kind, folder, run)
    watching = Watching()
    trainer.add_callback(watching)
    trainer.evaluate()
    trainer.train()
    return watching.seen


def test_an_evaluation_before_training_leaves_a_callback_the_steps_weights(worlds, tmp_path):
    ours = worlds[2].run(evaluated_first, "ours", str(tmp_path / "a"))[0]
    stock = worlds[1].run(evaluated_first, "stock", str(tmp_path / "b"))[0]
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Reads:
    """A user's Trainer class, which may read weights."""


@pytest.mark.parametrize("mixin, callbacks", [(Reads, []), (None, [trl.BEMACallback()])])
def test_code_that_may_read_weights_before_a_forward_gets_updates_in_the_step(mixin, callbacks, tmp_path):
    settings = {"state": "nvme", "nvme_dir": str(tmp_path)}
    run = runs.Run(ftkit=settings, arguments={"max_steps": 1}, mixin=mixin, options={"callbacks": callbacks})
    trainer = runs.make_trainer("ours", str(tmp_path / "run"), run)
    trainer.train()
    assert not trainer.units.strategy.deferred


class ReadsInEvaluate:
    """A user's Trainer that looks at a norm before each evaluation."""

    def evaluate(self, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), self.model.model.norm.weight.detach().clone()]
        return super().evaluate(*args, **kwargs)


def seen_in_evaluate(kind, folder):
    Path(folder).mkdir(exist_ok=True)
    arguments = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    settings = {"stage": 1, "state": "nvme", "nvme_dir": folder}
    run = runs.Run(ftkit=settings, arguments=arguments, mixin=ReadsInEvaluate, eval_rows=6)
    trainer = runs.make_trainer(kind, folder, run)
    trainer.train()
    return trainer.seen


def test_a_trainer_that_reads_weights_before_an_evaluation_sees_that_steps(worlds, tmp_path):
    stock = worlds[1].run(seen_in_evaluate, "stock", str(tmp_path / "b"))[0]
    for ours in worlds[2].run(seen_in_evaluate, "ours", str(tmp_path / "a")):
        for mine, theirs in zip(ours, stock, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
