"""The engine on CUDA devices (`make gpu`): the same trajectories as plain PyTorch, with NCCL, side streams and slots.

Worlds of 1, 2 and 3 ranks: one rank a device with NCCL; where devices are too few, all ranks share them and gloo carries the
collectives. Matrix products are in plain fp32 (no TF32), so that a wrong weight cannot hide behind rounding.
"""

from __future__ import annotations

import itertools
import math
import socket
import tempfile
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ftkit
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.engine.streams import CudaStreams
from tests.gpu.one_card import join

pytestmark = pytest.mark.gpu

STEPS = 6
DEVICES = torch.cuda.device_count()
WORLDS = (1, 2, 3)
KINDS = ("parameters", "gradients", "state", "activation_offload")
PLACES = {  # of parameters, gradients, state, activations
    "host": [("device", "device", "host", "device"), ("device", "host", "host", "host"), ("host", "host", "host", "host")],
    "nvme": [("device", "host", "nvme", "device"), ("nvme", "nvme", "nvme", "nvme")],
}
STAGES = [  # stages, and options of stage 3
    *({"stage": stage} for stage in (0, 1, 2)),
    *(
        {"stage": 3, "reshard_after_forward": reshard, "prefetch": prefetch}
        for reshard in (True, False)
        for prefetch in (True, False)
    ),
]
GROUPS = ("stages", *PLACES)
Run = tuple[dict[str, Any], int]
"""Settings, and micro-batches of a step that pass a block one after the other."""


def model() -> LlamaForCausalLM:
    """Return the same small Llama every time, in fp32 on the CPU."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches() -> list[torch.Tensor]:
    """Return the global batches, (6, 32) tokens each: 6 rows divide by 1, 2 and 3 ranks."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 512, (6, 32), generator=generator) for _ in range(STEPS)]


