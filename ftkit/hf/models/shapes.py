"""What the plan wants to know of a Hugging Face model, and of the memory of this box.

Lines are asked of the engine itself (`partition`), so their elements are exact, whatever the family, adapter or dtype.
What autograd keeps of a block is measured for GPUs (`fake.graph_bytes`). For a CPU, and where a model cannot be
computed without values, it is estimated from the matrices of the widest block: for each token their inputs and outputs,
once each, times shares that were measured with saved-tensor hooks on Llama, Qwen2 and GPT-2 blocks (transformers 5,
SDPA), bf16 and fp32: 1.10 to 1.22 of the sum where the activation is one operation.

It refuses a folder for NVMe that is not there. What it costs: nothing of the model's size; works on the meta device.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ftkit.config.engine import EngineSettings
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.comm.shared_memory import of_other_ranks
from ftkit.engine.core.partition import Group, partition
from ftkit.errors import UserError
from ftkit.hf.models.attention import REPEATED
from ftkit.hf.models.fake import graph_bytes
from ftkit.hf.models.varlen import ATTENTION
from ftkit.plan.attention import Attention
from ftkit.plan.host_memory import MACHINE, HostMemory
from ftkit.plan.limits import Limits
from ftkit.plan.memory import CONTEXT_BYTES, GIB
from ftkit.plan.shape import Line, Shape
from ftkit.spec.strategy import AUTO
from ftkit.spec.tiers import DEVICE, HOST, NVME

logger = logging.getLogger(__name__)

GRAPH_SHARE = (5, 4)
"""Elements that autograd keeps of a block, as a share of the inputs and outputs of its matrices."""

STEPWISE_ACTIVATIONS = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")
"""Activations that transformers computes in several operations, each of which keeps its input."""

STEPWISE_SHARE = (5, 2)
"""Elements that such an activation keeps, as a share of its width. Measured on GPT-2."""

SCORES = 3
"""Attention scores kept where attention is not fused: before and after dropout, and its mask."""

CPU_SHARE = (8, 10)
"""Part of a machine's free RAM that ranks of a CPU run may use together, where no memory is granted by number. Of a
cgroup, which nobody else draws on, they may use all that is free."""

HOST_SHARE = (95, 100)
"""The same of a box with GPUs."""

DEVICE_SHARE = (6, 100)
"""Part of a GPU that is never granted, for fragments of torch's allocator."""

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
    fresh: bool = False,
    checkpoints: int | None = None,
    chunked_loss: bool = False,
) -> Shape:
    """Return what the plan knows of a model.

    Args:
        blocks: (name, module) of the model's blocks.
        dtype: compute dtype; None: each parameter's own.
        sequence_tokens: tokens of one sequence.
        replicated: says which parameters are replicated; see `ftkit.engine.shard.shard`.
        wide: says by name which parameters stay fp32; see `ftkit.engine.shard.shard`.
        cpu: whether ranks compute on the host.
        fresh: whether the weights will be initialised.
        checkpoints: number of checkpoints kept on disk; None: none are saved.
        chunked_loss: see `Shape`.
    """
    groups = partition(model, blocks, dtype=dtype, replicated=replicated, wide=wide)
    widest = max((block for _, block in blocks), key=_linear_elements, default=None)
    text = _text_config(model)
    heads = getattr(text, "num_attention_heads", 0) or 0
    itemsize = (dtype or own_dtype(model)).itemsize
    elements = _linear_elements(widest) if widest is not None else 0
    scores = SCORES * heads * (4 // itemsize if cpu else 1) if widest is not None and _has_scores(text, cpu=cpu) else 0
    if widest is not None and not cpu:
        try:
            kept = graph_bytes(model, widest, sequence_tokens, wide, dtype)
            elements, scores = -(-kept // (sequence_tokens * itemsize)), 0
        except Exception as error:  # of any model that asks for values: the estimate stands in
            logger.warning("the memory that autograd keeps of a block is estimated, not measured: %s", error)
    return Shape(
        blocks=tuple(_lines(groups, "block", name) for name, _ in blocks),
        roots=_lines(groups, "root"),
        replicated=_lines(groups, "replicated"),
        hidden=_hidden(model, text),
        vocabulary=getattr(text, "vocab_size", 0) or 0,
        block_elements=elements,
        score_elements=scores,
        widest_tensor=max((p.numel() for p in (widest or model).parameters()), default=0),
        adapter_numel=ADAPTER_RANK * sum(sum(w.shape) for _, block in blocks for w in _matrices(block)),
        sequence_tokens=sequence_tokens,
        itemsize=itemsize,
        world_size=world_size,
        fresh=fresh,
        peft=isinstance(model, PeftModel),
        checkpoints=checkpoints,
        chunked_loss=chunked_loss,
        attention=None if cpu else fused_attention(text),
        packed=getattr(text, "_attn_implementation", None) == ATTENTION,
    )


def fused_attention(config: Any) -> Attention | None:
    """Return the attention of a model's blocks, None where no fused kernel computes it.

    Args:
        config: configuration of the text model; its `_attn_implementation` is what will be used.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or getattr(config, "_attn_implementation", None) not in ("sdpa", ATTENTION, REPEATED):
        return None
    hidden = getattr(config, "hidden_size", None) or 0
    dim = getattr(config, "head_dim", None) or hidden // heads
    rotated = getattr(config, "qk_rope_head_dim", None)  # latent attention: queries have a rotated part beside the plain one
    if rotated and getattr(config, "qk_nope_head_dim", None):
        dim = rotated + config.qk_nope_head_dim
    value = getattr(config, "v_head_dim", None) or dim
    return Attention(heads, getattr(config, "num_key_value_heads", None) or heads, dim, value)


def limits_here(settings: EngineSettings, device: torch.device, ranks_per_node: int) -> Limits:
    """Return what may be used on this box: what is granted, else what is free less a reserve.

    Args:
        settings: the engine's settings.
        device: compute device of this rank.
        ranks_per_node: number of ranks that share this box.

    Raises:
        UserError: if the NVMe folder is not there, or none is named and something is said of it.
    """
    memory = settings.memory
    own = ranks_per_node * (psutil.Process().memory_info().rss - of_other_ranks())  # counted in the plan's runtime; not free
    cpu = device.type == "cpu"
    usable, source, free = usable_host(CPU_SHARE if cpu else HOST_SHARE)
    host, host_name = usable + own, f"what is free of {source}"
    asked = {"memory.host_gib": memory.host_gib}
    if cpu and memory.device_gib:
        asked["memory.device_gib"] = memory.device_gib * ranks_per_node
    said = min(((int(gib * GIB), name) for name, gib in asked.items() if gib), default=None)
    if said is not None:
        most = free + own  # by number the user may have all that is there
        host, host_name = said if said[0] <= most else (most, f"what is free of {source} ({said[1]} says more)")
    granted, device_name = None, "memory.device_gib"
    if not cpu and memory.device_gib:
        granted = int(memory.device_gib * GIB)
    elif not cpu:
        open_, total = torch.cuda.mem_get_info(device)
        part, all_ = DEVICE_SHARE
        granted, device_name = open_ - total * part // all_ + CONTEXT_BYTES, "what is free"
    if memory.nvme_dir is None and memory.nvme_gib is not None:
        raise UserError("memory.nvme_gib: it is of a drive, and none is named; set memory.nvme_dir to a folder on it")
    if memory.nvme_dir is None and settings.strategy.state_host_bytes not in (AUTO, 0):
        raise UserError("engine.state_host_bytes: it is of a state on NVMe; set memory.nvme_dir to a folder on a drive")
    if memory.nvme_dir is not None and not os.path.isdir(memory.nvme_dir):
        raise UserError(f"memory.nvme_dir: {memory.nvme_dir} is not a folder; make it, or name another")
    if memory.nvme_dir is not None and not os.access(memory.nvme_dir, os.W_OK | os.X_OK):
        raise UserError(f"memory.nvme_dir: {memory.nvme_dir} cannot be written by this user; name another folder")
    nvme = disk_free(memory.nvme_dir)
    if nvme is not None and memory.nvme_gib is not None:
        nvme = min(nvme, int(memory.nvme_gib * GIB))
    return Limits(
        granted,
        host,
        nvme,
        ranks_per_node=ranks_per_node,
        cpu=cpu,
        nvme_dir=memory.nvme_dir,
        names=((DEVICE, device_name), (HOST, host_name), (NVME, "memory.nvme_dir")),
    )


def usable_host(share: tuple[int, int]) -> tuple[int, str, int]:
    """Return the bytes of host memory that may be planned with, which limit says so, and all that is free below it.

    Args:
        share: (part, whole), the share of the machine's free memory that may be planned with; a cgroup's may all be.
    """
    readings = HostMemory.find().read()
    part, whole = share
    if not readings:  # no Linux
        available = psutil.virtual_memory().available
        return available * part // whole, MACHINE, available
    grants = {each.source: each.usable * part // whole if each.source == MACHINE else each.usable for each in readings}
    tightest = min(readings, key=lambda each: grants[each.source])
    return grants[tightest.source], tightest.source, min(each.usable for each in readings)


def common_limits(settings: EngineSettings, comm: Communicator) -> Limits:
    """Return what every rank may use: the least of all boxes, the same on all ranks. A collective."""
    hosts = comm.all(socket.gethostname())
    own = limits_here(settings, comm.device, max(hosts.count(host) for host in hosts))
    told = comm.all(own)
    device, host, nvme = (_least(told, tier) for tier in (DEVICE, HOST, NVME))
    names = tuple((tier, least.name(tier)) for tier, least in ((DEVICE, device), (HOST, host), (NVME, nvme)))
    bytes_ = (device.device_bytes, host.host_bytes, nvme.nvme_bytes)
    return Limits(*bytes_, ranks_per_node=own.ranks_per_node, cpu=own.cpu, nvme_dir=own.nvme_dir, names=names)


def _least(told: list[Limits], tier: str) -> Limits:
    """Return the limits of the rank that has least of a tier; any, if none of them is limited there."""
    sizes = [getattr(each, f"{tier}_bytes") for each in told]
    return told[0] if None in sizes else told[sizes.index(min(sizes))]


def disk_free(folder: str | None) -> int | None:
    """Return the bytes free on the disk of a folder, or of the nearest one above it that exists; None for no folder.

    Raises:
        UserError: if there is none.
    """
    if folder is None:
        return None
    path = os.path.abspath(folder)
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; let memory.nvme_dir name a folder that exists") from error


# --- the model


def own_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's first parameter; fp32 where it has none."""
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)


def _lines(groups: Mapping[Group, list[tuple[str, nn.Parameter]]], kind: str, owner: str | None = None) -> tuple[Line, ...]:
    """Return the flat parameters of a kind, and of an owner if one is given."""
    return tuple(
        Line(sum(parameter.numel() for _, parameter in members), group.dtype.itemsize, group.trained)
        for group, members in groups.items()
        if group.kind == kind and owner in (None, group.owner)
    )


def _matrices(block: nn.Module) -> list[torch.Tensor]:
    """Return the weights that a block's tokens are multiplied with."""
    weights = [_weight_of(module) for module in block.modules() if not isinstance(module, nn.Embedding)]
    return [weight for weight in weights if weight is not None and weight.dim() == 2]


def _weight_of(module: nn.Module) -> Tensor | None:
    """Return a module's weight; a computed one as in eval, where reading it changes nothing (spectral norm)."""
    if not is_parametrized(module, "weight"):
        weight = getattr(module, "weight", None)
        return weight if isinstance(weight, Tensor) else None
    computed = module.get_submodule("parametrizations.weight")
    training = [(each, each.training) for each in computed.modules()]
    try:
        computed.eval()
        with torch.no_grad():
            weight = module.weight
            return weight if isinstance(weight, Tensor) else None
    finally:
        for each, state in training:
            each.training = state


def _linear_elements(block: nn.Module) -> int:
    """Return a token's elements that autograd keeps of a block, attention scores aside."""
    matrices = _matrices(block)
    part, whole = GRAPH_SHARE
    elements = sum(sum(weight.shape) for weight in matrices) * part // whole
    if any(type(module).__name__ in STEPWISE_ACTIVATIONS for module in block.modules()):
        part, whole = STEPWISE_SHARE
        elements += max(max(weight.shape) for weight in matrices) * part // whole
    return elements


def _has_scores(text: Any, *, cpu: bool) -> bool:
    """Whether autograd keeps attention scores: eager attention; on a CPU also dropout, which its fused kernel lacks."""
    if getattr(text, "_attn_implementation", None) == "eager":
        return True
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate")
    return cpu and any((getattr(text, name, 0) or 0) > 0 for name in names)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def _hidden(model: nn.Module, text: Any) -> int:
    return getattr(text, "hidden_size", 0) or max((p.shape[-1] for p in model.parameters() if p.dim() > 1), default=1)
