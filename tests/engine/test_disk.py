"""What the NVMe tier hands out is what it was given, or an error that names the file; and it leaves no litter.

Faults are real where that can be had (a byte flipped in the file, a file cut short, a process killed, a file system that
is full or read-only) and put in place of the system call where not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ftkit.engine.arena import Arena
from ftkit.engine.files import flat_file as flatfile
from ftkit.engine.files.flat_file import PIECE_NUMEL, DiskError, FlatFile
from ftkit.engine.files.storage import DATA_START
from ftkit.engine.memory.disk import BLOCK_BYTES, DEPTHS, LOCK, MAGIC, Disk

CPU = torch.device("cpu")
MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
NUMEL = 2 * PIECE_NUMEL + 4096
"""Two pieces and a short one."""


def drawn(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random bits as numbers of `dtype`; compare them as bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (numel * dtype.itemsize,), dtype=torch.int8, generator=generator).view(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def aligned(values: Tensor) -> Tensor:
    """Return a copy on pages of its own."""
    return Arena(values.nbytes, CPU).take(values.numel(), values.dtype).copy_(values)


def filled(disk: Disk, name: str = "a", dtype: torch.dtype = torch.int8, seed: int = 0) -> tuple[FlatFile, Tensor]:
    """Return a file of three pieces, written, and what is in it."""
    file, values = disk.file(name, NUMEL, dtype), drawn(NUMEL, dtype, seed)
    file.write(0, aligned(values)).wait()
    return file, values


def read(file: FlatFile, start: int = 0, numel: int | None = None) -> Tensor:
    out = Arena(file.numel * 8, CPU).take(file.numel - start if numel is None else numel, file.dtype)
    file.read(start, out).wait()
    return out


def change(path: Path, at: int, flip: int = 1) -> None:
    """Flip bits of one byte of a file, behind its owner's back."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ flip]))


