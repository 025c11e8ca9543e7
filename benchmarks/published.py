"""`make published`: published V100 results beside the plan's event model, as a table in docs/benchmarks.md.

published.yaml has the runs, and one set of constants per machine. Figures with the role `used` were fitted on; those that
were `held back` test the model, with a tolerance of 10 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.literature import schedules
from benchmarks.literature.schedules import Seconds
from benchmarks.literature.work import Machine, Work

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
TOLERANCE = 0.10


@dataclass(frozen=True)
class Compared:
    """A printed figure beside the simulated one."""

    run: Mapping[str, Any]
    role: str
    printed: float
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over printed, less one."""
        return self.simulated / self.printed - 1

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return abs(self.error) <= TOLERANCE


def machine(known: Mapping[str, Any]) -> Machine:
    """Return a machine of the file."""
    values = {name: float(each["value"]) for name, each in known["constants"].items()}
    compute = {int(name.split(".")[1]): values.pop(name) for name in list(values) if name.startswith("compute.")}
    return Machine(gpus=known["gpus"], compute=compute, **values)


def simulated(run: Mapping[str, Any], what: str, node: Machine) -> float:
    """Return the simulated value of a figure."""
    work = Work(**run["shape"])
    rates = node.rates(work, one_thread=run.get("one_thread", False))

    def seconds(**changed: Any) -> Seconds:
        made: schedules.Order = getattr(schedules, run["system"])(work, **{**run["options"], **changed})
        return made.seconds(rates)

    if what == "tflops":
        return work.counted(run["convention"]) / seconds().step / 1e12
    if what == "gain":
        return seconds(overlap="none").step / seconds().step
    if what == "overhead":
        return seconds(checkpoints=True).step / seconds(checkpoints=False).step
    return float(getattr(seconds(), what))


def compare() -> Iterator[Compared]:
    """Yield every figure beside its simulation."""
    file = Path(__file__).with_name("literature") / "published.yaml"
    known = yaml.safe_load(file.read_text(encoding="utf-8"))
    nodes = {name: machine(each) for name, each in known["machines"].items()}
    for run in known["runs"]:
        for figure in run["figures"]:
            value = simulated(run, figure["what"], nodes[run["machine"]])
            yield Compared(run, figure["role"], figure["printed"], value)


def fragment() -> str:
    """Return the table of held-back figures, and a sentence on the others."""
    found = list(compare())
    rows = ["| held back | printed TFLOPS per GPU | simulated | error |", "|---|---|---|---|"]
    held = [each for each in found if each.role == "held back"]
    for each in held:
        numbers = f"{each.printed:.1f} | {each.simulated:.1f} | {each.error:+.1%}"
        rows.append(f"| {each.run['title']} | {numbers}{'' if each.holds else ', misses'} |")
    rows.append(f"\n{sum(each.holds for each in held)} of {len(held)} held-back figures are within their tolerance.")
    for role, text in (("used", "used for the fit"), ("reported", "neither fitted nor held back")):
        errors = [abs(each.error) for each in found if each.role == role]
        rows.append(
            f"{len(errors)} figures {text}: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}."
        )
    return "\n".join(rows)


def fill(text: str, name: str, content: str) -> str:
    """Return a page with the generated part `name` replaced. Comments mark where it starts and ends."""
    start, end = f"<!-- {name}: written by make {name} -->\n", f"\n<!-- {name}: end -->"
    before, rest = text.split(start)
    return f"{before}{start}\n{content}\n{end}{rest.split(end)[1]}"


def generated(text: str, name: str) -> str:
    """Return the generated part `name` of a page."""
    start, end = f"<!-- {name}: written by make {name} -->\n", f"\n<!-- {name}: end -->"
    return text.split(start)[1].split(end)[0].strip("\n")


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "published", fragment()), encoding="utf-8")


if __name__ == "__main__":
    main()
