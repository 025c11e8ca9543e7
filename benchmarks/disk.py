"""`make bench-disk`: the NVMe tier beside the best that plain O_DIRECT, DeepSpeed's aio and fio get from the same folder.

Every contender writes and reads a whole file, reserved and written once before anything is timed, one contender after the
other, in turns that begin with another one each round. Medians over rounds are reported. Ours and the raw loops use the
same file, because the position of a file on its drive matters. Ours goes through `FlatFile`. The raw loops move the same
buffers (2 MiB pages) with one and two threads, in blocks of 1, 4 and 16 MiB. The best of them, for writing and for reading
apart, is the mark. DeepSpeed's aio runs in its own environment, with its own page-locked buffer. fio is measured if it is
installed.

Goals: at least 95 % of the best raw loop, and no slower than aio. Rates are 1e9 bytes a second, and vary with what else
the machine does: the share of CPU time that went to others is printed. The result is also written to runs/bench/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.run import PEERS, ROOT, busy_s, peers_python
from ftkit.engine.memory.arena import Arena
from ftkit.engine.memory.disk import Disk
from ftkit.engine.memory.flat_file import BLOCK_BYTES, PIECE_NUMEL, THREADS, FlatFile

MIB = 1 << 20
REQUEST_NUMEL = 16 * PIECE_NUMEL
RAW = [(threads, block * MIB) for threads in (1, 2) for block in (1, 4, 16)]
AIO = [(1, 1 * MIB), (1, 8 * MIB), (2, 8 * MIB), (4, 8 * MIB)]
FIO = [(engine, block, depth) for engine in ("io_uring", "libaio") for block, depth in ((1, 32), (8, 8))]

AIO_SERVER = """
import json, sys, time, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, size, cases = json.loads(sys.argv[1])
library = AsyncIOBuilder().load(verbose=False)
handles = [library.aio_handle(block, 32, False, True, threads) for threads, block in cases]
tensor = handles[0].new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
tensor.view(torch.int64).random_()
print("ready", flush=True)
for line in sys.stdin:
    what, case = line.split()
    handle = handles[int(case)]
    begin = time.perf_counter()
    (handle.async_pwrite if what == "write" else handle.async_pread)(tensor, path)
    assert handle.wait() == 1
    print(time.perf_counter() - begin, flush=True)
"""


@dataclass
class Contender:
    """One way to move a file; `move('write' or 'read')` returns seconds."""

    kind: str
    name: str
    move: Callable[[str], float]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="on the drive to be measured")
    parser.add_argument("--gib", type=int, default=2, help="of each file, and of host memory (twice, with aio)")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def ours(file: FlatFile, memory: Tensor) -> Contender:
    """Return the tier: requests of 64 MiB, all in flight at once."""
    parts = [(start, memory[start : start + REQUEST_NUMEL]) for start in range(0, memory.numel(), REQUEST_NUMEL)]

    def move(what: str) -> float:
        begin = time.perf_counter()
        call = file.write if what == "write" else file.read
        for request in [call(start, part) for start, part in parts]:
            request.wait()
        return time.perf_counter() - begin

    return Contender("ours", f"FlatFile, {THREADS} threads, {BLOCK_BYTES // MIB} MiB", move)


def raw(path: Path, memory: Tensor, threads: int, block: int) -> Contender:
    """Return plain system calls on the tier's own file: each thread moves its part of the data, block after block."""
    data = memory.view(torch.uint8).numpy()
    part = data.nbytes // threads

    def move(what: str) -> float:
        call = os.pwritev if what == "write" else os.preadv
        handle = os.open(path, os.O_RDWR | os.O_DIRECT)
        wrong: list[int] = []

        def run(first: int) -> None:
            for at in range(first, first + part, block):
                if call(handle, [data[at : at + block]], at) != block:
                    wrong.append(at)

        runners = [threading.Thread(target=run, args=(n * part,)) for n in range(threads)]
        begin = time.perf_counter()
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
        took = time.perf_counter() - begin
        os.close(handle)
        assert not wrong, f"short transfers at {wrong}"
        return took

    return Contender("raw", f"O_DIRECT loop, {threads} threads, {block // MIB} MiB", move)


@contextmanager
def aio(path: Path, size: int) -> Iterator[list[Contender]]:
    """Start DeepSpeed's aio in its environment and give a contender for each of its settings.

    Raises:
        RuntimeError: with the last thing that it said, if it does not start.
    """
    if not (PEERS / ".ready").exists():
        raise RuntimeError("no .venv-peers (`make bench` makes it)")
    spec = json.dumps([str(path), size, AIO])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    environment["PATH"] = f"{PEERS / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"  # its build needs ninja
    with tempfile.TemporaryFile("w+") as said:
        command = [peers_python(), "-c", AIO_SERVER, spec]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def answer() -> str:
            for line in answers:
                if line.strip() == "ready" or line[:1].isdigit():
                    return line
            said.seek(0)
            raise RuntimeError((said.read().strip().splitlines() or ["ended without a word"])[-1][:200])

        def mover(case: int) -> Callable[[str], float]:
            def move(what: str) -> float:
                requests.write(f"{what} {case}\n")
                requests.flush()
                return float(answer())

            return move

        try:
            answer()
            names = [f"DeepSpeed aio, {threads} threads, {block // MIB} MiB, depth 32" for threads, block in AIO]
            yield [Contender("aio", name, mover(case)) for case, name in enumerate(names)]
        finally:
            process.kill()
            process.wait()


