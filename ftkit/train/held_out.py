"""The loss of each held-out row, before and after.

Evaluation keeps, of each row, the sum of its losses, its label tokens and how many of them were the likeliest; three
numbers a row, not its logits. Loss, perplexity and accuracy are those of all label tokens together, whatever the
batches and the number of ranks were; the losses of single rows let two runs be compared question by question.

Cost: the logits of one row in fp32 at a time.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftkit.hf.generate.evaluation import Evaluation
from ftkit.output.run_folder import write_json


@dataclass(frozen=True)
class HeldOut:
    """What the held-out rows gave at one step.

    Args:
        step: Optimizer steps done.
        loss_sums: (N,) float64, sum of the losses of each row's label tokens, nats.
        tokens: (N,) int64, label tokens of each row.
        hits: (N,) int64, label tokens that were the likeliest.
    """

    step: int
    loss_sums: np.ndarray
    tokens: np.ndarray
    hits: np.ndarray

    @property
    def loss(self) -> float:
        """Mean loss of all label tokens, nats."""
        return self.all_tokens.loss

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return self.all_tokens.perplexity

    @property
    def all_tokens(self) -> Evaluation:
        """What all label tokens together gave."""
        return Evaluation.of(self.loss_sums.sum(), self.tokens.sum())

    @property
    def accuracy(self) -> float:
        """Share of all label tokens that were the likeliest."""
        return float(self.hits.sum() / max(self.tokens.sum(), 1))

    @property
    def row_losses(self) -> np.ndarray:
        """Mean loss of each row's label tokens, (N,) nats; 0 where a row has none."""
        return self.loss_sums / np.maximum(self.tokens, 1)

    def metrics(self, wanted: tuple[str, ...]) -> dict[str, float]:
        """Return loss and perplexity, and what else a recipe asks for."""
        accuracy = {"accuracy": self.accuracy} if "accuracy" in wanted else {}
        return {"token_loss": self.loss, "perplexity": self.perplexity, **accuracy}

    def summary(self) -> dict[str, float | None]:
        """Return loss, its mean over rows and the standard error of that mean."""
        rows = self.row_losses
        error = float(rows.std(ddof=1) / math.sqrt(len(rows))) if len(rows) > 1 else None
        return {
            "step": self.step,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "accuracy": self.accuracy,
            "rows": len(rows),
            "tokens": int(self.tokens.sum()),
            "row_loss_mean": float(rows.mean()),
            "row_loss_standard_error": error,
        }


def write_rows(path: Path, before: HeldOut | None, after: HeldOut | None) -> None:
    """Write the numbers of each row, in the order of the held-out data.

    Args:
        path: JSON: `tokens`, and for each of `before` and `after` the row's mean loss in nats and its hits.
        before: Numbers of the model as it came, or None.
        after: Numbers of the trained model, or None.
    """
    content: dict[str, list[float]] = {}
    for name, each in (("before", before), ("after", after)):
        if each is not None:
            content["tokens"] = each.tokens.tolist()
            content[name] = each.row_losses.tolist()
            content[f"hits_{name}"] = each.hits.tolist()
    write_json(path, content)


def read_before(path: Path) -> HeldOut | None:
    """Return what `write_rows` wrote of the model as it came, or None."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        losses, tokens = np.array(content["before"], dtype=np.float64), np.array(content["tokens"], dtype=np.int64)
        return HeldOut(0, losses * tokens, tokens, np.array(content["hits_before"], dtype=np.int64))
    except (OSError, ValueError, KeyError):  # an earlier run without evaluation
        return None
