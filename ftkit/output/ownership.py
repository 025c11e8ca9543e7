"""Which files of an output folder ftkit wrote, so that a user's file under the same name is never replaced or removed.

Every file that a run writes carries a mark of its own, in its first bytes: a key of a JSON object, a `<meta>` of a page, a
comment with a checksum at the top of recipe.yaml, the keys of a line of metrics. So the mark is there as soon as the file
is, moves with it, and needs no second file that a crash could leave behind. A folder has a list: contents.json in a
checkpoint, `model-files.json` beside the model. An empty file or folder is nobody's loss and counts as ours. Where the list
of a checkpoint is damaged or missing, its files are ours by the names that saves write (`SAVED`), and all others are not.

It refuses nothing by itself: `RunFolder.prepare` and the commands that write a page ask here. What it costs: one small read
a file, one `stat` a file of a folder, and of `model/` a read of small files and of 4 MiB of larger ones. A symbolic link
under a name of ours is never ours, but for a link to a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

WRITTEN_BY = "written_by"
MARKED_JSON = re.compile(rb'\{\s*"written_by": "ftkit"')
PAGE_MARK = '<meta name="generator" content="ftkit">'
RECIPE_MARK = "# Written by ftkit ({digest}). Edit a copy: no run overwrites this file once it was changed.\n"
MARKED_RECIPE = re.compile(r"# Written by ftkit \(([0-9a-f]{16})\)[^\n]*\n")
PROFILE_MARK = "# measured by ftkit doctor"
HEAD_BYTES = 1 << 16
"""A mark stands within so many bytes."""
LINE_BYTES = 16 << 20
"""A line of a file of ours is shorter: that of a divergence names every sample of its step."""

TRAINING_KEYS = {"step", "epoch", "loss", "tokens", "divergences", "peak_host_bytes"}
EVALUATION_KEYS = {"step", "epoch", "eval_loss", "eval_perplexity", "eval_accuracy"}
DIVERGENCE_KEYS = {"step", "reason", "loss", "grad_norm", "action", "places"}

ENGINE_FOLDER, CONTENTS, LISTING = "ftkit", "contents.json", "manifest.json"
"""Of a checkpoint: the engine's subfolder, the list, and that of the subfolder. The first or second is in every one, a
damaged one included."""
SEALED = b'{"checksum":"'
"""How lists begin, those that were cut off included."""
SAVED = re.compile(
    r"trainer_state\.json|training_args\.(bin|json)|(optimizer|scheduler|scaler)\.pt|optimizer\.bin|rng_state(_\d+)?\.pth|"
    r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)|"
    r"(model\.safetensors|pytorch_model\.bin)\.index\.json|(adapter_|generation_)?config\.json|ftkit_base\.json|"
    r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|"
    r"(tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja|"
    r"((video_)?preprocessor|processor)_config\.json|contents\.json\.writing"
)
"""Names that our saves or the stock Trainer's give to files of a checkpoint, beside the lists."""
SAVED_BY_ENGINE = re.compile(r"[^/]+\.\w+\.safetensors")
"""Names that the engine gives to the files of its folder, beside the list."""
WHOLE_BYTES = 16 << 20
"""Files of a model up to this size are read whole, to know them again."""
SAMPLES, SAMPLE_BYTES = 1024, 4 << 10
"""Of larger ones so many ranges, from the first byte to the last."""
PEFT_CARD = b"library_name: peft"
"""In the README.md that PEFT writes beside an adapter."""


