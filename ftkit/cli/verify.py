"""`ftkit verify`: compare short runs of a recipe that must agree.

The first steps of the recipe run as planned, with other micro-batches, ranks, recomputation and tiers, killed and resumed,
and with stock transformers if the model fits one process. Losses, gradient norms and samples of every step are compared with
the stock run, or else with the planned one. The learning rate is the constant peak, so that a wrong update shows within a
few steps. Cost: minutes, and disk for two checkpoints.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ftkit.cli.trials import Trajectory, Trial
from ftkit.config.recipe import Recipe, split_batch
from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.plan.refuse import DoesNotFit
from ftkit.spec.strategy import decided
from ftkit.spec.tiers import DEVICE, HOST, KINDS, NVME
from ftkit.train.arguments import compute_dtype
from ftkit.train.planning import plan_recipe

STOCK = "stock transformers, 1 process"
PLANNED = "as planned"
TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1), "fp16": (5e-3, 5e-2)}
"""Largest relative differences of loss and gradient norm that rounding explains within some steps."""
TRIALS = ".trials"
"""Folder of the trials, removed at the end."""

Runner = Callable[[Sequence[Trial], int], list[Trajectory]]
"""(trials, ranks): run trials of that many ranks one after the other, in their own processes."""


@dataclass(frozen=True)
class Verdict:
    """One row of the table. Numbers are None if nothing was compared."""

    name: str
    steps: int  # steps compared
    loss: float | None  # largest relative difference
    grad_norm: float | None  # largest relative difference
    samples: bool | None  # whether each step had the same samples
    passed: bool | None  # None if the trial could not run
    note: str = ""


def trials_of(recipe: Recipe, ranks: int, most_ranks: int, folder: Path, steps: int) -> list[Trial]:
    """Return the trials of a recipe. The killed one comes first, and stock after the one on one rank.

    Args:
        recipe: The recipe.
        ranks: Ranks of the planned run.
        most_ranks: Most ranks that this machine can start.
        folder: Folder for the trials.
        steps: Steps of each trial.
    """
    sequences = recipe.train.batch_tokens // recipe.data.sequence_tokens
    half, killed = steps // 2, folder / "killed"
    doomed = changed(recipe, killed, steps, {}, save_every_steps=half)
    trials = [Trial("killed", doomed, ranks, killed_at=half + 2)]
    forced = [(name, ranks, engine) for name, engine in engine_choices(recipe, ranks)]
    forced += [(counted(world, "rank"), world, {}) for world in (1, 2, 3) if world != ranks and world <= most_ranks]
    for number, (name, world, engine) in enumerate(forced):
        if sequences % (world * engine.get("micro_batch", 1)) == 0:
            trials.append(Trial(name, changed(recipe, folder / str(number), steps, engine), world))
    for world in dict.fromkeys((ranks, 1 if ranks > 1 else most_ranks)):
        name = f"killed, resumed on {counted(world, 'rank')}"
        if sequences % world == 0:
            own = changed(recipe, folder / f"resumed-{world}", steps, {})
            trials.append(Trial(name, own, world, resumes=str(killed)))
    fp32 = recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": "fp32"})})  # as the stock model is
    engine = {"stage": 0, **dict.fromkeys(KINDS, DEVICE), "activations": "keep"}
    with suppress(DoesNotFit):
        plan_recipe(changed(fp32, folder, steps, engine), 1)
        trials.append(Trial(STOCK, changed(recipe, folder / "stock", steps, {}), 1, stock=True))
    return trials


def engine_choices(recipe: Recipe, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """Return other strategies for the same ranks: a name, and the choices that are forced."""
    strategy = plan_recipe(recipe, ranks).strategy
    each = recipe.train.batch_tokens // recipe.data.sequence_tokens // ranks
    other = "keep" if strategy.activations == "recompute" else "recompute"
    one_tier = {"stage": 3, "state_host_bytes": "auto"}
    single = {"micro_batch": 1, "accumulation": "auto", "accumulate_in": "step"}
    whole = {**single, "micro_batch": each}
    return [
        (PLANNED, {}),
        ("one sequence at a time", single) if decided(strategy.micro_batch) > 1 else ("all sequences at once", whole),
        ("accumulated inside blocks", {**single, "accumulate_in": "unit"}),
        (f"blocks: {other}", {"activations": other}),
        ("ZeRO stage 1", {"stage": 1, "parameters": DEVICE, "gradients": DEVICE}),
        ("shards in host memory", {**one_tier, **dict.fromkeys(KINDS, HOST)}),
        ("shards on NVMe, deferred update", {**one_tier, **dict.fromkeys(KINDS, NVME), "update": "deferred"}),
    ]


def changed(
    recipe: Recipe, folder: Path, steps: int, engine: dict[str, Any], *, save_every_steps: int | None = None
) -> Recipe:
    """Return the recipe of a trial: the first steps at the peak rate, without evaluation and answers."""
    facts = recipe.model_dump()
    facts["engine"] |= engine
    if NVME in facts["engine"].values() and facts["memory"]["nvme_dir"] is None:
        facts["memory"]["nvme_dir"] = str(folder.parent)
    facts["train"] |= {"max_steps": steps, "neftune_noise_alpha": None, "on_divergence": "continue"}
    facts["optimizer"] |= {"schedule": "constant", "schedule_args": {}, "min_lr": None, "warmup_steps": 0, "warmup_ratio": 0}
    if facts["adapter"] is not None:
        facts["adapter"]["dropout"] = 0.0
    facts["output"] |= {"dir": str(folder), "save_every_steps": save_every_steps, "logging_steps": 1, "report_to": ()}
    share = recipe.eval.share if recipe.eval is not None else None  # held-out rows are not trained on
    facts["eval"] = {"share": share, "max_rows": 1} if share is not None else None
    facts["show"] = None
    return Recipe.model_validate(facts, context={"check_files": False})


def verify(
    recipe: Recipe, ranks: int, most_ranks: int, folder: Path, run: Runner, *, steps: int, say: Callable[[str], None]
) -> list[Verdict]:
    """Run all trials of a recipe in `folder` and compare them. Errors are those of a run of the recipe."""
    split_batch(recipe, ranks)
    trials_folder = folder / TRIALS
    shutil.rmtree(trials_folder, ignore_errors=True)  # of a run that was killed
    trials_folder.mkdir(parents=True)
    found: list[Trajectory] = []
    try:
        for group in groups(trials_of(recipe, ranks, most_ranks, trials_folder, steps)):
            say(f"{counted(group[0].ranks, 'rank')}: {', '.join(trial.name for trial in group)}")
            found += run(group, group[0].ranks)
    finally:
        shutil.rmtree(trials_folder, ignore_errors=True)
    return verdicts(found, compute_dtype(recipe.train.dtype), steps)


def groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Return trials that run in the same processes: the killed one alone, and those of equal ranks."""
    keys = dict.fromkeys((trial.killed_at, trial.ranks) for trial in trials)
    return [[trial for trial in trials if (trial.killed_at, trial.ranks) == key] for key in keys]


