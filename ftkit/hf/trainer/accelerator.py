"""Accelerate's face of the engine: `ftkit.Accelerator` prepares, scales, clips, saves and resumes a sharded model.

It is accelerate's own class with the verbs overridden that touch weights, gradients or state. Data loaders, schedulers,
gathering of metrics and trackers are accelerate's. An optimizer that was made from the model's parameters is exchanged
for the sharded one with the same groups: the groups themselves are shared, so schedulers made before still drive it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn

from ftkit.config.engine import EngineSettings
from ftkit.engine.checkpoint.durable import all_ranks, rank_zero
from ftkit.engine.checkpoint.finite import refuse_not_finite
from ftkit.engine.checkpoint.loading import load_checkpoint
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.buffers import persistent_buffers
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.optimizer import ShardedOptimizer
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.engine.shard import refuse_failed
from ftkit.errors import UserError
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.hf.sharding import let_train, shard, units_of
from ftkit.hf.trainer.accelerator_states import (
    WRITING,
    begin_state,
    check_state_folder,
    is_whole,
    publish_state,
    settle_state,
)
from ftkit.hf.trainer.checkpoint_files import read_plain, readable
from ftkit.hf.trainer.seeding import random_state, set_random_state
from ftkit.plan.choice import Plan
from ftkit.spec.strategy import AUTO, UNIT
from ftkit.spec.update_rules import ADAMW, UpdateRule, rule_of

logger = logging.getLogger(__name__)

STEP_FILE = "accelerator.pt"
DEVICES = ("cpu", "cuda")


def sharded_optimizer(optimizer: torch.optim.Optimizer, units: ShardedTransformer) -> ShardedOptimizer:
    """Return the sharded optimizer with the groups of a torch one that has not stepped yet.

    Args:
        optimizer: AdamW or SGD over the model's parameters; its `param_groups` are shared, so schedulers drive both.
        units: the sharded model.

    Raises:
        UserError: for other classes, switches that the sharded ones lack, or parameters of a model on meta.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    _refuse_meta(optimizer)
    made: ShardedOptimizer
    if type(optimizer) is torch.optim.AdamW:
        unsupported = ("amsgrad", "maximize", "capturable")
        made = ShardedAdamW(units)
    elif type(optimizer) is torch.optim.SGD:
        unsupported = ("nesterov", "maximize", "dampening")
        made = ShardedSGD(units, momentum=max(group["momentum"] for group in optimizer.param_groups))
    else:
        raise UserError(
            f"optimizer {type(optimizer).__name__} has no sharded form: use AdamW (optim=adamw_torch) or SGD (optim=sgd)"
        )
    if optimizer.state:
        raise UserError(f"this {type(optimizer).__name__} has stepped already; its state is not taken over: give a new one")
    for key in unsupported:
        if any(group.get(key) for group in optimizer.param_groups):
            raise UserError(f"{type(optimizer).__name__}: {key} has no sharded form; leave it off")
    tensors = {key for group in optimizer.param_groups for key, value in group.items() if torch.is_tensor(value)}
    if tensors:
        raise UserError(f"{type(optimizer).__name__}: {min(tensors)} is a tensor; give it as a number")
    made.take_groups(optimizer.param_groups)
    made.defaults = {**made.defaults, **optimizer.defaults}  # schedules read them: polynomial, OneCycleLR
    # a scheduler made for the original goes on driving the shared groups; it wants to know that steps are made
    made.register_step_post_hook(lambda *_: setattr(optimizer, "_opt_called", True))
    return made


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return the update rule that the sharded form of an optimizer will have; that of AdamW for one without a form."""
    if type(optimizer) is not torch.optim.SGD:
        return ADAMW
    return rule_of("sgd", momentum=max((group["momentum"] for group in optimizer.param_groups), default=0.0))


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_meta(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer over parameters on meta: sharding has put others in their places, or will."""
    if any(parameter.is_meta for parameter in _parameters_of(optimizer)):
        raise UserError(
            f"this {type(optimizer).__name__} was made from a model on meta (a bare configuration), whose parameters "
            "sharding replaces. Make it after accelerator.prepare(model) or ftkit.shard(model); with the Trainer leave "
            "it to TrainingArguments (optim, learning_rate) or override create_optimizer"
        )


