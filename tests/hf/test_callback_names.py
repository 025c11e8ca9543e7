"""A method of a callback that is nearly named as an event stops training before it begins."""

import pytest
import transformers

import ftkit
from ftkit.hf.callback_names import check_callbacks


def callback(name):
    return type("Own", (transformers.TrainerCallback,), {name: lambda self, *args, **kwargs: None})()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_step_edn", "on_step_end"),
        ("on_train_start", "on_train_"),
        ("on_evaluation", "on_evaluate"),
        ("on_saved", "on_save"),
    ],
)
def test_a_method_that_no_event_calls_stops(name, meant):
    with pytest.raises(ftkit.UserError, match=f"callback Own: no event of the Trainer is called {name}, .*mean {meant}"):
        check_callbacks([callback("on_log"), callback(name)])


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
