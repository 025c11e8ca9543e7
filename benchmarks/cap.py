"""`make bench-cap`: full fine-tuning of a 2B Llama by two ranks whose process tree may use 6 GiB.

The model is a safetensors folder with random weights. The run is `ftkit finetune` with every kind of tensor on the NVMe
tier. The cap is a memory cgroup (v1 or v2, needs root) and includes page cache. `--peers` also trains growing models with
DDP, FSDP2 and DeepSpeed under the same cap until one fails.

Needs 45 GB of disk at 2B, all of it freed at the end. The result is also written as JSON to runs/bench/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
import yaml
from rich.console import Console
from transformers import LlamaForCausalLM

from benchmarks.run import ROOT, run_once, write_result
from benchmarks.shapes import SHAPES, llama
from ftkit.engine.checkpoint.safetensors import TensorFile, create_file

CGROUPS = Path("/sys/fs/cgroup")
PEERS = ("ddp", "fsdp2", "deepspeed-zero3", "deepspeed-nvme")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="2b", choices=SHAPES)
    parser.add_argument("--cap-gib", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="per sequence; one sequence per rank")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--folder", default=None, help="of model, NVMe tier and output; default: temporary")
    parser.add_argument("--set", action="append", default=[], help="further recipe settings, key.sub=value")
    parser.add_argument("--peers", action="store_true", help="also find the largest model of each peer under the cap")
    return parser.parse_args()


def write_model(folder: Path, size: str) -> int:
    """Write a Llama's folder with random bf16 weights, piece by piece; return the number of parameters."""
    config = llama(size)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = [(name, tuple(p.shape), torch.bfloat16) for name, p in model.named_parameters()]
    create_file(folder / "model.safetensors", tensors)
    with TensorFile(folder / "model.safetensors", writable=True) as file:
        for number, (name, shape, _) in enumerate(tensors):
            random = torch.Generator().manual_seed(number)
            for start in range(0, prod(shape), 1 << 24):
                count = min(1 << 24, prod(shape) - start)
                piece = torch.ones(count) if len(shape) == 1 else torch.randn(count, generator=random) * 0.02
                file.write(name, start, piece.bfloat16())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = ROOT / "data" / "tiny-base" / name
        if source.exists():
            shutil.copy(source, folder)
    return sum(prod(shape) for _, shape, _ in tensors)


def recipe(folder: Path, options: argparse.Namespace) -> dict:
    """Return the recipe of the run: two texts, repeated in each step."""
    words = " ".join(path.name for path in sorted((ROOT / "ftkit").rglob("*.py")))
    rows = [{"text": (f"{text} {words} " * 60)} for text in ("one", "two")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "ranks": 2,
        "model": {"name": str(folder / "model")},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "sequence_tokens": options.tokens,
            "loss_on": "all",
            "long_text": "cut",
        },
        "train": {"batch_tokens": 2 * options.tokens, "epochs": options.steps, "dtype": options.dtype},
        "optimizer": {"lr": 4e-6, "weight_decay": 0.0, "schedule": "constant", "max_grad_norm": 1.0},
        "memory": {"nvme_dir": str(folder / "nvme")},
        "engine": {
            "stage": 3,
            "activations": "recompute",
            "reshard_after_forward": True,
            **dict.fromkeys(("parameters", "gradients", "state"), "nvme"),
            "state_host_bytes": 0,
        },
        "output": {"dir": str(folder / "run")},
    }


@contextmanager
def memory_group(cap_bytes: int) -> Iterator[Path]:
    """Make a memory cgroup with a limit, v1 or v2, and remove it afterwards.

    Raises:
        SystemExit: Neither is writable.
    """
    for parent, limit in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        group = parent / f"ftkit-cap-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(cap_bytes))
        except OSError:
            shutil.rmtree(group, ignore_errors=True)
            if group.exists():
                group.rmdir()
            continue
        try:
            yield group
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:  # its last process is still ending
                    time.sleep(0.2)
        return
    sys.exit("no memory cgroup can be made here (needs root, and cgroup v1 or v2 with a writable memory controller)")


