"""Which checkpoint a run goes on from: the newest that is whole, after every byte of it was compared with its checksum.

The ranks divide the reading. What is passed over is said, with the reason; a checkpoint that the user named is used or
refused. One that is whole and belongs to another run, by the recipe and the checksum of the rows that it notes, is refused
as well. What it costs: one read of each checkpoint that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftkit.config.continuation import compare
from ftkit.config.recipe import Recipe
from ftkit.engine.checkpoint.loading import check_checkpoint
from ftkit.engine.checkpoint.manifest import ENGINE_FOLDER, MANIFEST, read_manifest
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoints import check_folder

RECIPE, ROWS = "recipe", "rows"
"""Keys under which a checkpoint notes what was trained on."""


def first_whole(checkpoints: Sequence[str], comm: Communicator | None, say: Callable[[str], None]) -> str | None:
    """Return the first of some checkpoints that is whole, or None if there are none at all. A collective.

    Args:
        checkpoints: folders, in the order in which they are tried; the same on all ranks.
        comm: the ranks; None: this process checks alone.
        say: shows a line to the user.

    Raises:
        UserError: if none of them is whole; says what is wrong with each.
    """
    problems: list[str] = []
    for path in checkpoints:
        own = _problem(Path(path), comm)
        told = [problem for problem in (comm.all(own) if comm else [own]) if problem is not None]
        if not told:
            for problem in problems:
                say(f"passed over: {problem}")
            return path
        problems.append(told[0])
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(
            f"--resume: of the checkpoints asked for none is whole:\n{listed}\nname another with --resume PATH, let "
            "--resume auto find the newest that is, or start anew with --overwrite, which removes them all"
        )
    return None


def noted(recipe: Recipe, digest: str) -> dict[str, Any]:
    """Return what the checkpoints of a run note of it: its recipe, and the checksum of its rows as tokens."""
    return {RECIPE: recipe.model_dump(mode="json"), ROWS: digest}


def check_noted(checkpoint: str, recipe: Recipe, digest: str) -> None:
    """Raise UserError if a checkpoint belongs to a run with another recipe, in what a step is made of, or other rows.

    It notes how many steps were done; counted on other rows, some would be skipped and others seen twice. What an earlier
    version of ftkit saved notes neither and is not compared, nor rows that one prepared.
    """
    folder = Path(checkpoint) / ENGINE_FOLDER
    told = read_manifest(folder)["extra"]
    before, rows = told.get(RECIPE), told.get(ROWS)
    if isinstance(before, dict):
        compare(recipe, before, str(folder / MANIFEST))
    if rows and digest and rows != digest:
        raise UserError(
            f"--resume: {checkpoint} was trained on other rows: the checksum of their tokens was {rows!s:.40}, now it is "
            f"{digest}. Put data, tokenizer and chat template back to continue that run, or start a new one: without "
            "--resume, with --set output.dir=PATH"
        )


def _problem(path: Path, comm: Communicator | None) -> str | None:
    """Return what is wrong with this rank's share of a checkpoint."""
    try:
        rank, world_size = (comm.rank, comm.world_size) if comm else (0, 1)
        if rank == 0:
            check_folder(path)
        check_checkpoint(path / ENGINE_FOLDER, rank, world_size)
    except UserError as error:
        return str(error)
    return None
