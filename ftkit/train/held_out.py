"""The loss of each held-out row, before and after training.

Evaluation keeps three numbers per row: the sum of its losses, its label tokens, and how many of them were predicted. Loss,
perplexity and accuracy are those of all label tokens together, for any batch size and number of ranks. The losses of single
rows let `data/compare_runs.py` compare two runs row by row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftkit.hf.generate.evaluation import Evaluation
from ftkit.output.run_folder import write_json

METRICS = {"loss": "token_loss", "perplexity": "perplexity", "accuracy": "accuracy"}
"""Metrics of a recipe, and their names in the Trainer. Its own `eval_loss` is the mean over batches."""
NAMES = {"loss": "held-out loss", "perplexity": "perplexity", "accuracy": "accuracy"}
"""Names of the metrics in text."""


@dataclass(frozen=True)
class HeldOut:
    """Result of an evaluation of the held-out rows.

    Args:
        step: Optimizer steps done.
        loss_sums: (N,) float64, sum of the losses of each row's label tokens, nats.
        tokens: (N,) int64, label tokens of each row.
        hits: (N,) int64, label tokens that had the highest probability.
    """

    step: int
    loss_sums: np.ndarray
    tokens: np.ndarray
    hits: np.ndarray

    @classmethod
    def of(cls, step: int, rows: np.ndarray) -> HeldOut:
        """Return the result of a step from the (N, 3) numbers of `row_statistics`."""
        counts = np.rint(rows[:, 1:]).astype(np.int64)
        return cls(step, rows[:, 0].astype(np.float64), counts[:, 0], counts[:, 1])

    @property
    def row_losses(self) -> np.ndarray:
        """Mean loss of each row's label tokens, (N,) nats; 0 for a row that has none."""
        return self.loss_sums / np.maximum(self.tokens, 1)

    def summary(self) -> dict[str, float]:
        """Return loss, perplexity and accuracy of all label tokens, and their number."""
        overall = Evaluation.of(self.loss_sums.sum(), self.tokens.sum())
        return {
            "step": self.step,
            "loss": overall.loss,
            "perplexity": overall.perplexity,
            "accuracy": float(self.hits.sum() / max(overall.tokens, 1)),
            "tokens": overall.tokens,
        }

    def metrics(self, wanted: tuple[str, ...]) -> dict[str, float]:
        """Return loss and perplexity as the Trainer reports them, and accuracy if it is wanted."""
        numbers = self.summary()
        accuracy = {"accuracy": numbers["accuracy"]} if "accuracy" in wanted else {}
        return {"token_loss": numbers["loss"], "perplexity": numbers["perplexity"], **accuracy}


def write_rows(path: Path, before: HeldOut | None, after: HeldOut | None) -> None:
    """Write tokens, mean losses and hits of each row before and after training, in the order of the held-out data."""
    content: dict[str, list[float]] = {}
    for name, each in (("before", before), ("after", after)):
        if each is not None:
            content["tokens"] = each.tokens.tolist()
            content[name] = each.row_losses.tolist()
            content[f"hits_{name}"] = each.hits.tolist()
    write_json(path, content)


def read_before(path: Path) -> HeldOut | None:
    """Return what `write_rows` wrote before the first step, or None."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        losses, tokens = np.array(content["before"], dtype=np.float64), np.array(content["tokens"], dtype=np.int64)
        return HeldOut(0, losses * tokens, tokens, np.array(content["hits_before"], dtype=np.int64))
    except (OSError, ValueError, KeyError):  # a run without evaluation
        return None
