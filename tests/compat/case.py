"""A case of the compatibility table: one feature, run by stock's classes and by ftkit's, and how the two are judged.

A case makes evidence: plain data (logs, counts, files, what a callback saw) and the weights at the end. It is made twice in
one process, once with stock's classes and once with ours; nothing else differs. The outcome follows from what was found:

    same       the evidence agrees up to rounding, or both raise
    differs    it does not, and the case says why on purpose
    refused    stock runs and ours raises `UserError` with advice
    wrong      anything else
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ftkit
from tests.engine.families import determined
from tests.hf.runs import fresh_state

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Of two numbers that count as the same: single-precision sums in another order, through a few optimizer steps."""
WEIGHTS = 1e-3
"""Of two tensors, as the norm of the difference over the norm."""


@dataclass(frozen=True)
class Case:
    """A feature.

    Args:
        group: heading in the table.
        feature: what a reader looks for.
        make: from "stock" or "ours" and an empty folder to evidence.
        differs: why the evidence differs on purpose; empty if it must agree.
        raises: stock raises too.
    """

    group: str
    feature: str
    make: Callable[[str, str], Mapping[str, Any]]
    differs: str = ""
    raises: bool = False

    @property
    def name(self) -> str:
        """The case's name among tests."""
        return f"{self.group}: {self.feature}"


@dataclass(frozen=True)
class Found:
    """The outcome of a case: same, differs, refused or wrong; with the reason, or the first difference."""

    outcome: str
    reason: str = ""


@dataclass
class Attempt:
    """What one kind did: its evidence, or the error."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None


def attempt(case: Case, kind: str) -> Attempt:
    """Make a case's evidence in a folder of its own."""
    fresh_state()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="ftkit-compat-") as folder:
        try:
            return Attempt(case.make(kind, folder))
        except Exception as error:  # of any kind: the outcome is judged by it
            return Attempt(error=error)


def judge(case: Case) -> Found:
    """Run a case under both and say what came out."""
    stock, ours = attempt(case, "stock"), attempt(case, "ours")
    if stock.error is not None and ours.error is not None:
        if not case.raises:
            return Found("wrong", f"both raise: {stock.error!r}")
        return Found("same", f"both raise: {type(stock.error).__name__}")
    if ours.error is not None:
        if isinstance(ours.error, ftkit.UserError):
            return Found("refused", re.sub(r"\S*ftkit-compat-\w+", "FOLDER", " ".join(str(ours.error).split())))
        return Found("wrong", f"{type(ours.error).__name__}: {ours.error}")
    if stock.error is not None:
        return Found("differs", case.differs) if case.differs else Found("wrong", f"stock raises {stock.error!r}")
    different = first_difference(stock.evidence, ours.evidence)
    if different is None:
        return Found("same")
    return Found("differs", case.differs) if case.differs else Found("wrong", different)


def first_difference(stock: Any, ours: Any, path: str = "") -> str | None:
    """Return where two pieces of evidence differ, None if they agree."""
    if isinstance(stock, Tensor) and isinstance(ours, Tensor):
        one, two = determined(path, stock.float()), determined(path, ours.float())
        if one is None or two is None:
            return None
        apart = float((one - two).norm() / one.norm().clamp(min=1e-6)) if one.shape == two.shape else float("inf")
        return None if apart <= WEIGHTS else f"{path}: {apart:.1e} apart"
    if isinstance(stock, Mapping) and isinstance(ours, Mapping):
        if sorted(map(str, stock)) != sorted(map(str, ours)):
            return f"{path}: {sorted(map(str, ours))}, {sorted(map(str, stock))} in stock"
        pairs = [(key, stock[key], ours[key]) for key in stock]
    elif isinstance(stock, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(stock) != len(ours):
            return f"{path}: {len(ours)} entries, {len(stock)} in stock"
        pairs = [(number, one, two) for number, (one, two) in enumerate(zip(stock, ours))]
    else:
        return None if same_value(stock, ours) else f"{path}: {ours!r}, {stock!r} in stock"
    return next(
        (found for key, a, b in pairs if (found := first_difference(a, b, f"{path}.{key}".strip("."))) is not None), None
    )


def same_value(stock: Any, ours: Any) -> bool:
    """Return whether two plain values agree; a NaN agrees with a NaN."""
    if isinstance(stock, float) and isinstance(ours, (int, float)) and stock == stock:
        return abs(stock - ours) <= ABSOLUTE + RELATIVE * max(abs(stock), abs(ours))
    return bool(stock == ours) or (stock != stock and ours != ours)


def names_in(folder: str, pattern: str = "checkpoint-*") -> list[str]:
    """Return the names of what matches in a folder, in order."""
    return sorted(path.name for path in Path(folder).glob(pattern))
