"""Steps that all ranks pass or fail together, and names that survive a power failure.

A rename is durable once the folder that holds the name is synced. Sync the files first, then rename, then sync the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError


@contextmanager
def rank_zero(comm: Communicator) -> Iterator[bool]:
    """Run the body with True on rank 0 only. Then all ranks go on, or all fail with rank 0's error. A collective."""
    with all_ranks(comm):
        yield comm.rank == 0


@contextmanager
def all_ranks(comm: Communicator, kind: type[UserError] = UserError) -> Iterator[None]:
    """Run the body, which has no collectives, on every rank. Then all ranks go on, or all fail. A collective.

    The first rank that failed raises its error, an OSError as a UserError. The others raise its text: as `kind` if the error
    is of that class, else as a UserError.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    found = comm.all(None if problem is None else (isinstance(problem, kind), text_of(problem)))
    failed = [(rank, *each) for rank, each in enumerate(found) if each is not None]
    if not failed:
        return
    rank, is_kind, text = failed[0]
    if rank != comm.rank:
        raise (kind if is_kind else UserError)(f"rank {rank}: {text}") from problem
    if isinstance(problem, OSError):
        raise UserError(text) from problem
    assert problem is not None
    raise problem


def text_of(error: BaseException) -> str:
    """Return the text of an error, which begins with its class if ftkit does not expect it."""
    return str(error) if isinstance(error, (OSError, UserError)) else f"{type(error).__name__}: {error}"


def make_folder(folder: Path) -> None:
    """Make a folder, which must not exist, and missing folders above it. Their names are durable."""
    missing = [path for path in folder.parents if not path.exists()]
    folder.mkdir(parents=True)
    for path in (folder, *missing):
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder, or the bytes of a file, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file in `folder`, at any depth, and its name durable."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink() and (path.is_dir() or path.is_file()):
            sync_folder(path)  # files are synced by the same call
