"""Options that several commands share, and how commands write to the screen and to files.

torch and transformers take seconds to import. Commands import them, and the modules that need them, inside the function.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ftkit.config.recipe import Recipe
from ftkit.config.wording import counted
from ftkit.errors import UserError
from ftkit.output.run_folder import plain
from ftkit.plan.catalog import Hardware
from ftkit.report.text import literal


class Dtype(str, Enum):
    """Dtypes of weights and arithmetic."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Task(str, Enum):
    """Kinds of model."""

    causal_lm = "causal-lm"
    seq2seq = "seq2seq"


RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file, or name of a packaged recipe.")]
RecipeOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODEL", help="YAML file or name of a packaged recipe; else a hub id or a folder with config.json."
    ),
]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model or of an adapter, or a hub id.")]
DataName = Annotated[str, typer.Argument(metavar="DATA", help="File, folder of files, or hub data set OWNER/SET.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.SUB=VALUE", help="Override a key of the recipe. Repeatable.")
]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Ranks on this node. Default: a recipe's `ranks`, else one per GPU, or 1 on a CPU."),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE.yaml",
        help="Plan for the GPUs and memory of this profile. Default: this machine (a recipe's `hardware` gives only rates).",
    ),
]
Lora = Annotated[bool, typer.Option("--lora", help="For a MODEL: LoRA of rank 16 instead of all parameters.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Page = Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE.html", help="Also write an HTML page.")]
NvmeDir = Annotated[
    Path | None, typer.Option("--nvme-dir", metavar="FOLDER", help="Also measure the drive of this folder (256 MiB).")
]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]


def say(text: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(literal(text))


def screen() -> Console:
    """Return the console for results. It does not cut lines."""
    return Console(soft_wrap=True, highlight=False, emoji=False)


def echo_json(value: Any) -> None:
    """Print a result as JSON. A number that is not finite becomes null."""
    typer.echo(json.dumps(plain(value), indent=1))


def rank_count(nproc: int | None, recipe: Recipe | None = None, profile: Hardware | None = None) -> int:
    """Return the number of ranks: --nproc, else the recipe's, else one per GPU of the profile or this machine, or 1.

    Raises:
        UserError: There are fewer GPUs.
    """
    wanted = nproc or (recipe.ranks if recipe is not None and recipe.ranks != "auto" else 0)
    if profile is not None:
        gpus = profile.gpus * profile.nodes
        ranks = wanted or gpus or profile.ranks or 1
        if gpus and ranks > gpus:
            has = counted(gpus, "GPU")
            raise UserError(f"--hardware {profile.name} has {has}, {ranks} ranks need one each; lower --nproc or ranks")
        return ranks
    import torch

    from ftkit.launch import ranks as launch

    gpus = torch.cuda.device_count()
    launch.check_ranks(wanted or 1, gpus)
    return wanted or max(1, gpus)


def start_ranks(entry: str, arguments: tuple[Any, ...], ranks: int) -> Any:
    """Start the ranks of this node and return the result of rank 0; see `ftkit.launch.ranks.start`."""
    import os

    from ftkit.launch import ranks as launch

    return launch.start(entry, arguments, ranks, environ=os.environ, say=say)
