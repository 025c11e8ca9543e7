"""A checkpoint takes the place of another of its name, or of a folder that a user made: the user's files go over to it.

They are linked into the new folder before it has its name, and the former one is put aside only then, so that they are there
under one name or the other whatever happens: a full disk, a kill. A checkpoint that was put aside when a run was killed, and
whose place nobody took, gets its name back.

It refuses, by name, a file of a user's whose name the new checkpoint needs, and what is not a folder. What it costs: a link
a file; where the file system has no links, a copy, which is then compared.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ftkit.errors import UserError
from ftkit.output.ownership import strangers_in_checkpoint

UNFINISHED = ".writing"
"""How the name of a checkpoint ends that is being written; it begins with a point."""
OLD, FORMER = "-old", "-former"
"""Before it, for one that is to be removed, and for one whose place another is taking."""
HIDDEN = re.compile(rf"\.(checkpoint-\d+)({OLD}|{FORMER})?{re.escape(UNFINISHED)}")


def replace(temporary: Path, final: Path) -> None:
    """Give a checkpoint that is on the disk its name, in place of what has it.

    Raises:
        UserError: naming what is in the way. OSError: of the disk. Either leaves the former folder as it was.
    """
    if os.path.lexists(final):  # the same step again, after a resume from before it; or a callback made it
        if not final.is_dir():
            raise UserError(f"{final} is there and is not a folder: move it; the save needs that name")
        keep_files_of_others(final, temporary)
        final.rename(_hidden(final, FORMER))
    temporary.rename(final)


def keep_files_of_others(former: Path, folder: Path) -> None:
    """Give the user's files in a former checkpoint the same names in the one that takes its name; they stay where they are.

    What the user's own code has written into the new one, too, is that.

    Raises:
        UserError: naming the file whose name the new one needs. OSError: of the disk.
    """
    if not former.is_symlink():  # what a link leads to stays where it is
        again = {path.relative_to(folder) for path in strangers_in_checkpoint(folder)}
        keep([path for path in strangers_in_checkpoint(former) if path.relative_to(former) not in again], former, folder)


def keep(files: Iterable[Path], former: Path, folder: Path) -> None:
    """Give files of a former folder the same names in another; they stay where they are.

    Raises:
        UserError: naming the file whose name is taken. OSError: of the disk.
    """
    for path in files:
        target = folder / path.relative_to(former)
        if not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
            for above in target.relative_to(folder).parents:
                _sync(folder / above)
        elif path.lstat().st_size and not _same(path, target):
            raise UserError(f"{path} is there and ftkit did not write it: move it; the save needs that name")


def set_aside(checkpoint: Path) -> None:
    """Take a checkpoint its name; what is left is removed as an unfinished one is."""
    checkpoint.rename(_hidden(checkpoint, OLD))


def put_back(run_folder: Path) -> None:
    """Give checkpoints their names back that were put aside for another which did not come."""
    for path, name, kind in _leftovers(run_folder):
        if kind == FORMER and not os.path.lexists(run_folder / name):
            with suppress(OSError):
                path.rename(run_folder / name)


def remove_unfinished(run_folder: Path) -> None:
    """Remove what bears no final name: checkpoints that were not finished, or that were set aside.

    A former one with a file of the user's that its successor cannot have stays, and so does a folder of the user's.
    """
    put_back(run_folder)
    for path, name, kind in _leftovers(run_folder):
        if path.is_symlink():
            path.unlink(missing_ok=True)
            continue
        if kind == FORMER and not os.path.lexists(run_folder / name):  # it could not be put back
            continue
        if kind is None and any(each.relative_to(path).parts[0] != name for each in strangers_in_checkpoint(path)):
            continue
        try:
            if kind == FORMER:  # what came into it while the other took its place
                keep_files_of_others(path, run_folder / name)
        except (OSError, UserError):
            continue
        shutil.rmtree(path, ignore_errors=True)


def _hidden(checkpoint: Path, kind: str) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}{kind}{UNFINISHED}")


def _leftovers(run_folder: Path) -> Iterator[tuple[Path, str, str | None]]:
    """Yield (path, name of its checkpoint, kind) of each hidden folder of ours."""
    for path in sorted(run_folder.glob(f".checkpoint-*{UNFINISHED}")):
        if (found := HIDDEN.fullmatch(path.name)) and path.is_dir():
            yield path, found[1], found[2]


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:  # a file system without links
        if not path.is_symlink() and not path.is_file():
            raise
        shutil.copy2(path, target, follow_symlinks=False)
        if not path.is_symlink():
            _sync(target)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _same(one: Path, other: Path) -> bool:
    """Return whether two names are of one file, or of a file and its copy."""
    if os.path.samestat(one.lstat(), other.lstat()):
        return True
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and os.readlink(one) == os.readlink(other)
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
