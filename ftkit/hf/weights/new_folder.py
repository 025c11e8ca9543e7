"""A folder that an export fills: its files appear together when all are whole, and after an error nothing is left.

Everything is written into a hidden subfolder and moved out of it at the end, which costs a rename a file. It refuses to
replace a file that is there, before anything is written where the names are known by then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ftkit.errors import UserError


@contextmanager
def new_folder(out: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """Yield the folder to write into; at the end its files lie in `out`.

    Args:
        out: folder to make, parents included; after an error what was made is removed again.
        names: names of the files that will be written.

    Raises:
        UserError: `out` cannot be written, or holds a file of one of the names.
    """
    if "\0" in str(out):
        raise UserError(f"{str(out)!r}: no folder can have this name; name another")
    _refuse_there(out, names)
    made = [path for path in (out, *out.absolute().parents) if not os.path.lexists(path)]
    partial = out / f".writing-{os.getpid()}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        _refuse_there(out, [path.name for path in partial.iterdir()])
        for path in partial.iterdir():
            path.rename(out / path.name)
        partial.rmdir()
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{out}: cannot be written: {error.strerror or error}; name another folder") from error
        raise


def _refuse_there(out: Path, names: Iterable[str]) -> None:
    there = [name for name in sorted(names) if os.path.lexists(out / name)]
    if there:
        raise UserError(f"{out}: holds {there[0]} already; name another folder")
