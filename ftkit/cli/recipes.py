"""`ftkit recipes`: list, show and copy the packaged recipes.

The list is `index.json` beside the recipes. `make recipes` writes it with the recipes; a test compares it with the planner.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from ftkit.cli.options import Json, RecipeName, echo_json
from ftkit.config.errors import RecipeError
from ftkit.config.recipe import Recipe
from ftkit.config.recipe_files import EXTENDS, packaged, read_file, resolve
from ftkit.errors import UserError
from ftkit.output.run_folder import write_file

TYPICAL_TOKENS = 100_000_000
"""Tokens of a data set, for the column of days: about 200,000 conversations of 500 tokens."""


def index() -> list[dict[str, Any]]:
    """Return the packaged recipes: name, model, method, hardware, device_gib, host_gib, tokens_per_s.

    The numbers are None for a recipe that is not planned for a hardware profile.
    """
    folder = next(iter(packaged().values())).parent
    return json.loads((folder / "index.json").read_text(encoding="utf-8"))


def list_recipes(as_json: Json = False) -> None:
    """List the packaged recipes with their planned memory and speed."""
    if as_json:
        echo_json(index())
        return
    table = Table(box=None, pad_edge=False)
    for name in ("recipe", "method", "hardware", "GiB per GPU", "GiB host", "tokens/s", "days"):
        table.add_column(name, justify="left" if name in ("recipe", "method", "hardware") else "right", no_wrap=True)
    for row in index():
        numbers = ["", "", "", ""]
        if row["tokens_per_s"] is not None:
            days = TYPICAL_TOKENS / row["tokens_per_s"] / 86400
            numbers = [f"{row['device_gib']:.1f}", f"{row['host_gib']}", f"{row['tokens_per_s']:,}", f"{days:.2f}"]
        table.add_row(row["name"], row["method"], row["hardware"], *numbers)
    console = Console(width=max(Console().width, 130), highlight=False, emoji=False)  # narrow terminals wrap, uncut
    console.print(table)
    console.print(
        f"[dim]planned and simulated, not measured; days: for {TYPICAL_TOKENS / 1e6:.0f}M tokens. "
        "`ftkit plan RECIPE --hardware NAME` shows the whole plan[/]"
    )


def show_recipe(recipe: RecipeName) -> None:
    """Print the text of a recipe, or the resolved recipe if it extends another."""
    path, text = read_file(recipe)
    document = resolve(text, recipe, path)
    if document.problems and (EXTENDS,) in document.places:
        raise RecipeError(document.problems)
    if document.bases:
        keys = [key for key in dict.fromkeys((*Recipe.model_fields, *document.values)) if key in document.values]
        merged = {key: document.values[key] for key in keys}
        text = f"# {' extends '.join([recipe, *document.bases])}\n"
        text += yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    typer.echo(text, nl=False)


def copy_recipe(
    recipe: RecipeName,
    target: Annotated[Path | None, typer.Argument(help="File or folder. Default: the current folder.")] = None,
) -> None:
    """Copy a packaged recipe, to edit it."""
    source, text = read_file(recipe)
    path = target or Path(source.name)
    path = path / source.name if path.is_dir() else path
    if path.exists():
        raise UserError(f"{path} exists already; name another file, or delete it")
    write_file(path, text)
    typer.echo(str(path))
