"""What is known of a recipe's data before training: what becomes of the rows, what is wrong with them, some of them.

Found once (`ftkit.train.preview`), shown by whoever has a screen.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftkit.data.faults import Fault
from ftkit.data.preview import Shown
from ftkit.data.report import Report


@dataclass(frozen=True)
class Findings:
    """What is known of data before training.

    Args:
        title: what the findings are about
        report: what became of the rows; None where no source has a row that can be used
        held_out: the same of the held-out file; None where there is none
        faults: what is wrong with the rows, the worst first
        refused: why a run would not begin with them, or ""
        shown: some rows as the model gets them
        sequence_tokens: room of a sequence, in tokens
        notes: what else is good to know, one sentence each
    """

    title: str
    report: Report | None
    held_out: Report | None
    faults: tuple[Fault, ...]
    refused: str
    shown: tuple[Shown, ...]
    sequence_tokens: int
    notes: tuple[str, ...] = ()
