"""`Trainer` on ftkit's engine: the loop is Hugging Face's, untouched; the places where weights and state are met are ours.

`TrainerMixin` overrides what the loop calls to place, wrap, optimize, save and load a model, and nothing of the loop itself,
so callbacks, schedulers, evaluation, logging integrations and subclasses (TRL's) keep working. With `ftkit=None` every
override steps aside. What the engine does not support is refused when the Trainer is built, and a run whose engine is not
in place when training begins stops there: there is no silent DDP.

Five things differ from the stock Trainer on purpose. The loss of several ranks or micro-batches is that of one (`loss.py`:
a BERT classifier gets the gradient of one rank, where stock multiplies it by the number of ranks); random numbers of a step
depend on the micro-batch and not on the rank, where a step has several; checkpoints are written under a
temporary name and hold the weights in sharded form (with `save_only_model`, as a Hugging Face folder); a run that is
resumed from its last step ends there, where stock makes one step more; and with a longer `max_steps` or another schedule
the first resumed step has the new schedule's rate, where stock has the former one's.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.debug_utils import DebugOption
from transformers.trainer_utils import HubStrategy, has_length, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from ftkit.config.engine import EngineSettings
from ftkit.engine.checkpoint.durable import rank_zero
from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.manifest import MANIFEST
from ftkit.engine.checkpoint.saving import Saving
from ftkit.engine.optim.loss_scale import LEAST_SCALE
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import Diverged, UserError
from ftkit.hf.models.attention import is_packed
from ftkit.hf.models.fp32_modules import Fp32Modules
from ftkit.hf.models.fp32_search import (
    BATCHES,
    find_fp32_modules,
    restore_fp32_modules,
    taken_by,
    widens_inputs,
)
from ftkit.hf.models.overflow import began_in, first_overflow
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.hf.reading import read_by_all
from ftkit.hf.sharding import units_of
from ftkit.hf.trainer.accelerator import Accelerator, rule_for, sharded_optimizer
from ftkit.hf.trainer.argument_names import check_arguments, check_length_column, unknown_labels
from ftkit.hf.trainer.arguments import TrainingArguments
from ftkit.hf.trainer.callbacks import AFTER_AN_UPDATE, BEFORE_A_FORWARD, check_callbacks, listeners, overriders
from ftkit.hf.trainer.checkpoint_files import load_scheduler
from ftkit.hf.trainer.in_place import check_order, engine_trainer
from ftkit.hf.trainer.loss import LossMixin
from ftkit.hf.trainer.run_checkpoints import ENGINE_FOLDER, RunCheckpoints, check_folder
from ftkit.hf.weights.loading import find_weights, load_adapter, load_plain, load_weights
from ftkit.hf.weights.nonfinite import LossRecord, judged_by_log, made_no_update, weights_not_finite
from ftkit.hf.weights.saving import save_arguments, save_config, save_model
from ftkit.output.ownership import is_rotated
from ftkit.plan.choice import Plan
from ftkit.spec.strategy import AUTO, STEP, UNIT
from ftkit.spec.update_rules import ADAMW, UpdateRule, rule_of

logger = logging.getLogger(__name__)

KNOWN = ("ftkit", "transformers", "trl")
"""Packages whose Trainers and callbacks read no weights between an update and the next forward."""

FP32_MODULES = "islands"  # as checkpoints have it since their first format
"""Under which a checkpoint notes the fp32 modules of an fp16 model."""
LOSSES = "losses_of_steps"
"""Under which it notes how many steps there were, and how many of them had a loss that was not finite."""


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
        if (left := self.trainer.left_to_load) is not None:
            raise UserError(
                f"the weights of {left} were not read: _load_optimizer_and_scheduler, in which ftkit reads them, is "
                "overridden without super(). To continue with a new optimizer, give the saved weights as the model "
                "(trainer.save_model, ftkit export) and train without resume_from_checkpoint"
            )
        begun = TrainerState()
        begun.compute_steps(args, state.max_steps)
        for name in ("logging_steps", "eval_steps"):  # 0 in a checkpoint of a run that did not log or evaluate by steps
            setattr(state, name, getattr(state, name) or getattr(begun, name))
        self.trainer.tell_late_readers()
        self.trainer.checkpoints.check()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say where a step overflowed; give a checkpoint its name, if all ranks have written it by now."""
        self.trainer.tell_overflow()
        self.trainer.finish_save(wait=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the checkpoint that is being written."""
        self.trainer.finish_save()


class TrainerMixin(LossMixin):
    """Puts ftkit's engine under a `transformers.Trainer` subclass: `class T(TrainerMixin, SFTTrainer)`.

    Raises:
        UserError: where the arguments ask for what the engine does not support.
    """

    # --- building

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Look at the order of the bases.

        Raises:
            UserError: if a Trainer comes before this mixin: nothing of it would be called.
        """
        super().__init_subclass__(**kwargs)
        check_order(cls, TrainerMixin, transformers.Trainer)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.overflows: list[tuple[int, str]] = []  # (step, where) of those that were skipped
        with engine_trainer():
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
        check_arguments(self.args, type(self))
        settings = EngineSettings.of(self.args.ftkit)
        if self.args.activation_checkpointing and settings.strategy.activations == AUTO:
            settings = settings.choosing(activations="recompute")
        self.accelerator.__class__ = Accelerator
        self.accelerator.adopt(
            settings.choosing(accumulate_in=UNIT if parts > 1 else STEP),
            micro_batch_tokens=self.args.per_device_train_batch_size * _sequence_tokens(self.args, self.model) // parts,
            accumulation_steps=self.args.gradient_accumulation_steps * parts,
        )

    def _take_whole_steps(self) -> int:
        """Where blocks accumulate, let the loader hand over a step's whole batch; return its number of micro-batches.

        The arguments are copied: those that the user gave say what the user said.
        """
        settings = getattr(self.args, "ftkit", None)
        micro_batches = self.args.gradient_accumulation_steps
        if settings is None or micro_batches == 1:
            return 1
        strategy = EngineSettings.of(settings).strategy if self.plan is None else self.plan.strategy
        if strategy.accumulate_in != UNIT:
            return 1
        self.args = copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.args.per_device_train_batch_size *= micro_batches
        return micro_batches

    plan: Plan | None = None  # how memory is used, where that was planned before the Trainer was made
    loss_record = LossRecord()  # of the present call of `train`
    _loop_saves = False  # whether a save is the loop's own: what comes after it is the next step
    _parts = 1  # into which blocks divide a rank's batch
    _step_batches: Sequence[Any] = ()  # as the loader gave them

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, once the engine that was asked for is in place.

        Raises:
            UserError: if it is not.
            Diverged: at the end, if the last loss, most losses or a weight were not finite, and no best model came back.
        """
        checks = any(isinstance(callback, EngineCheck) for callback in self.callback_handler.callbacks)
        if self.args.ftkit is not None and not checks:
            self.add_callback(EngineCheck(self))
        if self.args.ftkit is not None:
            self._check_callbacks()
            check_length_column(self.args, self.train_dataset)
        self.loss_record, self.left_to_load = LossRecord(), None
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            self.is_in_train = False  # the Trainer leaves it as it is
            self.checkpoints.rescue()
            raise
        if self.engine_is_on and (problem := self.failure()) is not None:
            self.take_failure(problem)
        return result

    left_to_load: str | None = None  # the checkpoint that is continued, until its weights are read
    _checked: Sequence[TrainerCallback] = ()  # callbacks that were looked at; others may be added at any time

    def _check_callbacks(self) -> None:
        """Look at the methods of the callbacks that are new.

        Raises:
            UserError: with one that no event calls.
        """
        callbacks = list(self.callback_handler.callbacks)
        check_callbacks(each for each in callbacks if not any(each is known for known in self._checked))
        self._checked = callbacks

    def failure(self) -> str | None:
        """Return what is wrong with how training ended, alike on all ranks; None if nothing is. A collective.

        Cost: one pass over each rank's weights.
        """
        record, first = self.loss_record, self._initial_global_step
        made = self.state.global_step > first
        broken = record.broken(self.engine.comm)
        problem = record.judged(broken, skips=self._skips())
        if problem is None and not any(broken) and (made or not record.before.steps):
            problem = judged_by_log(self.state.log_history, first if made else 0)
        if problem is None and made:
            problem = made_no_update(self.engine_optimizer, self.state.global_step - first)
        if problem is None and made and (names := weights_not_finite(self.engine, self.engine_optimizer)):
            problem = f"training failed: {names[0]} is not finite after the last step, whose loss was"
        return problem if made or problem is None else f"{problem}, and no step was left to make"

    def _skips(self) -> bool:
        """Whether the last step was skipped for an overflow, so that its loss is none of the weights that are there."""
        optimizer = self.sharded_optimizer
        return optimizer is not None and optimizer.loss_scale.dynamic and optimizer.step_was_skipped

    def take_failure(self, problem: str) -> None:
        """Raise what is wrong with how training ended, unless the best model came back at the end.

        Raises:
            Diverged: with the checkpoints that are left.
        """
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if best is not None and os.path.isdir(best):
            logger.warning("%s; the model is that of %s", problem, best)
            return
        raise Diverged(
            f"{problem}. Its weights are not saved where they are not finite; checkpoints of earlier steps in "
            f"{self.args.output_dir} are whole. Lower the learning rate, or look at the data of the first such step"
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does, with all ranks.

        Raises:
            UserError: If a callback has a method that no event calls.
        """
        if self.engine_is_on:  # planned for what is to follow
            self._sharded(evaluation=True if self.train_dataset is None else None)
            self._check_callbacks()
        return super().evaluation_loop(*args, **kwargs)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Judge an evaluation as the Trainer does; one whose loss is not finite is never the best."""
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
        broken = [name for name in ("eval_loss", *(f"eval_{each}_loss" for each in sets)) if not _finite(metrics.get(name))]
        if self.engine_is_on and broken:
            step = self.state.global_step
            logger.warning("step %d: %s is not finite: no best model, and not counted by early stopping", step, broken[0])
            return False
        return super()._determine_best_metric(metrics, trial)

    @property
    def engine_is_on(self) -> bool:
        """Whether this Trainer runs on ftkit's engine."""
        return isinstance(self.accelerator, Accelerator)

    @property
    def units(self) -> ShardedTransformer | None:
        """The units of the model, once it is sharded."""
        return units_of(self.model)

    @property
    def sharded_optimizer(self) -> ShardedOptimizer | None:
        """The optimizer behind accelerate's wrapper, once there is one."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer if isinstance(optimizer, ShardedOptimizer) else None

    @property
    def engine(self) -> ShardedTransformer:
        """The units of the model, which is sharded by now.

        Raises:
            RuntimeError: if it is not.
        """
        units = self.units
        if units is None:
            raise RuntimeError("the model is not sharded yet: the Trainer shards it when it trains or evaluates")
        return units

    @property
    def engine_optimizer(self) -> ShardedOptimizer:
        """The sharded optimizer, which is there by now.

        Raises:
            RuntimeError: if it is not.
        """
        optimizer = self.sharded_optimizer
        if optimizer is None:
            raise RuntimeError("there is no sharded optimizer yet: the Trainer makes it when it trains")
        return optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine_is_on:  # sharding places weights itself; a whole model may not fit
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard the model, let the Trainer (or the user) make the optimizer, and exchange it for its sharded form."""
        asked = () if model is None else (model,)  # as the Trainer asks: a user's may take none
        if not self.engine_is_on:
            return super().create_optimizer(*asked)
        if hasattr(self.model, "activation_checkpointing_disable"):
            self.model.activation_checkpointing_disable()  # the engine recomputes blocks itself
        units = self._sharded(evaluation=False)
        if self.sharded_optimizer is None:
            super().create_optimizer(*asked)  # may return nothing
            assert self.optimizer is not None
            self.optimizer = sharded_optimizer(self.optimizer, units)
        assert self.optimizer is not None
        return self.optimizer

    def _sharded(self, *, evaluation: bool | None = None) -> ShardedTransformer:
        """Return the units of the model, sharded first if it is not: by a plan that knows of the callbacks.

        Args:
            evaluation: see `Accelerator.sharded`.
        """
        if self.units is None and self.plan is None:
            self._update_before_callbacks()
        return self.accelerator.sharded(self.model, evaluation=evaluation, rule=self._update_rule(), plan=self.plan)

    def _update_rule(self) -> UpdateRule:
        """Return the update rule of the optimizer that the Trainer will make, or was given."""
        if self.optimizer is not None:
            return rule_for(self.optimizer)
        if str(getattr(self.args.optim, "value", self.args.optim)) != "sgd":
            return ADAMW
        momentum = re.search(r"\bmomentum=([^,\s]+)", self.args.optim_args or "")
        return rule_of("sgd", momentum=float(momentum[1]) if momentum else 0.0)

    def _update_before_callbacks(self) -> None:
        """Leave deferred updates out of the plan where code of the user's may read weights before the next forward."""
        settings, names = self.accelerator.settings, self._readers_after_an_update()
        if names and settings.strategy.update == AUTO:
            self.accelerator.settings = settings.choosing(update="now")
            logger.info("%s may read weights after a step: updates are made in the step", ", ".join(names))

    def _readers_after_an_update(self) -> list[str]:
        """Return callbacks and methods of the user's that may read weights between an update and the next forward."""
        names = listeners(self.callback_handler.callbacks, AFTER_AN_UPDATE, ("ftkit", "transformers"))  # TRL's average them
        return names + overriders(type(self), BEFORE_A_FORWARD, KNOWN)

    def tell_late_readers(self) -> None:
        """Say which callbacks that may read weights after a step came once the model was sharded with deferred updates."""
        names = self._readers_after_an_update()
        chosen = self.plan is None and self.accelerator.settings.strategy.update == AUTO
        if names and chosen and self.engine.strategy.deferred and self.engine.comm.rank == 0:
            logger.warning(
                "%s came after the model was sharded, and updates are deferred: weights that it reads after a step may be "
                "those of the step before. Add it before the first training or evaluation, or let it read within "
                "ftkit.gathered_parameters(model)",
                ", ".join(names),
            )

    # --- a step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Make the Trainer's forward and backward. All ranks do, so heads and embeddings may be read in a user's loss."""
        last = self.units is not None and self.accelerator.sync_gradients
        with read_by_all(self), self.engine.last_backward() if last else nullcontext():
            loss: Tensor = super().training_step(*args, **kwargs)
        if self.engine_is_on:
            self.loss_record.note(self.state.global_step, loss)
        return loss

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Return whether gradients are DTensors of several meshes: none of a sharded model's is one, and `.grad` raises."""
        return False if self.engine_is_on else super()._has_mixed_mesh_grads(model)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device; in 16 bits also cast its inputs (audio, pixels), which no autocast will do."""
        inputs = super()._prepare_inputs(inputs)
        if not self.engine_is_on or not isinstance(inputs, Mapping):
            return inputs
        mask: Any = inputs.get("attention_mask")
        if is_packed(mask):
            inputs = {**inputs, "attention_mask": mask.cpu()}  # attention chooses its launches on the host
        dtype = self.engine.compute_dtype if self.units is not None else None
        if dtype is None or dtype == torch.float32:
            return inputs
        cast = {key: narrowed(value, dtype) for key, value in inputs.items() if key not in self.label_names}
        return {**inputs, **cast}

    def tell_overflow(self) -> None:
        """Say, if the last step was skipped for an overflow, in which unit or module that began. A collective then."""
        optimizer = self.engine_optimizer
        if not (optimizer.step_was_skipped and optimizer.overflowed and optimizer.loss_scale.dynamic):
            return
        place = began_in(optimizer.overflowed, [flat.name for flat in optimizer.units.trainable])
        known: list[str] = []
        batches: list[Any] = []
        if place is not None:
            told = f"in the backward of {place}"
        else:
            batches = self._inputs_of(self._step_batches)
            looked = (self.engine.comm.all(first_overflow(self.model, batch)) for batch in batches)
            known = next((found for names in looked if (found := [name for name in names if name is not None])), [])
            told = f"in the forward of {known[0]}" if known else "at once in all units: the loss, or what came to it"
        self.overflows.append((self.state.global_step, told))
        if self.engine.comm.rank == 0:
            text = "step %d: overflow %s; it is skipped, the loss scale is %g now"
            scale = optimizer.loss_scale
            logger.warning(text, self.state.global_step, told, scale.value)
            if scale.value <= LEAST_SCALE:
                logger.warning(
                    "step %d: the loss scale is at its least, so this is not an overflow: no scale makes the gradients "
                    "finite, and later ones vanish in fp16 until it has grown again, in %d clean steps for each doubling",
                    self.state.global_step,
                    scale.growth_steps,
                )
        if known and self._needs_fp32_modules() and not self.find_fp32_modules(batches) and self.engine.comm.rank == 0:
            logger.warning("fp16: that forward is not finite in fp32 either")

    # --- fp32 modules of an fp16 model

    def _needs_fp32_modules(self) -> bool:
        """Whether the model computes in fp16."""
        return self.engine_is_on and self.units is not None and self.engine.compute_dtype == torch.float16

    _looked = False  # whether the run's first batches were looked at, or those of the run that it continues

    def look_for_fp32_modules(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Look at the run's first batches, unless that was done, or by the run that it continues. A collective.

        Raises:
            UserError: if their forward is not finite in fp16, and cannot be made so.
        """
        if self._looked or not self._needs_fp32_modules():
            return
        self._looked = True
        if not self.find_fp32_modules(self._inputs_of(batches)):
            raise UserError(
                "fp16: the model's forward on the first batches is not finite, and computing parts of it in fp32 does not "
                "mend it: compute in bf16 or fp32 (train.dtype, or ftkit={'dtype': ...}), or look at the weights"
            )
        if self.engine.plan is not None and widens_inputs(self.engine):
            self.engine.plan.check_wide_inputs()

    def _inputs_of(self, batches: Iterable[Any]) -> list[Any]:
        """Return batches of the loader as the model itself would take them: on its device, as much as fits a forward."""
        taken = set(taken_by(self.model))
        parts = [self._prepare_inputs(part_of(batch, self._parts)) for batch in batches]
        return [part for part in parts if isinstance(part, Mapping) and part.keys() <= taken]

    def find_fp32_modules(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Let compute in fp32 what overflows in fp16 on these batches, say what that is, return whether all is finite.

        A collective.

        Args:
            batches: this rank's batches, on its device, as they go into the model.
        """
        first = self.engine.comm.rank == 0
        if not batches:
            if first:
                logger.warning("fp16: the overflow scan was skipped: the keys of a batch do not match the model's forward()")
            return True
        before = dict(self.engine.fp32_modules.found)
        found = find_fp32_modules(self.engine, batches)
        if first:
            level = logging.WARNING if found.found != before else logging.INFO
            logger.log(level, "fp16: fp32 modules: %s", found.describe())
        return found.finite

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does, unless the run that is resumed was over: it would make one more step."""
        if self.engine_is_on and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch a step's batches, and find their weights; samples repeated to fill the last one do not count."""
        if self.engine_is_on:
            batches = self._step_batches = list(islice(epoch_iterator, num_batches))
            self._check_batches(len(batches))
            self._tell_labels(batches[:1])
            self.look_for_fp32_modules(batches[:BATCHES])
            epoch_iterator = iter(self.weighted(batches))
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    _told_labels = False

    def _tell_labels(self, batches: Sequence[Any]) -> None:
        """Say once that a batch has not the labels which the arguments name: an evaluation would have no loss."""
        told = unknown_labels(self.args.label_names, batches[0]) if batches and not self._told_labels else ""
        if told and self.args.process_index == 0:
            logger.warning(told)
        self._told_labels = self._told_labels or bool(batches)

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

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **others: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch as one rank would, with parameters at hand that a loss reads outside their modules."""
        if self.engine_is_on:
            self._tell_labels([inputs])
        with read_by_all(self):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **others)

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Compute TRL's reference values, for DPO trainers; the model may be asked for them before training prepares it."""
        if self.engine_is_on and model is self.model:
            self.accelerator.sharded(model)
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]  # TRL's trainers have it

    # --- saving

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of this run."""
        if self._checkpoints is None:
            self._checkpoints = RunCheckpoints(self)
        return self._checkpoints

    _checkpoints: RunCheckpoints | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begin a checkpoint: small files now, weights and state while training goes on; `finish_save` gives it its name.

        One that a callback or a script asks for is whole when this returns.
        """
        stock = super()._save_checkpoint
        if not self.engine_is_on:
            return stock(model, trial)
        self._sharded()

        def write() -> None:
            # On the instance, so that it also replaces the method of a subclass that uploads by itself.
            self._push_from_checkpoint = self.checkpoints.push_when_named  # type: ignore[method-assign]  # see above
            try:
                stock(model, trial)
            finally:
                del self._push_from_checkpoint

        self.checkpoints.save(self._get_output_dir(trial=trial), write)
        if not self._loop_saves:
            self.finish_save()

    def finish_save(self, *, wait: bool = True) -> None:
        """See `RunCheckpoints.finish`. A collective."""
        self.checkpoints.finish(wait=wait)

    @property
    def save_problem(self) -> str | None:
        """Why the last checkpoint could not be written; None if it was."""
        return self.checkpoints.problem

    @property
    def saves_frozen(self) -> bool:
        """Whether checkpoints hold frozen weights, too: an adapter's base is loaded from its own folder."""
        return not isinstance(self.model, PeftModel)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save as the Trainer does; then seal what callbacks have changed in the checkpoint."""
        logged = self._globalstep_last_logged
        with self._saves_by_loop(True):
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.engine_is_on:
            if self._globalstep_last_logged != logged:  # the Trainer subtracts, which keeps a NaN
                self._tr_loss.zero_()
            self.checkpoints.seal_again()

    @contextmanager
    def _saves_by_loop(self, loop: bool) -> Iterator[None]:
        before, self._loop_saves = self._loop_saves, loop
        try:
            yield
        finally:
            self._loop_saves = before

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does; callbacks may save."""
        with self._saves_by_loop(False):
            super().log(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does; callbacks may save."""
        with self._saves_by_loop(False):
            return super()._evaluate(*args, **kwargs)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """End as the Trainer does, which looks at the folders of checkpoints: all have their names then."""
        if self.engine_is_on:
            self.finish_save()
            self.engine.freshen()  # whoever reads weights now reads those of the last step
            comm = self.engine.comm
            if comm.world_size > 1:  # of the steps since the last log, each rank has its own share
                self._tr_loss = comm.sum(self._tr_loss.float().clone()) / comm.world_size
        with self._folders_of_users_stay(self._get_output_dir(trial)):
            return super()._finalize_training(trial, *args, **kwargs)

    @contextmanager
    def _folders_of_users_stay(self, run_folder: str) -> Iterator[None]:
        """Under `save_total_limit=1` the Trainer leaves at its end the best checkpoint alone: do that for it, where it would
        take a folder of the user's (`checkpoint-1-backup`) for a checkpoint.
        """
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if not (self.engine_is_on and limit == 1 and self.args.should_save):  # no other rank removes any
            yield
            return
        there = list(map(Path, sort_checkpoints(run_folder)))
        own = [path for path in there if is_rotated(path)]
        if len(own) == len(there) or best is None or not os.path.isdir(best):
            yield
            return
        for path in own:
            if not os.path.samefile(path, best):
                shutil.rmtree(path, ignore_errors=True)
        self.args.save_total_limit = None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def retire_checkpoints(self, newest: Path) -> None:
        """Remove the checkpoints that are too many, as the Trainer does; called on rank 0 once `newest` is there.

        The user's own folders (`checkpoint-best`, `checkpoint-1-backup`) stay and do not count.
        """
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        if best is not None and newest.is_absolute():
            best = self.checkpoints.absolute(best)
        there = [path for path in sort_checkpoints(str(newest.parent), use_mtime=True) if is_rotated(Path(path))]
        if limit is None or limit <= 0 or len(there) <= limit:
            return
        kept = {there[-1]} if best is None else {there[-1], str(Path(best))}
        older = [path for path in there if path not in kept]
        for path in older[: max(len(there) - max(limit, len(kept)), 0)]:
            shutil.rmtree(path, ignore_errors=True)

    def _get_output_dir(self, trial: Any) -> str:
        writing = self.checkpoints.writing
        return str(writing) if writing is not None else super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the model from all ranks: a Hugging Face folder, or beside a sharded checkpoint only what is small."""
        if not self.engine_is_on:
            return super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        units = self._sharded()
        if self.checkpoints.writing is None:
            self.checkpoints.try_model_files()
        pushed = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END  # the hub wants weights at each save
        if not self.checkpoints.sharded or isinstance(self.model, PeftModel) or pushed:
            save_model(units, folder, self.sharded_optimizer)
        with rank_zero(units.comm) as first:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                self.save_small_files(folder, config=self.checkpoints.sharded and not pushed)
                save_arguments(self.args, folder)

    def save_small_files(self, folder: Path, *, config: bool = True) -> None:
        """Write the model's configuration, unless `config` is off, and what prepares its inputs."""
        if config and isinstance(self.model, PreTrainedModel):
            save_config(self.model, folder, next(iter(self.engine.dtypes.values())))
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.engine_is_on:
            return super()._save_optimizer_and_scheduler(output_dir)
        units, optimizer = self.accelerator.sharded(self.model), self.sharded_optimizer
        losses = self.loss_record.noted(units.comm, skips=self._skips())
        noted = {**self.noted, LOSSES: losses}
        if self._needs_fp32_modules():
            noted[FP32_MODULES] = units.fp32_modules.as_dict()
        saving = Saving(Path(output_dir, ENGINE_FOLDER), units, optimizer, extra=noted, frozen=self.saves_frozen)
        self.checkpoints.begun = True
        if self.checkpoints.writing is None:  # called by hand, or by a _save_checkpoint without super(): nobody waits for it
            saving.wait()
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, transformers.trainer.SCHEDULER_NAME))

    # --- loading

    @property
    def noted(self) -> dict[str, Any]:
        """What a checkpoint notes of the run beside its state, for whoever continues it: anything JSON can hold."""
        return {}

    def take_noted(self, path: Path, noted: dict[str, Any]) -> None:
        """Take what the checkpoint that is continued has noted.

        Args:
            path: the file that the note stands in, for messages.
            noted: what the checkpoint notes.

        Raises:
            UserError: if it is not what `noted` gives.
        """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave a checkpoint of ours for later, when the model is sharded. Called by hand, take its weights now."""
        ours = Path(resume_from_checkpoint, ENGINE_FOLDER, MANIFEST).is_file()
        if ours and not self.engine_is_on:
            raise UserError(
                f"{resume_from_checkpoint}: was saved by ftkit's engine, whose optimizer state ftkit=None cannot read: "
                "leave ftkit on to continue that run (ftkit='auto')"
            )
        if not self.engine_is_on:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        if ours:
            check_folder(Path(resume_from_checkpoint))  # the engine's own files are compared as they are read
            if self.is_in_train:
                self.left_to_load = resume_from_checkpoint
            else:
                self._load_weights_of(Path(resume_from_checkpoint))
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
        if names := overriders(type(self), ["_load_from_checkpoint"], KNOWN):
            raise UserError(
                f"{names[0]} overrides _load_from_checkpoint. ftkit reads the weights of a checkpoint later, in "
                "_load_optimizer_and_scheduler, so what the override does to weights would be lost. Change weights before "
                "the Trainer is built or in a callback's on_train_begin, or override _load_optimizer_and_scheduler and call "
                "super() first"
            )
        folder = Path(checkpoint)
        manifest = folder / ENGINE_FOLDER / MANIFEST
        extra = load_checkpoint(folder / ENGINE_FOLDER, self.engine, self.sharded_optimizer, frozen=self.saves_frozen)
        extra.pop("base", None)  # earlier versions saved a fingerprint of the base
        noted = extra.pop(FP32_MODULES, None)
        if noted is not None and self._needs_fp32_modules():
            restore_fp32_modules(self.engine, Fp32Modules.from_dict(noted, str(manifest)))
            self._looked = True
        if (losses := extra.pop(LOSSES, None)) is not None:
            self.loss_record.take(losses, str(manifest))
        self.take_noted(manifest, extra)
        scheduler = folder / transformers.trainer.SCHEDULER_NAME
        if not scheduler.is_file():
            raise UserError(f"{folder}: {scheduler.name} is missing; the learning rate could not go on where it was")
        load_scheduler(scheduler, self.lr_scheduler)
        self.left_to_load = None

    def _load_best_model(self) -> None:
        if not self.engine_is_on:
            return super()._load_best_model()
        self.finish_save()
        folder = Path(self.state.best_model_checkpoint)
        units = self.accelerator.sharded(self.model)
        if not units.comm.same(folder.is_dir() and any(folder.iterdir())):
            if units.comm.rank == 0:
                logger.warning("%s, the best checkpoint, is gone: the model is that of the last step", folder)
            return
        self._load_weights_of(folder)

    def _load_weights_of(self, folder: Path) -> None:
        """Take the weights of a checkpoint, of ours or of weights alone, and nothing else of it. A collective."""
        units, optimizer = self._sharded(), self.sharded_optimizer
        if (folder / ENGINE_FOLDER / MANIFEST).is_file():
            load_checkpoint(folder / ENGINE_FOLDER, units, optimizer, frozen=self.saves_frozen, state=False)
        elif isinstance(self.model, PeftModel):
            load_adapter(units, folder, optimizer)
        elif not isinstance(self.model, PreTrainedModel):
            load_plain(units, folder / SAFE_WEIGHTS_NAME, optimizer)
        else:
            load_weights(units, find_weights(str(folder)), optimizer=optimizer, init_missing=False)


def part_of(batch: Any, parts: int) -> Any:
    """Return the first of the `parts` into which blocks will divide a batch: as much as one forward may hold."""
    if parts == 1 or not isinstance(batch, Mapping):
        return batch
    rows = max((len(each) for each in batch.values() if torch.is_tensor(each) and each.dim()), default=0)
    return {
        key: each.tensor_split(parts)[0] if torch.is_tensor(each) and each.dim() and len(each) == rows else each
        for key, each in batch.items()
    }


def _finite(value: Any) -> bool:
    """Return whether a metric is no number that is NaN or infinite."""
    return not isinstance(value, float) or math.isfinite(value)


def narrowed(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor of fp32 in `dtype`, and anything else as it is."""
    return value.to(dtype) if torch.is_tensor(value) and value.dtype == torch.float32 else value


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
        "logging_nan_inf_filter": "it logs a loss of NaN as 0.0; losses are logged as they are",
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
