"""docs/compatibility.md, written from the cases: `make compatibility`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from tests.compat.accelerate_cases import ACCELERATE
from tests.compat.case import Case, Found
from tests.compat.trainer_table import TRAINER

FILE = Path(__file__).parents[2] / "docs" / "compatibility.md"
CASES: tuple[Case, ...] = (*TRAINER, *ACCELERATE)

HEAD = """# One import changed: what stays the same

Each row is a feature of transformers' Trainer or of a loop with accelerate. It is run twice in one process: with the stock
classes and with those of ftkit. Then logs, counts, files, the calls of callbacks and the weights are compared.

| outcome | meaning |
|---|---|
| same | everything agrees up to the rounding of fp32 sums, or both raise |
| differs | the results differ on purpose; the last column says why |
| refused | the stock classes run it; ftkit stops with the message in the last column |

The cases are in `tests/compat`. `make compatibility` runs them and writes this page; a test compares the outcomes. The cases
were chosen from three lists: the files in transformers' `tests/trainer` (accelerator, callback, checkpointing, data,
evaluation, hyperparameter, optimizers, resume, seq2seq, training arguments), the fields of `TrainingArguments` in
transformers 5.23, and the public methods of `Accelerator` and `LocalSGD` in accelerate 1.15. Of those test files only the
names were used, and a part of `test_trainer_evaluation.py` was read.

`tests/hf` compares more features with the stock classes, on two and three ranks, and they are the same: accumulation, label
smoothing, `model_init`, `train()` twice, tied weights, LoRA, losses of a user's own, SGD, schedules of plateaus, grouping by
length, streams, split batches, prediction, the order of a callback's events, the best checkpoint and the limit on
checkpoints, resuming from any checkpoint, generation in evaluation (`Seq2SeqTrainer`); and with accelerate: accumulation and
clipping, states, metrics of an uneven last batch, a reference model.
"""


def page(found: Mapping[str, Found]) -> str:
    """Return the page for the outcomes of all cases, by name."""
    counts = Counter(each.outcome for each in found.values())
    parts = [
        HEAD,
        f"{len(found)} cases: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) + ".",
    ]
    for group, cases in groupby(CASES, key=lambda case: case.group):
        parts.append(f"\n## {group}\n\n| feature | outcome | why |\n|---|---|---|")
        for case in cases:
            outcome = found[case.name]
            parts.append(f"| {cell(case.feature)} | {outcome.outcome} | {cell(outcome.reason)} |")
    return "\n".join(parts) + "\n"


def cell(text: str) -> str:
    """Return text as a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
