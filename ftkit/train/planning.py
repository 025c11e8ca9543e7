"""From a recipe to its plan: on the box that is here, or on one that is known by name.

The model is built on the meta device from its configuration alone: no weights, no GPU, no rank. What the recipe grants
(`memory:`) wins over what the box has. `ftkit plan`, `--dry-run` and every rank of a run come through `ask_model`, so
what is shown is what is done.

It refuses what does not fit (`DoesNotFit`), and what the loader refuses. What it costs: the imports of torch and
transformers, and a module tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ftkit.config.engine import EngineSettings
from ftkit.config.recipe import AUTO_MICRO_BATCH_TOKENS, Recipe, split_batch
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.blocks import divisible, find_blocks
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.kernels.fuse import unusable
from ftkit.hf.kernels.head import HeadLoss, proven_head_loss
from ftkit.hf.load.config import read_config
from ftkit.hf.load.model import load_model
from ftkit.hf.memory.shape import disk_free, limits_here
from ftkit.hf.sharding import model_shape
from ftkit.output.run_folder import RunFolder
from ftkit.plan.architectures import architectures
from ftkit.plan.choice import Asked, Plan
from ftkit.plan.hardware import Box, box_with
from ftkit.plan.hardware import box as find_box
from ftkit.plan.limits import Limits
from ftkit.plan.memory import GIB
from ftkit.plan.speed import Rates
from ftkit.spec.strategy import AUTO, STEP
from ftkit.spec.tiers import DEVICE, HOST, NVME
from ftkit.spec.update_rules import rule_of
from ftkit.train.arguments import engine_settings, lora_config

BYTES_A_TOKEN = 4
"""Of a file of rows: English text has about 4 characters a token in vocabularies of 32k and more, JSON's keys among them."""


def plan_recipe(recipe: Recipe, ranks: int, box: Box | None = None) -> Plan:
    """Return the plan of a recipe.

    Args:
        recipe: the facts.
        ranks: processes of the whole run.
        box: profile of the box to plan for; None: this machine, on which all ranks run.

    Raises:
        DoesNotFit: with numbers and ways out. UserError: if there is no such model, or the box lacks its dtype.
    """
    return ask(recipe, ranks, box).plan()


def ask(recipe: Recipe, ranks: int, box: Box | None = None) -> Asked:
    """Return what the plan of a recipe is made of; raises `UserError` as `plan_recipe`."""
    model = model_of(recipe)
    if box is None:
        return ask_here(recipe, model, ranks)
    wanted = recipe.train.dtype if recipe.train.dtype != "auto" else box.dtype
    if wanted == "bf16" and box.dtype == "fp16":
        raise UserError(f"train.dtype: the GPUs of {box.name} have no bf16 (they would emulate it); use auto, fp16 or fp32")
    return ask_model(recipe, model, ranks, limits_of(recipe, box, ranks), box, dtype=wanted)


def ask_here(recipe: Recipe, model: Any, ranks: int) -> Asked:
    """Return what the plan of a recipe on this machine is made of, for a model that is built; raises as `plan_recipe`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = limits_here(engine_settings(recipe), device, ranks)
    limits = replace(limits, disk_bytes=disk_room(recipe))
    return ask_model(recipe, model, ranks, limits, box_here(recipe))


def box_here(recipe: Recipe) -> Box | None:
    """Return the profile by whose rates a recipe is planned on this machine: what it names, or the one with the same GPUs.

    Raises:
        UserError: if it names one that is not there.
    """
    if recipe.box != "auto":
        return find_box(recipe.box, "box")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return box_with(names)


@dataclass(frozen=True)
class Epoch:
    """How long one pass over a recipe's rows takes.

    Args:
        tokens: tokens of all rows, guessed from the bytes of their file.
        seconds: time for these tokens at the plan's tokens a second.
    """

    tokens: int
    seconds: float

    def __str__(self) -> str:
        days = self.seconds / 86400
        size = f"{self.tokens / 1e6:,.1f}M" if self.tokens >= 1e5 else f"{self.tokens:,}"
        hours = f"{self.seconds / 3600:.1f} h" if days > 1 / 24 else f"{self.seconds:.0f} s"
        time = f"{days:.1f} days" if days >= 1 else hours
        return f"{time} for about {size} tokens ({BYTES_A_TOKEN} bytes of the file each)"

    def as_dict(self) -> dict[str, float]:
        """Return it as an object for JSON."""
        return {"tokens": self.tokens, "seconds": self.seconds, "days": self.seconds / 86400}


def epoch_of(recipe: Recipe, plan: Plan) -> Epoch | None:
    """Return how long an epoch takes; None where no rates are known, or the rows do not lie in one file here."""
    path = recipe.data.path
    if plan.speed is None or path is None or not Path(path).is_file():
        return None
    tokens = Path(path).stat().st_size // BYTES_A_TOKEN
    return Epoch(tokens, tokens / plan.speed.tokens_per_s)


def disk_room(recipe: Recipe) -> int:
    """Return the bytes of disk for a run's checkpoints and model: what is free, and what they take already."""
    return disk_free(recipe.output.dir) + RunFolder(Path(recipe.output.dir)).disk_bytes()


