"""The report of one run: one HTML file, made from the files of the run's folder.

While the run goes on, the page asks the browser to reload it every `REFRESH_SECONDS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ftkit.config.wording import counted
from ftkit.output.run_folder import RunFolder, write, write_file, write_json
from ftkit.report.charts import Bar, Point, Series, line_chart, stacked_bars
from ftkit.report.facts import ENDED, ENDED_EARLY, GOING_ON, Facts, read, read_run
from ftkit.report.style import html
from ftkit.report.text import GIB, gib, lasted, short
from ftkit.report.timeline import draw, from_chrome
from ftkit.spec.tiers import DEVICE, HOST, NVME

REFRESH_SECONDS = 5
MOST = 20
"""Samples and divergences that are shown."""
RECENT = 3
"""Last evaluations whose answers are shown unfolded."""
TIER_LABELS = {DEVICE: DEVICE, HOST: HOST, NVME: "NVMe"}

Card = tuple[str, str, str, str, str]
"""Name, value before, value, unit, note."""


def refresh(path: Path, out: Path | None = None) -> Path:
    """Write the report of a run's folder to `out`, or else to report.html in the folder. Return its path.

    Raises:
        UserError: The path is no folder of a run.
        OSError: The report cannot be written.
    """
    facts = read_run(path)
    target = out or facts.folder.report
    write_file(target, render(facts))
    return target


def note_end(folder: RunFolder, why: str) -> None:
    """Record that a run ended early if its rank 0 could not do so itself."""
    standing = read(folder).standing
    if standing.get("status") != GOING_ON:
        return
    with suppress(OSError):
        write_json(folder.standing, {**standing, "status": ENDED_EARLY, "why": why, "ended": now()})
        rewrite(folder)


def now() -> str:
    """Return the present time, to the second, with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def rewrite(folder: RunFolder) -> None:
    """Write the report of a run that goes on or has just ended."""
    write(folder.report, render(read(folder)))


def render(facts: Facts) -> str:
    """Return the report of a run."""
    status, why = facts.status
    size = f"{facts.plan['model']['parameters']:,} parameters" if facts.plan else ""
    about = (size, counted(facts.ranks, "rank"), facts.fact("device"), facts.fact("dtype"))
    return html(
        "report.html",
        title=facts.folder.path.resolve().name,
        refresh_seconds=REFRESH_SECONDS if status == GOING_ON else 0,
        status=status,
        kind={GOING_ON: "busy", ENDED: "good"}.get(status, "early"),
        about=" · ".join(filter(None, about)),
        why=why,
        stopped_early=facts.stopped_early,
        divergences=facts.divergences[-MOST:],
        cards=list(_cards(facts, status)),
        charts=Markup().join(charts([("", facts)])),
        memory=_memory(facts),
        steps=Markup().join(_steps(facts)),
        samples=list(_samples(facts)),
        environment=list(_environment(facts)),
        recipe=facts.recipe,
    )


def _cards(facts: Facts, status: str) -> Iterator[Card]:
    name, before, after = facts.losses()
    change = ""
    if before and before > 0 and after is not None and math.isfinite(after / before):
        change = f"{100 * (after / before - 1):+.1f} % since the start".replace("-", "−")
    if after is None:
        before, after = None, before
    yield f"{name}, nats per token", "" if before is None else short(before), short(after), "", change
    mean = "mean speed, pauses included" if facts.summary else "speed"
    yield mean, "", short(facts.tokens_per_s, 3), "tokens/s", f"{facts.tokens:,.0f} tokens" if facts.tokens else ""
    steps, done = facts.standing.get("steps"), facts.steps
    share = f"{min(done / steps, 1):.0%} done" if steps and status == GOING_ON else ""
    yield "steps", "", f"{done:,.0f}", f"of {steps:,.0f}" if steps else "", share
    seconds = facts.fact("seconds")
    yield "time", "", lasted(seconds), "", "" if seconds is None else "training" if facts.summary else "since the start"
    for tier in (DEVICE, HOST):
        planned = facts.planned_bytes(tier)
        if peak := facts.peak_bytes(tier):
            note = f"highest rank; {gib(planned)} planned" if planned else "highest rank"
            yield f"peak {tier} memory", "", gib(peak), "", note


