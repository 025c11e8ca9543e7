"""The progress bar of a notebook: sends the progress of a run to the kernel (`ftkit.train.callbacks.Bar`).

Cost: at most `STEPS_A_SECOND` messages for steps, and one a logging step.
"""

from __future__ import annotations

import time
from typing import Any

from ftkit.notebook.output import Tell
from ftkit.train.callbacks import Bar, describe

STEPS_A_SECOND = 5.0


class ToldBar(Bar):
    """Tells the kernel where a run is.

    Args:
        tell: Sends a message.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._due_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how many steps there are, and where it begins."""
        self._tell_step(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which step it is, a few times a second."""
        if time.monotonic() >= self._due_s or state.global_step == state.max_steps:
            self._tell_step(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say at which step it ended."""
        self._tell_step(state)

    def _tell_step(self, state: Any) -> None:
        self._due_s = time.monotonic() + 1 / STEPS_A_SECOND
        if state.is_world_process_zero:
            self._tell({"step": int(state.global_step), "steps": int(state.max_steps)})

    def show(self, record: dict[str, Any]) -> None:
        """Tell the numbers of a logging step, or what the held-out rows gave."""
        held_out = {key.removeprefix("eval_"): float(value) for key, value in record.items() if key.startswith("eval_")}
        self._tell({"step": record["step"], **({"held_out": held_out} if held_out else {"numbers": describe(record)})})
