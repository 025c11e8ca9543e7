"""The report of one run: one HTML file, made from the files of the run's folder.

While the run goes on, the page asks the browser to reload it every `REFRESH_SECONDS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder, check_target, write, write_json
from ftkit.report.charts import Bar, Point, Series, line_chart, stacked_bars
from ftkit.report.facts import ENDED, ENDED_EARLY, GOING_ON, Facts, Reader, read
from ftkit.report.style import html
from ftkit.report.text import GIB, finite, gib, items, lasted, record, short
from ftkit.report.timeline import draw, with_loss
from ftkit.spec.tiers import DEVICE, HOST, NVME

REFRESH_SECONDS = 5
MOST = 20
"""Samples and divergences that are shown."""
TIER_LABELS = {DEVICE: DEVICE, HOST: HOST, NVME: "NVMe"}

Card = tuple[str, str, str, str, str]
"""Name, value before, value, unit, note."""


def refresh(path: Path, out: Path | None = None) -> Path:
    """Write the report of a run's folder to `out`, or else to report.html in the folder. Return its path.

    Raises:
        UserError: The path is no folder of a run, or the report cannot be written.
    """
    facts = read(path)
    target = out or facts.folder.report
    save(target, render(facts))
    return target


def save(target: Path, text: str) -> None:
    """Write a page.

    Raises:
        UserError: The target exists and is no HTML file, or cannot be written.
    """
    check_target(target, "--out", ".html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target, text)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); name another file with --out") from None


def note_end(folder: RunFolder, why: str) -> None:
    """Record that a run ended early if its rank 0 could not do so itself."""
    facts = Reader(folder).read()
    if facts.standing.get("status") != GOING_ON:
        return
    with suppress(OSError):
        write_json(folder.standing, {**facts.standing, "status": ENDED_EARLY, "why": why, "ended": now()})
        rewrite(Reader(folder))


def now() -> str:
    """Return the present time, to the second, with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def rewrite(reader: Reader) -> None:
    """Write the report of a run that goes on or has just ended."""
    write(reader.folder.report, render(reader.read()))


def render(facts: Facts) -> str:
    """Return the report of a run."""
    status, why = facts.status
    parameters = finite(record(facts.plan.get("model")).get("parameters"))
    size = f"{int(parameters):,} parameters" if parameters else ""
    about = (size, counted(facts.ranks, "rank"), *(str(facts.fact(key) or "") for key in ("device", "dtype")))
    samples = items(facts.summary.get("answers")) or items(facts.standing.get("answers"))
    keys = ("question", "before", "after", "expected")
    return html(
        "report.html",
        title=facts.folder.path.resolve().name,
        refresh_seconds=REFRESH_SECONDS if status == GOING_ON else 0,
        status=status,
        kind={GOING_ON: "busy", ENDED: "good"}.get(status, "early"),
        about=" · ".join(filter(None, about)),
        why=why,
        divergences=[
            f"step {each.get('step')}: {each.get('reason')}, then: {each.get('action')}"
            for each in facts.divergences[-MOST:]
        ],
        cards=list(_cards(facts, status)),
        charts=Markup().join(charts([("", facts)])),
        memory=_memory(facts),
        steps=Markup().join(_steps(facts)),
        samples=[{key: record(each).get(key, "") for key in keys} for each in samples[:MOST]],
        environment=list(_environment(facts)),
        recipe=facts.recipe,
    )


def _cards(facts: Facts, status: str) -> Iterator[Card]:
    name, before, after = facts.losses()
    change = ""
    if before is not None and after is not None and before > 0 and math.isfinite(before) and math.isfinite(after):
        change = f"{100 * (after / before - 1):+.1f} % since the start".replace("-", "−")
    if after is None:
        before, after = None, before
    yield f"{name}, nats per token", "" if before is None else short(before), short(after), "", change
    yield "speed", "", short(facts.tokens_per_s, 3), "tokens/s", f"{facts.tokens:,.0f} tokens" if facts.tokens else ""
    steps, done = finite(facts.standing.get("steps")), facts.steps
    share = f"{min(done / steps, 1):.0%} done" if steps and status == GOING_ON else ""
    yield "steps", "", f"{done:,.0f}", f"of {steps:,.0f}" if steps else "", share
    seconds, note = finite(facts.summary.get("seconds")), "training"
    if seconds is None:
        seconds, note = _elapsed(facts, status), "since the start" if status == GOING_ON else "from start to end"
    yield "time", "", lasted(seconds), "", note if seconds is not None else ""
    for tier in (DEVICE, HOST):
        peak, planned = facts.peak_bytes(tier), facts.planned_bytes(tier)
        if peak:
            yield f"peak {tier} memory per rank", "", gib(peak), "", f"{gib(planned)} planned" if planned else ""


