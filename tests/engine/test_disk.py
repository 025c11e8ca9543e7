"""The NVMe tier returns what was written, or an error that names the file, and leaves no files behind.

Faults are real if possible (a file cut short, a process killed, a full file system), otherwise a patched system call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ftkit.cli import probe
from ftkit.engine.memory import flat_file
from ftkit.engine.memory.arena import Arena
from ftkit.engine.memory.disk import LOCK, Disk
from ftkit.engine.memory.flat_file import DiskError, FlatFile
from ftkit.spec.sizes import PIECE_NUMEL
from tests.worlds import PATIENCE

MIB = 1 << 20
NUMEL = 2 * PIECE_NUMEL + 4096
"""Two pieces and a short one."""


def drawn(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random bits as numbers of `dtype`, on pages of their own."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-128, 128, (numel * dtype.itemsize,), dtype=torch.int8, generator=generator)
    return Arena(bits.nbytes).take(numel, dtype).copy_(bits.view(dtype))


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def filled(disk: Disk, name: str = "a", dtype: torch.dtype = torch.int8) -> tuple[FlatFile, Tensor]:
    """Return a file that is written, and its content."""
    file, values = disk.file(name, NUMEL, dtype), drawn(NUMEL, dtype)
    file.write(0, values).wait()
    return file, values


def read(file: FlatFile, start: int = 0, numel: int | None = None) -> Tensor:
    out = Arena(file.numel * 8).take(file.numel - start if numel is None else numel, file.dtype)
    file.read(start, out).wait()
    return out


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut requests of a few MiB into several blocks, the last one shorter."""
    monkeypatch.setattr(flat_file, "BLOCK_BYTES", MIB + 3 * 4096)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, "run-0")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_roundtrip(disk: Disk, dtype: torch.dtype):
    file, values = filled(disk, "block-0.exp_avg", dtype)
    assert same(read(file), values)
    assert same(read(file, PIECE_NUMEL, PIECE_NUMEL), values[PIECE_NUMEL : 2 * PIECE_NUMEL])
    other = drawn(PIECE_NUMEL, dtype, 1)
    file.write(PIECE_NUMEL, other).wait()
    values[PIECE_NUMEL : 2 * PIECE_NUMEL] = other
    assert same(read(file), values)
    assert file.path.read_bytes() == values.view(torch.uint8).numpy().tobytes()
    assert disk.threads.moved["writing"] == (NUMEL + PIECE_NUMEL) * dtype.itemsize
    assert disk.threads.moved["reading"] == (2 * NUMEL + PIECE_NUMEL) * dtype.itemsize


def test_a_new_file_is_zeros_with_its_space_reserved(disk: Disk):
    file = disk.file("a", NUMEL, torch.float32)
    found = file.path.stat()
    assert found.st_size == 4 * NUMEL
    assert found.st_blocks * 512 >= found.st_size
    assert not read(file).any()
    disk.file("empty", 0, torch.float32).read(0, torch.empty(0)).wait()


def test_many_requests_at_once(disk: Disk):
    files = [disk.file(f"f{n}", 8 * PIECE_NUMEL, torch.int8) for n in range(4)]
    values = drawn(32 * PIECE_NUMEL, torch.int8).view(4, 8, PIECE_NUMEL)
    places = [(f, p) for f in range(4) for p in range(8)]
    random.Random(0).shuffle(places)
    for request in [files[f].write(p * PIECE_NUMEL, values[f, p]) for f, p in places]:
        request.wait()
    out = Arena(32 * MIB).take(32 * MIB, torch.int8).view(4, 8, PIECE_NUMEL)
    random.Random(1).shuffle(places)
    requests = [files[f].read(p * PIECE_NUMEL, out[f, p]) for f, p in places]
    for request in reversed(requests):
        request.wait()
    assert torch.equal(out, values)


def test_requests_run_in_the_background(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    """Both threads are in a system call while the caller continues."""
    together, real = threading.Barrier(flat_file.THREADS + 1, timeout=30 * PATIENCE), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: together.wait() >= 0 and real(*call))
    file = disk.file("a", 2 * flat_file.BLOCK_BYTES, torch.int8)
    request = file.write(0, drawn(file.numel, torch.int8))
    together.wait()
    request.wait()


