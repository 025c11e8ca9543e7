"""Sharding a Hugging Face model: settle its weights, plan, partition it into units, stream weights in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ftkit.config.engine import EngineSettings, Memory
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.affinity import take_cores
from ftkit.engine.memory.disk import IN_MEMORY
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.optim.foreign_optimizers import refuse_foreign_optimizers
from ftkit.engine.shard import changing, refuse_failed
from ftkit.engine.shard import shard as shard_blocks
from ftkit.errors import UserError
from ftkit.hf.adapters import adapter_parameters, refuse_untrainable
from ftkit.hf.blocks import Blocks, batch_rows, find_blocks, kept_in_fp32, replicated, without_caches
from ftkit.hf.dtypes import check_dtype, own_dtype
from ftkit.hf.generate.holding import let_generate
from ftkit.hf.kernels.attention import repeat_grouped_keys
from ftkit.hf.kernels.flat import FLAT_KERNELS
from ftkit.hf.kernels.fuse import Fused, fuse, unusable
from ftkit.hf.kernels.head import attach_head_loss
from ftkit.hf.load.model import load_weights
from ftkit.hf.load.sources import on_meta, settle, source_of
from ftkit.hf.memory.beside import limits_beside
from ftkit.hf.memory.shape import common_limits, shape_of
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.plan.limits import Limits
from ftkit.plan.plan import Asked, Plan, with_spare_host
from ftkit.plan.shape import Shape
from ftkit.spec.strategy import AUTO, STEP, Strategy
from ftkit.spec.tiers import NVME
from ftkit.spec.update_rules import ADAMW, UpdateRule

logger = logging.getLogger(__name__)

PLAIN = "set ftkit={'stage': 1, 'activations': 'keep'} (engine: in a recipe), where blocks run by plain autograd"


def units_of(model: nn.Module) -> ShardedTransformer | None:
    """Return the units of a model that was sharded, else None."""
    units = getattr(type(model), "_ftkit", None)
    return units if isinstance(units, ShardedTransformer) and units.model is model else None


def shard(
    model: nn.Module,
    settings: EngineSettings | Mapping[str, Any] | str = "auto",
    *,
    device: torch.device | None = None,
    blocks: Blocks | None = None,
    micro_batch_tokens: int = 2048,
    accumulation_steps: int = 1,
    comm: Communicator | None = None,
    evaluation: bool = False,
    beside: Sequence[ShardedTransformer] = (),
    rule: UpdateRule = ADAMW,
    plan: Plan | None = None,
) -> ShardedTransformer:
    """Shard a Hugging Face (or PEFT) model in place over the ranks of the default process group.

    Args:
        model: A model on any device, or from `ftkit.load_model`. Each rank streams its ranges of the tensors that are
            unchanged since loading. Changed and added values are kept, rank 0's where ranks differ. The model's forward
            keeps working, now with sharded weights.
        settings: See `EngineSettings`.
        device: Compute device; None: this process's current CUDA device, else the CPU.
        blocks: (name, module) of the units; None finds them.
        micro_batch_tokens: Tokens of one forward on one rank, for the memory estimate behind "auto".
        accumulation_steps: Micro-batches per step; more than one sums gradients in fp32 unless the settings say otherwise.
            With `accumulate_in: unit` the model gets all of them as one batch, which its blocks divide.
        comm: The ranks; None takes the default process group, or one rank where there is none.
        evaluation: Whether the model is not trained: no gradients and no optimizer state are planned.
        beside: Models of this process whose memory is not granted again.
        rule: Update rule of the optimizer to come, for the memory of its state.
        plan: A plan made before, the same on all ranks. Its strategy and limits replace those of `settings`.

    Returns:
        The units, for `ftkit.ShardedAdamW`, `ftkit.save_checkpoint` and `ftkit.save_model`.

    Raises:
        UserError: The settings or the model cannot be used, or nothing fits.

    Cost: each rank keeps its shards (N/W elements at stage 3).
    """
    refuse_failed(model)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    source = source_of(model)
    refuse_untrainable(model)
    blocks = blocks if blocks is not None else find_blocks(model)
    comm = comm or Communicator(device)
    settings = EngineSettings.of(settings)
    strategy = settings.strategy if plan is None else plan.strategy
    if not blocks:
        strategy = replicated(strategy, model, say=comm.rank == 0)
    dtype = DTYPES.get(strategy.dtype)
    if repeat_grouped_keys(model, device) and comm.rank == 0:
        logger.info("grouped keys are repeated before attention: PyTorch has no fused kernel for them on this GPU")
    with settle(model, comm) as settled:
        check_dtype(dtype or own_dtype(model), device)
        fused = _fuse(model, dtype or own_dtype(model), device) if strategy.kernels == AUTO else Fused()
        affinity = take_cores(comm) if strategy.affinity else None  # first: memory comes from where it is touched
        if plan is None:
            free = limits_beside(common_limits(settings, comm), beside)
            shape = model_shape(model, blocks, comm.world_size, dtype, micro_batch_tokens, cpu=free.cpu)
            shape = shape.frozen() if evaluation else replace(shape, rule=rule)
            plan = _planned(strategy, settings.memory, shape, free, accumulation_steps)
        else:
            evaluation = False
        strategy = replace(plan.strategy, debug=strategy.debug)
        settled.meta = on_meta(model)
        units = shard_as(model, blocks, comm, strategy, _open_tiers(comm, strategy, plan.limits.nvme_dir))
    units.plan, units.affinity, units.fused, units.evaluated_only = plan, affinity, fused, evaluation
    if device.type == "cuda" and strategy.kernels == AUTO and unusable(device) is None:
        units.flat_kernels = FLAT_KERNELS
    with changing(model):
        cut_out = any(unit.is_cut_out for unit in units.units)
        check_shardable(model, comm.world_size, cuts_gradients=cut_out and len(units.trainable) > 0)
        let_generate(units)
        if source is not None:
            settled.note(units, source)
            load_weights(units)
    return units


def shard_as(
    model: nn.Module,
    blocks: Blocks,
    comm: Communicator,
    strategy: Strategy,
    tiers: Tiers,
    host_loops: Callable[[int], HostLoops] = HostLoops,
) -> ShardedTransformer:
    """Shard a Hugging Face (or PEFT) model in place as `strategy` says; no weights are read. See `engine.shard.shard`."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = False  # ours replaces it; both would compute a block three times
    units = shard_blocks(
        model,
        blocks,
        comm=comm,
        strategy=strategy,
        entries=[module for module in model.modules() if isinstance(module, PreTrainedModel)],
        replicated=_is_replicated(model),
        wide=kept_in_fp32(model, DTYPES.get(strategy.dtype) or own_dtype(model)),
        arguments=without_caches,
        tiers=tiers,
        split=batch_rows,
        host_loops=host_loops,
        model_class=ShardedTransformer,
    )
    assert isinstance(units, ShardedTransformer)
    refuse_foreign_optimizers(units)
    return units


