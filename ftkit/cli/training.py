"""`ftkit finetune`, `ftkit verify` and `ftkit report`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ftkit.cli.options import Json, Nproc, Overrides, RecipeName, echo_json, rank_count, say, screen, start_ranks
from ftkit.config.recipe import Recipe, load
from ftkit.config.wording import counted
from ftkit.errors import EndedEarly, RankError, StoppedError, UserError
from ftkit.launch.external import outer_job
from ftkit.output.run_folder import VERIFY, RunFolder, written_at


def finetune(
    recipe: RecipeName,
    overrides: Overrides = None,
    nproc: Nproc = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="auto|PATH", help="Resume from the newest checkpoint of output.dir, or from PATH."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in output.dir first.")] = False,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", min=0, help="Restart from the last checkpoint after a rank died, at most N times."),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check model, data and plan, print the run's settings, and stop.")
    ] = False,
) -> None:
    """Fine-tune a model. Starts the ranks itself, or joins those of torchrun or Slurm."""
    facts = load(recipe, overrides)
    joined = outer_job(os.environ)
    if joined is not None:
        if nproc is not None:
            raise UserError("--nproc starts ranks, and this process is already a rank of torchrun or Slurm: remove it")
        if max_restarts:
            raise UserError("--max-restarts restarts ranks that ftkit started; use --max-restarts of torchrun instead")
        os.environ.update(joined)
    ranks = int(os.environ["WORLD_SIZE"]) if joined is not None else rank_count(nproc, facts)
    folder = RunFolder(Path(facts.output.dir))
    if dry_run:
        from ftkit.train.run import dry_run as show_run

        show_run(facts, ranks, folder.check(resume, overwrite=overwrite, inputs=facts.inputs()))
        return
    lock = folder.lock() if joined is None or os.environ["RANK"] == "0" else nullcontext()
    with lock:
        train(facts, folder, ranks, resume, overwrite=overwrite, restarts=max_restarts, joined=joined is not None)


def train(
    facts: Recipe, folder: RunFolder, ranks: int, resume: str | None, *, overwrite: bool, restarts: int, joined: bool
) -> None:
    """Find the checkpoints to resume from, and run. After a rank died, resume from newer ones, `restarts` times."""
    first = not joined or os.environ["RANK"] == "0"  # only this rank holds the folder's lock and may delete an old run
    checkpoints = folder.prepare(resume, overwrite=overwrite, inputs=facts.inputs(), owner=first)
    if resume == "auto" and not checkpoints and first:
        say(f"no checkpoint in {folder.path}: starting from the first step")
    from ftkit.launch import ranks as launch
    from ftkit.report.page import note_end

    given, last = checkpoints, max(map(written_at, folder.checkpoints()), default=0.0)
    while True:
        arguments = (facts, [str(each) for each in checkpoints], ranks)
        try:
            if joined:
                result = launch.join("ftkit.train.run:run", arguments, int(os.environ["RANK"]))
            else:
                result = start_ranks("ftkit.train.run:run", arguments, ranks)
            break
        except (RankError, UserError, StoppedError) as error:
            if first:
                note_end(folder, str(error))
            if not isinstance(error, RankError) or not restarts or error.asked:
                raise
            restarts -= 1
            # Checkpoints written since the start come before those that the user named.
            checkpoints = [*(path for path in folder.checkpoints()[::-1] if written_at(path) > last), *given]
            say(f"{error}\nrestarting, {counted(restarts, 'restart')} left")
    if result.get("stopped"):
        raise EndedEarly(result["stopped"])


def verify(
    recipe: RecipeName,
    overrides: Overrides = None,
    nproc: Nproc = None,
    steps: Annotated[int, typer.Option("--steps", min=4, help="Optimizer steps of each trial.")] = 6,
    as_json: Json = False,
) -> None:
    """Compare short runs of a recipe on other ranks, tiers and strategies, and with stock transformers.

    Losses, gradient norms and samples must agree. The exit code is 1 if one differs.
    """
    facts = load(recipe, overrides)
    ranks = rank_count(nproc, facts)
    import torch

    from ftkit.cli import verify as trials

    def run(group: Sequence[Any], world: int) -> list[Any]:
        try:
            return start_ranks("ftkit.cli.trials:run_trials", (group,), world)
        except RankError:
            if group[0].killed_at is None:
                raise
            return []

    run_folder = RunFolder(Path(facts.output.dir))
    folder = run_folder.path / VERIFY
    with run_folder.lock():
        began = time.monotonic()
        most = torch.cuda.device_count() or max(ranks, 3)
        found = trials.verify(facts, ranks, most, folder, run, steps=steps, say=say)
    if as_json:
        echo_json([asdict(each) for each in found])
    else:
        trials.show_verdicts(screen(), found)
    failed = sum(each.passed is False for each in found)
    say(f"{len(found)} trials of {steps} steps in {time.monotonic() - began:.0f} s, {failed} failed")
    raise typer.Exit(int(failed > 0))


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of runs (output.dir).")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE.html", help="Default: FOLDER/report.html, or compare.html for several."),
    ] = None,
) -> None:
    """Write the HTML report of a run, or of several runs in the same charts."""
    from ftkit.report import compare, page

    if len(folders) > 1:
        path = out or Path("compare.html")
        compare.compare(folders, path)
    else:
        path = page.refresh(folders[0], out)
    typer.echo(str(path))
