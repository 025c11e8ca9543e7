"""What ftkit knows of Hugging Face models: where the blocks are, which arguments are caches, what an adapter is.

transformers 5 marks every block that may be recomputed as a `GradientCheckpointingLayer`; each instance that is not inside
another is a unit. Models that mark none fall back to the classes in `_no_split_modules`, which any module may have. A model
with neither is replicated (replication.py). In a forward that a backward will follow, caches become None: a cache filled
again in recomputation would give wrong gradients.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ftkit.config.engine import EngineSettings, Memory
from ftkit.config.environment import is_strict
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.core.tensor_tree import take_tensors
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.engine.memory.affinity import take_cores
from ftkit.engine.memory.disk import IN_MEMORY
from ftkit.engine.memory.tiers import Tiers
from ftkit.engine.optim.foreign_optimizers import refuse_foreign_optimizers
from ftkit.engine.shard import changing, refuse_failed
from ftkit.engine.shard import shard as shard_blocks
from ftkit.errors import UserError
from ftkit.hf.models.adapter_targets import check_all
from ftkit.hf.models.attention import repeat_grouped_keys
from ftkit.hf.models.caches import refuse_caches
from ftkit.hf.models.captured import tell_hooks
from ftkit.hf.models.dtypes import check_dtype
from ftkit.hf.models.fusing import Fused, fuse, unusable
from ftkit.hf.models.head import attach_head_loss
from ftkit.hf.models.rank_sync import let_generate
from ftkit.hf.models.refused_adapters import refuse_allocating, refuse_merged, refuse_merging, refuse_prefixes
from ftkit.hf.models.replication import named_block_classes, replicated
from ftkit.hf.models.second_models import limits_beside, planned_for_training, untrained
from ftkit.hf.models.shapes import common_limits, own_dtype, shape_of
from ftkit.hf.models.shard_kernels import FLAT_KERNELS
from ftkit.hf.models.sharded_model import ShardedTransformer
from ftkit.hf.models.strict import strict
from ftkit.hf.weights.loading import load_weights
from ftkit.hf.weights.own_saves import look_before_saving
from ftkit.hf.weights.sources import on_meta, settle, source_of
from ftkit.plan.choice import Plan, make_plan, with_spare_host
from ftkit.plan.limits import Limits
from ftkit.plan.shape import Shape
from ftkit.spec.strategy import AUTO, STEP, Strategy
from ftkit.spec.tiers import NVME
from ftkit.spec.update_rules import ADAMW, UpdateRule

logger = logging.getLogger(__name__)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the blocks in order of execution; none where the model marks none.

    Raises:
        UserError: if `_no_split_modules` of the user's own module names a class that the model does not contain.
    """
    names = named_block_classes(model)
    found = _outermost(model, lambda module: isinstance(module, GradientCheckpointingLayer))
    return found or _outermost(model, lambda module: type(module).__name__ in names)


def _outermost(model: nn.Module, is_block: Any) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if is_block(module) and id(module) not in seen:
            found.append((name, module))
            seen.update(map(id, module.modules()))
    return found


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments with each cache replaced by None, and without the loss's item count.

    (Models hand `num_items_in_batch` down to their blocks among the other keywords; no block reads it.)

    Raises:
        RuntimeError: for a cache that holds something: training on top of a prompt's cache is not supported.
    """
    return tuple(map(_no_cache, args)), {
        key: _no_cache(value) for key, value in kwargs.items() if key != "num_items_in_batch"
    }


def _no_cache(value: Any) -> Any:
    if not isinstance(value, (Cache, EncoderDecoderCache)):
        return value
    if value.get_seq_length() > 0:
        raise RuntimeError(
            "a block was given a filled key/value cache while gradients are on; use torch.no_grad() for generation, or "
            "pass no past_key_values in training"
        )
    return None


BATCH_ARGUMENTS = frozenset(
    {
        "hidden_states",
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "position_embeddings_global",
        "position_embeddings_local",
        "position_bias",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "encoder_decoder_position_bias",
        "causal_mask",
        "alibi",
    }
)
"""Arguments of transformers' blocks whose tensors have the batch (or 1, for all of it) in their first dimension."""