def child(body: Callable[[], object]) -> tuple[int, Callable[[], str]]:
    """Run `body` in a forked process that then sleeps, keeping what it returned; return its id and what awaits its word."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            kept = body()
            os.write(writing, b"ready" if kept else b"done")
            time.sleep(60)
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(1)
    os.close(writing)
    return process, lambda: os.read(reading, 1000).decode()


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, "run-0", depth=2, block_bytes=MIB)
    yield disk
    disk.close()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# --- what goes in comes out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_bytes", [MIB // 4, MIB + 3 * 4096, 16 * MIB])
def test_roundtrip(tmp_path: Path, dtype: torch.dtype, block_bytes: int):
    disk = Disk(tmp_path, "run-0", depth=3, block_bytes=block_bytes)
    file = disk.file("block-0.exp_avg", NUMEL, dtype)
    values = drawn(NUMEL, dtype)
    assert file.write(0, aligned(values)).wait() is None
    assert same(read(file), values)
    assert same(read(file, PIECE_NUMEL, PIECE_NUMEL), values[PIECE_NUMEL : 2 * PIECE_NUMEL])
    other = drawn(PIECE_NUMEL, dtype, 1)
    file.write(PIECE_NUMEL, aligned(other)).wait()
    values[PIECE_NUMEL : 2 * PIECE_NUMEL] = other
    assert same(read(file), values)
    assert same(load_file(file.path)["elements"], values)
    assert disk.bytes_written == (NUMEL + PIECE_NUMEL) * dtype.itemsize
    assert disk.bytes_read == (2 * NUMEL + PIECE_NUMEL) * dtype.itemsize
    disk.close()


@pytest.mark.parametrize("shift", [1, 3, 4096])
def test_memory_that_is_not_aligned(disk: Disk, shift: int):
    file = disk.file("a", NUMEL, torch.bfloat16)
    values = drawn(NUMEL, torch.bfloat16)
    memory = Arena(3 * NUMEL, CPU).take(NUMEL + shift, torch.bfloat16)
    memory[shift:] = values
    file.write(0, memory[shift:]).wait()
    memory.zero_()
    file.read(0, memory[shift:]).wait()
    assert same(memory[shift:], values)
    assert not memory[:shift].any()
    assert same(load_file(file.path)["elements"], values)


def test_a_file_is_there_before_it_is_written(disk: Disk):
    file = disk.file("a", NUMEL, torch.float32)
    found = file.path.stat()
    assert found.st_size == DATA_START + 4 * NUMEL
    assert found.st_blocks * 512 >= found.st_size, "its room is not reserved"
    assert not read(file).any()
    disk.file("empty", 0, torch.float32).read(0, torch.empty(0)).wait()


def test_many_requests_at_once(tmp_path: Path):
    disk = Disk(tmp_path, "run-0", depth=4, block_bytes=MIB // 4)
    files = [disk.file(f"f{n}", 8 * PIECE_NUMEL, torch.int8) for n in range(4)]
    values = aligned(drawn(32 * PIECE_NUMEL, torch.int8)).view(4, 8, PIECE_NUMEL)
    places = [(f, p) for f in range(4) for p in range(8)]
    random.Random(0).shuffle(places)
    for request in [files[f].write(p * PIECE_NUMEL, values[f, p]) for f, p in places]:
        request.wait()
    out = Arena(32 * MIB, CPU).take(32 * MIB, torch.int8).view(4, 8, PIECE_NUMEL)
    random.Random(1).shuffle(places)
    requests = [files[f].read(p * PIECE_NUMEL, out[f, p]) for f, p in places]
    for request in reversed(requests):
        request.wait()
        assert request.done
    assert torch.equal(out, values)
    disk.close()


def test_any_range_the_slow_way(disk: Disk):
    file, values = filled(disk, dtype=torch.float16)
    values = values.nan_to_num()
    file.write_range(0, values.double())
    for start, stop in ((0, NUMEL), (5, 6), (PIECE_NUMEL - 3, 2 * PIECE_NUMEL + 9), (NUMEL - 1, NUMEL), (7, 7)):
        out = torch.empty(stop - start)
        file.read_range(start, out)
        assert torch.equal(out, values[start:stop].float())
    new = torch.arange(PIECE_NUMEL + 100).remainder(512).float()
    file.write_range(PIECE_NUMEL - 50, new)
    values[PIECE_NUMEL - 50 : 2 * PIECE_NUMEL + 50] = new.half()
    assert same(read(file), values)
    with pytest.raises(ValueError, match="do not lie in"):
        file.read_range(NUMEL - 1, torch.empty(2))
    change(file.path, DATA_START + 40)
    with pytest.raises(DiskError, match="changed since it was written"):
        file.read_range(5, torch.empty(1))


def test_requests_that_do_not_fit(disk: Disk):
    file = disk.file("a", NUMEL, torch.float32)
    for start, numel in (
        (4096, PIECE_NUMEL),
        (0, 4096),
        (0, NUMEL + 4096),
        (-PIECE_NUMEL, PIECE_NUMEL),
        (PIECE_NUMEL, NUMEL),
    ):
        with pytest.raises(ValueError, match="do not begin and end"):
            file.read(start, torch.empty(numel))
    for wrong in (
        torch.empty(NUMEL).half(),
        torch.empty(2 * NUMEL)[::2],
        torch.empty(NUMEL, device="meta"),
        torch.empty(1, NUMEL),
    ):
        with pytest.raises(ValueError, match="contiguous CPU tensor"):
            file.write(0, wrong)
    with pytest.raises(ValueError, match="4097 elements"):
        disk.file("b", 4097, torch.float32)
    for name in ("../b", "c/d"):
        with pytest.raises(ValueError, match="not one part of a file name"):
            disk.file(name, 4096, torch.float32)
    with pytest.raises(ValueError, match="part of a file name"):
        Disk(disk.path.parent, "../x", depth=1, block_bytes=MIB)
    with pytest.raises(ValueError, match="block_bytes 5000"):
        Disk(disk.path.parent, "x", depth=1, block_bytes=5000)
    assert not (disk.path.parent / "ftkit-x").exists()


# --- how it moves


def test_requests_do_not_wait(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    gate, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: gate.wait(10) and real(*call))
    file = disk.file("a", NUMEL, torch.int8)
    request = file.write(0, drawn(NUMEL, torch.int8))
    assert not request.done
    gate.set()
    request.wait()
    assert request.done


def test_depth_is_how_many_calls_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    together, real = threading.Barrier(3, timeout=10), os.pwritev
    most, now, lock = [0], [0], threading.Lock()

    def pwritev(*call):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait()
        with lock:
            now[0] -= 1
        return real(*call)

    monkeypatch.setattr(os, "pwritev", pwritev)
    disk = Disk(tmp_path, "run-0", depth=3, block_bytes=MIB)
    disk.file("a", 6 * PIECE_NUMEL, torch.int8).write(0, drawn(6 * PIECE_NUMEL, torch.int8)).wait()
    assert most == [3]
    disk.close()


def test_o_direct_where_there_is_one(disk: Disk):
    if disk.filesystem in ("tmpfs", "overlay"):
        pytest.skip("no O_DIRECT here")
    assert disk.direct
    file, _ = filled(disk)
    assert fcntl.fcntl(file.handle, fcntl.F_GETFL) & os.O_DIRECT


def buffered(disk: Disk) -> None:
    """A disk without O_DIRECT is as good."""
    assert not disk.direct
    file, values = filled(disk)
    assert not fcntl.fcntl(file.handle, fcntl.F_GETFL) & os.O_DIRECT
    assert same(read(file), values)
    change(file.path, DATA_START + NUMEL - 1)
    with pytest.raises(DiskError, match="changed since it was written"):
        read(file)
    disk.close()


def test_a_file_system_in_memory():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    disk = Disk(Path("/dev/shm"), f"test-{os.getpid()}", depth=2, block_bytes=MIB)
    assert disk.filesystem == "tmpfs"
    buffered(disk)
    assert not disk.path.exists()


def test_a_file_system_that_knows_no_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    buffered(Disk(tmp_path, "run-0", depth=2, block_bytes=MIB))


@pytest.mark.parametrize("short", [0, 100])
@pytest.mark.parametrize("direct", [True, False])
def test_short_transfers_go_on(disk: Disk, monkeypatch: pytest.MonkeyPatch, direct: bool, short: int):
    """The system may move less than was asked, and may end within a page, where O_DIRECT cannot go on."""
    disk.direct &= direct

    def shortened(real):
        def some(handle, parts, at):
            part = parts[0][: 64 << 10]
            return real(handle, [part], at) - (short if part.nbytes > 4096 else 0)

        return some

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, shortened(getattr(os, name)))
    file, values = filled(disk)
    assert same(read(file), values)
    assert same(load_file(file.path)["elements"], values)


def test_measuring(tmp_path: Path):
    begin = time.perf_counter()
    disk = Disk(tmp_path, "run-0", block_bytes=4 * MIB)
    took = time.perf_counter() - begin
    assert disk.rates is not None
    assert (disk.block_bytes, disk.depth) == (disk.rates.block_bytes, disk.rates.depth)
    assert disk.block_bytes == 4 * MIB
    assert disk.depth in DEPTHS
    assert took < 15, "far beyond its two seconds"
    small = Disk(tmp_path, "run-2", block_bytes=MIB // 2, depth=1)
    assert small.rates is None
    assert small._choose((MIB // 2,), (1,), 5 * MIB, 0.1).block_bytes == MIB // 2
    small.close()
    rates = disk.measure(8 * MIB, 0.2)
    assert rates.block_bytes in BLOCK_BYTES
    assert 1e6 < rates.read_bytes_per_s < 1e12
    assert 1e6 < rates.write_bytes_per_s < 1e12
    assert disk.bytes_read == disk.bytes_written == 0
    assert [path.name for path in disk.path.iterdir()] == [LOCK]
    disk.close()
    assert Disk(tmp_path, "run-1", depth=1, block_bytes=MIB).rates is None


# --- what is not what was written


@pytest.mark.parametrize("at", [0, PIECE_NUMEL - 1, PIECE_NUMEL, PIECE_NUMEL + 54321, 2 * PIECE_NUMEL, NUMEL - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found(disk: Disk, at: int, bit: int):
    file, values = filled(disk)
    change(file.path, DATA_START + at, 1 << bit)
    piece = at // PIECE_NUMEL
    low, high = DATA_START + piece * MIB, min(DATA_START + (piece + 1) * MIB, DATA_START + NUMEL)
    with pytest.raises(DiskError, match=f"a byte in {file.path} between {low} and {high} changed since it was written"):
        read(file)
    for other in {0, 1, 2} - {piece}:
        start, stop = other * PIECE_NUMEL, min((other + 1) * PIECE_NUMEL, NUMEL)
        assert same(read(file, start, stop - start), values[start:stop])
    file.write(0, values).wait()
    assert same(read(file), values)


def test_bytes_in_a_hole_are_found(disk: Disk):
    file = disk.file("a", NUMEL, torch.int8)
    change(file.path, DATA_START + PIECE_NUMEL)
    with pytest.raises(DiskError, match="changed since it was written"):
        read(file)


def test_pieces_that_changed_places_and_lost_writes_are_found(disk: Disk):
    file, _ = filled(disk)
    whole = bytearray(file.path.read_bytes())
    one, two = slice(DATA_START, DATA_START + MIB), slice(DATA_START + MIB, DATA_START + 2 * MIB)
    exchanged = bytearray(whole)
    exchanged[one], exchanged[two] = whole[two], whole[one]
    with open(file.path, "r+b") as raw:
        raw.write(exchanged)
    with pytest.raises(DiskError, match="changed since it was written"):
        read(file, 0, PIECE_NUMEL)
    file.write(0, drawn(NUMEL, torch.int8, 5)).wait()
    with open(file.path, "r+b") as raw:
        raw.write(whole)  # as if the drive had forgotten the second write
    with pytest.raises(DiskError, match="changed since it was written"):
        read(file)


@pytest.mark.parametrize("left", [MIB + 512, MIB + 8192, 100])
def test_a_file_cut_short(tmp_path: Path, left: int):
    disk = Disk(tmp_path, "run-0", depth=1, block_bytes=MIB)
    file, _ = filled(disk)
    os.truncate(file.path, left)
    with pytest.raises(DiskError) as caught:
        read(file)
    at = DATA_START + max(left - DATA_START, 0) // MIB * MIB
    for part in ("NVMe tier: reading", str(file.path), f"at byte {at}: {MIB} bytes wanted, {max(left - at, 0)} moved"):
        assert part in str(caught.value)
    assert f"has {left} bytes" in str(caught.value)
    disk.close()


# --- drives that are full, gone, or not to be written


def test_no_room_is_found_when_the_file_is_made(mounted: Path):
    disk = Disk(mounted, "run-0", depth=1, block_bytes=MIB)
    with pytest.raises(DiskError, match=rf"NVMe tier: {mounted}: {9 * MIB} bytes needed .* free .*memory\.nvme_dir"):
        disk.reserve(9 * MIB)
    disk.reserve(4 * MIB)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskError, match=rf"reserve {DATA_START + 16 * MIB} bytes for .*b\.safetensors: No space left"):
        disk.file("b", 4 * PIECE_NUMEL, torch.float32)
    assert [path.name for path in disk.path.iterdir()] == [LOCK]
    assert len(os.listdir("/proc/self/fd")) == files, "a file is open that nobody closes: its room stays taken"
    filled(disk, "c", torch.float16)  # what the other one had taken is free again
    disk.close()
    assert not list(mounted.iterdir())


def test_no_room_to_measure(mounted: Path):
    with pytest.raises(DiskError, match="bytes needed") as caught:
        Disk(mounted, "run-0")
    assert not list(mounted.iterdir())
    assert caught.value.__traceback__, "or the disk would have gone with it"


def test_a_drive_that_fills_up_in_the_middle(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    file, values = filled(disk)
    real, calls = os.pwritev, []

    def full(handle, parts, at):
        calls.append(at)
        if len(calls) == 2:
            return real(handle, [parts[0][:8192]], at)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, parts, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        request = file.write(0, values)
        with pytest.raises(DiskError) as caught:
            request.wait()
    said = str(caught.value)
    assert said.startswith(f"NVMe tier: writing {file.path} at byte ")
    for part in (" bytes wanted, ", " moved: No space left on device", "memory.nvme_dir"):
        assert part in said
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DiskError, match="its last write failed"):
        read(file)
    file.write(0, values).wait()
    assert same(read(file), values)


def test_a_folder_that_is_missing_or_no_folder(tmp_path: Path):
    with pytest.raises(DiskError, match=r"NVMe tier: cannot use .*nowhere: No such file or directory\. Create it"):
        Disk(tmp_path / "nowhere", "run-0", depth=1, block_bytes=MIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="Not a directory"):
        Disk(tmp_path / "file", "run-0", depth=1, block_bytes=MIB)


def test_a_folder_that_cannot_be_written(mounted: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    with pytest.raises(DiskError, match=f"NVMe tier: cannot make {mounted}/ftkit-run-0: Read-only file system. .*nvme_dir"):
        Disk(mounted, "run-0", depth=1, block_bytes=MIB)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path, *rest, **more):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(DiskError, match=r"Permission denied\. Let memory\.nvme_dir name a folder that this user can write"):
        Disk(tmp_path, "run-0", depth=1, block_bytes=MIB)


def test_a_folder_that_vanishes(tmp_path: Path):
    """What is open stays whole, as the system promises; nothing new can be made, and the end is not an error."""
    disk = Disk(tmp_path, "run-0", depth=2, block_bytes=MIB)
    file, values = filled(disk)
    shutil.rmtree(disk.path)
    assert same(read(file), values)
    with pytest.raises(DiskError, match=r"b\.safetensors: No such file or directory.*vanished during the run"):
        disk.file("b", 4096, torch.int8)
    with pytest.raises(DiskError, match="vanished"):
        disk.reserve(1)
    disk.close()


# --- errors that nobody waits for


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(*call):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", pwritev)


def settle(request) -> None:
    while not request.done:
        time.sleep(0.001)


def test_a_lost_write_is_told_by_the_next_request(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    file, values = filled(disk)
    other = disk.file("b", 4096, torch.int8)
    with monkeypatch.context() as patch:
        failing(patch)
        lost = file.write(0, values)
        settle(lost)
    with pytest.raises(DiskError, match=rf"writing {file.path} .*Input/output error\. The drive failed"):
        other.read(0, torch.empty(4096, dtype=torch.int8))
    other.read(0, torch.empty(4096, dtype=torch.int8)).wait()  # told once
    with pytest.raises(DiskError, match="Input/output error"):
        lost.wait()


def test_a_lost_write_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path, "run-0", depth=2, block_bytes=MIB)
    file, values = filled(disk)
    failing(monkeypatch)
    file.write(0, values)
    with pytest.raises(DiskError, match="Input/output error"):
        disk.close()
    assert not disk.path.exists()
    disk.close()
    with pytest.raises(RuntimeError, match="closed"):
        file.read(0, torch.empty(NUMEL, dtype=torch.int8))


def test_what_was_waited_for_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path, "run-0", depth=2, block_bytes=MIB)
    file, values = filled(disk)
    failing(monkeypatch)
    with pytest.raises(DiskError):
        file.write(0, values).wait()
    disk.close()


def test_sums_that_come_with_a_write_are_what_is_compared(disk: Disk):
    file = disk.file("a", 2 * PIECE_NUMEL + 4096, torch.float32)
    values = torch.rand(file.numel)
    right = [flatfile.sum_of(piece) for piece in values.split(PIECE_NUMEL)]
    file.write(0, values, right).wait()
    out = torch.empty_like(values)
    file.read(0, out).wait()
    assert torch.equal(out, values)
    file.write(PIECE_NUMEL, values[PIECE_NUMEL : 2 * PIECE_NUMEL], [right[1] ^ 1]).wait()
    file.read(0, out[:PIECE_NUMEL]).wait()
    with pytest.raises(DiskError, match="changed since it was written"):
        file.read(0, out).wait()


def test_a_fault_of_the_program_is_no_word_to_the_user(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    file, values = filled(disk)
    monkeypatch.setattr(flatfile, "word_sum", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="a thread failed") as caught:
        file.write(0, values).wait()
    assert not isinstance(caught.value, DiskError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_end_of_the_program_removes_the_folder_and_loses_no_error(tmp_path: Path):
    script = f"""