def plain(device: torch.device) -> tuple[list[float], list[float]]:
    """Train in plain PyTorch; return losses and gradient norms."""
    network = model().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for rows in batches():
        loss = network(input_ids=rows.to(device), labels=rows.to(device)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def sharded(comm: Communicator, settings: dict[str, Any], parts: int = 1) -> tuple[list[float], list[float], int]:
    """Train on the engine; return global losses, gradient norms and skipped steps."""
    rank, world, device = comm.rank, comm.world_size, comm.device
    network = model()
    settings = {**settings, "debug": True, "accumulate_in": "unit" if parts > 1 else "step"}
    units = ftkit.shard(network, settings, device=device, comm=comm, accumulation_steps=parts)
    scale = LossScale(2.0**10, dynamic=True) if settings.get("dtype") == "fp16" else None  # no step is skipped
    optimizer = ftkit.ShardedAdamW(units, lr=1e-3, weight_decay=0.1, loss_scale=scale)
    losses, norms = [], []
    for rows in batches():
        share = len(rows) // world
        own = rows[rank * share : (rank + 1) * share].to(device)
        loss = network(input_ids=own, labels=own).loss
        optimizer.scale(loss).backward()
        norms.append(float(optimizer.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(units.comm.sum(loss.detach().float().clone())) / world)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in units.state_dict().values())
    units.tiers.close()
    return losses, norms, optimizer.loss_scale.skipped_steps


def differences(found: list[float], expected: list[float], tolerance: float) -> list[tuple[float, float]]:
    """Return the pairs that differ by more than a relative tolerance."""
    return [pair for pair in zip(found, expected, strict=True) if not math.isclose(*pair, rel_tol=tolerance)]


def runs_of(group: str) -> list[Run]:
    """Return the runs of a group: all stages with blocks recomputed and kept, or all tiers with each kind of update."""
    if group == "stages":
        return [({**stage, "activations": how}, 1) for stage, how in itertools.product(STAGES, ("recompute", "keep"))]
    found = []
    for places, update, parts in itertools.product(PLACES[group], ("now", "deferred"), (1, 2)):
        tiers = {**dict(zip(KINDS, places)), "update": update, "stage": 3, "nvme_dir": tempfile.gettempdir()}
        found.append((tiers | ({"state_host_bytes": 0} if places[0] == "nvme" else {}), parts))
    return found


def check(rank: int, world: int, port: int, group: str) -> None:
    """Train with every setting of a group and in plain PyTorch on this rank. Raise at the end, listing all differences."""
    torch.backends.cuda.matmul.allow_tf32 = False
    comm = join(rank, world, port, DEVICES)
    reference_losses, reference_norms = plain(comm.device)
    failed = []
    bf16 = torch.cuda.get_device_capability(comm.device)[0] >= 8
    for settings, parts in runs_of(group):
        losses, norms, _ = sharded(comm, settings, parts)
        if wrong := differences(losses + norms, reference_losses + reference_norms, 2e-4):
            failed.append((settings, parts, wrong))
        for dtype in ("fp16", "bf16") if bf16 else ("fp16",):
            losses, _, skipped = sharded(comm, {**settings, "dtype": dtype}, parts)
            if skipped or differences(losses, reference_losses, 2e-2):
                failed.append((settings, parts, dtype, skipped, losses))
    if world > 1:
        dist.destroy_process_group()
    assert not failed, "\n".join(map(str, failed))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(rank: int, world: int, port: int) -> None:
    """Compare a sharded model's answers, gathered once and streamed, with the whole model's on this rank; then train on."""
    from ftkit.hf.generate.generation import generate_ids  # here: it imports datasets, the other tests do not

    torch.backends.cuda.matmul.allow_tf32 = False
    comm = join(rank, world, port, DEVICES)
    device = comm.device
    prompts = [rows[: 5 + 3 * number].tolist() for number, rows in enumerate(batches()[0])]
    whole = model().to(device)
    expected, others = {}, {"batch_size": 2, "max_new_tokens": 12, "pad_token_id": 0}
    for temperature in (0.0, 1.0):
        expected[temperature] = generate_ids(whole, prompts, temperature=temperature, **others)
    for places, hold in itertools.product([{}, dict(zip(KINDS, PLACES["nvme"][-1]))], (True, False)):
        network = model()
        settings = {"stage": 3, "debug": True, "nvme_dir": tempfile.gettempdir(), **places}
        units = ftkit.shard(network, settings, device=device, comm=comm)
        optimizer = ftkit.ShardedAdamW(units, lr=0.0)
        for temperature, found in expected.items():
            assert generate_ids(network, prompts, temperature=temperature, hold=hold, **others) == found, settings
            rows = batches()[0].to(device)
            optimizer.scale(network(input_ids=rows, labels=rows).loss).backward()
            assert math.isfinite(optimizer.grad_norm())
            optimizer.step()
            optimizer.zero_grad()
        units.tiers.close()
    if world > 1:
        dist.destroy_process_group()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", WORLDS)
def test_a_sharded_model_answers_as_the_whole_one(world: int) -> None:
    torch.multiprocessing.spawn(answers, (world, free_port()), nprocs=world)


def test_offloaded_state_takes_little_of_the_device() -> None:
    """Parameters and slots stay on the device; masters, moments and gradients do not."""
    device = torch.device("cuda", 0)
    square = torch.ones(64, 64, device=device, dtype=torch.float16, requires_grad=True)
    (square @ square).sum().backward()  # cuBLAS allocates a workspace for each thread that uses it: 32 MiB on a Hopper card
    del square
    before = torch.cuda.memory_allocated(device)
    places = {"gradients": "host", "state": "host", "activation_offload": "host"}
    network = model()
    numel = sum(parameter.numel() for parameter in network.parameters())
    units = ftkit.shard(network, {"stage": 3, "dtype": "fp16", **places}, device=device, comm=Communicator(device))
    optimizer = ftkit.ShardedAdamW(units, lr=1e-3)
    rows = batches()[0].to(device)
    optimizer.scale(network(input_ids=rows, labels=rows).loss).backward()
    optimizer.step()
    units.settle()
    held = torch.cuda.memory_allocated(device) - before
    assert held <= 2 * numel + units.transfer.slot_bytes + (8 << 20), (held, numel)
    assert optimizer.state_bytes() <= 12.1 * numel + 13 * 4096 * 4


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_way_follows_plain_pytorch(group: str, world: int) -> None:
    torch.multiprocessing.spawn(check, (world, free_port(), group), nprocs=world)


def test_bf16_is_refused_where_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    with pytest.raises(ftkit.UserError, match="bf16 needs compute capability"):
        ftkit.shard(model(), {"dtype": "bf16"}, device=torch.device("cuda", 0))


@pytest.mark.clock
def test_a_trace_times_the_work_and_not_its_launch():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device)
    trace = streams.trace
    wide = torch.randn(4096, 4096, device=device)
    (wide @ wide).sum().item()
    trace.start()
    with trace.span("compute", "forward 0"):
        for _ in range(50):
            wide @ wide
    launched_s = time.perf_counter()
    with streams.collectives.run(span="gather 1"):
        wide.clone()
    with trace.span("host update", "update a", host=True):
        pass
    spans = {span.name: span for span in trace.stop()}
    waited_s = time.perf_counter() - launched_s
    work = spans["forward 0"]
    assert work.end_s - work.start_s > 0.5 * waited_s, "the host was done long before the device"
    assert spans["gather 1"].start_s < work.end_s, "another stream does not wait"
    assert spans["update a"].start_s < work.end_s
    assert trace.stop() == []
