"""What a run does about a step whose loss went wrong: the callback that judges each step, and the way back.

It stands between the backward and the update (`divergence` says when a step has diverged, and what the recipe may ask for).
All ranks judge the same numbers, so they act alike. A rollback ends the Trainer's loop without a checkpoint; `way_back` then
names the checkpoint to go on from: the newest that is whole, or an older one, if there is any, where not one step after the
newest was good.

It refuses to go back more than `MOST_ROLLBACKS` times, or where there is nothing to go back to: the run ends then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from ftkit.errors import Diverged, UserError
from ftkit.output.run_folder import RunFolder, append_line, step_of
from ftkit.report.text import literal
from ftkit.train.divergence import MOST_ROLLBACKS, Action, Divergence
from ftkit.train.resume import first_whole
from ftkit.train.trainer import RecipeTrainer

MOST_STEPS = 1_000_000
"""Of one rollback, that are read from a file: it may be anybody's."""


class DivergenceWatch(TrainerCallback):
    """Judges each step before its update, and does what the recipe says.

    Args:
        trainer: the Trainer whose steps are judged.
        folder: the run's folder.
        action: what the recipe says in `train.on_divergence`.
        say: console on which the user is told.

    Attributes:
        found: the steps that diverged.
        ended_by: the step that ended the Trainer's loop, or None.
    """

    def __init__(self, trainer: RecipeTrainer, folder: RunFolder, action: Action, say: Console) -> None:
        self.trainer, self.folder, self.action, self.say = trainer, folder, action, say
        self.found: list[Divergence] = []
        self.ended_by: Divergence | None = None
        self.resumed: Path | None = None  # the checkpoint that a rollback went to
        self.good_since = False  # whether a step was good since then
        self.unsuitable: set[Path] = set()
        self.rollbacks = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the divergences of an earlier run; leave out what an earlier process of this one left out."""
        self.ended_by = None
        if self.rollbacks:
            return
        if state.global_step == 0 and state.is_world_process_zero:
            self.folder.divergences.unlink(missing_ok=True)
        told = self.trainer.engine.comm.same(sorted(left_out_after(self.folder.divergences, state.global_step)))
        self.trainer.left_out = frozenset(told)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Judge the step whose gradients are complete."""
        trainer, step = self.trainer, state.global_step + 1
        if step in trainer.left_out:
            trainer.engine_optimizer.leave_out()
            return
        loss, norm = trainer.step_loss(), trainer.engine_optimizer.grad_norm()
        reason = trainer.losses.judge(loss, norm, scaled=trainer.engine_optimizer.loss_scale.dynamic)
        if reason is None:
            self.good_since = True
            return
        event = Divergence(step, reason, loss, norm, self.action, trainer.places(step))
        self.found.append(event)
        self._note(asdict(event))
        self.say.print(literal(str(event)))
        if self.action != "continue":
            trainer.engine_optimizer.leave_out()
        if self.action in ("rollback", "stop"):
            self.ended_by = event

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End the Trainer's loop where the policy says so, without a checkpoint of this step."""
        if self.ended_by is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluate nothing after a step that ended the loop."""
        return self.on_step_end(args, state, control, **kwargs)

    def broken_loss(self, step: int) -> float | None:
        """Return the loss of a step of this process, if it was not finite."""
        losses = (event.loss for event in self.found if event.step == step and not math.isfinite(event.loss))
        return next(losses, None)

    def way_back(self) -> str:
        """Return the checkpoint to go on from after a rollback, its samples left out until the step that diverged.

        A collective.

        Raises:
            Diverged: the policy is to stop, or there is no way back.
        """
        event = self.ended_by
        assert event is not None
        last = next(iter(self.folder.newest_first()), None)
        if self.action == "stop":
            advice = "there is no checkpoint to resume from" if last is None else f"--resume auto goes on from {last.name}"
            raise Diverged(f"{event}\n{advice}; train.on_divergence: skip or rollback would go past that step")
        if self.resumed is not None and not self.good_since:
            self.unsuitable.add(self.resumed)
        self.rollbacks += 1
        comm = self.trainer.engine.comm
        newest_first = self.folder.newest_first()
        suitable = [path for path in newest_first if path not in self.unsuitable] or newest_first
        known = comm.same([str(path) for path in suitable])
        try:
            found = first_whole(known, comm, lambda line: self.say.print(literal(line)))
        except UserError as error:
            raise Diverged(f"{event}\n{error}") from error
        if found is None or self.rollbacks > MOST_ROLLBACKS:
            why = "no checkpoint is left to go back to" if found is None else f"it went back {MOST_ROLLBACKS} times already"
            raise Diverged(f"{event}\n{why}")
        self.resumed, self.good_since = Path(found), False
        first = step_of(self.resumed) + 1
        self.trainer.left_out |= set(range(first, event.step + 1))
        self._note({"step": event.step, "rolled_back_to": self.resumed.name, "left_out": [first, event.step]})
        self.say.print(f"back to {self.resumed.name}; the samples of steps {first} to {event.step} are left out")
        return found

    def _note(self, record: dict[str, Any]) -> None:
        if self.trainer.is_world_process_zero():
            append_line(self.folder.divergences, record)


def left_out_after(path: Path, step: int) -> set[int]:
    """Return the steps that rollbacks left out, and that a run from `step` comes to."""
    found: set[int] = set()
    for record in _records(path):
        told = record.get("left_out")
        if isinstance(told, list) and len(told) == 2 and all(isinstance(each, int) for each in told):
            found |= set(range(max(told[0], step + 1), min(told[1], step + MOST_STEPS) + 1))
    return found


def diverged_steps(path: Path) -> int:
    """Return how many steps a run's divergences.jsonl names; one that came again after a resume counts once."""
    return len({str(record.get("step")) for record in _records(path) if "reason" in record})


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that can be read: what one that was cut off would leave out is judged once more."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