def test_a_file_system_in_memory(mounted: Path):
    disk = Disk(mounted, "run-0")
    assert disk.filesystem == "tmpfs"
    file, values = filled(disk)
    assert same(read(file), values)
    disk.close()
    assert not disk.path.exists()


def test_a_file_system_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    disk = Disk(tmp_path, "run-0")
    assert not disk.direct
    file, values = filled(disk)
    assert not fcntl.fcntl(file.handle, fcntl.F_GETFL) & os.O_DIRECT
    assert same(read(file), values)
    disk.close()


def test_short_transfers_go_on(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda handle, parts, at, real=real: real(handle, [parts[0][: 64 << 10]], at))
    file, values = filled(disk)
    assert same(read(file), values)


def test_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "MEASURED_BYTES", 8 * MIB)
    found = probe.measure_drive(tmp_path)
    assert min(found["write_bytes_per_s"], found["read_bytes_per_s"]) > 0
    assert not list(tmp_path.iterdir())


def test_a_file_cut_short(disk: Disk):
    file, _ = filled(disk)
    os.truncate(file.path, MIB)
    with pytest.raises(DiskError, match=rf"NVMe tier: reading {file.path}: the file ends at byte {MIB}"):
        read(file)


def test_a_full_drive_is_found_when_the_file_is_made(mounted: Path):
    disk = Disk(mounted, "run-0")
    with pytest.raises(DiskError, match=rf"reserve {16 * MIB} bytes for .*b: No space left .*memory\.nvme_dir"):
        disk.file("b", 4 * PIECE_NUMEL, torch.float32)
    disk.close()
    assert not list(mounted.iterdir())


def test_a_drive_that_fails_in_the_middle(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    file, values = filled(disk)
    real, calls = os.pwritev, []

    def full(handle, parts, at):
        calls.append(at)
        if len(calls) == 1:
            return real(handle, [parts[0][:8192]], at)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        request = file.write(0, values)
        with pytest.raises(DiskError, match=rf"finish writing {file.path}: Input/output error.*memory\.nvme_dir") as caught:
            request.wait()
    assert isinstance(caught.value.__cause__, OSError)
    file.write(0, values).wait()
    assert same(read(file), values)


def test_a_folder_that_is_missing_or_no_folder(tmp_path: Path):
    with pytest.raises(DiskError, match=r"NVMe tier: cannot make .*nowhere.*: No such file or directory"):
        Disk(tmp_path / "nowhere", "run-0")
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="Not a directory"):
        Disk(tmp_path / "file", "run-0")


def test_the_end_of_the_program_removes_the_folder(tmp_path: Path):
    script = f"""
import os, torch
from pathlib import Path
from ftkit.engine.memory.disk import Disk
disk = Disk(Path({str(tmp_path)!r}), "run-0")
disk.file("a", 1 << 22, torch.int8)
if not os.fork():  # a data-loader worker
    disk.close()
    os._exit(0)
os.wait()
print(sorted(os.listdir(disk.path)))
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert process.stdout.strip() == f"['a', '{LOCK}']", process.stderr
    assert not list(tmp_path.iterdir())


def test_folders_of_ended_runs_are_removed_and_others_stay(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from ftkit.engine.memory.disk import Disk; import torch; "
        f"disk = Disk(Path(sys.argv[1]), 'other'); disk.file('a', {NUMEL}, torch.int8); "
        "print('ready', flush=True); sys.stdin.read()"  # until it is killed
    )
    (tmp_path / "ftkit-foreign").mkdir()
    (tmp_path / "ftkit-foreign" / "kept").write_text("kept")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], **pipes)
    try:
        assert other.stdout is not None
        ready, _, _ = select.select([other.stdout], [], [], 60 * PATIENCE)
        assert ready
        assert other.stdout.readline() == b"ready\n"
        mine = Disk(tmp_path, "mine")
        assert mine.removed == {}
        assert (tmp_path / "ftkit-other" / "a").exists()
        with pytest.raises(DiskError, match=r"ftkit-other: File exists"):
            Disk(tmp_path, "other")
    finally:
        other.kill()
        other.communicate(timeout=30 * PATIENCE)
    third = Disk(tmp_path, "other")
    assert list(third.removed) == ["ftkit-other"]
    assert NUMEL <= third.removed["ftkit-other"] < NUMEL + MIB
    mine.close()
    third.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ftkit-foreign"]
    assert (tmp_path / "ftkit-foreign" / "kept").read_text() == "kept"
