"""Two measurements on one GPU, parts of `make gpu`:

    python -m tests.gpu.measured peaks FILE NUMBER ...   peak device memory of training, compared with the plan
    python -m tests.gpu.measured overlap FILE            copies between host and device that overlap with computation

Both train a Llama of 1.1B on random tokens (`GPU_CASES` of benchmarks/plan_against_runs.py), and write JSON. As in a run of
a recipe, loss and head are computed by chunks.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

import ftkit
from benchmarks.plan_against_runs import GPU_CASES, Case
from benchmarks.shapes import llama
from ftkit.engine.comm.communicator import Communicator
from ftkit.engine.optim.loss_scale import LossScale
from ftkit.hf.kernels.head import only_loss, usable_loss
from ftkit.hf.sharded_model import ShardedTransformer
from ftkit.plan.memory import DEVICE_RUNTIME, memory
from ftkit.spec.tiers import DEVICE, NVME

CARD = torch.device("cuda", 0)
STEPS = 2
LARGE_BYTES = 24 << 30
"""Memory of a card that holds a case with its state on the device."""
Interval = tuple[float, float]
ON_HOST = 3
"""Index in `GPU_CASES` of the case with parameters, gradients, state and activations on the host."""


Training = tuple[ShardedTransformer, Callable[[], float], Callable[[], None]]


def training(case: Case, device: torch.device, folder: str) -> Training:
    """Return the sharded model of a case, a function that runs a micro-batch and returns its loss, and the update."""
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(llama(case.llama)).to(torch.float16 if case.dtype == "fp16" else torch.float32)
    model = model.cpu()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = {"dtype": case.dtype, **case.engine}
    settings |= {"nvme_dir": folder} if NVME in case.engine.values() else {}
    tokens = case.micro_batch * case.sequence_tokens
    options = {"micro_batch_tokens": tokens, "accumulation_steps": case.accumulation}
    units = ftkit.shard(model, settings, device=device, comm=Communicator(device), **options)
    scale = LossScale(2.0**10, dynamic=True) if case.dtype == "fp16" else None
    optimizer = ftkit.ShardedAdamW(units, lr=1e-5, loss_scale=scale)
    rows = torch.randint(0, model.config.vocab_size, (case.micro_batch, case.sequence_tokens), device=device)

    def micro_batch() -> float:
        with only_loss(model, wanted=True):
            loss = model(input_ids=rows, labels=rows).loss
        optimizer.scale(loss / case.accumulation).backward()
        return loss.item()

    def update() -> None:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return units, micro_batch, update


def peak(case: Case, device: torch.device) -> dict[str, Any]:
    """Train some steps; return losses, and bytes on the device: planned, and at their peak allocated, reserved and used.

    Memory allocated before the model (cuBLAS's workspaces of the main and the backward thread) is part of `reserved` and
    `used` and not of `allocated`.
    """
    on_card, before = device.type == "cuda", 0
    if on_card:
        square = torch.ones(64, 64, device=device, dtype=torch.float16, requires_grad=True)
        (square @ square).sum().backward()
        del square
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        units, micro_batch, update = training(case, device, folder)
        losses = []
        for _ in range(STEPS):
            losses.append([micro_batch() for _ in range(case.accumulation)][-1])
            update()
        units.settle()
        if not losses[-1] < losses[0]:
            raise SystemExit(f"{case} does not train: losses {losses}")
        assert units.plan is not None
        shape = replace(units.plan.shape, chunked_loss=usable_loss(units.model) is not None)
        planned = memory(shape, units.plan.strategy, cpu=not on_card).at(DEVICE, "train")
        found = {"losses": losses, "planned": planned - DEVICE_RUNTIME, "planned_with_runtime": planned}
        if on_card:
            free, total = torch.cuda.mem_get_info()
            reserved = torch.cuda.max_memory_reserved()
            used = total - free - torch.cuda.memory_reserved() + reserved
            found |= {"allocated": torch.cuda.max_memory_allocated() - before, "reserved": reserved, "used": used}
        units.tiers.close()
        return found


def overlap(case: Case, device: torch.device, folder: Path) -> dict[str, float]:
    """Profile two micro-batches; return seconds of copies, of kernels, and of both at once."""
    with tempfile.TemporaryDirectory() as scratch:
        units, micro_batch, update = training(case, device, scratch)
        micro_batch()
        update()
        units.settle()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            micro_batch()
            micro_batch()
        profiler.export_chrome_trace(str(folder / "trace.json"))
        units.tiers.close()
    seconds = beside(json.loads((folder / "trace.json").read_text())["traceEvents"])
    if not seconds["copies_s"] or not seconds["kernels_s"]:
        raise SystemExit(f"the profiler recorded no copies or no kernels: {seconds}")
    return seconds


def beside(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return from a profiler's events: seconds of copies between host and device, of kernels, and of both at once."""
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        over_pcie = event.get("cat") == "gpu_memcpy" and any(each in event["name"] for each in ("HtoD", "DtoH"))
        if over_pcie or event.get("cat") == "kernel":
            (copies if over_pcie else kernels).append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    copies, kernels = united(copies), united(kernels)
    both = _seconds(copies) + _seconds(kernels) - _seconds(united([*copies, *kernels]))
    return {"copies_s": _seconds(copies), "kernels_s": _seconds(kernels), "both_s": both}


def united(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def main(what: str, file: str, *numbers: str) -> None:
    """Measure; write the file after each case."""
    path = Path(file)
    if what == "overlap":
        path.write_text(json.dumps(overlap(GPU_CASES[ON_HOST], CARD, path.parent)))
        return
    found = {}
    for case in (GPU_CASES[int(number)] for number in numbers):
        on_device = "state" not in case.engine
        if CARD.type == "cuda" and on_device and torch.cuda.get_device_properties(CARD).total_memory < LARGE_BYTES:
            continue
        if case.engine.get("state") == NVME:  # each micro-batch moves the gradients over the drive
            case = replace(case, accumulation=1)
        found[str(case)] = peak(case, CARD)
        path.write_text(json.dumps(found))
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
