"""Callbacks of the user's: which events they listen to, and that each method which is named like an event is one.

A Trainer looks for methods by the names of its events, so a misspelled one (`on_step_edn`, `on_train_start`) is never
called. A method whose name resembles no event is left alone: a Trainer may have events of its own.
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

AFTER_AN_UPDATE = ("on_optimizer_step", "on_step_end", "on_log", "on_epoch_end", "on_epoch_begin", "on_step_begin")
"""Events between an update and the next forward."""


def listeners(callbacks: Iterable[Any], events: Iterable[str], known: tuple[str, ...]) -> list[str]:
    """Return the classes of the callbacks that define one of these events.

    Args:
        callbacks: of a Trainer. events: names of methods. known: packages whose callbacks are left out.
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


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Stop for a method that is nearly named as an event of the Trainer, and that no Trainer calls.

    Args:
        callbacks: of a Trainer.

    Raises:
        UserError: with the event that was meant.
    """
    for callback in callbacks:
        kind = type(callback)
        for name in dir(kind):
            if name.startswith("on_") and name not in EVENTS and callable(getattr(kind, name)):
                close = difflib.get_close_matches(name, EVENTS, 1, cutoff=ALIKE)
                if close:
                    raise UserError(
                        f"callback {kind.__name__}: no event of the Trainer is called {name}, so that it would never run; "
                        f"did you mean {close[0]}? A method of your own needs a name that does not begin with on_"
                    )
