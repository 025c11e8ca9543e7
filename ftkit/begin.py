"""What a run begins from: the folder it writes, made fit for it, and the checkpoints it may go on from.

The command line and the notebook come through here before any rank works.

It refuses what `RunFolder.prepare` and `check_resumed` refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ftkit.recipe import Recipe
from ftkit.resumed import check_resumed
from ftkit.run_folder import RunFolder


def checkpoints_to_try(
    recipe: Recipe,
    folder: RunFolder,
    resume: str | None,
    *,
    overwrite: bool,
    first: bool,
    say: Callable[[str], None],
) -> list[Path]:
    """Make the folder of a run, or refuse it, and return the checkpoints to go on from, in the order to try them.

    Args:
        recipe: The facts. folder: Of the run. resume, overwrite: See `RunFolder.prepare`.
        first: Whether this process holds the folder's lock: it alone may remove what lies there, and speaks of changes.
        say: Shows a line to the user.

    Raises:
        UserError: The folder cannot be used so, or the recipe cannot continue that run.
    """
    checkpoints = folder.prepare(resume, overwrite=overwrite, inputs=recipe.inputs(), owner=first)
    if resume == "auto" and not checkpoints:
        say(f"no checkpoint in {folder.path}: starting from the beginning")
    if checkpoints:
        changed = check_resumed(recipe, checkpoints[0].resolve().parent / folder.recipe.name)
        if changed and first:
            say(changed)
    return checkpoints
