"""Describe a Hugging Face model and the memory of this machine for the plan.

The sizes of flat parameters are exact: the engine's own `partition` gives them. What autograd keeps of a block is measured
for GPUs (`fake.graph_bytes`). For CPUs, and where a model needs values to compute, it is estimated from the matrices of
the largest block.

Cost: no copy of the weights. The model may be on the meta device.
"""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn

from ftkit.cgroups import MACHINE, HostMemory
from ftkit.config.engine import EngineSettings
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.engine.core.partition import Group, partition
from ftkit.hf.dtypes import own_dtype
from ftkit.hf.kernels.attention import REPEATED
from ftkit.hf.kernels.varlen import ATTENTION
from ftkit.hf.memory.fake import graph_bytes
from ftkit.plan.attention import Attention
from ftkit.plan.limits import Limits
from ftkit.plan.memory import CONTEXT_BYTES, GIB
from ftkit.plan.shape import Flat, Shape
from ftkit.spec.state_forms import can_be_coded
from ftkit.spec.tiers import DEVICE, HOST, NVME, TIERS

logger = logging.getLogger(__name__)

GRAPH_SHARE = 2
"""Estimated elements that autograd keeps of a block, per input and output of its matrices."""

SCORES = 3
"""Attention scores kept by unfused attention: before dropout, after it, and its mask."""

CPU_SHARE = (8, 10)
"""Share of a machine's free memory that the ranks of a CPU run may use together. Of a cgroup they may use all."""

HOST_SHARE = (95, 100)
"""The same for the host memory of ranks on GPUs."""

DEVICE_SHARE = (6, 100)
"""Share of a GPU that is never used, for fragments of torch's allocator."""

ADAPTER_RANK = 16


