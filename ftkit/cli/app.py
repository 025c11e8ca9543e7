"""The door: the commands of ftkit, and the only reader of argv and environ.

It reads the recipe, refuses what can be refused without a model, decides whether this process starts ranks or joins an
outer job as one, and turns errors into one screen and an exit code: 2 for input that the user can put right, 1 for a
rank that died, 130 for a run that was ended at once, 75 for one that ended early with a checkpoint to resume from, by wish
or by the memory guard, 71 where that saved none, 65 where the loss went wrong (errors.py). Everything else is our fault: 70,
with the traceback in a file.

Heavy modules (torch, transformers) are imported inside the commands that need them and nowhere above, because
`ftkit recipes list` and a typing mistake in a recipe should answer in a fraction of a second, and because the number of
threads must be in the environment before torch is first imported.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ftkit.cli.recipe_list import planned_of, show_recipes
from ftkit.config.recipe import Recipe, find, load, packaged
from ftkit.config.wording import counted
from ftkit.errors import UNEXPECTED, EndedEarly, RankError, StoppedError, UserError
from ftkit.launch.external import outer_job
from ftkit.output.run_folder import VERIFY, RunFolder, check_target, write, written_at
from ftkit.plan.catalog import find_hardware
from ftkit.plan.plan import Plan
from ftkit.plan.whatif import Answer, largest, what_if
from ftkit.report.plan_view import show_answers, show_plan
from ftkit.report.text import literal

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="The packaged recipes.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a packaged recipe.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ftkit {metadata.version('ftkit')}")
        raise typer.Exit


@app.callback()
def ftkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Fine-tune language models on one node of GPUs, or on a CPU."""


@app.command()
def finetune(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key; may be repeated.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this node; default: the recipe's, else one a GPU, or 1.")
    ] = None,
    resume: Annotated[str | None, typer.Option(metavar="auto|PATH", help="Continue from a checkpoint.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what an earlier run left in output.dir, and start anew.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restart after a rank died, at most so many times.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and train nothing.")] = False,
) -> None:
    """Fine-tune a model as a recipe says."""
    facts = load(recipe, overrides)
    joined = outer_job(os.environ)
    if joined is not None:
        if nproc is not None:
            raise UserError(
                "--nproc is for ranks that ftkit starts; this is a rank of an outer job (torchrun or Slurm): remove it"
            )
        if max_restarts:
            raise UserError("--max-restarts is for ranks that ftkit starts; torchrun has one of its own")
        os.environ.update(joined)
    ranks = int(os.environ["WORLD_SIZE"]) if joined is not None else _ranks(facts, nproc)
    if dry_run:
        # Imported here: torch and transformers take seconds, see the top of this file.
        from ftkit.train.run import dry_run as say_what_would_be_run

        checkpoints = RunFolder(Path(facts.output.dir)).check(resume, overwrite=overwrite, inputs=facts.inputs())
        say_what_would_be_run(facts, ranks, checkpoints)
        return
    folder = RunFolder(Path(facts.output.dir))
    lock = folder.lock() if joined is None or os.environ["RANK"] == "0" else nullcontext()
    with lock:
        _train(facts, folder, ranks, resume, overwrite=overwrite, restarts=max_restarts, joined=joined is not None)


