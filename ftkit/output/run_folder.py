"""The folder of a run: what lies where, and writing it so that a reader never finds half a file.

    recipe.yaml             the recipe with every default spelled out
    metrics.jsonl           one JSON object a logging step, and one an evaluation
    divergences.jsonl       one JSON object a step whose loss went wrong, if any did
    summary.json            what came of it
    eval_per_example.json   loss of each held-out row, before and after
    guard.json              who held the memory, if the memory guard ended the run
    report.json             how the run stands, and what was planned: what report.html is made of beside the files above
    report.html             all of it for the eye
    trace.json              one step of rank 0, in the format of Chrome's trace viewer
    checkpoint-N/           what --resume continues from
    line.json               where the run went back to an earlier checkpoint, if it did
    model/                  the Hugging Face folder (an adapter folder when an adapter was trained)
    model-files.json        the names, sizes and sums of the files of model/

It refuses a place that cannot be written, before any rank is started, and to mix a new run with what an old one left:
checkpoints, a model, a summary. What it costs: those must be resumed from, moved, or given up with --overwrite, which
removes the files above and nothing else; the summary goes first, so that a summary always belongs to the run that is there.
A file or folder under one of these names that no run wrote (`ownership`) is the user's: it stops the run, with and without
--overwrite and --resume.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.output import ownership
from ftkit.output.replacing import put_back, remove_unfinished

LOCK = ".lock"
SHOWN = 3
"""Foreign files that a message names."""
LINE = "line"
"""Under which a checkpoint, and line.json, note the line that they are of."""
Line = list[list[int]]
"""[number, step] of each time that a run went back to an earlier checkpoint; the numbers rise. None: []."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Where the results of one run lie.

    Args:
        path: The folder.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a logging step."""
        return self.path / "metrics.jsonl"

    @property
    def divergences(self) -> Path:
        """One JSON object a step whose loss went wrong."""
        return self.path / "divergences.jsonl"

    @property
    def summary(self) -> Path:
        """What came of the run."""
        return self.path / "summary.json"

    @property
    def guard(self) -> Path:
        """What the memory guard reported when it ended the run."""
        return self.path / "guard.json"

    @property
    def standing(self) -> Path:
        """How the run stands, and what was planned."""
        return self.path / "report.json"

    @property
    def report(self) -> Path:
        """The run for the eye."""
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        """One step of rank 0."""
        return self.path / "trace.json"

    @property
    def per_example(self) -> Path:
        """Loss of each held-out row, before and after."""
        return self.path / "eval_per_example.json"

    @property
    def line(self) -> Path:
        """Which line of checkpoints was last trained, if the run ever went back."""
        return self.path / "line.json"

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.path / "model"

    @property
    def model_list(self) -> Path:
        """The names, sizes and sums of the files of `model`."""
        return self.path / "model-files.json"

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that a run writes, beside those of `model` and of checkpoints; the summary first."""
        first = (self.summary, self.recipe, self.metrics, self.divergences, self.per_example, self.guard)
        return (*first, self.standing, self.report, self.trace, self.model_list, self.line)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for one run; the kernel lets go of it when this process ends, however it ends.

        Raises:
            UserError: The folder cannot be made, or another run holds it.
        """
        path = self.path / LOCK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_special()
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise self.held_error() from None
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the handle, too
            os.close(handle)  # the file stays: who opened it in the meantime must not lock another one than the next run

    def is_held(self) -> bool:
        """Whether a run goes on in this folder; changes nothing, and says no where that cannot be known."""
        try:
            handle = os.open(self.path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def held_error(self) -> UserError:
        """Return the error of a folder in which another run goes on."""
        return UserError(
            f"output.dir: {self.path} belongs to a run that is going on; wait for its end, or choose another folder "
            "with --set output.dir=PATH"
        )

    def _unwritable(self, error: OSError | ValueError) -> UserError:
        reason = getattr(error, "strerror", None) or error
        return UserError(
            f"output.dir: {str(self.path)!r} cannot be written ({reason}); choose another folder with --set output.dir=PATH"
            if "\0" in str(self.path)
            else f"output.dir: {self.path} cannot be written ({reason}); choose another folder with --set output.dir=PATH"
        )

    def check_place(self) -> None:
        """Raise what `prepare` would raise of the place itself, and leave nothing behind.

        Raises:
            UserError: The folder cannot be made or written.
        """
        try:
            nearest = next(each for each in (self.path, *self.path.absolute().parents) if os.path.lexists(each))
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            with tempfile.TemporaryFile(dir=nearest):
                pass
            self._refuse_special()
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None

    def _refuse_special(self) -> None:
        """Refuse the root of the file system: nobody means it."""
        if os.path.realpath(self.path) == os.sep:
            raise UserError("output.dir: / is the root of the file system; name a folder for the run")

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        found = [path for path in self.path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
        return sorted(found, key=step_of)

    def newest_first(self) -> list[Path]:
        """Return the complete checkpoints that the run, as it was last trained, came by; the newest first."""
        left = self.left()
        return [path for path in self.checkpoints()[::-1] if path not in left]

    def left(self) -> dict[Path, int]:
        """Return the complete checkpoints of lines that the run left, each with the step that it went back to."""
        line, found = self._line(), {}
        for path in self.checkpoints():
            own = line_of(path)
            if own is not None and not _comes_by(line, own, step_of(path)):
                parts = (at for at, (one, other) in enumerate(zip(own, line)) if one != other)
                at = next(parts, min(len(own), len(line)))
                found[path] = (line if at < len(line) else own)[at][1]
        return found

    def go_on_from(self, checkpoint: Path | None, step: int) -> Line:
        """Note which line is trained from here on, and return it: a new one where the run goes back.

        Args:
            checkpoint: What the run goes on from; None: from its beginning.
            step: The step that that is of.
        """
        line, there = self._line(), self.checkpoints()
        own = [] if checkpoint is None else line_of(checkpoint) or []
        beyond = [path for path in there if step_of(path) > step]
        if own != line or any(_comes_by(own, line_of(path) or [], step_of(path)) for path in beyond):
            numbers = [number for each in (line, own, *(line_of(path) or [] for path in there)) for number, _ in each]
            own = [*own, [max(numbers, default=0) + 1, step]]
        if own or self.line.exists():
            write_json(self.line, {LINE: own})
        return own

    def _line(self) -> Line:
        """Return the line that was last trained; without line.json that of the checkpoint with the highest number."""
        try:
            noted = _as_line(json.loads(self.line.read_bytes())[LINE]) if ownership.is_ours(self.line) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            noted = None
        if noted is not None:
            return noted
        lines = [line_of(path) or [] for path in self.checkpoints()]
        return max(lines, key=lambda line: line[-1][0] if line else 0, default=[])

    def identities(self) -> dict[Path, int]:
        """Return the checkpoints, oldest first, each with what tells it from another one of its name."""
        return {path: path.stat().st_ino for path in self.checkpoints()}

    def held_bytes(self) -> int:
        """Return the bytes on the disk of what this run replaces or keeps: checkpoints and model."""
        return sum(
            path.lstat().st_blocks * 512
            for folder in (*self.checkpoints(), self.model)
            for path in folder.rglob("*")
            if path.is_file()
        )

    def prepare(
        self, resume: str | None, *, overwrite: bool = False, inputs: Iterable[str] = (), owner: bool = True
    ) -> list[Path]:
        """Make the folder, or refuse it, and find the checkpoints to continue from.

        Args:
            resume: None, `auto` (the last checkpoint that is whole, of the line that was last trained, or the beginning if
                there is none), or a folder.
            overwrite: Remove what an earlier run left, instead of refusing it.
            inputs: Files and folders that the run reads, which must not be removed.
            owner: This process holds the folder's lock; another one of the same run removes nothing.

        Returns:
            The checkpoints to try, the first one first; none to start from the beginning.

        Raises:
            UserError: The folder cannot be written; the checkpoint is not there; a new run would mix with an old one.
        """
        self._refuse_both(resume, overwrite=overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            self._refuse_special()
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from None
        if not owner and overwrite:
            return []
        if owner:
            put_back(self.path)
        checkpoints = self.check(resume, overwrite=overwrite, inputs=inputs)
        if owner:
            remove_unfinished(self.path)
        if overwrite:
            self._remove_earlier_run()
        if owner:
            self._part_links()
            self.guard.unlink(missing_ok=True)  # of the run before
        return checkpoints

    def check(self, resume: str | None, *, overwrite: bool = False, inputs: Iterable[str] = ()) -> list[Path]:
        """Refuse what `prepare` refuses of what lies in the folder, change nothing, and return what it returns.

        Args:
            resume: See `prepare`.
            overwrite: See `prepare`.
            inputs: See `prepare`.

        Raises:
            UserError: See `prepare`.
        """
        self._refuse_both(resume, overwrite=overwrite)
        self._refuse_inputs(inputs, overwrite=overwrite)
        self._refuse_foreign(overwrite=overwrite)
        checkpoints = self._checkpoints(resume)
        if not checkpoints and not overwrite:
            self._refuse_earlier_run()
        return checkpoints

    def _refuse_both(self, resume: str | None, *, overwrite: bool) -> None:
        if overwrite and resume is not None:
            raise UserError(
                "found both --overwrite (remove what the earlier run left) and --resume (continue it); keep one"
            )

    def _refuse_inputs(self, inputs: Iterable[str], *, overwrite: bool) -> None:
        """Refuse a run that reads what it writes, replaces or removes."""
        inputs = list(inputs)
        found = ownership.reads_within(inputs, [*self.files, self.model, *self.checkpoints()])
        if found is not None:
            name, path = found
            does = "--overwrite would remove" if overwrite else "output.dir: the run writes, and may remove,"
            raise UserError(
                f"{does} {path}, and the recipe reads {name}; choose another folder with --set output.dir=PATH"
            )

    def _refuse_foreign(self, *, overwrite: bool) -> None:
        """Refuse to begin where something under a name of ours is the user's."""
        foreign = [path for path in self.files if not ownership.is_ours(path)]
        foreign += ownership.strangers_in_model(self.model, self.model_list)
        checkpoints = self.checkpoints()
        foreign += [path for path in checkpoints if not ownership.is_our_checkpoint(path)]
        if overwrite:  # removes them whole
            foreign += [each for path in checkpoints for each in ownership.strangers_in_checkpoint(path)]
        if foreign:
            shown = ", ".join(str(path) for path in foreign[:SHOWN]) + ", …" * (len(foreign) > SHOWN)
            raise UserError(
                f"output.dir: no run of ftkit wrote {shown}, or it was changed since; this run would replace or remove it. "
                "Move it away, or choose another folder with --set output.dir=PATH"
            )

    def _part_links(self) -> None:
        """Give the files that lines are added to an inode of their own: another name of theirs may be a backup."""
        for path in (self.metrics, self.divergences):
            with suppress(OSError):
                if path.lstat().st_nlink > 1:
                    write(path, path.read_text(encoding="utf-8", errors="replace"))

    def list_model(self, *, whole: bool) -> None:
        """Note the files of `model`: that they are about to be written, or, once they are whole, which they are."""
        self.model.mkdir(exist_ok=True)
        write(self.model_list, ownership.list_model(self.model, whole=whole))

    def write_recipe(self, text: str) -> None:
        """Write recipe.yaml under a comment with its checksum."""
        write(self.recipe, ownership.marked_recipe(text))

    def _checkpoints(self, resume: str | None) -> list[Path]:
        found = self.checkpoints()
        if resume is None:
            return []
        if resume == "auto":
            return self.newest_first()
        path = Path(os.path.expanduser(resume))
        if not path.is_dir():
            known = ", ".join(str(each) for each in found) or "none"
            raise UserError(f"--resume: no such checkpoint folder: {path}; checkpoints of this run: {known}")
        return [path]

    def _refuse_earlier_run(self) -> None:
        """Refuse to begin where an earlier run left what this one would overwrite or mix with."""
        otherwise = "replace that run with --overwrite, or choose another folder with --set output.dir=PATH"
        if found := self.newest_first():
            raise UserError(
                f"output.dir: {self.path} holds {found[0].name} of an earlier run; continue it with --resume auto, "
                f"{otherwise}"
            )
        for path, step in list(self.left().items())[-1:]:
            raise UserError(
                f"output.dir: {self.path} holds {path.name} of an earlier run, which went back to step {step} since and has "
                f"no checkpoint of that line here; name one with --resume PATH, {otherwise}"
            )
        if left := [path.name for path in (self.summary, self.model) if path.exists()]:
            raise UserError(
                f"output.dir: {self.path} holds {' and '.join(left)} of an earlier run, and no checkpoint to resume from; "
                f"{otherwise}"
            )

    def _remove_earlier_run(self) -> None:
        """Remove what an earlier run wrote here, and nothing else; the ranks of an outer job may all do it at once.

        Raises:
            UserError: One cannot be removed.
        """
        for path in (*self.files, self.model, *self.checkpoints()):
            try:
                with suppress(FileNotFoundError):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
            except OSError as error:
                raise UserError(f"--overwrite: {path} cannot be removed ({error.strerror}); remove it yourself") from None

    def read_summary(self, recipe: str) -> dict[str, Any]:
        """Return what came of a run that is here with its model; nothing where there is none, or of another recipe."""
        try:
            same = ownership.unmarked_recipe(self.recipe.read_text(encoding="utf-8")) == recipe
            found = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        ended = not isinstance(found, dict) or found.keys() & {"stopped", "saved"}
        return found if same and self.model.is_dir() and not ended else {}

    def keep_metrics_until(self, step: int) -> None:
        """Drop the lines of metrics.jsonl after a step: a resumed run writes them again."""
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step(line) <= step]
            write(self.metrics, "".join(f"{line}\n" for line in kept))


