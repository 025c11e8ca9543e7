"""The plan of a recipe, for this machine or for a hardware profile.

`ftkit plan`, `--dry-run` and the ranks of a run all call `ask_model`: the printed plan is the executed plan. The model is
built on the meta device from its configuration alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ftkit.config.engine import EngineSettings
from ftkit.config.recipe import AUTO_MICRO_BATCH_TOKENS, Recipe, split_batch
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.errors import UserError
from ftkit.hf.blocks import divisible, find_blocks
from ftkit.hf.kernels.attention import use_packed_attention
from ftkit.hf.kernels.fuse import unusable
from ftkit.hf.kernels.head import HeadLoss, proven_head_loss
from ftkit.hf.load.config import read_config
from ftkit.hf.load.model import load_model
from ftkit.hf.memory.shape import common_limits, disk_free, limits_here
from ftkit.hf.sharding import model_shape
from ftkit.output.run_folder import RunFolder
from ftkit.plan.catalog import Hardware, architectures, find_hardware, profile_with
from ftkit.plan.limits import Limits
from ftkit.plan.memory import GIB
from ftkit.plan.plan import Asked, Plan
from ftkit.plan.speed import Rates
from ftkit.spec.strategy import AUTO, STEP
from ftkit.spec.tiers import DEVICE, HOST, NVME
from ftkit.train.arguments import checkpoints_kept, compute_dtype, engine_settings, lora_config, strategy_of

BYTES_PER_TOKEN = 4
"""Bytes of a data file per token: about 4 characters of English text, JSON keys included."""


def plan_recipe(recipe: Recipe, ranks: int, profile: Hardware | None = None) -> Plan:
    """Return the plan of a recipe. Arguments and errors are those of `ask`; also `DoesNotFit`."""
    return ask(recipe, ranks, profile).plan()


def ask(recipe: Recipe, ranks: int, profile: Hardware | None = None) -> Asked:
    """Return the planner's input for a recipe.

    Args:
        recipe: The recipe.
        ranks: Number of processes of the whole run.
        profile: Hardware profile to plan for. None plans for this machine.

    Raises:
        UserError: The model cannot be built, or the hardware lacks the dtype.
    """
    model = model_of(recipe)
    if profile is None:
        return ask_here(recipe, model, ranks)
    dtype = recipe.train.dtype if recipe.train.dtype != "auto" else profile.dtype
    if dtype == "bf16" and profile.dtype == "fp16":
        raise UserError(f"train.dtype: the GPUs of {profile.name} have no bf16; use auto, fp16 or fp32")
    return ask_model(recipe, model, ranks, limits_of(recipe, profile, ranks), profile, dtype)


def ask_here(recipe: Recipe, model: Any, ranks: int, comm: Communicator | None = None) -> Asked:
    """Return the planner's input for this machine. With `comm` a collective: all ranks get the same."""
    settings, profile = engine_settings(recipe), profile_here(recipe)
    if comm is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        limits = limits_here(settings, device, ranks)
    else:
        limits, profile = common_limits(settings, comm), comm.same(profile)
    folder = recipe.output.dir  # the run replaces an earlier one in it
    limits = replace(limits, disk_bytes=disk_free(folder) + RunFolder(Path(folder)).disk_bytes())
    return ask_model(recipe, model, ranks, limits, profile, compute_dtype(recipe.train.dtype))


def profile_here(recipe: Recipe) -> Hardware | None:
    """Return the hardware profile that the recipe names, or else the one with the GPUs of this machine."""
    if recipe.hardware != "auto":
        return find_hardware(recipe.hardware, "hardware")
    return profile_with([torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())])


def epoch_of(recipe: Recipe, plan: Plan) -> dict[str, float] | None:
    """Return the estimated tokens and seconds of an epoch. None without rates, or if the rows are not one local file."""
    path = recipe.data.path
    if plan.speed is None or path is None or not Path(path).is_file():
        return None
    tokens = Path(path).stat().st_size // BYTES_PER_TOKEN
    return {"tokens": tokens, "seconds": tokens / plan.speed.tokens_per_s}


