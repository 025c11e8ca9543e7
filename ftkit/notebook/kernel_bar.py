"""The progress bar of a notebook: sends the progress of a run to the kernel.

Cost: at most `STEPS_A_SECOND` messages per second for steps, and one per logging step.
"""

from __future__ import annotations

import time
from typing import Any

from ftkit.notebook.output import Tell
from ftkit.train.callbacks import Bar, describe

STEPS_A_SECOND = 5.0


class KernelBar(Bar):
    """Send the progress of a run to the kernel.

    Args:
        send: Sends a message.
    """

    def __init__(self, send: Tell) -> None:
        self._send = send
        self._due_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the number of steps, and the first one."""
        self._send_step(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the step, a few times a second."""
        if time.monotonic() >= self._due_s or state.global_step == state.max_steps:
            self._send_step(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the last step."""
        self._send_step(state)

    def _send_step(self, state: Any) -> None:
        self._due_s = time.monotonic() + 1 / STEPS_A_SECOND
        if state.is_world_process_zero:
            self._send({"step": int(state.global_step), "steps": int(state.max_steps)})

    def show(self, record: dict[str, Any]) -> None:
        """Send the numbers of a logging step or of an evaluation."""
        held_out = {key.removeprefix("eval_"): float(value) for key, value in record.items() if key.startswith("eval_")}
        self._send({"step": record["step"], **({"held_out": held_out} if held_out else {"numbers": describe(record)})})
