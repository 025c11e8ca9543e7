"""The dry run of a recipe: the parts of the run, printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ftkit.config.recipe import Recipe, steps_of
from ftkit.config.wording import counted
from ftkit.report.plan_text import show_plan
from ftkit.report.text import literal
from ftkit.spec.strategy import decided
from ftkit.train.build import make_parts, notices
from ftkit.train.planning import ask_here
from ftkit.train.resume import choose
from ftkit.train.trainer import WholeSteps


def dry_run(recipe: Recipe, ranks: int, checkpoints: Sequence[Path] = ()) -> None:
    """Do everything before the first step that needs no ranks, and print it.

    Args:
        recipe: The recipe.
        ranks: Number of processes of the whole run.
        checkpoints: Checkpoints that the run would try to resume from, in this order.

    Raises:
        UserError: The run would not begin.
    """
    say = Console(soft_wrap=True, highlight=False, emoji=False)

    def tell(text: object) -> None:
        say.print(literal(str(text)))

    tried = [str(each) for each in checkpoints]
    parts = make_parts(
        recipe, ranks, lambda model: ask_here(recipe, model, ranks).plan(), lambda: choose(tried, recipe, None, tell)
    )
    rows, strategy = parts.rows, parts.plan.strategy
    micro_batch, accumulation = decided(strategy.micro_batch), decided(strategy.accumulation)
    order = WholeSteps(rows.order(recipe.train.seed), micro_batch * accumulation * ranks)
    steps, per_epoch = steps_of(recipe, len(order.order), order.step_sequences), len(order) // order.step_sequences
    if parts.start.checkpoint is not None:
        tell(f"would resume from {parts.start.checkpoint}")
    tell(recipe.dump())
    tell(rows.report)
    tell(f"held out: {counted(0 if rows.held_out is None else len(rows.held_out), 'row')}")
    show_plan(say, parts.plan)
    tell(
        f"step: {recipe.train.batch_tokens:,} tokens = {counted(ranks, 'rank')} x {counted(micro_batch, 'sequence')} x "
        f"{accumulation} micro-batch{'' if accumulation == 1 else 'es'} x {recipe.data.sequence_tokens:,} tokens"
    )
    tell(f"steps: {steps:,}, {per_epoch:,} an epoch of {len(rows.train):,} sequences")
    for line in notices(recipe, parts, order):
        tell(line)
    tell("nothing was trained (--dry-run)")
