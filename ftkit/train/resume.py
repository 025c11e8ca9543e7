"""Where a run begins: the checkpoint to resume from, and a comparison with the run that saved it.

A checkpoint notes the recipe, the checksum of the rows and the day that they belong to (chat templates may write the
date). It counts steps: with other rows, a resumed run would skip some and repeat others.

Cost: one read of each checkpoint that is tried. The ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ftkit.config.optimizer import FOLLOWING
from ftkit.config.recipe import Recipe
from ftkit.engine.checkpoint.loading import check_checkpoint
from ftkit.engine.checkpoint.manifest import ENGINE_FOLDER, read_manifest
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError
from ftkit.hf.trainer.checkpoints import check_folder

FIXED = ("task", "model", "data", "adapter", "train.seed", "train.batch_tokens", "optimizer.name", "optimizer.groups")
"""Keys that decide which tensors are trained, how, and on which samples. The checksum of the rows covers `eval.share`."""
FREE = ("data.cache_dir", "data.workers", "model.trust_remote_code")
COMPARED = ("task", "model", "data", "adapter", "train", "optimizer")
"""Sections whose changes are refused or shown, except the keys of `FREE`."""
FROM_CHECKPOINT = ("optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.args", "optimizer.weight_decay")
STATE_OF_FOLLOWING = ("optimizer.schedule", "optimizer.schedule_args", "optimizer.min_lr")
"""Keys that the state of a schedule contains if it follows the held-out loss."""


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Args:
        day: Day that the rows belong to, as YYYY-MM-DD.
        checkpoint: Checkpoint to resume from. None begins at the first step.
        rows: Checksum of the rows that the checkpoint was trained on. None if it notes none.
    """

    day: str
    checkpoint: str | None = None
    rows: str | None = None

    def check_rows(self, digest: str) -> None:
        """Raise UserError if the rows of this run are not those of the checkpoint."""
        if self.rows is not None and self.rows != digest:
            raise UserError(
                f"--resume: {self.checkpoint} was trained on other rows: the checksum of their tokens was {self.rows:.40}, "
                f"now it is {digest}. Put data, tokenizer and chat template back, or start a new run in another output.dir"
            )


def choose(checkpoints: Sequence[str], recipe: Recipe, comm: Communicator | None, say: Callable[[str], None]) -> Start:
    """Return where a run begins, the same on all ranks. A collective. Arguments and errors: `first_whole` and `compare`."""
    today = date.today().isoformat()
    if comm is not None:
        checkpoints, today = comm.same((list(checkpoints), today))
    path = first_whole(checkpoints, comm, say)
    if path is None:
        return Start(today)
    found = read_manifest(Path(path) / ENGINE_FOLDER)["extra"]
    if changed := compare(recipe, found.get("recipe") or {}, path):
        say(changed)
    return Start(found.get("day") or today, path, found.get("rows"))


def noted(recipe: Recipe, digest: str, day: str | None) -> dict[str, Any]:
    """Return the notes of a run's checkpoints: its recipe, and checksum and day of its rows."""
    return {"recipe": recipe.model_dump(mode="json"), "rows": digest, "day": day}


def first_whole(checkpoints: Sequence[str], comm: Communicator | None, say: Callable[[str], None]) -> str | None:
    """Return the first checkpoint that is whole, or None if the list is empty. A collective.

    Args:
        checkpoints: Folders, in the order in which they are tried. The same on all ranks.
        comm: The ranks. None checks in this process alone.
        say: Shows a line to the user.

    Raises:
        UserError: No checkpoint is whole. The text has the reason for each.
    """
    problems: list[str] = []
    for path in checkpoints:
        problem = _problem(Path(path), comm)
        if problem is None:
            for each in problems:
                say(f"passed over: {each}")
            return path
        problems.append(problem)
    if not problems:
        return None
    listed = "\n  ".join(problems)
    raise UserError(
        f"--resume: of the checkpoints asked for none is whole:\n  {listed}\nname another with --resume PATH, or start "
        "anew with --overwrite, which removes them all"
    )


def _problem(path: Path, comm: Communicator | None) -> str | None:
    """Return the first fault that a rank finds in its share of a checkpoint, or None. A collective."""
    rank, world_size = (comm.rank, comm.world_size) if comm else (0, 1)
    own = None
    try:
        if rank == 0:
            check_folder(path)
        check_checkpoint(path / ENGINE_FOLDER, rank, world_size)
    except UserError as error:
        own = str(error)
    return next((each for each in (comm.all(own) if comm else [own]) if each is not None), None)


def compare(recipe: Recipe, before: dict[str, Any], where: str) -> str:
    """Compare a recipe with the one that a checkpoint notes, and return one sentence with the keys that changed, or "".

    Args:
        recipe: The recipe.
        before: The noted recipe. Keys that an earlier version of ftkit did not know are not compared.
        where: The checkpoint.

    Raises:
        UserError: A key of `FIXED` changed, or a schedule that follows the held-out loss.
    """
    changes = list(_changes(before, recipe.model_dump(mode="json")))
    schedules = {before.get("optimizer", {}).get("schedule"), recipe.optimizer.schedule}
    keys: tuple[str, ...] = (*FIXED, *STATE_OF_FOLLOWING) if schedules & set(FOLLOWING) else FIXED
    names = {name.removesuffix("_8bit") for name in (before.get("optimizer", {}).get("name", ""), recipe.optimizer.name)}
    if recipe.optimizer.convert_state and len(names) == 1:  # fp32 moments to 8 bits, or back
        keys = tuple(key for key in keys if key != "optimizer.name")
    if fixed := [f"  {key}: {old} in {where}, now {new}" for key, old, new in changes if key.startswith(keys)]:
        listed = "\n".join(fixed)
        raise UserError(
            f"--resume: the recipe has changed in keys that define a step:\n{listed}\n"
            "set it back, or start a new run in another output.dir"
        )
    ignored = " (ignored: it comes from the checkpoint)"
    listed = ", ".join(f"{key} {old} -> {new}{ignored * (key in FROM_CHECKPOINT)}" for key, old, new in changes)
    return f"changed since the checkpoint was saved: {listed}" if listed else ""


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value for each key of both recipes that is compared and changed."""
    for section in [each for each in COMPARED if each in before]:
        old, new = before[section], now[section]
        pairs = [(section, old, new)]
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(f"{section}.{key}", old[key], new[key]) for key in new if key in old]
        yield from (each for each in pairs if each[1] != each[2] and each[0] not in FREE)
