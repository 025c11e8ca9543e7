"""The door: the commands of ftkit, and the only reader of argv and environ.

It reads the recipe, refuses what can be refused without a model, decides whether this process starts ranks or joins an
outer job as one, and turns errors into one screen and an exit code: 2 for input that the user can put right, 1 for a
rank that died, 130 for a run that was ended on request, 75 or 71 for one that the memory guard ended with or without a
checkpoint to resume from (errors.py). Everything else keeps its traceback: it is our fault.

Heavy modules (torch, transformers) are imported inside the commands that need them and nowhere above, because
`ftkit recipes list` and a typing mistake in a recipe should answer in a fraction of a second, and because the number of
threads must be in the environment before torch is first imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ftkit.errors import UserError
from ftkit.outer import outer_job
from ftkit.plan.hardware import box as find_box
from ftkit.plan.show import show_plan
from ftkit.recipe import Recipe, find, load, packaged
from ftkit.resumed import check_resumed
from ftkit.run_folder import RunFolder
from ftkit.watch import RankError, StoppedError

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
    """Fine-tune language models on one box of GPUs, or on a CPU."""


@app.command()
def finetune(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key; may be repeated.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks on this box; default: one a GPU, or 1.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="auto|PATH", help="Continue from a checkpoint.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what an earlier run left in output.dir, and start anew.")
    ] = False,
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
        os.environ.update(joined)
    ranks = int(os.environ["WORLD_SIZE"]) if joined is not None else _ranks(facts, nproc)
    if dry_run:
        # Imported here: torch and transformers take seconds, see the top of this file.
        from ftkit.finetune import dry_run as say_what_would_be_run

        say_what_would_be_run(facts, ranks)
        return
    folder = RunFolder(Path(facts.output.dir))
    checkpoint = folder.prepare(resume, overwrite=overwrite, inputs=facts.inputs())
    if resume == "auto" and checkpoint is None:
        _say(f"no checkpoint in {folder.path}: starting from the beginning")
    if checkpoint is not None:
        changed = check_resumed(facts, checkpoint.resolve().parent / folder.recipe.name)
        if changed and os.environ.get("RANK", "0") == "0":
            _say(changed)
    from ftkit import launch  # here, see the top of this file

    arguments = (facts, str(checkpoint) if checkpoint else None, ranks)
    if joined is not None:
        result = launch.join("ftkit.finetune:run", arguments, int(os.environ["RANK"]))
    else:
        result = launch.start("ftkit.finetune:run", arguments, ranks, environ=os.environ, say=_say)
    if result.get("stopped"):
        raise StoppedError(result["stopped"])


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key; may be repeated.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="A box by name; default: this machine.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks on the box; default: one a GPU, or 1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object, sizes in bytes.")] = False,
) -> None:
    """Say what a recipe takes on each tier, and whether it fits, before anything is started."""
    facts = load(recipe, overrides)
    box = find_box(hardware) if hardware is not None else None
    ranks = nproc or (facts.ranks if facts.ranks != "auto" else box.gpus or 1) if box else _ranks(facts, nproc)
    if box is not None and box.gpus and ranks > box.gpus:
        raise UserError(f"--hardware {box.name} has {box.gpus} GPUs, {ranks} ranks need one each; lower --nproc or ranks")
    from ftkit.planning import plan_recipe  # here, see the top of this file

    made = plan_recipe(facts, ranks, box)
    if as_json:
        typer.echo(json.dumps({"hardware": hardware, **made.as_dict()}, indent=1))
    else:
        show_plan(Console(soft_wrap=True, highlight=False), made)


@recipes_app.command("list")
def list_recipes() -> None:
    """List the packaged recipes."""
    for name, path in packaged().items():
        typer.echo(f"{name:24} {_title(path)}")


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
def generate(
    folder: Annotated[str, typer.Argument(help="A model folder, an adapter folder, or a hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Default: lines of stdin.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.0,
) -> None:
    """Answer prompts with a base or fine-tuned model."""
    asked = prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not asked:
        raise UserError("no prompt was given: name one or more after the folder, or write them to stdin, one a line")
    from ftkit.generate import answers  # here, see the top of this file

    for prompt, answer in answers(folder, asked, max_new_tokens=max_new_tokens, temperature=temperature):
        typer.echo(answer if len(asked) == 1 else f"> {prompt}\n{answer}\n")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave with its exit code.

    Args:
        arguments: Default: those of the process.
    """
    try:
        app(arguments, prog_name="ftkit")
    except UserError as error:
        _leave(str(error), error.exit_code)
    except RankError as error:
        _leave(str(error), 1)
    except (StoppedError, KeyboardInterrupt) as error:
        _leave(str(error) or "ended", 130)


def _leave(text: str, code: int) -> None:
    rank = os.environ.get("RANK")
    name = f"ftkit (rank {rank})" if rank is not None else "ftkit"
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]{name}:[/] {escape(text)}")
    sys.exit(code)


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(escape(text))


def _ranks(facts: Recipe, nproc: int | None) -> int:
    """Return the number of ranks to start on this box, or refuse it."""
    import torch  # here, see the top of this file

    from ftkit import launch

    gpus = torch.cuda.device_count()
    ranks = nproc or (facts.ranks if facts.ranks != "auto" else max(1, gpus))
    launch.check_ranks(ranks, gpus)
    return ranks


def _title(path: Path) -> str:
    """Return the first line of a recipe's opening comment."""
    first = path.read_text(encoding="utf-8").splitlines()[:1]
    return first[0].lstrip("# ") if first and first[0].startswith("#") else ""
