"""The report of one run: one HTML file that needs nothing else, from what its folder holds.

`render` makes the text, `refresh` writes it beside the files it is of, whole or not at all. While the run goes on the page
asks the browser to open it again every `REFRESH_SECONDS`; that, and nothing else, moves. The page forbids itself scripts and
anything from elsewhere (Content-Security-Policy), so that a hostile text in it stays a text even if an escape were missing.

It takes whatever `facts.read` takes. Cost: milliseconds for a run of thousands of lines; of charts at most some hundred
kilobytes, however long the run was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder, check_target, write, write_json
from ftkit.report.charts import Bar, Series, line_chart, stacked_bars
from ftkit.report.facts import ENDED, ENDED_EARLY, GOING_ON, Facts, Reader, read
from ftkit.report.style import STYLE
from ftkit.report.text import GIB, escaped, finite, gib, items, lasted, record, short
from ftkit.report.timeline import draw, with_loss
from ftkit.spec.tiers import DEVICE, HOST, NVME

REFRESH_SECONDS = 5
MOST_SAMPLES = 20
MOST_NOTES = 20

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

TIER_LABELS = {DEVICE: DEVICE, HOST: HOST, NVME: "NVMe"}


def refresh(path: Path, out: Path | None = None) -> Path:
    """Write the report of a run's folder anew; return where it lies.

    Args:
        path: path of the run's folder.
        out: the file to write; None takes report.html in the folder.

    Raises:
        UserError: See `facts.read`; or the report cannot be written.
    """
    facts = read(path)
    target = out or facts.folder.report
    check_target(target, "--out", ".html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target, render(facts))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); name another file with --out") from None
    return target


def note_end(folder: RunFolder, why: str) -> None:
    """Say that a run has ended early whose rank 0 could not say so itself; nothing where it did, or no report is there."""
    facts = Reader(folder).read()
    if facts.standing.get("status") != GOING_ON:
        return
    with suppress(OSError):
        ended = datetime.now().astimezone().isoformat(timespec="seconds")
        write_json(folder.standing, {**facts.standing, "status": ENDED_EARLY, "why": why, "ended": ended})
        rewrite(Reader(folder))


def rewrite(reader: Reader) -> None:
    """Write the report of a run that goes on, or has just ended.

    Raises:
        OSError: It cannot be written.
    """
    write(reader.folder.report, render(reader.read()))


def page(title: str, body: Iterable[str], *, refreshes: bool = False, style: str = "") -> str:
    """Return a whole page; `style` is added to that of a report."""
    again = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if refreshes else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta name="referrer" content="no-referrer">{again}<link rel="icon" href="data:,">'
        f"<title>{escaped(title, 200)}</title><style>{STYLE}{style}</style></head>"
        f"\n<body><main>{''.join(body)}\n</main></body></html>\n"
    )


def render(facts: Facts) -> str:
    """Return the report of a run."""
    status, why = facts.status
    parts = chain(
        _head(facts, status, why),
        _cards(facts, status),
        ["<h2>Curves</h2>", '<div class="grid-of-charts">', *charts([("", facts)]), "</div>"],
        _memory(facts),
        _step(facts),
        _samples(facts),
        _environment(facts),
        _recipe(facts),
        [f"<footer>Written by ftkit on {escaped(_now())}. This file needs no other.</footer>"],
    )
    return page(f"{facts.folder.path.resolve().name} – ftkit", parts, refreshes=status == GOING_ON)


def _now() -> str:
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _when(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


def _head(facts: Facts, status: str, why: str) -> Iterable[str]:
    kind = {GOING_ON: "busy", ENDED: "good"}.get(status, "early")
    model = record(facts.plan.get("model"))
    about = [f"{int(n):,} parameters" for n in [finite(model.get("parameters"))] if n]
    about += [counted(facts.ranks, "rank"), *(str(_fact(facts, key) or "") for key in ("device", "dtype"))]
    name, line = escaped(facts.folder.path.resolve().name, 200), escaped(" · ".join(filter(None, about)))
    yield f'<header><h1>{name}</h1><span class="status {kind}">{status}</span></header>'
    yield f'<p class="under">{line} · last written <b>{escaped(_now())}</b></p>'
    if why:
        yield f'<p class="said">{escaped(why, 4000)}</p>'
    events = facts.divergences[-MOST_NOTES:]
    notes = [f"step {each.get('step')}: {each.get('reason')}, then: {each.get('action')}" for each in events]
    if notes:
        yield f'<p class="said">Steps whose loss went wrong:\n{escaped(chr(10).join(notes), 4000)}</p>'
    if facts.curves.unread:
        yield f'<p class="said">{facts.curves.unread:,} lines of metrics.jsonl could not be read</p>'


def _fact(facts: Facts, key: str) -> Any:
    return facts.standing.get(key) or facts.summary.get(key)


def _cards(facts: Facts, status: str) -> Iterable[str]:
    yield '<div class="cards">'
    name, before, after = facts.losses()
    if after is None and status == GOING_ON:
        name, before, after = facts.losses(held_out=False)
    if before is not None and after is not None and 0 < before < math.inf:
        change = f"{100 * (after / before - 1):+.1f} %, before to after".replace("-", "−") if math.isfinite(after) else ""
        values = f"<small>{short(before)} →</small> {short(after)}"
        yield _card(f"{name}, nats a token", values, change)
    else:
        yield _card(f"{name}, nats a token", short(after if after is not None else before), "")
    tokens = finite(facts.summary.get("tokens")) or facts.curves.tokens
    speed = f"{short(facts.tokens_per_s, 3)} <small>tokens/s</small>"
    yield _card("speed", speed, f"{tokens:,.0f} tokens" if tokens else "")
    steps = finite(facts.standing.get("steps"))
    done = finite(facts.summary.get("steps")) or facts.curves.step
    of = f" <small>of {steps:,.0f}</small>" if steps else ""
    yield _card("steps", f"{done:,.0f}{of}", f"{min(done / steps, 1):.0%} done" if steps and status == GOING_ON else "")
    seconds, note = finite(facts.summary.get("seconds")), "of training"
    began, ended = _when(facts.standing.get("started")), _when(facts.standing.get("ended"))
    if seconds is None and began is not None and (ended is not None or status == GOING_ON):
        seconds, note = _seconds_between(began, ended), "since the start" if ended is None else "from start to end"
    yield _card("time", lasted(seconds), note if seconds is not None else "")
    for tier in (DEVICE, HOST):
        peak, planned = facts.peak_bytes(tier), facts.planned_bytes(tier)
        if peak:
            yield _card(f"peak memory, {TIER_LABELS[tier]}, a rank", gib(peak), f"{gib(planned)} planned" if planned else "")
    yield "</div>"


def _seconds_between(began: datetime, ended: datetime | None) -> float | None:
    try:
        return max(((ended or datetime.now().astimezone()) - began).total_seconds(), 0.0)
    except TypeError:  # one of them says no time zone
        return None


def _card(name: str, value: str, note: str) -> str:
    """Return one figure; `value` is markup, the rest text."""
    told = f'<div class="note">{escaped(note, 200)}</div>' if note else ""
    return f'<div class="card"><div class="name">{escaped(name, 200)}</div><div class="value">{value}</div>{told}</div>'


def charts(runs: Sequence[tuple[str, Facts]]) -> list[str]:
    """Return the charts of one run, or of several in the same charts: each run a colour."""
    several = len(runs) > 1

    def series(key: str, name: str, kind: str = "line", scale: float = 1.0, colour: int = 0) -> list[Series]:
        found = []
        for place, (run, facts) in enumerate(runs):
            points = facts.curves.points[key]
            if scale != 1.0:
                points = [(x, y if y is None else y / scale) for x, y in points]
            if any(y is not None for _, y in points):
                told = ", ".join(filter(None, (run, name)))
                found.append(Series(told, points, kind, place if several else colour))
        return found

    steps = [step for _, facts in runs for step in _ends(facts)]

    def chart(title: str, y: tuple[str, str], drawn: Sequence[Series], *, log: bool = False, from_zero: bool = False) -> str:
        return line_chart(title, y, drawn, xs=steps, log=log, from_zero=from_zero)

    def short_name(name: str) -> str:
        return "" if several else name

    loss = [*series("loss", "training"), *series("eval_loss", "held out", "dots", colour=1)]
    drawn = [chart("Loss", ("loss", "nats a token"), loss)]
    drawn.append(chart("Gradient norm", ("norm before clipping", ""), series("grad_norm", short_name("norm")), log=True))
    rate = series("learning_rate", short_name("rate"))
    drawn.append(chart("Learning rate", ("learning rate", ""), rate, from_zero=True))
    if scale := series("loss_scale", short_name("scale")):
        drawn.append(chart("Loss scale", ("loss scale", ""), scale, log=True))
    speed = series("tokens_per_second", short_name("all ranks"))
    drawn.append(chart("Speed", ("speed", "tokens/s"), speed, from_zero=True))
    if accuracy := series("eval_accuracy", short_name("held out"), "dots", 0.01):
        drawn.append(chart("Accuracy on held-out rows", ("label tokens told right", "%"), accuracy))
    for tier, of in ((DEVICE, DEVICE), (HOST, HOST)):
        memory = series(f"peak_{tier}_bytes", short_name("measured"), scale=GIB)
        if not any(y for each in memory for _, y in each.points):
            continue
        if not several and (planned := runs[0][1].planned_bytes(tier)):
            memory.append(Series("planned", [(0.0, planned / GIB)], "level", 1))
        drawn.append(chart(f"Memory, {of}, rank 0", ("peak so far", "GiB"), memory, from_zero=True))
    return drawn


def _ends(facts: Facts) -> tuple[float, ...]:
    """Return the first and the last step of a run."""
    found = [points[place][0] for points in facts.curves.points.values() if points for place in (0, -1)]
    return (min(found), max(found)) if found else ()


def _memory(facts: Facts) -> Iterable[str]:
    bars = []
    for tier, name in TIER_LABELS.items():
        purposes = facts.purposes(tier)
        if tier == DEVICE:  # what torch's allocator does not see is not measured either
            purposes = [(purpose, size) for purpose, size in purposes if purpose != "runtime"]
        granted = facts.granted_bytes(tier)
        if not purposes:
            continue
        bars.append(Bar(f"{name}, plan", purposes, None if granted is None else (granted, "granted")))
        if peak := facts.peak_bytes(tier):
            bars.append(Bar(f"{name}, measured", [("measured peak", peak)], plain=True))
    if not bars:
        return
    yield "<h2>Memory by tier, plan and measured</h2>"
    yield stacked_bars("Of one rank at its peak", ("memory", "GiB"), bars, unit=GIB)


def _step(facts: Facts) -> Iterable[str]:
    if facts.trace is None and facts.simulated is None:
        return
    yield "<h2>A step</h2>"
    if facts.trace is not None:
        number = "" if facts.trace.step is None else f" {facts.trace.step}"
        yield draw(f"Step{number} of rank 0, measured: {lasted(facts.trace.seconds)}", with_loss(facts.trace))
        in_turn = "On a CPU everything runs in turn. " if facts.trace.device == "cpu" else ""
        yield (
            '<p class="remark">Numbers are blocks. Head and loss are what lies between the last forward and the first '
            f"backward. {in_turn}trace.json opens in Perfetto, too.</p>"
        )
    if facts.simulated is not None:
        seconds = lasted(facts.simulated.seconds)
        yield draw(f"The same step as the plan simulates it, from the rates of its profile: {seconds}", facts.simulated)


def _samples(facts: Facts) -> Iterable[str]:
    samples = [record(each) for each in items(facts.summary.get("answers")) or items(facts.standing.get("answers"))]
    if not samples:
        return
    yield '<h2>Samples</h2><div class="samples">'
    for sample in samples[:MOST_SAMPLES]:
        rows = []
        for key, name in (("before", "before training"), ("after", "after training"), ("expected", "expected")):
            if sample.get(key):
                rows.append(f'<div><dt>{name}</dt><dd class="{key}">{escaped(sample[key], 4000)}</dd></div>')
        question = escaped(sample.get("question", ""), 4000)
        yield f'<article class="sample"><h3>{question}</h3><dl>{"".join(rows)}</dl></article>'
    yield "</div>"
    if len(samples) > MOST_SAMPLES:
        yield f'<p class="soft">{len(samples) - MOST_SAMPLES} more are in summary.json.</p>'


def _environment(facts: Facts) -> Iterable[str]:
    plan, cores = facts.plan, items(facts.summary.get("cores_per_rank")) or items(facts.standing.get("cores_per_rank"))
    versions = record(_fact(facts, "versions"))
    told = [
        ("command", _fact(facts, "command")),
        ("started", facts.standing.get("started")),
        ("ended", facts.standing.get("ended")),
        ("resumed from", facts.standing.get("resumed_from")),
        ("device", _fact(facts, "device")),
        ("dtype of compute", _fact(facts, "dtype")),
        ("ranks", facts.ranks),
        ("cores", "; ".join(dict.fromkeys(map(str, cores)))),
        ("strategy", record(plan.get("strategy")).get("says")),
        ("why", "\n".join(map(str, items(plan.get("why"))))),
        ("fp16", record(facts.summary.get("fp16")).get("text")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    rows = [f"<tr><th>{name}</th><td>{_broken(str(value))}</td></tr>" for name, value in told if value]
    yield f'<h2>Environment</h2><div class="sheet"><table>{"".join(rows)}</table></div>'


def _broken(text: str) -> str:
    return escaped(text, 4000).replace("\n", "<br>")


def _recipe(facts: Facts) -> Iterable[str]:
    if facts.recipe:
        yield f'<h2>Recipe</h2><div class="sheet"><pre>{escaped(facts.recipe)}</pre></div>'
