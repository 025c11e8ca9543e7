"""The folder of `Accelerator.save_state`: a state is replaced as a whole, among files of others that stay.

The new state is written beside the old one under a hidden name, with the list of its files and their checksums; when all
of it is on the disk that name changes, and from then on it is the state, whatever happens: who finds it half moved into its
place, after a kill, moves the rest first.

Ours is what the list of the former state names (or, where that is damaged, what has a name that states have). It refuses to
take the place of anything else, by name, before it changes anything; and a state that is not whole or was changed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ftkit.engine.checkpoint.durable import sync_folder, sync_tree
from ftkit.engine.checkpoint.manifest import MANIFEST
from ftkit.engine.checkpoint.sealed import CONTENTS, check_contents, read_sealed, write_contents
from ftkit.errors import UserError
from ftkit.output.ownership import files_listed, is_list, strangers_in_engine_folder
from ftkit.output.replacing import keep

WRITING, READY = ".state.writing", ".state.ready"
FILE = re.compile(r"accelerator\.pt|(scheduler|custom|random)_\d+\.pt")
FOLDER = re.compile(r"model_\d+")


def begin_state(folder: Path) -> Path:
    """Return the place where a new state is written; what an earlier one left there is gone."""
    settle_state(folder)
    place = folder / WRITING
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def publish_state(folder: Path) -> None:
    """Let what was written be the state of the folder, durably.

    Raises:
        UserError: naming what has a name that the state needs, and is not ours; the folder stays as it was.
    """
    place = folder / WRITING
    try:
        _refuse_foreign(folder, {CONTENTS, *(path.name for path in place.iterdir())})
    except UserError:
        shutil.rmtree(place, ignore_errors=True)
        raise
    write_contents(place, apart=[path.name for path in place.iterdir() if FOLDER.fullmatch(path.name)])
    sync_tree(place)
    place.rename(folder / READY)
    sync_folder(folder)
    sync_folder(folder.parent)
    settle_state(folder)


def settle_state(folder: Path) -> None:
    """Move a whole new state into its place, or the rest of it; remove what is left of the former one.

    Raises:
        UserError: as `publish_state`, where a file came into the folder meanwhile.
    """
    ready = folder / READY
    if not (ready / CONTENTS).is_file():
        return
    listed = {Path(name).parts[0] for name in read_sealed(ready / CONTENTS)["files"]}
    waiting = [path for path in ready.iterdir() if path.name != CONTENTS]
    _refuse_foreign(folder, {CONTENTS, *(path.name for path in waiting)})
    left = _ours(folder) - listed
    for path in waiting:
        target = folder / path.name
        if target.is_dir():
            keep(strangers_in_engine_folder(target), target, path)
        _remove(target)
        path.rename(target)
    for name in left:
        _remove_ours(folder / name)
    (ready / CONTENTS).replace(folder / CONTENTS)  # last: while it is in the other folder, this is not over
    ready.rmdir()
    sync_folder(folder)


def is_whole(folder: Path) -> bool:
    """Return whether there is a state in a folder."""
    return (folder / CONTENTS).is_file() or (folder / READY / CONTENTS).is_file()


def check_state_folder(folder: Path) -> None:
    """Compare the files of a state with their checksums, the engine's apart, which are compared as they are read.

    Raises:
        UserError: naming the file.
    """
    if not is_whole(folder):
        raise UserError(f"{folder}: {CONTENTS} is missing; the state is not whole")
    check_contents(folder)


def _refuse_foreign(folder: Path, names: set[str]) -> None:
    """Raise UserError for the first of the names of a new state under which something of a user's is."""
    ours = _ours(folder)
    if is_list(folder / CONTENTS):
        ours.add(CONTENTS)
    for name in sorted(names - ours):
        if not _is_nothing(path := folder / name):
            raise UserError(f"{path} is there and no save_state wrote it: move it, or save the state in another folder")


def _ours(folder: Path) -> set[str]:
    """Return the names in a folder of the files and folders of its state, but for the list."""
    listed = files_listed(folder / CONTENTS)
    if listed is not None:
        names = {name.partition("/")[0] for name in listed}
        return {name for name in names if FILE.fullmatch(name) or FOLDER.fullmatch(name)}
    if not is_list(folder / CONTENTS):
        return set()
    files = {path.name for path in folder.iterdir() if FILE.fullmatch(path.name) and path.is_file()}
    return files | {path.name for path in folder.iterdir() if FOLDER.fullmatch(path.name) and is_list(path / MANIFEST)}


def _is_nothing(path: Path) -> bool:
    """Return whether nothing is there, or what is nobody's loss: an empty file, a folder without files."""
    if path.is_symlink() or not path.exists():
        return not path.is_symlink()
    if not path.is_dir():
        return not path.stat().st_size
    return all(each.is_dir() and not each.is_symlink() for each in path.rglob("*"))


def _remove_ours(path: Path) -> None:
    """Remove a file, or the engine's files in a folder; the folder stays where others are in it."""
    if path.is_symlink() or not path.is_dir() or not (others := strangers_in_engine_folder(path)):
        _remove(path)
        return
    for each in path.iterdir():
        if each not in others and not each.is_dir():
            each.unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
