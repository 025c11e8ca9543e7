"""Callbacks of the user's: a method nearly named as an event stops the run, and weights read after a step are of it."""

from pathlib import Path

import pytest
import torch
import transformers

import ftkit
from ftkit.hf.trainer.callbacks import ELSEWHERE, check_callbacks
from tests.hf import runs


def callback(name):
    return type("Own", (transformers.TrainerCallback,), {name: lambda self, *args, **kwargs: None})()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_step_edn", "on_step_end"),
        ("on_train_start", "on_train_"),
        ("on_evaluation", "on_evaluate"),
        ("on_saved", "on_save"),
        ("on_save_checkpoint", "on_save"),
        ("on_after_backward", "on_pre_optimizer_step"),
        ("on_train_batch_end", "on_step_end"),
        ("on_validation_end", "on_evaluate"),
    ],
)
def test_a_method_that_no_event_calls_stops(name, meant):
    with pytest.raises(ftkit.UserError, match=f"callback Own: no event of the Trainer is called {name}, .*mean {meant}"):
        check_callbacks([callback("on_log"), callback(name)])


def test_an_event_of_others_that_the_trainer_lacks_stops():
    with pytest.raises(ftkit.UserError, match=r"called on_exception, .*none is like it\."):
        check_callbacks([callback("on_exception")])
    events = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert not events & set(ELSEWHERE)
    assert {event for event in ELSEWHERE.values() if event} <= events


def test_a_method_that_was_set_on_a_callback_stops():
    own = transformers.TrainerCallback()
    own.on_step_end = own.on_step_edn = lambda *args, **kwargs: None
    with pytest.raises(ftkit.UserError, match=r"called on_step_edn, .*mean on_step_end"):
        check_callbacks([own])


@pytest.mark.parametrize("name", ["on_log", "on_pre_optimizer_step", "on_init_end", "on_xyz_qqq"])
def test_events_and_other_methods_are_fine(name):
    check_callbacks([callback(name)])
    check_callbacks([type("Flag", (transformers.TrainerCallback,), {"on_step_ended": True})()])


def test_a_trainer_looks_before_it_begins(tmp_path):
    from tests.hf import runs

    trainer = runs.make_trainer("ours", str(tmp_path), runs.Run(options={"callbacks": [callback("on_step_edn")]}))
    with pytest.raises(ftkit.UserError, match="did you mean on_step_end"):
        trainer.train()
    assert trainer.units is None


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_trainer_looks_before_it_evaluates_or_predicts(tmp_path, call):
    run = runs.Run(options={"callbacks": [callback("on_evalute")]}, eval_rows=2)
    trainer = runs.make_trainer("ours", str(tmp_path), run)
    rows = [trainer.eval_dataset] if call == "predict" else []
    with pytest.raises(ftkit.UserError, match=r"called on_evalute, .*did you mean on_evaluate"):
        getattr(trainer, call)(*rows)
    trainer.callback_handler.callbacks.pop()
    getattr(trainer, call)(*rows)
    trainer.add_callback(callback("on_predcit"))
    with pytest.raises(ftkit.UserError, match=r"called on_predcit, .*did you mean on_predict"):
        getattr(trainer, call)(*rows)


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


def test_callbacks_that_come_after_sharding_are_told_of_deferred_updates(tmp_path, caplog):
    run = runs.Run(ftkit={"state": "nvme", "nvme_dir": str(tmp_path)}, arguments={"max_steps": 1})
    trainer = runs.make_trainer("ours", str(tmp_path / "run"), run)
    trainer.train()
    assert trainer.units.strategy.deferred, "else there is nothing to tell"
    assert "came after" not in caplog.text
    trainer.add_callback(Watching())
    trainer.train()
    assert "Watching came after the model was sharded, and updates are deferred" in caplog.text


def test_callbacks_of_trl_may_read_weights_too(tmp_path):
    run = runs.Run(ftkit={"state": "nvme", "nvme_dir": str(tmp_path)}, arguments={"max_steps": 1})
    trainer = runs.make_trainer("ours", str(tmp_path / "run"), run)
    trainer.add_callback(type("BEMA", (Watching,), {"__module__": "trl.trainer.callbacks"})())
    trainer.train()
    assert not trainer.units.strategy.deferred


def overriding(name):
    """Return a user's Trainer class that overrides a method, and may read weights there."""

    def method(self, *args, **kwargs):
        return getattr(super(reads, self), name)(*args, **kwargs)

    reads = type("Reads", (), {name: method})
    return reads


@pytest.mark.parametrize("name", ["_save_checkpoint", "save_model", "evaluate", "evaluation_loop", "_prepare_inputs"])
def test_a_trainer_that_may_read_weights_before_a_forward_updates_in_the_step(name, tmp_path):
    run = runs.Run(
        ftkit={"state": "nvme", "nvme_dir": str(tmp_path)}, arguments={"max_steps": 1}, mixin=overriding(name)
    )
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