import os, torch
from pathlib import Path
from ftkit.engine.memory.disk import Disk
disk = Disk(Path({str(tmp_path)!r}), "run-0", depth=2, block_bytes=1 << 20)
file = disk.file("a", 1 << 22, torch.int8)
file.write(0, torch.ones(1 << 22, dtype=torch.int8)).wait()
os.pwritev = None
file.write(0, torch.ones(1 << 22, dtype=torch.int8))
print(sorted(os.listdir(disk.path)))
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert process.stdout.strip() == f"['a.safetensors', '{LOCK}']", process.stderr
    assert "a thread failed" in process.stderr
    assert not list(tmp_path.iterdir())


# --- what is left of others


def test_leftovers_go_and_the_living_stay(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; from ftkit.engine.memory.disk import Disk; import torch; "
        f"disk = Disk(Path(sys.argv[1]), 'other', depth=1, block_bytes={MIB}); "
        f"file = disk.file('a', {NUMEL}, torch.int8); file.write(0, torch.ones({NUMEL}, dtype=torch.int8)).wait(); "
        "print('ready', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        mine = Disk(tmp_path, "mine", depth=1, block_bytes=MIB)
        assert mine.removed == {}
        assert (tmp_path / "ftkit-other" / "a.safetensors").exists()
        with pytest.raises(DiskError, match=r"File exists\. It belongs to a live run"):
            Disk(tmp_path, "other", depth=1, block_bytes=MIB)
    finally:
        other.kill()
        other.communicate()
    third = Disk(tmp_path, "other", depth=1, block_bytes=MIB)
    assert list(third.removed) == ["ftkit-other"]
    assert NUMEL <= third.removed["ftkit-other"] < NUMEL + MIB
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ftkit-mine", "ftkit-other"]
    mine.close()
    third.close()
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_is_not_touched(tmp_path: Path):
    place, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"
    for folder in (place / "ftkit-foreign", place / "ftkit-alike", place / "data", elsewhere):
        folder.mkdir(parents=True)
        (folder / "kept").write_text("kept")
    (place / "ftkit-alike" / LOCK).write_text("another program's lock")
    (place / "data" / LOCK).write_bytes(MAGIC)
    (elsewhere / LOCK).write_bytes(MAGIC)
    (place / "ftkit-link").symlink_to(elsewhere)
    (place / "ftkit-file").write_text("kept")
    (place / "ftkit-dead").mkdir()
    (place / "ftkit-dead" / LOCK).write_bytes(MAGIC)
    (place / "ftkit-dead" / "link").symlink_to(elsewhere / "kept")
    (place / "ftkit-linked-lock").mkdir()
    (place / "ftkit-linked-lock" / LOCK).symlink_to(elsewhere / LOCK)
    disk = Disk(place, "run-0", depth=1, block_bytes=MIB)
    assert list(disk.removed) == ["ftkit-dead"]
    disk.close()
    names = ["data", "ftkit-alike", "ftkit-file", "ftkit-foreign", "ftkit-link", "ftkit-linked-lock"]
    assert sorted(path.name for path in place.iterdir()) == names
    for folder in (place / "ftkit-foreign", place / "ftkit-alike", place / "data", elsewhere):
        assert (folder / "kept").read_text() == "kept"


def test_a_forked_child_has_no_part_in_it(disk: Disk):
    """It neither removes the folder at its end, nor uses it."""
    file, values = filled(disk)

    def use() -> None:
        disk.close()
        assert file.path.exists()
        file.read(0, torch.empty(NUMEL, dtype=torch.int8))

    process, word = child(use)
    said = word()
    end(process)
    assert "forked child" in said
    assert same(read(file), values)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    """A data-loader worker may outlive the rank that was killed."""
    pids = tmp_path / "pids"
    place = tmp_path / "nvme"
    place.mkdir()

    def rank() -> Disk:
        disk = Disk(place, "killed", depth=1, block_bytes=MIB)
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        pids.write_text(str(worker))
        return disk

    process, word = child(rank)
    assert word() == "ready"
    worker = int(pids.read_text())
    end(process)
    try:
        os.kill(worker, 0)
        disk = Disk(place, "new", depth=1, block_bytes=MIB)
        assert list(disk.removed) == ["ftkit-killed"]
        disk.close()
    finally:
        os.kill(worker, signal.SIGKILL)
