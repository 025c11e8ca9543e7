"""The NVMe tier of one rank: shards in files, read and written by pieces, behind the computation's back.

One shard is one file, a valid safetensors file whose data begins at byte 4096. Requests are cut into blocks, and a few
threads move one block each with preadv or pwritev, which release the interpreter lock; O_DIRECT keeps the page cache out
of it. There is no native library: with buffers on 2 MiB pages (`arena.py`) one such thread reaches what libaio and
io_uring reach; a second one hides the sums.

Every word that is written is added to a 64-bit sum of its piece (`PIECE_NUMEL` elements), every word that is read is
added and compared before `wait` returns. It finds flipped bits, lost writes and files exchanged or changed by others. It
does not find words that changed places within one piece. It costs one pass over memory, on the thread that moves the
block; `measure` includes it.

The files are this run's alone: scratch that a crash may lose, checkpoints being elsewhere. They lie in a folder with a
lock that the kernel drops when its owner dies, however it dies; the next run in the same place removes what it finds
unlocked, and says so. The place should be a drive of this box: a lock on a network file system may not be seen by other
boxes. The files are never synced: what is read again in the same run need not survive a power failure.

What it refuses: ranges that begin or end inside a piece (`read_range` and `write_range` do those, slowly), use by a forked
child (its threads do not exist there), and going on after a write that failed: whoever asks next is told.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import queue
import re
import shutil
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftkit.engine.arena import PAGE_BYTES, Arena
from ftkit.engine.storage import DATA_START, create_file
from ftkit.errors import UserError

PIECE_NUMEL = 1 << 20
"""Elements that share a checksum. Requests begin and end at a multiple of it, or at the file's end."""

NUMEL_MULTIPLE = 4096
"""A file's elements are a multiple of this, as shards are: so its length suits O_DIRECT in every dtype."""

BLOCK_BYTES = (16 << 20, 4 << 20, 1 << 20)
"""Bytes of one system call: what `measure` chooses from, the likeliest first."""

DEPTHS = (4, 2, 1)
"""Threads, each with one system call on its way: what `measure` chooses from, the likeliest first."""

NEARLY = 0.97
"""`measure` takes the first candidate for whose time this share is not more than what the fastest takes."""

WINDOWS = 4
"""Requests on their way while `measure` measures, of the largest block each."""

NOT_WHOLE = -1
"""In place of a sum: of a piece whose last write failed."""

ELEMENTS = "elements"
"""The name of the one tensor in a file."""

PREFIX = "ftkit-"
LOCK = "ftkit.lock"
MAGIC = b"ftkit: this folder is removed once the process that locks this file has ended\n"

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are memory. Newer kernels accept O_DIRECT on them, which means nothing there."""

ADVICE = {
    errno.ENOSPC: "Free space there, or let memory.nvme_dir name a larger drive",
    errno.EDQUOT: "Raise the quota, or let memory.nvme_dir name another drive",
    errno.EROFS: "It is mounted read-only: let memory.nvme_dir name a folder that can be written",
    errno.EACCES: "Let memory.nvme_dir name a folder that this user can write",
    errno.EPERM: "Let memory.nvme_dir name a folder that this user can write",
    errno.ENOENT: "Create it, or let memory.nvme_dir name a folder that exists; one that vanished during the run took "
    "its files along",
    errno.ENOTDIR: "Let memory.nvme_dir name a folder",
    errno.EIO: "The drive failed (see dmesg): let memory.nvme_dir name another, and resume from the last checkpoint",
    errno.EEXIST: "It belongs to a live run, or is not ours: give each run and rank a name of its own",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
}
RESUME = "The run's files were changed from outside, or the drive failed: resume from the last checkpoint"

Bytes = npt.NDArray[np.uint8]


class DiskError(UserError):
    """The NVMe tier could not keep, or not return, what it was given; the text names file, bytes and the way out."""


@dataclass(frozen=True)
class Rates:
    """What a folder's drive gives to this rank, checksums included, with the block size and depth that give it."""

    block_bytes: int
    depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float


