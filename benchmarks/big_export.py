"""`ftkit export` of a checkpoint that is larger than the memory it gets: a 3B Llama within 3 GiB.

The checkpoint holds fp32 masters and nothing else. It is written here line by line with the pieces and seals of
`ftkit.engine.checkpoint`, so that nobody ever holds the model; its values are known, and some are looked up in what came
out. The export runs in a process of its own, within a memory cgroup (page cache included) where one can be made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cap import memory_group, peak_bytes
from benchmarks.disk import uncached
from benchmarks.run import ROOT
from benchmarks.shapes import llama
from ftkit.engine.checkpoint.manifest import FORMAT, MANIFEST
from ftkit.engine.checkpoint.pieces import Piece, PieceWriter
from ftkit.engine.checkpoint.safetensors import create_file, data_start
from ftkit.engine.checkpoint.sealed import checksum, write_contents, write_sealed

COMMAND = """
import atexit, pathlib, sys
status, peak = pathlib.Path("/proc/self/status"), pathlib.Path(sys.argv.pop(1))
atexit.register(lambda: peak.write_text(status.read_text()))
from ftkit.cli.app import main
main()
"""
"""`ftkit`, leaving behind what the kernel says of its memory: what it tells the parent counts the parent's own."""

CHUNK_NUMEL = 1 << 21
Line = list[tuple[str, tuple[int, ...]]]


@cache
def noise() -> Tensor:
    """Return the values that all tensors are made of."""
    return torch.randn(CHUNK_NUMEL, generator=torch.Generator().manual_seed(17)) * 0.02


def chunks(name: str, numel: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, values in fp32) of a tensor: the same each time, another for each name and place."""
    own = 1 + int(checksum(name.encode())[:4], 16) / 2**16
    for start in range(0, numel, CHUNK_NUMEL):
        yield start, noise()[: min(CHUNK_NUMEL, numel - start)] * (own + start / numel)


def lines_of(config: LlamaConfig) -> dict[str, Line]:
    """Return the tensors of each line: a block's are one, each other tensor is one."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    lines: dict[str, Line] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        line = ".".join(parts[:3]) if parts[1] == "layers" else name.removesuffix(".weight")
        lines.setdefault(line, []).append((name, tuple(parameter.shape)))
    return lines


def write_line(path: Path, tensors: Line, writer: PieceWriter) -> list[Any]:
    """Write one file of masters; return its entry in the manifest."""
    create_file(path, [(name, shape, torch.float32) for name, shape in tensors])
    start = data_start(path)
    with open(path, "rb") as file:
        header = Piece(0, start, checksum(file.read(start)))
    writer.open(path, start)
    for name, shape in tensors:
        for _, values in chunks(name, prod(shape)):
            writer.write(values)
    writer.close()
    writer.settle()
    return [path.stat().st_size, [list(piece) for piece in (header, *writer.pieces[path.name])]]


def write_checkpoint(folder: Path, size: str) -> int:
    """Write a Trainer's checkpoint folder with the masters of a Llama; return its parameters."""
    config = llama(size)
    lines = lines_of(config)
    engine = folder / "ftkit"
    engine.mkdir(parents=True)
    files = {}
    with PieceWriter() as writer:
        for line, tensors in lines.items():
            path = engine / f"{line}.master.safetensors"
            files[path.name] = write_line(path, tensors, writer)
    names = [name for tensors in lines.values() for name, _ in tensors]
    manifest = {
        "format": FORMAT,
        "dtypes": dict.fromkeys(names, "bfloat16"),
        "extra": {},
        "files": files,
    }
    write_sealed(engine / MANIFEST, manifest)
    config.save_pretrained(folder)
    write_contents(folder, apart=("ftkit",))
    return sum(prod(shape) for tensors in lines.values() for _, shape in tensors)


def export(checkpoint: Path, out: Path, cap_bytes: int | None = None) -> dict[str, Any]:
    """Run `ftkit export` in a process of its own; return seconds and peaks.

    Args:
        cap_bytes: of a cgroup for it, page cache included, where this machine lets one be made.
    """
    uncached(checkpoint)
    log, status = out.with_name(out.name + ".log"), out.with_name(out.name + ".status")
    command = [sys.executable, "-c", COMMAND, str(status), "export", str(checkpoint), "-o", str(out), "--dtype", "bf16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:
        group = None
        if cap_bytes is not None:
            try:
                group = stack.enter_context(memory_group(cap_bytes))
            except SystemExit:
                group = None
        if group is not None:
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
        said = stack.enter_context(open(log, "w"))
        began = time.perf_counter()
        done = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        result: dict[str, Any] = {"seconds": time.perf_counter() - began}
        if group is not None:
            result["group_peak_bytes"], result["cap_bytes"] = peak_bytes(group), cap_bytes
    if done.returncode != 0:
        result["error"] = f"exit {done.returncode}: {log.read_text()[-300:]}"
    told = status.read_text().split() if status.exists() else ["VmHWM:", "0"]  # killed: it left none
    result["peak_bytes"] = int(told[told.index("VmHWM:") + 1]) << 10
    result["bytes"] = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return result


def wrong_values(out: Path) -> list[str]:
    """Return the names of tensors in an exported folder whose first values are not what was written."""
    wrong = []
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                view = file.get_slice(name)
                shape = view.get_shape()
                first = next(chunks(name, prod(shape)))[1].bfloat16()
                found = view[: max(1, min(64, shape[0]))].reshape(-1)[: len(first)]
                if not torch.equal(found, first[: len(found)]):
                    wrong.append(name)
    return wrong
