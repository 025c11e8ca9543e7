"""Compare two runs question by question: `python data/compare_runs.py runs/demo runs/demo-control`.

Both must have been evaluated on the same held-out file. Each row's mean loss after the second run is set against the same
row's after the first; the difference must be more than three standard errors (over rows) above zero, or the first run
learned nothing from the questions that the second, with shuffled answers, could not learn from their form.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

NEEDED_STANDARD_ERRORS = 3.0


def row_losses(run: str) -> list[float]:
    """Return the mean loss of each held-out row after a run, in nats; ends where one is no number."""
    losses = json.loads(Path(run, "eval_per_example.json").read_text())["after"]
    if broken := sum(loss is None for loss in losses):
        sys.exit(f"{run}: the loss of {broken} of {len(losses)} held-out rows is not finite: the run has failed")
    return losses


def main() -> int:
    """Print the comparison; return 0 if the second run is clearly worse."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    true, control = row_losses(sys.argv[1]), row_losses(sys.argv[2])
    if len(true) != len(control):
        sys.exit(f"{len(true)} and {len(control)} held-out rows: these runs were not evaluated on the same file")
    differences = [b - a for a, b in zip(true, control)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    for run, losses in ((sys.argv[1], true), (sys.argv[2], control)):
        print(f"{run}: held-out loss a question {statistics.mean(losses):.3f}")
    print(f"difference {mean:.3f} +- {error:.3f} over {len(differences)} questions: {mean / error:.1f} standard errors")
    return 0 if mean > NEEDED_STANDARD_ERRORS * error else 1


if __name__ == "__main__":
    sys.exit(main())