def charts(runs: Sequence[tuple[str, Facts]]) -> list[Markup]:
    """Return the charts of some runs, each with its name. The name of a single run is ""; several have one colour each."""
    several = len(runs) > 1
    steps = [line["step"] for _, facts in runs for line in facts.metrics]

    def series(key: str, name: str, kind: str = "line", unit: float = 1.0, colour: int = 0) -> list[Series]:
        found = []
        for place, (run, facts) in enumerate(runs):
            points: list[Point] = [(x, y if y is None else y / unit) for x, y in facts.points(key)]
            if any(y is not None for _, y in points):
                label = ", ".join(filter(None, (run, name)))
                found.append(Series(label, points, kind, place if several else colour))
        return found

    loss = [*series("loss", "training"), *series("eval_loss", "held-out rows", "dots", colour=1)]
    rate = series("learning_rate", "rate", unit=1e-3)
    speed, scale = series("tokens_per_second", "all ranks"), series("loss_scale", "scale")
    accuracy = series("eval_accuracy", "held-out rows", "dots", 0.01)
    drawn = [
        line_chart("Loss", ("loss", "nats per token"), loss, xs=steps),
        line_chart("Gradient norm", ("before clipping", ""), series("grad_norm", "norm"), xs=steps, log=True),
        line_chart("Learning rate", ("learning rate", "10⁻³"), rate, xs=steps, from_zero=True),
        line_chart("Speed of each step", ("speed", "tokens/s"), speed, xs=steps, from_zero=True),
    ]
    if scale:
        drawn.insert(3, line_chart("Loss scale", ("loss scale", ""), scale, xs=steps, log=True))
    if accuracy:
        drawn.append(line_chart("Accuracy on held-out rows", ("label tokens correct", "%"), accuracy, xs=steps))
    for tier in (DEVICE, HOST):
        memory = series(f"peak_{tier}_bytes", "measured", unit=GIB)
        if any(y for each in memory for _, y in each.points):
            title = f"{tier.capitalize()} memory of rank 0"
            drawn.append(line_chart(title, ("peak so far", "GiB"), memory, xs=steps, from_zero=True))
    return drawn


def _memory(facts: Facts) -> Markup | str:
    bars = []
    for tier, name in TIER_LABELS.items():
        if purposes := facts.purposes(tier):
            bars.append(Bar(f"{name}, planned", purposes, facts.granted_bytes(tier)))
            if peak := facts.peak_bytes(tier):
                bars.append(Bar(f"{name}, measured", [("measured peak", peak)], plain=True))
    return stacked_bars("The rank with the highest peak", bars) if bars else ""


def _steps(facts: Facts) -> Iterator[Markup]:
    if facts.trace:
        trace = from_chrome(facts.trace)
        yield draw(f"Step {trace.step} of rank 0, measured: {lasted(trace.seconds)}", trace)
        overlap = "On a CPU, computation, collectives and update do not overlap. " if trace.device == "cpu" else ""
        yield Markup(
            '<p class="remark">The number in a bar is the index of the block. The gap between forward and backward is the '
            "head and the loss. {}For details, open trace.json in ui.perfetto.dev.</p>"
        ).format(overlap)
    if facts.standing.get("simulated"):
        found = from_chrome(facts.standing["simulated"])
        yield draw(f"The same step as simulated by the plan: {lasted(found.seconds)}", found)


def _samples(facts: Facts) -> Iterator[dict[str, Any]]:
    """Yield each sample prompt with its answers. `after` stands for the answer at an evaluation of the last step."""
    for record in (facts.fact("answers") or [])[:MOST]:
        during = [each for each in record.get("during", ()) if not record["after"] or each["step"] < facts.steps]
        yield {**record, "earlier": during[:-RECENT], "recent": during[-RECENT:]}


def _environment(facts: Facts) -> Iterator[tuple[str, str]]:
    strategy, versions = facts.plan.get("strategy", {}), facts.fact("versions") or {}
    rows = {
        "command": facts.fact("command"),
        "started": facts.standing.get("started"),
        "ended": facts.standing.get("ended"),
        "resumed from": facts.standing.get("resumed_from"),
        "device": facts.fact("device"),
        "compute dtype": facts.fact("dtype"),
        "optimizer": facts.fact("optimizer"),
        "ranks": facts.ranks,
        "cores": "; ".join(dict.fromkeys(facts.fact("cores_per_rank") or ())),
        "strategy": strategy.get("says"),
        "reasons": "\n".join(facts.plan.get("why", ())),
        "fp16": (facts.summary.get("fp16") or {}).get("text"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    yield from ((name, str(value)) for name, value in rows.items() if value)