def _train(
    facts: Recipe, folder: RunFolder, ranks: int, resume: str | None, *, overwrite: bool, restarts: int, joined: bool
) -> None:
    """Find what to continue from, and run. After a rank died, resume from what was saved since, `restarts` times."""
    first = not joined or os.environ["RANK"] == "0"  # it alone holds the folder's lock, and may remove what lies there
    checkpoints = folder.prepare(resume, overwrite=overwrite, inputs=facts.inputs(), owner=first)
    if resume == "auto" and not checkpoints and first:
        _say(f"no checkpoint in {folder.path}: starting from the beginning")
    from ftkit.launch import ranks as launch  # here, see the top of this file
    from ftkit.report.page import note_end

    given, last = checkpoints, max(map(written_at, folder.checkpoints()), default=0.0)
    while True:
        arguments = (facts, [str(each) for each in checkpoints], ranks)
        try:
            if joined:
                result = launch.join("ftkit.train.run:run", arguments, int(os.environ["RANK"]))
            else:
                result = launch.start("ftkit.train.run:run", arguments, ranks, environ=os.environ, say=_say)
            break
        except (RankError, UserError, StoppedError) as error:
            if first:
                note_end(folder, str(error))
            if not isinstance(error, RankError) or not restarts or error.asked:
                raise
            restarts -= 1
            # What was saved since the start, then what the user said.
            checkpoints = [*(path for path in folder.checkpoints()[::-1] if written_at(path) > last), *given]
            _say(f"{error}\nstarting again, {counted(restarts, 'restart')} left")
    if result.get("stopped"):
        raise EndedEarly(result["stopped"])


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key; may be repeated.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="Hardware profile; an unknown name lists them. Default: this machine.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on the node; default: the recipe's, else one a GPU, or 1.")
    ] = None,
    wonder: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="Also plan larger cards, a drive, LoRA, half the sequence. Default: on in text output with known rates.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also draw it: tiers, the step, a GPU's memory within it.")
    ] = None,
    most: Annotated[
        bool, typer.Option("--largest", help="Plan the largest model that fits: with more, or fewer, of the same blocks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object, sizes in bytes.")] = False,
) -> None:
    """Say what a recipe takes on each tier, how long it takes, and whether it fits, before anything is started."""
    facts = load(recipe, overrides)
    profile = find_hardware(hardware) if hardware is not None else None
    if profile is None:
        ranks = _ranks(facts, nproc)
    else:
        ranks = nproc or (facts.ranks if facts.ranks != "auto" else profile.gpus * profile.nodes or 1)
    if profile is not None and profile.gpus and ranks > profile.gpus * profile.nodes:
        has = counted(profile.gpus * profile.nodes, "GPU")
        raise UserError(f"--hardware {profile.name} has {has}, {ranks} ranks need one each; lower --nproc or ranks")
    if page is not None:
        check_target(page, "--page", ".html")
    from ftkit.train.planning import ask, epoch_of  # here, see the top of this file

    with Console(stderr=True).status("planning …"):
        asked = ask(facts, ranks, profile)
        made = largest(asked) if most else asked.plan()
        epoch = epoch_of(facts, made)
    if page is not None:
        from ftkit.report.plan_view import render  # here, see the top of this file

        _write_page(page, render(made, f"{Path(recipe).stem} on {hardware or 'this machine'}"))
    wonder = made.speed is not None and not as_json if wonder is None else wonder
    answers = []
    if wonder and made.asked is not None:
        with Console(stderr=True).status("and what if …"):
            answers = list(what_if(made.asked))
    if as_json:
        found = {"hardware": hardware, **made.as_dict(), "epoch": epoch}
        if wonder:
            found["what_if"] = [each.as_dict() for each in answers]
        typer.echo(json.dumps(found, indent=1))
    else:
        _show_plan(made, epoch, answers, most=most)


def _show_plan(made: Plan, epoch: dict[str, float] | None, answers: list[Answer], *, most: bool) -> None:
    """Print a plan, and what was asked for beside it: an epoch's time, other nodes."""
    console = Console(soft_wrap=True, highlight=False, emoji=False)
    if most:
        size = f"{made.shape.numel / 1e9:.2f}B"
        console.print(f"the largest that fits: {counted(len(made.shape.blocks), 'block')}, {size}")
    show_plan(console, made)
    if epoch is not None:
        text = f"{epoch['seconds'] / 3600:,.2f} h for about {epoch['tokens']:,} tokens (4 bytes of the file each)"
        console.print(f"[bold]{'an epoch':<13}[/] {text}")
    if answers:
        show_answers(console, answers, made.speed)


@app.command()
def data(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key; may be repeated.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write it as a page, in light and dark.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show as tokens, besides one for each kind of warning.")] = 3,
) -> None:
    """Show a recipe's rows as tokens and labels, with warnings. Exit with 2 if a run would refuse them."""
    import datasets  # here, see the top of this file

    from ftkit.train.preview import preview

    if page is not None:
        check_target(page, "--page", ".html")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # a bar in a log file is a line a tick
    found = preview(recipe, settings=overrides or (), rows=rows)
    found.show(Console(soft_wrap=True, highlight=False, emoji=False))
    if page is not None:
        _write_page(page, found.page())
        _say(f"written: {page}")
    if found.refused:
        raise typer.Exit(2)


@recipes_app.command("list")
def list_recipes() -> None:
    """List the packaged recipes, with what the planner says of each on its profile."""
    rows = {name: planned_of(_title(path)) for name, path in packaged().items()}
    width = max(Console().width, 130)  # a narrow terminal wraps it, uncut
    show_recipes(Console(width=width, highlight=False, emoji=False), rows)