def _fuse(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Fused:
    """Replace submodules of `model` and its loss by fused kernels where they agree."""
    fused = fuse(model, dtype, device)
    if unusable(device) is not None:
        return fused
    reason = attach_head_loss(model, dtype, device)
    if reason is None:
        fused.note("chunked loss", "head")
    else:
        fused.left["the loss"] = reason
    return fused


def _open_tiers(comm: Communicator, strategy: Strategy, nvme_dir: str | None) -> Tiers:
    """Open the tiers on which the strategy puts shards, and warn where the NVMe folder takes host memory."""
    tiers = Tiers.open(comm, strategy, nvme_dir)
    disk = tiers.disk
    if disk is not None and comm.rank == 0 and (not disk.direct or disk.filesystem in IN_MEMORY):
        logger.warning(
            "%s: files on %s take host memory, which the NVMe tier should save. Set memory.nvme_dir to a folder on ext4 or "
            "xfs",
            disk.path.parent,
            disk.filesystem,
        )
    return tiers


def check_shardable(model: nn.Module, world_size: int, *, cuts_gradients: bool) -> None:
    """Raise for configurations that would train wrongly without an error.

    Args:
        model: The model, sharded or not.
        world_size: Number of ranks.
        cuts_gradients: Whether blocks are recomputed or sharded: tensors that they pass on other than through their results
            get no gradient.

    Raises:
        UserError: LayerDrop on several ranks, or blocks that pass on keys and values (Gemma 3n, 4) or router logits.
    """
    configs: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in configs:
        for key, value in vars(config).items() if world_size > 1 else ():
            if key.endswith("layerdrop") and value:
                raise UserError(f"{key}={value}: ranks that skip different blocks would mix their weights; set it to 0")
        if cuts_gradients and (shared := getattr(config, "num_kv_shared_layers", 0)):
            raise UserError(
                f"num_kv_shared_layers={shared}: these blocks use keys and values of earlier ones, which get no gradient "
                f"through blocks that are recomputed or sharded; {PLAIN}"
            )
        routed = getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0)
        if cuts_gradients and routed:
            raise UserError(
                "output_router_logits with a router loss: router logits carry no gradient out of blocks that are recomputed "
                f"or sharded; set config.output_router_logits = False, or {PLAIN}"
            )


def _planned(strategy: Strategy, memory: Memory, shape: Shape, free: Limits, accumulation_steps: int) -> Plan:
    """Return the plan: the user's decisions, and for the rest the fastest strategy that fits on every rank."""
    limits = free
    gathers = strategy.stage not in (0, 1, 2)  # else nothing is there to reshard
    decided = AUTO not in (strategy.stage, strategy.activations, *((strategy.reshard_after_forward,) * gathers))
    if decided and memory.device_gib is None and memory.host_gib is None:
        limits = replace(limits, device_bytes=None, host_bytes=None)  # free memory is a guess: the user knows better
    together = STEP if strategy.accumulate_in == AUTO else strategy.accumulate_in  # the caller's loop is as it is
    wanted = replace(strategy, micro_batch=1, accumulate_in=together)
    plan = Asked(shape, limits, wanted, accumulation_steps).plan()
    if limits is not free and plan.strategy.state == NVME:  # the plan's own choices must fit nevertheless
        stays = with_spare_host(plan.strategy, plan.shape, free, wanted).state_host_bytes
        plan = Asked(shape, limits, replace(wanted, state_host_bytes=stays), accumulation_steps).plan()
    return plan


def model_shape(
    model: nn.Module,
    blocks: Blocks,
    world_size: int,
    dtype: torch.dtype | None,
    sequence_tokens: int,
    *,
    cpu: bool,
) -> Shape:
    """Describe a model for the plan, sharded as by `shard`. See `ftkit.hf.memory.shape.shape_of`."""
    source = source_of(model)
    shape = shape_of(
        model,
        blocks,
        world_size=world_size,
        dtype=dtype,
        sequence_tokens=sequence_tokens,
        replicated=_is_replicated(model),
        wide=kept_in_fp32(model, dtype or own_dtype(model)),
        cpu=cpu,
    )
    return replace(shape, fresh=source is not None and not source.files)


def _is_replicated(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    adapters = adapter_parameters(model)
    return lambda name, parameter: name in adapters
