"""Draws docs/convergence-loss.svg and docs/convergence-apart.svg: curves of `make bench-convergence`.

The curves are those of the committed result, means over seeds. `make docs` runs it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from docs.plan_figure import alone
from ftkit.report.charts import LEFT, Series, line_chart, svg_text

HERE = Path(__file__).parent
RESULT = HERE.parent / "benchmarks" / "results" / "2026-11-29-convergence-12m.json"
LOSS, APART = HERE / "convergence-loss.svg", HERE / "convergence-apart.svg"


def curves(runs: list[dict[str, Any]]) -> dict[str, dict[int, dict[int, float]]]:
    """Return the held-out losses by form of state, seed and step."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(run["form"], {})[run["seed"]] = {point["step"]: point["loss"] for point in run["curve"]}
    return found


def figures() -> dict[Path, str]:
    """Return both charts: the loss of each form, and its difference to fp32 state on the same seed."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    forms = [row["form"] for row in result["summary"]]
    by_form = curves(result["runs"])
    reference = by_form[forms[0]]
    steps = sorted(next(iter(reference.values())))
    losses, apart = [], []
    for colour, form in enumerate(forms):
        seeds = by_form[form]
        losses.append(Series(form, [(s, statistics.mean(of[s] for of in seeds.values())) for s in steps], colour=colour))
        percent = [(s, statistics.mean(100 * (of[s] / reference[seed][s] - 1) for seed, of in seeds.items())) for s in steps]
        apart.append(Series(form, percent, colour=colour))
    names = legend(forms)
    return {
        LOSS: alone(line_chart("Held-out loss", ("loss", "nats per token"), losses), names),
        APART: alone(line_chart("Difference to fp32 state", ("difference", "%"), apart, from_zero=True), names),
    }


def legend(names: list[str]) -> str:
    """Return a row of names, each after a stroke of its colour."""
    row = []
    for place, name in enumerate(names):
        x = LEFT + 84 * place
        row += [f'<path class="line s{place}" d="M{x} -6h14"/>', svg_text("tick", x + 19, -2, name, "start")]
    return "".join(row)


if __name__ == "__main__":
    for path, text in figures().items():
        path.write_text(text, encoding="utf-8")
