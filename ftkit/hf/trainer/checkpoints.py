"""The checkpoints of a Trainer's run: written beside training and published when they are complete.

A checkpoint is written under a hidden name. Rank 0 renames it to `checkpoint-N` when every rank has written its part.
`contents.json` lists the files of ftkit and the Trainer, with checksums. Files that are added later are not listed, and a
resume ignores them. A callback with `on_save`, or an override of `_save_checkpoint`, finds a complete checkpoint: for
these the save completes first.

Small files are pickles. They are read with torch's restricted unpickler only, which runs no code.

Cost: small files, an adapter and a whole model are written at once. Sharded weights and state are written beside training,
unless an earlier save is running, or a callback, an override or an upload reads the checkpoint.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import PREFIX_CHECKPOINT_DIR, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import HubStrategy, SaveStrategy

from ftkit.engine.checkpoint.durable import all_ranks, make_folder, rank_zero, sync_folder, sync_tree, text_of
from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.manifest import ENGINE_FOLDER, MANIFEST
from ftkit.engine.checkpoint.saving import Saving
from ftkit.engine.checkpoint.sealed import BrokenCheckpoint, check_contents, write_contents
from ftkit.errors import UserError
from ftkit.hf.load.model import find_weights, load_adapter, load_weights
from ftkit.hf.save.model import check_savable, save_arguments, save_config, save_model
from ftkit.output.run_folder import UNFINISHED, RunFolder, publish, remove_unfinished, retire

logger = logging.getLogger(__name__)


@dataclass
class Unfinished:
    """A checkpoint that is being written: `temporary` becomes `final`. `best_before` is the best checkpoint if it fails."""

    temporary: Path
    final: Path
    best_before: str | None
    saving: Saving | None = None


@dataclass
class RunCheckpoints:
    """The checkpoints of one Trainer.

    Attributes:
        problem: Why the last checkpoint could not be written; None if it was.
        published: Name of the last complete checkpoint of this process.
        writing: Folder that replaces the run's folder while the Trainer writes its files.
        push_later: Whether the checkpoint is uploaded when it is published.
    """

    trainer: Any
    problem: str | None = None
    published: str | None = None
    writing: Path | None = None
    push_later: bool = False
    unfinished: Unfinished | None = None

    @property
    def saves_frozen(self) -> bool:
        """Whether checkpoints contain frozen weights, too: an adapter's base is loaded from its own folder."""
        return not isinstance(self.trainer.model, PeftModel)

    def check(self) -> None:
        """Before the first step, raise UserError if the model cannot be saved; only warn if the run saves no checkpoints."""
        try:
            check_savable(self.trainer.units)
        except UserError as error:
            if self.trainer.args.save_strategy != SaveStrategy.NO:
                raise
            if self.trainer.units.comm.rank == 0:
                logger.warning("%s", error)

    def save(self, run_folder: str, write: Callable[[], None]) -> None:
        """Begin a checkpoint: write small files now, weights and state while training goes on. A collective.

        A full disk, or a weight that is not finite, costs the checkpoint and not the run; `problem` says why.

        Args:
            run_folder: Folder of the run's checkpoints.
            write: Lets the Trainer write its files into `writing`.

        Raises:
            Exception: A file cannot be written for a reason that would fail each save.
        """
        self.finish()  # one at a time
        trainer, state, comm = self.trainer, self.trainer.state, self.trainer.units.comm
        name, best_name = (f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in (state.global_step, state.best_global_step))
        final, best, before = Path(run_folder, name), Path(run_folder, best_name), state.best_model_checkpoint
        is_best = comm.same(best == final or best.is_dir())
        self.writing, self.push_later = final.with_name(f".{name}{UNFINISHED}"), False
        unfinished = Unfinished(self.writing / name, final, before)
        try:
            with all_ranks(comm, BrokenCheckpoint):
                with rank_zero(comm) as first:
                    if first:
                        remove_unfinished(final.parent)  # of a run that was killed
                        make_folder(self.writing)
                write()
                state.best_model_checkpoint = str(best) if is_best else before  # the Trainer looked in `writing`
                if comm.rank == 0:
                    state.save_to_json(str(unfinished.temporary / TRAINER_STATE_NAME))
        except Exception as error:
            self._give_up(unfinished, text_of(error))
            # torch.save raises RuntimeError on a full disk. A state that cannot be read back would fail at each save.
            passes = isinstance(error, (RuntimeError, UserError)) and not isinstance(error, BrokenCheckpoint)
            if comm.any(not passes):
                raise
            return
        finally:
            self.writing = None
        self.unfinished, unfinished.saving = unfinished, trainer.units.saving
        read_now = comm.any(is_read_at_once(trainer))
        if read_now or self.push_later or unfinished.saving is None:
            self.finish()
        if read_now:
            trainer.units.freshen()  # callbacks may also read weights

    def finish(self, *, wait: bool = True) -> None:
        """Publish the checkpoint that is being written. A collective.

        Args:
            wait: Wait until every rank has written its part. Otherwise return at once if one has not.
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
                    complete(unfinished.temporary, unfinished.final)
        except UserError as error:
            self._give_up(unfinished, str(error))
            return
        self.unfinished, self.problem, self.published = None, None, unfinished.final.name
        if self.trainer.units.comm.rank == 0:
            try:
                state = self.trainer.state
                rotate(unfinished.final, self.trainer.args.save_total_limit, state.best_model_checkpoint)
            except OSError as error:
                logger.warning("an older checkpoint could not be removed: %s", error)
        if self.push_later:
            self.trainer._push_from_checkpoint(str(unfinished.final))

    def rescue(self) -> None:
        """Finish the checkpoint that is being written when an error ends training, on one rank.

        With several ranks, a rank that met the error alone would wait for the others: the checkpoint is left unfinished.
        """
        if self.unfinished is not None and self.trainer.units.comm.world_size == 1:
            with suppress(Exception):  # the error that ended training is raised
                self.finish()

    def _give_up(self, unfinished: Unfinished, problem: str) -> None:
        """Remove the checkpoint that was being written, and log why. A collective."""
        units = self.trainer.units
        if units.saving is not None:
            units.saving.give_up()
        self.trainer.state.best_model_checkpoint = unfinished.best_before
        self.unfinished, self.problem = None, problem
        if units.comm.rank == 0:
            remove_unfinished(unfinished.final.parent)
            logger.error("%s was not saved: %s", unfinished.final, problem)

    # --- the model and its state

    def save_model(self, folder: Path) -> None:
        """Write the model into a folder; beside a sharded checkpoint, only its small files. A collective."""
        trainer, units = self.trainer, self.trainer.engine
        sharded = self.writing is not None and not trainer.args.save_only_model
        pushed = trainer.args.push_to_hub and trainer.args.hub_strategy != HubStrategy.END  # the hub wants weights each time
        if not sharded or isinstance(trainer.model, PeftModel) or pushed:
            save_model(units, folder, trainer.sharded_optimizer)
        with rank_zero(units.comm) as first:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                if sharded and not pushed and isinstance(trainer.model, PreTrainedModel):
                    save_config(trainer.model, folder, next(iter(units.dtypes.values())))
                tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                save_arguments(trainer.args, folder)

    def save_state(self, folder: Path) -> None:
        """Write sharded weights and optimizer state, and the scheduler. A collective."""
        trainer = self.trainer
        noted = {**trainer.noted, **trainer.overflow_scan.noted()}
        optimizer = trainer.sharded_optimizer
        saving = Saving(folder / ENGINE_FOLDER, trainer.engine, optimizer, extra=noted, frozen=self.saves_frozen)
        if self.writing is None:  # called by hand: nothing else waits for it
            saving.wait()
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
            read_plain(folder / SCHEDULER_NAME)  # a state that a resume could not read fails now

    def load_state(self, folder: Path) -> None:
        """Load everything that `save_state` wrote. A collective."""
        trainer, manifest = self.trainer, folder / ENGINE_FOLDER / MANIFEST
        optimizer = trainer.sharded_optimizer
        noted = load_checkpoint(folder / ENGINE_FOLDER, trainer.engine, optimizer, frozen=self.saves_frozen)
        trainer.overflow_scan.restore(noted)
        trainer.take_noted(manifest, noted)
        load_scheduler(folder / SCHEDULER_NAME, trainer.lr_scheduler)

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint, of ours or of weights alone, and nothing else of it. A collective."""
        trainer, units, optimizer = self.trainer, self.trainer.engine, self.trainer.sharded_optimizer
        if is_ours(folder):
            load_checkpoint(folder / ENGINE_FOLDER, units, optimizer, frozen=self.saves_frozen, state=False)
        elif isinstance(trainer.model, PeftModel):
            load_adapter(units, folder, optimizer)
        else:
            load_weights(units, find_weights(str(folder)), optimizer=optimizer)

    def check_resumable(self, folder: Path) -> None:
        """Raise UserError unless a folder is a complete checkpoint of the engine, and the engine is on."""
        if not is_ours(folder):
            raise UserError(
                f"{folder}: no checkpoint of ftkit's engine; to start from its weights, give the folder as the model"
            )
        if not self.trainer.engine_is_on:
            raise UserError(
                f"{folder}: was saved by ftkit's engine, and ftkit=None cannot read it: leave ftkit on (ftkit='auto')"
            )
        check_folder(folder)  # the engine's own files are compared as they are read


