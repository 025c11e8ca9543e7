"""`Trainer` on ftkit's engine: Hugging Face's loop, with overrides that place, train, save and load the sharded model.

`TrainerMixin` overrides methods of the Trainer, grouped by phase, and leaves the loop itself to transformers, so callbacks,
schedulers, evaluation, logging integrations and subclasses (TRL's) keep working. With `ftkit=None` every override calls the
stock method. Arguments that the engine cannot honour are refused when the Trainer is built.

`docs/trainer.md` lists the intended differences from the stock Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from ftkit.config.engine import EngineSettings
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.errors import UserError
from ftkit.hf.fp16.overflow import OverflowScan
from ftkit.hf.kernels.attention import is_packed
from ftkit.hf.kernels.head import only_loss
from ftkit.hf.reading import read_by_all
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.hf.sharding import units_of
from ftkit.hf.trainer.accelerator import Accelerator
from ftkit.hf.trainer.arguments import BUILDING, TrainingArguments, check_arguments, sequence_tokens
from ftkit.hf.trainer.checkpoints import RunCheckpoints, is_ours
from ftkit.hf.trainer.loss import LossOfRanks, check_even
from ftkit.hf.trainer.optimizers import optimizer_by_name, rule_for, rule_of_class, sharded_optimizer
from ftkit.hf.trainer.seeding import STEPS, SeededCollator, seed_collator, seeded
from ftkit.plan.plan import Plan
from ftkit.spec.strategy import AUTO, STEP, UNIT
from ftkit.spec.update_rules import UpdateRule

logger = logging.getLogger(__name__)

DEFERRING = ("ftkit", "transformers", "trl")
"""Packages whose Trainers read no weights between an update and the next forward. Of TRL's callbacks, BEMACallback does."""

if TYPE_CHECKING:
    _Beside = transformers.Trainer  # every class that has the mixin has this as well
else:
    _Beside = object