def fio(path: Path, size: int, engine: str, block: int, depth: int) -> Contender:
    """Return fio with one job; its own clock, so that its start is not counted."""

    def move(what: str) -> float:
        command = ["fio", "--name=x", f"--filename={path}", f"--rw={what}", f"--bs={block}m", f"--size={size}"]
        command += ["--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", "--mem=mmaphuge", "--output-format=json"]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode and "--mem=mmaphuge" in command:  # no huge pages set aside
            command.remove("--mem=mmaphuge")
            told = subprocess.run(command, capture_output=True, text=True, check=True)
        return size / json.loads(told.stdout[told.stdout.index("{") :])["jobs"][0][what]["bw_bytes"]

    return Contender("fio", f"fio {engine}, {block} MiB, depth {depth}", move)


def reserved(path: Path, size: int) -> Path:
    """Make a file with its room reserved."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(handle, 0, size)
    os.close(handle)
    return path


def uncached(folder: Path) -> None:
    """Sync the files in `folder`, and let the system forget what it holds of them: who reads next reads the drive."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def turns(contenders: list[Contender], size: int, rounds: int, console: Console) -> list[dict]:
    """Let each write and read once uncounted, then `rounds` times; return rates with medians."""
    for contender in contenders:
        contender.move("write")
    rates: dict[str, dict[str, list[float]]] = {c.name: {"write": [], "read": []} for c in contenders}
    for number in range(rounds):
        busy, own, begin = busy_s(), sum(os.times()[:4]), time.time()
        for contender in (*contenders[number:], *contenders[:number]):  # who comes after whom matters to the drive
            for what, found in rates[contender.name].items():
                found.append(size / contender.move(what) / 1e9)
        others = busy_s() - busy - (sum(os.times()[:4]) - own)
        share = others / ((os.cpu_count() or 1) * (time.time() - begin))
        console.print(f"round {number + 1}: CPU of others (aio and fio among them) {max(share, 0):.0%}", highlight=False)
    return [
        {"kind": c.kind, "name": c.name, "rates": rates[c.name]}
        | {what: statistics.median(found) for what, found in rates[c.name].items()}
        for c in contenders
    ]


def report(rows: list[dict], console: Console) -> dict[str, float]:
    """Print the medians, and ours over the best of each kind; return those ratios."""
    table = Table(title="GB/s, medians over rounds")
    for column in ("", "write", "read"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row["name"], f"{row['write']:.2f}", f"{row['read']:.2f}")
    console.print(table)
    own = next(row for row in rows if row["kind"] == "ours")
    ratios = {}
    goals = Table(title="ours / best of them (above 1 is better)")
    for column in ("", "write", "read", "goal"):
        goals.add_column(column, justify="right" if column else "left")
    for kind, goal in (("raw", "0.95"), ("aio", "1.00"), ("fio", "")):
        for what in ("write", "read"):
            best = max((row[what] for row in rows if row["kind"] == kind), default=None)
            if best is not None:
                ratios[f"{what}/{kind}"] = own[what] / best
        if f"read/{kind}" in ratios:
            goals.add_row(kind, *(f"{ratios[f'{what}/{kind}']:.2f}" for what in ("write", "read")), goal)
    console.print(goals)
    return ratios


def main() -> None:
    """Measure and print."""
    options = parse()
    console = Console(width=120)
    size = options.gib << 30
    options.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        disk = Disk(options.folder, f"bench-{os.getpid()}")
        stack.callback(disk.close)
        if not disk.direct:
            sys.exit(f"{options.folder} ({disk.filesystem}) has no O_DIRECT: nothing to compare with")
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-disk-", dir=options.folder)))
        arena = Arena(size)
        memory = arena.take(size // 4, torch.float32)
        memory.view(torch.int64).random_()
        file = disk.file("ours", memory.numel(), memory.dtype)
        contenders = [ours(file, memory)]
        contenders += [raw(file.path, memory, *case) for case in RAW]
        try:
            contenders += stack.enter_context(aio(reserved(scratch / "aio", size), size))
        except RuntimeError as error:
            console.print(f"DeepSpeed's aio is not measured: {error}", highlight=False)
        if shutil.which("fio"):
            contenders += [fio(reserved(scratch / "fio", size), size, *case) for case in FIO]
        else:
            console.print("fio is not on the PATH: not measured")
        rows = turns(contenders, size, options.rounds, console)
        filesystem = disk.filesystem
    console.print(f"{options.folder} ({filesystem}), {options.gib} GiB a file", highlight=False)
    ratios = report(rows, console)
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now()
    path = folder / f"disk-{now:%Y-%m-%d-%H%M%S}.json"
    said = {"gib": options.gib, "rounds": options.rounds, "filesystem": filesystem}
    result = {"date": f"{now:%Y-%m-%d}", "options": said, "ratios": ratios, "rows": rows}
    path.write_text(json.dumps(result, indent=1))
    console.print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