@recipes_app.command("show")
def show_recipe(recipe: RecipeName) -> None:
    """Print a recipe as it is written."""
    typer.echo(find(recipe).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy")
def copy_recipe(
    recipe: RecipeName,
    target: Annotated[Path | None, typer.Argument(help="File or folder; default: the current folder.")] = None,
) -> None:
    """Copy a packaged recipe, to change it."""
    source = find(recipe)
    path = target or Path(source.name)
    path = path / source.name if path.is_dir() else path
    if path.exists():
        raise UserError(f"{path} is there already; name another file, or delete it")
    try:
        shutil.copyfile(source, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another file") from None
    typer.echo(str(path))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder checkpoint-N of a run.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    dtype: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp16", help="Default: as before training.")] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.001, help="Largest safetensors file.")] = 4.66,
    task: Annotated[str, typer.Option(metavar="causal-lm|seq2seq", help="What the model is for.")] = "causal-lm",
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Merge an adapter into its base. Needs host memory for the whole model.")
    ] = False,
    base: Annotated[str | None, typer.Option(metavar="PATH|ID", help="Of an adapter; default: what it names.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code from the checkpoint or base folder.")] = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder. Without --merge-adapter, no model is loaded."""
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"--dtype: {dtype} is unknown; fp32, bf16 and fp16 are known")
    if base is not None and not merge_adapter:
        raise UserError("--base is for --merge-adapter: without it, nothing of the base is written")
    if not math.isfinite(max_shard_gib):
        raise UserError(f"--max-shard-gib: found {max_shard_gib}, needs a number of GiB")
    from ftkit.hf.save.export import export_checkpoint  # here, see the top of this file
    from ftkit.hf.save.merge import merge_adapter as merge

    shard_bytes = int(max_shard_gib * 2**30)
    options: dict[str, Any] = {"dtype": dtype, "shard_bytes": shard_bytes, "task": task}
    options["trust_remote_code"] = trust_remote_code
    if merge_adapter:
        numel = merge(checkpoint, out, base=base, **options)
    else:
        numel = export_checkpoint(checkpoint, out, **options)
    _say(f"{out}: {numel:,} parameters")


@app.command()
def verify(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key; may be repeated.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of the run as planned; default: as finetune.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each trial, 4 or more.")] = 6,
) -> None:
    """Show that a recipe gives the same numbers however the engine works: ranks, tiers, recomputation, a kill."""
    facts = load(recipe, overrides)
    ranks = _ranks(facts, nproc)
    import torch  # here, see the top of this file

    from ftkit.cli import verify as room
    from ftkit.launch import ranks as launch

    def run(trials: Sequence[Any], world: int) -> list[Any]:
        try:
            return launch.start("ftkit.cli.trials:run_trials", (trials,), world, environ=os.environ, say=_say)
        except RankError:
            if trials[0].killed_at is None:
                raise
            return []

    run_folder = RunFolder(Path(facts.output.dir))
    folder = run_folder.path / VERIFY
    with run_folder.lock():
        began = time.monotonic()
        most = torch.cuda.device_count() or max(ranks, 3)
        found = room.verify(facts, ranks, most, folder, run, steps=steps, say=_say)
        path = folder / room.VERDICTS
        room.write_verdicts(path, facts, found, time.monotonic() - began)
    room.show_verdicts(Console(soft_wrap=True, highlight=False, emoji=False), found)
    failed = [each.name for each in found if each.passed is False]
    _say(f"{len(found)} trials of {steps} steps in {time.monotonic() - began:.0f} s, {len(failed)} failed: {path}")
    if failed:
        raise typer.Exit(1)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Of runs: output.dir of their recipes.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: report.html in the folder; compare.html here for several.")
    ] = None,
) -> None:
    """Write the report of a run anew, or compare several in one."""
    from ftkit.report import compare, page  # here, see the top of this file

    if len(folders) > 1:
        path = out or Path("compare.html")
        compare.compare(folders, path)
    else:
        path = page.refresh(folders[0], out)
    typer.echo(str(path))


@app.command()
def doctor(
    nvme_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Measure the drive of this folder too (256 MiB).")
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Measure the node (a minute), for `ftkit plan --hardware FILE`.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks that measure; default: one a GPU, or 2.")] = None,
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Compute dtype of the measurement.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as an object.")] = False,
) -> None:
    """Say what is in this machine and whether this install can use it; ends with 1 where something fails."""
    from ftkit.cli.doctor import as_dict, judge, show  # here, see the top of this file
    from ftkit.cli.probe import probe

    facts = probe(nvme_dir)
    findings = judge(facts)
    if measure is not None:
        _measure(measure, nproc, dtype, facts.nvme)
    if as_json:
        typer.echo(json.dumps(as_dict(facts, findings), indent=1))
    else:
        show(findings, Console(soft_wrap=True, highlight=False, emoji=False))
    raise typer.Exit(int(any(each.verdict == "fail" for each in findings)))


def _measure(path: Path, nproc: int | None, dtype: str, nvme: dict[str, Any] | None) -> None:
    """Measure this machine by all its ranks, and write its profile."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--measure: {path} must end in .yaml, by which `ftkit plan --hardware` knows a file")
    check_target(path, "--measure", ".yaml", ".yml")
    if dtype not in ("auto", "fp32", "bf16", "fp16"):
        raise UserError(f"--dtype: {dtype} is unknown; auto, fp32, bf16 and fp16 are known")
    import torch  # here, see the top of this file

    from ftkit.cli.measure import profile, write_profile
    from ftkit.launch import ranks as launch
    from ftkit.train.arguments import compute_dtype

    gpus = torch.cuda.device_count()
    ranks = nproc or gpus or 2
    launch.check_ranks(ranks, gpus)
    wanted = compute_dtype(dtype)
    rates = launch.start("ftkit.cli.measure:rank", (wanted,), ranks, environ=os.environ, say=_say)
    write_profile(path, profile(rates, wanted, nvme, ranks), ranks)
    _say(f"measured with {counted(ranks, 'rank')}: {path}")


