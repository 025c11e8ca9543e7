"""The manifest of a checkpoint, and whether what it says can be used: it may be a stranger's, and validly sealed.

    {"format": 2,
     "files": {"<line>.<kind>.safetensors": [bytes, [[start, stop, checksum], ...]], ...},
     "lines": {"<line>": ["<tensor>", ...], ...},
     "dtypes": {"<tensor>": "bfloat16", ...},       before sharding
     "extra": {...},                                the caller's
     "optimizer": {"class": ..., "groups": [{...}], "loss_scale": {...}, "steps": {"<tensor>": 7, ...}}}     or absent

Each part is compared with its form when the file is read; values that go to the optimizer or a scheduler must be `alike`
those that are there. It refuses by name, and knows neither tensors nor optimizers. What it costs: one walk over the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftkit.engine.files.sealed_files import LISTING, BrokenCheckpoint, check_name, read_sealed
from ftkit.engine.files.storage import NAMES
from ftkit.errors import UserError

FORMAT = 2
MANIFEST = LISTING
SUFFIX = ".safetensors"
DTYPE_NAMES = {str(dtype).removeprefix("torch.") for dtype in NAMES}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, every part of which has its form; the pieces of a file are left to their reader.

    Raises:
        BrokenCheckpoint: if the manifest is missing, changed or not of its form. UserError: of a format that this version
            does not know.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise BrokenCheckpoint(f"{folder}: no checkpoint of ftkit ({MANIFEST} is missing)")
    manifest = read_sealed(path)
    found = manifest.get("format")
    if found != FORMAT:
        raise UserError(f"{folder}: format {found!r:.40}, this version of ftkit reads {FORMAT}. Update ftkit")
    wrong = [part for part, fits in PARTS.items() if not fits(manifest.get(part))]
    optimizer = manifest.get("optimizer")
    if not wrong and optimizer is not None:
        parts = optimizer if isinstance(optimizer, dict) else {}
        wrong = [f"optimizer.{part}" for part, fits in OPTIMIZER_PARTS.items() if not fits(parts.get(part))]
    if wrong:
        raise BrokenCheckpoint(f"{path}: {wrong[0]} is not valid")
    for name in manifest["files"]:
        check_name(path, name)
        if "/" in name or not name.endswith(SUFFIX):
            raise BrokenCheckpoint(f"{path}: {name} is not the file name of a flat parameter")
    return manifest


def alike(found: Any, own: Any) -> bool:
    """Return whether a value that was read can take the place of one that this program has.

    A number can for a number, text for text, a list for a list or tuple as long, a dictionary for one with the same keys;
    for nothing (None) whatever is no list or dictionary, for an empty list any. Anything else must be of the same class.
    """
    if isinstance(own, bool) or isinstance(found, bool):
        return isinstance(found, bool) and (isinstance(own, bool) or own is None)
    if own is None:
        return found is None or isinstance(found, (int, float, str))
    if isinstance(own, (int, float)):
        return isinstance(found, (int, float)) and (isinstance(found, float) or abs(found) < 2**63)
    if isinstance(own, (list, tuple)):
        if not isinstance(found, (list, tuple)):
            return False
        return not own or (len(found) == len(own) and all(map(alike, found, own)))
    if isinstance(own, dict):
        return isinstance(found, dict) and found.keys() == own.keys() and all(alike(found[key], own[key]) for key in own)
    return type(found) is type(own)


def _each(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return what says whether something is a dictionary whose values fit."""
    return lambda found: isinstance(found, dict) and all(fits(value) for value in found.values())


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and all(isinstance(value, kind) for value in found)


PARTS: dict[str, Callable[[Any], bool]] = {
    "files": _each(lambda entry: isinstance(entry, list) and len(entry) == 2),
    "lines": _each(_is_list_of(str)),
    "dtypes": _each(lambda name: isinstance(name, str) and name in DTYPE_NAMES),
    "extra": lambda extra: isinstance(extra, dict),
}
OPTIMIZER_PARTS: dict[str, Callable[[Any], bool]] = {
    "class": lambda name: isinstance(name, str),
    "groups": _is_list_of(dict),
    "loss_scale": lambda scale: isinstance(scale, dict),
    "steps": _each(lambda count: type(count) is int and 0 <= count < 2**53),
}
