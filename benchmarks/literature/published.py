"""Published results on V100s (published.yaml), simulated with one set of constants a machine.

A run has figures; each is used to fit constants, held back to judge them, or reported only. Nothing is tuned for one run:
options are what its publication or its release says, and where a batch is not published a rule says which one is taken.
It refuses what does not fit the file's form. What it costs: milliseconds a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.literature import schedules as peers
from benchmarks.literature.schedules import Order, Seconds
from benchmarks.literature.work import Machine, Work

ROLES = ("used", "held back", "reported")

TOLERANCE, NVME_TOLERANCE = 0.10, 0.15
"""Of a figure that was held back; with state on NVMe."""


@dataclass(frozen=True)
class Constant:
    """One constant of a machine.

    Args:
        name: name as in `Machine`; "compute.4096" is the one of a hidden size.
        value: the value, per second.
        low: lower end of its range, per second.
        high: upper end of its range, per second.
        how: how the value came about: fitted, start or published.
        source: where value and range stand.
    """

    name: str
    value: float
    low: float
    high: float
    how: str
    source: str


@dataclass(frozen=True)
class Figure:
    """A number that was printed: what it is, the number, its role (ROLES), and what is to be said of it."""

    what: str
    printed: float
    role: str
    note: str = ""


@dataclass(frozen=True)
class Run:
    """A published run; see published.yaml for the arguments."""

    id: str
    title: str
    machine: str
    system: str
    options: Mapping[str, Any]
    work: Work
    batch: str
    convention: str
    source: str
    figures: tuple[Figure, ...]
    one_thread: bool = False

    @property
    def tolerance(self) -> float:
        """By how much a figure that was held back may be missed."""
        return NVME_TOLERANCE if self.options.get("state") == "nvme" else TOLERANCE

    def order(self, **changed: Any) -> Order:
        """Return its step, with some options changed."""
        made: Order = getattr(peers, self.system)(self.work, **{**self.options, **changed})
        return made

    def simulated(self, what: str, machine: Machine) -> float:
        """Return what the model says of a figure.

        Raises:
            ValueError: if a figure is something that is not known.
        """
        made = self._seconds(machine)
        if what in ("forward", "backward", "update", "step"):
            return float(getattr(made, what))
        if what == "tflops":
            return self.work.counted(self.convention) / made.step / 1e12
        if what == "gain":
            return self._seconds(machine, overlap="none").step / made.step
        if what == "overhead":
            return self._seconds(machine, checkpoints=True).step / self._seconds(machine, checkpoints=False).step
        raise ValueError(f"{self.id}: a figure is {what!r}, which nothing simulates")

    def _seconds(self, machine: Machine, **changed: Any) -> Seconds:
        return self.order(**changed).seconds(machine.rates(self.work, one_thread=self.one_thread))


@dataclass(frozen=True)
class Compared:
    """A figure beside what the model says of it."""

    run: Run
    figure: Figure
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over printed, less one."""
        return self.simulated / self.figure.printed - 1

    @property
    def holds(self) -> bool:
        """Whether it is within its run's tolerance."""
        return abs(self.error) <= self.run.tolerance


def constants() -> dict[str, tuple[Constant, ...]]:
    """Return the constants of each machine."""
    return {
        name: tuple(_constant(key, value) for key, value in told["constants"].items())
        for name, told in _read()["machines"].items()
    }


def machines(changed: Mapping[tuple[str, str], float] | None = None) -> dict[str, Machine]:
    """Return the machines.

    Args:
        changed: (machine, constant) to another value: for fitting.
    """
    other = changed or {}
    found = {}
    for name, known in constants().items():
        values = {each.name: other.get((name, each.name), each.value) for each in known}
        compute = {int(key.split(".")[1]): values.pop(key) for key in list(values) if key.startswith("compute.")}
        found[name] = Machine(gpus=_read()["machines"][name]["gpus"], compute=compute, **values)
    return found


def runs() -> tuple[Run, ...]:
    """Return the published runs.

    Raises:
        ValueError: for a role that is none.
    """
    return tuple(_run(told) for told in _read()["runs"])


def compare(known: Mapping[str, Machine] | None = None) -> Iterator[Compared]:
    """Yield every figure beside what the model says of it."""
    nodes = known or machines()
    for run in runs():
        for figure in run.figures:
            yield Compared(run, figure, run.simulated(figure.what, nodes[run.machine]))


def _run(told: Mapping[str, Any]) -> Run:
    values = dict(told)
    figures = tuple(Figure(**each) for each in values.pop("figures"))
    if wrong := {each.role for each in figures} - set(ROLES):
        raise ValueError(f"{told['id']}: no role {min(wrong)!r}: {', '.join(ROLES)}")
    return Run(work=Work(**values.pop("shape")), figures=figures, **values)


def _constant(name: str, told: Mapping[str, Any]) -> Constant:
    numbers = {key: float(told[key]) for key in ("value", "low", "high")}
    return Constant(name, how=told["how"], source=told["source"], **numbers)


@cache
def _read() -> Any:
    return yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
