"""The short runs of `ftkit verify`, as one of their ranks.

A trial is the recipe with some strategy choices forced. Several run one after the other in the same ranks. Each records loss
and gradient norm of every step, and a hash of every sample of the step. The stock trial uses the Hugging Face Trainer with
PyTorch's AdamW on a whole fp32 model in one process, and nothing of the engine.

Dropout is off, because different divisions of a batch draw different masks. Adapters and fresh weights start from the same
values everywhere. Cost: each trial loads the model.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainerCallback

from ftkit.config.recipe import Recipe
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.model import ShardedModel
from ftkit.errors import UserError
from ftkit.hf.adapters import add_adapter
from ftkit.hf.load.tasks import TASKS
from ftkit.hf.sharding import units_of
from ftkit.launch.ranks import Stop
from ftkit.output.run_folder import RunFolder
from ftkit.train.arguments import lora_config, training_arguments
from ftkit.train.build import check_fit, load_tokenizer, make_trainer, prepare_rows
from ftkit.train.planning import ask_here, model_of
from ftkit.train.resume import first_whole
from ftkit.train.trainer import RecipeTrainer


@dataclass(frozen=True)
class Trial:
    """One short run."""

    name: str  # in the table
    recipe: Recipe
    ranks: int
    stock: bool = False  # run by the stock Trainer
    resumes: str | None = None  # folder of a run, whose newest checkpoint is resumed
    killed_at: int | None = None  # step before which the last rank kills itself, once a checkpoint is written


@dataclass
class Trajectory:
    """The result of a trial."""

    name: str
    losses: list[float] = field(default_factory=list)  # of each step
    grad_norms: list[float] = field(default_factory=list)  # of each step
    samples: dict[int, list[str]] = field(default_factory=dict)  # step to the sorted hashes of its samples
    problem: str = ""  # why the trial could not run
    strategy: str = ""


class NotingTrainer(RecipeTrainer):
    """A Trainer that records the samples of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[int, list[str]] = defaultdict(list)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Record the samples, and train on them."""
        pad = self.pad_token_id
        for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist()):
            self.seen[self.state.global_step + 1].append(_hash(_stripped(ids, pad), _stripped(labels, -100)))
        return super().training_step(model, inputs, num_items_in_batch)


class Doom(TrainerCallback):
    """Kill the last rank at the start of a step, after the checkpoint before it is written."""

    def __init__(self, trainer: RecipeTrainer, step: int) -> None:
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the checkpoint on all ranks, then kill the last one."""
        if state.global_step + 1 == self.step:
            self.trainer.checkpoints.finish()
            if args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)


def run_trials(stop: Stop, trials: Sequence[Trial]) -> list[Trajectory]:
    """Run trials of equal ranks one after the other. A stock one follows one on one rank, and takes its first values."""
    say = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, quiet=stop.rank > 0)
    found: list[Trajectory] = []
    first: dict[str, Tensor] = {}
    for trial in trials:
        began = time.perf_counter()
        found.append(run_stock(trial, first) if trial.stock else run_one(trial, first.update))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say.print(f"  {trial.name}: {found[-1].problem or f'{time.perf_counter() - began:.1f} s'}")
    return found


