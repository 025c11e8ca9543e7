"""Callbacks of the user's: which events they listen to, and that each method which is named like an event is one.

A Trainer looks for methods by the names of its events, so a misspelled one (`on_step_edn`, `on_train_start`) is never
called; nor is one that is an event of Lightning or Keras. Another method whose name resembles no event is left alone: a
Trainer may have events of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from ftkit.errors import UserError

EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))
ALIKE = 0.6
"""How alike a name must be to an event's to be taken for it."""

ELSEWHERE = {
    "on_after_backward": "on_pre_optimizer_step",
    "on_before_backward": None,
    "on_before_optimizer_step": "on_pre_optimizer_step",
    "on_before_zero_grad": "on_optimizer_step",
    "on_exception": None,
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_load_checkpoint": "on_train_begin",
    "on_save_checkpoint": "on_save",
    "on_sanity_check_start": None,
    "on_sanity_check_end": None,
    "on_batch_begin": "on_step_begin",
    "on_batch_start": "on_step_begin",
    "on_batch_end": "on_step_end",
    "on_train_start": "on_train_begin",
    "on_train_batch_begin": "on_step_begin",
    "on_train_batch_start": "on_step_begin",
    "on_train_batch_end": "on_step_end",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_epoch_start": "on_epoch_begin",
    "on_validation_start": None,
    "on_validation_epoch_start": None,
    "on_validation_epoch_end": "on_evaluate",
    "on_validation_batch_start": None,
    "on_validation_batch_end": "on_prediction_step",
    "on_validation_end": "on_evaluate",
    "on_test_start": None,
    "on_test_begin": None,
    "on_test_epoch_start": None,
    "on_test_epoch_end": "on_evaluate",
    "on_test_batch_start": None,
    "on_test_batch_begin": None,
    "on_test_batch_end": "on_prediction_step",
    "on_test_end": "on_evaluate",
    "on_predict_start": None,
    "on_predict_begin": None,
    "on_predict_epoch_start": None,
    "on_predict_epoch_end": "on_predict",
    "on_predict_batch_start": None,
    "on_predict_batch_begin": None,
    "on_predict_batch_end": "on_prediction_step",
    "on_predict_end": "on_predict",
}
"""Events of Lightning and Keras, and what the Trainer has of the kind."""

AFTER_AN_UPDATE = ("on_optimizer_step", "on_step_end", "on_log", "on_epoch_end", "on_epoch_begin", "on_step_begin")
"""Events between an update and the next forward."""

BEFORE_A_FORWARD = (
    "log", "get_batch_samples", "training_step", "compute_loss", "_prepare_inputs", "_maybe_log_save_evaluate", "_evaluate",
    "evaluate", "predict", "evaluation_loop", "prediction_loop", "prediction_step", "get_eval_dataloader",
    "get_test_dataloader", "_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler",
)  # fmt: skip
"""Methods of a Trainer that are called there."""


def listeners(callbacks: Iterable[Any], events: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """Return the classes of the callbacks that define one of these events.

    Args:
        callbacks: the Trainer's callbacks.
        events: names of the methods that are looked for.
        known: packages whose callbacks are left out.
    """
    names = []
    for callback in callbacks:
        kind = type(callback)
        defined = (
            event in getattr(callback, "__dict__", {}) or getattr(kind, event, None) is not getattr(TrainerCallback, event)
            for event in events
        )
        if kind.__module__.partition(".")[0] not in known and any(defined):
            names.append(kind.__name__)
    return names


def overriders(trainer: type, methods: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """Return the classes that define one of these methods.

    Args:
        trainer: the Trainer's class.
        methods: names of the methods that are looked for.
        known: packages whose classes are left out.
    """
    foreign = (each for each in trainer.__mro__ if each.__module__.partition(".")[0] not in known)
    return [each.__name__ for each in foreign if any(name in vars(each) for name in methods)]


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Stop for a method that is nearly named as an event of the Trainer, or as one of others, and that no Trainer calls.

    Args:
        callbacks: the Trainer's callbacks.

    Raises:
        UserError: with the event that was meant.
    """
    for callback in callbacks:
        kind = type(callback)
        for name in sorted({*dir(kind), *getattr(callback, "__dict__", {})}):
            if not name.startswith("on_") or name in EVENTS or not callable(getattr(callback, name, None)):
                continue
            close = difflib.get_close_matches(name, EVENTS, 1, cutoff=ALIKE)
            if close or name in ELSEWHERE:
                event = ELSEWHERE[name] if name in ELSEWHERE else close[0]
                meant = f"did you mean {event}?" if event else "none is like it."
                raise UserError(
                    f"callback {kind.__name__}: no event of the Trainer is called {name}, so that it would never run; "
                    f"{meant} A method of your own needs a name that does not begin with on_"
                )
