"""Pieces of checkpoint files: written behind, read ahead, each compared; ranges of any size, in and out of turn."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ftkit.engine.checkpoint import pieces, reader
from ftkit.engine.checkpoint.pieces import Piece, PieceWriter
from ftkit.engine.checkpoint.reader import CheckedFile, PieceBuffers
from ftkit.engine.checkpoint.safetensors import create_file, data_start
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint, checksum

SMALL = 8192
SIZES = (5000, 4096 * 5, 1, 9001)
"""Elements of each tensor: pieces begin and end inside them."""


@pytest.fixture(autouse=True)
def _small_pieces() -> Iterator[None]:
    with mock.patch.object(pieces, "PIECE_BYTES", SMALL), mock.patch.object(reader, "PIECE_BYTES", SMALL):
        yield


def values_of(path: Path) -> Tensor:
    return torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(len(str(path.name)) + ord(path.name[0])))


def write(path: Path, parts: int = 2) -> list[Any]:
    """Write a file of `SIZES` in ranges of whole pages, by writers one after the other; return its entry in a manifest."""
    create_file(path, [(f"t{number}", (size,), torch.float32) for number, size in enumerate(SIZES)])
    start, values = data_start(path), values_of(path)
    cut = values.numel() // parts // 1024 * 1024
    listed = [Piece(0, start, checksum(path.read_bytes()[:start]))]
    with PieceWriter() as writer:
        for part in range(parts):
            last = values.numel() if part == parts - 1 else (part + 1) * cut
            writer.open(path, start + part * cut * 4)
            for low in range(part * cut, last, 1500):  # not where pieces end
                writer.write(values[low : min(low + 1500, last)])
            writer.close()
        writer.settle()
    return [path.stat().st_size, [list(piece) for piece in [*listed, *writer.pieces[path.name]]]]


def test_what_is_written_is_there_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    transfer = PieceWriter._transfer
    slow = staticmethod(lambda *args: (time.sleep(0.005), transfer(*args)))  # the next piece is filled meanwhile
    with mock.patch.object(PieceWriter, "_transfer", slow):
        size, listed = write(path)
    data = path.read_bytes()
    assert data[data_start(path) :] == values_of(path).numpy().tobytes()
    assert (listed[0][0], listed[-1][1], size) == (0, len(data), len(data))
    assert [piece[0] for piece in listed[1:]] == [piece[1] for piece in listed[:-1]]
    assert max(stop - start for start, stop, _ in listed) == SMALL
    assert [piece[2] for piece in listed] == [checksum(data[start:stop]) for start, stop, _ in listed]


@pytest.mark.parametrize("how", ["in turn", "nothing announced", "out of turn"])
def test_any_range_is_read_whoever_announced_what(how: str, tmp_path: Path) -> None:
    entries = {name: write(tmp_path / name) for name in ("a", "b")}
    chance = random.Random(7)
    loads: list[tuple[str, int, bool]] = []
    load = CheckedFile.load

    def noted(file: CheckedFile, number: int, buffer: Tensor) -> None:
        loads.append((file.path.name, number, threading.current_thread().name.startswith("ftkit-pieces")))
        load(file, number, buffer)

    wanted = [(name, number) for name in entries for number in range(len(SIZES))]
    with PieceBuffers() as buffers, mock.patch.object(CheckedFile, "load", noted):
        files = {name: CheckedFile(tmp_path / name, *entry, buffers) for name, entry in entries.items()}
        for _ in range(4):
            ranges = []
            for name, number in wanted if how == "in turn" else chance.sample(wanted, len(wanted)):
                start = chance.randrange(SIZES[number]) if how != "in turn" else 0
                ranges.append((name, number, start, chance.randint(1, SIZES[number] - start) if start else SIZES[number]))
            loads.clear()
            keys = [key for name, number, *cut in ranges for key in files[name].keys(f"t{number}", *cut)]
            if how == "in turn":
                buffers.expect(key for key, before in zip(keys, [None, *keys]) if key != before)
            elif how == "out of turn":
                buffers.expect(chance.sample(keys, len(keys)))
            for name, number, start, count in ranges:
                out = torch.full((count,), torch.nan)
                files[name].read(f"t{number}", start, out)
                first = sum(SIZES[:number]) + start
                assert torch.equal(out, values_of(tmp_path / name)[first : first + count])
            if how == "in turn":
                assert [(name, number) for name, number, _ in loads] == sorted({(n, i) for n, i, _ in loads}), "each once"
                assert all(ahead for *_, ahead in loads)
        for file in files.values():
            file.close()


def test_a_changed_piece_is_found_ahead_and_told_when_it_is_wanted(tmp_path: Path) -> None:
    size, listed = write(tmp_path / "a")
    middle = len(listed) // 2
    with open(tmp_path / "a", "r+b") as data:
        data.seek(listed[middle][0] + 5)
        data.write(b"\xff\xfe")
    with PieceBuffers() as buffers:
        file = CheckedFile(tmp_path / "a", size, listed, buffers)
        for _ in range(2):  # nothing is lost by a failure
            buffers.expect((file, number) for number in range(len(listed)))
            for number in range(middle):
                assert checksum(buffers.piece(file, number).numpy()) == listed[number][2]
            with pytest.raises(BrokenCheckpoint, match=rf"a: bytes {listed[middle][0]} to {listed[middle][1]} changed"):
                buffers.piece(file, middle)
            assert checksum(buffers.piece(file, middle + 1).numpy()) == listed[middle + 1][2]
        file.close()


def test_a_drive_that_fails_behind_is_told_and_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    create_file(path, [("t", (SMALL,), torch.float32)])
    transfer = PieceWriter._transfer

    def full(handle: int, data: Any, at: int) -> None:
        if at >= data_start(path) + SMALL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        transfer(handle, data, at)

    before = len(os.listdir("/proc/self/fd"))
    with PieceWriter() as writer, mock.patch.object(PieceWriter, "_transfer", staticmethod(full)):
        writer.open(path, data_start(path))
        with pytest.raises(OSError, match="No space left"):
            writer.write(torch.ones(SMALL))
    assert len(os.listdir("/proc/self/fd")) == before
