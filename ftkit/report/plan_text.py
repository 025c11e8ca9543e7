"""A plan for the eye: what each tier holds for which purpose, what was granted, what was chosen and why.

It knows no torch. Sizes are shown in GiB; the same in bytes is `Plan.as_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ftkit.plan.memory import GIB, PHASES
from ftkit.plan.plan import Plan
from ftkit.plan.speed import STREAMS, Speed
from ftkit.plan.whatif import Answer
from ftkit.report.text import literal
from ftkit.spec.strategy import decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS

TITLES = {DEVICE: "device, a rank", HOST: "host, a node", NVME: "NVMe, a node"}


def show_plan(console: Console, plan: Plan) -> None:
    """Print a plan: a table of tiers and purposes at their peaks, what was chosen, and how long a step takes, if known."""
    shape, ranks = plan.shape, plan.shape.world_size
    trained = "all trained" if shape.trained_numel == shape.numel else f"{shape.trained_numel:,} trained"
    console.print(f"{shape.numel:,} parameters, {trained}, on {ranks} rank{'s' * (ranks > 1)}")
    console.print(_table(plan))
    times = time_lines(plan, plan.speed) if plan.speed is not None else [("time", f"not known: {why_untimed(plan)}")]
    for name, text in (*lines(plan), *times):
        console.print(f"[bold]{name:<13}[/] {literal(text)}")


def why_untimed(plan: Plan) -> str:
    """Return why no seconds are known of a plan."""
    rates = None if plan.asked is None else plan.asked.rates
    missing = None if rates is None else rates.missing(plan.shape, plan.strategy)
    return missing or (
        "there are no rates of this machine: run `ftkit measure -o FILE.yaml` and set `hardware: FILE.yaml` "
        "in the recipe"
    )


def show_answers(console: Console, answers: Sequence[Answer], before: Speed | None) -> None:
    """Print what would come of other cards, a drive, an adapter, shorter sequences, beside the plan's own speed."""
    console.print("[bold]what if[/]")
    table = Table(box=None, pad_edge=False)
    for name in ("GiB", *(TITLES[tier] for tier in TIERS), "tokens/s", ""):
        table.add_column(name, justify="left" if name in ("GiB", "") else "right")
    for answer in answers:
        plan = answer.plan
        if plan is None:
            table.add_row(answer.question, "", "", "", "", f"does not fit: {answer.problem}")
            continue
        sizes = (f"{plan.needed_bytes(tier) / GIB:.1f}" if tier in plan.tiers else "" for tier in TIERS)
        speed = plan.speed
        change = "" if speed is None or before is None else f"{speed.tokens_per_s / before.tokens_per_s - 1:+.0%}"
        table.add_row(answer.question, *sizes, "" if speed is None else f"{speed.tokens_per_s:,.0f}", change)
    console.print(table)


def time_lines(plan: Plan, speed: Speed) -> Iterator[tuple[str, str]]:
    """Yield how long a step takes and what binds, as (name, text)."""
    yield "time", (
        f"{speed.seconds:.2f} s a step of {speed.tokens:,} tokens: {speed.tokens_per_s:,.0f} tokens/s, {speed.tflops:.1f} "
        "TFLOPS a rank, recomputation counted (simulated from the rates of the profile, not measured)"
    )
    if plan.runner_up is not None:
        strategy, next_ = plan.runner_up
        slower = next_.tokens_per_s / speed.tokens_per_s - 1
        yield "next best", f"{next_.tokens_per_s:,.0f} tokens/s ({slower:+.1%}): {strategy}"
    busy = sorted(speed.busy.items(), key=lambda each: -each[1])
    yield "busy", ", ".join(f"{STREAMS[name]} {share:.0%}" for name, share in busy if share >= 0.005) + " (at the same time)"


def _table(plan: Plan) -> Table:
    """Return the table: purposes down, tiers across, each tier in the phase in which it holds most; GiB."""
    tiers = plan.tiers
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB")
    for tier in tiers:
        table.add_column(TITLES[tier], justify="right")
    at_peak = {tier: plan.memory.purposes(tier, plan.memory.peak_phase(tier)) for tier in tiers}
    for purpose in dict.fromkeys(name for found in at_peak.values() for name in found):
        sizes = (at_peak[tier].get(purpose, 0) * plan.limits.ranks(tier) for tier in tiers)
        table.add_row(purpose, *(f"{size / GIB:.2f}" if size else "" for size in sizes))
    table.add_row("[bold]needed[/]", *(f"[bold]{plan.needed_bytes(tier) / GIB:.2f}[/]" for tier in tiers))
    table.add_row("granted", *(_granted(plan, tier) for tier in tiers))
    for phase in PHASES:
        totals = (plan.memory.at(tier, phase) * plan.limits.ranks(tier) for tier in tiers)
        table.add_row(f"[dim]to {phase}[/]", *(f"[dim]{total / GIB:.2f}[/]" for total in totals))
    return table


def _granted(plan: Plan, tier: str) -> str:
    granted = plan.limits.granted(tier)
    return "no limit" if granted is None else f"{granted / GIB:.2f}"


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what was chosen and why, as (name, text)."""
    for tier in plan.tiers:
        if plan.limits.granted(tier) is not None:
            yield "granted", f"{TITLES[tier].partition(',')[0]}: by {plan.limits.name(tier)}"
    yield "chosen", str(plan.strategy)
    for sentence in plan.why:
        yield "why", sentence
    tokens = plan.shape.sequence_tokens
    largest = plan.largest_micro_batch
    micro_batch = decided(plan.strategy.micro_batch)
    sequences = f"{micro_batch} sequence{'s' * (micro_batch > 1)}"
    yield "micro-batch", (
        f"{sequences} of {tokens:,} tokens, {plan.strategy.accumulation} a step; "
        + (f"at most {largest} fit" if largest > micro_batch else "no more fit")
    )
    yield "disk", f"{plan.memory.checkpoint_bytes / GIB:.1f} GiB at output.dir for checkpoints and the model"
    written = plan.as_dict()["nvme_wear"]
    if written:
        node = sum(written.values()) * plan.limits.ranks_per_node
        yield "NVMe wear", f"{node / GIB:.1f} GiB written a step; {node * 1440 / 1e12:,.1f} TB a day at a step a minute"
