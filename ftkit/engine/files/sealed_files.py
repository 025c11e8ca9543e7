"""Small JSON files that know their own checksum, and lists of the files that belong together.

A sealed file begins with the checksum of all that follows, so that not one byte of it can change unseen:

    {"checksum":"<16 hex digits>",<the rest of the object>

The checksum is XXH3 of 64 bits (https://xxhash.com), which reads memory as fast as it comes. `CONTENTS` lists every other
file of a folder with its size and checksum; it is written last, so that a folder without it is not whole.

A checksum proves that nothing changed, not who wrote it: a stranger can seal what he likes. So no name in a list may lead
out of its folder, nothing but a regular file is opened, and every value is looked at before it is used.

It refuses, by name, what is missing, of another size, changed, or not listed where it should be. It knows no torch.
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
"""The sealed list of a subfolder that has one of its own."""
READ_BYTES = 8 << 20
SEALED_LIMIT_BYTES = 256 << 20
"""The pieces of 40 TB are listed in as much; a larger sealed file is refused unread."""
NAME_LIMIT_BYTES = 1024
_HEAD = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')


class BrokenCheckpoint(UserError):
    """A checkpoint that is not what was written; the text names the file. An older one may be whole."""


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
    """Return what `write_sealed` wrote.

    Raises:
        BrokenCheckpoint: if the file is missing, changed, or was not written by it.
    """
    data = read_small(path, SEALED_LIMIT_BYTES)
    head = _HEAD.match(data)
    if head is None:
        raise BrokenCheckpoint(f"{path}: not a file that ftkit wrote, or changed since")
    rest = data[head.end() :]
    if checksum(rest).encode() != head[1]:
        raise BrokenCheckpoint(f"{path}: changed since it was written")
    try:
        content = json.loads(b"{" + rest)
    except (ValueError, RecursionError) as error:  # sealed by somebody else
        raise BrokenCheckpoint(f"{path}: not readable ({error})") from error
    return dict(content)


def read_small(path: Path, limit_bytes: int) -> bytes:
    """Return the bytes of a file that a stranger may have put into its folder.

    Raises:
        BrokenCheckpoint: as `file_size`, and if it has more than `limit_bytes`.
    """
    found = file_size(path, path.parent)
    if found > limit_bytes:
        raise BrokenCheckpoint(f"{path}: {found} bytes, at most {limit_bytes} can be right")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error


def write_contents(folder: Path, *, apart: Iterable[str] = ()) -> None:
    """Write the list of a folder's files, durably, in place of a former one. Cost: one read of them.

    What `check_contents` would refuse is left out: links, and names that are not to be shown.

    Args:
        folder: the folder whose files are listed.
        apart: subfolders with a sealed list of their own, of which only that is listed here.
    """
    alone = set(apart)
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CONTENTS):
        name = path.relative_to(folder)
        listed = not path.is_symlink() and _is_name(name.as_posix())
        if listed and (name.parts[0] not in alone or name.name == LISTING):
            files[str(name)] = [path.stat().st_size, file_checksum(path)]
    write_sealed(folder / CONTENTS, {"files": files})


def listed_in(folder: Path) -> dict[str, Any]:
    """Return the entries of a folder's list by the names of its files. The entries are not looked at.

    Raises:
        BrokenCheckpoint: if there is no list, or it lists nothing.
    """
    listing = folder / CONTENTS
    listed = read_sealed(listing).get("files")
    if not isinstance(listed, dict) or not listed:
        raise BrokenCheckpoint(f"{listing}: lists no files")
    return listed


def stamps_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (bytes, time of change in ns) of each listed file of a folder that exists."""
    paths = {name: folder / name for name in listed_in(folder)}
    found = {name: path.stat() for name, path in paths.items() if path.is_file()}
    return {name: (each.st_size, each.st_mtime_ns) for name, each in found.items()}


def changed_since(folder: Path, stamps: dict[str, tuple[int, int]]) -> list[str]:
    """Return the files that were changed or removed since `stamps_of` looked at the folder."""
    now = stamps_of(folder)
    return [name for name, stamp in stamps.items() if now.get(name) != stamp]


def reseal(folder: Path, changed: Iterable[str]) -> None:
    """Take the present state of some files into a folder's list, durably: their owner has changed or removed them."""
    listed = listed_in(folder)
    for name in changed:
        path = folder / name
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            listed[name] = [path.stat().st_size, file_checksum(path)]
        else:
            del listed[name]
    write_sealed(folder / f"{CONTENTS}.writing", {"files": listed})
    (folder / f"{CONTENTS}.writing").replace(folder / CONTENTS)
    handle = os.open(folder, os.O_RDONLY)  # the name as well
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_contents(folder: Path) -> list[str]:
    """Compare a folder's files with its list, and return their names. Cost: one read of them.

    Raises:
        BrokenCheckpoint: naming the first file that is missing or changed, or the list if it is none.
    """
    listing, listed = folder / CONTENTS, listed_in(folder)
    for name, entry in listed.items():
        check_name(listing, name)
        if not isinstance(entry, list) or [type(each) for each in entry] != [int, str]:
            raise BrokenCheckpoint(f"{listing}: the entry of {name} is not valid")
        path = folder / name
        check_size(path, folder, entry[0])
        if file_checksum(path) != entry[1]:
            raise BrokenCheckpoint(f"{path}: changed since it was written")
    return list(listed)


def check_name(listing: Path, name: str) -> None:
    """Raise BrokenCheckpoint unless a name in a list is that of a file in its folder or below: `a/b`, printable, no `..`."""
    if not _is_name(name):
        raise BrokenCheckpoint(f"{listing}: {name!r:.80} is not the name of a file in its folder")


def _is_name(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and len(name.encode()) <= NAME_LIMIT_BYTES and not any(p in ("", ".", "..") for p in parts)


def check_size(path: Path, folder: Path, size_bytes: int) -> None:
    """Raise BrokenCheckpoint unless a file is there, within `folder`, and has this size."""
    found = file_size(path, folder)
    if found != size_bytes:
        raise BrokenCheckpoint(f"{path}: {found} bytes, {size_bytes} were written")


def file_size(path: Path, folder: Path) -> int:
    """Return the bytes of a regular file within `folder`; nothing is opened.

    Raises:
        BrokenCheckpoint: if it is missing, a link that leads out of the folder, or no file (a pipe would never end).
    """
    try:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise BrokenCheckpoint(f"{path}: a link that leads out of its folder")
        found = path.stat()
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise BrokenCheckpoint(f"{path}: is no file")
    return found.st_size


def file_checksum(path: Path) -> str:
    """Return the checksum of a file. Cost: one read of it, 8 MiB at a time."""
    found = xxhash.xxh3_64()
    try:
        with open(path, "rb") as file:
            while data := file.read(READ_BYTES):
                found.update(data)
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: {error.strerror}") from error
    return found.hexdigest()
