"""Numbers gone wrong: a step whose loss is no number, or far above those before it, and what the recipe says of it.

Every step's loss, the mean over all ranks, is judged after the backward and before the update. It has diverged if the
loss is NaN or infinite, if the gradient's norm is (in fp16 that alone is an overflow, which the loss scale is for), or if
the loss lies more than `SIGMAS` standard deviations above the mean of the last `WINDOW` steps, as OLMo-core's
SkipStepOptimizer judges it. What is done about it is `train.on_divergence`:

    continue   nothing; it is told and counted
    skip       the step's update is left out; weights, moments and learning rate stay as they are
    rollback   weights and state of the last checkpoint come back, and the samples since then are left out, as for PaLM
               (arXiv:2204.02311): the steps are counted, and compute nothing
    stop       the run ends without the update

Each is a line in divergences.jsonl with step, reason, and the places of the step's samples. The losses of the window lie in
the checkpoint, so that a resumed run judges as the first one would have.

What it costs: one sum of a number over the ranks, a step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WINDOW = 128
"""Steps whose losses are looked back at."""
LEAST = 32
"""Steps before a loss can be called a spike: an early one is nothing but learning."""
SIGMAS = 6.0
LEAST_DEVIATION = 0.01
"""Of the mean: losses that hardly move must not make a spike of the next batch."""
MOST_ROLLBACKS = 8
"""Of one run: who comes back that often will not get anywhere."""
PLACES_SHOWN = 6

Action = Literal["continue", "skip", "rollback", "stop"]


@dataclass(frozen=True)
class Divergence:
    """One step that went wrong.

    Args:
        step: number of the step.
        reason: what was found.
        loss: loss of the step, the mean over all ranks.
        grad_norm: gradient norm of the step, of all ranks together.
        action: what was done about it.
        places: where the step's samples stand in the data.
    """

    step: int
    reason: str
    loss: float
    grad_norm: float
    action: Action
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(self.places[:PLACES_SHOWN])
        more = f" and {len(self.places) - PLACES_SHOWN} more" if len(self.places) > PLACES_SHOWN else ""
        done = {
            "continue": "going on (train.on_divergence: continue)",
            "skip": "its update is left out",
            "rollback": "going back to the last checkpoint",
            "stop": "the run ends here",
        }[self.action]
        return f"step {self.step}: {self.reason}; {done}. Samples of the step: {shown}{more}"


class LossWindow:
    """The losses of the last steps.

    Args:
        losses: the losses to begin with, oldest first; a checkpoint holds them.
    """

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.losses: deque[float] = deque(losses, maxlen=WINDOW)

    def judge(self, loss: float, grad_norm: float, *, scaled: bool = False) -> str | None:
        """Return what is wrong with a step, or None; a loss that is a number joins the window.

        Args:
            loss: loss of the step.
            grad_norm: gradient norm of the step.
            scaled: whether the loss is scaled dynamically: then a norm that is not finite is an overflow and no divergence.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        reason = self._spike(loss)
        self.losses.append(loss)
        if not math.isfinite(grad_norm) and not scaled:
            return f"the gradient's norm is {grad_norm}"
        return reason

    def _spike(self, loss: float) -> str | None:
        if len(self.losses) < LEAST:
            return None
        mean = statistics.fmean(self.losses)
        deviation = max(statistics.pstdev(self.losses), LEAST_DEVIATION * abs(mean))
        if loss <= mean + SIGMAS * deviation:
            return None
        return (
            f"the loss is {loss:.4f}, {(loss - mean) / deviation:.1f} standard deviations above the mean of the last "
            f"{len(self.losses)} steps ({mean:.4f})"
        )
