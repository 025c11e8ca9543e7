"""Steps whose loss is not finite or jumps, and what `train.on_divergence` does about them.

The loss of each step, the mean over ranks, is judged after the backward and before the update. The step has diverged if

- the loss is not finite,
- the gradient norm is not finite (with a loss scale that is an ordinary overflow, and no divergence), or
- the loss is more than `SIGMAS` standard deviations above the mean of the last `WINDOW` steps, as in OLMo-core's
  SkipStepOptimizer.

    continue   report and count the step
    skip       also leave its update out: weights, moments and learning rate stay as they are
    stop       also leave its update out and end the run

divergences.jsonl has one line per diverged step, with the places of its samples. Checkpoints store the losses of the window,
so that a resumed run judges as an uninterrupted one.

Cost: one all-reduce of one number per step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from transformers import TrainerCallback

from ftkit.output.run_folder import RunFolder, append_line
from ftkit.report.text import literal

if TYPE_CHECKING:
    from ftkit.train.trainer import RecipeTrainer

WINDOW = 128
LEAST = 32
"""Steps before a loss can be a jump. The loss of early steps falls too fast for a comparison."""
SIGMAS = 6.0
LEAST_DEVIATION = 0.01
"""Least standard deviation, as a share of the mean: in a flat window an ordinary batch would be a jump."""
PLACES_SHOWN = 6

Action = Literal["continue", "skip", "stop"]
DONE = {
    "continue": "training continues (train.on_divergence: continue)",
    "skip": "its update is skipped",
    "stop": "the run ends here",
}


class LossWindow:
    """The losses of the last steps, oldest first."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.losses: deque[float] = deque(losses, maxlen=WINDOW)

    def judge(self, loss: float, grad_norm: float, *, scaled: bool = False) -> str | None:
        """Return why a step has diverged, or None. A finite loss joins the window.

        With `scaled`, a dynamic loss scale handles gradients that are not finite.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        reason = self._jump(loss)
        self.losses.append(loss)
        if not math.isfinite(grad_norm) and not scaled:
            return f"the gradient norm is {grad_norm}"
        return reason

    def _jump(self, loss: float) -> str | None:
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


class DivergenceWatch(TrainerCallback):
    """Judge each step before its update, and do what the recipe says.

    Attributes:
        count: Steps of this process that diverged.
        last_loss: Loss of the last step.
        ended_by: Why training was ended, or None.
    """

    def __init__(self, trainer: RecipeTrainer, folder: RunFolder, action: Action, say: Console) -> None:
        self.trainer, self.folder, self.action, self.say = trainer, folder, action, say
        self.count, self.last_loss = 0, 0.0
        self.ended_by: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the divergences of an earlier run in this folder."""
        if state.global_step == 0 and state.is_world_process_zero:
            self.folder.divergences.unlink(missing_ok=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the step whose gradients are complete. All ranks see the same numbers and act alike."""
        optimizer, step = self.trainer.engine_optimizer, state.global_step + 1
        loss, norm = self.trainer.step_loss(), optimizer.grad_norm()
        self.last_loss = loss
        reason = self.trainer.losses.judge(loss, norm, scaled=optimizer.loss_scale.dynamic)
        if reason is None:
            return
        self.count += 1
        places = self.trainer.places(step)
        if state.is_world_process_zero:
            found = {"step": step, "reason": reason, "loss": loss, "grad_norm": norm, "action": self.action}
            append_line(self.folder.divergences, {**found, "places": places})
        more = f" and {len(places) - PLACES_SHOWN} more" if len(places) > PLACES_SHOWN else ""
        samples = ", ".join(places[:PLACES_SHOWN]) + more
        text = f"step {step}: {reason}; {DONE[self.action]}. Samples of the step: {samples}"
        self.say.print(literal(text))
        if self.action != "continue":
            optimizer.leave_out()
        if self.action == "stop":
            self.ended_by = text

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End training after the step that stops it, without a checkpoint and without an evaluation."""
        if self.ended_by is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control

    on_epoch_end = on_step_end


def diverged_steps(path: Path) -> int:
    """Return how many steps a divergences.jsonl names. A step that diverged again after a resume counts once."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return len(set(re.findall(r'^{"step": (\d+),', text, re.MULTILINE)))
