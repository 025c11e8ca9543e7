"""What the NVMe tier hands out is what it was given, or an error that names the file; and it leaves no litter.

Faults are real where that can be had (a file cut short, a process killed, a file system that is full) and put in place of
the system call where not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ftkit.engine.arena import Arena
from ftkit.engine.files.flat_file import PIECE_NUMEL, DiskError, FlatFile
from ftkit.engine.files.storage import DATA_START
from ftkit.engine.memory.disk import BLOCK_BYTES, DEPTHS, LOCK, MAGIC, Disk
from tests.worlds import PATIENCE

CPU = torch.device("cpu")
MIB = 1 << 20
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


def line_from(handle: int) -> str:
    """Return the next line from a pipe, without its end."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([handle], [], [], 60 * PATIENCE)
        assert ready, "the other process says nothing"
        byte = os.read(handle, 1)
        assert byte, "the other process has ended"
        text += byte
    return text.decode().strip()


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


@pytest.mark.parametrize(
    ("dtype", "block_bytes"),
    [(torch.float32, MIB // 4), (torch.bfloat16, MIB + 3 * 4096), (torch.int8, 16 * MIB)],
    ids=str,
)
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


def test_memory_that_is_not_aligned(disk: Disk):
    file = disk.file("a", NUMEL, torch.bfloat16)
    values = drawn(NUMEL, torch.bfloat16)
    shift = 3
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


# --- how it moves


def test_requests_do_not_wait(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    gate, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: gate.wait(30 * PATIENCE) and real(*call))
    file = disk.file("a", NUMEL, torch.int8)
    request = file.write(0, drawn(NUMEL, torch.int8))
    assert not request.done
    gate.set()
    request.wait()
    assert request.done


def test_depth_is_how_many_calls_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    together, real = threading.Barrier(3, timeout=30 * PATIENCE), os.pwritev
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
    disk.close()


def test_a_file_system_in_memory(mounted: Path):
    disk = Disk(mounted, "run-0", depth=2, block_bytes=MIB)
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


@pytest.mark.parametrize(("direct", "short"), [(True, 100), (False, 0)])
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
    disk = Disk(tmp_path, "run-0", block_bytes=4 * MIB)
    assert disk.rates is not None
    assert (disk.block_bytes, disk.depth) == (disk.rates.block_bytes, disk.rates.depth)
    assert disk.block_bytes == 4 * MIB
    assert disk.depth in DEPTHS
    small = Disk(tmp_path, "run-2", block_bytes=MIB // 2, depth=1)
    assert small.rates is None
    assert small._choose((MIB // 2,), (1,), 5 * MIB, 0.1).block_bytes == MIB // 2
    small.close()
    rates = disk.measure(8 * MIB, 0.2)
    assert rates.block_bytes in BLOCK_BYTES
    assert rates.read_bytes_per_s > 0
    assert rates.write_bytes_per_s > 0
    assert disk.bytes_read == disk.bytes_written == 0
    assert [path.name for path in disk.path.iterdir()] == [LOCK]
    disk.close()
    assert Disk(tmp_path, "run-1", depth=1, block_bytes=MIB).rates is None


# --- what is not what was written


def test_a_file_cut_short(tmp_path: Path):
    left = MIB + 512
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


# --- errors that nobody waits for


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(*call):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", pwritev)


def settle(request) -> None:
    deadline = time.monotonic() + 30 * PATIENCE
    while not request.done:
        assert time.monotonic() < deadline, "the request never ends"
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
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert process.stdout.strip() == f"['a.safetensors', '{LOCK}']", process.stderr
    assert "a thread failed" in process.stderr
    assert not list(tmp_path.iterdir())


# --- what is left of others


def test_leftovers_go_and_the_living_stay(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from ftkit.engine.memory.disk import Disk; import torch; "
        f"disk = Disk(Path(sys.argv[1]), 'other', depth=1, block_bytes={MIB}); "
        f"file = disk.file('a', {NUMEL}, torch.int8); file.write(0, torch.ones({NUMEL}, dtype=torch.int8)).wait(); "
        "print('ready', flush=True); sys.stdin.read()"  # until it is killed
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], **pipes)
    try:
        assert other.stdout is not None
        assert line_from(other.stdout.fileno()) == "ready"
        mine = Disk(tmp_path, "mine", depth=1, block_bytes=MIB)
        assert mine.removed == {}
        assert (tmp_path / "ftkit-other" / "a.safetensors").exists()
        with pytest.raises(DiskError, match=r"File exists\. It belongs to a live run"):
            Disk(tmp_path, "other", depth=1, block_bytes=MIB)
    finally:
        other.kill()
        other.communicate(timeout=30 * PATIENCE)
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


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    """A data-loader worker may outlive a killed rank, and closes what it inherited."""
    script = (
        "import os, sys; from pathlib import Path; from ftkit.engine.memory.disk import Disk; "
        f"disk = Disk(Path(sys.argv[1]), 'killed', depth=1, block_bytes={MIB}); "
        "worker = os.fork(); "
        "worker or (disk.close(), print(os.getpid(), flush=True)); sys.stdin.read()"  # both, until they are killed
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    rank = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], **pipes)
    assert rank.stdout is not None
    worker = int(line_from(rank.stdout.fileno()))
    assert (tmp_path / "ftkit-killed").exists(), "a child's close leaves the folder"
    rank.kill()
    rank.wait(30 * PATIENCE)
    try:
        os.kill(worker, 0)
        disk = Disk(tmp_path, "new", depth=1, block_bytes=MIB)
        assert list(disk.removed) == ["ftkit-killed"]
        disk.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        rank.communicate(timeout=30 * PATIENCE)
