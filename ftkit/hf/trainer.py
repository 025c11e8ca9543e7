"""`Trainer` on ftkit's engine: the loop is Hugging Face's, untouched; the places where weights and state are met are ours.

`TrainerMixin` overrides what the loop calls to place, wrap, optimize, save and load a model, and nothing of the loop itself,
so callbacks, schedulers, evaluation, logging integrations and subclasses (TRL's) keep working. With `ftkit=None` every
override steps aside. What the engine does not support is refused when the Trainer is built, and a run whose engine is not
in place when training begins stops there: there is no silent DDP.

Three things differ from the stock Trainer on purpose. A model whose loss ignores `num_items_in_batch` (a BERT classifier)
gets the gradient of one rank, where stock multiplies it by the number of ranks; checkpoints are written under a
temporary name and hold the weights in sharded form (with `save_only_model`, as a Hugging Face folder); and a run that is
resumed from its last step ends there, where stock makes one step more.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset
from transformers import PreTrainedModel, TrainerCallback
from transformers.debug_utils import DebugOption
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy, has_length, rotate_checkpoints

from ftkit.engine.checkpoint import load_checkpoint
from ftkit.engine.durable import make_folder, rank_zero, sync_folder, sync_tree
from ftkit.engine.manifest import MANIFEST
from ftkit.engine.optimizer import ShardedOptimizer
from ftkit.engine.saving import Saving, checkpoint_bytes
from ftkit.engine.seal import CONTENTS, BrokenCheckpoint, check_contents, write_contents
from ftkit.engine.shard import Units
from ftkit.errors import UserError
from ftkit.hf.accelerator import Accelerator, random_state, set_random_state, sharded_optimizer
from ftkit.hf.arguments import TrainingArguments
from ftkit.hf.blocks import units_of
from ftkit.hf.head import only_loss
from ftkit.hf.islands import (
    BATCHES,
    Islands,
    find_islands,
    islands_of,
    restore_islands,
    taken_by,
    widens_inputs,
)
from ftkit.hf.loading import find_weights, load_adapter, load_weights
from ftkit.hf.overflow import began_in, first_overflow
from ftkit.hf.plain import check_state, load_scheduler
from ftkit.hf.saving import save_config, save_model
from ftkit.hf.settings import EngineSettings

logger = logging.getLogger(__name__)

ENGINE_FOLDER = "ftkit"
"""Folder inside a Trainer checkpoint that holds the engine's files."""
ISLANDS = "islands"
"""Under which a checkpoint notes the fp32 islands of an fp16 model."""
UNFINISHED = ".writing"
"""How the name of a checkpoint ends that is being written; it begins with a point."""


