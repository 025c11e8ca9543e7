"""Accelerate's face of the engine: `ftkit.Accelerator` prepares, scales, clips, saves and resumes a sharded model.

It is accelerate's own class with the verbs overridden that touch weights, gradients or state. Data loaders, schedulers,
gathering of metrics and trackers are accelerate's. An optimizer that was made from the model's parameters is exchanged
for the sharded one with the same groups: the groups themselves are shared, so schedulers made before still drive it.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ftkit.engine.checkpoint import load_checkpoint
from ftkit.engine.comm import Communicator
from ftkit.engine.durable import all_ranks, rank_zero
from ftkit.engine.optimizer import ShardedAdamW, ShardedOptimizer, ShardedSGD
from ftkit.engine.saving import save_checkpoint
from ftkit.engine.shard import Units
from ftkit.errors import UserError
from ftkit.hf.blocks import shard, units_of
from ftkit.hf.plain import forbidden, read_plain
from ftkit.hf.settings import EngineSettings
from ftkit.hf.states import WRITING, begin_state, check_state_folder, is_whole, publish_state, settle_state

STEP_FILE = "accelerator.pt"
DEVICES = ("cpu", "cuda")


def sharded_optimizer(optimizer: torch.optim.Optimizer, units: Units) -> ShardedOptimizer:
    """Return the sharded optimizer with the groups of a torch one that has not stepped yet.

    Args:
        optimizer: AdamW or SGD over the model's parameters; its `param_groups` are shared, so schedulers drive both.

    Raises:
        UserError: for other classes, switches that the sharded ones lack, or parameters of a model on meta.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    _refuse_meta(optimizer)
    if type(optimizer) is torch.optim.AdamW:
        unsupported, made = ("amsgrad", "maximize", "capturable"), ShardedAdamW(units)
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
    made.take_groups(optimizer.param_groups)
    # a scheduler made for the original goes on driving the shared groups; it wants to know that steps are made
    made.register_step_post_hook(lambda *_: setattr(optimizer, "_opt_called", True))
    return made


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_meta(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer over parameters on meta: sharding has put others in their places, or will."""
    if any(parameter.is_meta for parameter in _parameters_of(optimizer)):
        raise UserError(
            f"this {type(optimizer).__name__} was made from a model on meta (ftkit.load_model), whose parameters sharding "
            "replaces: make it after accelerator.prepare(model) or ftkit.shard(model); with the Trainer leave it to "
            "TrainingArguments (optim, learning_rate) or override create_optimizer"
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
        kwargs: as accelerate's. `mixed_precision` gives the compute dtype; autocast itself stays off.

    Raises:
        UserError: where DeepSpeed, FSDP, Megatron or fp8 is asked for as well.
    """

    def __init__(self, *, ftkit: EngineSettings | Mapping[str, Any] | str = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.adopt(EngineSettings.of(ftkit))

    def adopt(
        self, settings: EngineSettings, *, micro_batch_tokens: int = 2048, accumulation_steps: int = 0, parts: int = 1
    ) -> None:
        """Take over an accelerator that accelerate (or a Trainer) has built.

        Args:
            settings: of the engine.
            micro_batch_tokens, accumulation_steps, parts: see `ftkit.shard`; 0 takes this accelerator's.
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
        if settings.dtype == "auto" and precision != "no":
            settings = EngineSettings(**{**vars(settings), "dtype": precision})
        self.native_amp = False
        self.scaler = None
        self.settings = settings
        self.shard_options = {
            "micro_batch_tokens": micro_batch_tokens,
            "accumulation_steps": accumulation_steps or self.gradient_accumulation_steps,
            "parts": parts,
        }

    @property
    def mixed_precision(self) -> str:
        """Always "no": the engine casts when it gathers, and autocast on top would cast again."""
        return "no"

    # --- prepare

    def sharded(self, model: nn.Module) -> Units:
        """Return the units of `model`, sharding it first if it is not; weights on meta are streamed in.

        Raises:
            UserError: If the loader would not deal the rows out among the ranks that share the weights.
        """
        units = units_of(model)
        if units is None:
            comm = Communicator(self.device)
            if comm.world_size != self.num_processes:
                raise UserError(
                    f"the ranks share the weights by {comm.world_size}, and accelerate counts {self.num_processes}: each "
                    "would train on the same rows. Where there is no GPU say so: use_cpu=True in TrainingArguments, "
                    "cpu=True in Accelerator"
                )
            units = shard(model, self.settings, device=self.device, comm=comm, **self.shard_options)
        return units

    def prepare(self, *things: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does, models first: an optimizer may stand before its model."""
        for thing in things:
            if isinstance(thing, nn.Module):
                self.prepare_model(thing)
        return super().prepare(*things, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place (also one that will only be evaluated) and return it."""
        self.sharded(model)
        if model not in self._models:
            self._models.append(model)
        model._is_accelerate_prepared = True
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

    def _units_with(self, optimizer: torch.optim.Optimizer) -> Units:
        _refuse_meta(optimizer)
        updated = set(map(id, _parameters_of(optimizer)))
        for model in self._models:
            units = units_of(model)
            if units is not None and not updated.isdisjoint(units.places):
                return units
        raise UserError("prepare the model before its optimizer, or together with it: accelerator.prepare(model, optimizer)")

    # --- a step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Call backward on the loss, divided by the accumulation steps and multiplied by the loss scale."""
        if len({prepared.optimizer.loss_scale.value for prepared in self._optimizers}) > 1:
            raise UserError("fp16 with several prepared optimizers is not supported: a loss can have one loss scale")
        if self._optimizers:
            loss = self._optimizers[0].optimizer.scale(loss)
        super().backward(loss, **kwargs)

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

    # --- saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole model's state as CPU tensors, on every rank. A collective; for small models."""
        units = units_of(model)
        return super().get_state_dict(model, unwrap) if units is None else units.state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Write everything that `load_state` needs, in sharded form. A collective.

        An earlier state in the folder is replaced as a whole once the new one is on the disk, and nothing else that lies
        there; `contents.json` lists the files with their checksums. Automatically named states are never written over:
        numbers go on after the highest there is, also in a run that was started again. Hooks registered for it are called
        with the models, no weights, and the folder.

        Returns:
            The folder: `output_dir`, or the next one under the project's checkpoints.

        Raises:
            UserError: for a scheduler or registered object whose state `load_state` could not read.
        """
        comm = self._communicator()
        folder = self._state_folder(output_dir, comm)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, [], str(folder))
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
            input_dir: None takes the last whole one under the project's checkpoints, where they are named automatically.

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
        step = _load(folder / STEP_FILE)["step"]
        for hook in self._load_model_state_pre_hook.values():
            hook(self._models, str(folder))
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

    def _other_states(self) -> dict[str, bytes]:
        """Return the files of what is neither model nor optimizer: schedulers and registered objects."""
        things = {f"scheduler_{number}.pt": each for number, each in enumerate(self._schedulers)}
        things |= {f"custom_{number}.pt": each for number, each in enumerate(self._custom_objects)}
        return {name: _readable(name, thing) for name, thing in things.items()}

    def _communicator(self) -> Communicator:
        engines = self._engines()
        return engines[0][0].comm if engines else Communicator(self.device)

    def _engines(self) -> list[tuple[Units, ShardedOptimizer | None]]:
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


def _readable(name: str, thing: Any) -> bytes:
    """Return the state of a scheduler or registered object as `load_state` will read it: plain data and tensors.

    Raises:
        UserError: if it holds anything else, which would only show when the state is needed.
    """
    buffer = io.BytesIO()
    torch.save(thing.state_dict(), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except pickle.UnpicklingError as error:
        kind = forbidden(error) or "something else"
        raise UserError(
            f"save_state: {name}, the state_dict() of a {type(thing).__name__}, holds {kind}, which load_state would not "
            "read (a pickle can run code): let it return numbers, strings, lists, dictionaries and tensors"
        ) from error
    return buffer.getvalue()


def _load(path: Path) -> Any:
    if not path.exists():
        raise UserError(f"{path}: missing; the state is not whole, or is of another set of prepared objects")
    return read_plain(path)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random numbers of this process, as plain data."""
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": (version, list(keys), gauss),
        "numpy": (kind, torch.from_numpy(words.astype(np.int64)), position, has_gauss, cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go back to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