SHARED_ARGUMENTS = frozenset({"cache_position", "head_mask", "layer_head_mask", "cross_attn_layer_head_mask"})
"""Arguments whose tensors are the same for every sample."""


PLAIN_ARGUMENTS = frozenset(
    {
        "past_key_value",
        "past_key_values",
        "layer_past",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)
"""Arguments that hold no tensors in training."""


def batch_rows(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
    """Say for each tensor among a block's arguments, in order, whether its rows are the batch and may be divided.

    Raises:
        RuntimeError: for an argument that is not known, or whose rows are neither the batch nor one.
    """
    bound = inspect.signature(type(block).forward).bind_partial(block, *args, **kwargs)
    names = list(bound.signature.parameters)[1:]
    named = [*zip(names, args), *kwargs.items()]
    rows = next((len(value) for name, value in named if name == "hidden_states"), None)
    if rows is None:
        raise RuntimeError(f"{type(block).__name__} takes no hidden_states: its batch cannot be divided inside blocks")
    flags: list[bool] = []
    for name, value in named:
        found: list[torch.Tensor] = []
        take_tensors(value, found)
        for tensor in found:
            if name not in BATCH_ARGUMENTS | SHARED_ARGUMENTS:
                raise RuntimeError(
                    f"{type(block).__name__}: whether {name!r} holds the batch is not known: set engine.accumulate_in: step"
                )
            batched = name in BATCH_ARGUMENTS and tensor.dim() > 0
            if batched and len(tensor) not in (1, rows):
                raise RuntimeError(
                    f"{type(block).__name__}: {name} has {len(tensor)} rows, the batch {rows}: it cannot be divided"
                )
            flags.append(batched and len(tensor) == rows > 1)
    return flags


def divisible(blocks: list[tuple[str, nn.Module]]) -> bool:
    """Return whether every argument that these blocks take is known, so that a batch can be divided inside them.

    Blocks that hand on a bias of positions give it back with one row for the whole batch, so it cannot be divided again.
    """
    known = BATCH_ARGUMENTS | SHARED_ARGUMENTS | PLAIN_ARGUMENTS
    for _, block in blocks:
        arguments = list(inspect.signature(type(block).forward).parameters.values())[1:]
        names = {each.name for each in arguments if each.kind != each.VAR_KEYWORD}
        if not names <= known or "position_bias" in names:
            return False
    return True


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return which parameters a family keeps in fp32 when it computes in `dtype`, as transformers does on loading."""
    patterns = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            names = set(module._keep_in_fp32_modules_strict or ()) if dtype.itemsize < 4 else set()
            if dtype == torch.float16:
                names |= set(module._keep_in_fp32_modules or ())
            patterns += [re.compile(rf"(^|\.){name}($|\.)") for name in names]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def is_adapter(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter of a PEFT model belongs to an adapter (and not to a copy made by modules_to_save)."""
    parts = name.split(".")
    return any(part.startswith(("lora_", "ia3_", "prompt_", "vera_", "vblora_", "adapter_")) for part in parts)


def units_of(model: nn.Module) -> ShardedTransformer | None:
    """Return the units of a model that was sharded, else None."""
    units = getattr(type(model), "_ftkit", None)
    return units if isinstance(units, ShardedTransformer) and units.model is model else None


def shard(
    model: nn.Module,
    settings: EngineSettings | Mapping[str, Any] | str = "auto",
    *,
    device: torch.device | None = None,
    blocks: list[tuple[str, nn.Module]] | None = None,
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
        model: on any device, or from `ftkit.load_model`: then each rank streams its ranges of what is still as in the
            folder. What was changed, added or drawn since is kept, rank 0's where ranks differ. Its forward keeps working,
            now with sharded weights.
        settings: see `EngineSettings`.
        device: where to compute; None: this process's current CUDA device, else the CPU.
        blocks: (name, module) of the units; None finds them.
        micro_batch_tokens: tokens of one forward on one rank, for the memory estimate behind "auto".
        accumulation_steps: micro-batches a step; more than one sums gradients in fp32 unless the settings say otherwise.
            With `accumulate_in: unit` the model gets all of them as one batch, which its blocks divide.
        comm: the ranks; None takes the default process group, or one rank where there is none.
        evaluation: the model is not trained: no gradients and no optimizer state are planned.
        beside: models of this process whose memory is not granted again.
        rule: the update rule of the optimizer to come, for the memory of its state.
        plan: how the model is held, where that was planned before; the same on all ranks. Its strategy and limits take the
            place of `settings`, and nothing is planned again. None plans here.

    Returns:
        The units: give them to `ftkit.ShardedAdamW`, `ftkit.save_checkpoint`, `ftkit.save_model`.

    Raises:
        UserError: if the settings or the model cannot be used, or nothing fits.

    Cost: each rank keeps its shards (N/W at stage 3); a collective or two.
    """
    refuse_failed(model)
    device = device or compute_device()
    source = source_of(model)
    _refuse_before(model, read=source is not None)
    blocks = blocks if blocks is not None else find_blocks(model)
    comm = comm or Communicator(device)
    settings = EngineSettings.of(settings)
    strategy = _settled(settings.strategy if plan is None else plan.strategy, blocks, model, comm)
    dtype = DTYPES.get(strategy.dtype)
    if repeat_grouped_keys(model, device) and comm.rank == 0:
        logger.info("grouped keys are repeated before attention: PyTorch has no fused kernel for them on this GPU")
    _refuse(model, comm.world_size)
    with settle(model, comm) as settled:
        check_dtype(dtype or own_dtype(model), device)
        fused = _fuse(model, dtype or own_dtype(model), device) if strategy.kernels == AUTO else Fused()
        affinity = take_cores(comm) if strategy.affinity else None  # first: memory comes from where it is touched
        if plan is None:
            free = limits_beside(common_limits(settings, comm), beside)
            shape = model_shape(model, blocks, comm.world_size, dtype, micro_batch_tokens, cpu=free.cpu)
            shape = untrained(shape) if evaluation else replace(shape, rule=rule)
            plan = _planned(strategy, settings.memory, shape, free, accumulation_steps)
        else:
            evaluation = False
        strategy = replace(plan.strategy, debug=strategy.debug)
        settled.meta = on_meta(model)
        units = shard_as(model, blocks, comm, strategy, _open_tiers(comm, strategy, plan.limits.nvme_dir))
    units.plan, units.affinity, units.fused, units.evaluated_only = plan, affinity, fused, evaluation
    if device.type == "cuda" and strategy.kernels == AUTO and unusable(device) is None:
        units.flat_kernels = FLAT_KERNELS
    _guard(units)
    if source is not None:
        with changing(model):
            settled.note(units, source)
            load_weights(units)
    return units


def compute_device() -> torch.device:
    """Return where this process computes: its current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _refuse_before(model: nn.Module, *, read: bool) -> None:
    """Raise for models that cannot be sharded as they are.

    Args:
        model: the model.
        read: whether its weights will be read from files.

    Raises:
        UserError: for weights on meta that nobody reads, and for adapters that a sharded model cannot have.
    """
    if not read and any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{type(model).__name__} is on the meta device and has no weights: build it with ftkit.load_model()")
    check_all(model)
    refuse_prefixes(model)
    refuse_merged(model)


def _settled(
    strategy: Strategy, blocks: list[tuple[str, nn.Module]], model: nn.Module, comm: Communicator
) -> Strategy:
    """Return the strategy with what a model without blocks, or a strict trial, decides of it."""
    if not blocks:
        return replicated(strategy, model, say=comm.rank == 0)
    return strict(strategy, comm.world_size, say=comm.rank == 0) if is_strict() else strategy


def _open_tiers(comm: Communicator, strategy: Strategy, nvme_dir: str | None) -> Tiers:
    """Open the tiers on which the strategy puts shards. A collective."""
    tiers = Tiers.open(comm, strategy, nvme_dir)
    _tell(tiers, comm)
    return tiers


def _guard(units: ShardedTransformer) -> None:
    """Let a sharded model refuse what it cannot do, and generate with all ranks in step."""
    model = units.model
    cut = _cuts_gradients(units)
    if cut:
        _refuse_shared_keys(model)
        tell_hooks(units, PLAIN)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and units.strategy.stage == 3 and units.comm.world_size > 1:
            # transformers' own mark: its methods that would call the model on one rank alone look for it.
            module._is_fsdp_managed_module = True  # type: ignore[assignment]  # torch's stubs know modules and tensors only
        if isinstance(module, PreTrainedModel) and cut:
            module.register_forward_pre_hook(_refuse_captured, with_kwargs=True)
    refuse_caches(units)
    let_generate(units)
    refuse_merging(model)
    refuse_allocating(model)


def shard_as(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
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
    _tell_rounded(model, units)
    look_before_saving(model, units)
    return units


def _fuse(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Fused:
    """Let `model` compute by fused kernels what it can, its loss too."""
    fused = fuse(model, dtype, device)
    if unusable(device) is not None:
        return fused
    reason = attach_head_loss(model, dtype, device)
    if reason is None:
        fused.note("chunked loss", "head")
    else:
        fused.left["the loss"] = reason
    return fused


def _tell(tiers: Tiers, comm: Communicator) -> None:
    """Say what the user should know of the NVMe folder: what was removed there, and that it is slow. A collective."""
    disk = tiers.disk
    if disk is None:
        return
    removed = {name: size for found in comm.all(disk.removed) for name, size in found.items()}
    if comm.rank > 0:
        return
    if removed:
        logger.warning(
            "%s: removed the files of crashed runs, %.1f GiB (%s)",
            disk.path.parent,
            sum(removed.values()) / 2**30,
            ", ".join(sorted(removed)),
        )
    if disk.filesystem in IN_MEMORY:
        logger.warning("%s: %s is host memory itself: files there save none", disk.path.parent, disk.filesystem)
    elif not disk.direct:
        logger.warning(
            "%s: %s takes no O_DIRECT, so the NVMe tier goes through the page cache: slower, and the cache competes with "
            "the run for memory. Let memory.nvme_dir name a folder on ext4 or xfs",
            disk.path.parent,
            disk.filesystem,
        )


def check_shardable(model: nn.Module, world_size: int, *, cuts_gradients: bool) -> None:
    """Raise for configurations that would train wrongly without an error; before sharding as after it.

    Args:
        model: the model, sharded or not.
        world_size: number of ranks.
        cuts_gradients: whether blocks run otherwise than by plain autograd: recomputed or sharded.

    Raises:
        UserError: naming what to set.
    """
    _refuse(model, world_size)
    if cuts_gradients:
        _refuse_shared_keys(model)


def _refuse(model: nn.Module, world_size: int) -> None:
    """Raise for configurations that would train wrongly without an error.

    Raises:
        UserError: for LayerDrop on several ranks, and for losses on tensors captured inside blocks (router losses).
    """
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in configs:
        for key, value in vars(config).items():
            if key.endswith("layerdrop") and world_size > 1 and value:
                raise UserError(
                    f"{key}={value}: ranks that skip different blocks would mix their weights; set config.{key} = 0"
                )
        if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
            raise UserError(
                "output_router_logits with a router loss: tensors taken from inside blocks carry no gradient there, so the "
                "routers would not learn from it; set config.output_router_logits = False"
            )


def _cuts_gradients(units: ShardedTransformer) -> bool:
    """Return whether a tensor that leaves a block other than as its result loses its gradient: not by plain autograd."""
    return bool(units.trainable) and any(unit.is_cut_out for unit in units.units)


PLAIN = "set ftkit={'stage': 1, 'activations': 'keep'} (engine: in a recipe), where blocks run by plain autograd"


def _refuse_shared_keys(model: nn.Module) -> None:
    """Raise for models whose blocks hand keys and values to later ones past their arguments and results (Gemma 3n, 4).

    Raises:
        UserError: naming what to set.
    """
    for module in model.modules():
        shared = getattr(module.config, "num_kv_shared_layers", 0) if isinstance(module, PreTrainedModel) else 0
        if shared:
            raise UserError(
                f"num_kv_shared_layers={shared}: these blocks use keys and values of earlier ones, which get no gradient "
                f"through blocks that are recomputed or sharded; {PLAIN}"
            )


def _refuse_captured(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where a call with gradients on asks for tensors that transformers takes from inside blocks.

    Families that return them as results of their blocks, and not by recording, lose nothing. Hidden states are results.

    Raises:
        UserError: naming what to set.
    """
    if not torch.is_grad_enabled():
        return
    recorded = model._can_record_outputs or {}
    harmless = getattr(model.config, "router_aux_loss_coef", None) == 0
    asked = {
        "output_attentions": "attentions" in recorded
        and kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)),
        "output_router_logits": "router_logits" in recorded and kwargs.get("output_router_logits") and not harmless,
    }
    for flag, wanted in asked.items():
        if wanted:
            raise UserError(
                f"{flag}=True while gradients are on: tensors from inside blocks carry no gradient there. Leave it "
                f"off, ask for it under torch.no_grad(), or {PLAIN}"
            )


def _tell_rounded(model: nn.Module, units: ShardedTransformer) -> None:
    """Say which frozen weights have lost precision: they have no masters, and are saved as they are now."""
    if isinstance(model, PeftModel) or not units.trainable:  # an adapter's folder has no frozen weights
        return
    frozen = [(flat.dtype, segment.name) for flat in units.flats if not flat.trainable for segment in flat.layout.segments]
    narrowed = [name for dtype, name in frozen if dtype.itemsize < units.dtypes[name].itemsize]
    if narrowed and units.comm.rank == 0:
        logger.warning(
            "%d frozen weights (%s, ...) came in a wider dtype and are held in %s, in which they are used: a saved model "
            "has them so rounded. To keep them exact, train in fp32 (ftkit={'dtype': 'fp32'})",
            len(narrowed),
            narrowed[0],
            str(units.compute_dtype).removeprefix("torch."),
        )


def _planned(strategy: Strategy, memory: Memory, shape: Shape, free: Limits, accumulation_steps: int) -> Plan:
    """Return the plan: what is decided, and for the rest the fastest strategy that fits on every rank."""
    limits = free
    gathers = strategy.stage not in (0, 1, 2)  # else nothing is there to reshard
    decided = AUTO not in (strategy.stage, strategy.activations, *((strategy.reshard_after_forward,) * gathers))
    if decided and memory.device_gib is None and memory.host_gib is None:
        limits = replace(limits, device_bytes=None, host_bytes=None)  # what is free is a guess: the user knows better
    together = STEP if strategy.accumulate_in == AUTO else strategy.accumulate_in  # the caller's loop is as it is
    wanted = replace(strategy, micro_batch=1, accumulate_in=together)
    plan = make_plan(shape, limits, wanted, sequences=accumulation_steps)
    if limits is not free and plan.strategy.state == NVME:  # what the user did not decide has to fit all the same
        stays = with_spare_host(plan.strategy, plan.shape, free, wanted).state_host_bytes
        plan = make_plan(shape, limits, replace(wanted, state_host_bytes=stays), sequences=accumulation_steps)
    return plan


def let_train(units: ShardedTransformer) -> None:
    """Plan a model for training that was sharded for evaluation only; its form stays.

    Raises:
        DoesNotFit: if gradients and optimizer state do not fit.
    """
    assert units.plan is not None
    assert units.plan.asked is not None
    shape = units.plan.asked.shape
    found = find_blocks(units.model)
    trained = model_shape(
        units.model, found, shape.world_size, units.compute_dtype, shape.sequence_tokens, cpu=units.plan.limits.cpu
    )
    units.plan, units.evaluated_only = planned_for_training(units.plan, trained), False


def model_shape(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    world_size: int,
    dtype: torch.dtype | None,
    sequence_tokens: int,
    *,
    cpu: bool,
    checkpoints: int | None = None,
    chunked_loss: bool = False,
) -> Shape:
    """Return what the plan knows of a model, sharded as `shard` does it; see `ftkit.hf.models.shapes.shape_of`."""
    source = source_of(model)
    return shape_of(
        model,
        blocks,
        world_size=world_size,
        dtype=dtype,
        sequence_tokens=sequence_tokens,
        replicated=_is_replicated(model),
        wide=kept_in_fp32(model, dtype or own_dtype(model)),
        cpu=cpu,
        fresh=source is not None and not source.files,
        checkpoints=checkpoints,
        chunked_loss=chunked_loss,
    )


def _is_replicated(model: nn.Module) -> Callable[[str, nn.Parameter], bool]:
    return is_adapter if isinstance(model, PeftModel) else lambda name, parameter: False
