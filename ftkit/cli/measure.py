"""`ftkit measure`: the rates of this machine as a hardware profile for `ftkit plan`.

All ranks measure at the same time, so each figure is one rank's rate while all ranks work:

    compute      a Llama block of each hidden size in `HIDDEN`: forward, then recomputed forward and backward
    link         an all-gather and a reduce-scatter of `LINK_NUMEL` elements by the engine's communicator
    pcie         copies from and to pinned memory at the same time, GPUs only
    dram, hbm    AdamW over fp32 state: in host memory by the engine's loops, on GPUs by torch
    nvme         the drive of a folder, as `ftkit doctor --nvme-dir` measures it

Cost: a minute or two, all ranks busy, 1 GiB per rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ftkit.config.wording import counted
from ftkit.engine.comm.communicator import GROUP_TIMEOUT, Communicator
from ftkit.engine.core.dtypes import DTYPES
from ftkit.engine.kernels.host_loops import HostLoops
from ftkit.launch.ranks import Stop
from ftkit.output.run_folder import write
from ftkit.plan.memory import GIB
from ftkit.spec.update_rules import ADAMW

HIDDEN = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 5120)}
TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens of a block's batch, in sequences of at most `SEQUENCE`."""
SEQUENCE = 1024
LINK_NUMEL = 1 << 22
ADAM_NUMEL = 1 << 23
COPY_BYTES = 256 << 20
SECONDS = 1.5
"""Duration of a measurement."""


def rank(stop: Stop, dtype: str) -> dict[str, Any]:
    """Measure as one of the ranks, in fp32, bf16 or fp16. Return the rates of the slowest rank."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT)
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", stop.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    comm = Communicator(device)
    kind = DTYPES[dtype]
    rates: dict[str, Any] = {"compute": {size: _compute(size, comm, kind) for size in HIDDEN[device.type]}}
    rates |= _link(comm, kind)
    host = _host_adam(comm)
    rates["dram"] = host * comm.world_size
    rates["hbm"] = _device_adam(comm) if cuda else host
    rates["pcie"] = _copies(comm) if cuda else host
    comm.barrier()
    dist.destroy_process_group()
    return rates


def write_profile(path: Path, rates: dict[str, Any], dtype: str, nvme: dict[str, Any] | None, ranks: int) -> None:
    """Write the profile of this machine as YAML.

    Args:
        path: File to write.
        rates: Result of `rank`.
        dtype: Compute dtype of the rates: fp32, bf16 or fp16.
        nvme: Result of `ftkit.cli.probe.measure_drive`. None if no drive was measured.
        ranks: Ranks that measured at the same time.
    """
    gpus = torch.cuda.device_count()
    card = torch.cuda.get_device_properties(0) if gpus else None
    if nvme is not None:
        rates = rates | {"nvme_read": nvme["read_bytes_per_s"], "nvme_write": nvme["write_bytes_per_s"]}
    found = {
        "gpus": gpus,
        "gpu": card.name if card else "",
        "device_gib": round(card.total_memory / GIB, 2) if card else 0,
        "host_gib": round(psutil.virtual_memory().total / GIB, 1),
        "nvme_gib": round(nvme["free_bytes"] / GIB) if nvme is not None else 0,
        "dtype": dtype,
        "ranks": ranks,
        "rates": rates,
    }
    header = f"# measured by ftkit measure with {counted(ranks, 'rank')}; for ftkit plan --hardware FILE"
    write(path, f"{header}\n{yaml.safe_dump(found, sort_keys=False)}")


# --- the figures


def _timed(comm: Communicator, work: Callable[[], object]) -> float:
    """Return the median seconds of one `work` on the slowest rank. All ranks repeat it equally often, for `SECONDS`."""

    def once() -> float:
        comm.barrier()
        began = time.perf_counter()
        work()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    count = int(comm.same(max(3, int(SECONDS / max(once(), 1e-6)))))
    return max(comm.all(statistics.median(once() for _ in range(min(count, 200)))))


def _compute(hidden: int, comm: Communicator, dtype: torch.dtype) -> float:
    """Return operations per second of a block, recomputation included."""
    inner = hidden * 8 // 3 // 32 * 32
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=max(hidden // 64, 1),
        num_key_value_heads=max(hidden // 64, 1),
        vocab_size=8,
    )
    with torch.device(comm.device):
        model: Any = LlamaModel(config)
    model.to(dtype)
    tokens = TOKENS[comm.device.type]
    sequence = min(SEQUENCE, tokens)
    rows = torch.zeros(tokens // sequence, sequence, dtype=torch.long, device=comm.device)
    block: nn.Module = model.layers[0]
    places = torch.arange(sequence, device=comm.device)[None]
    given = model.embed_tokens(rows).detach()
    turns = model.rotary_emb(given, places)

    def call(states: Tensor) -> Tensor:
        made = block(states, position_embeddings=turns)
        return made if isinstance(made, Tensor) else made[0]

    def once() -> None:
        with torch.no_grad():
            call(given)
        made = call(given.requires_grad_())
        made.backward(torch.ones_like(made))
        block.zero_grad()
        given.grad = None

    weights = sum(each.numel() for each in block.parameters())
    forward = tokens * (2.0 * weights + 4.0 * sequence * hidden)
    return 4 * forward / _timed(comm, once)


def _link(comm: Communicator, dtype: torch.dtype) -> dict[str, float]:
    """Return bytes per second of gathers and reductions, and the latency of a small one."""
    world = comm.world_size
    if world == 1:
        return {"link": 1e12, "collective_s": 0.0}  # nothing is sent

    def pair(numel: int) -> Callable[[], None]:
        shard = torch.zeros(numel, dtype=dtype, device=comm.device)
        shared = comm.share(world * shard.nbytes)  # CPU ranks share the slots of stage 3
        full = torch.zeros(world * numel, dtype=dtype, device=comm.device) if shared is None else shared.view(dtype)

        def once() -> None:
            comm.all_gather(full, full[comm.rank * numel : (comm.rank + 1) * numel])
            comm.reduce_scatter_mean(shard, full)

        return once

    moved = 2 * LINK_NUMEL * dtype.itemsize * (world - 1)
    latency = _timed(comm, pair(16)) / 2
    return {"link": moved / max(_timed(comm, pair(LINK_NUMEL)) - 2 * latency, 1e-9), "collective_s": latency}


def _host_adam(comm: Communicator) -> float:
    """Return bytes per second of host memory in a rank's optimizer update."""
    adam = HostLoops(torch.get_num_threads())
    master, gradient, first, second = (torch.zeros(ADAM_NUMEL) for _ in range(4))
    numbers = {"factor": 1.0, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    seconds = _timed(comm, lambda: adam.adamw(master, gradient, first, second, None, **numbers))  # type: ignore[arg-type]  # `step` is an int
    return ADAMW.traffic_bytes * ADAM_NUMEL / seconds


def _device_adam(comm: Communicator) -> float:
    """Return bytes per second of GPU memory in an optimizer update."""
    parameter = nn.Parameter(torch.zeros(ADAM_NUMEL, device=comm.device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return ADAMW.traffic_bytes * ADAM_NUMEL / _timed(comm, optimizer.step)


def _copies(comm: Communicator) -> float:
    """Return bytes per second from pinned memory to a GPU, while as many go back."""
    up, down = (torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    here, there = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=comm.device) for _ in range(2))
    side = torch.cuda.Stream()

    def once() -> None:
        here.copy_(up, non_blocking=True)
        with torch.cuda.stream(side):
            down.copy_(there, non_blocking=True)

    return COPY_BYTES / _timed(comm, once)
