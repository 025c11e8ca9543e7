"""Several runs side by side: their curves in the same charts, what differs in their recipes, and what came of each.

It refuses folders that are no runs, and more runs than there are colours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ftkit.config import yaml_lines
from ftkit.errors import UserError
from ftkit.output.run_folder import check_target, write
from ftkit.report.charts import COLOURS
from ftkit.report.facts import Facts, read
from ftkit.report.page import charts, page
from ftkit.report.text import escaped, finite, gib, lasted, record, short
from ftkit.spec.tiers import DEVICE, HOST

MOST_KEYS = 200
"""Of a recipe, that are shown as different."""


def compare(folders: Sequence[Path], out: Path) -> None:
    """Write a page that compares runs.

    Args:
        folders: folders of the runs, the one that others are compared with first.
        out: the file to write.

    Raises:
        UserError: One is no run's folder, there are more than six, or the page cannot be written.
    """
    if len(folders) > COLOURS:
        raise UserError(f"{len(folders)} runs were named; a chart can show at most {COLOURS}")
    runs = list(zip(names_of(folders), map(read, folders)))
    check_target(out, "--out", ".html")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, render(runs))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another file with --out") from None


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder that tells it from the others: as many of its last parts as that takes."""
    paths = [Path(os.path.realpath(folder)).parts for folder in folders]
    for count in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-1:])} ({number})" for number, parts in enumerate(paths, 1)]  # one folder, named twice


def render(runs: Sequence[tuple[str, Facts]]) -> str:
    """Return the page."""
    title = " and ".join(name for name, _ in runs)
    names = enumerate(escaped(name, 80) for name, _ in runs)
    keys = "".join(f'<li><i class="key part b{place}"></i>{name}</li>' for place, name in names)
    body = [
        f'<header><h1>{escaped(title, 300)}</h1></header><ul class="legend">{keys}</ul>',
        "<h2>Results</h2>",
        _table(["", *(name for name, _ in runs)], _results(runs)),
        '<h2>Curves</h2><div class="grid-of-charts">',
        *charts(runs),
        "</div><h2>What differs in the recipes</h2>",
        _differences(runs),
        "<footer>Written by ftkit. This file needs no other.</footer>",
    ]
    return page(f"{title} – ftkit", body)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escaped(each, 200)}</th>" for each in heads)
    body = "".join(f"<tr><th>{escaped(row[0], 200)}</th>{_cells(row[1:])}</tr>" for row in rows)
    return f'<div class="sheet"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{escaped(each, 2000)}</td>" for each in row)


def _results(runs: Sequence[tuple[str, Facts]]) -> Iterable[Sequence[str]]:
    losses = [facts.losses() for _, facts in runs]
    yield "status", *(facts.status[0] for _, facts in runs)
    yield "loss is of", *(name.removesuffix(" loss") for name, _, _ in losses)
    yield "loss before, nats a token", *(short(before) for _, before, _ in losses)
    yield "loss after, nats a token", *(short(after) for _, _, after in losses)
    steps = [finite(facts.summary.get("steps")) or facts.curves.step for _, facts in runs]
    tokens = [finite(facts.summary.get("tokens")) or facts.curves.tokens for _, facts in runs]
    for name, known in (("steps", steps), ("tokens", tokens)):
        yield name, *(f"{value:,.0f}" if value else "–" for value in known)
    yield "tokens a second", *(short(facts.tokens_per_s, 3) for _, facts in runs)
    yield "time", *(lasted(finite(facts.summary.get("seconds"))) for _, facts in runs)
    for tier in (DEVICE, HOST):
        peaks = [facts.peak_bytes(tier) for _, facts in runs]
        if any(peaks):
            yield f"peak memory, {tier}, a rank", *(gib(peak) if peak else "–" for peak in peaks)
    yield "ranks", *(str(facts.ranks) for _, facts in runs)
    for name, key in (("device", "device"), ("dtype of compute", "dtype")):
        yield name, *(str(facts.standing.get(key) or facts.summary.get(key) or "–") for _, facts in runs)
    yield "strategy", *(str(record(facts.plan.get("strategy")).get("says") or "–") for _, facts in runs)


def _differences(runs: Sequence[tuple[str, Facts]]) -> str:
    flat = [dict(flattened(yaml_lines.read(facts.recipe, "recipe.yaml").values)) for _, facts in runs]
    unread = [name for (name, facts), values in zip(runs, flat) if not values]
    keys = dict.fromkeys(key for each in flat for key in each)
    differ = [key for key in keys if len({each.get(key, "–") for each in flat}) > 1]
    note = f'<p class="soft">No recipe could be read of: {escaped(", ".join(unread))}</p>' if unread else ""
    if not differ:
        return note or '<p class="soft">Nothing.</p>'
    rows = ((key, *(each.get(key, "–") for each in flat)) for key in differ[:MOST_KEYS])
    more = f'<p class="soft">{len(differ) - MOST_KEYS} more differ.</p>' if len(differ) > MOST_KEYS else ""
    return _table(["key", *(name for name, _ in runs)], rows) + more + note


def flattened(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Yield a recipe's values as (dotted key, text); lists as one text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value if isinstance(value, str) else json.dumps(value, default=str)  # null and true, as in the recipe