def marked(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with the mark as its first key."""
    return {WRITTEN_BY: "ftkit", **{key: value for key, value in content.items() if key != WRITTEN_BY}}


def marked_recipe(text: str) -> str:
    """Return the text of recipe.yaml under a comment with its checksum."""
    return RECIPE_MARK.format(digest=_digest(text)) + text


def unmarked_recipe(text: str) -> str:
    """Return the text of a recipe.yaml without the comment that `marked_recipe` put above it."""
    return MARKED_RECIPE.sub("", text, count=1)


def is_ours(path: Path) -> bool:
    """Return whether a file under a name of ours was written by ftkit, or is not there, or is empty.

    Args:
        path: a regular file; anything else (a link, a folder, a device) is not ours.
    """
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_file():
        return False
    head = _head(path)
    if not head:
        return True
    known = {".html": _is_page, ".jsonl": _is_lines, ".yaml": _is_recipe, ".yml": _is_recipe}.get(path.suffix, _is_json)
    return known(path, head)


def is_our_checkpoint(path: Path) -> bool:
    """Return whether a folder checkpoint-N was saved by the engine, whole or damaged, or holds nothing."""
    listed = (path / CONTENTS).is_file() and is_list(path / CONTENTS)
    return (path / ENGINE_FOLDER).is_dir() or listed or _holds_nothing(path)


def strangers_in_checkpoint(path: Path) -> list[Path]:
    """Return the files of a folder checkpoint-N, ours or the stock Trainer's, that are a user's.

    Ours is what a list of ours names that can be read, the engine's in its subfolder. Without one, ours is what has a name
    of `SAVED`. A file under the name of a list is ours where it begins as one.
    """
    listed, found = files_listed(path / CONTENTS), []
    for name, each in _files(path):
        if name == CONTENTS:
            known = is_list(each)
        elif listed is not None:
            known = name in listed or name == f"{CONTENTS}.writing"
        else:
            known = SAVED.fullmatch(name) is not None or (name == "README.md" and PEFT_CARD in _head(each))
        if not known and not name.startswith(f"{ENGINE_FOLDER}/"):
            found.append(each)
    return found + strangers_in_engine_folder(path / ENGINE_FOLDER)


def strangers_in_engine_folder(path: Path) -> list[Path]:
    """Return the files of a folder of the engine's that are a user's, by its list, or by names as above."""
    listed, found = files_listed(path / LISTING), []
    for name, each in _files(path):
        known = name in listed if listed is not None else SAVED_BY_ENGINE.fullmatch(name) is not None
        if not (is_list(each) if name == LISTING else known):
            found.append(each)
    return found


def files_listed(listing: Path) -> set[str] | None:
    """Return the names in a list of ours, contents.json or manifest.json; None where there is none that can be read."""
    try:
        return set(dict(json.loads(listing.read_bytes())["files"])) if is_list(listing) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_list(path: Path) -> bool:
    """Return whether a file begins as a list of ours, or was cut off there."""
    return not path.is_symlink() and SEALED.startswith(_head(path)[: len(SEALED)])


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, and something that no file of ours begins with where it cannot be read."""
    try:
        if not path.is_file():  # a pipe would never end
            return b"?"
        with open(path, "rb") as file:
            return file.readline(LINE_BYTES) if path.suffix == ".jsonl" else file.read(HEAD_BYTES)
    except OSError:
        return b"?"


def list_model(folder: Path, *, whole: bool) -> str:
    """Return the text of `model-files.json` for a folder: each file's name, size and sum, or that it is being written."""
    files = {name: [path.lstat().st_size, _sum(path)] for name, path in _files(folder)} if whole else None
    return json.dumps(marked({"folder": folder.name, "files": files}), indent=1) + "\n"


def strangers_in_model(folder: Path, listing: Path) -> list[Path]:
    """Return the files of a folder `model` that no run wrote: those its list lacks, or has with another size or sum.

    Args:
        folder: the folder `model` of a run.
        listing: the run's `model-files.json`.
    """
    if not os.path.lexists(folder):
        return []
    if folder.is_symlink() or not folder.is_dir():
        return [folder]
    listed: Any = {}
    try:
        if is_ours(listing):
            listed = json.loads(listing.read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    if listed is None:  # a run was killed while it wrote it
        return []
    if not isinstance(listed, dict):
        listed = {}
    return [each for name, each in _files(folder) if each.lstat().st_size and not _is_as_noted(each, listed.get(name))]


def _is_as_noted(path: Path, noted: Any) -> bool:
    """Return whether a file is what the list of a model notes of it: its size and sum, of an earlier version its size."""
    size, *sums = noted if isinstance(noted, list) else [noted]
    return size == path.lstat().st_size and sums in ([], [_sum(path)])


def _sum(path: Path) -> str | None:
    """Return a sum over a file, all of a small one and ranges of a large one; None where it is none or cannot be read."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE_BYTES:
                return sha256(file.read()).hexdigest()[:16]
            sampled = []
            for number in range(SAMPLES):
                file.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                sampled.append(file.read(SAMPLE_BYTES))
            return sha256(b"".join(sampled)).hexdigest()[:16]
    except OSError:
        return None


def refuse_foreign_page(path: Path, option: str) -> None:
    """Raise UserError where a file would be replaced that is no page (or profile) of ftkit."""
    if not path.name:
        raise UserError(f"{option}: {path} names no file; name one")
    if path.is_dir() or is_ours(path) or (path.is_file() and not path.is_symlink() and _is_page(path, _head(path))):
        return  # a page may have any suffix
    raise UserError(f"{option}: {path} is there and ftkit did not write it; name another file, or move that one")


def _is_page(path: Path, head: bytes) -> bool:
    return PAGE_MARK.encode() in head


def _is_json(path: Path, head: bytes) -> bool:
    return MARKED_JSON.match(head) is not None


def _is_recipe(path: Path, head: bytes) -> bool:
    if head.startswith(PROFILE_MARK.encode()):
        return True
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    found = MARKED_RECIPE.match(text)
    return found is not None and found[1] == _digest(text[found.end() :])


def _is_lines(path: Path, head: bytes) -> bool:
    try:
        record = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    keys = set(record)
    evaluation = {"step", "epoch", "eval_loss"} <= keys <= EVALUATION_KEYS
    return keys >= TRAINING_KEYS or evaluation or keys == DIVERGENCE_KEYS


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder at any depth, links among them, each with its name relative to the folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _holds_nothing(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    return not any(path.is_symlink() or path.lstat().st_size for _, path in _files(folder))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def reads_within(inputs: Iterable[str], written: Iterable[Path]) -> tuple[str, Path] | None:
    """Return the first input that is one of some files or lies in one of some folders, and which; by any of its names.

    Args:
        inputs: what a run reads: files, folders, or hub names; a name that is no path here is passed over.
        written: files and folders that the run writes.
    """
    there = [path for path in written if os.path.lexists(path)]
    for name in inputs:
        if not os.path.exists(name):
            continue
        target = Path(os.path.realpath(name))
        for path in there:
            above = [target, *target.parents]
            if Path(os.path.realpath(path)) in above or any(_same(each, path) for each in above[: len(above) - 1]):
                return name, path
    return None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