class EngineCheck(TrainerCallback):
    """Stops a run that asked for the engine and would train without it."""

    def __init__(self, trainer: TrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare what will train with what was asked for."""
        optimizer = self.trainer.sharded_optimizer
        if units_of(self.trainer.model) is None or optimizer is None or optimizer.units.model is not self.trainer.model:
            raise UserError(
                "ftkit's engine was asked for (ftkit=...) but is not in place: a subclass overrides create_optimizer or the "
                "accelerator. Call super() there, or set ftkit=None"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say where a step overflowed; give a checkpoint its name, if all ranks have written it by now."""
        self.trainer.tell_overflow()
        self.trainer.finish_save(wait=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the checkpoint that is being written."""
        self.trainer.finish_save()


class TrainerMixin:
    """Puts ftkit's engine under a `transformers.Trainer` subclass: `class T(TrainerMixin, SFTTrainer)`.

    Raises:
        UserError: where the arguments ask for what the engine does not support.
    """

    # --- building

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.overflows: list[tuple[int, str]] = []  # (step, where) of those that were skipped
        super().__init__(*args, **kwargs)
        if self.args.ftkit is not None:
            self._train_batch_size = self.args.train_batch_size  # a whole step's, where blocks accumulate

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator as the Trainer does, then give it the engine."""
        parts = self._parts = self._take_whole_steps()
        super().create_accelerator_and_postprocess()
        if not hasattr(self.args, "ftkit"):
            raise UserError(
                f"{type(self.args).__name__} has no field 'ftkit': use ftkit.TrainingArguments, or "
                f"class C(ftkit.ArgumentsMixin, {type(self.args).__name__})"
            )
        if self.args.ftkit is None:
            return
        _refuse(self.args)
        settings = EngineSettings.of(self.args.ftkit)
        if self.args.activation_checkpointing and settings.activations == "auto":
            settings = EngineSettings(**{**vars(settings), "activations": "recompute"})
        self.accelerator.__class__ = Accelerator
        self.accelerator.adopt(
            settings,
            micro_batch_tokens=self.args.per_device_train_batch_size * _sequence_tokens(self.args, self.model) // parts,
            accumulation_steps=self.args.gradient_accumulation_steps,
            parts=parts,
        )

    def _take_whole_steps(self) -> int:
        """Where blocks accumulate, let the loader hand over a step's whole batch; return its number of micro-batches.

        The arguments are copied: those that the user gave say what the user said.
        """
        settings = getattr(self.args, "ftkit", None)
        micro_batches = self.args.gradient_accumulation_steps
        if settings is None or EngineSettings.of(settings).accumulate_in != "unit" or micro_batches == 1:
            return 1
        self.args = copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.args.per_device_train_batch_size *= micro_batches
        return micro_batches

    _parts = 1  # into which blocks divide a rank's batch
    _step_batches: Sequence[Any] = ()  # as the loader gave them
    _counts_items: bool | None = None  # whether the loss depends on num_items_in_batch; not known yet
    _hides_count = False  # whether the Trainer's own loss is asked for without it
    _asked = False
    _outputs_unread = False  # whether nobody looks at the outputs that are asked for with a loss
    _was_counted = False  # whether the last loss was asked for with the count of the global batch

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, once the engine that was asked for is in place.

        Raises:
            UserError: if it is not.
        """
        checks = any(isinstance(callback, EngineCheck) for callback in self.callback_handler.callbacks)
        if self.args.ftkit is not None and not checks:
            self.add_callback(EngineCheck(self))
        return super().train(*args, **kwargs)

    @property
    def engine_is_on(self) -> bool:
        """Whether this Trainer runs on ftkit's engine."""
        return isinstance(self.accelerator, Accelerator)

    @property
    def units(self) -> Units | None:
        """The units of the model, once it is sharded."""
        return units_of(self.model)

    @property
    def sharded_optimizer(self) -> ShardedOptimizer | None:
        """The optimizer behind accelerate's wrapper, once there is one."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer if isinstance(optimizer, ShardedOptimizer) else None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine_is_on:  # sharding places weights itself; a whole model may not fit
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard the model, let the Trainer (or the user) make the optimizer, and exchange it for its sharded form."""
        if not self.engine_is_on:
            return super().create_optimizer(model)
        if hasattr(self.model, "activation_checkpointing_disable"):
            self.model.activation_checkpointing_disable()  # the engine recomputes blocks itself
        units = self.accelerator.sharded(self.model)
        if self.sharded_optimizer is None:
            super().create_optimizer(model)
            self.optimizer = sharded_optimizer(self.optimizer, units)
        return self.optimizer

    # --- a step

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device; in 16 bits also cast its inputs (audio, pixels), which no autocast will do."""
        inputs = super()._prepare_inputs(inputs)
        dtype = self.units.policy.compute_dtype if self.engine_is_on and self.units is not None else None
        if dtype is None or dtype == torch.float32:
            return inputs
        cast = {key: narrowed(value, dtype) for key, value in inputs.items() if key not in self.label_names}
        return {**inputs, **cast}

    def tell_overflow(self) -> None:
        """Say, if the last step was skipped for an overflow, in which unit or module that began. A collective then."""
        optimizer = self.sharded_optimizer
        if not (optimizer.step_was_skipped and optimizer.overflowed and optimizer.loss_scale.dynamic):
            return
        place = began_in(optimizer.overflowed, [flat.name for flat in optimizer.units.trainable])
        known: list[str] = []
        batches: list[Any] = []
        if place is not None:
            told = f"in the backward of {place}"
        else:
            batches = self._inputs_of(self._step_batches)
            looked = (self.units.comm.all(first_overflow(self.model, batch)) for batch in batches)
            known = next((found for names in looked if (found := [name for name in names if name is not None])), [])
            told = f"in the forward of {known[0]}" if known else "at once in all units: the loss, or what came to it"
        self.overflows.append((self.state.global_step, told))
        if self.units.comm.rank == 0:
            text = "step %d: overflow %s; it is skipped, the loss scale is %g now"
            logger.warning(text, self.state.global_step, told, optimizer.loss_scale.value)
        if known and self._needs_islands() and not self.find_islands(batches) and self.units.comm.rank == 0:
            logger.warning("fp16: that forward is not finite in fp32 either")

    # --- fp32 islands of an fp16 model

    def _needs_islands(self) -> bool:
        """Whether the model computes in fp16."""
        return self.engine_is_on and self.units is not None and self.units.policy.compute_dtype == torch.float16

    _looked = False  # whether the run's first batches were looked at, or those of the run that it continues

    def look_for_islands(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Look at the run's first batches, unless that was done, or by the run that it continues. A collective.

        Raises:
            UserError: if their forward is not finite in fp16, and cannot be made so.
        """
        if self._looked or not self._needs_islands():
            return
        self._looked = True
        if not self.find_islands(self._inputs_of(batches)):
            raise UserError(
                "fp16: the model's forward on the first batches is not finite, and computing parts of it in fp32 does not "
                "mend it: compute in bf16 or fp32 (train.dtype, or ftkit={'dtype': ...}), or look at the weights"
            )
        if self.units.plan is not None and widens_inputs(self.units):
            self.units.plan.check_wide_inputs()

    def _inputs_of(self, batches: Iterable[Any]) -> list[Any]:
        """Return batches of the loader as the model itself would take them: on its device, as much as fits a forward."""
        taken = taken_by(self.model)
        parts = [self._prepare_inputs(part_of(batch, self._parts)) for batch in batches]
        return [part for part in parts if isinstance(part, Mapping) and part.keys() <= taken]

    def find_islands(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Let compute in fp32 what overflows in fp16 on these batches, say what that is, return whether all is finite.

        Args:
            batches: on their way into the model: this rank's, on its device. A collective.
        """
        first = self.units.comm.rank == 0
        if not batches:
            if first:
                logger.warning("fp16: activations were not looked at: the batches are no input of the model itself")
            return True
        before = dict(islands_of(self.units).found)
        found = find_islands(self.units, batches)
        if first:
            logger.log(logging.WARNING if found.found != before else logging.INFO, "fp16: fp32 islands: %s", found.told())
        return found.finite

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does, unless the run that is resumed was over: it would make one more step."""
        if self.engine_is_on and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch a step's batches; samples repeated to fill the last one do not count, as on one rank."""
        if self.engine_is_on:
            batches = self._step_batches = list(islice(epoch_iterator, num_batches))
            self._check_batches(len(batches))
            if batches and self._masks_repeated(batches[-1]):
                batches[-1] = self._without_repeated(batches[-1])
            self.look_for_islands(batches[:BATCHES])
            epoch_iterator = iter(batches)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _check_batches(self, number: int) -> None:
        """Raise where a stream gave ranks different numbers of batches: they would compute different blocks together."""
        loader = self.accelerator.gradient_state.active_dataloader
        if loader is not None and has_length(loader):
            return
        numbers = self.accelerator.sharded(self.model).comm.all(number)
        if len(set(numbers)) > 1:
            raise UserError(
                f"step {self.state.global_step + 1}: the ranks were given {numbers} batches; a stream must give each rank "
                "as many: split it evenly, or let rank 0 read it (accelerator_config={'dispatch_batches': True})"
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as the Trainer does; the first time find out whether it depends on `num_items_in_batch`.

        A loss that does not is a mean over one rank's micro-batch. The Trainer would multiply it by the ranks, and not
        divide it by the micro-batches of a step; without the count it does neither wrong. (A subclass's own loss is its own
        affair.) Where the loss is all that is wanted, the model may make it without its logits.
        """
        stock: Any = super().compute_loss
        plain = stock.__func__ is transformers.Trainer.compute_loss

        def compute(*args: Any) -> Any:
            nothing_else = plain and self.engine_is_on and not (self.label_smoother or self.compute_loss_func)
            with only_loss(self.model, wanted=nothing_else and (not return_outputs or self._outputs_unread)):
                return stock(*args)

        self._was_counted = torch.is_tensor(num_items_in_batch)
        if not self.engine_is_on or not self._was_counted:
            return compute(model, inputs, return_outputs, num_items_in_batch)
        if self._counts_items is None:
            uses: list[Any] = []
            random = random_state(self.accelerator.device)
            answer = compute(model, copy(inputs), return_outputs, watched(num_items_in_batch, uses))
            self._counts_items = len(uses) > 0
            self._hides_count = not uses and plain
            if not self._hides_count:
                loss, *outputs = answer if return_outputs else (answer,)
                return (loss.as_subclass(Tensor), *outputs) if return_outputs else loss.as_subclass(Tensor)
            del answer  # with its graph: two forwards' activations may not fit
            set_random_state(random, self.accelerator.device)
            if self.loss_is_scaled_for_ga is None:
                self.loss_is_scaled_for_ga = False
        return compute(model, inputs, return_outputs, None if self._hides_count else num_items_in_batch)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch as one rank would: samples repeated to fill the last batch do not count in the loss."""
        if self._masks_repeated(inputs):
            inputs = self._without_repeated(inputs)
        own = type(self).compute_loss is TrainerMixin.compute_loss  # somebody else's may look at the outputs
        self._was_counted, self._outputs_unread = False, prediction_loss_only and own
        try:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._outputs_unread = False
        if loss is not None and self._was_counted and self._counts_global_batch:
            loss = self.accelerator.reduce(loss, "mean")  # of ranks' parts of the sum, times the ranks, over the count
        return loss, logits, labels

    @property
    def _counts_global_batch(self) -> bool:
        """Whether the loss is known to be a sum over label tokens divided by their number in the global batch."""
        return self.engine_is_on and self._counts_items is True and self.args.average_tokens_across_devices

    def _masks_repeated(self, batch: Any) -> bool:
        """Return, alike on all ranks, whether some of the batch's samples are repeated and must not count."""
        if not (self.engine_is_on and isinstance(batch, Mapping) and "labels" in batch):
            return False
        if rows_left(self.accelerator, len(batch["labels"])) == 0:
            return False
        if self._counts_items is None and not self._asked:  # the very first batch: try what the loss depends on
            self._asked = True
            random = random_state(self.accelerator.device)
            count = self._get_num_items_in_batch([batch], self.args.device)
            with torch.no_grad():
                self.compute_loss(self.model, self._prepare_inputs(copy(batch)), num_items_in_batch=count)
            set_random_state(random, self.accelerator.device)
        return self._counts_global_batch

    def _without_repeated(self, batch: Any) -> Any:
        """Return the last batch with the labels of repeated samples masked; accelerate drops their outputs itself."""
        labels = batch["labels"].clone()
        own = rows_left(self.accelerator, len(labels)) - self.args.process_index * len(labels)
        labels[max(own, 0) :] = -100
        return {**batch, "labels": labels}

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Compute TRL's reference values, for DPO trainers; the model may be asked for them before training prepares it."""
        if self.engine_is_on and model is self.model:
            self.accelerator.sharded(model)
        return super().compute_ref_log_probs(model, inputs)

    # --- saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begin a checkpoint: small files now, weights and state while training goes on; `finish_save` gives it its name."""
        if not self.engine_is_on:
            return super()._save_checkpoint(model, trial)
        self.finish_save()  # one at a time
        run_folder = Path(self._get_output_dir(trial=trial))
        name = f"{transformers.trainer.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        temporary, final = run_folder / f".{name}{UNFINISHED}", run_folder / name
        comm = self.accelerator.sharded(self.model).comm
        if comm.rank == 0:
            remove_unfinished(run_folder)  # of a run that was killed while it wrote
        if not self._has_room(run_folder):
            return
        self._writing, self._checkpointing = temporary, not self.args.save_only_model
        self._push_later = False
        problem = None
        try:
            with rank_zero(comm) as first:
                if first:
                    make_folder(temporary)
            super()._save_checkpoint(model, trial)
            best = self.state.best_model_checkpoint
            if best is not None and Path(best).parent == temporary:
                self.state.best_model_checkpoint = str(final)
            if comm.rank == 0:
                self.state.save_to_json(str(temporary / name / TRAINER_STATE_NAME))
        except Exception as error:  # whatever kept it from being written: it costs a checkpoint, and not the run
            problem = str(error) if isinstance(error, (OSError, UserError)) else f"{type(error).__name__}: {error}"
        finally:
            self._writing, self._checkpointing = None, False
        self._unfinished = Unfinished(temporary / name, final, self.units.saving)
        if told := [text for text in comm.all(problem) if text is not None]:
            self._give_up(told[0])
        elif self._push_later or self.units.saving is None:
            self.finish_save()

    def _has_room(self, run_folder: Path) -> bool:
        """Return, alike on all ranks, whether the disk has room for a checkpoint; if not, say so."""
        if self.args.save_only_model:
            return True
        needed = checkpoint_bytes(self.units, self.sharded_optimizer, frozen=not isinstance(self.model, PeftModel))
        free = self.units.comm.same(shutil.disk_usage(existing(run_folder)).free)
        if needed <= free:
            return True
        gib = 2**30
        problem = f"{run_folder}: {needed / gib:.1f} GiB needed, {free / gib:.1f} free"
        self._say_not_saved(self.state.global_step, problem)
        return False

    def _say_not_saved(self, step: int, problem: str) -> None:
        self.save_problem = problem
        if self.units.comm.rank == 0:
            logger.error("no checkpoint at step %d: %s. Training goes on", step, problem)

    _unfinished: Unfinished | None = None

    def finish_save(self, *, wait: bool = True) -> None:
        """Give the checkpoint that is being written its name, once every rank has written all of it. A collective.

        One that cannot be written (a full disk) leaves nothing behind, and training goes on; it is told, and
        `save_problem` says why.

        Args:
            wait: for its end; else this returns at once where it is not reached.
        """
        unfinished = self._unfinished
        if unfinished is None:
            return
        try:
            if unfinished.saving is not None and wait:
                unfinished.saving.wait()
            elif unfinished.saving is not None and not unfinished.saving.poll():
                return
            self._publish(unfinished)
        except UserError as error:
            self._give_up(str(error))
            return
        self._unfinished = self.save_problem = None
        if self.units.comm.rank == 0:
            try:
                self.retire_checkpoints(unfinished.final)
            except OSError as error:
                logger.warning("an older checkpoint could not be removed: %s", error)
        if self._push_later:
            self._push_from_checkpoint(str(unfinished.final))

    def _give_up(self, problem: str) -> None:
        """Leave nothing of the checkpoint that was being written, and say so. A collective."""
        unfinished, self._unfinished = self._unfinished, None
        assert unfinished is not None
        if self.units.saving is not None:
            self.units.saving.give_up()
        if self.units.comm.rank == 0:
            shutil.rmtree(unfinished.temporary.parent, ignore_errors=True)
        self._say_not_saved(int(unfinished.final.name.rpartition("-")[2]), problem)

    save_problem: str | None = None
    """Why the last checkpoint could not be written; None if it was."""

    def _publish(self, unfinished: Unfinished) -> None:
        temporary, final = unfinished.temporary, unfinished.final
        with rank_zero(self.units.comm) as first:
            if first:
                write_contents(temporary, apart=(ENGINE_FOLDER,))
                sync_tree(temporary)
                if final.exists():  # the same step again, after a resume from before it
                    set_aside(final)
                temporary.rename(final)
                sync_folder(final.parent)
                remove_unfinished(final.parent)

    def retire_checkpoints(self, newest: Path) -> None:
        """Remove the checkpoints that are too many, as the Trainer does; called on rank 0 once `newest` is there."""
        rotate_checkpoints(
            output_dir=str(newest.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    _writing: Path | None = None
    _checkpointing = False
    _push_later = False

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint, once it has its final name: uploads read the folder while training goes on."""
        if self._writing is None:
            super()._push_from_checkpoint(checkpoint_folder)
        else:
            self._push_later = True

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writing) if self._writing is not None else super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the model from all ranks: a Hugging Face folder, or beside a sharded checkpoint only what is small."""
        if not self.engine_is_on:
            return super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        units = self.accelerator.sharded(self.model)
        pushed = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END  # the hub wants weights at each save
        if not self._checkpointing or isinstance(self.model, PeftModel) or pushed:
            save_model(units, folder, self.sharded_optimizer)
        with rank_zero(units.comm) as first:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                if self._checkpointing and not pushed and isinstance(self.model, PreTrainedModel):
                    save_config(self.model, folder, next(iter(units.dtypes.values())))
                tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.engine_is_on:
            return super()._save_optimizer_and_scheduler(output_dir)
        frozen = not isinstance(self.model, PeftModel)
        units, optimizer = self.accelerator.sharded(self.model), self.sharded_optimizer
        noted = {**self.noted, ISLANDS: islands_of(units).as_dict()} if self._needs_islands() else self.noted
        Saving(Path(output_dir, ENGINE_FOLDER), units, optimizer, extra=noted, frozen=frozen)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, transformers.trainer.SCHEDULER_NAME))

    # --- loading

    @property
    def noted(self) -> dict[str, Any]:
        """What a checkpoint notes of the run beside its state, for whoever continues it: anything JSON can hold."""
        return {}

    def take_noted(self, path: Path, noted: dict[str, Any]) -> None:
        """Take what the checkpoint that is continued has noted.

        Args:
            path: of the file that it stands in, for messages.

        Raises:
            UserError: if it is not what `noted` gives.
        """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave a checkpoint of ours for later, when the model is sharded; load weights of others now."""
        if not self.engine_is_on:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        if Path(resume_from_checkpoint, ENGINE_FOLDER, MANIFEST).is_file():
            check_folder(Path(resume_from_checkpoint))  # the engine's own files are compared as they are read
            return
        raise UserError(
            f"{resume_from_checkpoint}: no checkpoint of ftkit's engine ({ENGINE_FOLDER}/{MANIFEST} is missing). A stock "
            "checkpoint's optimizer state cannot be resumed; to start from its weights, give the folder as the model"
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.engine_is_on:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        frozen = not isinstance(self.model, PeftModel)
        manifest = folder / ENGINE_FOLDER / MANIFEST
        extra = load_checkpoint(folder / ENGINE_FOLDER, self.units, self.sharded_optimizer, frozen=frozen)
        islands = extra.pop(ISLANDS, None)
        if islands is not None and self._needs_islands():
            restore_islands(self.units, Islands.from_dict(islands, str(manifest)))
            self._looked = True
        self.take_noted(manifest, extra)
        scheduler = folder / transformers.trainer.SCHEDULER_NAME
        if not scheduler.is_file():
            raise UserError(f"{folder}: {scheduler.name} is missing; the learning rate could not go on where it was")
        load_scheduler(scheduler, self.lr_scheduler)

    def _load_best_model(self) -> None:
        if not self.engine_is_on:
            return super()._load_best_model()
        self.finish_save()
        folder = Path(self.state.best_model_checkpoint)
        units, optimizer = self.accelerator.sharded(self.model), self.sharded_optimizer
        if (folder / ENGINE_FOLDER / MANIFEST).is_file():
            load_checkpoint(folder / ENGINE_FOLDER, units, optimizer, frozen=not isinstance(self.model, PeftModel))
        elif isinstance(self.model, PeftModel):
            load_adapter(units, folder, optimizer)
        else:
            load_weights(units, find_weights(str(folder)), optimizer=optimizer, init_missing=False)


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


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written: its present and its final folder, and the engine's part of the work."""

    temporary: Path
    final: Path
    saving: Saving | None


def set_aside(checkpoint: Path) -> None:
    """Take a checkpoint its name; what is left is removed as an unfinished one is."""
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}-old{UNFINISHED}"))


def remove_unfinished(run_folder: Path) -> None:
    """Remove what bears no final name: checkpoints that were not finished, or that were set aside."""
    for leftover in run_folder.glob(f".{transformers.trainer.PREFIX_CHECKPOINT_DIR}-*{UNFINISHED}"):
        shutil.rmtree(leftover, ignore_errors=True)


def existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())


def part_of(batch: Any, parts: int) -> Any:
    """Return the first of the `parts` into which blocks will divide a batch: as much as one forward may hold."""
    if parts == 1 or not isinstance(batch, Mapping):
        return batch
    rows = max((len(each) for each in batch.values() if torch.is_tensor(each) and each.dim()), default=0)
    return {
        key: each.tensor_split(parts)[0] if torch.is_tensor(each) and each.dim() and len(each) == rows else each
        for key, each in batch.items()
    }


def narrowed(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of fp32 in `dtype`, and anything else as it is."""
    return value.to(dtype) if torch.is_tensor(value) and value.dtype == torch.float32 else value


def watched(number: Tensor, uses: list[Any]) -> Tensor:
    """Return `number` as a tensor that notes in `uses` every function that computes with it."""

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ != "__get__":  # to read its shape or device is no use
                uses.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    return number.as_subclass(Watched)


def rows_left(accelerator: Any, rows: int) -> int:
    """Return how many samples all ranks' present batches of `rows` hold, if they are an epoch's last and are not full.

    0 otherwise, and where it cannot be told (a stream, samples laid end to end in one row): there repeated samples count,
    as in the Trainer.
    """
    state = accelerator.gradient_state
    if not state.end_of_dataloader or accelerator.num_processes == 1:
        return 0
    loader, ranks, split = state.active_dataloader, accelerator.num_processes, False
    sampler = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # accelerate's shard, and what skips batches after a resume
        split = split or getattr(sampler, "split_batches", False)
        sampler = sampler.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler or sampler.drop_last:
        return 0
    samples = sampler.batch_size if split else sampler.batch_size * ranks
    return len(sampler.sampler) % samples if rows * ranks == samples else 0


def _sequence_tokens(args: Any, model: Any) -> int:
    """Return the tokens of one sequence, for the memory estimate: what the arguments say, else the model's limit or 2048."""
    said = getattr(args, "max_length", None) or getattr(args, "max_seq_length", None)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return int(said or min(limit or 2048, 2048))


def _refuse(args: Any) -> None:
    """Raise for arguments that the engine cannot honour."""
    refused = {
        "deepspeed": "it is another engine",
        "fsdp": "it is another engine",
        "parallelism_config": "tensor, context and pipeline parallelism are not supported",
        "auto_find_batch_size": "it would rebuild a sharded model; give memory instead (ftkit={'device_gib': ...})",
        "torch_compile": "compiled blocks are not supported",
        "use_liger_kernel": "it patches blocks that the engine has taken over",
        "fp16_full_eval": "evaluation uses the compute dtype already",
        "bf16_full_eval": "evaluation uses the compute dtype already",
        "enable_jit_checkpoint": "ranks would save at different steps",
        "sync_ref_model": "it adds two models element by element, whose elements lie in shards",
        "save_on_each_node": "all ranks write into one folder, which every machine must see",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise UserError(
                f"{name}={getattr(args, name)!r} cannot be used with ftkit's engine: {reason}. Set ftkit=None to train "
                "without it"
            )
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        raise UserError("debug=underflow_overflow cannot be used with ftkit's engine: the weights it looks at lie elsewhere")
    if args.n_gpu > 1:
        raise UserError(
            f"one process sees {args.n_gpu} GPUs, and the Trainer would copy the model to all of them: start one rank a GPU "
            f"(torchrun --nproc-per-node {args.n_gpu} ...) or `ftkit finetune`"
        )
    if not args.accelerator_config.even_batches:
        raise UserError("accelerator_config.even_batches=False: ranks with fewer batches would leave the others waiting")


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on ftkit's engine. Takes `ftkit.TrainingArguments`."""

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        super().__init__(model, args if args is not None else TrainingArguments("tmp_trainer"), *others, **kwargs)
