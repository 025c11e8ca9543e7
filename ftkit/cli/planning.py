"""Commands before a run: `ftkit plan`, `init`, `data`, `doctor` and `measure`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ftkit.cli.options import (
    DataName,
    Dtype,
    HardwareName,
    Json,
    Lora,
    Nproc,
    NvmeDir,
    Overrides,
    Page,
    RecipeName,
    RecipeOrModel,
    echo_json,
    rank_count,
    say,
    screen,
    start_ranks,
)
from ftkit.config.recipe import load
from ftkit.config.recipe_files import packaged
from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.output.run_folder import write_file
from ftkit.plan.catalog import find_hardware
from ftkit.plan.plan import Plan
from ftkit.plan.whatif import Answer, largest, what_if


def plan(
    recipe: RecipeOrModel,
    overrides: Overrides = None,
    hardware: HardwareName = None,
    lora: Lora = False,
    nproc: Nproc = None,
    questions: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="Also plan larger GPUs, a drive, 8-bit moments, LoRA, half the sequence length. Default: on if the rates "
            "are known.",
        ),
    ] = None,
    most: Annotated[
        bool, typer.Option("--largest", help="Vary the model's number of blocks, and plan the largest model that fits.")
    ] = False,
    as_json: Json = False,
    out: Page = None,
) -> None:
    """Show the memory per tier, the strategy and the time per step of a recipe or model. Allocates nothing.

    A recipe that does not fit exits with 2 and names changes that would help.
    """
    profile = find_hardware(hardware) if hardware is not None else None
    is_recipe = Path(recipe).expanduser().is_file() or recipe.endswith((".yaml", ".yml")) or recipe in packaged()
    if is_recipe:
        if lora:
            raise UserError("--lora is for a MODEL; in a recipe, add a section `adapter:`")
        facts = load(recipe, overrides)
        ranks = rank_count(nproc, facts, profile)
    else:
        from ftkit.train.starter import starter

        if overrides:
            raise UserError("--set is for a RECIPE; `ftkit init` writes the recipe of a model")
        ranks = rank_count(nproc, None, profile)
        facts = starter(recipe, ranks, hardware, lora=lora)
    from ftkit.train.planning import ask, epoch_of

    with Console(stderr=True).status("planning …"):
        asked = ask(facts, ranks, profile)
        made = largest(asked) if most else asked.plan()
        epoch = epoch_of(facts, made) if is_recipe else None
    if out is not None:
        from ftkit.report.plan_view import render

        write_file(out, render(made, f"{Path(recipe).stem} on {hardware or 'this machine'}"))
    wanted = made.speed is not None and not as_json if questions is None else questions
    answers = list(what_if(made.asked)) if wanted else []
    if as_json:
        found: dict[str, Any] = {"hardware": hardware, **made.as_dict(), "epoch": epoch}
        echo_json({**found, "what_if": [each.as_dict() for each in answers]} if wanted else found)
    else:
        _show_plan(made, epoch, answers, most=most)


def _show_plan(made: Plan, epoch: dict[str, float] | None, answers: list[Answer], *, most: bool) -> None:
    """Print a plan, the time of an epoch, and the answers to what-if questions."""
    from ftkit.report.plan_view import show_answers, show_plan

    console = screen()
    if most:
        size = f"{made.shape.numel / 1e9:.2f}B"
        console.print(f"largest model that fits: {counted(len(made.shape.blocks), 'block')}, {size} parameters")
    show_plan(console, made, epoch)
    if answers:
        show_answers(console, answers, made.speed)


def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, or folder with config.json.")],
    data: DataName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.yaml", help="Recipe to write.")] = Path("recipe.yaml"),
    hardware: HardwareName = None,
    lora: Annotated[bool, typer.Option("--lora", help="LoRA, even if full fine-tuning fits.")] = False,
    nproc: Nproc = None,
) -> None:
    """Write a recipe that fits this machine or --hardware: full fine-tuning if that fits, else LoRA."""
    if out.exists():
        raise UserError(f"--out: {out} exists already; name another file, or delete it")
    profile = find_hardware(hardware) if hardware is not None else None
    ranks = rank_count(nproc, None, profile)
    from ftkit.train.starter import fitting_starter

    with Console(stderr=True).status("planning …"):
        made = fitting_starter(model, data, ranks, profile, hardware, lora=lora)
    write_file(out, made.text)
    if made.lora and not lora:
        say("full fine-tuning does not fit: the recipe trains LoRA")
    say(f"{out}: next, `ftkit data {out}` shows the rows and `ftkit finetune {out}` trains")


def data(
    recipe: RecipeName,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows to show, beside one for each kind of warning.")] = 3,
    as_json: Json = False,
    out: Page = None,
) -> None:
    """Show the rows of a recipe as tokens and labels, with warnings. The exit code is 2 if a run would refuse them."""
    import datasets

    from ftkit.train.preview import preview

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # each tick would be a line of a log file
    found = preview(recipe, settings=overrides or (), rows=rows)
    if as_json:
        echo_json(asdict(found))
    else:
        found.show(screen())
    if out is not None:
        write_file(out, found.page())
    if found.refused:
        raise typer.Exit(2)


def doctor(nvme_dir: NvmeDir = None, as_json: Json = False) -> None:
    """Check GPUs, driver, torch, Triton and host, and print fixes. The exit code is 1 if a check fails."""
    from ftkit.cli.doctor import judge, show
    from ftkit.cli.probe import probe

    facts = probe(nvme_dir)
    findings = judge(facts)
    if as_json:
        echo_json({"findings": [asdict(each) for each in findings], "probe": asdict(facts)})
    else:
        show(findings, screen())
    raise typer.Exit(int(any(each.verdict == "fail" for each in findings)))


def measure(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.yaml", help="Hardware profile to write.")],
    nproc: Nproc = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Compute dtype. Default: as `train.dtype: auto`.")] = None,
    nvme_dir: NvmeDir = None,
) -> None:
    """Measure compute, links and memory of this machine for `ftkit plan`. Takes a minute or two, all ranks busy.

    The profile is read by `ftkit plan --hardware FILE.yaml` and by `hardware: FILE.yaml` in a recipe.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out: {out} must end in .yaml: `ftkit plan --hardware` recognises a file by this ending")
    ranks = rank_count(nproc)
    from ftkit.cli.measure import profile_text
    from ftkit.cli.probe import measure_drive
    from ftkit.train.arguments import compute_dtype

    drive = None if nvme_dir is None else measure_drive(nvme_dir)
    wanted = compute_dtype(dtype.value if dtype is not None else "auto")
    rates = start_ranks("ftkit.cli.measure:rank", (wanted,), ranks)
    write_file(out, profile_text(rates, wanted, drive, ranks))
    say(f"measured with {counted(ranks, 'rank')}: {out}")
