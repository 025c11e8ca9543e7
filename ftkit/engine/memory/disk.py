"""The NVMe tier of one rank: a folder of flat files, locked, measured, and cleaned of what crashed runs left.

The files (`flat_file.py`) are this run's alone: scratch that a crash may lose, checkpoints being elsewhere. They lie in a
folder with a lock that the kernel drops when its owner dies, however it dies; the next run in the same place removes what
it finds unlocked, and says so. The place should be a drive of this node: a lock on a network file system may not be seen by
other nodes. The files are never synced: what is read again in the same run need not survive a power failure.

It refuses a folder that is missing, read-only, full, or taken. What it costs: `measure`, two seconds and 256 MiB of the
drive, where nobody said block size and depth.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
import stat
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ftkit.engine.arena import PAGE_BYTES, Arena
from ftkit.engine.files.flat_file import ADVICE, ELEMENTS, PIECE_NUMEL, DiskError, FlatFile, Lanes, Request, explained
from ftkit.engine.files.storage import DATA_START, create_file

NUMEL_MULTIPLE = 4096
"""A file's elements are a multiple of this, as shards are: so its length suits O_DIRECT in every dtype."""

BLOCK_BYTES = (16 << 20, 4 << 20, 1 << 20)
"""Bytes of one system call: what `measure` chooses from, the likeliest first."""

DEPTHS = (2, 4, 1)
"""Threads, each with one system call on its way: what `measure` chooses from, the likeliest first."""

NEARLY = 0.95
"""`measure` takes the first candidate for whose time this share is not more than what the fastest takes."""

WINDOWS = 4
"""Requests on their way while `measure` measures, of the largest block each."""

PREFIX = "ftkit-"
LOCK = "ftkit.lock"
MAGIC = b"ftkit: this folder is removed once the process that locks this file has ended\n"

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are memory. Newer kernels accept O_DIRECT on them, which means nothing there."""

@dataclass(frozen=True)
class Rates:
    """What a folder's drive gives to this rank, checksums included, with the block size and depth that give it."""

    block_bytes: int
    depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float