class PreparedOptimizer(AcceleratedOptimizer):
    """A sharded optimizer as accelerate holds one: steps only when gradients are to be applied."""

    optimizer: ShardedOptimizer

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for an overflow."""
        return self.optimizer.step_was_skipped


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` on ftkit's engine.

    Args:
        ftkit: `"auto"`, a mapping, a YAML file, or `EngineSettings`.
        kwargs: arguments of accelerate's class. `mixed_precision` gives the compute dtype; autocast itself stays off.

    Raises:
        UserError: where DeepSpeed, FSDP, Megatron or fp8 is asked for as well, or `accumulate_in: unit`.
    """

    def __init__(self, *, ftkit: EngineSettings | Mapping[str, Any] | str = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        settings = EngineSettings.of(ftkit)
        if settings.strategy.accumulate_in == UNIT:
            raise UserError(
                "accumulate_in: unit needs the micro-batches of a step as one batch, which the Trainer gives its model: use "
                "ftkit.Trainer, or leave accumulate_in to 'auto'"
            )
        self.adopt(settings)

    def adopt(
        self, settings: EngineSettings, *, micro_batch_tokens: int = 2048, accumulation_steps: int = 0
    ) -> None:
        """Take over an accelerator that accelerate (or a Trainer) has built.

        Args:
            settings: the engine's settings.
            micro_batch_tokens: see `ftkit.shard`.
            accumulation_steps: see `ftkit.shard`; 0 takes this accelerator's `gradient_accumulation_steps`.
        """
        kind = self.distributed_type.value
        if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
            raise UserError(f"ftkit's engine cannot share a run with {kind}: leave its plugin and environment settings off")
        precision = self.state._mixed_precision
        if self.device.type not in DEVICES:
            raise UserError(
                f"ftkit's engine computes on CUDA devices or the CPU, and this run is on {self.device.type}: ask for the "
                "CPU (use_cpu=True in TrainingArguments, Accelerator(cpu=True)), or leave the engine off (ftkit=None)"
            )
        if precision not in ("no", "bf16", "fp16"):
            raise UserError(f"mixed_precision={precision} is not supported: use no, fp16 or bf16")
        _refuse_handlers(self)
        if settings.strategy.dtype == AUTO and precision != "no":
            settings = settings.choosing(dtype=precision)
        self.native_amp = False
        self.scaler = None
        self.settings = settings
        self.planned: weakref.WeakSet[ShardedTransformer] = weakref.WeakSet()  # their memory is not granted again
        self.shard_options = {
            "micro_batch_tokens": micro_batch_tokens,
            "accumulation_steps": accumulation_steps or self.gradient_accumulation_steps,
        }
        self.rule = ADAMW  # of the optimizer to come

    @property
    def mixed_precision(self) -> str:
        """Always "no": the engine casts when it gathers, and autocast on top would cast again."""
        return "no"

    # --- prepare

    def sharded(
        self,
        model: nn.Module,
        *,
        evaluation: bool | None = None,
        rule: UpdateRule | None = None,
        plan: Plan | None = None,
    ) -> ShardedTransformer:
        """Return the units of `model`, sharding it first if it is not; weights on meta are streamed in.

        Args:
            model: the model; it is planned beside the models that this accelerator has sharded before.
            evaluation: whether the model is only evaluated. False makes it trainable even where it was sharded for
                evaluation; None leaves a sharded model as it is, and shards another one for training.
            rule: update rule of the optimizer to come; None takes that of the optimizer given to `prepare`.
            plan: how memory is used, where that was planned before.

        Raises:
            UserError: if the loader would not deal the rows out among the ranks that share the weights, or nothing fits.
        """
        refuse_failed(model)
        units = units_of(model)
        if units is not None and units.evaluated_only and evaluation is False:
            let_train(units)
        if units is None:
            comm = Communicator(self.device)
            if comm.world_size != self.num_processes:
                raise UserError(
                    f"the ranks share the weights by {comm.world_size}, and accelerate counts {self.num_processes}: each "
                    "would train on the same rows. Without a GPU say so: use_cpu=True (TrainingArguments), cpu=True "
                    "(Accelerator)"
                )
            there = [known for known in self.planned if known.model is not model]
            options: dict[str, Any] = {**self.shard_options, "beside": there, "rule": rule or self.rule, "plan": plan}
            units = shard(
                model, self.settings, device=self.device, comm=comm, evaluation=evaluation is True, **options
            )
            self.planned.add(units)
        return units

    def prepare(self, *things: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does, models first: an optimizer may stand before its model."""
        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                self.rule = rule_for(thing)
        for thing in things:
            if isinstance(thing, nn.Module):
                self.prepare_model(thing)
        return super().prepare(*things, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place and return it.

        Args:
            model: the model, as accelerate takes it.
            device_placement: not used; the engine places weights.
            evaluation_mode: whether the plan leaves out gradients and optimizer state.
        """
        self.sharded(model, evaluation=True if evaluation_mode else None)
        if model not in self._models:
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # accelerate's own mark
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Exchange `optimizer` for its sharded form, over the model that was prepared with it or before."""
        if isinstance(optimizer, PreparedOptimizer):
            prepared = optimizer
        else:
            if not isinstance(optimizer, ShardedOptimizer):
                optimizer = sharded_optimizer(optimizer, self._units_with(optimizer))
            prepared = PreparedOptimizer(optimizer)
        if prepared not in self._optimizers:
            self._optimizers.append(prepared)
        prepared._is_accelerate_prepared = True
        return prepared

    def _units_with(self, optimizer: torch.optim.Optimizer) -> ShardedTransformer:
        _refuse_meta(optimizer)
        updated = set(map(id, _parameters_of(optimizer)))
        for model in self._models:
            units = units_of(model)
            if units is not None and not updated.isdisjoint(units.places):
                return self.sharded(model, evaluation=False)
        raise UserError("prepare the model before its optimizer, or together with it: accelerator.prepare(model, optimizer)")

    # --- a step

    def backward(self, loss: Tensor, *, rows: float | None = None, **kwargs: Any) -> None:
        """Call backward on the loss, divided by the accumulation steps and multiplied by the loss scale.

        Args:
            loss: loss of this rank; the gradient is that of the mean over ranks.
            rows: what the loss is a mean over (rows, label tokens) on this rank, where ranks differ in it: the gradient is
                then that of the mean over all ranks' rows. A collective; all ranks give it or none.
            kwargs: further arguments of accelerate's `backward`.
        """
        if rows is not None:
            loss = loss * self.weight_of(rows)
        elif self.loss_weight is not None:
            loss = loss * self.loss_weight
        if len({prepared.optimizer.loss_scale.value for prepared in self._optimizers}) > 1:
            raise UserError("fp16 with several prepared optimizers is not supported: a loss can have one loss scale")
        if self._optimizers:
            loss = self._optimizers[0].optimizer.scale(loss)
        super().backward(loss, **kwargs)

    _told_ranks: int | None = None

    @property
    def num_processes(self) -> int:
        """The number of ranks, as accelerate's; what `telling_ranks` says within it."""
        return self._told_ranks or super().num_processes

    @contextmanager
    def telling_ranks(self, ranks: int) -> Iterator[None]:
        """Tell whoever computes a loss in here that there are `ranks` ranks: it may multiply the loss by their number."""
        self._told_ranks = ranks
        try:
            yield
        finally:
            self._told_ranks = None

    loss_weight: float | None = None
    """Factor of each loss that comes to `backward`; the Trainer sets it for a micro-batch."""

    def weight_of(self, rows: float) -> float:
        """Return the factor of this rank's mean in the mean over all ranks' rows; 1 where no rank has any. A collective."""
        total = self._communicator().totals(torch.tensor([float(rows)], device=self.device))[0]
        return self.num_processes * float(rows) / total if total else 1.0

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing to do: norms are reported unscaled, and the update unscales."""

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: int = 2) -> Tensor:
        """Clip the global norm exactly, at the step; return the norm before clipping, unscaled, on the device.

        Raises:
            UserError: for another norm than 2, in the middle of an accumulation, or parameters of no prepared optimizer.
        """
        if not self.sync_gradients:
            raise UserError("clip_grad_norm_ in the middle of an accumulation: call it only `if accelerator.sync_gradients`")
        if norm_type != 2:
            raise UserError(f"clip_grad_norm_: norm_type {norm_type} is not supported, only 2")
        wanted = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = set(map(id, wanted))
        for prepared in self._optimizers:
            updated = {id(parameter) for group in prepared.param_groups for parameter in group["params"]}
            if updated <= given:
                return prepared.optimizer.clip_grad_norm_(max_norm).to(self.device)
            if updated & given:
                raise UserError(
                    "clip_grad_norm_ was given a part of the parameters; the engine clips the global norm: pass "
                    "model.parameters()"
                )
        raise UserError("clip_grad_norm_: these parameters belong to no optimizer that this accelerator prepared")

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refuse: gradients lie in shards.

        Raises:
            UserError: always.
        """
        raise UserError("clip_grad_value_ is not supported on sharded gradients; use clip_grad_norm_")

    def autocast(self, autocast_handler: Any = None) -> Any:
        """Return a context that does nothing: the engine computes in its compute dtype."""
        return nullcontext()

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing where every rank gets as many batches, and refuse the rest: ranks compute their blocks together.

        Raises:
            UserError: for `even_batches=False` on several ranks.
        """
        even = self.even_batches if even_batches is None else even_batches
        if not even and self.num_processes > 1:
            raise UserError(
                "join_uneven_inputs(even_batches=False): a rank without a batch would leave the others waiting in a block. "
                "Leave even_batches on: the loader fills the last batch, and gather_for_metrics drops the repeated rows"
            )
        yield

    # --- saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole model's state as CPU tensors, on every rank, to be saved. A collective; for small models.

        Raises:
            UserError: for a parameter with values that are not finite.
        """
        units = units_of(model)
        if units is None:
            return super().get_state_dict(model, unwrap)
        state, buffers = units.state_dict(), persistent_buffers(model)
        for name, tensor in state.items():
            if name not in buffers:  # masks may be infinite
                refuse_not_finite(name, tensor.reshape(-1))
        return state

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Write everything that `load_state` needs, in sharded form. A collective.

        An earlier state in the folder is replaced as a whole once the new one is on the disk, and nothing else that lies
        there; `contents.json` lists the files with their checksums. Automatically named states are never written over:
        numbers go on after the highest there is, also in a run that was started again. Hooks registered for it are called
        with the models, an empty dictionary for the weights of each, and the folder; what they take out of these lists is
        saved all the same.

        Returns:
            The folder: `output_dir`, or the next one under the project's checkpoints.

        Raises:
            UserError: for a scheduler or registered object whose state `load_state` could not read.
        """
        comm = self._communicator()
        folder = self._state_folder(output_dir, comm)
        with rank_zero(comm) as first:
            if first:
                folder.mkdir(parents=True, exist_ok=True)  # hooks write into it
        for hook in self._save_model_state_pre_hook.values():
            hook([*self._models], [{} for _ in self._models], str(folder))
        with rank_zero(comm) as first:
            if first:
                states = self._other_states()
                place = begin_state(folder)
                for name, content in states.items():
                    (place / name).write_bytes(content)
                torch.save({"step": self.step}, place / STEP_FILE)
        for number, (units, optimizer) in enumerate(self._engines()):
            save_checkpoint(folder / WRITING / f"model_{number}", units, optimizer)
        with all_ranks(comm):
            try:
                torch.save(random_state(self.device), folder / WRITING / f"random_{self.process_index}.pt")
            except (OSError, RuntimeError) as error:  # the latter is what torch's writer makes of a full disk
                raise UserError(f"{folder}: the state could not be written: {error}") from error
        with rank_zero(comm) as first:
            if first:
                publish_state(folder)
                if self.project_configuration.automatic_checkpoint_naming and self.project_configuration.total_limit:
                    _remove_oldest(folder, self.project_configuration.total_limit)
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = _number(folder) + 1
        else:
            self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:
        """Read what `save_state` wrote, on any number of ranks. A collective.

        Args:
            input_dir: the folder; None takes the last whole one under the project's checkpoints, where they are named
                automatically.

        Raises:
            UserError: if the folder lacks a part.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = str(_last_whole(Path(self.project_dir, "checkpoints")))
        if input_dir is None:
            raise UserError("load_state: name the folder that save_state returned")
        folder = Path(os.path.expanduser(input_dir))
        with rank_zero(self._communicator()) as first:
            if first:
                settle_state(folder)
                check_state_folder(folder)
                self._check_objects(folder)
        step = _load(folder / STEP_FILE)["step"]
        for hook in self._load_model_state_pre_hook.values():
            hook([*self._models], str(folder))
        for number, (units, optimizer) in enumerate(self._engines()):
            load_checkpoint(folder / f"model_{number}", units, optimizer)
        for number, scheduler in enumerate(self._schedulers):
            scheduler.load_state_dict(_load(folder / f"scheduler_{number}.pt"))
        for number, thing in enumerate(self._custom_objects):
            thing.load_state_dict(_load(folder / f"custom_{number}.pt"))
        self.step = step
        own = folder / f"random_{self.process_index}.pt"
        if own.is_file():  # saved by fewer ranks: the others keep the state their seed gave them
            set_random_state(_load(own), self.device)

    def _check_objects(self, folder: Path) -> None:
        """Raise UserError where a state is of more or fewer registered objects than there are."""
        saved = sum(1 for path in folder.iterdir() if re.fullmatch(r"custom_\d+\.pt", path.name))
        if saved != len(self._custom_objects):
            raise UserError(
                f"{folder}: holds the state of {saved} registered objects, and {len(self._custom_objects)} are registered: "
                "register the same ones, in the same order (register_for_checkpointing)"
            )

    def _other_states(self) -> dict[str, bytes]:
        """Return the files of what is neither model nor optimizer: schedulers and registered objects."""
        things = {f"scheduler_{number}.pt": each for number, each in enumerate(self._schedulers)}
        things |= {f"custom_{number}.pt": each for number, each in enumerate(self._custom_objects)}
        return {name: readable(name, thing) for name, thing in things.items()}

    def _communicator(self) -> Communicator:
        engines = self._engines()
        return engines[0][0].comm if engines else Communicator(self.device)

    def _engines(self) -> list[tuple[ShardedTransformer, ShardedOptimizer | None]]:
        """Return the prepared models' units, each with its optimizer if it has one."""
        optimizers = {id(prepared.optimizer.units): prepared.optimizer for prepared in self._optimizers}
        found = [units for model in self._models if (units := units_of(model)) is not None]
        return [(units, optimizers.get(id(units))) for units in found]

    def _state_folder(self, output_dir: str | None, comm: Communicator) -> Path:
        configuration = self.project_configuration
        if configuration.automatic_checkpoint_naming:
            parent = Path(self.project_dir, "checkpoints")
            first_free = comm.same(max(map(_number, _numbered(parent)), default=-1) + 1)
            return parent / f"checkpoint_{max(self.save_iteration, first_free)}"
        if output_dir is None:
            raise UserError("save_state: name a folder, or set automatic_checkpoint_naming in the ProjectConfiguration")
        return Path(os.path.expanduser(output_dir))


def _refuse_handlers(accelerator: accelerate.Accelerator) -> None:
    """Raise for keyword handlers that change the trajectory and that the engine would ignore.

    Raises:
        UserError: for communication hooks of DDP, settings of a gradient scaler in fp16, and uneven batches.
    """
    ddp, scaler = accelerator.ddp_handler, accelerator.scaler_handler
    if ddp is not None and (ddp.comm_hook, ddp.comm_wrapper) != (DDPCommunicationHookType.NO,) * 2:
        raise UserError(
            f"DistributedDataParallelKwargs(comm_hook={ddp.comm_hook.value!r}) is not supported: the engine reduces "
            "gradients itself. Leave comm_hook off. With a compute dtype of 16 bits (mixed_precision='bf16') ranks send "
            "half as many bytes"
        )
    if scaler is not None and accelerator.state._mixed_precision == "fp16":
        raise UserError(
            "GradScalerKwargs: the engine has a loss scale of its own. Leave the handler off; in a plain loop give "
            "ftkit.ShardedAdamW(units, loss_scale=ftkit.LossScale(...))"
        )
    backend = accelerator.state.dynamo_plugin.backend.value
    if backend != "NO":
        logger.warning("dynamo_backend=%s (ACCELERATE_DYNAMO_BACKEND) is not used: the engine compiles no blocks", backend)
    if not accelerator.even_batches and accelerator.num_processes > 1:
        raise UserError(
            "DataLoaderConfiguration(even_batches=False): ranks with fewer batches would leave the others waiting in a "
            "block. Leave it on: gather_for_metrics drops the repeated rows"
        )


def _number(state: Path) -> int:
    return int(state.name.rpartition("_")[2])


def _numbered(folder: Path) -> list[Path]:
    """Return what is called `checkpoint_<number>` in `folder`, by number."""
    found = [path for path in folder.glob("checkpoint_*") if re.fullmatch(r"checkpoint_[0-9]+", path.name)]
    return sorted(found, key=_number)


def _last_whole(folder: Path) -> Path:
    """Return the whole state with the highest number in `folder`.

    Raises:
        UserError: if there is none.
    """
    whole = [state for state in _numbered(folder) if is_whole(state)]
    if not whole:
        raise UserError(f"{folder}: no checkpoint_<number> with a whole state in it")
    return whole[-1]


def _remove_oldest(state: Path, limit: int) -> None:
    """Remove the whole states with the lowest numbers beside `state`, until `limit` are left with it."""
    others = [other for other in _numbered(state.parent) if other != state and is_whole(other)]
    for old in others[: max(0, len(others) + 1 - limit)]:
        shutil.rmtree(old)


def _load(path: Path) -> Any:
    if not path.exists():
        raise UserError(f"{path}: missing; the state is not whole, or is of another set of prepared objects")
    return read_plain(path)