@app.command()
def generate(
    folder: Annotated[str, typer.Argument(help="A model folder, an adapter folder, or a hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Default: lines of stdin.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this probability, above 0 to 1.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws: the same seed gives the same answers.")] = 0,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on this machine that share the model, one a GPU.")] = 1,
) -> None:
    """Answer prompts with a base or fine-tuned model."""
    asked = prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not asked:
        raise UserError("no prompt was given: name one or more after the folder, or write them to stdin, one a line")
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    if nproc > 1:
        import torch  # here, see the top of this file

        from ftkit.launch import ranks as launch

        launch.check_ranks(nproc, torch.cuda.device_count())
        entry = "ftkit.train.generate:sharded_answers"
        found = launch.start(entry, (folder, asked, settings), nproc, environ=os.environ, say=_say)
        given: Iterable[tuple[str, str]] = zip(asked, found)
    else:
        from ftkit.train.generate import answers

        given = answers(folder, asked, **settings)
    for prompt, answer in given:
        typer.echo(answer if len(asked) == 1 else f"> {prompt}\n{answer}\n")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave with its exit code.

    Args:
        arguments: Default: those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text, nor need a terminal take all
    try:
        app(arguments, prog_name="ftkit")
    except UserError as error:
        _leave(str(error), error.exit_code)
    except RankError as error:
        _leave(str(error), 1)
    except (StoppedError, KeyboardInterrupt) as error:
        _leave(str(error) or "ended", 130)
    except OSError as error:  # of a full disk, a folder without permission, a drive that fails
        _leave(": ".join(str(part) for part in (error.filename, error.strerror or error) if part), 2)
    except MemoryError:
        _leave("this process is out of memory: free some of the node's, or lower what the command was asked for", 2)
    except Exception as error:
        _leave(_unexpected(error), UNEXPECTED)


def _unexpected(error: Exception) -> str:
    """Return what to say about an error that is ours; the traceback goes into a file of its own."""
    told = "".join(traceback.format_exception(error))
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno}). This is a fault of ftkit"
    try:
        with tempfile.NamedTemporaryFile(prefix="ftkit-fault-", suffix=".txt", delete=False) as file:
            file.write(told.encode(errors="backslashreplace"))  # names of files need not be text
    except OSError:
        return f"{text}; please report it:\n{told}"
    return f"{text}; please report it with {file.name}"


def _leave(text: str, code: int) -> None:
    rank = os.environ.get("RANK")
    name = f"ftkit (rank {rank})" if rank is not None else "ftkit"
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(f"[bold red]{name}:[/] {literal(text)}")
    sys.exit(code)


def _write_page(page: Path, text: str) -> None:
    try:
        write(page, text)
    except (OSError, ValueError) as error:  # of a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--page: {page} cannot be written ({reason}); name another file with --page") from None


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(literal(text))


def _ranks(facts: Recipe, nproc: int | None) -> int:
    """Return the number of ranks to start on this profile, or refuse it."""
    import torch  # here, see the top of this file

    from ftkit.launch import ranks as launch

    gpus = torch.cuda.device_count()
    ranks = nproc or (facts.ranks if facts.ranks != "auto" else max(1, gpus))
    launch.check_ranks(ranks, gpus)
    return ranks


def _title(path: Path) -> str:
    """Return the first line of a recipe's opening comment."""
    first = path.read_text(encoding="utf-8").splitlines()[:1]
    return first[0].lstrip("# ") if first and first[0].startswith("#") else ""
