"""`make published`: write docs/published.md, what the plan's event language says of results that others published.

`--fit` finds anew the constants that benchmarks/literature/published.yaml calls fitted, from figures with the role `used`
alone, each within its range; `python -m benchmarks.peer_models` checks that no neighbour of theirs is better.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.literature.published import Compared, Constant, Run, compare, constants, machines, runs
from benchmarks.literature.work import Machine

FILE = Path(__file__).parents[1] / "docs" / "published.md"
GOLDEN = (math.sqrt(5) - 1) / 2
UNITS = {"forward": "s", "backward": "s", "update": "s", "step": "s", "tflops": "TFLOPS", "gain": "x", "overhead": "x"}
SAID = {
    "gain": "step without overlap / with",
    "overhead": "step, checkpoints on host / not",
    "tflops": "TFLOPS a GPU",
}
TEXT = """# Published results, simulated

<!-- written by `make published`; a test compares -->

The plan gives seconds from an event model (`ftkit/plan/events.py`). Here it is asked about results that others published for
V100s: their orders of work are written in the same events (`benchmarks/literature/schedules.py`), their settings and
printed figures are in `benchmarks/literature/published.yaml`, each with its source. One set of constants describes a
machine; none is outside the range that `performance-model.md` leaves it. Figures marked *used* are all that constants were
fitted on; *held back* ones are the test: within 10 % (15 % with state on NVMe). Points are numbered as in
`performance-model.md`, section B1. Nothing here was measured by this project.

{summary}

## Held back

{held}

## Used to fit

{used}

The fit minimises the mean absolute logarithm of simulated over printed, so that a figure for which the model lacks a cause
does not bend what the others agree on. The largest such gap is figure 6c on 4 GPUs. Squares instead would put `compute.8192`
at 50 TFLOPS, the end of its range, for its sake; V8's 20B then misses too (-14 %).

## Reported only

{reported}

## Constants

{constants}

## Runs, batches and sources

Where a batch or a setting is not published, a rule takes it, the same for all runs of a system, and no result does: the
batch of the authors' table for that model; else the largest that they list and that fits; a switch is as its release has it.

{runs}
"""


def text() -> str:
    """Return the document."""
    found = list(compare())
    held = [each for each in found if each.figure.role == "held back"]
    holding = sum(each.holds for each in held)
    missed = "".join(f"; {each.run.id} misses" for each in held if not each.holds)
    summary = f"Of {len(held)} figures held back, {holding} are within their tolerance{missed}."
    tables = {role: _figures([each for each in found if each.figure.role == role]) for role in ("used", "reported")}
    return TEXT.format(
        summary=summary, held=_figures(held), **tables, constants=_constants(), runs="\n".join(map(_run, runs()))
    )


def fit(rounds: int = 2) -> dict[tuple[str, str], float]:
    """Return the fitted constants anew: one after the other, by golden section within its range."""
    known = constants()
    free = [(name, each) for name, all_ in known.items() for each in all_ if each.how == "fitted"]
    found = {(name, each.name): each.value for name, each in free}
    for _ in range(rounds):
        for name, each in free:
            found[name, each.name] = _best(found, name, each)
    return found


def badness(known: Mapping[str, Machine], machine: str) -> float:
    """Return the mean absolute logarithm of simulated over printed, of the figures that are used on a machine.

    Absolute, not squared: a figure for which the model lacks a cause (6c on 4 GPUs) must not bend what all others agree on.
    """
    ratios = [
        math.log(run.simulated(figure.what, known[machine]) / figure.printed)
        for run in runs()
        for figure in run.figures
        if run.machine == machine and figure.role == "used"
    ]
    return sum(map(abs, ratios)) / len(ratios)


def _best(found: Mapping[tuple[str, str], float], machine: str, constant: Constant) -> float:
    def bad(value: float) -> float:
        return badness(machines({**found, (machine, constant.name): value}), machine)

    low, high = constant.low, constant.high
    while high - low > 1e-3 * constant.high:
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if bad(left) <= bad(right) else (left, high)
    return min((constant.low, (low + high) / 2, constant.high), key=bad)


def _figures(found: list[Compared]) -> str:
    rows = ["| point | run | machine | figure | printed | simulated | error | |", "|---|---|---|---|---|---|---|---|"]
    for each in found:
        unit = UNITS[each.figure.what]
        digits = 1 if unit == "TFLOPS" else 2
        verdict = ("holds" if each.holds else "**misses**") if each.figure.role == "held back" else ""
        note = ". ".join(filter(None, (verdict, each.figure.note)))
        what = SAID.get(each.figure.what, f"{each.figure.what}, {unit}")
        numbers = f"{each.figure.printed:.{digits}f} | {each.simulated:.{digits}f} | {100 * each.error:+.1f} %"
        rows.append(f"| {each.run.id} | {each.run.title} | {each.run.machine} | {what} | {numbers} | {note} |")
    return "\n".join(rows)


def _constants() -> str:
    rows = ["| machine | constant | value | range | how | source |", "|---|---|---|---|---|---|"]
    for name, known in constants().items():
        for each in known:
            unit, scale = ("TFLOPS", 1e12) if each.name.startswith("compute") else ("GB/s", 1e9)
            unit = "Gp/s" if each.name == "adam" else unit
            value, low, high = (f"{number / scale:g}" for number in (each.value, each.low, each.high))
            rows.append(f"| {name} | {each.name} | {value} {unit} | {low}-{high} | {each.how} | {each.source} |")
    return "\n".join(rows)


def _run(run: Run) -> str:
    work = run.work
    shape = f"{work.layers} x {work.hidden}, {work.sequence_tokens} tokens, {work.sequences} sequences a GPU"
    options = ", ".join(f"{key} {value}" for key, value in run.options.items()) or "no options"
    return f"- **{run.id}** {run.title}: `{run.system}` ({options}); {shape}. Batch: {run.batch}. Source: {run.source}."


def main() -> None:
    """Fit, or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    if parser.parse_args().fit:
        for (machine, name), value in fit().items():
            print(f"{machine} {name}: {value:.4g}")
    else:
        FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
