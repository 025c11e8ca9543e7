"""JSON files with their own checksum, and lists of the files of a folder.

A sealed file begins with the checksum of all bytes that follow:

    {"checksum":"<16 hex digits>",<the rest of the object>

The checksum is XXH3 of 64 bits (https://xxhash.com). `CONTENTS` lists the other files of a folder with sizes and checksums.
It is written last, so a folder without it is not complete.

A checksum shows that nothing changed, not who wrote it. So a listed name must be inside its folder, only regular files are
opened, and every value is checked before use.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from ftkit.errors import UserError

CONTENTS = "contents.json"
LISTING = "manifest.json"
"""The sealed list of a subfolder that has its own list."""
SEALED_LIMIT_BYTES = 256 << 20
"""Enough for the pieces of 40 TB."""
_HEAD = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')


class BrokenCheckpoint(UserError):
    """A checkpoint that is not what was written; the text names the file. An older checkpoint may be complete."""


def checksum(data: Any) -> str:
    """Return XXH3-64 of bytes, or anything with the buffer protocol, as 16 hex digits. Cost: one read of it."""
    return xxhash.xxh3_64_hexdigest(data)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object with its checksum, durably."""
    rest = json.dumps(content, separators=(",", ":")).encode()[1:]
    with open(path, "wb") as file:
        file.write(b'{"checksum":"' + checksum(rest).encode() + b'",' + rest)
        file.flush()
        os.fsync(file.fileno())


def read_sealed(path: Path) -> dict[str, Any]:
    """Return what `write_sealed` wrote. Raise BrokenCheckpoint if the file is missing, changed or not sealed."""
    data = read_small(path, SEALED_LIMIT_BYTES)
    head = _HEAD.match(data)
    if head is None or checksum(data[head.end() :]).encode() != head[1]:
        raise BrokenCheckpoint(f"{path}: not a file that ftkit wrote, or changed since")
    try:
        return dict(json.loads(b"{" + data[head.end() :]))
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path}: not readable ({error})") from error


def read_small(path: Path, limit_bytes: int) -> bytes:
    """Return the bytes of a file. Raise BrokenCheckpoint as `file_size` does, or if it has more than `limit_bytes`."""
    found = file_size(path, path.parent)
    if found > limit_bytes:
        raise BrokenCheckpoint(f"{path}: {found} bytes, at most {limit_bytes} can be right")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error


def write_contents(folder: Path, *, apart: Iterable[str] = ()) -> None:
    """Write the list of a folder's files, durably. Links are not listed. Cost: one read of the files.

    Args:
        folder: Folder whose files are listed.
        apart: Subfolders with a sealed list of their own, of which only that list is listed here.
    """
    alone = set(apart)
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    listed = [str(name) for name in names if name.parts[0] not in alone or name.name == LISTING]
    write_sealed(folder / CONTENTS, {"files": {name: _entry(folder / name) for name in listed if name != CONTENTS}})


def check_contents(folder: Path) -> list[str]:
    """Compare a folder's files with its list, and return their names. Cost: one read of the files.

    Raises:
        BrokenCheckpoint: The list is not valid, or a file is missing or changed.
    """
    listing, listed = folder / CONTENTS, _listed(folder)
    for name, entry in listed.items():
        if not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
            raise BrokenCheckpoint(f"{listing}: {name!r:.80} is not the name of a file in its folder")
        if not isinstance(entry, list) or [type(each) for each in entry] != [int, str]:
            raise BrokenCheckpoint(f"{listing}: the entry of {name} is not valid")
        check_size(folder / name, folder, entry[0])
        if _entry(folder / name) != entry:
            raise BrokenCheckpoint(f"{folder / name}: changed since it was written")
    return list(listed)


def check_size(path: Path, folder: Path, size_bytes: int) -> None:
    """Raise BrokenCheckpoint unless a regular file within `folder` has this size."""
    found = file_size(path, folder)
    if found != size_bytes:
        raise BrokenCheckpoint(f"{path}: {found} bytes, {size_bytes} were written")


def file_size(path: Path, folder: Path) -> int:
    """Return the bytes of a file, without opening it. Raise BrokenCheckpoint unless a regular file is there in `folder`."""
    try:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise BrokenCheckpoint(f"{path}: a link that leads out of its folder")
        found = path.stat()
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise BrokenCheckpoint(f"{path}: is no file")
    return found.st_size


def _listed(folder: Path) -> dict[str, Any]:
    """Return the entries of a folder's list, unchecked."""
    listed = read_sealed(folder / CONTENTS).get("files")
    if not isinstance(listed, dict) or not listed:
        raise BrokenCheckpoint(f"{folder / CONTENTS}: lists no files")
    return listed


def _entry(path: Path) -> list[Any]:
    """Return [bytes, checksum] of a file, read 8 MiB at a time."""
    found, size = xxhash.xxh3_64(), 0
    try:
        with open(path, "rb") as file:
            while data := file.read(8 << 20):
                found.update(data)
                size += len(data)
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error
    return [size, found.hexdigest()]
