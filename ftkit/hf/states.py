"""The folder of `Accelerator.save_state`: a state is replaced as a whole, among files of others that stay.

The new state is written beside the old one under a hidden name, with the list of its files and their checksums; when all
of it is on the disk that name changes, and from then on it is the state, whatever happens: who finds it half moved into its
place, after a kill, moves the rest first. It refuses a state that is not whole or was changed, by name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ftkit.engine.durable import sync_folder, sync_tree
from ftkit.engine.manifest import MANIFEST
from ftkit.engine.seal import CONTENTS, check_contents, read_sealed, write_contents
from ftkit.errors import UserError

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
    """Let what was written be the state of the folder, durably."""
    place = folder / WRITING
    write_contents(place, apart=[path.name for path in place.iterdir() if FOLDER.fullmatch(path.name)])
    sync_tree(place)
    place.rename(folder / READY)
    sync_folder(folder)
    sync_folder(folder.parent)
    settle_state(folder)


def settle_state(folder: Path) -> None:
    """Move a whole new state into its place, or the rest of it; remove what is left of the former one."""
    ready = folder / READY
    if not (ready / CONTENTS).is_file():
        return
    listed = {Path(name).parts[0] for name in read_sealed(ready / CONTENTS)["files"]}
    for path in [path for path in ready.iterdir() if path.name != CONTENTS]:
        _remove(folder / path.name)
        path.rename(folder / path.name)
    for path in list(folder.iterdir()):
        if path.name not in listed and _is_ours(path):
            _remove(path)
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


def _is_ours(path: Path) -> bool:
    """Return whether `save_state` wrote this; files of others stay, whatever their names resemble."""
    if FOLDER.fullmatch(path.name):
        return (path / MANIFEST).is_file()
    return FILE.fullmatch(path.name) is not None and path.is_file()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
