"""Flat files: shards on a drive, read and written by pieces, behind the computation's back.

One shard is one file, a valid safetensors file whose data begins at byte 4096. Requests are cut into blocks, and a few
threads move one block each with preadv or pwritev, which release the interpreter lock; O_DIRECT keeps the page cache out
of it. There is no native library: with buffers on 2 MiB pages (`arena.py`) one such thread reaches what libaio and
io_uring reach.

Every word that is written is added to a 64-bit sum of its piece (`PIECE_NUMEL` elements), every word that is read is
added and compared before `wait` returns. It finds flipped bits, lost writes and files exchanged or changed by others. It
does not find words that changed places within one piece. It costs one pass over memory, on a thread of its own or where the
values are made (`sum_of`).

What it refuses: ranges that begin or end inside a piece (`read_range` and `write_range` do those, slowly), use by a forked
child (its threads do not exist there), and going on after a write that failed: whoever asks next is told.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftkit.engine.arena import PAGE_BYTES, Arena
from ftkit.engine.files.reflink import clone_range
from ftkit.engine.files.storage import DATA_START
from ftkit.errors import UserError

PIECE_NUMEL = 1 << 20
"""Elements that share a checksum. Requests begin and end at a multiple of it, or at the file's end."""

NOT_WHOLE = -1
"""In place of a sum: of a piece whose last write failed."""

ELEMENTS = "elements"
"""The name of the one tensor in a file."""

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


