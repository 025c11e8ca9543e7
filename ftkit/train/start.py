"""What a run begins from: the folder it writes, made fit for it, and the checkpoints it may go on from.

The command line and the notebook come through here before any rank works.

It refuses what `RunFolder.prepare` and `check_resumed` refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ftkit.config.continuation import check_resumed
from ftkit.config.recipe import Recipe
from ftkit.errors import UserError
from ftkit.output.run_folder import RunFolder


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
        recipe: The facts.
        folder: The run's folder.
        resume: What to resume from; see `RunFolder.prepare`.
        overwrite: Whether an earlier run is removed; see `RunFolder.prepare`.
        first: Whether this process holds the folder's lock. It alone removes what lies there, and tells the user of changes.
        say: Shows a line to the user.

    Raises:
        UserError: The folder cannot be used so, or the recipe cannot continue that run.
    """
    check_not_read(recipe, folder)
    inputs = [*recipe.inputs(), *folders_written(recipe)]
    checkpoints = folder.prepare(resume, overwrite=overwrite, inputs=inputs, owner=first)
    if resume == "auto" and not checkpoints:
        say(f"no checkpoint in {folder.path}: starting from the beginning")
    if checkpoints:
        changed = check_resumed(recipe, checkpoints[0].resolve().parent / folder.recipe.name)
        if changed and first:
            say(changed)
    return checkpoints


def check_beginning(recipe: Recipe, folder: RunFolder, resume: str | None, *, overwrite: bool) -> list[Path]:
    """Refuse what `checkpoints_to_try` refuses, and change nothing.

    Args:
        recipe: See `checkpoints_to_try`.
        folder: See `checkpoints_to_try`.
        resume: See `checkpoints_to_try`.
        overwrite: See `checkpoints_to_try`.

    Returns:
        The checkpoints that a run would go on from, in the order in which it would try them.

    Raises:
        UserError: See `checkpoints_to_try`; or another run goes on in the folder.
    """
    check_not_read(recipe, folder)
    inputs = [*recipe.inputs(), *folders_written(recipe)]
    checkpoints = folder.check(resume, overwrite=overwrite, inputs=inputs)
    if checkpoints:
        check_resumed(recipe, checkpoints[0].resolve().parent / folder.recipe.name)
    return checkpoints


def folders_written(recipe: Recipe) -> list[str]:
    """Return the folders beside output.dir that a run writes, which must not lie within what it replaces there."""
    return [name for name in (recipe.data.cache_dir, recipe.memory.nvme_dir) if name is not None]


def check_not_read(recipe: Recipe, folder: RunFolder) -> None:
    """Refuse an output folder from which the run reads its rows: it would read what it writes.

    Raises:
        UserError: naming both.
    """
    for name in [source.path for source in recipe.data.all_sources] + [recipe.eval.path if recipe.eval else None]:
        if name is not None and Path(name).is_dir() and folder.path.exists() and Path(name).samefile(folder.path):
            raise UserError(
                f"output.dir: {folder.path} is the folder that rows are read from ({name}): the run's own files would be "
                "read as rows. Choose another folder with --set output.dir=PATH"
            )