def append_line(path: Path, record: Any) -> None:
    """Add a line of JSON to a file; a full disk costs the line, and not the run."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json_line(record) + "\n")
    except OSError as error:
        logger.error("%s: a line could not be written: %s", path, error.strerror)


def step_of(checkpoint: Path) -> int:
    """Return the step that a folder checkpoint-N is of."""
    return int(checkpoint.name.rpartition("-")[2])


def line_of(checkpoint: Path) -> Line | None:
    """Return the line that a checkpoint is of; None where its list cannot be read, which is told when it is tried."""
    try:
        path = checkpoint / ownership.ENGINE_FOLDER / ownership.LISTING
        if not ownership.is_list(path):
            return None
        return _as_line(json.loads(path.read_bytes())["extra"].get(LINE, []))  # an earlier version noted none
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _as_line(noted: Any) -> Line | None:
    """Return a line that was read; None where it is none."""
    pairs = isinstance(noted, list) and all(isinstance(each, list) and len(each) == 2 for each in noted)
    return noted if pairs and all(type(number) is int for each in noted for number in each) else None


def _comes_by(line: Line, own: Line, step: int) -> bool:
    """Return whether a line comes by a checkpoint of some step that is of the line `own`."""
    return line[: len(own)] == own and (len(own) == len(line) or step <= line[len(own)][1])


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # cut off by the end of an earlier run
        return float("inf")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; what a link points to stays as it is."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    with open(partial, "x", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, marked as ours, whole or not at all; numbers without a JSON word (NaN, infinity) become null."""
    write(path, json.dumps(_plain(ownership.marked(dict(content))), indent=1) + "\n")


def json_line(content: Any) -> str:
    """Return one line of JSON, with null for NaN and infinity."""
    return json.dumps(_plain(content))


def _plain(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    if isinstance(content, float) and (content != content or content in (float("inf"), float("-inf"))):
        return None
    return content
