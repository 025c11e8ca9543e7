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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch import Tensor, nn

from ftkit.cli.options import say
from ftkit.config.recipe import Recipe
from ftkit.engine.comm.communicator import Communicator
from ftkit.errors import UserError
from ftkit.hf.adapters import add_adapter
from ftkit.hf.load.tasks import TASKS
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


class NotingTrainer(RecipeTrainer):
    """A Trainer that records the samples of each step and the first values that no file contains.

    Attributes:
        trial: The trial, set after construction.
        seen: Hashes of this rank's samples, of each step. Padding, which depends on the batch, is left out.
        drawn: On one rank, the first values of an adapter, or of all parameters of a new model.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trial: Trial
        self.seen: dict[int, list[str]] = defaultdict(list)
        self.drawn: dict[str, Tensor] = {}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Record the samples, and train on them, or kill the last rank once the checkpoint before is written."""
        step = self.state.global_step + 1
        if step == 1 and not self.seen and self.trial.ranks == 1 and self.units is not None:
            fresh = self.trial.recipe.model.name is None
            state = self.units.state_dict() if fresh or self.trial.recipe.adapter is not None else {}
            self.drawn = {name: value.cpu() for name, value in state.items() if fresh or "lora_" in name}
        if step == self.trial.killed_at:
            self.checkpoints.finish()
            if self.args.process_index == self.args.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist()):
            sample = [each for each in ids if each != self.pad_token_id], [each for each in labels if each != -100]
            self.seen[step].append(xxhash.xxh3_64_hexdigest(repr(sample).encode()))
        return super().training_step(model, inputs, num_items_in_batch)


def run_trials(stop: Stop, trials: Sequence[Trial]) -> list[Trajectory]:
    """Run trials of equal ranks one after the other. A stock one follows one on one rank, and takes its first values."""
    found: list[Trajectory] = []
    first: dict[str, Tensor] = {}
    for trial in trials:
        began = time.perf_counter()
        found.append(run_stock(trial, first) if trial.stock else run_one(trial, first))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if stop.rank == 0:
            say(f"  {trial.name}: {found[-1].problem or f'{time.perf_counter() - began:.1f} s'}")
    return found


def run_one(trial: Trial, first: dict[str, Tensor]) -> Trajectory:
    """Run a trial on the engine, and add to `first`. A plan that does not fit is a `problem`, not an error."""
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
    trainer.trial = trial
    checkpoint = None
    if trial.resumes is not None:
        found = [str(path) for path in RunFolder(Path(trial.resumes)).checkpoints()[::-1]]
        checkpoint = first_whole(found, Communicator(arguments.device), say)
        if checkpoint is None:
            raise UserError(f"{trial.resumes}: the killed run left no checkpoint")
    trainer.train(resume_from_checkpoint=checkpoint)
    first |= trainer.drawn
    made = _trajectory(trial, trainer, trainer.engine.comm.all(dict(trainer.seen)))
    trainer.units.tiers.close()
    return made


def run_stock(trial: Trial, first: dict[str, Tensor]) -> Trajectory:
    """Run a trial with the Trainer of transformers on a whole fp32 model, from the engine's `first` values."""
    recipe = trial.recipe
    tokenizer = load_tokenizer(recipe.model)
    arguments = training_arguments(recipe, 1)
    arguments.ftkit = None
    family = getattr(transformers, TASKS[recipe.task])
    source = recipe.model
    options = {"config": model_of(recipe, weights=True).config, "dtype": torch.float32}
    if source.name is not None:
        options |= {"revision": source.revision, "trust_remote_code": source.trust_remote_code}
        model = family.from_pretrained(source.name, **options)
    else:
        model = family.from_config(**options)
    adapter = lora_config(recipe.adapter, recipe.task)
    if adapter is not None:
        model = add_adapter(model, adapter)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in first.items():
            own[name].copy_(value)
    still(model)
    trainer = make_trainer(recipe, prepare_rows(recipe, tokenizer), tokenizer, model, arguments, None, kind=NotingTrainer)
    trainer.trial = trial
    trainer.train()
    return _trajectory(trial, trainer, [dict(trainer.seen)])


def still(model: nn.Module) -> None:
    """Turn dropout off, in modules and in numbers that models store."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def _trajectory(trial: Trial, trainer: NotingTrainer, noted: Sequence[dict[int, list[str]]]) -> Trajectory:
    lines = [line for line in trainer.state.log_history if "loss" in line]
    samples = {step: sorted(each for own in noted for each in own.get(step, ())) for step in noted[0]}
    return Trajectory(
        trial.name, [float(line["loss"]) for line in lines], [float(line["grad_norm"]) for line in lines], samples
    )
