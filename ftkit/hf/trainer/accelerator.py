"""`ftkit.Accelerator`: accelerate's class with the methods overridden that touch weights, gradients or state.

Data loaders, schedulers, metrics and trackers are accelerate's. An optimizer that was made from the model's parameters is
replaced by its sharded form (optimizers.py).

`save_state` writes a subfolder `accelerator_state`: a checkpoint of each prepared model, a small file for schedulers,
registered objects and random states, and a list of the files outside the checkpoints with checksums. It replaces the one
before when it is complete.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ftkit.config.engine import EngineSettings
from ftkit.engine.checkpoint.durable import rank_zero, sync_folder, sync_tree
from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.checkpoint.sealed import CONTENTS, check_contents, write_contents
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.shard import refuse_failed
from ftkit.errors import UserError
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.hf.sharding import shard, units_of
from ftkit.hf.trainer.checkpoints import read_plain
from ftkit.hf.trainer.optimizers import rule_for, sharded_optimizer
from ftkit.hf.trainer.seeding import random_state, set_random_state
from ftkit.plan.plan import Plan
from ftkit.spec.strategy import AUTO, UNIT
from ftkit.spec.update_rules import ADAMW, UpdateRule

STATE, WRITING, FORMER = "accelerator_state", ".accelerator_state.writing", ".accelerator_state.former"
SMALL = "small.pt"
"""File of a state with everything but the models and their optimizers."""


class PreparedOptimizer(AcceleratedOptimizer):
    """A sharded optimizer in accelerate's wrapper, which steps only when gradients are complete."""

    optimizer: ShardedOptimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for an overflow."""
        return self.optimizer.step_was_skipped


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` on ftkit's engine.

    Args:
        ftkit: `"auto"`, a mapping, a YAML file, or `EngineSettings`.
        kwargs: Arguments of accelerate's class. `mixed_precision` is the compute dtype; autocast stays off.

    Raises:
        UserError: DeepSpeed, FSDP, Megatron, another device than CUDA or the CPU, or `accumulate_in: unit`.
    """

    loss_weight: float | None = None
    """Factor of each loss that `backward` is given; the Trainer sets it for a micro-batch."""
    _num_processes: int | None = None

    def __init__(self, *, ftkit: EngineSettings | Mapping[str, Any] | str = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        settings = EngineSettings.of(ftkit)
        if settings.strategy.accumulate_in == UNIT:
            raise UserError("accumulate_in: unit needs ftkit.Trainer, whose batch is a whole step; leave it to 'auto'")
        self.adopt(settings)

    def adopt(
        self, settings: EngineSettings, *, micro_batch_tokens: int = 2048, accumulation_steps: int = 0
    ) -> None:
        """Set up an accelerator that accelerate (or a Trainer) has built. For the arguments see `ftkit.shard`.

        `accumulation_steps=0` means this accelerator's `gradient_accumulation_steps`.
        """
        kind = self.distributed_type.value
        if kind not in ("NO", "MULTI_GPU", "MULTI_CPU") or self.device.type not in ("cpu", "cuda"):
            raise UserError(
                f"ftkit's engine needs CUDA or the CPU and no other engine, and accelerate is set to {kind} on "
                f"{self.device.type}: leave other plugins off; set use_cpu=True (TrainingArguments), cpu=True (Accelerator)"
            )
        self._check_even(self.even_batches)
        if settings.strategy.dtype == AUTO and self.state.mixed_precision != "no":
            settings = settings.choosing(dtype=self.state.mixed_precision)
        self.native_amp = False  # the engine casts when it gathers; autocast would cast again
        self.scaler = None
        self.settings = settings
        self.planned: weakref.WeakSet[ShardedTransformer] = weakref.WeakSet()  # models whose memory is in use
        self.shard_options: dict[str, Any] = {
            "micro_batch_tokens": micro_batch_tokens,
            "accumulation_steps": accumulation_steps or self.gradient_accumulation_steps,
        }
        self.rule = ADAMW  # of the optimizer to come

    # --- ranks

    @cached_property
    def comm(self) -> Communicator:
        """The communicator of this accelerator's ranks.

        Raises:
            UserError: accelerate counts other ranks, so that its loaders would give several ranks the same rows.
        """
        comm = Communicator(self.device)
        if comm.world_size != self.state.num_processes:
            raise UserError(
                f"the ranks share the weights by {comm.world_size}, and accelerate counts {self.state.num_processes}: each "
                "would train on the same rows. Without a GPU set use_cpu=True (TrainingArguments), cpu=True (Accelerator)"
            )
        return comm

    @property
    def num_processes(self) -> int:
        """The number of ranks, or the number that `with_num_processes` sets."""
        return self._num_processes or super().num_processes

    @contextmanager
    def with_num_processes(self, ranks: int) -> Iterator[None]:
        """Let `num_processes` be `ranks` in the body: a loss function may multiply its result by it."""
        self._num_processes = ranks
        try:
            yield
        finally:
            self._num_processes = None

    # --- prepare

    def shard(
        self,
        model: nn.Module,
        *,
        evaluation: bool | None = None,
        rule: UpdateRule | None = None,
        plan: Plan | None = None,
        update: str = AUTO,
    ) -> ShardedTransformer:
        """Plan and shard a model in place, unless it is sharded, and return its units. A collective.

        Args:
            model: The model. The plan leaves out the memory of models that this accelerator has sharded earlier.
            evaluation: Whether the model is only evaluated. False makes it trainable if it was sharded for evaluation.
                None leaves a sharded model as it is, and shards another one for training.
            rule: Update rule of the optimizer to come; None takes that of the optimizer given to `prepare`.
            plan: A plan that was made earlier; None plans here.
            update: When updates are made, in place of the settings' `update`.

        Raises:
            UserError: Nothing fits, or an earlier call failed and left the model partly sharded.
        """
        refuse_failed(model)
        units = units_of(model)
        if units is not None:
            if evaluation is False:
                units.evaluated_only = False  # its strategy stays; gradients and state were not planned
            return units
        units = shard(
            model,
            self.settings if update == AUTO else self.settings.choosing(update=update),
            device=self.device,
            comm=self.comm,
            evaluation=evaluation is True,
            beside=[*self.planned],
            rule=rule or self.rule,
            plan=plan,
            **self.shard_options,
        )
        self.planned.add(units)
        return units

    def prepare(self, *things: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does, models first: an optimizer may be given before its model."""
        for thing in sorted(things, key=lambda thing: isinstance(thing, nn.Module)):
            if isinstance(thing, torch.optim.Optimizer):
                self.rule = rule_for(thing)  # the plan of its model reads it
            elif isinstance(thing, nn.Module):
                self.prepare_model(thing)
        return super().prepare(*things, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place and return it. With `evaluation_mode`, gradients and optimizer state are not planned."""
        self.shard(model, evaluation=True if evaluation_mode else None)
        if model not in self._models:
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # accelerate's own mark
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Replace `optimizer` by its sharded form, over the model that was prepared with it or earlier."""
        if not isinstance(optimizer, (PreparedOptimizer, ShardedOptimizer)):
            optimizer = sharded_optimizer(optimizer, self._units_with(optimizer))
        if isinstance(optimizer, ShardedOptimizer):
            optimizer = PreparedOptimizer(optimizer, device_placement=False)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        optimizer._is_accelerate_prepared = True
        return optimizer

    def _units_with(self, optimizer: torch.optim.Optimizer) -> ShardedTransformer:
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            units = units_of(model)
            if units is not None and not updated.isdisjoint(units.places):
                return self.shard(model, evaluation=False)
        raise UserError("prepare the model before its optimizer, or together with it: accelerator.prepare(model, optimizer)")

    # --- a step

    def backward(self, loss: Tensor, *, rows: float | None = None, **kwargs: Any) -> None:
        """Call backward on the loss, divided by the accumulation steps and multiplied by the loss scale.

        Args:
            loss: Loss of this rank. The gradient is that of the mean over ranks.
            rows: Number of rows or label tokens that the loss is a mean over, if ranks differ in it. The gradient is then
                that of the mean over all ranks' rows. A collective: all ranks give it, or none.
            kwargs: Further arguments of accelerate's `backward`.
        """
        if rows is not None:
            total = self.comm.totals(torch.tensor([float(rows)], device=self.device))[0]
            loss = loss * (self.num_processes * rows / total if total else 1.0)
        elif self.loss_weight is not None:
            loss = loss * self.loss_weight
        if len({prepared.optimizer.loss_scale.value for prepared in self._optimizers}) > 1:
            raise UserError("fp16 with several prepared optimizers is not supported: a loss can have one loss scale")
        if self._optimizers:
            loss = self._optimizers[0].optimizer.scale(loss)
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: int = 2) -> Tensor:
        """Clip the global norm at the step; return the unscaled norm before clipping, on the device.

        Raises:
            UserError: Another norm than 2, an incomplete accumulation, or not all parameters of one prepared optimizer.
        """
        if not self.sync_gradients:
            raise UserError("clip_grad_norm_ in the middle of an accumulation: call it only `if accelerator.sync_gradients`")
        if norm_type != 2:
            raise UserError(f"clip_grad_norm_: norm_type {norm_type} is not supported, only 2")
        given = set(map(id, [parameters] if isinstance(parameters, Tensor) else parameters))
        for prepared in self._optimizers:
            if all(id(parameter) in given for group in prepared.param_groups for parameter in group["params"]):
                return prepared.optimizer.clip_grad_norm_(max_norm).to(self.device)
        raise UserError("clip_grad_norm_ needs all parameters of a prepared optimizer: pass model.parameters()")

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: all ranks run the same steps."""
        self._check_even(even_batches is not False)
        yield

    def _check_even(self, even: bool) -> None:
        if not even and self.num_processes > 1:
            raise UserError(
                "even_batches=False: a rank with fewer batches leaves the others waiting in a block. Leave even_batches on: "
                "the loader fills the last batch, and gather_for_metrics drops the repeated rows"
            )

    # --- saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the full model's state as CPU tensors, on every rank. A collective; for small models."""
        units = units_of(model)
        return super().get_state_dict(model, unwrap) if units is None else units.state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Write everything that `load_state` needs, in sharded form. A collective.

        An earlier state in the folder is replaced when the new one is complete; other files stay. With automatic naming,
        numbers continue after the highest that exists. Registered hooks get an empty dictionary for each model's weights.

        Returns:
            The folder: `output_dir`, or the next one under the project's checkpoints.

        Raises:
            UserError: A scheduler or registered object has a state that `load_state` could not read.
        """
        folder = self._folder_to_save(output_dir)
        with rank_zero(self.comm) as first:
            if first:
                shutil.rmtree(folder / WRITING, ignore_errors=True)  # of a save that was killed
                (folder / WRITING).mkdir(parents=True)
        for hook in self._save_model_state_pre_hook.values():
            hook([*self._models], [{} for _ in self._models], str(folder))
        for number, (units, optimizer) in enumerate(self._engines()):
            save_checkpoint(folder / WRITING / f"model_{number}", units, optimizer)
        random_states = self.comm.all(random_state(self.device))
        with rank_zero(self.comm) as first:
            if first:
                objects = {name: [each.state_dict() for each in own] for name, own in self._objects().items()}
                torch.save({"step": self.step, "random": random_states, **objects}, folder / WRITING / SMALL)
                read_plain(folder / WRITING / SMALL)  # a state that could not be loaded fails now
                publish_state(folder)
                if self.project_configuration.automatic_checkpoint_naming and self.project_configuration.total_limit:
                    for old in self._saved()[: -self.project_configuration.total_limit]:
                        shutil.rmtree(old)
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Load a state of `save_state`, on any number of ranks. A collective.

        Args:
            input_dir: The folder. With automatic naming, None takes the last complete one under the project's checkpoints.

        Raises:
            UserError: The state is incomplete or changed, or has another number of schedulers or registered objects.
        """
        folder = Path(input_dir).expanduser() if input_dir is not None else [self._project(), *self._saved()][-1]
        state = _state_in(folder)
        if state is None:
            raise UserError(f"{folder}: no complete {STATE} is in it: give the folder that save_state returned")
        with rank_zero(self.comm) as first:
            if first:
                check_contents(state)
        small = read_plain(state / SMALL)
        for name, own in self._objects().items():
            if len(small[name]) != len(own):
                raise UserError(f"{folder}: has the state of {len(small[name])} {name}, and this run has {len(own)}")
        for hook in self._load_model_state_pre_hook.values():
            hook([*self._models], str(folder))
        for number, (units, optimizer) in enumerate(self._engines()):
            load_checkpoint(state / f"model_{number}", units, optimizer)
        for name, own in self._objects().items():
            for each, saved in zip(own, small[name]):
                each.load_state_dict(saved)
        self.step = small["step"]
        if self.process_index < len(small["random"]):  # else the rank keeps the random state of its seed
            set_random_state(small["random"][self.process_index], self.device)

    def _objects(self) -> dict[str, list[Any]]:
        """Return the objects with small states, by kind."""
        return {"schedulers": self._schedulers, "registered objects": self._custom_objects}

    def _engines(self) -> list[tuple[ShardedTransformer, ShardedOptimizer | None]]:
        """Return the units of the prepared models, each with its optimizer if it has one."""
        optimizers = {id(prepared.optimizer.units): prepared.optimizer for prepared in self._optimizers}
        found = [units for model in self._models if (units := units_of(model)) is not None]
        return [(units, optimizers.get(id(units))) for units in found]

    def _folder_to_save(self, output_dir: str | None) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            assert output_dir is not None, "save_state: name a folder"
            return Path(output_dir).expanduser()
        last = self.comm.same(_number(self._saved()[-1]) if self._saved() else -1)
        return self._project() / f"checkpoint_{max(self.save_iteration, last + 1)}"

    def _project(self) -> Path:
        return Path(self.project_dir, "checkpoints")

    def _saved(self) -> list[Path]:
        """Return the folders that are named automatically and have a complete state, by number."""
        found = [path for path in self._project().glob("checkpoint_[0-9]*") if _state_in(path) is not None]
        return sorted(found, key=_number)


def publish_state(folder: Path) -> None:
    """Name the state that was written, durably, and remove the one before."""
    writing, state, former = folder / WRITING, folder / STATE, folder / FORMER
    write_contents(writing, apart=[path.name for path in writing.glob("model_*")])
    sync_tree(writing)
    if state.exists():
        shutil.rmtree(former, ignore_errors=True)  # a kill may have left a part of it
        state.rename(former)
    writing.rename(state)
    sync_folder(folder)
    sync_folder(folder.parent)
    shutil.rmtree(former, ignore_errors=True)


def _state_in(folder: Path) -> Path | None:
    """Return the complete state in a folder: the last, or the one before if a kill came between two names."""
    return next((folder / name for name in (STATE, FORMER) if (folder / name / CONTENTS).is_file()), None)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
