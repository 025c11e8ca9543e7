"""`ftkit recipes list`: what the first line of each packaged recipe says, as a table.

The planner wrote those lines (`make recipes`), and a test makes them anew, so the list needs no torch and takes no time.
A recipe without such a line is listed with what it says instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ftkit.report.text import literal

TYPICAL_TOKENS = 100_000_000
"""Of a data set, for the column of days: some 200,000 conversations of 500 tokens."""

LINE = re.compile(
    r"(?P<model>[^,]+), (?P<method>.+), on (?P<hardware>[^:,]+): (?P<device>[\d.]+) GiB a GPU, (?P<host>\d+) GiB host, "
    r"(?P<speed>[\d,]+) tokens/s\."
)


@dataclass(frozen=True)
class Planned:
    """What a recipe's first line says: of the model, the method, the node; GiB of a GPU and of the host; tokens a second."""

    model: str
    method: str
    hardware: str
    device_gib: float
    host_gib: int
    tokens_per_s: int

    @property
    def days(self) -> float:
        """For `TYPICAL_TOKENS`."""
        return TYPICAL_TOKENS / self.tokens_per_s / 86400


def planned_of(line: str) -> Planned | str:
    """Return what a first line says, or the line itself if the planner did not write it."""
    found = LINE.match(line)
    if found is None:
        return line
    speed = int(found["speed"].replace(",", ""))
    return Planned(found["model"], found["method"], found["hardware"], float(found["device"]), int(found["host"]), speed)


def show_recipes(console: Console, rows: Mapping[str, Planned | str]) -> None:
    """Print them: name, method, hardware, memory, speed, days."""
    table = Table(box=None, pad_edge=False)
    for name in ("recipe", "method", "hardware", "GiB a GPU", "GiB host", "tokens/s", "days"):
        table.add_column(name, justify="left" if name in ("recipe", "method", "hardware") else "right", no_wrap=True)
    others = []
    for name, told in rows.items():
        if isinstance(told, str):
            others.append(f"{name}: {told}")
            continue
        memory = f"{told.device_gib:.1f}", str(told.host_gib)
        table.add_row(name, told.method, told.hardware, *memory, f"{told.tokens_per_s:,}", f"{told.days:.2f}")
    console.print(table)
    console.print(
        f"[dim]planned and simulated, not yet measured; days: for {TYPICAL_TOKENS / 1e6:.0f}M tokens. "
        "`ftkit plan NAME --hardware NAME` says more[/]"
    )
    for line in others:
        console.print(literal(line))