def verdicts(found: Sequence[Trajectory], dtype: str, steps: int) -> list[Verdict]:
    """Compare trajectories with the stock one, or else with the planned one."""
    known = {each.name: each for each in found}
    stock, planned = known.get(STOCK), known[PLANNED]
    reference = stock if stock is not None and not stock.problem else planned
    if reference.problem:
        raise UserError(f"the recipe does not fit this machine: {reference.problem}")
    return [_verdict(each, reference, TOLERANCES[dtype], steps) for each in found]


def _verdict(each: Trajectory, reference: Trajectory, tolerances: tuple[float, float], steps: int) -> Verdict:
    if each is reference:
        return Verdict(each.name, steps, None, None, None, True, "reference")
    if each.problem:
        return Verdict(each.name, 0, None, None, None, None, f"not run: {each.problem}")
    loss, norm = _deviation(each.losses, reference.losses), _deviation(each.grad_norms, reference.grad_norms)
    samples = all(each.samples[step] == reference.samples.get(step) for step in each.samples)
    passed = loss <= tolerances[0] and norm <= tolerances[1] and samples and len(each.losses) == steps
    return Verdict(each.name, len(each.losses), loss, norm, samples, passed)


def _deviation(own: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference; infinite if a number is missing or not finite."""
    if len(own) != len(other) or not all(math.isfinite(value) for value in (*own, *other)):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(own, other)), default=math.inf)


def show_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    """Show the table."""
    table = Table("trial", "loss", "gradient norm", "samples", "", "", pad_edge=False, box=None)
    for each in found:
        mark = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[yellow]—[/]"}[each.passed]
        same = {True: "same", False: "[red]differ[/]", None: ""}[each.samples]
        table.add_row(each.name, _shown(each.loss), _shown(each.grad_norm), same, mark, each.note)
    console.print(table)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
