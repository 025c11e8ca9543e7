"""The command `ftkit`: its subcommands, and how errors become exit codes.

Exit codes: 2 for wrong input, 1 for a rank that died or a failed check, 130 for a run ended at once by the user. 75 and 71
are runs ended early, with and without a checkpoint; 65 is a diverged loss (`ftkit/errors.py`). 70 is an error in ftkit.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

from ftkit.cli import models, planning, recipes, training
from ftkit.errors import UNEXPECTED, RankError, StoppedError, UserError
from ftkit.report.text import literal

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="List, show and copy the packaged recipes.", no_args_is_help=True)
COMMANDS: dict[str, Callable[..., None]] = {
    "finetune": training.finetune,
    "plan": planning.plan,
    "init": planning.init,
    "data": planning.data,
    "generate": models.generate,
    "eval": models.eval_model,
    "export": models.export,
    "report": training.report,
    "verify": training.verify,
    "doctor": planning.doctor,
    "measure": planning.measure,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
recipes_app.command("list")(recipes.list_recipes)
recipes_app.command("show")(recipes.show_recipe)
recipes_app.command("copy")(recipes.copy_recipe)
app.add_typer(recipes_app, name="recipes")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ftkit {metadata.version('ftkit')}")
        raise typer.Exit


@app.callback()
def ftkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune language models on one node of GPUs, or on a CPU."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code. `arguments` defaults to those of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal or the names of files may not be UTF-8
    try:
        app(arguments, prog_name="ftkit")
    except UserError as error:
        _leave(str(error), error.exit_code)
    except RankError as error:
        _leave(str(error), 1)
    except (StoppedError, KeyboardInterrupt) as error:
        _leave(str(error) or "ended", 130)
    except OSError as error:  # a full disk, a folder without permission, a failing drive
        _leave(": ".join(str(part) for part in (error.filename, error.strerror or error) if part), 2)
    except Exception:
        traceback.print_exc()
        _leave("this is an error in ftkit; please report it with the traceback above", UNEXPECTED)


def _leave(text: str, code: int) -> None:
    rank = os.environ.get("RANK")
    name = f"ftkit (rank {rank})" if rank is not None else "ftkit"
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(f"[bold red]{name}:[/] {literal(text)}")
    sys.exit(code)
