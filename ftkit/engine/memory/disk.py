"""The NVMe tier of one rank: a locked folder of flat files.

The files are scratch of this run. Their folder has a lock file that the kernel releases when its owner ends, so the next
run under the same `memory.nvme_dir` removes the folders of crashed runs and reports them. The folder must be on a drive
of this node, because other nodes may not see a lock on a network file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from ftkit.engine.memory.flat_file import DiskThreads, FlatFile, explained, open_direct

PREFIX = "ftkit-"
"""First part of the name of every rank's folder."""

LOCK = "ftkit.lock"

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are host memory."""


class Disk:
    """One rank's folder on the NVMe drive, and the threads that serve its files.

    Args:
        folder: Existing folder on a drive of this node.
        name: Name of the rank's own folder in it, unique to run and rank.

    Attributes:
        path: The rank's own folder.
        removed: Bytes of each folder of a crashed run that was removed.
        filesystem: Type of the file system, or "unknown".
        direct: Whether the file system supports O_DIRECT.

    Raises:
        DiskError: The folder is missing or cannot be written, or a live run uses the name.

    Cost: one open file per shard.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder = Path(folder).absolute()
        self.path = folder / f"{PREFIX}{name}"
        with explained("make", self.path):
            self.removed = _remove_leftovers(folder)
            self.path.mkdir(mode=0o700)
            lock = _new_lock(self.path)
            self.filesystem = _filesystem(self.path)
            handle, self.direct = open_direct(self.path / LOCK, os.O_RDONLY)
            os.close(handle)
        self.threads = DiskThreads()
        self._handles: list[int] = []
        self._end = weakref.finalize(self, _close, self.path, lock, self.threads, self._handles, os.getpid())

    def file(self, name: str, numel: int, dtype: torch.dtype) -> FlatFile:
        """Make the file of one shard, filled with zeros, with its space reserved on the drive.

        Args:
            name: File name. A file of that name is replaced.
            numel: Elements, a multiple of 4096.
            dtype: Dtype of the elements.

        Raises:
            DiskError: The drive has less free space.
        """
        path = self.path / name
        size = numel * dtype.itemsize
        path.unlink(missing_ok=True)  # of state that is made anew after a failed load
        with explained(f"reserve {size} bytes for", path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.direct else 0), 0o600)
            self._handles.append(handle)
            _reserve(handle, size)
        return FlatFile(path, numel, dtype, handle, self.threads)

    def remove(self, file: FlatFile) -> None:
        """Remove a file that no request uses."""
        self._handles.remove(file.handle)
        os.close(file.handle)
        file.path.unlink()

    def close(self) -> None:
        """Finish queued transfers, end the threads, and remove the folder."""
        self._end()


def _close(path: Path, lock: int, threads: DiskThreads, handles: list[int], owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not remove its parent's files
        return
    threads.shutdown()
    for handle in handles:
        os.close(handle)
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _reserve(handle: int, size_bytes: int) -> None:
    """Reserve space, so that a full drive fails here and not in the middle of a run."""
    os.ftruncate(handle, size_bytes)
    try:
        os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # some file systems cannot reserve, and need not
            raise


def _filesystem(folder: Path) -> str:
    """Return the type of the file system of `folder`, or "unknown"."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return next((fields[fields.index("-") + 1] for fields in mounts if fields[2] == number), "unknown")


def _new_lock(folder: Path) -> int:
    """Make the lock file of a folder, lock it, and return its handle."""
    # Locked before it gets its name: no other run can find it free.
    handle = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / f"{LOCK}.new", folder / LOCK)
    return handle


def _remove_leftovers(folder: Path) -> dict[str, int]:
    """Remove the folders of ranks that have ended, and return their names and bytes."""
    removed = {}
    for lock in folder.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(lock, "rb") as handle:  # its owner lives, or another rank is faster
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = sum(file.stat().st_blocks * 512 for file in lock.parent.iterdir())
            shutil.rmtree(lock.parent)
            removed[lock.parent.name] = size
    return removed
