"""A folder that many processes want and one of them makes.

`build_once` gives the folder if it is there. Otherwise one process builds it under a file lock, beside its place, and
renames it; the others wait on the lock and find it. A process that dies lets go of its lock, and the next one starts
over. The wait is on the lock alone, never in a collective, so no time-out of NCCL or gloo runs meanwhile. A refusal
that follows from the inputs (`RefusedError`) is written down too: eight ranks need not each find the same bad row.

Refused: file systems without locks that processes of several machines share; give each machine its own folder then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock

from ftkit.errors import UserError

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5


class RefusedError(UserError):
    """A refusal that the same inputs always meet, so that it may be remembered."""


def build_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Make a folder unless it is there; safe when many processes ask at once.

    Args:
        folder: where it is to be; its name must say everything that its content depends on
        build: fills the empty folder that it is given

    Returns:
        Whether the folder was there already (or was made by another process meanwhile).

    Raises:
        RefusedError: `build` refused, now or when another process asked
        UserError: the folder cannot be written
    """
    refusal = folder.with_name(f"{folder.name}.refused")
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            return True
        with patient_lock(folder.with_name(f"{folder.name}.lock")):
            if folder.is_dir():
                return True
            if refusal.exists():
                raise RefusedError(refusal.read_text(encoding="utf-8"))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                os.replace(partial, folder)
            except RefusedError as error:
                written = refusal.with_name(f"{refusal.name}.partial")
                written.write_text(str(error), encoding="utf-8", errors="backslashreplace")
                os.replace(written, refusal)
                raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder.parent}: prepared data cannot be written: {error}. Free some space or set data.cache_dir."
        ) from error
    return False


def patient_lock(path: Path) -> contextlib.AbstractContextManager:
    """Return an acquired lock, having said so if the wait is long; leaving its `with` block releases it."""
    lock = filelock.FileLock(path)
    try:
        return lock.acquire(timeout=PATIENCE_SECONDS)
    except filelock.Timeout:
        logger.warning("waiting while another process prepares the data (%s)", path)
        return lock.acquire(timeout=-1)
