"""The manifest of a checkpoint.

    {"format": 2,
     "files": {"<flat parameter>.<kind>.safetensors": [bytes, [[start, stop, checksum], ...]], ...},
     "dtypes": {"<tensor>": "bfloat16", ...},       before sharding
     "extra": {...},                                of the caller
     "optimizer": {"class": ..., "groups": [{...}], "members": {"<tensor>": 0, ...}, "loss_scale": {...},
                   "steps": {"<tensor>": 7, ...}}     or absent

A manifest is untrusted, even if its checksum is right. Each part is compared with its form. Values for the optimizer or a
scheduler must be `alike` to those that they replace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftkit.engine.checkpoint.safetensors import NAMES
from ftkit.engine.checkpoint.sealed import LISTING, BrokenCheckpoint, read_sealed
from ftkit.errors import UserError

FORMAT = 2
MANIFEST = LISTING
ENGINE_FOLDER = "ftkit"
"""Subfolder of a Trainer's checkpoint with the engine's files."""
SUFFIX = ".safetensors"
WEIGHT_KINDS = ("master", "weights")
"""Kinds of the files that have the weights, the exact ones first."""
SCALES = "_scales"
"""Ends the kind of the file that has the scales of 8-bit codes: `exp_avg_scales` beside `exp_avg`."""
BUFFERS = "buffers"
"""Kind of the file that has the persistent buffers."""
BUFFERS_FILE = f"model.{BUFFERS}{SUFFIX}"
DTYPE_NAMES = {str(dtype).removeprefix("torch.") for dtype in NAMES}


def _dict_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, dict) and all(fits(value) for value in found.values())


PARTS: dict[str, Callable[[Any], bool]] = {
    "files": _dict_of(lambda entry: isinstance(entry, list) and len(entry) == 2),
    "dtypes": _dict_of(lambda name: isinstance(name, str) and name in DTYPE_NAMES),
    "extra": lambda extra: isinstance(extra, dict),
}
OPTIMIZER_PARTS: dict[str, Callable[[Any], bool]] = {
    "class": lambda name: isinstance(name, str),
    "groups": lambda groups: isinstance(groups, list) and all(isinstance(group, dict) for group in groups),
    "loss_scale": lambda scale: isinstance(scale, dict),
    "members": lambda members: members is None or isinstance(members, dict),  # absent in older checkpoints
    "steps": _dict_of(lambda count: type(count) is int and 0 <= count < 2**53),
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, with every part of the right form. `CheckedFile` checks the pieces of a file.

    Raises:
        BrokenCheckpoint: The manifest is missing, changed or not valid.
        UserError: This version does not read its format.
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
    if optimizer is not None:
        parts = optimizer if isinstance(optimizer, dict) else {}
        wrong += [f"optimizer.{part}" for part, fits in OPTIMIZER_PARTS.items() if not fits(parts.get(part))]
    if wrong:
        raise BrokenCheckpoint(f"{path}: {wrong[0]} is not valid")
    for name in manifest["files"]:
        if "/" in name or not name.isprintable() or not name.endswith(SUFFIX):
            raise BrokenCheckpoint(f"{path}: {name!r:.80} is not the file name of a flat parameter")
    return manifest


def alike(found: Any, own: Any) -> bool:
    """Return whether a value that was read can replace a value of this program.

    A number replaces a number, a list a list or tuple of the same length, a dictionary one with the same keys. A plain value
    replaces None, any list an empty one. Other values must be of the same class.
    """
    if isinstance(own, bool) or isinstance(found, bool):
        return isinstance(found, bool) and (isinstance(own, bool) or own is None)
    if own is None:
        return found is None or isinstance(found, (int, float, str))
    if isinstance(own, (int, float)):
        return isinstance(found, (int, float)) and (isinstance(found, float) or abs(found) < 2**63)
    if isinstance(own, (list, tuple)):
        return isinstance(found, (list, tuple)) and (not own or (len(found) == len(own) and all(map(alike, found, own))))
    if isinstance(own, dict):
        return isinstance(found, dict) and found.keys() == own.keys() and all(alike(found[key], own[key]) for key in own)
    return type(found) is type(own)