def ask_model(recipe: Recipe, model: Any, ranks: int, limits: Limits, box: Box | None, *, dtype: str | None = None) -> Asked:
    """Return what a recipe's plan is made of, for a model that was built on the meta device.

    Args:
        recipe: the facts.
        model: the model, on meta.
        ranks: processes of the whole run.
        limits: memory that may be used.
        box: profile whose rates the plan takes; None: no rates are known.
        dtype: compute dtype; None takes the recipe's on this machine.
    """
    strategy = engine_settings(recipe).strategy
    if recipe.data.packing and not limits.cpu:
        use_packed_attention(model)  # as the run does: it keeps other tensors
    micro_batch, accumulation = split_batch(recipe, ranks)
    chosen = recipe.engine.micro_batch != "auto" or recipe.engine.accumulation != "auto"
    sequence_tokens = recipe.data.sequence_tokens
    named: Any = dtype or strategy.dtype
    computes = DTYPES[named]
    shape = replace(
        model_shape(model, find_blocks(model), ranks, computes, sequence_tokens, cpu=limits.cpu),
        fresh=recipe.model.name is None,
        chunked_loss=_makes_loss_by_chunks(recipe, model, computes),
        checkpoints=(recipe.output.keep or 1) + (recipe.eval is not None) if recipe.output.save_every_steps else None,
        rule=rule_of(recipe.optimizer.name, momentum=recipe.optimizer.momentum),
    )
    wanted = replace(strategy, dtype=named, micro_batch=micro_batch if chosen else AUTO, accumulation=AUTO)
    if strategy.accumulate_in == AUTO and not divisible(find_blocks(model)):
        wanted = replace(wanted, accumulate_in=STEP)
    return Asked(
        shape,
        limits,
        wanted,
        sequences=micro_batch * accumulation,
        preferred=max(AUTO_MICRO_BATCH_TOKENS // sequence_tokens, 1),
        rates=_rates(recipe, box, ranks, cpu=limits.cpu),
    )


def _makes_loss_by_chunks(recipe: Recipe, model: Any, dtype: torch.dtype | None) -> bool:
    """Whether a run of this recipe never has all logits: its Trainer wants losses only, as nothing here asks for metrics.

    A box elsewhere is taken to have what fused kernels need; on this one it is looked for.
    """
    if recipe.engine.kernels != AUTO or recipe.train.label_smoothing:
        return False
    if torch.cuda.is_available() and unusable(torch.device("cuda")) is not None:
        return False
    return isinstance(proven_head_loss(model, dtype or torch.float32, torch.device("cpu")), HeadLoss)


def _rates(recipe: Recipe, box: Box | None, ranks: int, *, cpu: bool) -> Rates | None:
    """Return the rates of a rank; None where none are known, or where they are of GPUs and the ranks are not.

    Raises:
        UserError: if the recipe names a box that is too small for the ranks, and says nothing of a network.
    """
    if box is None or not box.rates or (box.gpus == 0) != cpu:
        return None
    rates = box.rates_of_a_rank(ranks)
    if rates is None and recipe.box == box.name:
        raise UserError(
            f"box: {box.name} has {box.gpus} GPUs and no network, {ranks} ranks need one: name a profile of several boxes "
            "(16xv100), or set box to auto"
        )
    return rates


def limits_of(recipe: Recipe, box: Box, ranks: int) -> Limits:
    """Return what may be used on a box that is known by its profile: what the recipe grants, else what it has."""
    memory = recipe.memory
    cpu = box.gpus == 0
    host = box.host_bytes
    if memory.host_gib is not None:
        host = int(memory.host_gib * GIB)
    elif host is None:
        without_drive = memory.model_copy(update={"nvme_dir": None, "nvme_gib": None})
        host = limits_here(EngineSettings(memory=without_drive), torch.device("cpu"), ranks).host_bytes
    device = int(memory.device_gib * GIB) if memory.device_gib is not None else box.device_bytes
    nvme = int(box.nvme_gib * GIB) if memory.nvme_dir is not None else None
    if cpu and memory.nvme_dir is not None:
        nvme = disk_free(memory.nvme_dir)
    if memory.nvme_gib is not None:  # the drive of a box that is not this one
        nvme = int(memory.nvme_gib * GIB)
    profile = f"the profile {box.name}"
    names = {
        DEVICE: "memory.device_gib" if memory.device_gib is not None else profile,
        HOST: "memory.host_gib" if memory.host_gib is not None else profile,
        NVME: profile if memory.nvme_gib is None else "memory.nvme_gib",
    }
    own = min(ranks, box.gpus) if box.gpus else ranks
    return Limits(None if cpu else device, host, nvme, ranks_per_node=own, cpu=cpu, names=tuple(names.items()))


def model_of(recipe: Recipe) -> Any:
    """Build a recipe's model on the meta device from its configuration alone, which for some hub names is packaged.

    Raises:
        UserError: if there is no configuration, or the loader refuses it.
    """
    told = recipe.model
    if told.name is None:
        return build(recipe, None, told.config)
    known = None if told.revision is not None or Path(told.name).is_dir() else architectures().get(told.name)
    if known is not None:
        return build(recipe, None, known.config)
    read = read_config(told.name, None, told.revision, trust_remote_code=told.trust_remote_code)
    return build(recipe, None, read)


def build(recipe: Recipe, name: str | None, config: Any) -> Any:
    """Build a model, the recipe's adapter included; without a name on the meta device.

    Args:
        recipe: the facts.
        name: folder or hub id with weights, or None.
        config: the configuration, where it is not the folder's.

    Raises:
        UserError: See `ftkit.hf.load.model.load_model`.
    """
    try:
        return load_model(
            name,
            task=recipe.task,
            revision=recipe.model.revision,
            config=config,
            trust_remote_code=recipe.model.trust_remote_code,
            adapter=lora_config(recipe.adapter, recipe.task),
        )
    except (ValueError, TypeError) as error:
        if recipe.adapter is None or isinstance(error, UserError):
            raise
        raise UserError(f"adapter: PEFT refuses it for this model: {error}") from error
