"""The checkpoints of a Trainer's run: written beside training, published as a whole, sealed, and retired.

A checkpoint is written under a hidden name. It gets the name `checkpoint-N` once every rank has written its part. Where
callbacks of others read the folder (`on_save`), or a subclass writes into it (`_save_checkpoint`), the save completes before
they run. What they write there stays, and what they change is sealed again, so that a resume does not take it for damage.

`best_model_checkpoint` follows the stock Trainer's rule, applied to the final names.

It refuses nothing: a save that fails costs one checkpoint and not the run. What it costs: nothing, except with callbacks of
others, where a save takes as long as its bytes take to the disk.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import PREFIX_CHECKPOINT_DIR, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from ftkit.engine.checkpoint.durable import make_folder, rank_zero, sync_folder, sync_tree
from ftkit.engine.checkpoint.manifest import MANIFEST
from ftkit.engine.checkpoint.saving import Saving, checkpoint_bytes
from ftkit.engine.checkpoint.sealed import (
    CONTENTS,
    BrokenCheckpoint,
    check_contents,
    rewrite_contents,
    write_contents,
)
from ftkit.errors import UserError
from ftkit.hf.trainer.callbacks import listeners
from ftkit.hf.trainer.checkpoint_files import check_state, readable
from ftkit.hf.weights.saving import check_savable, try_writing
from ftkit.output.ownership import ENGINE_FOLDER, is_list
from ftkit.output.replacing import UNFINISHED, remove_unfinished, replace

logger = logging.getLogger(__name__)

BOOKKEPT = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
"""Save strategies under which the Trainer keeps the best checkpoint's name."""


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written: its present and its final folder, and the engine's part of the work.

    `name` is what the run calls the final folder, `best_before` the run's best checkpoint as it was before this one.
    """

    temporary: Path
    final: Path
    name: str
    saving: Saving | None
    best_before: str | None


@dataclass
class RunCheckpoints:
    """The checkpoints of one Trainer on the engine.

    Attributes:
        problem: why the last checkpoint could not be written; None if it was.
        writing: the folder that stands in for the run's while the Trainer writes its files.
        sharded: whether that checkpoint has sharded weights and state.
        push_later: whether the hub waits for the checkpoint's final name.
        fresh: the checkpoint of this step, if code of others gets it.
        begun_in: the working folder of the last save, if its path begins there; to change it moves no checkpoint.
    """

    trainer: Any
    problem: str | None = None
    writing: Path | None = None
    sharded: bool = False
    push_later: bool = False
    unfinished: Unfinished | None = None
    fresh: Path | None = None
    begun: bool = False  # whether weights of the checkpoint that is being written were handed over
    begun_in: str = ""

    def save(self, run_folder: str, write: Callable[[], None]) -> None:
        """Begin a checkpoint: small files now, weights and state while training goes on. A collective.

        Args:
            run_folder: the folder in which the checkpoint will be.
            write: lets the Trainer write its files into `writing`.
        """
        trainer, state = self.trainer, self.trainer.state
        self.finish()  # one at a time
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self.begun_in = "" if os.path.isabs(run_folder) else os.getcwd()
        temporary, final = (Path(self.absolute(run_folder), each) for each in (f".{name}{UNFINISHED}", name))
        comm = trainer.units.comm
        if comm.rank == 0:
            remove_unfinished(final.parent)  # of a run that was killed while it wrote
        if not self._has_room(final.parent):
            return
        self.writing, self.sharded = temporary, not trainer.args.save_only_model
        self.push_later = self.begun = False
        problem, best_before = None, state.best_model_checkpoint
        best = comm.same(self._best(run_folder)) or best_before  # no collective while a rank's own files may fail
        try:
            with rank_zero(comm) as first:
                if first:
                    make_folder(temporary)
            write()
            if self.sharded and not self.begun:
                raise UserError(
                    "nothing wrote its weights: ftkit does so in _save_optimizer_and_scheduler, which is overridden without "
                    "super(). To save without optimizer state, set save_only_model=True"
                )
            state.best_model_checkpoint = best
            if comm.rank == 0:
                state.save_to_json(str(temporary / name / TRAINER_STATE_NAME))
        except Exception as error:  # whatever kept it from being written: it costs a checkpoint, and not the run
            problem = str(error) if isinstance(error, (OSError, UserError)) else f"{type(error).__name__}: {error}"
        finally:
            self.writing, self.sharded = None, False
        self.unfinished = Unfinished(
            temporary / name, final, os.path.join(run_folder, name), trainer.units.saving, best_before
        )
        if told := [text for text in comm.all(problem) if text is not None]:
            self._give_up(told[0])
            return
        read_now = comm.any(is_read_at_once(type(trainer), trainer.callback_handler.callbacks))
        if self.push_later or read_now or trainer.units.saving is None:
            self.finish()
        if read_now:
            trainer.units.freshen()  # they may look at the weights of the model, too
        self.fresh = final if read_now and self.problem is None else None

    def push_when_named(self, checkpoint_folder: str) -> None:
        """Take note that a checkpoint is to be uploaded, which is done under its final name: uploads read the folder."""
        self.push_later = True

    def absolute(self, name: str) -> str:
        """Return the path of a folder that was named when the last save began."""
        return os.path.join(self.begun_in, name)

    def _called(self, unfinished: Unfinished) -> Path:
        """Return the path of a checkpoint as the run calls it, unless that leads elsewhere now."""
        try:
            moved = bool(self.begun_in) and os.getcwd() != self.begun_in
        except OSError:  # the working folder was removed
            moved = True
        return unfinished.final if moved else Path(unfinished.name)

    def _best(self, run_folder: str) -> str | None:
        """Return the checkpoint of the best step, if it exists or is the one being written: the Trainer's own rule."""
        state = self.trainer.state
        if self.trainer.args.save_strategy not in BOOKKEPT or not state.best_global_step:
            return None
        folder = os.path.join(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        return folder if state.best_global_step == state.global_step or os.path.isdir(folder) else None

    def _has_room(self, run_folder: Path) -> bool:
        """Return, alike on all ranks, whether the disk has room for a checkpoint; if not, say so."""
        trainer = self.trainer
        if trainer.args.save_only_model:
            return True
        needed = checkpoint_bytes(trainer.units, trainer.sharded_optimizer, frozen=trainer.saves_frozen)
        free = trainer.units.comm.same(shutil.disk_usage(existing(run_folder)).free)
        if needed <= free:
            return True
        gib = 2**30
        self._say(trainer.state.global_step, f"{run_folder}: {needed / gib:.1f} GiB needed, {free / gib:.1f} free")
        return False

    def _say(self, step: int, problem: str) -> None:
        self.problem = problem
        if self.trainer.units.comm.rank == 0:
            logger.error("no checkpoint at step %d: %s. Training goes on", step, problem)

    def finish(self, *, wait: bool = True) -> None:
        """Give the checkpoint that is being written its name, once every rank has written all of it. A collective.

        One that cannot be written (a full disk) leaves nothing behind, and training goes on; `problem` says why.

        Args:
            wait: whether to wait until the checkpoint is written; else this returns at once if it is not.
        """
        unfinished = self.unfinished
        if unfinished is None:
            return
        try:
            if unfinished.saving is not None and wait:
                unfinished.saving.wait()
            elif unfinished.saving is not None and not unfinished.saving.poll():
                return
            with rank_zero(self.trainer.units.comm) as first:
                if first:
                    publish(unfinished.temporary, unfinished.final)
        except UserError as error:
            self._give_up(str(error))
            return
        self.unfinished = self.problem = None
        if self.trainer.units.comm.rank == 0:
            try:
                self.trainer.retire_checkpoints(self._called(unfinished))
            except OSError as error:
                logger.warning("an older checkpoint could not be removed: %s", error)
        if self.push_later:
            self.trainer._push_from_checkpoint(str(unfinished.final))

    def rescue(self) -> None:
        """Finish the checkpoint that is being written when an error ends training: its step is done.

        Several ranks would have to meet, and one whose error is not the others' would wait for them in vain: theirs is left.
        """
        self._seal_alone()
        unfinished = self.unfinished
        if unfinished is None or self.trainer.units.comm.world_size > 1:
            return
        try:
            self.finish()
        except Exception as problem:  # the error that ends training is the one to be told
            logger.error("%s could not be finished: %s", unfinished.final, problem)

    def _give_up(self, problem: str) -> None:
        """Leave nothing of the checkpoint that was being written, and say so. A collective."""
        unfinished, self.unfinished = self.unfinished, None
        assert unfinished is not None
        units, state = self.trainer.units, self.trainer.state
        if units.saving is not None:
            units.saving.give_up()
        if units.comm.rank == 0:
            remove_unfinished(unfinished.final.parent)
        best = state.best_model_checkpoint
        if best is not None and Path(best) in (Path(unfinished.name), unfinished.temporary):
            state.best_model_checkpoint = unfinished.best_before
        self._say(int(unfinished.final.name.rpartition("-")[2]), problem)

    def seal_again(self) -> None:
        """Seal what code of others has changed in the checkpoint of this step. A collective, after a step's callbacks."""
        if self.fresh is None:
            return
        folder, self.fresh = self.fresh, None
        comm = self.trainer.units.comm
        comm.barrier()  # another rank's callbacks may be writing still
        try:
            with rank_zero(comm) as first:
                if first:
                    self._seal(folder)
        except UserError as error:
            told = f"a callback has changed {folder / CONTENTS}, without which it is not whole ({error})"
            self._say(int(folder.name.rpartition("-")[2]), told)

    def _seal(self, folder: Path) -> None:
        if (folder / CONTENTS).is_file():  # a callback may have taken it elsewhere
            rewrite_contents(folder)
            sync_tree(folder)

    def _seal_alone(self) -> None:
        """Do so on rank 0 without the others, where an error has ended a step's callbacks."""
        folder, self.fresh = self.fresh, None
        if folder is None or self.trainer.units.comm.rank != 0:
            return
        try:
            self._seal(folder)
        except (OSError, UserError) as problem:
            logger.error("%s: the changes of a callback in it could not be sealed: %s", folder, problem)

    def check(self) -> None:
        """Raise UserError, before the first step, if what is to be saved could not be saved or not be read again."""
        trainer = self.trainer
        saves = trainer.args.save_strategy != SaveStrategy.NO
        if saves and not trainer.args.save_only_model:
            readable(SCHEDULER_NAME, trainer.lr_scheduler)
        if saves:
            self._try_small_files()
        try:
            check_savable(trainer.units)
            if not saves:
                self.try_model_files()
        except UserError as error:
            if saves:
                raise
            if trainer.units.comm.rank == 0:
                logger.warning("%s", error)

    def _try_small_files(self) -> None:
        """Write what lies beside the weights once, and throw it away; look for files where checkpoints will be.

        Raises:
            UserError: if that raises, as it would at every save, or there is one.
        """
        with rank_zero(self.trainer.units.comm) as first:
            if not first:
                return
            for path in Path(self.trainer.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                if path.name.rpartition("-")[2].isdecimal() and not path.is_dir():
                    raise UserError(f"{path} is there and is not a folder: move it, a checkpoint may get that name")
            self._write_once("no checkpoint could be saved", ", or set save_strategy='no'")

    def try_model_files(self) -> None:
        """Write what lies beside the weights of a model once, and throw it away. A collective.

        Raises:
            UserError: if that raises, as it would once the weights are written.
        """
        with rank_zero(self.trainer.units.comm) as first:
            if first:
                self._write_once("the model cannot be saved as it is", " before it is saved")

    def _write_once(self, told: str, otherwise: str) -> None:
        advice = f"Put that right in the model's config, its generation_config or the processing_class{otherwise}"
        try_writing(self.trainer.save_small_files, told, advice)


def is_read_at_once(trainer: type, callbacks: Iterable[Any]) -> bool:
    """Return whether code of others looks into a checkpoint as soon as it is saved.

    Args:
        trainer: the Trainer's class. One that overrides `_save_checkpoint` above the mixin may write into the folder.
        callbacks: the Trainer's callbacks. Those that define `on_save` get the folder.
    """
    foreign = (each for each in trainer.__mro__ if not each.__module__.startswith(("ftkit.", "transformers.", "trl.")))
    if any("_save_checkpoint" in vars(each) for each in foreign):
        return True
    return bool(listeners(callbacks, ["on_save"], ("ftkit",)))


def publish(temporary: Path, final: Path) -> None:
    """List a checkpoint's files, and give it its name, durably. Files of others under that name stay, and are not listed.

    Raises:
        UserError: if code of others wrote a file under the name of the list.
    """
    if os.path.lexists(temporary / CONTENTS) and not is_list(temporary / CONTENTS):  # ours, of a save that was broken off
        raise UserError(f"{CONTENTS}, which a subclass wrote into the checkpoint, is a name that ftkit needs: take another")
    write_contents(temporary, apart=(ENGINE_FOLDER,))
    sync_tree(temporary)
    replace(temporary, final)
    sync_folder(final.parent)
    remove_unfinished(final.parent)


def check_folder(folder: Path) -> None:
    """Compare a checkpoint's files with its list, the engine's apart, and look through those that resuming reads.

    Raises:
        BrokenCheckpoint: naming the first file that is missing, changed, not listed, or not what it should be.
    """
    listed = check_contents(folder)
    for name in (f"{ENGINE_FOLDER}/{MANIFEST}", TRAINER_STATE_NAME):
        if name not in listed:
            raise BrokenCheckpoint(f"{folder / CONTENTS}: {name} is not listed")
    check_state(folder)


def existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *Path(os.path.realpath(folder)).parents) if path.is_dir())
