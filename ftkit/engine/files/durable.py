"""Folders that outlive a power failure, and what rank 0 alone does for all.

A rename is as durable as the folder that holds the name: whoever renames syncs the files first, then the folder.
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
    """Run the body with True on rank 0 only; then let all ranks go on together, or fail together with its error."""
    problem: Exception | None = None
    try:
        yield comm.rank == 0
    except Exception as error:
        problem = error
    told = comm.same(None if problem is None else f"{type(problem).__name__}: {problem}")
    if isinstance(problem, OSError):
        raise UserError(str(problem)) from problem
    if problem is not None:
        raise problem
    if told is not None:
        raise UserError(told)


@contextmanager
def all_ranks(comm: Communicator, kind: type[UserError] = UserError) -> Iterator[None]:
    """Run the body, which has no collectives, on every rank; then let all go on together, or fail together.

    The first rank that failed raises its error (an OSError as a UserError), all others say it after it: as a `kind` if it is
    one, else as a UserError. So nobody waits for a rank that will not come, and all may be caught alike.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    known = isinstance(problem, (OSError, UserError))
    text = str(problem) if known else f"{type(problem).__name__}: {problem}"
    told = comm.all(None if problem is None else (isinstance(problem, kind), text))
    failed = [(rank, *each) for rank, each in enumerate(told) if each is not None]
    if not failed:
        return
    rank, is_kind, text = failed[0]
    if rank != comm.rank:
        raise (kind if is_kind else UserError)(f"rank {rank}: {text}") from problem
    if isinstance(problem, OSError):
        raise UserError(text) from problem
    assert problem is not None
    raise problem


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, their names durable; it must not be there."""
    missing = [path for path in folder.parents if not path.exists()]
    folder.mkdir(parents=True)
    for path in (folder, *missing):
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file in `folder`, at any depth, and its name durable; links and pipes have their name alone."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink() and (path.is_dir() or path.is_file()):
            sync_folder(path)  # files are synced by the same call