def _elapsed(facts: Facts, status: str) -> float | None:
    """Return the seconds from the start to the end or until now; None if the times are missing or unusable."""
    try:
        began = datetime.fromisoformat(facts.standing["started"])
        going_on = status == GOING_ON
        ended = datetime.now().astimezone() if going_on else datetime.fromisoformat(facts.standing["ended"])
        return max((ended - began).total_seconds(), 0.0)
    except (KeyError, TypeError, ValueError):
        return None


def charts(runs: Sequence[tuple[str, Facts]]) -> list[Markup]:
    """Return the charts of some runs, each with its name. The name of a single run is ""; several have one colour each."""
    several = len(runs) > 1
    steps = [step for _, facts in runs for points in facts.curves.points.values() for step, _ in points[:1] + points[-1:]]

    def series(key: str, name: str, kind: str = "line", unit: float = 1.0, colour: int = 0) -> list[Series]:
        found = []
        for place, (run, facts) in enumerate(runs):
            points: list[Point] = [(x, y if y is None else y / unit) for x, y in facts.curves.points[key]]
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
        line_chart("Speed", ("speed", "tokens/s"), speed, xs=steps, from_zero=True),
    ]
    if scale:
        drawn.insert(3, line_chart("Loss scale", ("loss scale", ""), scale, xs=steps, log=True))
    if accuracy:
        drawn.append(line_chart("Accuracy on held-out rows", ("label tokens predicted", "%"), accuracy, xs=steps))
    for tier in (DEVICE, HOST):
        memory = series(f"peak_{tier}_bytes", "measured", unit=GIB)
        if not any(y for each in memory for _, y in each.points):
            continue
        if not several and (planned := runs[0][1].planned_bytes(tier)):
            ends: list[Point] = [(min(steps), planned / GIB), (max(steps), planned / GIB)]
            memory.append(Series("planned", ends, "level", 1))
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
    return stacked_bars("One rank at its peak", bars) if bars else ""


def _steps(facts: Facts) -> Iterator[Markup]:
    if (trace := facts.trace) is not None:
        number = "" if trace.step is None else f" {trace.step}"
        yield draw(f"Step{number} of rank 0, measured: {lasted(trace.seconds)}", with_loss(trace))
        in_turn = "A CPU runs all streams in turn. " if trace.device == "cpu" else ""
        yield Markup('<p class="remark">Numbers are blocks. {}Perfetto opens trace.json, too.</p>').format(in_turn)
    if (found := facts.simulated) is not None:
        yield draw(f"The same step as simulated by the plan: {lasted(found.seconds)}", found)


def _environment(facts: Facts) -> Iterator[tuple[str, str]]:
    plan, cores = facts.plan, items(facts.summary.get("cores_per_rank")) or items(facts.standing.get("cores_per_rank"))
    versions = record(facts.fact("versions"))
    rows = {
        "command": facts.fact("command"),
        "started": facts.standing.get("started"),
        "ended": facts.standing.get("ended"),
        "resumed from": facts.standing.get("resumed_from"),
        "device": facts.fact("device"),
        "compute dtype": facts.fact("dtype"),
        "ranks": facts.ranks,
        "cores": "; ".join(dict.fromkeys(map(str, cores))),
        "strategy": record(plan.get("strategy")).get("says"),
        "reasons": "\n".join(map(str, items(plan.get("why")))),
        "fp16": record(facts.summary.get("fp16")).get("text"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    yield from ((name, str(value)) for name, value in rows.items() if value)
