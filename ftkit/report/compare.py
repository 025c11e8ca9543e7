"""Several runs on one page: curves in the same charts, results, and the differences between their recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ftkit.config import yaml_lines
from ftkit.output.run_folder import write_file
from ftkit.report.facts import Facts, read_run
from ftkit.report.page import charts
from ftkit.report.style import html
from ftkit.report.text import gib, lasted, short
from ftkit.spec.tiers import DEVICE, HOST


def compare(folders: Sequence[Path], out: Path) -> None:
    """Write a page that compares the runs of some folders.

    Raises:
        UserError: A path is no folder of a run.
        OSError: The page cannot be written.
    """
    write_file(out, render([(str(folder), read_run(folder)) for folder in dict.fromkeys(folders)]))


def render(runs: Sequence[tuple[str, Facts]]) -> str:
    """Return the page."""
    recipes = {name: dict(flattened(yaml_lines.read(facts.recipe, "recipe.yaml").values)) for name, facts in runs}
    keys = dict.fromkeys(key for recipe in recipes.values() for key in recipe)
    differ = [key for key in keys if len({recipe.get(key, "–") for recipe in recipes.values()}) > 1]
    return html(
        "compare.html",
        title=" and ".join(recipes),
        names=list(recipes),
        results=list(_results([facts for _, facts in runs])),
        charts=Markup().join(charts(runs)),
        differences=[(key, *(recipe.get(key, "–") for recipe in recipes.values())) for key in differ],
    )


def _results(runs: Sequence[Facts]) -> Iterator[Sequence[str]]:
    losses = [facts.losses() for facts in runs]
    yield "status", *(facts.status[0] for facts in runs)
    yield "loss on", *(name.removesuffix(" loss") for name, _, _ in losses)
    yield "loss before, nats per token", *(short(before) for _, before, _ in losses)
    yield "loss after, nats per token", *(short(after) for _, _, after in losses)
    yield "steps", *(f"{facts.steps:,}" for facts in runs)
    yield "tokens", *(f"{facts.tokens or 0:,.0f}" for facts in runs)
    yield "tokens/s", *(short(facts.tokens_per_s, 3) for facts in runs)
    yield "time", *(lasted(facts.fact("seconds")) for facts in runs)
    for tier in (DEVICE, HOST):
        peaks = [facts.peak_bytes(tier) for facts in runs]
        if any(peaks):
            yield f"peak {tier} memory per rank", *(gib(peak) if peak else "–" for peak in peaks)
    yield "ranks", *(str(facts.ranks) for facts in runs)
    yield "device", *(str(facts.fact("device") or "–") for facts in runs)
    yield "compute dtype", *(str(facts.fact("dtype") or "–") for facts in runs)
    yield "strategy", *(facts.plan.get("strategy", {}).get("says", "–") for facts in runs)


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a recipe as (dotted key, text); a list is one text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)  # null and true, as in the recipe