def ask_model(recipe: Recipe, model: Any, ranks: int, limits: Limits, profile: Hardware | None, dtype: str) -> Asked:
    """Return the planner's input for a model on the meta device.

    Args:
        recipe: The recipe.
        model: The model of the recipe.
        ranks: Number of processes of the whole run.
        limits: Memory that may be used.
        profile: Hardware profile with the rates. None plans without seconds.
        dtype: Compute dtype: fp32, bf16 or fp16.
    """
    if recipe.data.packing and not limits.cpu:
        use_packed_attention(model)  # the run does so, and it saves other tensors
    micro_batch, accumulation = split_batch(recipe, ranks)
    blocks, sequence_tokens, engine = find_blocks(model), recipe.data.sequence_tokens, recipe.engine
    shape = replace(
        model_shape(model, blocks, ranks, DTYPES[dtype], sequence_tokens, cpu=limits.cpu),
        fresh=recipe.model.name is None,
        chunked_loss=_has_chunked_loss(recipe, model, DTYPES[dtype]),
        checkpoints=checkpoints_kept(recipe) or 1 if recipe.output.save_every_steps else None,
        rule=recipe.optimizer.rule,
    )
    forced = engine.micro_batch != AUTO or engine.accumulation != AUTO
    wanted = replace(strategy_of(recipe, dtype), micro_batch=micro_batch if forced else AUTO, accumulation=AUTO)
    if engine.accumulate_in == AUTO and not divisible(blocks):
        wanted = replace(wanted, accumulate_in=STEP)
    return Asked(
        shape,
        limits,
        wanted,
        sequences=micro_batch * accumulation,
        preferred=max(AUTO_MICRO_BATCH_TOKENS // sequence_tokens, 1),
        rates=_rates(profile, ranks, cpu=limits.cpu),
    )


def _has_chunked_loss(recipe: Recipe, model: Any, dtype: torch.dtype | None) -> bool:
    """Whether the run computes its loss by chunks, without whole logits. Other machines are assumed to have a compiler."""
    if recipe.engine.kernels != AUTO or recipe.train.label_smoothing:
        return False
    if torch.cuda.is_available() and unusable(torch.device("cuda")) is not None:
        return False
    return isinstance(proven_head_loss(model, dtype or torch.float32, torch.device("cpu")), HeadLoss)


def _rates(profile: Hardware | None, ranks: int, *, cpu: bool) -> Rates | None:
    """Return the rates of one rank. None if unknown, or if the profile has GPUs and the ranks do not."""
    return profile.rates_of_a_rank(ranks) if profile is not None and (profile.gpus == 0) == cpu else None


def limits_of(recipe: Recipe, profile: Hardware, ranks: int) -> Limits:
    """Return the memory of a hardware profile. A number in the recipe's `memory:` replaces the profile's."""
    memory, cpu = recipe.memory, profile.gpus == 0
    host, nvme = profile.host_bytes, None
    if host is None:  # the profile of CPU ranks: the memory of this machine
        host = limits_here(EngineSettings(), torch.device("cpu"), ranks).host_bytes
    if memory.nvme_dir is not None:
        nvme = disk_free(memory.nvme_dir) if cpu else int(profile.nvme_gib * GIB)
    granted = {DEVICE: None if cpu else profile.device_bytes, HOST: host, NVME: nvme}
    names = dict.fromkeys(granted, f"the profile {profile.name}")
    for tier in [HOST, NVME] if cpu else [DEVICE, HOST, NVME]:
        if (gib := getattr(memory, f"{tier}_gib")) is not None:
            granted[tier], names[tier] = int(gib * GIB), f"memory.{tier}_gib"
    return Limits(
        granted[DEVICE],
        granted[HOST],
        granted[NVME],
        ranks_per_node=min(ranks, profile.gpus or ranks),
        cpu=cpu,
        names=tuple(names.items()),
    )


def model_of(recipe: Recipe, *, weights: bool = False) -> Any:
    """Build a recipe's model with its adapter, on the meta device.

    Args:
        recipe: The recipe.
        weights: Find the weights, which are read when the model is sharded. Otherwise the configuration is enough, which
            is packaged with ftkit for some hub models.

    Raises:
        UserError: See `ftkit.hf.load.model.load_model`.
    """
    model = recipe.model
    name, remote = model.name, model.trust_remote_code
    config: Any = model.config
    if name is not None and not weights:
        known = architectures().get(name) if model.revision is None and not Path(name).is_dir() else None
        config = known.config if known else read_config(name, None, model.revision, trust_remote_code=remote)
        name = None
    adapter = lora_config(recipe.adapter, recipe.task)
    torch.manual_seed(recipe.train.seed)  # all ranks draw the same adapter
    return load_model(
        name, task=recipe.task, revision=model.revision, config=config, trust_remote_code=remote, adapter=adapter
    )