def is_ours(folder: Path) -> bool:
    """Return whether a checkpoint has weights and state of the engine."""
    return (folder / ENGINE_FOLDER / MANIFEST).is_file()


def is_read_at_once(trainer: Any) -> bool:
    """Return whether a user's `_save_checkpoint`, or a callback's `on_save`, may read the checkpoint right after a save."""
    users = (each for each in type(trainer).__mro__ if not each.__module__.startswith(("ftkit.", "transformers.", "trl.")))
    callbacks = (each for each in trainer.callback_handler.callbacks if not type(each).__module__.startswith("ftkit."))
    return any("_save_checkpoint" in vars(each) for each in users) or any(
        getattr(type(each), "on_save", None) is not TrainerCallback.on_save for each in callbacks
    )


def complete(temporary: Path, final: Path) -> None:
    """List a checkpoint's files and rename it, durably. It replaces a checkpoint of that name."""
    write_contents(temporary, apart=(ENGINE_FOLDER,))
    sync_tree(temporary)
    publish(temporary, final)
    sync_folder(final.parent)
    remove_unfinished(final.parent)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the checkpoints beyond `save_total_limit` that were written first.

    As transformers' `rotate_checkpoints`, it keeps the newest and the best. That function orders checkpoints by step if all
    were written within a second, and then removes the newest one after a resume from an earlier step.
    """
    there = RunFolder(newest.parent).checkpoints()
    others = [path for path in there if path.name not in (newest.name, Path(best or "").name)]
    if limit:
        for path in others[: max(0, len(there) - limit)]:
            retire(path)


# --- reading


def check_folder(folder: Path) -> None:
    """Compare a checkpoint's files with its list, except those of the engine, and read its pickles.

    Raises:
        BrokenCheckpoint: A file is missing, changed, or a pickle with code; the text names it.
    """
    for name in check_contents(folder):
        if name == SCHEDULER_NAME or name.startswith("rng_state"):
            read_plain(folder / name)


def read_plain(path: Path) -> Any:
    """Return numbers, text, tensors and NumPy arrays that torch.save wrote.

    Raises:
        BrokenCheckpoint: The file is missing or broken, or is a pickle with code, which is not run.
    """
    try:
        with safe_globals():
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that torch.save did not write raise errors of many classes
        named = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        problem = f"a pickle that names {named[1]}, which could run code; it was not run" if named else text_of(error)
        raise BrokenCheckpoint(f"{path}: not read: {problem.strip().splitlines()[0]:.300}") from error


def load_scheduler(path: Path, scheduler: Any) -> None:
    """Load a scheduler's state. A `LambdaLR` (all schedules by name) continues with the rates of this run's schedule."""
    state, inner = read_plain(path), getattr(scheduler, "scheduler", scheduler)
    scheduler.load_state_dict(state)
    if type(inner) is LambdaLR and not any(state["lr_lambdas"]):  # a rule with a state continues with that
        rates = [base * rule(inner.last_epoch) for base, rule in zip(inner.base_lrs, inner.lr_lambdas)]
        for group, last, rate in zip(inner.optimizer.param_groups, inner._last_lr, rates, strict=True):
            if group["lr"] == last:  # otherwise a callback has set it
                group["lr"] = rate
        inner._last_lr = rates
