"""The folder of a run: its files, its lock, its checkpoints.

    recipe.yaml             the recipe with every default; its first line marks the folder as a run of ftkit
    metrics.jsonl           one JSON object per logging step and per evaluation
    divergences.jsonl       one JSON object per step whose loss diverged
    summary.json            the result
    eval_per_example.json   loss of each held-out row, before and after training
    report.json             state of the run and its plan, for report.html
    report.html             the report
    trace.json              one step of rank 0, as a Chrome trace
    checkpoint-N/           complete checkpoints
    model/                  the Hugging Face folder (an adapter folder if an adapter was trained)

A folder that holds other files and is not a run of ftkit is refused, also with `--overwrite`. `--overwrite` removes the
names above, except recipe.yaml, and nothing else. Files are written under a hidden name and renamed, so a reader never
finds half a file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

LOCK = ".lock"
RECIPE_MARK = "# Written by ftkit"
"""The first line of a run's recipe.yaml begins with it."""
UNFINISHED, ASIDE = ".writing", ".old"
"""Ends of the hidden names of a checkpoint that is being written or removed, and of one that is being replaced."""
VERIFY = "verify"
"""Subfolder of `ftkit verify`."""
OTHERWISE = "choose another folder with --set output.dir=PATH"

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder of one run. Its attributes are the paths of the files above."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.divergences = path / "divergences.jsonl"
        self.summary = path / "summary.json"
        self.per_example = path / "eval_per_example.json"
        self.standing = path / "report.json"
        self.report = path / "report.html"
        self.trace = path / "trace.json"
        self.model = path / "model"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder, and lock it for one run. The kernel releases the lock when the process ends."""
        self._check_place()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / LOCK).touch()
        except OSError as error:
            raise self._unwritable(error) from None
        with open(self.path / LOCK) as file:  # it stays in the folder: another process may have opened it to lock it next
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"output.dir: a run is active in {self.path}; wait for its end, or {OTHERWISE}"
                raise UserError(text) from None
            except OSError as error:  # a file system without locks
                raise self._unwritable(error) from None
            yield

    def is_locked(self) -> bool:
        """Return whether a run is active in this folder; False if that cannot be found out."""
        try:
            handle = os.open(self.path / LOCK, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block the reader
            with open(handle, "rb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def prepare(
        self, resume: str | None, *, overwrite: bool = False, inputs: Iterable[str] = (), owner: bool = True
    ) -> list[Path]:
        """Find the checkpoints to continue from, or remove an earlier run.

        Args:
            resume: None, a checkpoint folder, or `auto`: the checkpoint that was written last, or the beginning if there
                is none.
            overwrite: Remove an earlier run.
            inputs: Files, folders and hub names that the run reads.
            owner: Whether this process has the lock. Other processes of the run remove nothing.

        Returns:
            Checkpoints in the order in which they are tried; empty to start from the beginning.

        Raises:
            UserError: The folder is refused, or the checkpoint does not exist.
        """
        if not owner and overwrite:  # the owner may be removing the earlier run now
            return []
        checkpoints = self.check(resume, overwrite=overwrite, inputs=inputs)
        if owner:
            remove_unfinished(self.path)
            checkpoints = self.check(resume, overwrite=overwrite, inputs=inputs)  # one may have been restored
        if overwrite:
            for path in self._removable():
                _discard(path)
                if path.exists():
                    raise UserError(f"--overwrite: {path} cannot be removed; remove it yourself")
        return checkpoints

    def check(self, resume: str | None, *, overwrite: bool = False, inputs: Iterable[str] = ()) -> list[Path]:
        """Refuse what `prepare` refuses, return what `prepare` returns, and change nothing."""
        self._check_place()
        if overwrite and resume is not None:
            raise UserError("found both --overwrite (remove the earlier run) and --resume (continue it); keep one")
        if overwrite:
            self._refuse_inputs(inputs)
            return []
        checkpoints = self.checkpoints()[::-1]
        if resume not in (None, "auto"):
            path = Path(resume).expanduser()
            if not path.is_dir():
                known = ", ".join(map(str, checkpoints)) or "none"
                raise UserError(f"--resume: no such checkpoint folder: {path}; checkpoints of this run: {known}")
            return [path]
        if resume is None or not checkpoints:
            self._refuse_earlier_run(checkpoints)
        return checkpoints

    def _check_place(self) -> None:
        """Refuse a folder that is not a run of ftkit. Hidden files do not count."""
        try:
            found = sorted(name for name in os.listdir(self.path) if name[0] != ".")
            was_run = (self.path / LOCK).exists() and self.recipe.is_file()
            is_marked = was_run and self.recipe.read_text(errors="replace").startswith(RECIPE_MARK)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritable(error) from None
        if set(found) - {VERIFY} and not is_marked:
            raise UserError(
                f"output.dir: {self.path} is not a run of ftkit: it holds {' and '.join(found[:2])}, but not both "
                f"{LOCK} and a recipe.yaml that ftkit wrote; {OTHERWISE}"
            )

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"output.dir: {self.path} cannot be written ({error.strerror or error}); {OTHERWISE}")

    def _refuse_inputs(self, inputs: Iterable[str]) -> None:
        """Refuse to remove what the run reads, such as the model of the run before."""
        for name in filter(os.path.exists, inputs):
            for path in self._removable():
                if path.exists() and Path(name).resolve().is_relative_to(path.resolve()):
                    raise UserError(f"--overwrite would remove {path}, and the recipe reads {name}; {OTHERWISE}")

    def _refuse_earlier_run(self, checkpoints: list[Path]) -> None:
        """Refuse to mix a new run with an earlier one."""
        found = [path.name for path in (*checkpoints[:1], self.summary, self.model) if path.exists()]
        if found:
            advice = "continue it with --resume auto" if checkpoints else "it has no checkpoint to resume from"
            raise UserError(
                f"output.dir: {self.path} holds {' and '.join(found[:2])} of an earlier run; {advice}, replace it with "
                f"--overwrite, or {OTHERWISE}"
            )

    def _removable(self) -> list[Path]:
        """Return what `--overwrite` removes, the summary first. recipe.yaml stays, as the mark of a run."""
        files = (self.metrics, self.divergences, self.per_example, self.standing, self.report, self.trace)
        return [self.summary, *self.checkpoints(), self.model, *files]

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints in the order in which they were written."""
        steps = {path: path.name.removeprefix("checkpoint-") for path in self.path.glob("checkpoint-*")}
        found = [path for path, step in steps.items() if step.isdecimal()]
        return sorted(found, key=lambda path: (written_at(path), int(steps[path])))

    def write_recipe(self, text: str) -> None:
        """Write recipe.yaml, with the line that marks the folder as a run of ftkit; `.lock` is the other mark."""
        (self.path / LOCK).touch()
        write(self.recipe, f"{RECIPE_MARK}. A run overwrites this file: edit a copy.\n{text}")

    def read_summary(self) -> dict[str, Any]:
        """Return the content of summary.json; empty if there is none."""
        try:
            return dict(json.loads(self.summary.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def keep_metrics_until(self, step: int) -> dict[str, Any]:
        """Remove the lines of metrics.jsonl after a step, which a resumed run writes again. Return the last that stays."""
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines() if self.metrics.exists() else []
        kept = [line for line in lines if _step(line) <= step]
        if lines:
            write(self.metrics, "".join(f"{line}\n" for line in kept))
        return json.loads(kept[-1]) if kept else {}

    def disk_bytes(self) -> int:
        """Return the bytes on disk of the run's checkpoints and model, which a run replaces."""
        files = (path for folder in (*self.checkpoints(), self.model) for path in folder.rglob("*"))
        return sum(path.lstat().st_blocks * 512 for path in files if path.is_file())


def _step(line: str) -> float:
    """Return the step of a line of metrics.jsonl; infinity if it was cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


# --- checkpoints


def written_at(checkpoint: Path) -> float:
    """Return the time when a checkpoint was completed, seconds since the epoch. Its list of files is written last."""
    listed = checkpoint / "contents.json"
    return (listed if listed.exists() else checkpoint).stat().st_mtime


def publish(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name. `remove_unfinished` then removes the one that had it before.

    A kill between the two renames leaves the former one under a hidden name, and `remove_unfinished` restores it.
    """
    if final.exists():
        final.rename(final.with_name(f".{final.name}{ASIDE}"))
    temporary.rename(final)


def retire(checkpoint: Path) -> None:
    """Remove a checkpoint. After a kill, no part of it has its name."""
    hidden = checkpoint.with_name(f".{checkpoint.name}{UNFINISHED}")
    checkpoint.rename(hidden)
    _discard(hidden)


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that were not finished or were replaced. Restore one whose place is still empty."""
    for path in folder.glob(f".checkpoint-*{ASIDE}"):
        final = folder / path.name[1:].removesuffix(ASIDE)
        if final.exists():
            _discard(path)
        else:
            path.rename(final)
    for path in folder.glob(f".checkpoint-*{UNFINISHED}"):
        _discard(path)


def _discard(path: Path) -> None:
    """Remove a file, a folder or a link, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


# --- files


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named, completely or not at all, and make the folders above it.

    Raises:
        UserError: An HTML page would replace a file with another suffix.
    """
    if text.startswith("<!doctype html>") and path.exists() and path.suffix != ".html":
        raise UserError(f"--out: {path} exists and is not an .html file; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text)


def append_line(path: Path, record: Any) -> None:
    """Append a line of JSON to a file. A full disk costs the line, not the run."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record)) + "\n")
    except OSError as error:
        logger.error("%s: a line could not be written: %s", path, error.strerror)


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object completely or not at all, with null for NaN and infinity."""
    write(path, json.dumps(plain(content), indent=1) + "\n")


def plain(content: Any) -> Any:
    """Return content for JSON: null for NaN and infinity."""
    if isinstance(content, Mapping):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
