"""The best evaluation of a run, and early stopping after `eval.patience` evaluations without a new best.

Both come from the evaluations in the Trainer's history, which checkpoints store. A resumed run therefore stops at the step
of an undisturbed one. The evaluation before the first step does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ftkit.config.recipe import Eval
from ftkit.train.held_out import METRICS, NAMES


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Args:
        step: Optimizer steps done; 0 if no evaluation has a finite value.
        value: Value of the metric.
        since: Evaluations after it.
    """

    step: int
    value: float
    since: int


def evaluations(history: Iterable[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Return step and value of each evaluation after the first step. The end of a run repeats one, which counts once."""
    key = f"eval_{METRICS[metric]}"
    return {line["step"]: line[key] for line in history if key in line and line["step"] > 0}


def best_of(history: Iterable[Mapping[str, Any]], metric: str) -> Best:
    """Return the best evaluation after the first step. A value that is not finite is never the best."""
    sign = -1.0 if metric == "accuracy" else 1.0
    best = Best(0, sign * math.inf, 0)
    for step, value in evaluations(history, metric).items():
        better = sign * value < sign * best.value
        best = Best(step, value, 0) if better else Best(best.step, best.value, best.since + 1)
    return best


def stays_stopped(stopped: Mapping[str, Any], held_out: Eval | None) -> bool:
    """Return whether a run that `stopped_early` in summary.json describes would stop there with the present `eval`, too."""
    if not stopped or held_out is None or held_out.patience is None:
        return False
    return held_out.best == stopped["metric"] and held_out.patience <= stopped["patience"]


class EarlyStopping(TrainerCallback):
    """Name the best evaluation, whose checkpoint stays, and end training after `patience` evaluations without a new best.

    Args:
        held_out: The recipe's `eval`, or None.

    Attributes:
        best: The best evaluation as in summary.json, or None.
        stopped: The early stop as in summary.json, or None.
    """

    def __init__(self, held_out: Eval | None) -> None:
        self.metric, self.patience = (held_out.best, held_out.patience) if held_out else ("loss", None)
        self.best: dict[str, Any] | None = None
        self.stopped: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Judge the evaluations of the checkpoint by the present metric and patience."""
        found = best_of(state.log_history, self.metric)
        state.best_metric, state.best_global_step = (found.value, found.step) if found.step else (None, None)
        if found.step:
            self.best = {"step": found.step, "metric": self.metric, "value": found.value}
        if self.patience is not None and found.since >= self.patience and state.global_step < state.max_steps:
            facts = {"step": state.global_step, "best_step": found.step, "metric": self.metric, "patience": self.patience}
            why = f"no better {NAMES[self.metric]} since step {found.step} (patience {self.patience})"
            self.stopped = {**facts, "text": f"ended early at step {state.global_step}: {why}"}
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO  # as after the last step
        return control

    on_evaluate = on_train_begin