def run_one(trial: Trial, keep_first: Callable[[dict[str, Tensor]], object]) -> Trajectory:
    """Run a trial on the engine. Errors are those of a run, except that a plan that does not fit is a `problem`.

    Args:
        trial: The trial.
        keep_first: Called on one rank with the first values that no file contains: the adapter's, or all of a new model.
    """
    recipe = trial.recipe
    Path(recipe.output.dir).mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(recipe.model)
    arguments = training_arguments(recipe, trial.ranks)
    model = model_of(recipe, weights=True)
    check_fit(model, tokenizer, recipe.data.sequence_tokens)
    still(model)
    try:
        plan = ask_here(recipe, model, trial.ranks, Communicator(arguments.device)).plan()
    except UserError as error:
        return Trajectory(trial.name, problem=str(error).splitlines()[0])
    trainer = make_trainer(recipe, prepare_rows(recipe, tokenizer), tokenizer, model, arguments, plan, kind=NotingTrainer)
    if trial.ranks == 1 and trial.resumes is None and draws(recipe):
        trainer.add_callback(First(lambda units: keep_first(_trained_first(units, fresh=recipe.model.name is None))))
    if trial.killed_at is not None:
        trainer.add_callback(Doom(trainer, trial.killed_at))
    checkpoint = None
    if trial.resumes is not None:
        quiet = Console(quiet=True)
        found = [str(path) for path in RunFolder(Path(trial.resumes)).checkpoints()[::-1]]
        checkpoint = first_whole(found, Communicator(arguments.device), quiet.print)
        if checkpoint is None:
            raise UserError(f"{trial.resumes}: the killed run left no checkpoint")
    trainer.train(resume_from_checkpoint=checkpoint)
    made = _trajectory(trial, trainer, trainer.engine.comm.all(dict(trainer.seen)))
    trainer.units.tiers.close()
    made.strategy = str(plan.strategy)
    return made


def run_stock(trial: Trial, first: dict[str, Tensor]) -> Trajectory:
    """Run a trial with the Trainer of transformers on a whole fp32 model, from the engine's `first` values."""
    recipe = trial.recipe
    if draws(recipe) and not first:
        return Trajectory(trial.name, problem="its first values come from a run on one rank, which does not fit")
    tokenizer = load_tokenizer(recipe.model)
    arguments = training_arguments(recipe, 1)
    arguments.ftkit = None
    family = getattr(transformers, TASKS[recipe.task])
    source = recipe.model
    if source.name is not None:
        options = {"revision": source.revision, "trust_remote_code": source.trust_remote_code, "dtype": torch.float32}
        if source.config is not None:
            options["config"] = model_of(recipe, weights=True).config
        model = family.from_pretrained(source.name, **options)
    else:
        model = family.from_config(model_of(recipe, weights=True).config, dtype=torch.float32)
    adapter = lora_config(recipe.adapter, recipe.task)
    if adapter is not None:
        model = add_adapter(model, adapter)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in first.items():
            own[name].copy_(value)
    still(model)
    trainer = make_trainer(recipe, prepare_rows(recipe, tokenizer), tokenizer, model, arguments, None, kind=NotingTrainer)
    trainer.train()
    return _trajectory(trial, trainer, [dict(trainer.seen)])


def draws(recipe: Recipe) -> bool:
    """Return whether first values are random: those of an adapter, or all of a new model."""
    return recipe.adapter is not None or recipe.model.name is None


def still(model: nn.Module) -> None:
    """Turn dropout off, in modules and in numbers that models store."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


class First(TrainerCallback):
    """Call a function with the units before the first step."""

    def __init__(self, show: Callable[[ShardedModel], object]) -> None:
        self.show = show

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Call it."""
        self.show(model)


def _trained_first(model: Any, *, fresh: bool) -> dict[str, Tensor]:
    """Return the values that no file contains: trained ones of an adapter, or all of a new model."""
    units = units_of(model)
    assert units is not None
    trained = {segment.name for flat in units.trainable for segment in flat.layout.segments}
    return {name: value.cpu() for name, value in units.state_dict().items() if fresh or name in trained}


def _trajectory(trial: Trial, trainer: NotingTrainer, noted: Sequence[dict[int, list[str]]]) -> Trajectory:
    lines = [line for line in trainer.state.log_history if "loss" in line]
    samples = {step: sorted(each for own in noted for each in own.get(step, ())) for step in noted[0]}
    return Trajectory(
        trial.name, [float(line["loss"]) for line in lines], [float(line["grad_norm"]) for line in lines], samples
    )


def _stripped(row: list[int], filler: int) -> list[int]:
    """Return a row without the padding at its end, which depends on the batch."""
    stop = len(row)
    while stop and row[stop - 1] == filler:
        stop -= 1
    return row[:stop]


def _hash(*parts: list[int]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())