class Disk:
    """One rank's folder on the NVMe drive, and the threads that serve it.

    Args:
        folder: an existing folder on a drive of this node; the rank's own is made in it.
        name: unique to run and rank; one part of a file name.
        depth: number of threads that move blocks; None lets `measure` choose it.
        block_bytes: bytes that each thread moves at a time; None lets `measure` choose it.

    Attributes:
        path: the rank's own folder.
        direct: whether O_DIRECT is used.
        filesystem: kind of the file system, 'unknown' where the operating system does not say.
        removed: leftovers of crashed runs that were removed, name to bytes.
        rates: what was measured at the start, None if nothing was to be chosen.

    Raises:
        DiskError: if the folder is missing, read-only or full, or its own place in it is taken.

    Cost: one open file a tensor; about 2 s and 256 MiB on the drive when it measures.
    """

    def __init__(self, folder: Path, name: str, *, depth: int | None = None, block_bytes: int | None = None) -> None:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{name!r} cannot be part of a file name: letters, digits, '_', '-' and '.' can")
        folder = Path(folder).absolute()
        self.path = folder / f"{PREFIX}{name}"
        with explained("use", folder):
            self.removed = _remove_leftovers(folder)
        with explained("make", self.path):
            self._home = Home(self.path)
        self._end = weakref.finalize(self, self._home.close)
        self.rates: Rates | None = None
        try:
            with explained("use", self.path):
                self.filesystem = _filesystem(self.path)
                self.direct = self.filesystem not in IN_MEMORY and _takes_direct(self.path)
            depths = DEPTHS if depth is None else (depth,)
            blocks = BLOCK_BYTES if block_bytes is None else (block_bytes,)
            self._home.lanes = Lanes(depths[0], blocks[0])
            if depth is None or block_bytes is None:
                self.rates = self._choose(blocks, depths, 256 << 20, 2.0)
                self._home.lanes.close()
                self._home.lanes = Lanes(self.rates.depth, self.rates.block_bytes)
        except BaseException:
            self._end()
            raise

    @property
    def depth(self) -> int:
        """Threads, each with one system call on its way."""
        return self.lanes.depth

    @property
    def block_bytes(self) -> int:
        """Bytes of one system call."""
        return self.lanes.block_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes read so far; what `measure` moves is not counted."""
        return self.lanes.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written so far; what `measure` moves is not counted."""
        return self.lanes.bytes_written

    @property
    def lanes(self) -> Lanes:
        """The threads that serve the files."""
        assert self._home.lanes is not None
        return self._home.lanes

    def reserve(self, size_bytes: int) -> None:
        """Check that files of `size_bytes` together still find room.

        Raises:
            DiskError: if less is free. Other ranks and programs may take it afterwards: `file` is what holds it.
        """
        with explained("use", self.path):
            found = os.statvfs(self.path)
        free = found.f_bavail * found.f_frsize
        if size_bytes > free:
            raise DiskError(
                f"NVMe tier: {self.path.parent}: {size_bytes} bytes needed ({size_bytes / 2**30:.1f} GiB), {free} free "
                f"({free / 2**30:.1f} GiB). {ADVICE[errno.ENOSPC]}"
            )

    def file(self, name: str, numel: int, dtype: torch.dtype) -> FlatFile:
        """Make the file of one shard, `<name>.safetensors`: zeros, its room reserved where the file system can.

        Args:
            name: one part of a file name, new in this folder.
            numel: elements, a multiple of 4096.
            dtype: dtype of the elements.

        Raises:
            DiskError: if there is no room for it, or the folder is gone.
        """
        if numel % NUMEL_MULTIPLE:
            raise ValueError(f"{name}: {numel} elements are not a multiple of {NUMEL_MULTIPLE}")
        path = self.path / f"{name}.safetensors"
        if path.parent != self.path:
            raise ValueError(f"{name!r} is not one part of a file name")
        size = DATA_START + numel * dtype.itemsize
        with explained(f"reserve {size} bytes for", path):
            create_file(path, [(ELEMENTS, (numel,), dtype)])
            try:
                handle = _open_reserved(path, size, direct=self.direct)
            except BaseException:
                path.unlink()  # what was reserved before the drive was full is free again
                raise
        self._home.handles.add(handle)
        return FlatFile(path, numel, dtype, lanes=self.lanes, handle=handle, direct=self.direct, owner=self)

    def measure(self, size_bytes: int = 256 << 20, seconds: float = 2.0) -> Rates:
        """Return the best block size and depth for this folder's drive, and what they give; nothing is changed by it.

        Ranks that do this together measure what each gets while all of them are at it, which is what a run will see. A
        request is never joined with another: large blocks need requests as large.

        Args:
            size_bytes: size of the scratch file, which is removed afterwards.
            seconds: time after which no other candidate is begun; a slow drive leaves time for the likeliest only.

        Cost: 64 MiB of host memory.
        """
        return self._choose(BLOCK_BYTES, DEPTHS, size_bytes, seconds)

    def close(self) -> None:
        """Finish what was asked for, end the threads, remove the folder.

        Raises:
            DiskError: of a request that failed while nobody waited for it.
        """
        with explained("remove", self.path):
            self._end()

    def _choose(self, blocks: Sequence[int], depths: Sequence[int], size_bytes: int, seconds: float) -> Rates:
        """Measure candidates in turns, the likeliest first, while there is time; return the best.

        Of several turns the best rate counts: what else the machine does can only slow one down.
        """
        end = time.perf_counter() + seconds
        self.reserve(size_bytes)
        numel = _whole_pieces(size_bytes // 4)
        window_numel = min(numel, _whole_pieces(max(blocks) // 4))
        arena = Arena(WINDOWS * 4 * window_numel, torch.device("cpu"))
        windows = [arena.take(window_numel, torch.float32) for _ in range(WINDOWS)]
        for window in windows:
            window.view(torch.int64).random_()  # drives that compress, or find zeros, are not to shine
        found: dict[Lanes, Rates] = {}
        with ExitStack() as stack:
            file = self.file("measure", numel, torch.float32)
            stack.callback(self._drop, file)
            candidates = [Lanes(depth, block) for block in blocks for depth in depths]
            for lanes in candidates:
                stack.callback(lanes.close)
            # Blocks that are written for the first time are slower, and what was never written is read too fast.
            file.lanes = candidates[0]
            numel = _stream(file.write, windows, numel, seconds / 4)[0]
            share = seconds / (4 * len(candidates))
            for lanes in itertools.cycle(candidates):
                if found and time.perf_counter() > end:
                    break
                file.lanes = lanes
                read, write = (_stream(move, windows, numel, share)[1] for move in (file.read, file.write))
                before = found.get(lanes, Rates(0, 0, 0.0, 0.0))
                best = max(read, before.read_bytes_per_s), max(write, before.write_bytes_per_s)
                found[lanes] = Rates(lanes.block_bytes, lanes.depth, *best)
        return _best(list(found.values()))

    def _drop(self, file: FlatFile) -> None:
        """Remove a file that nothing is on its way from or to."""
        self._home.handles.discard(file.handle)
        os.close(file.handle)
        with suppress(FileNotFoundError):
            file.path.unlink()


class Home:
    """A rank's own folder: locked while this process lives, removed with what is in it at the end.

    Attributes:
        lanes: the threads that serve the files of this folder.
        handles: handles of the files that are open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lanes: Lanes | None = None
        self.handles: set[int] = set()
        self._owner = os.getpid()
        path.mkdir(mode=0o700)
        try:
            self._lock = _new_lock(path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        alive = weakref.ref(self)

        def in_child() -> None:
            home = alive()
            if home is not None:
                home._disown()

        os.register_at_fork(after_in_child=in_child)

    def close(self) -> None:
        """End the threads, close the files, remove the folder.

        Raises:
            DiskError: of a request that failed while nobody waited for it.
        """
        if os.getpid() != self._owner:  # a forked child, at its end
            return
        self._owner = -1
        if self.lanes is not None:
            self.lanes.close()
        try:
            self._close_files()
            with suppress(FileNotFoundError):
                _remove(self.path)
        finally:
            os.close(self._lock)
        if self.lanes is not None:
            self.lanes.tell()

    def _disown(self) -> None:
        """Let go of lock and files in a forked child: they must not outlive their owner in it."""
        if self._owner != -1:
            self._owner = -1
            self._close_files()
            os.close(self._lock)

    def _close_files(self) -> None:
        while self.handles:
            os.close(self.handles.pop())


def _whole_pieces(numel: int) -> int:
    return max(-(-numel // PIECE_NUMEL), 1) * PIECE_NUMEL


def _stream(
    move: Callable[[int, Tensor], Request], windows: Sequence[Tensor], numel: int, seconds: float
) -> tuple[int, float]:
    """Move up to `numel` elements through `windows` until `seconds` have passed; return elements and bytes/s."""
    begin, at = time.perf_counter(), 0
    moving: deque[Request] = deque()
    while at < numel and (at == 0 or time.perf_counter() - begin < seconds):
        if len(moving) == len(windows):
            moving.popleft().wait()
        window = windows[at // windows[0].numel() % len(windows)]
        part = window[: min(window.numel(), numel - at)]
        moving.append(move(at, part))
        at += part.numel()
    for request in moving:
        request.wait()
    return at, 4 * at / (time.perf_counter() - begin)


def _best(found: Sequence[Rates]) -> Rates:
    """Return the fastest, of those that are about as fast the first. State is written as often as it is read."""
    times = [1 / rates.read_bytes_per_s + 1 / rates.write_bytes_per_s for rates in found]
    return next(rates for rates, time_ in zip(found, times) if time_ * NEARLY <= min(times))


def _open_reserved(path: Path, size_bytes: int, *, direct: bool) -> int:
    """Open a file and reserve its room, where the system can: a full drive is found here and not in the middle of a run."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0))
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.close(handle)
            raise
    return handle


def _takes_direct(folder: Path) -> bool:
    """Return whether files in `folder` can be written with O_DIRECT, by writing a page so."""
    if not hasattr(os, "O_DIRECT"):
        return False
    path = folder / "probe"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            return os.pwrite(handle, mmap.mmap(-1, PAGE_BYTES), 0) == PAGE_BYTES
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        path.unlink(missing_ok=True)


def _filesystem(folder: Path) -> str:
    """Return the kind of file system that `folder` lies on, as Linux names it, or 'unknown'."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return "unknown"


def _new_lock(folder: Path) -> int:
    """Make the lock file in `folder` and hold it. It gets its name when it is locked: nobody finds it free in between."""
    path = folder / f"{LOCK}.new"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, MAGIC)
        path.rename(folder / LOCK)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _dead_lock(folder: Path) -> int | None:
    """Return the lock of `folder`, taken, if it is one of ours whose owner has ended; None otherwise."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode) and os.pread(handle, len(MAGIC), 0) == MAGIC:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):  # or another run has removed it, and made its own
                return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _remove_leftovers(folder: Path) -> dict[str, int]:
    """Remove the folders in `folder` that are ours and have no live owner; return their names and bytes."""
    with os.scandir(folder) as found:
        names = sorted(e.name for e in found if e.name.startswith(PREFIX) and e.is_dir(follow_symlinks=False))
    removed = {}
    for name in names:
        lock = _dead_lock(folder / name)
        if lock is None:
            continue
        try:
            removed[name] = _remove(folder / name)
        except OSError:  # not ours to remove; the room that it takes is missed, and told, when room is reserved
            continue
        finally:
            os.close(lock)
    return removed


def _remove(folder: Path) -> int:
    """Remove one of our folders, its lock last, so that what a crash leaves of it is found again; return its bytes."""
    freed = 0
    with os.scandir(folder) as found:
        entries = [entry for entry in found if entry.name != LOCK]
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            freed += entry.stat(follow_symlinks=False).st_blocks * 512
            os.unlink(entry.path)
    with suppress(FileNotFoundError):
        os.unlink(folder / LOCK)
    os.rmdir(folder)
    return freed