def capped(command: list[str], group: Path, log: Path, seconds: float = 3600) -> int:
    """Run a command in the group; return its exit code."""
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    with open(log, "w") as out:
        done = subprocess.run([*enter, *command], stdout=out, stderr=subprocess.STDOUT, env=environ, timeout=seconds)
    return done.returncode


def peak_bytes(group: Path) -> int:
    """Return the group's peak in bytes, page cache included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def train(folder: Path, options: argparse.Namespace, console: Console) -> dict:
    """Run `ftkit finetune` under the cap; return its figures."""
    folder.joinpath("nvme").mkdir()
    folder.joinpath("model").mkdir()
    began = time.time()
    numel = write_model(folder / "model", options.model)
    console.print(f"model: {numel:,} parameters, written in {time.time() - began:.0f} s", highlight=False)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder, options)))
    command = [sys.executable, "-c", "from ftkit.cli.app import main; main()", "finetune", "--overwrite"]
    command.append(str(folder / "recipe.yaml"))
    command += [word for setting in options.set for word in ("--set", setting)]
    with memory_group(int(options.cap_gib * 2**30)) as group:
        began = time.time()
        code = capped(command, group, folder / "log")
        seconds, peak = time.time() - began, peak_bytes(group)
    lines = folder.joinpath("run", "metrics.jsonl")
    metrics = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    result = {"model": options.model, "parameters": numel, "exit_code": code, "seconds": seconds, "peak_gib": peak / 2**30}
    wanted = ("step", "loss", "grad_norm", "tokens_per_second")
    result["steps"] = [{key: line.get(key) for key in wanted} for line in metrics if "loss" in line]
    if code != 0:
        console.print(folder.joinpath("log").read_text()[-3000:], highlight=False, markup=False)
    else:
        result["saved_bytes"] = sum(path.stat().st_size for path in (folder / "run" / "model").rglob("*") if path.is_file())
    return result


def largest(name: str, options: argparse.Namespace, console: Console) -> str:
    """Return the largest size that a peer trains under the cap, or "none"."""
    found = "none"
    for size in SHAPES:
        fixed = {"batch": 1, "warmup": 0, "steps": 3, "world": 2, "timeout": 600}
        run = argparse.Namespace(**fixed, dtype=options.dtype, tokens=options.tokens)
        with memory_group(int(options.cap_gib * 2**30)) as group:
            run.enter = group
            outcome = run_once(name, size, run)
        if "error" in outcome:
            console.print(f"{name} {size}: {outcome['error'][:150]}", highlight=False, markup=False)
            return found
        console.print(f"{name} {size}: {outcome['step_s']:.1f} s per step", highlight=False)
        found = size
    return found


def main() -> None:
    """Train under the cap, print, and write JSON to runs/bench/."""
    options = parse()
    console = Console(width=120)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="ftkit-cap-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = train(folder, options, console)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    for step in result["steps"]:
        rate = step["tokens_per_second"]
        took = f"{2 * options.tokens / rate:.1f} s" if rate else "?"
        console.print(f"step {step['step']}: loss {step['loss']:.4f}, norm {step['grad_norm']:.3f}, {took}", highlight=False)
    console.print(
        f"{result['parameters'] / 1e9:.2f}B under {options.cap_gib} GiB: exit {result['exit_code']}, "
        f"{result['seconds']:.0f} s in all, peak {result['peak_gib']:.2f} GiB (page cache included)",
        highlight=False,
    )
    if options.peers:
        result["peers"] = {name: largest(name, options, console) for name in PEERS}
        for name, size in result["peers"].items():
            console.print(f"{name}: largest under the cap: {size}", highlight=False)
    write_result("cap", {"options": vars(options), **result}, console)


if __name__ == "__main__":
    main()