class Request:
    """One read or write on its way. Until `wait` returns, its tensor belongs to the threads."""

    def __init__(self, file: FlatFile, start: int, tensor: Tensor, *, writing: bool) -> None:
        self.file = file
        self.start_bytes = start * file.dtype.itemsize
        self.data: Bytes = tensor.detach().view(torch.uint8).numpy()
        self.writing = writing
        self.sums = [0] * -(-self.data.nbytes // file.piece_bytes)
        self.blocks = 0  # not moved yet
        self.problem: BaseException | None = None
        self.finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.finished.is_set()

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            DiskError: if it did not move all its bytes, or if what was read is not what was written.
        """
        self.finished.wait()
        if self.problem is not None:
            self.file.lanes.tell(self)

    def settle(self) -> None:
        """Take note of what was written, or compare what was read, once all blocks were moved."""
        if self.writing:
            self.file.keep_sums(self)
        elif self.problem is None:
            self.problem = self.file.compare_sums(self)


class Lanes:
    """Threads that move blocks, in the order in which they were asked for; knows nothing of folders.

    Args:
        depth: threads. block_bytes: what each moves at a time.
    """

    def __init__(self, depth: int, block_bytes: int) -> None:
        if depth < 1 or block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
            raise ValueError(f"depth {depth} must be at least 1, block_bytes {block_bytes} a multiple of {PAGE_BYTES}")
        self.depth = depth
        self.block_bytes = block_bytes
        self.bytes_read = 0
        self.bytes_written = 0
        self._owner = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._untold: list[Request] = []
        self._blocks: queue.SimpleQueue[tuple[Request, int, int] | None] = queue.SimpleQueue()
        # Daemons: Python waits for other threads before it runs what ends these.
        self._threads = [threading.Thread(target=self._serve, name=f"ftkit-disk-{n}", daemon=True) for n in range(depth)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> Request:
        """Start `request`.

        Raises:
            DiskError: of an earlier request that failed while nobody waited for it; this one is then not started.
            RuntimeError: in a forked child, or after `close`.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("a forked child cannot use its parent's NVMe tier: its threads do not exist here")
        if self._closed:
            raise RuntimeError("this NVMe tier is closed")
        self.tell()
        size = request.data.nbytes
        request.blocks = -(-size // self.block_bytes)
        if not size:
            request.finished.set()
        for low in range(0, size, self.block_bytes):
            self._blocks.put((request, low, min(low + self.block_bytes, size)))
        return request

    def tell(self, request: Request | None = None) -> None:
        """Raise the problem of `request`, or of the first one that nobody was told of, if there is any."""
        with self._lock:
            if request is None:
                request = self._untold[0] if self._untold else None
            if request in self._untold:
                self._untold.remove(request)
        if request is None or request.problem is None:
            return
        if isinstance(request.problem, DiskError):
            raise DiskError(str(request.problem)) from request.problem.__cause__
        raise RuntimeError(f"NVMe tier: {request.file.path}: a thread failed") from request.problem

    def close(self) -> None:
        """Finish what was asked for and end the threads."""
        self._closed = True
        for _ in self._threads:
            self._blocks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may bring us here on any thread
                thread.join()

    def _serve(self) -> None:
        bounce = Bounce(self.block_bytes)
        while (block := self._blocks.get()) is not None:
            self._move(*block, bounce)
            del block  # or it would keep its tensor alive until the next one comes

    def _move(self, request: Request, low: int, high: int, bounce: Bounce) -> None:
        """Move bytes [low, high) of `request`; end the request with its last block."""
        problem: BaseException | None = None
        sums: list[tuple[int, int]] = []
        try:
            if request.problem is None:  # of a request that failed the rest is left out
                sums = request.file.move(request, low, high, bounce)
        except BaseException as error:
            problem = error
        with self._lock:
            request.problem = request.problem or problem
            for piece, value in sums:
                request.sums[piece] = (request.sums[piece] + value) % 2**64
            if sums and request.writing:
                self.bytes_written += high - low
            elif sums:
                self.bytes_read += high - low
            request.blocks -= 1
            if request.blocks:
                return
        request.settle()
        if request.problem is not None:
            with self._lock:
                self._untold.append(request)
        request.finished.set()  # last: whoever waits takes the problem off the list


class Bounce:
    """Aligned memory for blocks of tensors that are not; taken when the first one comes."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory: Bytes | None = None

    def like(self, data: Bytes) -> Bytes:
        """Return (n,) aligned bytes for `data` (n,)."""
        if self._memory is None:
            self._memory = Arena(self.size_bytes, torch.device("cpu")).take(self.size_bytes, torch.uint8).numpy()
        return self._memory[: data.nbytes]


class FlatFile:
    """One shard on disk: (numel,) of one dtype. Made by `Disk.file`.

    A range must not be written while it is read or written: wait for the one before the other. Requests on different
    ranges are carried out in any order.
    """

    def __init__(self, disk: Disk, path: Path, numel: int, dtype: torch.dtype, handle: int) -> None:
        self.disk = disk  # keeps it, and so the file, alive
        self.lanes = disk.lanes
        self.path = path
        self.numel = numel
        self.dtype = dtype
        self.direct = disk.direct
        self.handle = handle
        self.piece_bytes: int = PIECE_NUMEL * dtype.itemsize
        self._sums = [0] * -(-numel // PIECE_NUMEL)  # what was never written reads as zeros

    def read(self, start: int, out: Tensor) -> Request:
        """Start reading elements [start, start + n) into `out` (n,): same dtype, contiguous, on the CPU.

        Args:
            start: a multiple of `PIECE_NUMEL`; start + n is another, or the file's end.

        Raises:
            ValueError: if range or tensor are not as said.
            DiskError: of an earlier request that nobody waited for.

        Cost: memory that does not begin at a multiple of 4096 bytes is copied once more.
        """
        self._check(start, out)
        return self.lanes.submit(Request(self, start, out, writing=False))

    def write(self, start: int, values: Tensor) -> Request:
        """Start writing `values` (n,) to elements [start, start + n); see `read`. They must not change until it is done."""
        self._check(start, values)
        return self.lanes.submit(Request(self, start, values, writing=True))

    def read_range(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,), any dtype and device, with elements [start, start + n), any range, cast to its dtype.

        Cost: waits; reads and checks whole pieces through a scratch of one piece.
        """
        scratch = self._scratch()
        for piece, low, high in self._pieces(start, out.numel()):
            whole = self._whole(scratch, piece)
            self.read(piece, whole).wait()
            out[piece + low - start : piece + high - start].copy_(whole[low:high])

    def write_range(self, start: int, values: Tensor) -> None:
        """Write `values` (n,), any dtype and device, to elements [start, start + n), any range, cast to the file's dtype.

        Cost: waits; through a scratch of one piece, read first where the range covers it in part.
        """
        scratch = self._scratch()
        for piece, low, high in self._pieces(start, values.numel()):
            whole = self._whole(scratch, piece)
            if high - low < whole.numel():
                self.read(piece, whole).wait()
            whole[low:high].copy_(values[piece + low - start : piece + high - start])
            self.write(piece, whole).wait()

    def move(self, request: Request, low: int, high: int, bounce: Bounce) -> list[tuple[int, int]]:
        """Move bytes [low, high) of `request`; return the sums of their words, by piece of the request."""
        data = request.data[low:high]
        aligned = data if not self.direct or data.ctypes.data % PAGE_BYTES == 0 else bounce.like(data)
        if request.writing:
            if aligned is not data:
                aligned[:] = data
            sums = self._sum(aligned, low)
            self._transfer(os.pwritev, aligned, request.start_bytes + low, "writing")
        else:
            self._transfer(os.preadv, aligned, request.start_bytes + low, "reading")
            sums = self._sum(aligned, low)
            if aligned is not data:
                data[:] = aligned
        return sums

    def keep_sums(self, request: Request) -> None:
        """Remember the sums of what `request` wrote; if it failed, that nobody knows what is there."""
        first = request.start_bytes // self.piece_bytes
        sums = request.sums if request.problem is None else [NOT_WHOLE] * len(request.sums)
        self._sums[first : first + len(sums)] = sums

    def compare_sums(self, request: Request) -> DiskError | None:
        """Return what is wrong with what `request` read, or None."""
        first = request.start_bytes // self.piece_bytes
        for piece, value in enumerate(request.sums, first):
            if value == self._sums[piece]:
                continue
            low = DATA_START + piece * self.piece_bytes
            high = min(low + self.piece_bytes, DATA_START + self.numel * self.dtype.itemsize)
            if self._sums[piece] == NOT_WHOLE:
                return DiskError(f"NVMe tier: {self.path} between {low} and {high}: its last write failed. {RESUME}")
            return DiskError(
                f"NVMe tier: a byte in {self.path} between {low} and {high} changed since it was written: another program "
                "wrote there, or the drive, its cable or the memory is failing. Resume from the last checkpoint; if it "
                "comes again, let memory.nvme_dir name another drive"
            )
        return None

    def _sum(self, data: Bytes, low: int) -> list[tuple[int, int]]:
        """Return (piece of the request, sum of the words) of `data`, which begins at the request's byte `low`."""
        sums, at = [], 0
        while at < data.nbytes:
            piece = (low + at) // self.piece_bytes
            end = min((piece + 1) * self.piece_bytes - low, data.nbytes)
            sums.append((piece, int(data[at:end].view(np.uint64).sum())))  # wraps
            at = end
        return sums

    def _transfer(self, call: Callable[[int, Sequence[Any], int], int], data: Bytes, start: int, doing: str) -> None:
        """Move all of `data` from or to the bytes from `start` on of the tensor, with as many calls as it takes."""
        done, at = 0, DATA_START + start
        unit = PAGE_BYTES if self.direct else 1  # O_DIRECT goes on at a page: a started one is moved again
        while done < data.nbytes:
            try:
                got = call(self.handle, [data[done:]], at + done)
                if not self.direct:
                    self._forget(at + done, got)
            except OSError as error:
                raise self._problem(doing, at, data.nbytes, done, error) from error
            if got < unit:
                raise self._problem(doing, at, data.nbytes, done + got, None)
            done += got // unit * unit

    def _forget(self, at: int, size: int) -> None:
        """Keep a file without O_DIRECT out of the page cache: it would push out what the run needs there."""
        os.fsync(self.handle)  # only clean pages can be dropped; after a read there is nothing to do
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, at, size, os.POSIX_FADV_DONTNEED)

    def _problem(self, doing: str, at: int, wanted: int, got: int, error: OSError | None) -> DiskError:
        if error is not None:
            why, advice = _text(error), _advice(error)
        else:
            why, advice = f"the system moves no more; the file has {os.fstat(self.handle).st_size} bytes", RESUME
        return DiskError(f"NVMe tier: {doing} {self.path} at byte {at}: {wanted} bytes wanted, {got} moved: {why}. {advice}")

    def _check(self, start: int, tensor: Tensor) -> None:
        end = start + tensor.numel()
        if tensor.dtype != self.dtype or tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{self.path}: a contiguous CPU tensor (n,) of {self.dtype} is needed, not {tuple(tensor.shape)} of "
                f"{tensor.dtype} on {tensor.device}"
            )
        if start < 0 or end > self.numel or start % PIECE_NUMEL or (end % PIECE_NUMEL and end != self.numel):
            raise ValueError(
                f"{self.path}: elements [{start}, {end}) of {self.numel} do not begin and end at multiples of "
                f"{PIECE_NUMEL}; read_range and write_range take any range"
            )

    def _pieces(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield, for each piece that the range touches, its first element and the part of it in the range."""
        if start < 0 or start + numel > self.numel:
            raise ValueError(f"{self.path}: elements [{start}, {start + numel}) do not lie in its {self.numel}")
        for piece in range(start // PIECE_NUMEL * PIECE_NUMEL, start + numel, PIECE_NUMEL):
            yield piece, max(start - piece, 0), min(start + numel - piece, PIECE_NUMEL)

    def _scratch(self) -> Tensor:
        return Arena(self.piece_bytes, torch.device("cpu")).take(PIECE_NUMEL, self.dtype)

    def _whole(self, scratch: Tensor, piece: int) -> Tensor:
        return scratch[: min(PIECE_NUMEL, self.numel - piece)]


class Disk:
    """One rank's folder on the NVMe drive, and the threads that serve it.

    Args:
        folder: an existing folder on a drive of this box; the rank's own is made in it.
        name: unique to run and rank; one part of a file name.
        depth, block_bytes: threads, and bytes that each moves at a time; what is None is chosen by `measure`.

    Attributes:
        path: the rank's own folder. direct: whether O_DIRECT is used. filesystem: its kind, 'unknown' where the system
            does not say. removed: leftovers of crashed runs that were removed, name to bytes. rates: what was measured
            at the start, None if nothing was to be chosen.

    Raises:
        DiskError: if the folder is missing, read-only or full, or its own place in it is taken.

    Cost: one open file a tensor; about 2 s and 256 MiB on the drive when it measures.
    """

    def __init__(self, folder: Path, name: str, *, depth: int | None = None, block_bytes: int | None = None) -> None:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{name!r} cannot be part of a file name: letters, digits, '_', '-' and '.' can")
        folder = Path(folder).absolute()
        self.path = folder / f"{PREFIX}{name}"
        with _explained("use", folder):
            self.removed = _remove_leftovers(folder)
        with _explained("make", self.path):
            self._home = Home(self.path)
        self._end = weakref.finalize(self, self._home.close)
        self.rates: Rates | None = None
        try:
            with _explained("use", self.path):
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
        with _explained("use", self.path):
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

        Raises:
            DiskError: if there is no room for it, or the folder is gone.
        """
        if numel % NUMEL_MULTIPLE:
            raise ValueError(f"{name}: {numel} elements are no multiple of {NUMEL_MULTIPLE}")
        path = self.path / f"{name}.safetensors"
        if path.parent != self.path:
            raise ValueError(f"{name!r} is not one part of a file name")
        size = DATA_START + numel * dtype.itemsize
        with _explained(f"reserve {size} bytes for", path):
            create_file(path, [(ELEMENTS, (numel,), dtype)])
            try:
                handle = _open_reserved(path, size, direct=self.direct)
            except BaseException:
                path.unlink()  # what was reserved before the drive was full is free again
                raise
        self._home.handles.add(handle)
        return FlatFile(self, path, numel, dtype, handle)

    def measure(self, size_bytes: int = 256 << 20, seconds: float = 2.0) -> Rates:
        """Return the best block size and depth for this folder's drive, and what they give; nothing is changed by it.

        Ranks that do this together measure what each gets while all of them are at it, which is what a run will see. A
        request is never joined with another: large blocks need requests as large.

        Args:
            size_bytes: of the scratch file, which is removed. seconds: after which no other candidate is begun; a slow
                drive leaves time for the likeliest only.

        Cost: 64 MiB of host memory.
        """
        return self._choose(BLOCK_BYTES, DEPTHS, size_bytes, seconds)

    def close(self) -> None:
        """Finish what was asked for, end the threads, remove the folder.

        Raises:
            DiskError: of a request that failed while nobody waited for it.
        """
        with _explained("remove", self.path):
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
        lanes: the threads that serve its files. handles: the files that are open.
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


@contextmanager
def _explained(doing: str, path: Path) -> Iterator[None]:
    """Turn what the system refuses into a `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"NVMe tier: cannot {doing} {path}: {_text(error)}. {_advice(error)}") from error


def _text(error: OSError) -> str:
    return error.strerror or str(error)


def _advice(error: OSError) -> str:
    return ADVICE.get(error.errno or 0, RESUME)