class Request:
    """One read or write on its way. Until `wait` returns, its tensor belongs to the threads."""

    def __init__(
        self, file: FlatFile, start: int, tensor: Tensor, *, writing: bool, sums: Sequence[int] | None = None
    ) -> None:
        self.file = file
        self.start_bytes = start * file.dtype.itemsize
        self.data: Bytes = tensor.detach().view(torch.uint8).numpy()
        self.writing = writing
        self.summed = sums is not None
        self.sums = [0] * -(-self.data.nbytes // file.piece_bytes) if sums is None else list(sums)
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

    def add_sums(self, low: int, high: int) -> None:
        """Add the words of bytes [low, high) to the sums of their pieces; on one thread only."""
        at, piece_bytes = low, self.file.piece_bytes
        while at < high:
            piece = at // piece_bytes
            end = min((piece + 1) * piece_bytes, high)
            self.sums[piece] = (self.sums[piece] + word_sum(self.data[at:end])) % 2**64
            at = end

    def settle(self) -> None:
        """Take note of what was written, or compare what was read, once all blocks were moved."""
        if self.writing:
            self.file.keep_sums(self)
        elif self.problem is None:
            self.problem = self.file.compare_sums(self)


Blocks = queue.SimpleQueue[tuple[Request, int, int] | None]


class Lanes:
    """Threads that move blocks, in the order in which they were asked for; knows nothing of folders.

    One thread more makes the sums: before a block is written, after it was read. Made by the movers they would come in
    bursts, with the drive idle meanwhile; and one core's worth of reading memory does not slow the drive, two do.

    Args:
        depth: number of threads that move blocks.
        block_bytes: bytes that each thread moves at a time.
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
        self._idle = threading.Condition(self._lock)
        self._open = 0  # requests that have not ended
        self._untold: list[Request] = []
        self._to_move: Blocks = queue.SimpleQueue()
        self._to_sum: Blocks = queue.SimpleQueue()
        # Daemons: Python waits for other threads before it runs what ends these.
        self._movers = [threading.Thread(target=self._move, name=f"ftkit-disk-{n}", daemon=True) for n in range(depth)]
        self._summer = threading.Thread(target=self._sum, name="ftkit-disk-sums", daemon=True)
        for thread in (*self._movers, self._summer):
            thread.start()

    def submit(self, request: Request) -> Request:
        """Start `request`.

        Raises:
            DiskError: of an earlier request that failed while nobody waited for it; this one is then not started.
            RuntimeError: in a forked child, or after `close`.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("a forked child cannot use its parent's NVMe tier: its threads do not exist here")
        self.tell()
        size = request.data.nbytes
        blocks = [(request, low, min(low + self.block_bytes, size)) for low in range(0, size, self.block_bytes)]
        request.blocks = len(blocks)
        first = self._to_sum if request.writing and not request.summed else self._to_move
        with self._lock:
            if self._closed:
                raise RuntimeError("this NVMe tier is closed")
            self._open += bool(blocks)
            for block in blocks:
                first.put(block)
        if not blocks:
            request.finished.set()
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
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._open)
        self._to_sum.put(None)
        for _ in self._movers:
            self._to_move.put(None)
        for thread in (*self._movers, self._summer):
            if thread is not threading.current_thread():  # the collector may bring us here on any thread
                thread.join()

    def _move(self) -> None:
        """Be one of the threads that move."""
        bounce = Bounce(self.block_bytes)
        while (block := self._to_move.get()) is not None:
            request, low, high = block
            if self._did(request, request.file.move, request, low, high, bounce):
                with self._lock:
                    self.bytes_written += request.writing * (high - low)
                    self.bytes_read += (not request.writing) * (high - low)
            if request.writing:
                self._end(request)
            else:
                self._to_sum.put(block)
            del block, request  # or they would keep their tensor alive until the next one comes

    def _sum(self) -> None:
        """Be the thread that makes sums."""
        while (block := self._to_sum.get()) is not None:
            request, low, high = block
            self._did(request, request.add_sums, low, high)
            if request.writing:
                self._to_move.put(block)
            else:
                self._end(request)
            del block, request

    def _did(self, request: Request, act: Callable[..., None], *arguments: Any) -> bool:
        """Do something for a request, unless it failed already: then the rest is left out. Return whether it was done."""
        if request.problem is not None:
            return False
        try:
            act(*arguments)
        except BaseException as error:
            with self._lock:
                request.problem = request.problem or error
            return False
        return True

    def _end(self, request: Request) -> None:
        """Note that a block has gone its way; end the request with its last one."""
        with self._lock:
            request.blocks -= 1
            if request.blocks:
                return
        try:
            request.settle()
        except BaseException as error:  # a fault of ours must not end the thread
            request.problem = request.problem or error
        with self._idle:
            if request.problem is not None:
                self._untold.append(request)
            self._open -= 1
            self._idle.notify_all()
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

    Args:
        path: path of the file.
        numel: elements of the shard.
        dtype: dtype of the elements.
        lanes: the threads that serve the file.
        handle: handle of the file, which is open.
        direct: whether the file was opened with O_DIRECT.
        owner: an object that must live as long as the file (its `Disk`).

    A range must not be written while it is read or written: wait for the one before the other. Requests on different
    ranges are carried out in any order.
    """

    def __init__(
        self, path: Path, numel: int, dtype: torch.dtype, *, lanes: Lanes, handle: int, direct: bool, owner: object
    ) -> None:
        self.owner = owner  # keeps the folder, and so the file, alive
        self.lanes = lanes
        self.path = path
        self.numel = numel
        self.dtype = dtype
        self.direct = direct
        self.handle = handle
        self.piece_bytes: int = PIECE_NUMEL * dtype.itemsize
        self._sums = [0] * -(-numel // PIECE_NUMEL)  # what was never written reads as zeros

    def read(self, start: int, out: Tensor) -> Request:
        """Start reading elements [start, start + n) into `out` (n,): same dtype, contiguous, on the CPU.

        Args:
            start: first element, a multiple of `PIECE_NUMEL`; start + n is another, or the file's end.
            out: receives the elements.

        Raises:
            ValueError: if range or tensor are not as said.
            DiskError: of an earlier request that nobody waited for.

        Cost: memory that does not begin at a multiple of 4096 bytes is copied once more.
        """
        self._check(start, out)
        return self.lanes.submit(Request(self, start, out, writing=False))

    def write(self, start: int, values: Tensor, sums: Sequence[int] | None = None) -> Request:
        """Start writing `values` (n,) to elements [start, start + n); see `read`. They must not change until it is done.

        Args:
            start: first element, as for `read`.
            values: the values to write.
            sums: `word_sum` of each piece, where the caller made them while the values were in cache; None makes them.
        """
        self._check(start, values)
        pieces = -(-values.numel() // PIECE_NUMEL)
        if sums is not None and len(sums) != pieces:
            raise ValueError(f"{self.path}: {len(sums)} sums for {pieces} pieces")
        return self.lanes.submit(Request(self, start, values, writing=True, sums=sums))

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

    def share(self, pieces: int, target: int, at: int) -> list[int] | None:
        """Give the first `pieces` whole pieces to another file by reference, past its byte `at`.

        Nothing may be on its way to them. Later writes here do not change them there.

        Returns:
            Their sums (`word_sum`), to compare what is read there with; None where the file system cannot.

        Raises:
            DiskError: if the last write of one of them failed.
        """
        sums = self._sums[:pieces]
        if NOT_WHOLE in sums:
            raise DiskError(f"NVMe tier: {self.path}: a write to it failed. {RESUME}")
        shared = clone_range(self.handle, DATA_START, pieces * self.piece_bytes, target, at)
        return sums if shared else None

    def move(self, request: Request, low: int, high: int, bounce: Bounce) -> None:
        """Move bytes [low, high) of `request`."""
        data = request.data[low:high]
        aligned = data if not self.direct or data.ctypes.data % PAGE_BYTES == 0 else bounce.like(data)
        if request.writing:
            if aligned is not data:
                aligned[:] = data
            self._transfer(os.pwritev, aligned, request.start_bytes + low, "writing")
        else:
            self._transfer(os.preadv, aligned, request.start_bytes + low, "reading")
            if aligned is not data:
                data[:] = aligned

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


def word_sum(data: Bytes) -> int:
    """Return the sum of the 64-bit words of `data` (n,), modulo 2^64; n is a multiple of 8. Cost: one read of it."""
    return int(data.view(np.uint64).sum())  # wraps


def sum_of(values: Tensor) -> int:
    """Return `word_sum` of a contiguous CPU tensor (n,) of whole words: what `FlatFile.write` takes for a piece."""
    return word_sum(values.detach().view(torch.uint8).numpy())


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn what the system refuses into a `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"NVMe tier: cannot {doing} {path}: {_text(error)}. {_advice(error)}") from error


def _text(error: OSError) -> str:
    return error.strerror or str(error)


def _advice(error: OSError) -> str:
    return ADVICE.get(error.errno or 0, RESUME)
