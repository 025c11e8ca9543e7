"""The files of a local source: which of a folder are read, which are passed over, and how compressed ones are opened.

Every file of a folder is read, or named: those that hold no rows by convention (README, LICENSE, hidden ones) are passed
over and listed with the rows, anything else that cannot be read stops the run. Nothing but regular files is opened: a
FIFO, a device or a socket would wait for ever, or never end.

Refused: subfolders (a folder `test` beside `train` must not be trained on unasked), other formats, archives.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, cast

import pyarrow

from ftkit.errors import UserError

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = TEXT_SUFFIXES + TABLE_SUFFIXES
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
"""Of text files that are read through a decompressor."""
NO_ROWS = ("readme", "license", "licence", "notice", "citation", "changelog")
"""Names, before their first dot, of files that hold no rows."""
CACHES = "cache-*.arrow"
"""Files that `datasets` leaves beside a data set that was saved, of rows it has made from it."""
NAMED = 5
NAME_OF_BYTES = "has a name that is not UTF-8; rename it"
SPECIAL = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
DECOMPRESSORS: dict[str, Callable[[], Any]] = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
BLOCK_BYTES = 1 << 16
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException)
"""What damaged files raise while they are read, decompression included."""


@dataclass(frozen=True)
class Files:
    """The files of a source.

    Args:
        read: files that are read, in the order of their names
        passed_over: names of the files that hold no rows
    """

    read: tuple[Path, ...]
    passed_over: tuple[str, ...] = ()


def kind_of_file(file: Path) -> str:
    """Return the suffix that says how a file is read, without that of a compression, or "" where it cannot be read."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        return suffixes[-2] if len(suffixes) > 1 and suffixes[-2] in TEXT_SUFFIXES else ""
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def files_of(path: Path) -> Files:
    """List the files of a path.

    Raises:
        UserError: nothing there, or something that cannot be read, all of it named
    """
    if _shown(str(path)) != str(path):
        raise UserError(f"{_shown(str(path))}: {NAME_OF_BYTES}")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            raise UserError(f"{path}: is a link to {os.readlink(path)}, which cannot be read. Correct data.path.") from error
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError(f"{path}: {reason} (looked in {Path.cwd()}). Correct data.path.") from error
    if stat.S_ISDIR(mode):
        return _files_of_folder(path)
    if special := SPECIAL.get(stat.S_IFMT(mode)):
        raise UserError(f"{path}: is {special}; rows are read several times, so write them to a file and name that.")
    if not kind_of_file(path):
        found = "".join(path.suffixes[-2:]) or "no suffix"
        raise UserError(f"{path}: expected {_expected()}; found {found}. {_advice(path)}")
    return Files((path,))


def _shown(name: str) -> str:
    """Return a name as text that can be written; another than the name where that is no UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def _expected() -> str:
    return f"{', '.join(SUFFIXES)}, the text files also with {', '.join(PACKED_SUFFIXES)}"


def _advice(file: Path) -> str:
    if file.suffix.lower() in (".txt", ".md"):
        return 'Write plain text as rows: one {"text": "…"} a line, in a .jsonl file.'
    if file.suffix.lower() in (".zip", ".tar", ".tgz", ".7z", ".rar"):
        return "Unpack it first."
    return "Convert it to one of these, or give it the suffix of its real format."


def _files_of_folder(folder: Path) -> Files:
    read, passed_over, refused = [], [], []
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror or error}") from error
    saved = _saved(folder)
    for entry in entries:
        stem = entry.name.partition(".")[0].lower()  # empty where the file is hidden
        own = saved and (entry.name in saved[0] or fnmatch(entry.name, CACHES))
        if own or not stem or stem in NO_ROWS:
            passed_over.append(entry.name)
        elif (problem := _problem(entry)) is not None:
            refused.append(f"  {_shown(entry.name)}: {problem}")
        else:
            read.append(entry)
    if refused:
        more = f"\n  … and {len(refused) - NAMED} more" if len(refused) > NAMED else ""
        shown = "\n".join(refused[:NAMED])
        raise UserError(
            f"{folder}: holds files that cannot be read:\n{shown}{more}\nMove that elsewhere, or name the files and folders "
            f"to read in data.sources; needed: {_expected()}."
        )
    if not read:
        beside = f" (passed over: {', '.join(passed_over[:NAMED])})" if passed_over else ""
        raise UserError(f"{folder}: expected {_expected()}; found no such file in the folder{beside}.")
    if saved and sorted(file.name for file in read) != sorted(saved[1]):
        found = ", ".join(file.name for file in read)
        raise UserError(f"{folder}: state.json names the files {', '.join(saved[1])}; found {found}.")
    return Files(tuple(folder / name for name in saved[1]) if saved else tuple(read), tuple(passed_over))


def _saved(folder: Path) -> tuple[tuple[str, ...], list[str]] | None:
    """Return what `datasets` wrote into a folder with `save_to_disk`: the files about the rows, and those with them.

    Raises:
        UserError: the folder has several splits, or its state cannot be read
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            raise UserError(f"{folder}: holds the splits {', '.join(splits)}; name the folder of one: {folder / splits[0]}")
        if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
            return None
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state.get("_indices_files"):
            raise UserError(f"{folder}: holds a selection of rows (_indices_files); save it again after flatten_indices().")
        return ("state.json", "dataset_info.json"), [str(file["filename"]) for file in state["_data_files"]]
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{folder}: its state.json or dataset_dict.json cannot be read: {error}") from error


def _problem(entry: Path) -> str | None:
    """Return why an entry of a folder cannot be read, or None."""
    if _shown(entry.name) != entry.name:
        return NAME_OF_BYTES
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return f"is a link to {os.readlink(entry)}, which cannot be read" if entry.is_symlink() else str(error.strerror)
    if stat.S_ISDIR(mode):
        return "is a folder; its files are not read unless data.sources names it"
    if special := SPECIAL.get(stat.S_IFMT(mode)):
        return f"is {special}"
    return None if kind_of_file(entry) else _advice(entry)


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading, decompressed where its suffix says so; what follows a compressed stream must be another."""
    suffix = file.suffix.lower()
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    if suffix in DECOMPRESSORS:
        return io.BufferedReader(_Streams(open(file, "rb"), DECOMPRESSORS[suffix]))
    return cast(IO[bytes], gzip.open(file, "rb")) if suffix == ".gz" else open(file, "rb")


class _Streams(io.RawIOBase):
    """The content of compressed streams, one after the other, zeros between them aside; Python's readers end at other bytes.

    Args:
        file: what holds them, opened; closed with this
        new: makes the decompressor of a stream
    """

    def __init__(self, file: IO[bytes], new: Callable[[], Any]):
        super().__init__()
        self._file, self._new, self._stream = file, new, new()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            more = b""
            if self._stream.eof:
                more = self._stream.unused_data.lstrip(b"\0")
                while not more and (block := self._file.read(BLOCK_BYTES)):
                    more = block.lstrip(b"\0")
                if not more:
                    return 0
                self._stream = self._new()
            elif self._stream.needs_input and not (more := self._file.read(BLOCK_BYTES)):
                raise EOFError("it ends within a compressed stream")
            content = self._stream.decompress(more, len(buffer))
        buffer[: len(content)] = content
        return len(content)


def digest_of_file(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
