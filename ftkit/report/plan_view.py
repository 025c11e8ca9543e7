"""A plan on a terminal and as a page: strategy, memory by tier and purpose, simulated step, reasons.

Sizes are in GiB. `Plan.as_dict` has them in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table

from ftkit.config.wording import counted
from ftkit.plan.memory import LABELS
from ftkit.plan.plan import Plan
from ftkit.plan.speed import STREAMS, Speed
from ftkit.plan.state import forms_of
from ftkit.plan.whatif import Answer
from ftkit.report.charts import Bar, Series, line_chart, stacked_bars
from ftkit.report.curve import curve
from ftkit.report.page import TIER_LABELS, Card
from ftkit.report.style import html
from ftkit.report.text import GIB, lasted, literal
from ftkit.report.timeline import draw, of_speed
from ftkit.spec.strategy import decided
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS

TITLES = {DEVICE: "device, per rank", HOST: "host, per node", NVME: "NVMe, per node"}
STAGES = {
    0: "nothing is sharded (as DDP)",
    1: "optimizer state is sharded",
    2: "gradients and optimizer state are sharded",
    3: "parameters, gradients and optimizer state are sharded (as FSDP full shard)",
}
UNTIMED = "the rates of this machine were not measured. Run `ftkit measure -o FILE.yaml`, then set `hardware: FILE.yaml`"
PHASE_NAMES = {"load": "loading", "train": "training", "save": "saving", "resume": "resuming"}
Rows = list[tuple[str, str]]


def show_plan(console: Console, plan: Plan, epoch: Mapping[str, float] | None = None) -> None:
    """Print a plan, and the estimated "tokens" and "seconds" of an epoch."""
    console.print(f"[bold]{literal(model(plan))}[/]; planned, not measured")
    for heading, rows in sections(plan, epoch):
        console.print(f"\n[bold cyan]{heading}[/]")
        for name, text in rows:
            console.print(f"[bold]{name:<17}[/] {literal(text)}")
        if heading == "Strategy":
            console.print("\n[bold cyan]Memory at its peak, GiB[/]", _table(plan), sep="\n")


def model(plan: Plan) -> str:
    """Return the size of the model and the number of ranks."""
    shape = plan.shape
    trained = "all trained" if shape.trained_numel == shape.numel else f"{shape.trained_numel:,} of them trained"
    blocks, ranks = counted(len(shape.blocks), "transformer block"), counted(shape.world_size, "rank")
    return f"{shape.numel:,} parameters ({trained}), {blocks}, on {ranks}"


def sections(plan: Plan, epoch: Mapping[str, float] | None = None) -> list[tuple[str, Rows]]:
    """Return the plan in words: (heading, rows), each row a name and a text."""
    step = list(_step(plan))
    if epoch is not None:
        about = f"{lasted(epoch['seconds'])} for about {epoch['tokens']:,} tokens (estimated from the file size)"
        step.append(("epoch", about))
    return [("Strategy", list(_strategy(plan))), ("Why this strategy", list(_why(plan))), ("One step, simulated", step)]


def _strategy(plan: Plan) -> Iterator[tuple[str, str]]:
    strategy, shape, cpu = plan.strategy, plan.shape, plan.limits.cpu

    def stored(kind: str) -> str:
        tier = strategy.tier(kind)
        return f"on {HOST if cpu and tier == DEVICE else TIER_LABELS[tier]}"

    yield "ZeRO stage", f"{strategy.stage}: {STAGES[int(strategy.stage)]}"
    reshard = (
        "resharded after forward, gathered again for backward"
        if strategy.reshard_after_forward
        else "gathered until backward"
    )
    yield "parameters", f"{stored('parameters')}, {reshard if strategy.stage == 3 else 'whole on every rank'}"
    yield "gradients", f"{stored('gradients')}{', summed in fp32' if strategy.sums_in_fp32 else ''}"
    cached = decided(strategy.state_host_bytes) / GIB
    cache = f"; {cached:.1f} GiB of each rank's state cached in host memory" if cached else ""
    update = f"updated {'while the next forward runs' if strategy.deferred else 'at the end of the step'}"
    yield "optimizer state", f"{', '.join([stored('state'), *forms_of(shape, strategy, cpu=cpu)])}, {update}{cache}"
    blocks = len(shape.blocks)
    graphs = strategy.graphs(blocks)
    words = f"{graphs} of {blocks} blocks keep their activations, {blocks - graphs} recompute them"
    words = {0: "all blocks recompute them", blocks: "all blocks keep them"}.get(graphs, words)
    yield "activations", f"{stored('activation_offload')}, {words}"
    micro_batch, accumulation = decided(strategy.micro_batch), decided(strategy.accumulation)
    together = f" ({strategy.parts} through each block together)" if strategy.parts > 1 else ""
    factors = (
        counted(shape.world_size, "rank"),
        f"{accumulation} micro-batch{'es' * (accumulation > 1)}{together}",
        counted(micro_batch, "sequence"),
        f"{shape.sequence_tokens:,} tokens",
    )
    whole = shape.world_size * accumulation * micro_batch * shape.sequence_tokens
    most = plan.largest_micro_batch
    fits = f"up to {most} sequences" if most > micro_batch else "no larger micro-batch"
    yield "batch", f"{' x '.join(factors)} = {whole:,} tokens per step; {fits} would fit"
    yield "disk", f"{plan.memory.checkpoint_bytes / GIB:.1f} GiB in output.dir for checkpoints and the model"


def _why(plan: Plan) -> Iterator[tuple[str, str]]:
    for number, sentence in enumerate(plan.why):
        yield ("reason", "does not fit", "")[min(number, 2)], sentence
    if plan.runner_up is not None and plan.speed is not None:
        strategy, speed = plan.runner_up
        change = speed.tokens_per_s / plan.speed.tokens_per_s - 1
        chosen = asdict(plan.strategy)
        changes = {key: value for key, value in asdict(strategy).items() if value != chosen[key] and key != "accumulation"}
        differs = ", ".join(f"engine.{key}={value}" for key, value in changes.items())
        yield "runner-up", f"{speed.tokens_per_s:,.0f} tokens/s ({change:+.1%}) with {differs}"


def _step(plan: Plan) -> Iterator[tuple[str, str]]:
    speed = plan.speed
    if speed is None:
        rates = plan.asked.rates
        missing = None if rates is None else rates.missing(plan.shape, plan.strategy)
        yield "time", f"unknown: {missing or UNTIMED}"
    else:
        yield "time", f"{speed.seconds:.2f} s for {speed.tokens:,} tokens"
        yield "speed", f"{speed.tokens_per_s:,.0f} tokens/s, {speed.tflops:.1f} TFLOPS per rank, recomputation counted"
        others = sorted((-share, name) for name, share in speed.busy.items() if share >= 0.005 and name != speed.binds)
        yield "bottleneck", f"{STREAMS[speed.binds]}, busy {speed.busy[speed.binds]:.0%} of the step"
        if others:
            yield "also busy", ", ".join(f"{STREAMS[name]} {-share:.0%}" for share, name in others)
    if written := plan.nvme_wear:
        node = sum(written.values()) * plan.limits.ranks_per_node
        rate = f"{node * 1440 / 1e12:,.1f} TB per day at one step per minute"
        yield "warning", f"{node / GIB:.1f} GiB per step are written to NVMe: {rate}. Check the endurance of the drive"


def _table(plan: Plan) -> Table:
    """Return the table: purposes down, tiers across, each tier at its peak."""
    tiers = plan.tiers
    at_peak = {tier: _at_peak(plan, tier) for tier in tiers}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for tier in tiers:
        table.add_column(TITLES[tier], justify="right")
    for purpose in dict.fromkeys(name for found in at_peak.values() for name in found):
        sizes = (at_peak[tier].get(purpose, 0) for tier in tiers)
        table.add_row(purpose, *(f"{size / GIB:.2f}" if size else "" for size in sizes))
    table.add_section()
    table.add_row("[bold]needed[/]", *(f"[bold]{plan.needed_bytes(tier) / GIB:.2f}[/]" for tier in tiers))
    table.add_row("[bold]limit[/]", *(_granted(plan, tier) for tier in tiers))
    by = ("" if plan.limits.granted(tier) is None else literal(plan.limits.name(tier)) for tier in tiers)
    table.add_row("[dim]limit from[/]", *(f"[dim]{name}[/]" for name in by))
    table.add_row("[dim]peak while[/]", *(f"[dim]{PHASE_NAMES[plan.memory.peak_phase(tier)]}[/]" for tier in tiers))
    return table


def _at_peak(plan: Plan, tier: str) -> dict[str, int]:
    """Return the bytes of each purpose on a tier at its peak, of a rank or of a node as in `TITLES`."""
    sizes = plan.memory.purposes(tier, plan.memory.peak_phase(tier))
    return {LABELS.get(purpose, purpose): size * plan.limits.ranks(tier) for purpose, size in sizes.items()}


def _granted(plan: Plan, tier: str) -> str:
    granted = plan.limits.granted(tier)
    return "no limit" if granted is None else f"{granted / GIB:.2f}"


def show_answers(console: Console, answers: Sequence[Answer], before: Speed | None) -> None:
    """Print the plans for other hardware, an adapter and shorter sequences, with the change in speed."""
    console.print("\n[bold cyan]What if[/]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("change", no_wrap=True)
    for name in (*(f"GiB {TITLES[tier]}" for tier in TIERS), "tokens/s", "compared"):
        table.add_column(name, justify="right")
    for answer in answers:
        plan = answer.plan
        if plan is None:
            continue
        sizes = (f"{plan.needed_bytes(tier) / GIB:.1f}" if tier in plan.tiers else "" for tier in TIERS)
        speed = plan.speed
        change = "" if speed is None or before is None else f"{speed.tokens_per_s / before.tokens_per_s - 1:+.0%}"
        table.add_row(answer.question, *sizes, "" if speed is None else f"{speed.tokens_per_s:,.0f}", change)
    console.print(table)
    for answer in answers:
        if answer.plan is None:
            console.print(literal(f"{answer.question}: does not fit: {answer.problem}"))


def render(plan: Plan, title: str) -> str:
    """Return the page of a plan."""
    speed, charts = plan.speed, Markup()
    for tier in plan.tiers:
        bar = Bar("planned", list(_at_peak(plan, tier).items()), plan.limits.granted(tier))
        charts += stacked_bars(f"{TITLES[tier]}: peak while {PHASE_NAMES[plan.memory.peak_phase(tier)]}", [bar])
    return html(
        "plan.html",
        title=title,
        model=model(plan),
        cards=list(_cards(plan)),
        memory=charts,
        timeline="" if speed is None else draw("Simulated from the rates of the hardware", of_speed(speed)),
        curve="" if speed is None else _curve(plan, speed),
        sections=sections(plan),
    )


def _cards(plan: Plan) -> Iterator[Card]:
    if (speed := plan.speed) is not None:
        yield "one step", "", f"{speed.seconds:.2f}", "s", f"{speed.tokens:,} tokens"
        yield "speed", "", f"{speed.tokens_per_s:,.0f}", "tokens/s", f"{speed.tflops:.1f} TFLOPS per rank"
    for tier in plan.tiers:
        yield TITLES[tier], "", f"{plan.needed_bytes(tier) / GIB:.1f}", "GiB", f"limit {_granted(plan, tier)}"


def _curve(plan: Plan, speed: Speed) -> Markup:
    static, dynamic = curve(plan, speed)
    series = [
        Series("static", [(seconds, static / GIB) for seconds, _ in dynamic]),
        Series("static and dynamic", [(seconds, (static + size) / GIB) for seconds, size in dynamic], colour=1),
    ]
    return line_chart("Memory of a GPU within the step", ("memory", "GiB"), series, x=("time", "s"), from_zero=True)