class TrainerMixin(_Beside):
    """Put ftkit's engine under a `transformers.Trainer` subclass: `class T(TrainerMixin, SFTTrainer)`.

    Raises:
        UserError: The engine does not support an argument.
    """

    args: Any
    accelerator: Any
    model: Any
    state: Any
    plan: Plan | None = None  # set where the run was planned before the Trainer is made
    _micro_batches = 0  # of the present step, so far
    _outputs_unread = False  # whether the outputs that are asked for with a loss are not used
    _collator: SeededCollator | None = None
    _checkpoints: RunCheckpoints | None = None

    # --- building

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.overflow_scan = OverflowScan(self)
        self.loss_of_ranks = LossOfRanks(self)
        building = BUILDING.set(True)
        try:
            super().__init__(*args, **kwargs)
        finally:
            BUILDING.reset(building)
        if self.args.ftkit is not None:
            self._train_batch_size = self.args.train_batch_size  # a whole step's, where blocks accumulate
            self._mixed_mesh_grads = False  # the Trainer would read `.grad`, which raises
            self.add_callback(EngineCheck(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator as the Trainer does, then give it the engine."""
        if not hasattr(self.args, "ftkit"):
            raise UserError(
                f"{type(self.args).__name__} has no field 'ftkit': use ftkit.TrainingArguments, or "
                f"class C(ftkit.ArgumentsMixin, {type(self.args).__name__})"
            )
        if self.args.ftkit is None:
            return super().create_accelerator_and_postprocess()
        settings = EngineSettings.of(self.args.ftkit)
        strategy = settings.strategy if self.plan is None else self.plan.strategy
        parts = self.args.gradient_accumulation_steps if strategy.accumulate_in == UNIT else 1
        if parts > 1 or not self.args.average_tokens_across_devices:
            self.args = copy(self.args)  # the user's arguments stay as they are
            self.args.average_tokens_across_devices = True
        if parts > 1:  # the loader gives a step's whole batch
            self.args.gradient_accumulation_steps = 1
            self.args.per_device_train_batch_size *= parts
        super().create_accelerator_and_postprocess()
        check_arguments(self.args)
        if self.args.activation_checkpointing and settings.strategy.activations == AUTO:
            settings = settings.choosing(activations="recompute")
        self.accelerator.__class__ = Accelerator
        self.accelerator.adopt(
            settings.choosing(accumulate_in=UNIT if parts > 1 else STEP),
            micro_batch_tokens=self.args.per_device_train_batch_size * sequence_tokens(self.args, self.model) // parts,
            accumulation_steps=self.args.gradient_accumulation_steps * parts,
        )
        return None

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
        """The units of the model, which is sharded by now."""
        units = self.units
        assert units is not None, "the Trainer shards the model when it trains or evaluates"
        return units

    @property
    def engine_optimizer(self) -> ShardedOptimizer:
        """The sharded optimizer, which the Trainer has made by now."""
        optimizer = self.sharded_optimizer
        assert optimizer is not None, "the Trainer makes the optimizer when it trains"
        return optimizer

    # --- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, on the engine."""
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            self.is_in_train = False  # the Trainer leaves it as it is
            self.checkpoints.rescue()
            raise

    def get_train_dataloader(self) -> DataLoader:
        """Return the Trainer's loader; a collator that draws does so by the number of the batch, not by the rank."""
        loader = super().get_train_dataloader()
        if self._has_parts:
            self._collator = seed_collator(loader, self.args.seed, self.accelerator)
        return loader

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shard the model, let the Trainer (or the user) make the optimizer, and replace it by its sharded form."""
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
        """Return the units of the model, sharded first if it is not. See `Accelerator.shard`."""
        free = self.plan is None and self.accelerator.settings.strategy.update == AUTO
        update = "now" if free and self._may_read_weights() else AUTO
        rule = None if evaluation or self.units is not None else self._update_rule()
        return self.accelerator.shard(self.model, evaluation=evaluation, rule=rule, plan=self.plan, update=update)

    def _may_read_weights(self) -> bool:
        """Whether the user's code may read weights between an update and the next forward: then updates are not deferred."""
        callbacks = (type(each).__module__.partition(".")[0] for each in self.callback_handler.callbacks)
        trainers = (kind.__module__.partition(".")[0] for kind in type(self).__mro__[:-1])
        return not (set(callbacks) <= {"ftkit", "transformers"} and set(trainers) <= set(DEFERRING))

    def _update_rule(self) -> UpdateRule:
        """Return the update rule of the optimizer that the Trainer will make, or was given."""
        if self.optimizer is not None:
            return rule_for(self.optimizer)
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args)
        return rule_of_class(kind, [settings])

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return the optimizer that `optim=` names: one that has a sharded form. Without the engine, the Trainer's own."""
        if getattr(args, "ftkit", None) is None:
            return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        return optimizer_by_name(args)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does. Number its batches after a resume; stop a run that had made all its steps."""
        if self.engine_is_on and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._collator is not None:
            streams = isinstance(kwargs["train_dataloader"].dataset, IterableDataset)  # their skipped batches are collated
            skips = kwargs["epoch"] == kwargs["epochs_trained"] and not streams
            self._collator.begin(kwargs["epoch"], kwargs["steps_trained_in_current_epoch"] if skips else 0)
        super()._run_epoch(*args, **kwargs)

    # --- a step

    @property
    def _has_parts(self) -> bool:
        """Whether a step's batch comes in several parts, of ranks or micro-batches."""
        return self.engine_is_on and (self.accelerator.num_processes > 1 or self.args.gradient_accumulation_steps > 1)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Fetch a step's batches and compute the weights of their losses, without rows that only fill the last batch."""
        if self.engine_is_on:
            batches = list(islice(epoch_iterator, num_batches))
            check_even(self, len(batches))
            self.overflow_scan.before_step(batches)
            self._micro_batches = 0
            if self._globalstep_last_logged == self.state.global_step:
                self._tr_loss.nan_to_num_()  # after a log the Trainer subtracts it from itself, which keeps a NaN
            epoch_iterator = iter(self.loss_of_ranks.weigh(batches) if self._has_parts and batches else batches)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the Trainer's count; this rank's share of it where the loss is divided by it, None where it ignores it."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        return self.loss_of_ranks.share(count) if self.engine_is_on else count

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Do the Trainer's forward and backward, with the weight and the random numbers of this micro-batch.

        A collective: a user's loss may read heads and embeddings.
        """
        if not self.engine_is_on:
            return super().training_step(model, inputs, num_items_in_batch)
        number, weights = self._micro_batches, self.loss_of_ranks.weights
        self._micro_batches += 1
        weight = weights[number] if number < len(weights) else 1.0
        with ExitStack() as stack:
            self.accelerator.loss_weight = weight
            stack.callback(setattr, self.accelerator, "loss_weight", None)
            stack.enter_context(read_by_all(self))
            if self.accelerator.sync_gradients:
                stack.enter_context(self.engine.last_backward())
            if self._has_parts:
                place = number * self.accelerator.num_processes + self.accelerator.process_index
                numbers = STEPS, self.args.seed, self.state.global_step, place
                stack.enter_context(seeded(self.accelerator.device, *numbers, together=number))
            stack.enter_context(self.loss_of_ranks.alone())
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss * weight

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device; in 16 bits also cast its inputs (audio, pixels), since there is no autocast."""
        inputs = super()._prepare_inputs(inputs)
        if not self.engine_is_on or not isinstance(inputs, Mapping):
            return inputs
        mask: Any = inputs.get("attention_mask")
        if is_packed(mask):
            inputs = {**inputs, "attention_mask": mask.cpu()}  # attention chooses its launches on the host
        dtype = self.engine.compute_dtype if self.units is not None else None
        if dtype is None or dtype == torch.float32:
            return inputs
        wide = {key: value for key, value in inputs.items() if getattr(value, "dtype", None) == torch.float32}
        return {**inputs, **{key: value.to(dtype) for key, value in wide.items() if key not in self.label_names}}

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as the Trainer does. Where only the loss is used, the model may make it without its logits."""
        stock: Any = super().compute_loss
        plain = self.engine_is_on and stock.__func__ is transformers.Trainer.compute_loss
        plain = plain and not (self.label_smoother or self.compute_loss_func)
        with only_loss(self.model, wanted=plain and (not return_outputs or self._outputs_unread)):
            asked = {"return_outputs": True} if return_outputs else {}  # as the Trainer asks: a user's may know no more
            return stock(model, inputs, **asked, num_items_in_batch=num_items_in_batch)

    @property
    def computes_as_stock(self) -> bool:
        """Whether the loss is that of transformers' Trainer: no subclass has a `compute_loss` of its own."""
        stock: Any = super().compute_loss
        return type(self).compute_loss is TrainerMixin.compute_loss and stock.__func__ is transformers.Trainer.compute_loss

    # --- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does. An evaluation set without any label raises UserError."""
        if self.engine_is_on:  # planned for training if training follows
            self._sharded(evaluation=True if self.train_dataset is None else None)
        self.loss_of_ranks.saw_labels = None
        output = super().evaluation_loop(*args, **kwargs)
        if self.loss_of_ranks.saw_labels is False and kwargs.get("description") != "Prediction":
            raise UserError(
                "evaluation: no batch has a label that counts: all labels are -100. Prompts that fill the whole length "
                "leave none; check the labels that the data collator makes"
            )
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None, **others: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch as one rank would evaluate the batches of all ranks: its loss is that of their rows together.

        A batch without a label on any rank has no loss, and does not count.
        """
        if not self.engine_is_on:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **others)
        with read_by_all(self):
            predict = partial(self._predict, model, ignore_keys=ignore_keys, **others)
            return self.loss_of_ranks.evaluate(predict, inputs, prediction_loss_only)

    def _predict(self, model: nn.Module, inputs: Any, loss_only: bool, **others: Any) -> Any:
        """Evaluate one batch as the Trainer does; without logits where only the loss is used."""
        plain = type(self).compute_loss is TrainerMixin.compute_loss  # a subclass's may use the outputs
        self.loss_of_ranks.was_counted, self._outputs_unread = False, loss_only and plain
        try:
            with self.loss_of_ranks.alone():
                return super().prediction_step(model, inputs, loss_only, **others)
        finally:
            self._outputs_unread = False

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Compute TRL's reference values, for DPO trainers, which may ask for them before training prepares the model."""
        if self.engine_is_on and model is self.model:
            self._sharded()
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]  # TRL's trainers have it

    # --- saving

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of this run."""
        if self._checkpoints is None:
            self._checkpoints = RunCheckpoints(self)
        return self._checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint as the Trainer does, but write weights and state while training goes on."""
        stock = super()._save_checkpoint
        if not self.engine_is_on:
            return stock(model, trial)
        self._sharded()
        self.checkpoints.save(self._get_output_dir(trial), lambda: stock(model, trial))
        if not (self.is_in_train and self.control.should_save):  # a callback or a script expects a complete checkpoint
            self.checkpoints.finish()

    def _get_output_dir(self, trial: Any) -> str:
        """Return the run's folder; while the Trainer writes a checkpoint, the hidden folder that it is written in."""
        writing = self.checkpoints.writing
        return str(writing) if writing is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint as the Trainer does, once it is published."""
        if self.checkpoints.writing is not None:
            self.checkpoints.push_later = True
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """End as the Trainer does, which looks at the folders of checkpoints: the last one is published first."""
        if self.engine_is_on:
            self.checkpoints.finish()
            self.engine.freshen()  # callbacks read the weights of the last step
            comm = self.engine.comm
            if comm.world_size > 1:  # of the steps since the last log, each rank has its own share
                self._tr_loss = comm.sum(self._tr_loss.float().clone()) / comm.world_size
        return super()._finalize_training(trial, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the model from all ranks: a Hugging Face folder, or beside a sharded checkpoint only the small files."""
        if not self.engine_is_on:
            return super()._save(output_dir, state_dict)
        self._sharded()
        self.checkpoints.save_model(Path(output_dir or self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.engine_is_on:
            return super()._save_optimizer_and_scheduler(output_dir)
        self.checkpoints.save_state(Path(output_dir))

    # --- loading

    @property
    def noted(self) -> dict[str, Any]:
        """Notes of a checkpoint about the run, for a resume: anything that JSON can hold. A subclass overrides it."""
        return {}

    def take_noted(self, path: Path, noted: dict[str, Any]) -> None:
        """Take the notes of the checkpoint that is resumed, from the file `path`."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check a checkpoint, which is loaded once the model is sharded. Outside `train`, load its weights now."""
        folder = Path(resume_from_checkpoint)
        if not self.engine_is_on and not is_ours(folder):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.checkpoints.check_resumable(folder)
        if not self.is_in_train:
            self._sharded()
            self.checkpoints.load_weights(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.engine_is_on:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.checkpoints.load_state(Path(checkpoint))

    def _load_best_model(self) -> None:
        if not self.engine_is_on:
            return super()._load_best_model()
        folder = Path(self.state.best_model_checkpoint)
        if self.engine.comm.same(folder.is_dir() and any(folder.iterdir())):
            self.checkpoints.load_weights(folder)
        elif self.engine.comm.rank == 0:
            logger.warning("%s, the best checkpoint, is gone: the model is that of the last step", folder)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on ftkit's engine. Takes `ftkit.TrainingArguments`."""

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        super().__init__(model, args if args is not None else TrainingArguments("tmp_trainer"), *others, **kwargs)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]  # ours takes any keywords
    """`transformers.Seq2SeqTrainer` on ftkit's engine. Takes `ftkit.Seq2SeqTrainingArguments`.

    Ranks stop generating at different lengths. At stage 3 a rank that has finished goes on taking part in the gathers
    (`generate/holding.py`).
    """


class EngineCheck(TrainerCallback):
    """Stop a run that asked for the engine and would train without it; finish checkpoints beside training."""

    def __init__(self, trainer: TrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the engine's optimizer will update the engine's model."""
        optimizer = self.trainer.sharded_optimizer
        if self.trainer.units is None or optimizer is None or optimizer.units is not self.trainer.units:
            raise UserError(
                "ftkit's engine was asked for (ftkit=...) but is not in place: a subclass overrides create_optimizer or the "
                "accelerator. Call super() there, or set ftkit=None"
            )
        self.trainer.checkpoints.check()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step that overflowed; publish a checkpoint that all ranks have written by now."""
        self.trainer.overflow_scan.after_step()
        self.trainer.checkpoints.finish(wait=False)