def shape_of(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    *,
    world_size: int,
    dtype: torch.dtype | None,
    sequence_tokens: int,
    replicated: Any,
    wide: Any,
    cpu: bool,
) -> Shape:
    """Describe a model for the plan.

    Args:
        model: The model, on any device.
        blocks: (name, module) of its blocks.
        world_size: Number of ranks.
        dtype: Compute dtype; None takes each parameter's own.
        sequence_tokens: Tokens of one sequence.
        replicated: Selects replicated parameters; see `ftkit.engine.shard.shard`.
        wide: Selects by name the parameters that stay fp32; see `ftkit.engine.shard.shard`.
        cpu: Whether ranks compute on the host.
    """
    groups = partition(model, blocks, dtype=dtype, replicated=replicated, wide=wide)
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    implementation = getattr(text, "_attn_implementation", None)
    largest = max((block for _, block in blocks), key=_widths, default=None)
    itemsize = (dtype or own_dtype(model)).itemsize
    elements = scores = 0
    if largest is not None:
        elements = GRAPH_SHARE * _widths(largest)
        scores = SCORES * (getattr(text, "num_attention_heads", 0) or 0) if implementation == "eager" else 0
    if largest is not None and not cpu:
        try:
            kept = graph_bytes(model, largest, sequence_tokens, wide, dtype)
            elements, scores = -(-kept // (sequence_tokens * itemsize)), 0
        except Exception as error:  # a model that needs values raises anything
            logger.warning("the memory that autograd keeps of a block is estimated, not measured: %s", error)
    return Shape(
        blocks=tuple(_flats(groups, "block", name) for name, _ in blocks),
        roots=_flats(groups, "root"),
        replicated=_flats(groups, "replicated"),
        hidden=getattr(text, "hidden_size", 0) or max((p.shape[-1] for p in model.parameters() if p.dim() > 1), default=1),
        vocabulary=getattr(text, "vocab_size", 0) or 0,
        block_elements=elements,
        score_elements=scores,
        widest_tensor=max((p.numel() for p in (largest or model).parameters()), default=0),
        adapter_numel=ADAPTER_RANK * sum(_widths(block) for _, block in blocks),
        sequence_tokens=sequence_tokens,
        itemsize=itemsize,
        world_size=world_size,
        peft=isinstance(model, PeftModel),
        attention=heads_of(text) if not cpu and implementation in ("sdpa", ATTENTION, REPEATED) else None,
        packed=implementation == ATTENTION,
    )


def heads_of(config: Any) -> Attention | None:
    """Return the heads of a text model's attention; None if its configuration does not name one number for all blocks."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", None) or 0) // heads
    rotated = getattr(config, "qk_rope_head_dim", None)  # latent attention: a rotated part of a query beside the other
    if rotated and getattr(config, "qk_nope_head_dim", None):
        dim = rotated + config.qk_nope_head_dim
    value = getattr(config, "v_head_dim", None) or dim
    return Attention(heads, getattr(config, "num_key_value_heads", None) or heads, dim, value)


def _flats(groups: Mapping[Group, list[tuple[str, nn.Parameter]]], kind: str, owner: str | None = None) -> tuple[Flat, ...]:
    """Return the flat parameters of a kind, and of an owner if one is given."""
    return tuple(
        Flat(
            sum(parameter.numel() for _, parameter in members),
            group.dtype.itemsize,
            group.trained,
            sum(p.numel() for _, p in members if group.kind == "block" and group.trained and can_be_coded(tuple(p.shape))),
        )
        for group, members in groups.items()
        if group.kind == kind and owner in (None, group.owner)
    )


def _widths(block: nn.Module) -> int:
    """Return the sum of the inputs and outputs of all matrices that a block's tokens are multiplied with."""
    weights = [getattr(module, "weight", None) for module in block.modules() if not isinstance(module, nn.Embedding)]
    return sum(sum(weight.shape) for weight in weights if isinstance(weight, Tensor) and weight.dim() == 2)


# --- the machine


def limits_here(settings: EngineSettings, device: torch.device, ranks_per_node: int) -> Limits:
    """Return the memory that may be used on this node: the settings' grants, else the free memory minus a reserve.

    Args:
        settings: The engine's settings.
        device: Compute device of this rank.
        ranks_per_node: Number of ranks on this node.
    """
    memory, cpu = settings.memory, device.type == "cpu"
    own = ranks_per_node * (psutil.Process().memory_info().rss - of_other_ranks())  # the plan counts it as runtime
    usable, source, free = usable_host(CPU_SHARE if cpu else HOST_SHARE)
    host, host_name = usable + own, f"free memory of {source}"
    if memory.host_gib is not None:
        host, host_name = int(memory.host_gib * GIB), "memory.host_gib"
        if host > free + own:  # a number may grant more than the share
            host, host_name = free + own, f"free memory of {source} ({host_name} is higher)"
    on_device, device_name = None, "memory.device_gib"
    if not cpu and memory.device_gib is not None:
        on_device = int(memory.device_gib * GIB)
    elif not cpu:
        free_bytes, total = torch.cuda.mem_get_info(device)
        part, whole = DEVICE_SHARE
        on_device, device_name = free_bytes - total * part // whole + CONTEXT_BYTES, "free memory"
    nvme = disk_free(memory.nvme_dir) if memory.nvme_dir is not None else None
    if nvme is not None and memory.nvme_gib is not None:
        nvme = min(nvme, int(memory.nvme_gib * GIB))
    return Limits(
        on_device,
        host,
        nvme,
        ranks_per_node=ranks_per_node,
        cpu=cpu,
        nvme_dir=memory.nvme_dir,
        names=((DEVICE, device_name), (HOST, host_name), (NVME, "memory.nvme_dir")),
    )


def common_limits(settings: EngineSettings, comm: Communicator) -> Limits:
    """Return the least memory of all ranks, per tier. A collective."""
    hosts = comm.all(socket.gethostname())
    own = limits_here(settings, comm.device, max(hosts.count(host) for host in hosts))
    ranks = comm.all(own)
    least = {tier: min(ranks, key=lambda each: each.granted(tier) or 0) for tier in TIERS}  # called at once
    sizes = {f"{tier}_bytes": getattr(limits, f"{tier}_bytes") for tier, limits in least.items()}
    return replace(own, **sizes, names=tuple((tier, limits.name(tier)) for tier, limits in least.items()))


def usable_host(share: tuple[int, int]) -> tuple[int, str, int]:
    """Return the bytes of host memory for the plan, the tightest limit's name, and the free bytes under all limits.

    Args:
        share: (part, whole) of the machine's free memory that may be planned with. Of a cgroup all may.
    """
    readings = HostMemory.find().read()
    part, whole = share
    grants = [(each.usable * part // whole if each.source == MACHINE else each.usable, each.source) for each in readings]
    return *min(grants), min(each.usable for each in readings)


def disk_free(folder: str) -> int:
    """Return the free bytes on the disk of a folder, or of its nearest parent that exists."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.is_dir())).free
