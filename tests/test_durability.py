"""A power failure at any point of a save: what was not synced is lost, and `--resume auto` finds a valid checkpoint.

A kill loses nothing that the page cache holds, so kills prove nothing about power. Here a run's folder is watched: which
bytes of which file, and which names of which folder, were synced when. Before and after every sync, rename and removal the
folder is built anew as a drive may hold it then, in each of three ways, and resume is asked for a checkpoint.

    nothing more    file contents as of their last sync (else empty), names as of their folder's last sync
    names ahead     all names, contents as of their last sync, the rest of the file zeros: as ext4 does without auto_da_alloc
    contents ahead  names as of their folder's last sync, contents as they are
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch

from ftkit.engine.comm.communicator import Communicator
from ftkit.output.run_folder import RunFolder
from ftkit.train.resume import first_whole
from tests.jobs import job, recipe

WAYS = ("nothing more", "names ahead", "contents ahead")


class Drive:
    """What a drive certainly holds of a folder, and what it may hold.

    Files are known by inode: a rename changes names, not contents.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[int, dict[str, int]] = {}  # of each folder, as of its last sync
        self.contents: dict[int, bytes] = {}  # of each file, likewise
        self.kinds: dict[int, bool] = {}  # whether an inode is a folder

    def now(self) -> tuple[dict[int, dict[str, int]], dict[int, bytes]]:
        """Return names and contents as they are."""
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, bytes] = {}
        todo = [self.root]
        while todo:
            folder = todo.pop()
            own = names.setdefault(folder.stat().st_ino, {})
            for path in folder.iterdir():
                try:
                    told = path.stat()
                    own[path.name] = told.st_ino
                    self.kinds[told.st_ino] = stat.S_ISDIR(told.st_mode)
                    if self.kinds[told.st_ino]:
                        todo.append(path)
                    else:
                        contents[told.st_ino] = path.read_bytes()
                except FileNotFoundError:  # removed by another thread meanwhile
                    own.pop(path.name, None)
        return names, contents

    def synced(self, handle: int) -> None:
        """Take note of a sync that has returned."""
        told = os.fstat(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if not path.is_relative_to(self.root):
            return
        if stat.S_ISDIR(told.st_mode):
            self.names[told.st_ino] = {each.name: each.stat().st_ino for each in path.iterdir()}
            self.kinds |= {each.stat().st_ino: each.is_dir() for each in path.iterdir()}
        else:
            self.contents[told.st_ino] = path.read_bytes()

    def build(self, way: str, out: Path) -> None:
        """Write the folder as it may be found after a power failure now."""
        names, contents = self.now()
        listed = names if way == "names ahead" else self.names
        self._fill(out, self.root.stat().st_ino, listed, contents, way)

    def _fill(self, out: Path, inode: int, listed: dict, contents: dict[int, bytes], way: str) -> None:
        out.mkdir()
        for name, member in listed.get(inode, {}).items():
            if self.kinds[member]:
                self._fill(out / name, member, listed, contents, way)
            elif way == "contents ahead":
                (out / name).write_bytes(contents.get(member, self.contents.get(member, b"")))
            else:
                data = self.contents.get(member, b"")
                if way == "names ahead":
                    data = data.ljust(len(contents.get(member, b"")), b"\0")
                (out / name).write_bytes(data)


class PowerFailures:
    """Asks resume for a checkpoint before and after every event on the drive, from the first checkpoint on."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.drive, self.scratch = Drive(root), scratch
        self.asked = 0
        self.within: set[str] = set()
        self.problems: list[str] = []
        self.busy = False

    def ask(self, event: str) -> None:
        """Build what may be found now, in each way, and let resume choose."""
        if self.busy or not any(name.startswith("checkpoint-") for name in self._durable_names()):
            return
        self.busy = True
        try:
            for way in WAYS:
                out = self.scratch / f"{self.asked}-{way.replace(' ', '-')}"
                self.drive.build(way, out)
                found = [str(path) for path in RunFolder(out).checkpoints()[::-1]]
                try:
                    chosen = first_whole(found, Communicator(torch.device("cpu")), lambda line: None)
                except ValueError as error:
                    chosen, found = None, [str(error)]
                if chosen is None:
                    self.problems.append(f"{event}, {way}: {found}")
            self.asked += 1
            self.within.add(event.partition(" ")[0])
        finally:
            self.busy = False

    def _durable_names(self) -> list[str]:
        return list(self.drive.names.get(self.drive.root.stat().st_ino, {}))

    def around(self, name: str, act):
        """Return a call of the system that resume is asked around."""

        def call(*args, **kwargs):
            if self.busy:
                return act(*args, **kwargs)
            self.ask(f"{name} before {args[:1]}")
            result = act(*args, **kwargs)
            if name == "fsync":
                self.drive.synced(args[0])
            self.ask(f"{name} after {args[:1]}")
            return result

        return call


def failing_job(text: str, folder: str, scratch: str, without: str | None) -> tuple[int, set[str], list[str]]:
    """Be the one rank of a run; with `without`, one kind of sync is left out."""
    failures = PowerFailures(Path(folder).resolve(), Path(scratch))
    with ExitStack() as stack:
        for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
            stack.enter_context(mock.patch.object(os, name, failures.around(name, getattr(os, name))))
        if without is not None:
            stack.enter_context(mock.patch(without, return_value=None))
        job(text)
    return failures.asked, failures.within, failures.problems


@pytest.mark.slow
@pytest.mark.parametrize("without", [None, "ftkit.hf.trainer.checkpoints.sync_tree"])
def test_resume_finds_a_checkpoint_whatever_was_not_synced(without, home, worlds, tmp_path):
    """Where files are not synced before their folder gets its name, this test must say so."""
    out = f"power-{'all' if without is None else 'less'}"
    folder, scratch = home / out, tmp_path / "found"
    folder.mkdir()
    scratch.mkdir()
    output = {"dir": str(folder), "save_every_steps": 2, "keep": 1}
    text = recipe(home, out, output=output, train={"batch_tokens": 192, "max_steps": 6}, eval=None)
    asked, within, problems = worlds[1].run(failing_job, text, str(folder), str(scratch), without, seconds=240.0)[0]
    print(f"{asked} points, three ways each")
    assert asked > 50
    assert within >= {"fsync", "rename", "unlink", "rmdir"}
    assert bool(problems) == (without is not None), problems[:5]
